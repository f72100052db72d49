"""A segment's two files without a server, and numbered records that are stored in the pool in them."""

from __future__ import annotations

import hashlib
import os
from typing import Self

from kvstrata.native.core import Pool, RecordSpec, seal_record
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.types import KEY_BYTES, Extent, unpack_extents

PAGE = 4096
RECORD = 2 * PAGE
IDENTITY = hashlib.sha256(b"identity").digest()


class Files:
    """The two files of a segment; makes the pool in them."""

    def __init__(self) -> None:
        self.index = os.memfd_create("index", os.MFD_CLOEXEC)
        self.extents = os.memfd_create("extents", os.MFD_CLOEXEC)

    def create(self, extents: int = 64, **more: object) -> Pool:
        options = {"extents_bytes": extents * RECORD, "entry_capacity": 128, **more}
        return Pool.create(self.index, self.extents, **options)  # type: ignore[arg-type]

    def adopt(self) -> Pool:
        return Pool.adopt(self.index, self.extents, max_session_share=2)

    def close(self) -> None:
        os.close(self.index)
        os.close(self.extents)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key(number: int, chunk: int = 0) -> bytes:
    return hashlib.sha256(b"%d.%d" % (number, chunk)).digest()


def chain(number: int, chunks: int) -> bytes:
    return b"".join(key(number, chunk) for chunk in range(chunks))


def seal(pool: Pool, extent: Extent, name: bytes) -> None:
    spec = RecordSpec(name, IDENTITY, bytes(32), b"", 256)
    address = pool.extents_address + extent.offset_bytes
    seal_record(address, extent.length_bytes, spec, [extent.length_bytes - PAGE])


def store(
    pool: Pool, keys: bytes, row: int = 0, *, parent: bytes = b"", size: int = RECORD, sealed: bool = True
) -> int:
    """Store chunks; return how many of them the pool has now. Without `sealed` the extents are never written to."""
    ticket, outcomes, packed = pool.reserve(keys, parent, size, row, IDENTITY)
    indices = [i for i, outcome in enumerate(outcomes) if outcome == ReserveOutcome.RESERVED]
    for i in indices if sealed else ():
        seal(pool, unpack_extents(packed)[i], keys[KEY_BYTES * i : KEY_BYTES * (i + 1)])
    if ticket:
        assert set(pool.commit(ticket, indices, check=sealed)) == {CommitOutcome.COMMITTED}
    return len(indices) + outcomes.count(ReserveOutcome.PRESENT)
