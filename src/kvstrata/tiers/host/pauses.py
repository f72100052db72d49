"""The pauses between the children of an adapter host."""

from __future__ import annotations

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
STEADY_S = 60.0
"""After a child that was up for this long, the pauses begin again with the shortest."""
WELL_S = 3.0
"""They also begin again after a child whose first and last good answer were at least this far apart."""


class Pauses:
    """The next pause is twice as long as the last, until a child was steady. Sans I/O."""

    def __init__(self, longest_s: float, now_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = FIRST_PAUSE_S
        self.begun(now_s)

    def begun(self, now_s: float) -> None:
        """A child is up, or could not be started."""
        self._begun_s = now_s
        self._well_s: tuple[float, float] | None = None
        """Times of the child's first and last good answer."""

    def answered_well(self, now_s: float) -> None:
        """The child's adapter has done what a request asked for."""
        self._well_s = (now_s if self._well_s is None else self._well_s[0], now_s)

    def next_s(self, now_s: float) -> float:
        """The pause before the next child, now that this one has ended."""
        well_s = 0.0 if self._well_s is None else self._well_s[1] - self._well_s[0]
        if well_s >= WELL_S or now_s - self._begun_s >= STEADY_S:
            self._next_s = FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s
