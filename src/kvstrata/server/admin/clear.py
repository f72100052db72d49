"""Clear: drop the chunks of one tenant or of all, so that no lookup finds them any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstrata.native.pool import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.policy.processes import tenant_number
from kvstrata.process.lane import PoolLane
from kvstrata.rpc.wire import ClearScope
from kvstrata.server.identity_book import IdentityBook, tenant_mark
from kvstrata.server.l2.store import StoreController
from kvstrata.server.pool_events import PoolEvents

CLEAR_WAIT_S = 30.0
"""Longest time that a clear waits for bytes in use to become free."""


class Cleared(NamedTuple):
    """What a clear did, field by field as in rpc.wire.Cleared."""

    tiers: dict[str, int]
    """Chunks that left each tier."""
    held: int
    leased: int
    kept: int
    unknown: int | None = None
    """Records of L2 that stay because this server does not know their tenants; None unless L2 was cleared of one."""

    @property
    def n_chunks(self) -> int:
        return sum(self.tiers.values())

    def document(self) -> dict[str, dict[str, int]]:
        """The JSON that an admin gets."""
        return {
            "cleared": self.tiers,
            "pending": {"held": self.held, "leased": self.leased},
            "kept": {"pinned": self.kept, **({} if self.unknown is None else {"unknown": self.unknown})},
        }


class _Theirs:
    """Tells of identity roots whether they belong to one tenant, and counts those of unknown tenants."""

    def __init__(self, roots: Mapping[bytes, bytes], tenant: str) -> None:
        self._roots = roots
        self._mark = tenant_mark(tenant)
        self.unknown = 0

    def __call__(self, root: bytes) -> bool:
        mark = self._roots.get(root)
        self.unknown += mark is None
        return mark == self._mark


class Clearing:
    """Clears L1 and L2. Belongs to the event loop; makes one call into the pool at a time."""

    def __init__(
        self,
        pool: Pool,
        lane: PoolLane,
        store: StoreController,
        events: PoolEvents,
        book: IdentityBook,
    ) -> None:
        self._pool = pool
        self._lane = lane
        self._store = store
        self._events = events
        self._book = book
        self._on_lane_now = asyncio.Lock()
        self._log = EventLog("instance")

    async def clear(self, scope: str, tenant: str | None, *, wait: bool = False) -> Cleared:
        """Drop the chunks of one tenant or of all (None). When this returns, no lookup finds them any more.

        Bytes of L1 that are in use become free when the use ends.  `wait`: return only then, but at most CLEAR_WAIT_S
        later.  Raises StorageError when a tier could not be cleared; for a tenant it must list and delete records.
        """
        tiers: dict[str, int] = {}
        kept = 0
        theirs: _Theirs | None = None
        if tenant is not None and scope in (ClearScope.L2, ClearScope.ALL):
            theirs = _Theirs(await self._book.roots(), tenant)
        unknown: int | None = None
        number = -1 if tenant is None else tenant_number(tenant)
        if scope in (ClearScope.L1, ClearScope.ALL):
            tiers["l1"], kept = await self._on_lane(self._pool.clear, number)
        if scope in (ClearScope.L2, ClearScope.ALL):
            if theirs is None:
                tiers["l2"] = await self._store.clear()
            else:
                tiers["l2"] = await self._store.clear(number, theirs)
                unknown = theirs.unknown
            if "l1" in tiers:
                # A load that began before its record was deleted may have ended since L1 was cleared.
                again, kept = await self._on_lane(self._pool.clear, number)
                tiers["l1"] += again
        held, leased = await self._on_lane(self._pool.cleared_in_use, number)
        if wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLEAR_WAIT_S):
                    while held or leased:
                        await self._events.next_drain()
                        held, leased = await self._on_lane(self._pool.cleared_in_use, number)
        shown = "*" if tenant is None else tenant
        self._log.repeated(
            logging.INFO, f"cleared {scope} {shown}"[:200], "cleared",
            tier=scope, tenant=shown, **tiers, held=held, leased=leased, kept=kept,
            **({} if unknown is None else {"unknown": unknown}),
        )  # fmt: skip
        return Cleared(tiers, held, leased, kept, unknown)

    async def _on_lane(self, work: Callable[[int], tuple[int, int]], number: int) -> tuple[int, int]:
        async with self._on_lane_now:
            return await asyncio.shield(self._lane.run(work, number))
