"""Makes another adapter fail by a seeded plan, which decides the operation that goes wrong, and how.

`faulty()` returns the entry of `l2_adapters` for an `fs` adapter that fails so.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import mmap
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvstrata.storage.base import (
    AdapterContext,
    Found,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.media.fs.adapter import FsAdapter

if TYPE_CHECKING:
    from kvstrata.native.core import Hold


class Fault(enum.StrEnum):
    """One way in which an adapter operation goes wrong."""

    ERROR = "error"
    """Nothing is done, and the answer for every item is FAILED (exists: UNKNOWN)."""
    RAISE = "raise"
    """The adapter breaks its contract and raises."""
    LOST_ACK = "lost_ack"
    """The operation is done, but its answer is that of ERROR."""
    SLOW = "slow"
    """The operation is done after a pause of `FaultPlan.slow_s`."""
    HANG = "hang"
    """The operation does not begin before `FaultyAdapter.release` or `close`; the items' holds stay until then."""
    TORN = "torn"
    """A put stores one record with zeros in place of its last part."""
    FLIPPED = "flipped"
    """A put stores one record with one inverted bit."""
    THROTTLED = "throttled"
    """Nothing is done. The answer to a put is THROTTLED; other operations get that of ERROR."""


class FaultPlan:
    """Draws a fault for each operation; the same seed and order of operations give the same faults.

    `rate` is the share of operations that go wrong, 0 to 1; `only` are the faults that are drawn. Not thread-safe.
    """

    def __init__(
        self, seed: int, rate: float = 0.0, only: Collection[Fault] = tuple(Fault), slow_s: float = 0.05
    ) -> None:
        self.seed = seed
        self.rate = rate
        self.only = tuple(fault for fault in Fault if fault in only)
        self.slow_s = slow_s
        self._random = random.Random(seed)
        self._next: list[Fault] = []

    def schedule(self, *faults: Fault) -> None:
        """Give exactly these faults to the next operations, one each; operations after them get drawn faults again."""
        self._next.extend(faults)

    def draw(self) -> Fault | None:
        """Return the fault of the next operation; None: it does not go wrong."""
        if self._next:
            return self._next.pop(0)
        if not self.only or self._random.random() >= self.rate:
            return None
        return self._random.choice(self.only)

    def below(self, limit: int) -> int:
        """Return a number in [0, limit), to choose the item, byte or bit that is hit."""
        return self._random.randrange(limit)

    def __repr__(self) -> str:
        return f"FaultPlan(seed={self.seed}, rate={self.rate}, only={[str(f) for f in self.only]})"


class InjectedError(Exception):
    """The exception that Fault.RAISE raises."""


