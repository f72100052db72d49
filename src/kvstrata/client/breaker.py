"""When to stop asking a server that does not answer, and when to ask again.  Decides only; no I/O, no clock.

States: CLOSED (calls go out) and OPEN (calls are answered at once as misses).

    CLOSED → OPEN    the oldest unanswered ping is older than `PING_PATIENCE_S`, or `trip` (connection lost)
    OPEN   → CLOSED  anything is heard from the server

A process that was itself not running (stopped, no core free, its interpreter locked) finds a ping old that was
answered long ago, and the answer still on its way through the process.  So a look that comes `LATE_S` after it was
due opens nothing yet: the next one does, `SECOND_LOOK_S` later.

Pings go out every `BUSY_PING_S` while requests are outstanding, else every `IDLE_PING_S`; in OPEN they go on,
`IDLE_PING_S` apart at most, so that a server that runs again is noticed within that time.
"""

from __future__ import annotations

import math

BUSY_PING_S = 0.1
IDLE_PING_S = 1.0
OPEN_PING_S = 0.5
PING_PATIENCE_S = 0.3
LATE_S = 0.05
SECOND_LOOK_S = 0.1


class Breaker:
    """One per connection. All times are seconds of one monotonic clock."""

    __slots__ = ("_due_s", "_last_ping_s", "_was_late", "is_open", "trips")

    def __init__(self) -> None:
        self.is_open = True
        self.trips = 0
        """How often it went from CLOSED to OPEN."""
        self._last_ping_s = -math.inf
        self._due_s = math.inf
        self._was_late = False

    def trip(self) -> None:
        """The connection is lost: open until something is heard on the next one."""
        if not self.is_open:
            self.is_open = True
            self.trips += 1
        self._last_ping_s = -math.inf
        self._forget_pings()

    def heard(self) -> None:
        """The server said something."""
        self.is_open = False
        self._forget_pings()

    def pinged(self, now_s: float) -> None:
        """A ping was sent."""
        self._last_ping_s = now_s
        self._due_s = min(self._due_s, now_s + PING_PATIENCE_S)

    def check(self, now_s: float) -> bool:
        """Apply the passage of time; call it after all that was here at `now_s` was reported. True when it opened."""
        if now_s < self.check_due_s():
            return False
        if not self._was_late and now_s > self._due_s + LATE_S:
            self._was_late = True
            self._due_s = now_s + SECOND_LOOK_S
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
        return math.inf if self.is_open else self._due_s

    def _forget_pings(self) -> None:
        self._due_s = math.inf
        self._was_late = False
