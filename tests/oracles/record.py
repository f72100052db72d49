"""The record format in plain Python, written from `docs/internals/formats.md` alone: the twin of `record.cpp`."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tests.oracles.crc32c import crc32c_fast as crc32c

OUTER = struct.Struct("<8sHHI32s32s8sQIIQ140sI")
INNER = struct.Struct("<8sHHIQQ32s32s32s32sI88sI")
SECTION = struct.Struct("<QII")
assert OUTER.size == 256 and INNER.size == 256 and SECTION.size == 16


@dataclass
class Record:
    """The values of a record from which all its bytes follow."""

    key: bytes
    identity: bytes
    slice_digest: bytes
    parent_key: bytes
    chunk_tokens: int
    created_unix_ms: int
    sections: list[bytes] = field(default_factory=list)


def header_bytes(section_count: int) -> int:
    """Return the offset at which the payload begins."""
    return -(-(512 + 16 * section_count) // 4096) * 4096


def build(record: Record, *, inner_flags: int = 0) -> bytes:
    """Return the bytes of a record with an empty codec chain."""
    payload = b"".join(record.sections)
    start = header_bytes(len(record.sections))
    table, offset = b"", 0
    for section in record.sections:
        table += SECTION.pack(offset, len(section), crc32c(section))
        offset += len(section)
    inner = INNER.pack(
        b"KVCHUNK1", 1, inner_flags, len(record.sections), start, len(payload), record.key, record.identity,
        record.slice_digest, record.parent_key, record.chunk_tokens, bytes(88), 0,
    )  # fmt: skip
    inner = inner[:-4] + struct.pack("<I", crc32c(inner[:-4] + table))
    outer = OUTER.pack(
        b"KVSTRATA", 1, 0, start, record.key, record.identity, bytes(8), len(payload), crc32c(payload), 0,
        record.created_unix_ms, bytes(140), 0,
    )  # fmt: skip
    outer = outer[:-4] + struct.pack("<I", crc32c(outer[:-4]))
    return (outer + inner + table).ljust(start, b"\0") + payload


def parse(data: bytes) -> Record | None:
    """Return the record in `data`, None for an invalid one. Bytes after the record are ignored."""
    if len(data) < 512:
        return None
    (magic, version, flags, start, key, identity, codecs, stored, stored_crc, zero, created, zeros, crc) = (
        OUTER.unpack(data[:256])
    )
    if (magic, version, flags, codecs, zero, zeros) != (b"KVSTRATA", 1, 0, bytes(8), 0, bytes(140)):
        return None
    if crc != crc32c(data[:252]):
        return None
    (magic, version, flags, count, offset, total, key2, identity2, digest, parent, tokens, zeros, crc) = (
        INNER.unpack(data[256:512])
    )
    if (magic, version, flags, zeros, key2, identity2) != (b"KVCHUNK1", 1, 0, bytes(88), key, identity):
        return None
    if not 1 <= count <= 65536 or start != header_bytes(count) or offset != start or total != stored:
        return None
    table_end = 512 + 16 * count
    if len(data) < start + total or crc != crc32c(data[256:508] + data[512:table_end]):
        return None
    if any(data[table_end:start]) or stored_crc != crc32c(data[start : start + total]):
        return None
    sections, at = [], 0
    for row_offset, length, crc in SECTION.iter_unpack(data[512:table_end]):
        section = data[start + at : start + at + length]
        if row_offset != at or length == 0 or len(section) != length or crc != crc32c(section):
            return None
        sections.append(section)
        at += length
    if at != total:
        return None
    return Record(key, identity, digest, parent, tokens, created, sections)
