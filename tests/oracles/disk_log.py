"""The disk log in plain Python, written from `docs/internals/formats.md`: twin of `disk/recover.cpp`. Only reads."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path

from tests.oracles.crc32c import crc32c_fast as crc32c

BLOCK = 4096
SEGMENT = struct.Struct("<8sHHIQQQII")
FRAME = struct.Struct("<8sHHIIIQQQQQQQ32s36sI")
ENTRY = struct.Struct("<32sQIIH6s")
TABLE_END = struct.Struct("<8sIIQQQQ8sII")
assert SEGMENT.size == 48 and FRAME.size == 152 and ENTRY.size == 56 and TABLE_END.size == 64

VERSION = 2
RECORD, TOMBSTONES, CLEAR, SKIP = 1, 2, 3, 4


@dataclass
class Frame:
    """A frame, or the row of a frame in a table."""

    path: Path
    offset: int
    sequence: int
    kind: int
    key: bytes
    record_bytes: int
    tombstones: list[bytes]


def blocks(count: int) -> int:
    """Round a length up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def read_segment(path: Path) -> list[Frame]:
    """Return the valid frames of one segment, regardless of other segments."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # it has just been deleted
        return []
    if len(data) < BLOCK:  # its header has not been written yet
        return []
    magic, version, flags, number, generation, length, _, zero, crc = SEGMENT.unpack_from(data)
    if (magic, version, flags, zero) != (b"KVSEGMNT", VERSION, 0, 0) or crc != crc32c(data[:44]):
        return []
    if path.name != f"{number:08x}.seg" or length != len(data):
        return []
    table = _table(path, data, number, generation)
    return table if table is not None else _chain(path, data, number, generation)


def _table(path: Path, data: bytes, number: int, generation: int) -> list[Frame] | None:
    magic, segment, count, of_generation, _, _, _, _, entries_crc, crc = TABLE_END.unpack_from(
        data, len(data) - 64
    )
    if (
        magic != b"KVTABLE1"
        or crc != crc32c(data[-64:-4])
        or (segment, of_generation) != (number, generation)
    ):
        return None
    start = len(data) - blocks(count * 56 + 64)
    if entries_crc != crc32c(data[start : start + count * 56]):
        return None
    frames = []
    for i in range(count):
        key, sequence, block, record_bytes, kind, _ = ENTRY.unpack_from(data, start + 56 * i)
        dead = [key] if kind == TOMBSTONES else []
        frames.append(Frame(path, block * BLOCK, sequence, kind, key, record_bytes, dead))
    return frames


def _chain(path: Path, data: bytes, number: int, generation: int) -> list[Frame]:
    frames: list[Frame] = []
    offset, last = BLOCK, 0
    while offset + BLOCK <= len(data):
        (
            magic,
            kind,
            flags,
            count,
            segment,
            _,
            of_generation,
            _,
            sequence,
            _,
            _,
            _,
            record_bytes,
            key,
            _,
            crc,
        ) = FRAME.unpack_from(data, offset)
        keys = data[offset + 152 : offset + 152 + 32 * count]
        if (
            magic != b"KVFRAME1"
            or flags != 0
            or kind not in (RECORD, TOMBSTONES, CLEAR, SKIP)
            or count > 123
            or crc != crc32c(data[offset : offset + 148] + keys)
            or segment != number
            or (of_generation == generation and sequence <= last)
        ):
            offset += BLOCK
            continue
        if of_generation != generation:
            break
        dead = [keys[32 * i : 32 * i + 32] for i in range(count)]
        frames.append(Frame(path, offset, sequence, kind, key, record_bytes, dead))
        last = sequence
        offset += BLOCK + blocks(record_bytes)
    return frames


def used_bytes(folder: Path) -> int:
    """Return the summed lengths of all segments, which may come and go meanwhile."""
    total = 0
    for path in folder.glob("*.seg"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def live(folder: Path) -> dict[bytes, Frame]:
    """Return the records of a log whose writes are all synced."""
    frames = [frame for path in folder.glob("????????.seg") for frame in read_segment(path)]
    found: dict[bytes, Frame] = {}
    for frame in sorted(frames, key=lambda frame: frame.sequence):
        if frame.kind == RECORD:
            found[frame.key] = frame
        elif frame.kind == CLEAR:
            found.clear()
        for key in frame.tombstones:
            found.pop(key, None)
    return found
