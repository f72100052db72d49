"""Decides when to stop calling an adapter or a process that does not answer, and when to try again.  Sans-IO: the
caller passes the time in.

A CLOSED breaker lets everything through.  After `failures` failures in a row it is OPEN and lets nothing through for
`open_s`; then it lets one operation through as a probe.  If the probe fails, the breaker is OPEN again for twice as
long, at most `max_open_s`.
"""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    """The state of a breaker, which decides which operations it admits."""

    CLOSED = "closed"
    """All operations."""
    OPEN = "open"
    """No operation, until its time is over."""
    PROBING = "probing"
    """No operation until the admitted probe has ended."""


class Breaker:
    """A circuit breaker. Not thread-safe."""

    def __init__(self, failures: int, open_s: float, max_open_s: float) -> None:
        """`failures`: number of failures in a row that opens the breaker."""
        self._limit = failures
        self._first_open_s = self._open_s = open_s
        self._max_open_s = max_open_s
        self._failed_in_a_row = 0
        self._until_s = 0.0
        self.state = BreakerState.CLOSED

    def would_admit(self, now_s: float) -> bool:
        """Whether `admit` would return True; changes nothing."""
        return self.state is BreakerState.CLOSED or (
            self.state is BreakerState.OPEN and now_s >= self._until_s
        )

    def admit(self, now_s: float) -> bool:
        """Whether an operation may go through now; if so, the caller must report the operation's end by `ended`."""
        if not self.would_admit(now_s):
            return False
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.PROBING
        return True

    def ended(self, well: bool, now_s: float) -> None:
        """Report the end of an admitted operation."""
        if well:
            self._failed_in_a_row = 0
            self._open_s = self._first_open_s
            self.state = BreakerState.CLOSED
            return
        if self.state is BreakerState.OPEN:  # admitted before the breaker opened
            return
        if self.state is BreakerState.PROBING:
            self._open_s = min(2 * self._open_s, self._max_open_s)
        else:
            self._failed_in_a_row += 1
            if self._failed_in_a_row < self._limit:
                return
        self.state = BreakerState.OPEN
        self._until_s = now_s + self._open_s

    def late_but_well(self, now_s: float) -> None:
        """An operation that was counted as failed has succeeded after all: the next operation may probe at once."""
        if self.state is BreakerState.OPEN:
            self._until_s = min(self._until_s, now_s)
