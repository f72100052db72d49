"""Stops asking a controller that does not answer in time.  No I/O.

closed ── LIMIT failures in a row ──▶ open ── one question each AGAIN_S, doubling to AGAIN_MAX_S ──▶ open
   ▲                                                      │ answered in time
   └──────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 4
AGAIN_S, AGAIN_MAX_S = 1.0, 30.0


class Breaker:
    """See the module."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._failures = 0
        self._again_s = AGAIN_S
        self._next_s = 0.0

    @property
    def open(self) -> bool:
        """Whether only a question now and then is let through."""
        return self._failures >= LIMIT

    @property
    def due(self) -> bool:
        """Whether a question may be asked now."""
        return not self.open or self._now_s() >= self._next_s

    def asked(self) -> None:
        """A question is asked: while the breaker is open, the next one waits."""
        if self.open:
            self._next_s = self._now_s() + self._again_s
            self._again_s = min(2 * self._again_s, AGAIN_MAX_S)

    def answered(self) -> None:
        """A question was answered in time."""
        self._failures = 0
        self._again_s = AGAIN_S

    def failed(self) -> None:
        """A question was not answered in time, or wrongly."""
        self._failures += 1
        if self._failures == LIMIT:
            self.asked()
