"""When to stop asking a server that does not answer, and when to ask again.  Decides only; no I/O, no clock.

States: CLOSED (calls go out) and OPEN (calls are answered at once as misses).

    CLOSED → OPEN    the oldest unanswered ping is older than `PING_PATIENCE_S`, or `trip` (connection lost)
    OPEN   → CLOSED  anything is heard from the server

Pings go out every `BUSY_PING_S` while requests are outstanding, else every `IDLE_PING_S`; in OPEN they go on,
`IDLE_PING_S` apart at most, so that a server that runs again is noticed within that time.
"""

from __future__ import annotations

import math

BUSY_PING_S = 0.1
IDLE_PING_S = 1.0
OPEN_PING_S = 0.5
PING_PATIENCE_S = 0.3


class Breaker:
    """One per connection. All times are seconds of one monotonic clock."""

    __slots__ = ("_last_ping_s", "_oldest_unanswered_s", "is_open", "trips")

    def __init__(self) -> None:
        self.is_open = True
        self.trips = 0
        """How often it went from CLOSED to OPEN."""
        self._last_ping_s = -math.inf
        self._oldest_unanswered_s = math.inf

    def trip(self) -> None:
        """The connection is lost: open until something is heard on the next one."""
        if not self.is_open:
            self.is_open = True
            self.trips += 1
        self._last_ping_s = -math.inf
        self._oldest_unanswered_s = math.inf

    def heard(self) -> None:
        """The server said something."""
        self.is_open = False
        self._oldest_unanswered_s = math.inf

    def pinged(self, now_s: float) -> None:
        """A ping was sent."""
        self._last_ping_s = now_s
        self._oldest_unanswered_s = min(self._oldest_unanswered_s, now_s)

    def check(self, now_s: float) -> bool:
        """Apply the passage of time; call it after everything received was reported. True when it opened."""
        if self.is_open or now_s - self._oldest_unanswered_s < PING_PATIENCE_S:
            return False
        self.is_open = True
        self.trips += 1
        return True

    def ping_due_s(self, busy: bool) -> float:
        """When the next ping is to be sent; -inf for at once. `busy`: requests are outstanding."""
        if self.is_open:
            return self._last_ping_s + OPEN_PING_S
        return self._last_ping_s + (BUSY_PING_S if busy else IDLE_PING_S)

    def check_due_s(self) -> float:
        """When `check` may next change something; inf when nothing is awaited."""
        return math.inf if self.is_open else self._oldest_unanswered_s + PING_PATIENCE_S
