"""Times how long an engine takes for the prompts that it is sent: over busy periods, since prompts share its steps.

    no prompt waits ─▶ begin ─▶ (add) … first tokens … ─▶ none waits any more: end       ─▶ report for each prompt

A short prompt whose step a long one joined seems slow, and the long one behind it seems fast; together they tell
how fast the engine is.  How many tokens were computed is told when an answer ends, if the engine tells it at all: until
all prompts have reported, the expected number stands for it.  A period of which a prompt failed, or was loaded rather
than computed, tells nothing.
"""

from __future__ import annotations

from kvstrata.policy.routing.rates import Rates, Sample

AGREES = 0.05
"""A report that differs by less from what was expected changes nothing."""


class BusyPeriod:
    """See the module. Belongs to the choices of its prompts, and to its engine as long as it lasts."""

    def __init__(self, rates: Rates, engine: str, began_s: float, running: float) -> None:
        self._rates = rates
        self._engine = engine
        self._began_s = began_s
        self._running = running
        self._seconds = 0.0
        """0: it lasts."""
        self._expected = 0
        self._computed = 0
        self._reported = 0
        self._tells = True
        self._came_whole = False
        self._sample: Sample | None = None
        self.prompts = 0

    def add(self, expected_tokens: int, *, streams: bool = True) -> None:
        """One more prompt is sent to the engine, which is expected to compute so many tokens.

        `streams`: its answer does not come whole.
        """
        self.prompts += 1
        self._came_whole |= not streams
        self._expected += expected_tokens

    @property
    def tells(self) -> bool:
        """Whether it may still tell something."""
        return self._tells

    def spoil(self) -> None:
        """What it tells is not known any more."""
        self._tells = False
        self._retract()

    def end(self, now_s: float) -> None:
        """No prompt waits any more."""
        self._seconds = now_s - self._began_s
        if self._tells:
            self._observe(self._expected)

    def report(self, computed_tokens: int) -> None:
        """A prompt's answer told how many of its tokens were computed."""
        self._computed += computed_tokens
        self._reported += 1
        if not self._tells or not self._seconds or self._reported < self.prompts:
            return
        if abs(self._computed - self._expected) > AGREES * self._expected:
            self._retract()
            self._observe(self._computed)

    def _observe(self, tokens: int) -> None:
        self._sample = self._rates.observe(
            self._engine, tokens, self._seconds, self._running, whole=self._came_whole
        )

    def _retract(self) -> None:
        if self._sample is not None:
            self._rates.retract(self._sample)
            self._sample = None
