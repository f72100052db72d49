"""Recent events of the cluster; the last MAX_EVENTS are kept in memory."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, NamedTuple

from kvstrata.clock import Clock
from kvstrata.observability.logging import EventLog

MAX_EVENTS = 8_192
LOUD = frozenset(
    {
        "died",
        "superseded",
        "obeys_others",
        "list_again",
        "directory_full",
        "clock",
        "snapshot_ignored",
        "snapshot_failed",
    }
)
"""Kinds of events that are logged as warnings."""


class Happened(NamedTuple):
    """One event of the cluster."""

    number: int
    """Greater than the number of any earlier event, also across restarts."""
    unix_ms: int
    kind: str
    instance: str
    facts: dict[str, Any]


class Journal:
    """Records the cluster's events: keeps the last ones for readers, and writes each to the log."""

    def __init__(self, clock: Clock, first_number: int) -> None:
        self._clock = clock
        self._log = EventLog("controller")
        self._events: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._next = first_number
        self._more = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the last event; before the first event, one less than that event's number."""
        return self._next - 1

    def say(self, kind: str, instance: str = "", **facts: Any) -> None:
        """Record an event; `instance`: the instance that it concerns, if any."""
        self._events.append(Happened(self._next, self._clock.unix_ms(), kind, instance, facts))
        self._next += 1
        self._more.set()
        self._more = asyncio.Event()
        level = logging.WARNING if kind in LOUD else logging.INFO
        named = {"instance": instance} if instance else {}
        self._log.repeated(level, f"{kind} {instance}", kind, **named, **facts)

    def after(self, number: int, limit: int) -> tuple[list[Happened], bool]:
        """The first events after a number, and whether some of them are no longer kept."""
        found = [event for event in self._events if event.number > number][:limit]
        oldest = self._events[0].number if self._events else self._next
        return found, number + 1 < oldest

    def latest(self, limit: int) -> list[Happened]:
        """The last events, oldest first."""
        return list(self._events)[-limit:]

    async def wait(self, number: int, wait_s: float) -> None:
        """Wait until an event after this number exists, at most `wait_s`."""
        if self.last > number:
            return
        try:
            await asyncio.wait_for(self._more.wait(), wait_s)
        except TimeoutError:
            pass
