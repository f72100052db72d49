"""The adapter type `fault_inject`: makes another adapter fail by a FaultPlan; tests only (`failpoints.is_testing`)."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from msgspec import Meta

from kvstrata import failpoints
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
from kvstrata.storage.config import Make, Medium, fields_of, find, kind_of
from kvstrata.storage.structs import Place
from kvstrata.testing.faults import Fault, FaultPlan

if TYPE_CHECKING:
    from kvstrata.native.core import Hold


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


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter that goes wrong, how often, and in what ways."""

    inner: Annotated[
        dict[str, Any],
        Meta(
            extra={"missing": "must be the object of the adapter that goes wrong"},
            description="The adapter that goes wrong.",
        ),
    ]
    rate: Annotated[float, Meta(ge=0, le=1, description="Share of operations that go wrong.")] = 0.0
    seed: Annotated[int, Meta(ge=0, le=1 << 62, description="Seed of the generator that draws faults.")] = 0
    faults: Annotated[list[Fault] | None, Meta(description="The faults that may be drawn; not set: all.")] = (
        None
    )


def _prepare(config: FaultConfig, place: Place, name: str) -> Make:
    inner = Place(place.at("inner"))
    if (isolation := config.inner.get("isolation")) is not None:
        raise inner.refused("isolation", isolation, "set it in the outer entry, of type fault_inject")
    medium, _, point = find(kind_of(config.inner, inner), inner.at("type"))
    make_inner = medium.prepare(fields_of(medium, point, config.inner, inner), inner, name)
    plan = FaultPlan(config.seed, config.rate, list(Fault) if config.faults is None else config.faults)
    return lambda: FaultyAdapter(make_inner(), plan)


def _not_testing() -> str:
    if failpoints.is_testing(os.environ):
        return ""
    return f"it makes storage go wrong on purpose, for tests, which set {failpoints.TESTING_VARIABLE}=1"


MEDIUM = Medium(FaultConfig, _prepare, refusal=_not_testing)
