"""A real pool with a worker that stores records in it, for tests of code that moves chunks between L1 and adapters."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence

from kvstrata.clock import SystemClock
from kvstrata.native import core
from kvstrata.native.core import Pool
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.testing.strategies import IDENTITY, payload_of, record_length, section_lengths
from kvstrata.types import unpack_extents
from tests.harness.validation import validate

SIZE = 50_000
RECORD = record_length(SIZE)
L1_BYTES = 64 * 57_344  # room for about 64 records
LATER_S = 600.0
CLOCK = SystemClock()


def chain(name: str, n_chunks: int, n_slices: int = 1) -> list[bytes]:
    """Return the storage keys of a prompt, chunk-major."""
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(n_chunks * n_slices)]


class L1:
    """A pool, and the row of one worker that stores records in it and reads them."""

    def __init__(self, extents_bytes: int = L1_BYTES, policy: str = "VALUE") -> None:
        fds = [os.memfd_create(name) for name in ("index", "extents")]
        self.pool = Pool.create(*fds, extents_bytes=extents_bytes, entry_capacity=1024, policy=policy)
        for fd in fds:
            os.close(fd)
        self.row = self.pool.claim_row(b"s" * 16, b"g" * 16, os.getpid())

    def store(
        self,
        keys: list[bytes],
        n_slices: int = 1,
        *,
        identity: bytes = IDENTITY,
        first: int = 0,
        size: int = SIZE,
        tenant: int = 1,
    ) -> list[bytes]:
        """Write chunks from number `first` on, as a worker does; return the keys of the chunks that became visible."""
        stored: list[bytes] = []
        for s in range(n_slices):
            mine = keys[s::n_slices]
            for i in range(first, len(mine)):
                parent = mine[i - 1] if i else b""
                ticket, outcomes, packed = self.pool.reserve(
                    mine[i], parent, record_length(size), self.row, identity, tenant
                )
                if outcomes[0] != ReserveOutcome.RESERVED:
                    continue
                [extent] = unpack_extents(packed)
                self.write(mine[i], extent.offset_bytes, identity, size)
                assert self.pool.commit(ticket, [0]) == bytes([CommitOutcome.COMMITTED])
                stored.append(mine[i])
        return stored

    def write(self, key: bytes, offset: int, identity: bytes, size: int = SIZE) -> None:
        address, length = self.pool.extents_address + offset, record_length(size)
        payload = payload_of(key, size)
        ctypes.memmove(address + length - size, payload, size)
        spec = core.RecordSpec(key, identity, bytes(32), bytes(32), 256)
        core.seal_record(address, length, spec, section_lengths(size))

    def read(self, key: bytes) -> bytes | None:
        """Return the payload of a visible record, None for an absent one."""
        hold = self.pool.hold(key)
        if hold is None:
            return None
        with hold, hold.view() as view:
            assert core.verify_record(hold.address, hold.length, key) == 0
            return bytes(view[-SIZE:])

    def has(self, *keys: bytes) -> bool:
        return all(self.read(key) == payload_of(key, SIZE) for key in keys)

    def lose(self, keys: Sequence[bytes]) -> None:
        """Remove these records, children first."""
        for key in reversed(keys):
            self.pool.remove(key)

    def nothing_in_use(self) -> None:
        """Assert that no reservation, hold or quarantine is left and that the pool is sound."""
        stats = self.pool.stats()
        assert stats["holds"] == 0
        assert stats["reservations"] == 0
        assert stats["pinned_bytes"] == 0
        assert stats["bytes"]["reserved"] == 0
        assert stats["bytes"]["quarantined"] == 0
        validate(self.pool)
