"""Passes changes of L1 and the tiers on to listeners: one for each controller of the instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Listener(Protocol):
    """Collects the news for one controller. Called on the event loop, at once, in the order of the changes."""

    def pool_events(self, events: Sequence[tuple[int, bytes, int]]) -> None:
        """Events of L1 (Pool.events), in order."""

    def pool_events_lost(self) -> None:
        """The pool dropped events before they were read."""

    def tier_got(self, tier: str, key: bytes) -> None:
        """The tier has this chunk."""

    def tier_lost(self, tier: str, keys: Sequence[bytes]) -> None:
        """The tier does not have these chunks any more."""

    def tier_emptied(self, tier: str) -> None:
        """The tier is empty."""


class News:
    """Passes news on to every listener; outside a cluster it has none. Belongs to the event loop."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = tuple(listeners)

    def pool_events(self, events: Sequence[tuple[int, bytes, int]]) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.pool_events(events)

    def pool_events_lost(self) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.pool_events_lost()

    def tier_got(self, tier: str, key: bytes) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.tier_got(tier, key)

    def tier_lost(self, tier: str, keys: Sequence[bytes]) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.tier_lost(tier, keys)

    def tier_emptied(self, tier: str) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.tier_emptied(tier)
