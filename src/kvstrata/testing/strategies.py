"""Test records, holds that detect misuse of their bytes, and hypothesis strategies for both."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from hypothesis import strategies as st

from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.core import ExtentsMap, RecordSpec, record_bytes, seal_record
from kvstrata.tiers.base import AdapterContext, Ask, Item, Outcome, Presence, StorageAdapter

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

IDENTITY = hashlib.sha256(b"identity of the contract suite").digest()
POISON = 0xDB
WAIT_S = 60.0
"""Longest wait for an event that must happen; only a failing test waits this long."""


def key_of(number: int) -> bytes:
    """A storage key for tests; different numbers give different keys."""
    return hashlib.sha256(b"key %d" % number).digest()


def payload_of(key: bytes, length: int) -> bytes:
    """The payload that tests store under a key; different keys have different payloads."""
    return hashlib.shake_128(key).digest(length)


def section_lengths(payload_bytes: int) -> list[int]:
    """Lengths of up to three sections, all different, that make up a payload of this length."""
    first = payload_bytes // 2
    second = (payload_bytes - first) // 3
    return [length for length in (first, second, payload_bytes - first - second) if length]


def record_length(payload_bytes: int) -> int:
    """Length of a whole record with a payload of this length."""
    return record_bytes(len(section_lengths(payload_bytes)), payload_bytes)


class Region:
    """Shared memory for the holds of tests, in place of a server's pool: an adapter may register it, and an adapter
    host maps it.

    Only used pages take memory.  Extents that were given back are given out again.  Thread-safe.
    """

    LENGTH = 1 << 30

    def __init__(self) -> None:
        self.fd = linux.create_memfd("kvstrata-test-region")
        os.ftruncate(self.fd, self.LENGTH)
        self._extents = ExtentsMap(self.fd, self.LENGTH)
        self.address = self._extents.address
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def take(self, length: int) -> tuple[int, memoryview]:
        """Offset and bytes of an extent of whole pages, all zero; the caller passes it to `give_back` in the end."""
        length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            free = self._free.get(length)
            if free:
                offset = free.pop()
            else:
                offset, self._end = self._end, self._end + length
        assert offset + length <= self.LENGTH, "the tests hold more bytes than their region has"
        extent = self._extents.view(offset, length)
        extent[:] = bytes(length)
        return offset, extent

    def give_back(self, offset: int, length: int) -> None:
        """Give back an extent of `take`."""
        with self._lock:
            self._free.setdefault(length, []).append(offset)


@functools.cache
def region() -> Region:
    """The region of this process."""
    return Region()


def lent_context(record_evicted: Callable[[bytes], None], name: str = "contract") -> AdapterContext:
    """The context that a server would give an adapter, with the region as its pool."""
    lent = region()
    return AdapterContext(name, SystemClock(), lent.address, lent.LENGTH, record_evicted, lent.fd)


class WatchedHold:
    """A hold on an extent of the region, with the interface of a native hold, that detects misuse.

    `drop` counts its calls.  Its first call poisons the bytes of a put, so that an adapter that reads them later stores
    garbage, and remembers the bytes, so that `check` finds later writes.  With a `gate`, a caller that asks for the
    bytes waits until the gate is set.
    """

    def __init__(
        self, key: bytes, length: int, *, for_put: bool, gate: threading.Event | None = None
    ) -> None:
        self.key = key
        self.length = length
        self.gate = gate
        self.asked = threading.Event()
        """Set when the bytes were asked for."""
        self.dropped = threading.Event()
        self.drops = 0
        self._for_put = for_put
        self.offset, self._pages = region().take(length)
        self._lock = threading.Lock()
        self._at_drop = b""

    @property
    def address(self) -> int:
        """Address of the bytes."""
        return region().address + self.offset

    def view(self) -> memoryview:
        """The bytes, writable."""
        assert not self.dropped.is_set(), "the bytes were asked for after the hold was dropped"
        self.asked.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S), "the test never opened the gate"
        return self._pages[: self.length]

    def drop(self) -> None:
        """End the hold: the medium has finished with the bytes."""
        with self._lock:
            self.drops += 1
            if self.drops == 1:
                if self._for_put:
                    self._pages[:] = bytes([POISON]) * len(self._pages)
                self._at_drop = bytes(self._pages)
        self.dropped.set()

    def bytes(self) -> bytes:
        """A copy of the bytes as they are now."""
        return bytes(self._pages[: self.length])

    def check(self) -> None:
        """Assert that the hold was dropped exactly once, and that nobody wrote the bytes afterwards."""
        assert self.drops == 1, f"the hold was dropped {self.drops} times"
        assert self._pages == self._at_drop, "the bytes were written after the hold was dropped"

    def __del__(self) -> None:
        region().give_back(self.offset, len(self._pages))

    async def until_dropped(self) -> None:
        """Wait for the drop."""
        assert await asyncio.to_thread(self.dropped.wait, WAIT_S), "the hold was never dropped"

    async def until_asked(self) -> None:
        """Wait until the bytes were asked for."""
        assert await asyncio.to_thread(self.asked.wait, WAIT_S), "nobody asked for the bytes"


def record_hold(
    key: bytes, payload: bytes, *, gate: threading.Event | None = None, parent: bytes = bytes(32)
) -> WatchedHold:
    """A hold on a sealed record of this payload. `parent`: key of the chunk before it."""
    hold = WatchedHold(key, record_length(len(payload)), for_put=True, gate=gate)
    header_bytes = hold.length - len(payload)
    hold._pages[header_bytes : hold.length] = payload
    spec = RecordSpec(key, IDENTITY, bytes(32), parent, 256)
    seal_record(hold.address, hold.length, spec, section_lengths(len(payload)))
    return hold


def put_item(
    key: bytes, payload_bytes: int, *, gate: threading.Event | None = None, parent: bytes = bytes(32)
) -> Item:
    """An item that puts this key's payload. `parent`: key of the chunk before it."""
    hold = record_hold(key, payload_of(key, payload_bytes), gate=gate, parent=parent)
    return Item(key, cast("Hold", hold))


