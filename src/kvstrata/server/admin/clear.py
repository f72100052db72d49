"""Clear: drops the chunks of one tenant or of all from L1, or all of L2, so that no lookup finds them any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.observability.logging import EventLog
from kvstrata.server.processes import tenant_number

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

CLEAR_WAIT_S = 30.0
"""Maximum time that a clear waits for bytes in use to become free."""


class Cleared(NamedTuple):
    """The outcome of a clear."""

    tiers: dict[str, int]
    """Number of chunks dropped from each tier."""
    held: int
    """Number of chunks that clears have dropped from L1 and whose bytes a put or a read of the server still uses."""
    leased: int
    """Number of chunks that clears have dropped from L1 and whose bytes an engine still reads."""
    kept: int
    """Number of chunks that stay in L1, because they are claimed or another instance reads them."""

    @property
    def n_chunks(self) -> int:
        return sum(self.tiers.values())

    def document(self) -> dict[str, dict[str, int]]:
        """The JSON that an admin gets."""
        return {
            "cleared": self.tiers,
            "pending": {"held": self.held, "leased": self.leased},
            "kept": {"claimed": self.kept},
        }


class Clearing:
    """Clears L1 and L2. Belongs to the event loop; makes one call into the pool at a time."""

    def __init__(self, parts: Parts) -> None:
        self._pool, self._lane = parts.pool, parts.own_lane
        self._store, self._events = parts.store, parts.events
        self._on_lane_now = asyncio.Lock()
        self._log = EventLog("instance")

    async def clear(self, scope: str, tenant: str | None, *, wait: bool = False) -> Cleared:
        """Drop the chunks of one tenant or of all (None). When this returns, no lookup finds them any more.

        `scope`: "l1", "l2" or "all".

        Bytes of L1 that are in use become free when the use ends.  `wait`: return when all are free, or after
        CLEAR_WAIT_S.  Raises StorageError when a tier could not be cleared, BadRequest for L2 of one tenant.
        """
        if tenant is not None and scope != "l1":
            raise BadRequest(
                "tenant: L2 can only be cleared as a whole; clear L1 of the tenant and change its salt: its records in "
                "L2 are then never found, and their tier's cap evicts them",
                field="tenant",
            )
        tiers: dict[str, int] = {}
        kept = 0
        number = -1 if tenant is None else tenant_number(tenant)
        if scope in ("l1", "all"):
            tiers["l1"], kept = await self._on_lane(self._pool.clear, number)
        if scope in ("l2", "all"):
            tiers["l2"] = await self._store.clear()
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
        )  # fmt: skip
        return Cleared(tiers, held, leased, kept)

    async def _on_lane(self, work: Callable[[int], tuple[int, int]], number: int) -> tuple[int, int]:
        async with self._on_lane_now:
            return await asyncio.shield(self._lane.run(work, number))
