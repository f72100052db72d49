"""Changes stored KV in a pool's extents file behind the server's back, for tests that such changes are noticed."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Any

from kvstrata.native.copying import buffer_address
from kvstrata.native.record import RecordError, RecordSpec, record_header, seal_record

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
        """Unmap the file."""
        self._map.close()
