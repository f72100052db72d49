"""Notices that the process did not run for a while: it was stopped, or its machine was frozen or overloaded.

Clocks went on meanwhile, and what others sent waits unread.  So no time limit may end by the pause alone, and no
measurement may count it.  A tick is due before every limit that has run out during a pause, so limits can still be
put off when it comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstrata.observability.logging import EventLog

TICK_S = 0.2
LEAST_S = 1.0
"""A shorter pause is none."""


class Pauses:
    """Belongs to the event loop."""

    def __init__(self, paused: Callable[[float], None]) -> None:
        """`paused` is called with the seconds that a pause has lasted."""
        self._paused = paused
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle
        self._log = EventLog("gateway")
        self._wait()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._due_s = self._loop.time() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = self._loop.time() - self._due_s
        self._wait()
        if late_s >= LEAST_S:
            self._paused(late_s)
            self._log.repeated(logging.WARNING, "paused", "paused", seconds=round(late_s, 1))
