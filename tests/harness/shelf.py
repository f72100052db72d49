"""An adapter whose records lie in a dictionary, and whose operations wait at gates that a test opens and shuts.

The dictionary and the gates are a `Shelf`.  The test and the adapter find it by its name in `SHELVES`, so the adapter
must run in the test's process.  `entry()` returns the entry of `l2_adapters` for an adapter on a shelf.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.keys.batch import split
from kvstrata.native.core import CopyOutcome, verify_stored_record
from kvstrata.tiers.base import AdapterContext, Ask, Capabilities, Item, Outcome, StorageAdapter, Usage

MADE_S = 60.0
GATES = ("open", "exists", "put", "load", "close")


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
        self.may_be_made = threading.Event()
        self.may_be_made.set()
        self.making = 0
        self.takes_s: Callable[[], float] = lambda: 0.0
        """How long the next operation takes besides its gate."""
        self.fails: Callable[[], bool] = lambda: False
        """Whether the next operation raises."""

    def shut(self, *names: str) -> None:
        """Shut these gates: operations of these kinds wait from now on, until `let_go`."""
        for name in names:
            self.gates[name].clear()

    def let_go(self) -> None:
        for gate in self.gates.values():
            gate.set()

    async def passed(self, name: str) -> None:
        self.asked[name] += 1
        self.waiting[name] += 1
        try:
            await self.gates[name].wait()
        finally:
            self.waiting[name] -= 1


SHELVES: dict[str, Shelf] = collections.defaultdict(Shelf)


def entry(shelf: str, **common: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": __name__,
        "class_name": "ShelfAdapter",
        "adapter_params": {"shelf": shelf},
        **common,
    }


class ShelfAdapter(StorageAdapter):
    """An adapter on a shelf. Cancelling a call does not end its operation, as if a thread carried the operation out."""

    def __init__(self, shelf: str | Shelf) -> None:
        self.name = "shelf"
        self.capabilities = Capabilities(persistent=False, shared=False, max_batch=4)
        self.shelf = SHELVES[shelf] if isinstance(shelf, str) else shelf
        self.shelf.making += 1
        assert self.shelf.may_be_made.wait(MADE_S), "the test never set may_be_made"
        self.shelf.making -= 1
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, context: AdapterContext) -> None:
        await self._own("open", lambda: None)
        if self.shelf.fails_to_open is not None:
            raise self.shelf.fails_to_open
        self.shelf.opened += 1

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        there = self.shelf.records
        return await self._own("exists", lambda: bytes([key in there for key in split(keys)]))

    async def put(self, items: Sequence[Item]) -> None:
        await self._own("put", lambda: [self._put_one(item) for item in items])

    async def load(self, items: Sequence[Item]) -> None:
        await self._own("load", lambda: [self._load_one(item) for item in items])

    async def delete(self, keys: bytes) -> int:
        return sum(self.shelf.records.pop(key, None) is not None for key in split(keys))

    async def usage(self) -> Usage:
        return Usage(sum(map(len, self.shelf.records.values())), 0, len(self.shelf.records))

    async def close(self) -> None:
        await self._own("close", lambda: None)
        while pending := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(pending)
        self.shelf.closed += 1

    async def _own(self, gate: str, work: Callable[[], Any]) -> Any:
        planned = gate not in ("open", "close")
        takes_s, fails = (self.shelf.takes_s(), self.shelf.fails()) if planned else (0.0, False)

        async def run() -> Any:
            if takes_s:
                await asyncio.sleep(takes_s)
            await self.shelf.passed(gate)
            if fails:
                raise OSError("a planned fault")
            return work()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

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
