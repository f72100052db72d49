"""Measures how fast engines load KV from a tier: a latency, and tokens a second beyond it.

A sample is a prompt that did not wait: the tokens that were loaded for it, and the seconds to its first token, less
those for the tokens that were computed.  Latency and rate are the line of least squares through the newest samples; a
line that no load can follow (a negative latency or rate) gives way to the rate alone.

1. At most `MAX_SAMPLES` newest samples are kept for an engine and tier.
2. An engine without samples of a tier has the median of the others' rates; without any, a load from L1 is taken to be
   `ASSUMED_GAIN` times as fast as computing.
3. What lies in L2 or at a peer is loaded into L1 first.  The engine's instance may tell how fast that is, and how fast
   the engine then loads it from L1; otherwise both are assumed as in 2.  Samples count more than what was told from
   `ENOUGH_SAMPLES` on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from kvstrata.policy.routing.model import LoadPath, Tier

MAX_SAMPLES = 64
ASSUMED_GAIN = 8.0
ASSUMED_LATENCY_S = 0.01
ENOUGH_SAMPLES = 4


class LoadRates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, Tier], deque[tuple[int, float]]] = {}
        self._paths: dict[tuple[str, Tier], LoadPath] = {}
        self._told: dict[tuple[str, Tier], LoadPath] = {}
        """How fast engines load from L1, and their instances into L1 from elsewhere."""
        self._usual: dict[Tier, LoadPath] = {}
        """The medians over all engines."""
        self._known: dict[tuple[str, Tier], tuple[float, LoadPath]] = {}
        """Paths as they were last found, with the prefill rate for which they were."""

    def observe(self, engine: str, tier: Tier, tokens: int, seconds: float) -> bool:
        """Add a sample; return whether it says anything."""
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return False
        samples = self._samples.setdefault((engine, tier), deque(maxlen=MAX_SAMPLES))
        samples.append((tokens, seconds))
        self._paths[engine, tier] = fitted(samples)
        self._find_usual()
        return True

    def tell(self, engine: str, tier: Tier, path: LoadPath) -> None:
        """The engine has measured how fast it loads from L1, or its instance how fast from another tier into L1."""
        if self._told.get((engine, tier)) != path:
            self._told[engine, tier] = path
            self._known.clear()

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone."""
        for where in [where for where in self._samples if where[0] == engine]:
            del self._samples[where], self._paths[where]
        for where in [where for where in self._told if where[0] == engine]:
            del self._told[where]
        self._find_usual()

    def path(self, engine: str, tier: Tier, prefill_tokens_s: float) -> LoadPath:
        """Return how fast an engine that computes `prefill_tokens_s` loads from a tier. It must not be changed."""
        known = self._known.get((engine, tier))
        if known is not None and known[0] == prefill_tokens_s:
            return known[1]
        found = self._found(engine, tier, prefill_tokens_s)
        self._known[engine, tier] = prefill_tokens_s, found
        return found

    def _found(self, engine: str, tier: Tier, prefill_tokens_s: float) -> LoadPath:
        own, told = self._paths.get((engine, tier)), self._told.get((engine, tier))
        if own is not None and (told is None or len(self._samples[engine, tier]) >= ENOUGH_SAMPLES):
            return own
        if told is None and (usual := self._usual.get(tier)) is not None:
            return usual
        assumed = LoadPath(latency_s=ASSUMED_LATENCY_S, tokens_s=ASSUMED_GAIN * prefill_tokens_s)
        if tier in ("l0", "l1"):
            return told or assumed
        return _in_series(told or assumed, self.path(engine, "l1", prefill_tokens_s))

    def _find_usual(self) -> None:
        self._known.clear()
        self._usual.clear()
        for tier in {tier for _, tier in self._paths}:
            paths = [path for (_, of), path in self._paths.items() if of == tier]
            self._usual[tier] = LoadPath(
                latency_s=statistics.median(one.latency_s for one in paths),
                tokens_s=statistics.median(one.tokens_s for one in paths),
            )


def _in_series(first: LoadPath, then: LoadPath) -> LoadPath:
    """One load after the other."""
    return LoadPath(
        latency_s=first.latency_s + then.latency_s,
        tokens_s=1.0 / (1.0 / first.tokens_s + 1.0 / then.tokens_s),
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
