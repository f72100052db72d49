"""A storage adapter around a connector written in C++ (ext/core/include/kvstrata/connector.h).

The connector's module makes a capsule; `NativeAdapter(capsule, ...)` is the adapter.  Batches become jobs of the lanes,
whose threads call the connector without the GIL; their outcomes arrive over one descriptor.

Invariants
1. A batch that was accepted runs to its end, even if its caller no longer waits, and the server then learns which keys
   the connector's cap dropped.
2. The connector's threads drop the holds; the holds of a batch that was not accepted are dropped at once.
3. `close` calls the connector's close when all other calls have ended, and makes no call after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvstrata.errors import ConfigError, StorageError
from kvstrata.native.connector import NativeConnector, NativeLanes
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    KeyPage,
    Outcome,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.reasons import QUEUE_FULL, THROTTLED

log = logging.getLogger(__name__)

_PUT = Outcome.STORED, Outcome.EXISTS, Outcome.THROTTLED, Outcome.FAILED
_LOAD = Outcome.LOADED, Outcome.ABSENT, Outcome.CORRUPT, Outcome.FAILED
"""Outcomes by the connector's PutStatus and LoadStatus."""

T = TypeVar("T")


class NativeAdapter(StorageAdapter):
    """An adapter around a native connector. Owns the capsule. Raises ValueError for a connector of another version.

    `num_workers` threads serve the lanes that `per_op_workers` does not name (see tiers/lanes.py).
    """

    def __init__(
        self,
        capsule: object,
        *,
        name: str = "native",
        num_workers: int = 4,
        per_op_workers: Mapping[Lane, int] | None = None,
    ) -> None:
        self.name = name
        self._native = NativeConnector(capsule)
        """Deleted at the end of `close`."""
        can = dict(self._native.capabilities)
        self._exists_is_quick: bool = can.pop("exists_is_quick")
        self._can_clear: bool = can.pop("can_clear")
        self.capabilities = Capabilities(**can)
        self._lanes = Lanes(name, num_workers=num_workers, per_op_workers=per_op_workers)
        self._context: AdapterContext | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._opened = False
        self._closed = False

    async def open(self, context: AdapterContext) -> None:
        """Open the connector in a lane. Raises StorageError, ConfigError with the connector's reason."""
        region = (context.region_address, context.region_bytes)
        wrong = await self._run(Lane.DELETE, lambda: self._native.open(context.instance_id, *region))
        self._log_notes()
        if wrong:
            self._closed = True
            await self._lanes.close()
            del self._native
            kind = ConfigError if wrong.startswith("!") else StorageError
            raise kind(f"{self.name}: {wrong.removeprefix('!')}", field=self.name)
        self._context = context
        self._opened = True

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Ask the connector: at once if its `exists` does not block, else in the lookup lane."""
        if self._exists_is_quick and (answer := self._native.exists_now(keys)) is not None:
            presences, ask.reason = answer
            return presences
        future = self._lanes.submit_native(NativeLanes.submit_exists, Lane.LOOKUP, self._native, keys)
        if future is None:
            return ask.unknown(keys, THROTTLED)
        found: bytes
        found, ask.reason = await self._own(future)
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """Ask the connector in the lookup lane; None while it is still reading its index, or if the lane is full."""
        if not self._native.ready:
            return None
        future = self._lanes.submit(Lane.LOOKUP, lambda: self._native.list_keys(cursor, most))
        return None if future is None else KeyPage(*await self._own(future))

    async def put(self, items: Sequence[Item]) -> None:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        await self._move(NativeLanes.submit_put, Lane.PUT, items, _PUT, (Outcome.THROTTLED, QUEUE_FULL))

    async def load(self, items: Sequence[Item]) -> None:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        moved = await self._move(
            NativeLanes.submit_load, Lane.LOAD, items, _LOAD, (Outcome.FAILED, THROTTLED)
        )
        if moved is not None and (ask := items[0].ask) is not None:
            wait_s, _, verify_s = moved
            ask.phases["wait"] += wait_s
            ask.phases["verify"] += verify_s
            ask.phases["medium"] -= wait_s + verify_s

    async def delete(self, keys: bytes) -> int:
        """Remove records in the delete lane."""
        if not keys:
            return 0
        return await self._run(Lane.DELETE, lambda: self._native.remove(keys))

    async def clear(self) -> int:
        """Remove every record. Raises StorageError if the connector cannot."""
        if not self._can_clear:
            return await super().clear()
        return await self._run(Lane.DELETE, self._native.clear)

    async def usage(self) -> Usage:
        """Ask the connector in the lookup lane."""
        return Usage(*await self._run(Lane.LOOKUP, self._native.usage))

    def numbers(self) -> dict[str, int]:
        """The connector's counters."""
        return self._native.counts()

    async def close(self) -> None:
        """Wait for the operations in flight, close the connector, end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        if self._opened:
            await self._run(Lane.DELETE, self._native.close)
            self._log_notes()
        await self._lanes.close()
        # This frees the connector and ends its threads, even if something still refers to this adapter.
        del self._native

    def _run(self, lane: Lane, work: Callable[[], T]) -> asyncio.Future[T]:
        """The result of `work`, which even a full lane accepts."""
        return self._own(self._lanes.run(lane, work))

    def _own(self, future: asyncio.Future[T]) -> asyncio.Future[T]:
        """Like `Work.own`, for futures only: without a task, so that a lookup on disk costs one call."""
        self._running.add(future)
        future.add_done_callback(self._ended)
        return asyncio.shield(future)

    async def _move(
        self,
        submit: Callable[..., bool],
        lane: Lane,
        items: Sequence[Item],
        outcomes: Sequence[Outcome],
        full: tuple[Outcome, str],
    ) -> Any:
        """The lane's result; None: there were no items, or the lane is full, and the items got the outcome `full`."""
        if not items:
            return None
        future = self._lanes.submit_native(submit, lane, self._native, items, outcomes)
        if future is not None:
            return await self._own(future)
        for item in items:  # the lanes have dropped the holds
            item.outcome, item.reason = full
        return None

    def _log_notes(self) -> None:
        for warning, sentence in self._native.take_notes():
            log.log(logging.WARNING if warning else logging.INFO, "%s: %s", self.name, sentence)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        self._log_notes()
        if future.cancelled() or future.exception() is not None or self._context is None:
            return
        result = future.result()
        if isinstance(result, tuple) and isinstance(result[1], list):  # the result of a put or a load
            for key in result[1]:
                self._context.record_evicted(key)
