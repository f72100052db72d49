"""An adapter whose records lie in a dictionary, and whose operations wait at gates or go wrong as a test has planned.

The dictionary, the gates and the faults are a `Shelf`.  A test in the adapter's process finds it by its name in
`SHELVES`.  `entry()` returns the entry of `l2_adapters` for an adapter on a shelf, also in another process.
"""

from __future__ import annotations

import asyncio
import collections
import enum
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.keys.batch import split
from kvstrata.native.core import CopyOutcome, verify_stored_record
from kvstrata.tiers.base import AdapterContext, Ask, Capabilities, Item, Outcome, StorageAdapter, Usage

GATES = ("open", "exists", "put", "load", "close")


class Fault(enum.StrEnum):
    """One way in which `exists`, `put` or `load` goes wrong."""

    ERROR = "error"
    """Nothing is done, and the answer for every item is FAILED (exists: UNKNOWN)."""
    RAISE = "raise"
    """The adapter breaks its contract and raises."""
    LOST_ACK = "lost_ack"
    """The operation is done, but its answer is that of ERROR."""
    HANG = "hang"
    """The operation does not begin before `Shelf.release` or `close`; the items' holds stay until then."""
    THROTTLED = "throttled"
    """Nothing is done. The answer to a put is THROTTLED; other operations get that of ERROR."""


DONE = (None, Fault.HANG)
NOTHING_DONE = (Fault.ERROR, Fault.THROTTLED)


class Shelf:
    """Records by key, and the gates and counts by which a test steers the adapters on them."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.gates = {name: asyncio.Event() for name in GATES}
        for gate in self.gates.values():
            gate.set()
        self.waiting: collections.Counter[str] = collections.Counter()
        """How many operations wait at each gate now."""
        self.asked: collections.Counter[str] = collections.Counter()
        """How many operations of each kind have begun."""
        self.opened = 0
        self.closed = 0
        self.fails_to_open: Exception | None = None
        self.takes_s: Callable[[], float] = lambda: 0.0
        """How long the next operation takes besides its gate."""
        self.fails: Callable[[], bool] = lambda: False
        """Whether the next operation raises."""
        self.loaded: collections.Counter[bytes] = collections.Counter()
        self.stored: collections.Counter[bytes] = collections.Counter()
        """How often each key was asked for in loads, and in puts."""
        self.ghosts: set[bytes] = set()
        """Keys that `exists` finds although nothing is there."""
        self.later: Fault | None = None
        """The fault of each operation that is not scheduled."""
        self.hanging = 0
        """How many operations hang now."""
        self._scheduled: collections.deque[Fault | None] = collections.deque()
        self._released = asyncio.Event()

    def schedule(self, *faults: Fault | None) -> None:
        """The faults of the next operations, one each."""
        self._scheduled.extend(faults)

    def take(self) -> Fault | None:
        """The fault of an operation that begins."""
        fault = self._scheduled.popleft() if self._scheduled else self.later
        return Fault.RAISE if self.fails() else fault

    def release(self) -> None:
        """Let all operations that hang now go on."""
        self._released.set()
        self._released = asyncio.Event()

    def shut(self, *names: str) -> None:
        """Shut these gates: operations of these kinds wait from now on, until `let_go`."""
        for name in names:
            self.gates[name].clear()

    def let_go(self) -> None:
        for gate in self.gates.values():
            gate.set()

    async def passed(self, name: str, fault: Fault | None) -> None:
        self.asked[name] += 1
        if fault is Fault.HANG:
            self.hanging += 1
            await self._released.wait()
            self.hanging -= 1
        self.waiting[name] += 1
        try:
            await self.gates[name].wait()
        finally:
            self.waiting[name] -= 1


SHELVES: dict[str, Shelf] = collections.defaultdict(Shelf)


def entry(shelf: str, fault: Fault | None = None, **common: Any) -> dict[str, Any]:
    """With a `fault` every operation has it."""
    return {
        "type": "plugin",
        "module_path": __name__,
        "class_name": "ShelfAdapter",
        "adapter_params": {"shelf": shelf, "fault": fault},
        **common,
    }


class ShelfAdapter(StorageAdapter):
    """An adapter on a shelf. Cancelling a call does not end its operation, as if a thread carried the operation out."""

    def __init__(self, shelf: str | Shelf, fault: str | None = None) -> None:
        self.name = "shelf"
        self.capabilities = Capabilities(persistent=False, shared=False, max_batch=16)
        self.shelf = SHELVES[shelf] if isinstance(shelf, str) else shelf
        if fault is not None:
            self.shelf.later = Fault(fault)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, context: AdapterContext) -> None:
        await self._own("open", None)
        if self.shelf.fails_to_open is not None:
            raise self.shelf.fails_to_open
        self.shelf.opened += 1

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        fault = self.shelf.take()
        await self._own("exists", fault)
        if fault not in DONE:
            return ask.unknown(keys, "injected")
        return bytes([key in self.shelf.records or key in self.shelf.ghosts for key in split(keys)])

    async def put(self, items: Sequence[Item]) -> None:
        self.shelf.stored.update(item.key for item in items)
        await self._own("put", self.shelf.take(), items, self._put_one)

    async def load(self, items: Sequence[Item]) -> None:
        self.shelf.loaded.update(item.key for item in items)
        await self._own("load", self.shelf.take(), items, self._load_one)

    async def delete(self, keys: bytes) -> int:
        return sum(self.shelf.records.pop(key, None) is not None for key in split(keys))

    async def clear(self) -> int:
        removed = len(self.shelf.records)
        self.shelf.records.clear()
        return removed

    async def usage(self) -> Usage:
        return Usage(sum(map(len, self.shelf.records.values())), 0, len(self.shelf.records))

    async def close(self) -> None:
        self.shelf.release()
        await self._own("close", None)
        while pending := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(pending)
        self.shelf.closed += 1

    async def _own(
        self,
        gate: str,
        fault: Fault | None,
        items: Sequence[Item] = (),
        carry_out: Callable[[Item], None] = lambda item: None,
    ) -> None:
        """Carry an operation out in a task of its own."""
        takes_s = 0.0 if gate in ("open", "close") else self.shelf.takes_s()

        async def run() -> None:
            if takes_s:
                await asyncio.sleep(takes_s)
            await self.shelf.passed(gate, fault)
            if fault is Fault.RAISE:
                raise OSError("a planned fault")
            for item in items:
                item.hold.drop() if fault in NOTHING_DONE else carry_out(item)
                if fault not in DONE:
                    throttled = gate == "put" and fault is Fault.THROTTLED
                    item.outcome = Outcome.THROTTLED if throttled else Outcome.FAILED
                    item.reason = "injected"

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def _put_one(self, item: Item) -> None:
        if item.key in self.shelf.records:
            item.settle(Outcome.EXISTS)
            return
        with item.hold.view() as view:
            self.shelf.records[item.key] = bytes(view)
        item.settle(Outcome.STORED)

    def _load_one(self, item: Item) -> None:
        stored = self.shelf.records.get(item.key)
        if stored is None:
            item.settle(Outcome.ABSENT)
            return
        if len(stored) <= item.hold.length:
            with item.hold.view() as view:
                view[: len(stored)] = stored
            if verify_stored_record(item.hold.address, len(stored), item.key) == CopyOutcome.OK:
                item.settle(Outcome.LOADED)
                return
        del self.shelf.records[item.key]
        item.settle(Outcome.CORRUPT)
