"""The tiers as an admin sees them: a row for each, and which tiers a restart would bring back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvstrata.config.secrets import shown
from kvstrata.server.l2.backfill import Backfills
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tiers import Tier, TierSet, TierState
from kvstrata.storage.folder import FolderState


class TierRows:
    """Reads the tiers for an admin. Belongs to the event loop."""

    def __init__(
        self, tiers: TierSet, store: StoreController, prefetch: PrefetchController, backfills: Backfills
    ) -> None:
        self._tiers = tiers
        self._store = store
        self._prefetch = prefetch
        self._backfills = backfills
        self._settings: dict[str, Mapping[str, Any]] = {}

    def of_settings(self, name: str, entry: Mapping[str, Any]) -> None:
        """Note a tier that the settings name."""
        self._settings[name] = entry

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Entries of the tiers that the settings named when the server started, by name."""
        return self._settings

    def is_in_settings(self, entry: Mapping[str, Any]) -> bool:
        """Whether the settings have exactly this entry. False for an entry with a secret, which a yes would confirm."""
        return entry in self._settings.values() and not shown(entry)[1]

    async def all(self) -> list[dict[str, Any]]:
        """A row for each tier, nearest first."""
        tiers = list(self._tiers)
        usages = await asyncio.gather(*(self._usage(tier) for tier in tiers))
        rows = zip(tiers, usages, strict=True)
        return [{**self.row(tier), "usage": usage} for tier, usage in rows]

    def missing(self) -> list[str]:
        """Names of tiers of the settings that are not in the set any more; a restart brings them back."""
        there = [tier.entry for tier in self._tiers.placed]
        return [name for name, entry in self._settings.items() if entry not in there]

    def status(self) -> dict[str, Any]:
        """For the status document, by name."""
        return {
            tier.name: {
                "state": _state(tier),
                "takes_loads": tier.takes_loads,
                **_status(tier),
            }
            for tier in self._tiers
        }

    def row(self, tier: Tier) -> dict[str, Any]:
        """The row of one tier, without its secrets."""
        placed = self._tiers.placed
        capabilities = tier.adapter.capabilities
        entry, left_out = shown(tier.entry)
        return {
            "name": tier.name,
            "type": tier.name.rpartition("-")[0],
            "position": placed.index(tier) if tier in placed else None,
            "state": _state(tier),
            "policy": str(tier.policy),
            "takes_loads": tier.takes_loads,
            "persistent": capabilities.persistent,
            "shared": capabilities.shared,
            "layers": tier.configured.describe(),
            "entry": entry,
            "secrets_left_out": left_out,
            "in_settings": tier.entry in self._settings.values(),
            "backfill_left": self._backfills.left(tier.name),
            **_status(tier),
            "puts": self._store.stats_of(tier.name),
            "loads": self._prefetch.stats_of(tier.name),
        }

    async def _usage(self, tier: Tier) -> dict[str, int] | None:
        if tier.state in (TierState.REMOVING, TierState.UNREACHABLE):
            return None
        return (await tier.adapter.usage())._asdict()


def _status(tier: Tier) -> dict[str, Any]:
    """The stack's status, or why the medium of an UNREACHABLE tier cannot be used."""
    status = tier.configured.status()
    if tier.state is TierState.UNREACHABLE:
        status |= {
            "medium": str(FolderState.UNREACHABLE),
            "medium_well": False,
            "reason": tier.reason,
        }
    return status


def _state(tier: Tier) -> str:
    """The state of a tier for people: an active one whose directory is not well has the state of its directory."""
    folder = tier.configured.folder
    if tier.state is TierState.ACTIVE and folder is not None and folder.state is not FolderState.WELL:
        return str(folder.state)
    return str(tier.state)
