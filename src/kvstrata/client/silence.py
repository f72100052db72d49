"""Decides when to stop asking a server that does not answer, and when to ask it again.  No I/O, no clock.

While the server ANSWERS, requests go out.  While it is SILENT, callers are answered at once, with misses.

A client process that did not run for a while (stopped, no free core, its interpreter locked) finds a ping overdue
although the server answered it long ago: the answer waits unread in this process.  So a check that runs more than
`LATE_S` after it was due does not yet call the server silent; the next check does, `SECOND_LOOK_S` later, if the server
was not heard by then.

Pings go out every `TELL_PING_S` while they have something to tell, every `BUSY_PING_S` while requests are outstanding,
else every `IDLE_PING_S`.  To a silent server they go
out every `SILENT_PING_S`, so that a server that runs again is noticed within that time.
"""

from __future__ import annotations

import math

from kvstrata.patience import patience

TELL_PING_S = 0.01
BUSY_PING_S = 0.1
IDLE_PING_S = 1.0
SILENT_PING_S = 0.5
PING_PATIENCE_S = 0.3
LATE_S = 0.05
SECOND_LOOK_S = 0.1


class Silence:
    """Whether the server of one link is heard. All times are seconds of one monotonic clock."""

    __slots__ = ("_due_s", "_last_ping_s", "_was_late", "silent", "spells")

    def __init__(self) -> None:
        self.silent = True
        """Whether callers get misses without the server being asked."""
        self.spells = 0
        """How often the server fell silent after it had answered."""
        self._last_ping_s = -math.inf
        self._due_s = math.inf
        self._was_late = False

    def lost(self) -> None:
        """Note that the connection is lost; the server counts as silent until it is heard on the next one."""
        self.spells += not self.silent
        self.silent = True
        self._last_ping_s = -math.inf
        self._forget_pings()

    def heard(self) -> None:
        """Note a message of the server; it answers all pings so far."""
        self.silent = False
        self._forget_pings()

    def pinged(self, now_s: float) -> None:
        """Note that a ping was sent."""
        self._last_ping_s = now_s
        self._due_s = min(self._due_s, now_s + patience(PING_PATIENCE_S))

    def check(self, now_s: float) -> bool:
        """Whether the server falls silent now. Call it after everything that arrived by `now_s` was reported.

        Returns True once for each silence.
        """
        if now_s < self.check_due_s():
            return False
        if not self._was_late and now_s > self._due_s + LATE_S:
            self._was_late = True
            self._due_s = now_s + patience(SECOND_LOOK_S)
            return False
        self.silent = True
        self.spells += 1
        return True

    def ping_due_s(self, busy: bool, tells: bool = False) -> float:
        """When the next ping is due; -inf: now. `busy`: requests are outstanding; `tells`: it has something to tell."""
        if self.silent:
            return self._last_ping_s + SILENT_PING_S
        return self._last_ping_s + (TELL_PING_S if tells else BUSY_PING_S if busy else IDLE_PING_S)

    def check_due_s(self) -> float:
        """When `check` may next change something; inf when no answer is awaited."""
        return math.inf if self.silent else self._due_s

    def _forget_pings(self) -> None:
        self._due_s = math.inf
        self._was_late = False
