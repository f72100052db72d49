"""What engines have before them: the prompts that were sent and have no first token yet.

An engine that computes one prompt and has the next at hand is never idle, and with continuous batching many short
prompts share its next step.  So it has *room* for a further prompt as long as

1. fewer than `AT_HAND` prompts are before it, or
2. these take at most `ahead_s` seconds, by its measured rate and by all their tokens that are not cached.

Before any rate is measured, it gets `UNMEASURED` prompts and then none until all have their first token, which
measures it: an engine that always has a prompt before it tells nothing.

Estimates of what it has computed meanwhile decide nothing: room comes with first tokens and ends.  The exception are
answers that come whole, whose first byte tells nothing of their prompt: such a prompt counts until its first token was
expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstrata.gateway.fleet import ServingEngine

AT_HAND = 2
UNMEASURED = 8


class Prompt(NamedTuple):
    """A prompt that was sent."""

    tokens: int
    """Not cached."""
    until_s: float
    """When it counts as computed in any case."""


class Ahead:
    """See the module. Belongs to the event loop."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._engines: dict[ServingEngine, dict[int, Prompt]] = {}
        self._full: set[ServingEngine] = set()
        """Engines that had `UNMEASURED` prompts, and have not been without one since."""

    def __len__(self) -> int:
        """Return the number of prompts that count."""
        return sum(map(len, self._engines.values()))

    def sent(self, engine: ServingEngine, number: int, tokens: int, until_s: float) -> None:
        """Count a request's prompt."""
        prompts = self._engines.setdefault(engine, {})
        prompts[number] = Prompt(tokens, until_s)
        if len(prompts) >= UNMEASURED:
            self._full.add(engine)

    def done(self, engine: ServingEngine, number: int) -> None:
        """The request has its first token, or has ended. May be repeated."""
        prompts = self._engines.get(engine)
        if prompts is not None:
            prompts.pop(number, None)
            if not prompts:
                del self._engines[engine]
                self._full.discard(engine)

    def has_room(self, engine: ServingEngine, ahead_s: float, *, measured: bool) -> bool:
        """Whether a further prompt would be computed soon. `measured`: the engine's rate is more than a guess."""
        now_s = self._now_s()
        prompts = [one for one in self._engines.get(engine, {}).values() if one.until_s > now_s]
        if not measured:
            return not prompts or engine not in self._full
        if len(prompts) < AT_HAND:
            return True
        return sum(one.tokens for one in prompts) <= ahead_s * engine.load.prefill_tokens_s

    def next_s(self) -> float:
        """When a prompt will count as computed without being told; infinite: none will."""
        now_s = self._now_s()
        times = (one.until_s for prompts in self._engines.values() for one in prompts.values())
        return min((until_s for until_s in times if until_s > now_s), default=float("inf"))
