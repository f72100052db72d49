"""Measures how fast engines load KV from a tier: a latency, and tokens a second beyond it.

A sample is a prompt that did not wait: the tokens that were loaded for it, and the seconds to its first token, less
those for the tokens that were computed.  Latency and rate are the line of least squares through the newest samples; a
line that no load can follow (a negative latency or rate) gives way to the rate alone.

1. At most `MAX_SAMPLES` newest samples are kept for an engine and tier.
2. An engine without samples of a tier has the median of the others' rates; without any, a load is taken to be
   `ASSUMED_GAIN` times as fast as computing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator

from kvstrata.policy.routing.model import LoadPath, Tier

MAX_SAMPLES = 64
ASSUMED_GAIN = 8.0
ASSUMED_LATENCY_S = 0.01


class LoadRates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, Tier], deque[tuple[int, float]]] = {}
        self._paths: dict[tuple[str, Tier], LoadPath] = {}
        self._usual: dict[Tier, LoadPath] = {}
        """The medians over all engines."""
        self.changes = 0
        """Grows with each sample, and with each engine that is dropped."""

    def observe(self, engine: str, tier: Tier, tokens: int, seconds: float) -> bool:
        """Add a sample; return whether it says anything."""
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return False
        samples = self._samples.setdefault((engine, tier), deque(maxlen=MAX_SAMPLES))
        samples.append((tokens, seconds))
        self._paths[engine, tier] = fitted(samples)
        self._find_usual()
        return True

    def kept(self) -> Iterator[tuple[str, Tier, int, float]]:
        """Yield all samples as (engine, tier, tokens, seconds). From any thread: samples may be added meanwhile."""
        for engine, tier in list(self._samples):
            for tokens, seconds in list(self._samples.get((engine, tier), ())):
                yield engine, tier, tokens, seconds

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone."""
        for where in [where for where in self._samples if where[0] == engine]:
            del self._samples[where], self._paths[where]
        self._find_usual()

    def path(self, engine: str, tier: Tier, prefill_tokens_s: float) -> LoadPath:
        """Return how fast an engine that computes `prefill_tokens_s` loads from a tier."""
        found = self._paths.get((engine, tier)) or self._usual.get(tier)
        return found or LoadPath(latency_s=ASSUMED_LATENCY_S, tokens_s=ASSUMED_GAIN * prefill_tokens_s)

    def _find_usual(self) -> None:
        self.changes += 1
        self._usual.clear()
        for tier in {tier for _, tier in self._paths}:
            paths = [path for (_, of), path in self._paths.items() if of == tier]
            self._usual[tier] = LoadPath(
                latency_s=statistics.median(one.latency_s for one in paths),
                tokens_s=statistics.median(one.tokens_s for one in paths),
            )


def fitted(samples: deque[tuple[int, float]]) -> LoadPath:
    """Return latency and rate by least squares over (tokens, seconds) pairs, at least one."""
    n = len(samples)
    mean_tokens = sum(tokens for tokens, _ in samples) / n
    mean_s = sum(seconds for _, seconds in samples) / n
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in samples)
    slope = 0.0
    if spread:
        slope = sum((tokens - mean_tokens) * (seconds - mean_s) for tokens, seconds in samples) / spread
    latency_s = mean_s - slope * mean_tokens
    if slope <= 0.0 or latency_s < 0.0:
        return LoadPath(latency_s=0.0, tokens_s=mean_tokens / mean_s)
    return LoadPath(latency_s=latency_s, tokens_s=1.0 / slope)
