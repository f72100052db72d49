"""The set of tiers of a running instance, in order of nearness.

    state        gets chunks        answers lookups
    -----------  -----------------  ----------------------------
    UNREACHABLE  no                 no
    ACTIVE       yes                yes
    DRAINING     those that waited  unless drained without loads
    DRAINED      no                 unless drained without loads
    REMOVING     no                 no

A tier that was REMOVING leaves the set once it has closed and no operation of it is stuck.

Invariants
1. A name is given only once in the life of the server, so a late report of a removed tier names no other tier.
2. Positions number the tiers that are not REMOVING, from 0; a lookup asks in this order.
3. The store and prefetch controllers keep their own state of a tier from `join` to `leave`, but none of an
   UNREACHABLE one; they read here which tiers exist, in which order and in which state.

Only server/l2/tier_control.py changes the set.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvstrata.states import Machine
from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.stack import Stack

REMOVED = "adapter_removed"
"""Short reason for operations that were waiting when their tier left."""


class TierState(enum.StrEnum):
    """Whether a tier gets chunks, and whether it is being removed."""

    UNREACHABLE = "unreachable"
    """Its adapter could not be opened yet, and is opened again and again; it gets no chunks and answers no lookups."""
    ACTIVE = "active"
    """It gets the chunks that its policy chooses, and answers lookups."""
    DRAINING = "draining"
    """It gets the chunks that waited when the drain began; it answers lookups unless drained without loads."""
    DRAINED = "drained"
    """No chunk waits for it, and no operation of the drain is under way; it answers lookups as while draining."""
    REMOVING = "removing"
    """It gets no chunks and answers no lookups, and leaves the set when it has closed."""


class TierEvent(enum.Enum):
    """An event in the life of a tier."""

    OPENED = enum.auto()
    """Its storage was reached."""
    DRAIN = enum.auto()
    """An admin drains the tier, or drains it again, now without loads."""
    QUIET = enum.auto()
    """The waiting chunks were put, and the operations under way have ended."""
    RESUME = enum.auto()
    """An admin takes the tier back into use."""
    REMOVE = enum.auto()
    """An admin removes the tier."""


MACHINE = Machine(
    "Tier of an instance",
    TierState,
    TierEvent,
    TierState.UNREACHABLE,
    {
        TierState.UNREACHABLE: {TierEvent.OPENED: TierState.ACTIVE, TierEvent.REMOVE: TierState.REMOVING},
        TierState.ACTIVE: {TierEvent.DRAIN: TierState.DRAINING, TierEvent.REMOVE: TierState.REMOVING},
        TierState.DRAINING: {
            TierEvent.DRAIN: TierState.DRAINING,
            TierEvent.QUIET: TierState.DRAINED,
            TierEvent.RESUME: TierState.ACTIVE,
            TierEvent.REMOVE: TierState.REMOVING,
        },
        TierState.DRAINED: {
            TierEvent.DRAIN: TierState.DRAINING,
            TierEvent.RESUME: TierState.ACTIVE,
            TierEvent.REMOVE: TierState.REMOVING,
        },
    },
)


class Tier:
    """One tier of the set, as the controllers see it."""

    __slots__ = ("configured", "entry", "name", "policy", "reason", "state", "takes_loads")

    def __init__(
        self, configured: Stack, entry: Mapping[str, Any] | None = None, *, is_open: bool = True
    ) -> None:
        """`entry`: the adapter's JSON as it was given."""
        self.configured = configured
        self.entry = dict(entry or {})
        self.name = configured.name
        self.policy = configured.policy
        self.state: TierState = MACHINE.first
        self.reason = ""
        """Why it could not be opened the last time."""
        self.takes_loads = False
        """Whether fetches ask the tier and load from it."""
        if is_open:
            self.opened()

    @property
    def adapter(self) -> StorageAdapter:
        """The outermost layer."""
        return self.configured.adapter

    def opened(self) -> None:
        """The adapter is open."""
        self.step(TierEvent.OPENED)
        self.takes_loads = True

    def step(self, event: TierEvent) -> None:
        """Enter the state that `MACHINE` gives for this event."""
        self.state = MACHINE.after(self.state, event)

    @property
    def takes_puts(self) -> bool:
        """Whether the tier gets further chunks that its policy chooses."""
        return self.state is TierState.ACTIVE


class TierSet:
    """The tiers of an instance, in order. Belongs to the event loop."""

    def __init__(self, opened: Iterable[Stack] = ()) -> None:
        self._tiers = [Tier(configured) for configured in opened]
        self.recuts = False
        """Whether records of one geometry can be made of those of another."""

    def __iter__(self) -> Iterator[Tier]:
        """All tiers, nearest first, including those that are being removed."""
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def placed(self) -> list[Tier]:
        """The tiers that have a position, in order."""
        return [tier for tier in self._tiers if tier.state is not TierState.REMOVING]

    @property
    def take_loads(self) -> bool:
        """Whether a lookup may find something behind L1."""
        return any(tier.takes_loads for tier in self._tiers)

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
        return None if tier is None or tier.state is TierState.UNREACHABLE else tier.configured

    def insert(self, tier: Tier, position: int) -> None:
        """Add a tier at a position; a position past the end is the end."""
        assert self.get(tier.name) is None, tier.name
        placed = self.placed
        at = self._tiers.index(placed[position]) if position < len(placed) else len(self._tiers)
        self._tiers.insert(at, tier)

    def discard(self, tier: Tier) -> None:
        """Take a tier out of the set."""
        self._tiers.remove(tier)
