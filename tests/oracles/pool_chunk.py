"""A chunk as the model of the pool (tests/oracles/pool.py) knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.types import Extent

PAGE = 4096


def round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass
class Chunk:
    """An extent that is not free; the index has its `key` unless it is quarantined."""

    key: bytes
    extent: Extent
    state: str
    parent: bytes | None
    tenant: int
    owner: int | None = None
    """The row that is charged for it: while it is reserved, and while it is quarantined after that."""
    content: bytes | None = field(default=None, repr=False)
    """The record; set by the commit."""
    tail_bytes: int = 0
    """Size of a tail's extent: that of a chunk; 0 if this is no tail."""
    sound: bool = True
    """Whether the bytes are still those of the commit (tests damage them)."""
    leases: dict[int, int] = field(default_factory=dict)
    """How often each ticket leases it."""
    recorded_rows: set[int] = field(default_factory=set)
    """Rows that have had a lease since it last had none. After a restart the pool may wait for all of them."""
    holds: set[int] = field(default_factory=set)
    old_readers: set[int] = field(default_factory=set)
    old_writers: set[int] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return self.tail_bytes or round_up(self.extent.length_bytes)

    @property
    def span(self) -> tuple[int, int]:
        return self.extent.offset_bytes, self.extent.offset_bytes + self.bytes

    @property
    def in_use(self) -> bool:
        return (
            self.state in ("reserved", "quarantined")
            or bool(self.leases)
            or bool(self.holds)
            or bool(self.old_readers)
            or bool(self.old_writers)
        )
