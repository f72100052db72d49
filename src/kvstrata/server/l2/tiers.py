"""The set of tiers of a running instance, in order of nearness.

A tier of the settings is in the set from the start, even while its storage cannot be reached.  The store and prefetch
controllers know a tier once it is open.  A paused tier stays in the set: its guard (storage/wrap/deadline.py) answers
in place of the medium.

Only server/l2/tier_control.py changes the set.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.folder import FolderState
from kvstrata.storage.stack import Stack


class TierState(enum.StrEnum):
    """Whether a tier gets chunks and answers lookups: only an active one does."""

    UNREACHABLE = "unreachable"
    """Its adapter could not be opened yet, and is opened again and again."""
    ACTIVE = "active"
    PAUSED = "paused"
    """An admin has paused it: its medium is asked nothing."""


@dataclass(slots=True, eq=False)
class Tier:
    """One tier of the set."""

    configured: Stack
    entry: Mapping[str, Any]
    """The adapter's JSON as the settings have it."""
    is_open: bool = True
    reason: str = ""
    """Why it could not be opened the last time."""

    @property
    def name(self) -> str:
        return self.configured.name

    @property
    def adapter(self) -> StorageAdapter:
        """The outermost layer."""
        return self.configured.adapter

    @property
    def state(self) -> TierState:
        if not self.is_open:
            return TierState.UNREACHABLE
        return TierState.PAUSED if self.configured.adapter.paused else TierState.ACTIVE

    @property
    def shown_state(self) -> str:
        """The state for people: an active tier whose directory is not well has the state of its directory."""
        folder = self.configured.folder
        if self.state is TierState.ACTIVE and folder is not None and folder.state is not FolderState.WELL:
            return str(folder.state)
        return str(self.state)


class TierSet:
    """The tiers of an instance, in order. Belongs to the event loop."""

    def __init__(self, opened: Iterable[Stack] = ()) -> None:
        self._tiers = [Tier(stack, {}) for stack in opened]
        self.recuts = False
        """Whether records of one geometry can be made of those of another."""

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def take_loads(self) -> bool:
        """Whether a lookup may find something behind L1."""
        return any(tier.state is TierState.ACTIVE for tier in self._tiers)

    @property
    def hit_beyond_l1(self) -> bool:
        """Whether a lookup may hit chunks that L1's index lacks: in a tier, or in L1 in another geometry."""
        return self.recuts or self.take_loads

    def get(self, name: str) -> Tier | None:
        """The tier with this name; None if the set has none."""
        return next((tier for tier in self._tiers if tier.name == name), None)

    def stack(self, name: str) -> Stack | None:
        """The layers of the tier of that name, if it is open."""
        tier = self.get(name)
        return tier.configured if tier is not None and tier.is_open else None

    def add(self, tier: Tier) -> None:
        """Add a tier behind all others."""
        assert self.get(tier.name) is None, tier.name
        self._tiers.append(tier)

    def clear(self) -> None:
        """Take all tiers out of the set."""
        self._tiers.clear()
