"""Records that are changed behind the server's back, forged, or soft enough for a codec."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Any

from kvstrata.native.core import (
    RecordError,
    RecordSpec,
    buffer_address,
    crc32c,
    record_bytes,
    record_header,
    seal_record,
    storage_keys,
)
from kvstrata.testing.strategies import watched
from kvstrata.tiers.base import Item
from tests.harness.rpc_client import CHUNK_TOKENS, SECTIONS, RpcClient

MAGIC = b"KVSTRATA"
ALIGNMENT_BYTES = 4096


class Extents:
    """The records in a pool's extents file. Close it before the pool is removed."""

    def __init__(self, segment_dir: Path) -> None:
        with open(segment_dir / "extents", "r+b") as file:
            self._map = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        self._base = buffer_address(self._map, writable=True)

    def records(self) -> dict[int, Any]:
        """Return the header of every whole record by the record's offset, including records in freed extents."""
        found = {}
        at = self._map.find(MAGIC)
        while at >= 0:
            if at % ALIGNMENT_BYTES == 0:
                try:
                    found[at] = record_header(self._base + at, len(self._map) - at)
                except RecordError:
                    pass
            at = self._map.find(MAGIC, at + 1)
        return found

    def flip_a_byte(self, offset: int, header: Any) -> None:
        """Flip a bit of the byte in the middle of the payload."""
        at = offset + header.header_bytes + header.payload_bytes // 2
        self._map[at] ^= 0x40

    def replace_payload(self, offset: int, header: Any, seed: int) -> None:
        """Write another payload with matching checksums, so that no verification can notice the change."""
        start = offset + header.header_bytes
        # Small finite bf16 numbers: from these a model computes finite results.
        noise = bytearray(random.Random(seed).randbytes(header.payload_bytes))
        noise[1::2] = bytes((byte & 0x80) | 0x3E for byte in noise[1::2])
        self._map[start : start + header.payload_bytes] = bytes(noise)
        spec = RecordSpec(
            header.key, header.identity, header.slice_digest, header.parent_key, header.chunk_tokens
        )
        lengths = [length for _, length, _ in header.sections]
        seal_record(self._base + offset, header.header_bytes + header.payload_bytes, spec, lengths)

    def close(self) -> None:
        self._map.close()


def forged_record(
    client: RpcClient, root: bytes, chain_key: bytes, fill: bytes, sections: list[int] = SECTIONS
) -> bytes:
    """Make a sound plain record of this client's slice whose payload repeats `fill`."""
    assert client.slice is not None
    digest = client.slice.digest()
    length = record_bytes(len(sections), sum(sections))
    place = mmap.mmap(-1, length)
    start = length - sum(sections)
    place[start:] = (fill * (sum(sections) // len(fill) + 1))[: sum(sections)]
    spec = RecordSpec(storage_keys(root, chain_key, digest), root, digest, bytes(32), CHUNK_TOKENS)
    seal_record(buffer_address(place, writable=True), length, spec, list(sections))
    return place[:]


def resealed(record: bytes) -> bytes:
    """Make the checksums of the stored payload and of the outer header right again."""
    sealed = bytearray(record)
    start = int.from_bytes(sealed[12:16], "little")
    sealed[88:96] = (len(sealed) - start).to_bytes(8, "little")
    sealed[96:100] = crc32c(bytes(sealed[start:])).to_bytes(4, "little")
    sealed[252:256] = crc32c(bytes(sealed[:252])).to_bytes(4, "little")
    return bytes(sealed)


def renamed(record: bytes, key: bytes) -> bytes:
    """Give a record another key in both headers, with checksums that are right."""
    moved = bytearray(record)
    moved[16:48] = moved[288:320] = key
    count = int.from_bytes(moved[268:272], "little")
    inner = crc32c(bytes(moved[512 : 512 + 16 * count]), crc32c(bytes(moved[256:508])))
    moved[508:512] = inner.to_bytes(4, "little")
    return resealed(bytes(moved))


_EXPONENTS = bytes((0x3E, 0x3F, 0xBE, 0xBF)[i % 4] for i in range(256))


def soft_payload(seed: bytes, length: int) -> bytes:
    """Return bytes like bf16 numbers with random mantissas and few exponents."""
    noise = random.Random(seed)
    payload = bytearray(noise.randbytes(length))
    payload[1::2] = noise.randbytes(length // 2).translate(_EXPONENTS)
    return bytes(payload)


def loaded_record(item: Item) -> bytes:
    """Return the whole record that a load left in the item's extent."""
    return watched(item).bytes()
