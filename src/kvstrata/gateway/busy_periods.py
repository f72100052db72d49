"""Times how long an engine takes for the prompts that it is sent: over busy periods, since prompts share its steps.

    no prompt waits ─▶ begin ─▶ (add) … first tokens … ─▶ none waits any more: end       ─▶ report for each prompt

A short prompt whose step a long one joined seems slow, and the long one behind it seems fast; together they tell
how fast the engine is.  How many tokens were computed is told when an answer ends, so a period is known once all its
prompts have reported.  One of which a prompt failed, or was loaded rather than computed, tells nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Busy(NamedTuple):
    """A busy period that is known."""

    tokens: int
    """Computed."""
    seconds: float
    running: float
    """Requests that ran beside it when it began."""


class BusyPeriod:
    """See the module. Belongs to the choices of its prompts, and to its engine as long as it lasts."""

    def __init__(self, began_s: float, running: float) -> None:
        self._began_s = began_s
        self._running = running
        self._ended_s: float | None = None
        self._tokens = 0
        self._reported = 0
        self._whole = True
        self.prompts = 0

    def add(self) -> None:
        """One more prompt is sent to the engine."""
        self.prompts += 1

    @property
    def whole(self) -> bool:
        """Whether it may still tell something."""
        return self._whole

    def spoil(self) -> None:
        """What it tells is no longer known."""
        self._whole = False

    def end(self, now_s: float) -> None:
        """No prompt waits any more."""
        self._ended_s = now_s

    def report(self, computed_tokens: int) -> Busy | None:
        """A prompt's answer told how many of its tokens were computed. Returns what is known, with the last one."""
        self._tokens += computed_tokens
        self._reported += 1
        if not self._whole or self._ended_s is None or self._reported < self.prompts:
            return None
        return Busy(self._tokens, self._ended_s - self._began_s, self._running)
