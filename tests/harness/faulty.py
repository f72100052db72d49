"""An `fs` adapter whose operations go wrong as a test has planned; `faulty()` is its entry of `l2_adapters`."""

from __future__ import annotations

import asyncio
import collections
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstrata.tiers.base import Ask, Item, Outcome
from kvstrata.tiers.media.fs import FsAdapter


class Fault(enum.StrEnum):
    """One way in which an adapter operation goes wrong."""

    ERROR = "error"
    """Nothing is done, and the answer for every item is FAILED (exists: UNKNOWN)."""
    RAISE = "raise"
    """The adapter breaks its contract and raises."""
    LOST_ACK = "lost_ack"
    """The operation is done, but its answer is that of ERROR."""
    HANG = "hang"
    """The operation does not begin before `FaultyAdapter.release` or `close`; the items' holds stay until then."""
    THROTTLED = "throttled"
    """Nothing is done. The answer to a put is THROTTLED; other operations get that of ERROR."""


NOTHING_DONE = (Fault.ERROR, Fault.THROTTLED)


class FaultPlan:
    """The faults of the next operations, one each, and that of all later ones."""

    def __init__(self, later: Fault | None = None) -> None:
        self.later = later
        self._next: list[Fault | None] = []

    def schedule(self, *faults: Fault | None) -> None:
        self._next.extend(faults)

    def take(self) -> Fault | None:
        return self._next.pop(0) if self._next else self.later


class FaultyAdapter(FsAdapter):
    """An `fs` adapter with these faults in `exists`, `put` and `load`; it counts these calls and their keys."""

    def __init__(self, plan: FaultPlan, base_path: str, **options: Any) -> None:
        super().__init__(base_path, **options)
        self.plan = plan
        self.asked: collections.Counter[str] = collections.Counter()
        self.loaded: collections.Counter[bytes] = collections.Counter()
        self.stored: collections.Counter[bytes] = collections.Counter()
        self.hanging = 0
        """The number of operations that hang now."""
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let all operations that hang now go on."""
        self._released.set()
        self._released = asyncio.Event()

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        self.asked["exists"] += 1
        if await self._fault() in (*NOTHING_DONE, Fault.LOST_ACK):
            return ask.unknown(keys, "injected")
        return await super().exists(keys, ask)

    async def put(self, items: Sequence[Item]) -> None:
        self.stored.update(item.key for item in items)
        await self._faulted("put", items)

    async def load(self, items: Sequence[Item]) -> None:
        self.loaded.update(item.key for item in items)
        await self._faulted("load", items)

    async def _faulted(self, operation: str, items: Sequence[Item]) -> None:
        self.asked[operation] += 1
        fault = await self._fault()
        if fault in NOTHING_DONE:
            for item in items:
                item.hold.drop()
        else:
            await (super().put(items) if operation == "put" else super().load(items))
            if fault is not Fault.LOST_ACK:
                return
        throttled = operation == "put" and fault is Fault.THROTTLED
        for item in items:
            item.outcome = Outcome.THROTTLED if throttled else Outcome.FAILED
            item.reason = "injected"

    async def close(self) -> None:
        self.release()
        await super().close()

    async def _fault(self) -> Fault | None:
        fault = self.plan.take()
        if fault is Fault.RAISE:
            raise RuntimeError("injected")
        if fault is Fault.HANG:
            self.hanging += 1
            try:
                await self._released.wait()
            finally:
                self.hanging -= 1
        return fault


def make(base_path: str, fault: str) -> FaultyAdapter:
    """Make an `fs` adapter of which every operation suffers this fault."""
    return FaultyAdapter(FaultPlan(Fault(fault)), base_path, capacity_bytes=1 << 30)


def faulty(base_path: Path, fault: str, **common: Any) -> dict[str, Any]:
    """The entry of the adapter that `make` makes."""
    return {
        "type": "plugin",
        "module_path": __name__,
        "class_name": "make",
        "adapter_params": {"base_path": str(base_path), "fault": fault},
        **common,
    }
