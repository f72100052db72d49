"""The tiers of a running instance, in order of nearness.

Every tier of the settings is in the set from the start, even while its storage cannot be reached.  A paused tier stays
in the set and answers in place of its medium.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvstrata.errors import BadRequest
from kvstrata.native.core import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, parts_by
from kvstrata.tiers.base import AdapterContext
from kvstrata.tiers.tier import Tier, TierState

PROBE_S = 5.0
"""Pause between two rounds of probes of the tiers' directories."""


class TierSet(Numbers, prefix="l2"):
    """The tiers of an instance, in order. Belongs to the event loop."""

    by_name = parts_by("adapter", Tier, lambda tiers: {tier.name: tier for tier in tiers})

    def __init__(self, pool: Pool | None = None, opened: Iterable[Tier] = ()) -> None:
        """`pool`: its index tells readers whether a lookup may hit beyond L1; None: there are no readers."""
        self.recuts = False
        """Whether records of one geometry can be made from those of another."""
        self._pool = pool
        self._tiers = list(opened)
        self._users: list[Callable[[Tier], None]] = []
        self._log = EventLog("adapters")

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def take_loads(self) -> bool:
        """Whether a lookup may find chunks in a tier."""
        return TierState.ACTIVE in [tier.state for tier in self._tiers]

    @property
    def hit_beyond_l1(self) -> bool:
        """Whether a lookup may hit chunks that L1's index lacks: in a tier, or in L1 in another geometry."""
        return self.recuts or self.take_loads

    def get(self, name: str) -> Tier | None:
        """The tier with this name; None if the set has none."""
        return next((tier for tier in self._tiers if tier.name == name), None)

    def names(self) -> list[str]:
        """Names of all tiers."""
        return [tier.name for tier in self._tiers]

    def use(self, user: Callable[[Tier], None]) -> None:
        """Call `user` with each open tier, now or once it is open."""
        self._users.append(user)
        for tier in self._tiers:
            if tier.is_open:
                user(tier)

    async def open(self, tier: Tier, context: AdapterContext, *, must: bool = False) -> None:
        """Add a tier after all others, and open it. Raises as `Tier.open`; then it is not in the set."""
        assert self.get(tier.name) is None, tier.name
        self._tiers.append(tier)

        def in_use() -> None:
            for user in self._users:
                user(tier)
            self._changed()

        try:
            await tier.open(context, in_use, must=must)
        except BaseException:
            self._tiers.remove(tier)
            raise

    async def close(self) -> None:
        """Remove all tiers from the set, and close them concurrently. Idempotent."""
        tiers, self._tiers = self._tiers, []
        await asyncio.gather(*(tier.close() for tier in tiers))

    async def watch_folders(self) -> None:
        """Probe the directories of the tiers until cancelled."""
        while True:
            await asyncio.gather(*(tier.look_at_folder() for tier in self._tiers))
            await asyncio.sleep(PROBE_S)

    # -- the admin's operations ----------------------------------------------------------------------------

    def pause(self, name: str) -> dict[str, Any] | None:
        """Do not call a tier's medium until `resume`. Returns its row; None: no tier has this name.

        Chunks that wait for a put are skipped; operations under way continue, and the row counts them (`under_way`).
        Raises BadRequest for a tier that is not open.
        """
        return self._set_paused(name, True)

    def resume(self, name: str) -> dict[str, Any] | None:
        """Use a paused tier again. Returns its row; None: no tier has this name.

        Chunks that were skipped meanwhile are not put.
        """
        return self._set_paused(name, False)

    def _set_paused(self, name: str, paused: bool) -> dict[str, Any] | None:
        tier = self.get(name)
        if tier is None:
            return None
        if not tier.is_open:
            raise BadRequest(
                f"name: {name} cannot be reached, so it is not in use; it is retried automatically",
                field="name",
            )
        if tier.paused != paused:
            tier.paused = paused
            self._changed()
            self._log.info("l2_adapter_paused" if paused else "l2_adapter_resumed", adapter=name)
        return tier.row()

    def _changed(self) -> None:
        if self._pool is not None:
            self._pool.set_has_l2(self.hit_beyond_l1)

    async def rows(self) -> list[dict[str, Any]]:
        """A row for each tier, nearest first."""

        async def usage(tier: Tier) -> dict[str, int] | None:
            return (await tier.usage())._asdict() if tier.state is TierState.ACTIVE else None

        tiers = list(self._tiers)
        usages = await asyncio.gather(*map(usage, tiers))
        return [{**tier.row(), "usage": usage} for tier, usage in zip(tiers, usages, strict=True)]

    def document(self) -> dict[str, Any]:
        """The tiers by name."""
        found: dict[str, Any] = super().document()["by_name"]
        return found