def load_item(
    key: bytes, payload_bytes: int, *, gate: threading.Event | None = None, more_bytes: int = 0
) -> Item:
    """An item that loads this key's payload, with room for `more_bytes` more."""
    hold = WatchedHold(key, record_length(payload_bytes) + more_bytes, for_put=False, gate=gate)
    return Item(key, cast("Hold", hold))


def watched(item: Item) -> WatchedHold:
    """The hold of an item of `put_item` or `load_item`."""
    assert isinstance(item.hold, WatchedHold)
    return item.hold


def loaded_payload(item: Item, payload_bytes: int) -> bytes:
    """The payload that a load left in the item's extent."""
    end = record_length(payload_bytes)
    return watched(item).bytes()[end - payload_bytes : end]


class Settled(NamedTuple):
    """How an item has ended."""

    outcome: Outcome
    reason: str = ""


async def settled(
    move: Callable[[Sequence[Item]], Awaitable[Sequence[Item] | None]], items: Sequence[Item]
) -> list[Settled]:
    """Put or load items by a method of an adapter or of a tier, which answers with items of its own."""
    return [Settled(item.outcome, item.reason) for item in await move(items) or items]


class Found(NamedTuple):
    """What an adapter's `exists` says of one key."""

    presence: Presence
    reason: str = ""
    """Why the presence is UNKNOWN."""


async def ask_for(
    adapter: StorageAdapter, keys: Sequence[bytes], *, each: bool = False, owner: bytes = b""
) -> list[Found]:
    """Ask an adapter for these keys."""
    ask = Ask(each=each, owner=owner)
    found = await adapter.exists(b"".join(keys), ask)
    return [Found(Presence(one), ask.reason if one == Presence.UNKNOWN else "") for one in found]


keys = st.integers(0, 11).map(key_of)
"""Few keys, so that tests often use the same one."""
