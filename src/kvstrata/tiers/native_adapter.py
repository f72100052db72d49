"""A storage adapter around a connector written in C++ (ext/core/include/kvstrata/connector.h).

The connector's module makes a capsule; `NativeAdapter(capsule, ...)` is the adapter.  Batches become jobs of the lanes,
whose threads call the connector without the GIL; their outcomes arrive over one descriptor.

Invariants
1. A batch that was taken runs to its end, even if nobody waits for it, and the server then learns which keys the
   connector's cap dropped.
2. The connector's threads drop the holds; the holds of a batch that was not taken are dropped at once.
3. `close` calls the connector's close when all other calls have ended, and makes no call after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.errors import ConfigError, StorageError
from kvstrata.native.connector import NativeConnector, NativeLanes
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.reasons import BAD_ITEM, CLOSED, QUEUE_FULL, THROTTLED
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

_PUT_STATUS = list(PutStatus)
_LOAD_STATUS = list(LoadStatus)


_Submit = Callable[[NativeLanes, "asyncio.Future[Any]"], bool]


class NativeAdapter(StorageAdapter):
    """See the module. Owns the capsule. Raises ValueError if the capsule holds no connector of this version.

    `num_workers` threads serve the lanes that `per_op_workers` does not name (see tiers/lanes.py).
    """

    def __init__(
        self,
        capsule: object,
        *,
        name: str = "native",
        num_workers: int = 4,
        per_op_workers: Mapping[Lane, int] | None = None,
        queue_limit: int = 1024,
        lanes: Lanes | None = None,
    ) -> None:
        """`lanes`, if given, are used instead of new lanes made from the other arguments. The adapter closes them."""
        self.name = name
        self._connector: NativeConnector | None = NativeConnector(capsule)
        can = dict(self._native.capabilities)
        self._exists_is_quick: bool = can.pop("exists_is_quick")
        self._can_clear: bool = can.pop("can_clear")
        self.capabilities = Capabilities(**can)
        self._lanes = lanes or Lanes(
            name, num_workers=num_workers, per_op_workers=per_op_workers, queue_limit=queue_limit
        )
        self._context: AdapterContext | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._opened = False
        self._closed = False

    async def open(self, context: AdapterContext) -> None:
        """Open the connector in a lane. Raises StorageError, ConfigError with the connector's reason."""
        lane = self._lanes.number(Lane.DELETE)
        region = (context.region_address, context.region_bytes)
        wrong = await self._always(
            lambda native, future: native.submit_open(
                lane, self._native, context.instance_id, *region, future
            )
        )
        self._log_notes()
        if wrong:
            self._closed = True
            await self._lanes.close()
            self._connector = None
            kind = ConfigError if wrong.startswith("!") else StorageError
            raise kind(f"{self.name}: {wrong.removeprefix('!')}", field=self.name)
        self._context = context
        self._opened = True

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Ask the connector: at once where its `exists` does not block, else in the lookup lane."""
        if reason := self._not_ready():
            return ask.unknown(keys, reason)
        if self._exists_is_quick and (answer := self._native.exists_now(keys)) is not None:
            presences, ask.reason = answer
            return presences
        lane = self._lanes.number(Lane.LOOKUP)
        future = self._take(lambda native, future: native.submit_exists(lane, self._native, keys, future))
        if future is None:
            return ask.unknown(keys, THROTTLED)
        found: bytes
        found, ask.reason = await asyncio.shield(future)
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """Ask the connector in the lookup lane; None while it is still reading its index, or if the lane is full."""
        if self._not_ready() or not self.capabilities.lists or not self._native.ready:
            return None
        lane = self._lanes.number(Lane.LOOKUP)
        future = self._take(
            lambda native, future: native.submit_list(lane, self._native, cursor, most, future)
        )
        return None if future is None else KeyPage(*await asyncio.shield(future))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        outcomes = [PutOutcome(PutStatus.FAILED, self._not_ready() or BAD_ITEM)] * len(items)
        places = self._acceptable(items)
        if not places:
            return outcomes
        lane, batch = self._lanes.number(Lane.PUT), [items[i] for i in places]
        future = self._take(lambda native, future: native.submit_put(lane, self._native, batch, future))
        if future is None:
            put = [PutOutcome(PutStatus.THROTTLED, QUEUE_FULL)] * len(batch)
        else:
            put = [PutOutcome(_PUT_STATUS[status], why) for status, why in (await asyncio.shield(future))[0]]
        for i, outcome in zip(places, put, strict=True):
            outcomes[i] = outcome
        return outcomes

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        outcomes = [LoadOutcome(LoadStatus.FAILED, self._not_ready() or BAD_ITEM)] * len(items)
        places = self._acceptable(items)
        if not places:
            return outcomes
        lane, batch = self._lanes.number(Lane.LOAD), [items[i] for i in places]
        future = self._take(lambda native, future: native.submit_load(lane, self._native, batch, future))
        if future is None:
            loaded = [LoadOutcome(LoadStatus.FAILED, THROTTLED)] * len(batch)
        else:
            loaded = [
                LoadOutcome(_LOAD_STATUS[status], why) for status, why in (await asyncio.shield(future))[0]
            ]
        for i, outcome in zip(places, loaded, strict=True):
            outcomes[i] = outcome
        return outcomes

    async def delete(self, keys: bytes) -> int:
        """Remove records in the delete lane."""
        if self._not_ready() or not keys:
            return 0
        lane = self._lanes.number(Lane.DELETE)
        return int(
            await self._always(lambda native, future: native.submit_delete(lane, self._native, keys, future))
        )

    async def clear(self) -> int:
        """Remove every record. Raises StorageError if the connector cannot."""
        if not self._can_clear:
            return await super().clear()
        if self._not_ready():
            return 0
        lane = self._lanes.number(Lane.DELETE)
        return int(await self._always(lambda native, future: native.submit_clear(lane, self._native, future)))

    async def usage(self) -> Usage:
        """Ask the connector in the lookup lane."""
        if self._not_ready():
            return Usage(0, 0, 0)
        lane = self._lanes.number(Lane.LOOKUP)
        return Usage(
            *await self._always(lambda native, future: native.submit_usage(lane, self._native, future))
        )

    def numbers(self) -> dict[str, int]:
        """The connector's counters."""
        return {} if self._not_ready() else self._native.counts()

    async def close(self) -> None:
        """Wait for the operations in flight, close the connector, end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        if self._opened:
            lane = self._lanes.number(Lane.DELETE)
            await self._always(lambda native, future: native.submit_close(lane, self._native, future))
            self._log_notes()
        await self._lanes.close()
        # This frees the connector and ends its threads, even if something still refers to this adapter.
        self._connector = None

    @property
    def _native(self) -> NativeConnector:
        assert self._connector is not None, f"{self.name} is used after its close"
        return self._connector

    def _acceptable(self, items: Sequence[PutItem | LoadItem]) -> list[int]:
        """Indices of the items that the connector gets; the holds of the others are dropped."""
        ready = not self._not_ready()
        places = [i for i, item in enumerate(items) if ready and len(item.key) == KEY_BYTES]
        if len(places) < len(items):
            for i in set(range(len(items))).difference(places):
                items[i].hold.drop()
        return places

    def _not_ready(self) -> str:
        return "" if self._opened and not self._closed else CLOSED

    async def _always(self, submit: _Submit) -> Any:
        """Submit work that the lanes always accept, and return its result."""
        future = self._take(submit)
        assert future is not None, "refused work that has no limit"
        return await asyncio.shield(future)

    def _take(self, submit: _Submit) -> asyncio.Future[Any] | None:
        future = self._lanes.submit_native(submit)
        if future is not None:
            self._running.add(future)
            future.add_done_callback(self._ended)
        return future

    def _log_notes(self) -> None:
        for warning, sentence in () if self._connector is None else self._connector.take_notes():
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
