"""The pool's index file in plain Python, written from `docs/formats.md` alone: a reader beside `pool/index.cpp`."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tests.oracles.crc32c import crc32c_fast as crc32c

PAGE = 4096
HEADER = struct.Struct("<8sII16sQQQQ")
LIVE = struct.Struct("<QQQQQ24s64Q")
ROW = struct.Struct("<Q16s16sQQQ")
HOT = struct.Struct("<Q32sQQQ")
COLD = struct.Struct("<16sQ16sQQQ")
assert HEADER.size == 64 and LIVE.size == 640 - 64
assert ROW.size == HOT.size == COLD.size == 64

VERSION = 4
ROWS, BUCKETS_AT = 1024, 69_632
FREE, RESERVED, READY, UNVERIFIED, QUARANTINED = range(5)
NO_OWNER = 0xFFFF


@dataclass
class Entry:
    """Both halves of an entry."""

    number: int
    changing: bool
    state: int
    key: bytes
    offset: int
    length: int
    generation: int
    parent: int | None
    rows: int
    stamp: int
    identity: bytes
    owner: int
    tenant: int
    tail: bool


def up(value: int) -> int:
    """Rounded up to whole pages."""
    return -(-value // PAGE) * PAGE


class PoolIndex:
    """An index file's bytes, none of which changes meanwhile. ValueError for anything but an index of this version."""

    def __init__(self, data: bytes) -> None:
        if len(data) < PAGE:
            raise ValueError(f"{len(data)} bytes are no index")
        magic, version, crc, self.pool_id, self.extents_bytes, capacity, lines, zero = HEADER.unpack_from(
            data
        )
        if (magic, version, zero) != (b"KVINDEX1", VERSION, 0):
            raise ValueError(f"{magic!r}, version {version}")
        if crc != crc32c(data[:12] + bytes(4) + data[16:64]):
            raise ValueError("static_crc")
        if lines != max(8, -(-capacity // 4)):
            raise ValueError(f"{lines} bucket lines for {capacity} entries")
        self.capacity, self.lines = capacity, lines
        self._hot_at = up(BUCKETS_AT + 64 * lines)
        self._cold_at = up(self._hot_at + 64 * capacity)
        if len(data) != up(self._cold_at + 64 * capacity):
            raise ValueError(f"{len(data)} bytes")
        self._data = data
        live = LIVE.unpack_from(data, 64)
        self.epoch, self.heartbeat_ns, self.flags, self.slab_bytes, self.entries_touched = live[:5]
        self.slab_table = live[6:]

    def runs(self) -> list[tuple[int, int, int]]:
        """(first slab, slabs, bytes of each extent) of each run."""
        found = []
        for slab, word in enumerate(self.slab_table):
            if word >> 48 & 1 and word >> 40 & 0xFF == 0:
                found.append((slab, word >> 32 & 0xFF, (word & 0xFFFFFFFF) * PAGE))
        return found

    def row(self, number: int) -> tuple[int, bytes, bytes, int, int, int]:
        """claimed, session, group, epoch, pid, flags."""
        return ROW.unpack_from(self._data, PAGE + 64 * number)

    def entry(self, number: int) -> Entry:
        head, key, offset, size, parent = HOT.unpack_from(self._data, self._hot_at + 64 * number)
        rows, stamp, identity, owner, tenant, tail = COLD.unpack_from(self._data, self._cold_at + 64 * number)
        return Entry(
            number=number,
            changing=bool(head & 1),
            state=head >> 32 & 0xFF,
            key=key,
            offset=offset,
            length=size & 0xFFFFFFFF,
            generation=size >> 32,
            parent=None if parent == 0 else parent - 1,
            rows=int.from_bytes(rows, "little"),
            stamp=stamp,
            identity=identity,
            owner=owner,
            tenant=tenant,
            tail=tail == 1,
        )

    def find(self, key: bytes) -> Entry | None:
        """The entry of the key, in whatever state, as a lookup finds it."""
        word = int.from_bytes(key[:8], "little")
        home = (word % (1 << 32)) * self.lines >> 32
        for step in range(self.probe_length(home) + 1):
            for slot in self._slots((home + step) % self.lines):
                number = (slot & 0x7FFFFFFF) - 1
                if slot >> 32 != word >> 32 or not 0 <= number < self.capacity:
                    continue
                entry = self.entry(number)
                if entry.key == key and not entry.changing:
                    return entry
        return None

    def probe_length(self, line: int) -> int:
        return sum((slot >> 31 & 1) << bit for bit, slot in enumerate(self._slots(line)[:3]))

    def _slots(self, line: int) -> tuple[int, ...]:
        return struct.unpack_from("<8Q", self._data, BUCKETS_AT + 64 * line)
