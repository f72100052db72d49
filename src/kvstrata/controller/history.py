"""What happened in the cluster, and how its numbers went: both bounded, both in memory only."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

MAX_EVENTS = 8_192
MAX_POINTS = 720
SAMPLE_S = 5.0
"""Between two points: an hour in all."""


class Happened(NamedTuple):
    """One event of the cluster."""

    number: int
    """Greater than that of any event before, also across restarts."""
    unix_ms: int
    kind: str
    instance: str
    facts: dict[str, Any]


class EventTail:
    """The last events, for readers that come back with a cursor or wait for more."""

    def __init__(self, first_number: int) -> None:
        self._events: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._next = first_number
        self._more = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the last event; one below the first where there was none."""
        return self._next - 1

    def add(self, unix_ms: int, kind: str, instance: str, facts: dict[str, Any]) -> None:
        """Something happened."""
        self._events.append(Happened(self._next, unix_ms, kind, instance, facts))
        self._next += 1
        self._more.set()
        self._more = asyncio.Event()

    def after(self, number: int, limit: int) -> tuple[list[Happened], bool]:
        """The first events behind a number, and whether some behind it are lost."""
        found = [event for event in self._events if event.number > number][:limit]
        oldest = self._events[0].number if self._events else self._next
        return found, number + 1 < oldest

    def latest(self, limit: int) -> list[Happened]:
        """The last ones, oldest first."""
        return list(self._events)[-limit:]

    async def wait(self, number: int, wait_s: float) -> None:
        """Returns when there is an event behind a number, or after `wait_s`."""
        if self.last > number:
            return
        try:
            await asyncio.wait_for(self._more.wait(), wait_s)
        except TimeoutError:
            pass


class Point(NamedTuple):
    """Numbers at one time, or of the time since the point before (`_per_s`)."""

    unix_ms: int
    live: int
    dead: int
    keys: dict[str, int]
    """By tier, as the directory has them."""
    used_bytes: dict[str, int]
    """By tier, as instances tell."""
    hits_per_s: dict[str, float]
    """Chunks by source: `l1`, `l2`, `peer`, and `miss`."""
    event_keys_per_s: float
    """Tags of events that were applied."""
    sync_keys_per_s: float
    lookups_per_s: float
    directory_bytes: int


class Series:
    """Points of the last hour."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)

    def add(self, point: Point) -> None:
        """The newest."""
        self._points.append(point)

    def since(self, unix_ms: int) -> list[Point]:
        """Those behind a time, oldest first."""
        return [point for point in self._points if point.unix_ms > unix_ms]