class AlteredHold:
    """An altered copy of a hold's bytes, which a put stores instead. It has the attributes of a native hold."""

    def __init__(self, original: Hold) -> None:
        """Copies the bytes of `original`, and drops it."""
        self.key = original.key
        self.length = original.length
        self.offset = original.offset
        self.generation = original.generation
        self._pages = mmap.mmap(-1, -(-original.length // mmap.PAGESIZE) * mmap.PAGESIZE)
        with original.view() as view:
            self._pages[: self.length] = bytes(view)
        original.drop()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def view(self) -> memoryview:
        """The altered record, writable."""
        return memoryview(self._pages)[: self.length]

    def drop(self) -> None:
        """Do nothing: the bytes belong to this object and are freed with it."""


class FaultyAdapter(StorageAdapter):
    """See the module. Operations that hang keep their holds until `release` or `close`."""

    def __init__(self, inner: StorageAdapter, plan: FaultPlan) -> None:
        self.inner = inner
        self.plan = plan
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._released = asyncio.Event()
        self._hanging = 0

    @property
    def hanging(self) -> int:
        """The number of operations that hang now."""
        return self._hanging

    def release(self) -> None:
        """Let all operations that hang now go on."""
        self._released.set()
        self._released = asyncio.Event()

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter."""
        await self.inner.open(context)
        self.capabilities = self.inner.capabilities

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the inner adapter, unless a fault is drawn."""
        fault = await self._begin()
        if fault in (Fault.ERROR, Fault.LOST_ACK, Fault.THROTTLED):
            return [Found(Presence.UNKNOWN, 0, "injected")] * len(keys)
        return await self.inner.exists(keys)

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """As the inner adapter, without faults: the `exists` or load that makes this call draws its own fault."""
        return await self.inner.heads(keys)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter, without faults."""
        return await self.inner.list_keys(cursor, most)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the inner adapter, unless a fault is drawn."""
        fault = await self._begin()
        if fault in (Fault.ERROR, Fault.THROTTLED):
            for item in items:
                item.hold.drop()
            status = PutStatus.THROTTLED if fault is Fault.THROTTLED else PutStatus.FAILED
            return [PutOutcome(status, "injected")] * len(items)
        if fault in (Fault.TORN, Fault.FLIPPED) and items:
            altered = list(items)
            i = self.plan.below(len(items))
            altered[i] = PutItem(items[i].key, self._alter(items[i].hold, fault))
            items = altered
        outcomes = await self.inner.put(items)
        if fault is Fault.LOST_ACK:
            return [PutOutcome(PutStatus.FAILED, "injected")] * len(items)
        return outcomes

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the inner adapter, unless a fault is drawn."""
        fault = await self._begin()
        if fault in (Fault.ERROR, Fault.THROTTLED):
            for item in items:
                item.hold.drop()
            return [LoadOutcome(LoadStatus.FAILED, "injected")] * len(items)
        outcomes = await self.inner.load(items)
        if fault is Fault.LOST_ACK:
            return [LoadOutcome(LoadStatus.FAILED, "injected")] * len(items)
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the inner adapter, unless a fault is drawn."""
        fault = await self._begin()
        if fault in (Fault.ERROR, Fault.THROTTLED):
            return 0
        count = await self.inner.delete(keys)
        return 0 if fault is Fault.LOST_ACK else count

    async def clear(self) -> int:
        """As the inner adapter."""
        return await self.inner.clear()

    def numbers(self) -> dict[str, int]:
        """As the inner adapter."""
        return self.inner.numbers()

    def remarks(self) -> dict[str, str]:
        """As the inner adapter."""
        return self.inner.remarks()

    async def usage(self) -> Usage:
        """As the inner adapter."""
        return await self.inner.usage()

    async def close(self) -> None:
        """Release the operations that hang, then close the inner adapter."""
        self.release()
        await self.inner.close()

    async def _begin(self) -> Fault | None:
        fault = self.plan.draw()
        if fault is Fault.RAISE:
            raise InjectedError(repr(self.plan))
        if fault is Fault.SLOW:
            await asyncio.sleep(self.plan.slow_s)
        elif fault is Fault.HANG:
            self._hanging += 1
            try:
                await self._released.wait()
            finally:
                self._hanging -= 1
        return fault

    def _alter(self, hold: Hold, fault: Fault) -> Hold:
        altered = AlteredHold(hold)
        with altered.view() as view:
            header_bytes = int.from_bytes(view[12:16], "little")
            at = header_bytes + self.plan.below(max(1, len(view) - header_bytes))
            rest = bytes(len(view) - at)
            if fault is Fault.TORN and view[at:] != rest:
                view[at:] = rest
            else:
                view[at] ^= 1 << self.plan.below(8)
        return cast("Hold", altered)


def make(base_path: str, faults: list[str]) -> FaultyAdapter:
    """Make an `fs` adapter of which every operation suffers one of these faults."""
    return FaultyAdapter(
        FsAdapter(base_path=base_path, capacity_bytes=1 << 30), FaultPlan(1, 1.0, [Fault(f) for f in faults])
    )


def faulty(base_path: Path, *faults: str, **common: Any) -> dict[str, Any]:
    """The entry of the adapter that `make` makes."""
    parameters = {"base_path": str(base_path), "faults": list(faults)}
    return {
        "type": "plugin",
        "module_path": __name__,
        "class_name": "make",
        "adapter_params": parameters,
        **common,
    }
