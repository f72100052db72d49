"""Decides when to stop asking an adapter or a process that does not answer, and when to try again. Sans I/O: the
caller passes the time in.

A CLOSED breaker lets everything through.  After `failures` failures in a row it is OPEN and lets nothing through for
`open_s`; then it lets one operation through as a probe.  If the probe fails, the breaker is OPEN again for twice as
long, at most `max_open_s`.
"""

from __future__ import annotations

import enum

from kvstrata.states import Machine


class BreakerState(enum.Enum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until its time is over."""
    PROBING = "probing"
    """Nothing more until the probe, the one operation that it has let through, has ended."""


class BreakerEvent(enum.Enum):
    """What happens to a breaker."""

    WELL = enum.auto()
    """An operation that was let through ended well."""
    FAILED = enum.auto()
    """An operation that was let through failed; this does not open a closed breaker yet."""
    TRIPPED = enum.auto()
    """An operation that was let through failed, and now so many have failed in a row that a closed breaker opens."""
    PROBE = enum.auto()
    """The breaker's time is over, and an operation asks to be let through."""


MACHINE = Machine(
    "Breaker of an adapter's operation",
    BreakerState,
    BreakerEvent,
    BreakerState.CLOSED,
    {
        BreakerState.CLOSED: {
            BreakerEvent.WELL: BreakerState.CLOSED,
            BreakerEvent.FAILED: BreakerState.CLOSED,
            BreakerEvent.TRIPPED: BreakerState.OPEN,
        },
        # In OPEN, operations that were let through before the breaker opened can still end.
        BreakerState.OPEN: {
            BreakerEvent.WELL: BreakerState.CLOSED,
            BreakerEvent.FAILED: BreakerState.OPEN,
            BreakerEvent.PROBE: BreakerState.PROBING,
        },
        BreakerState.PROBING: {
            BreakerEvent.WELL: BreakerState.CLOSED,
            BreakerEvent.FAILED: BreakerState.OPEN,
        },
    },
)


class Breaker:
    """A circuit breaker, see the module. Not thread-safe."""

    def __init__(self, failures: int, open_s: float, max_open_s: float) -> None:
        """`failures`: number of failures in a row that opens the breaker."""
        self._limit = failures
        self._first_open_s = self._open_s = open_s
        self._max_open_s = max_open_s
        self._failed_in_a_row = 0
        self._until_s = 0.0
        self.state = MACHINE.first

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
            self.state = MACHINE.after(self.state, BreakerEvent.PROBE)
        return True

    def ended(self, well: bool, now_s: float) -> None:
        """Note how an admitted operation ended."""
        before = self.state
        if well:
            self._failed_in_a_row = 0
            self._open_s = self._first_open_s
            self.state = MACHINE.after(before, BreakerEvent.WELL)
            return
        self._failed_in_a_row += before is BreakerState.CLOSED
        trips = before is BreakerState.CLOSED and self._failed_in_a_row >= self._limit
        self.state = MACHINE.after(before, BreakerEvent.TRIPPED if trips else BreakerEvent.FAILED)
        if before is BreakerState.PROBING:
            self._open_s = min(2 * self._open_s, self._max_open_s)
        if self.state is BreakerState.OPEN and before is not BreakerState.OPEN:
            self._until_s = now_s + self._open_s

    def late_but_well(self, now_s: float) -> None:
        """Note that an operation counted as failed has ended well after all: the next operation may probe at once."""
        if self.state is BreakerState.OPEN:
            self._until_s = min(self._until_s, now_s)
