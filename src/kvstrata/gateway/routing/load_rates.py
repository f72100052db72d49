"""How fast engines load KV from a tier: a latency, and tokens a second beyond it.

What lies in L2 or at a peer is loaded into L1 first.  Controllers tell how fast an engine's instance does that, and how
fast the engine then loads from L1.  What nobody has told is taken to be `ASSUMED_GAIN` times as fast as computing.
"""

from __future__ import annotations

from kvstrata.gateway.routing.model import LoadPath, Tier

ASSUMED_GAIN = 8.0
ASSUMED_LATENCY_S = 0.01


class LoadRates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, Tier], LoadPath] = {}

    def tell(self, engine: str, tier: Tier, path: LoadPath) -> None:
        """The engine has measured how fast it loads from L1, or its instance how fast from another tier into L1."""
        self._told[engine, tier] = path

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone."""
        for where in [where for where in self._told if where[0] == engine]:
            del self._told[where]

    def path(self, engine: str, tier: Tier, prefill_tokens_s: float) -> LoadPath:
        """Return how fast an engine that computes `prefill_tokens_s` loads from a tier. It must not be changed."""
        found = self._told.get((engine, tier))
        if found is None:
            found = LoadPath(latency_s=ASSUMED_LATENCY_S, tokens_s=ASSUMED_GAIN * prefill_tokens_s)
        if tier in ("l0", "l1"):
            return found
        then = self.path(engine, "l1", prefill_tokens_s)
        return LoadPath(
            latency_s=found.latency_s + then.latency_s,
            tokens_s=1.0 / (1.0 / found.tokens_s + 1.0 / then.tokens_s),
        )
