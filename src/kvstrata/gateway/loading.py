"""The loads that this gateway's requests wait for, so that no link is taken for idle while others load over it.

A load has two ends: the engine that gets the KV, and for a peer's the instance that sends it.  It is taken to go on
evenly for as long as it was expected to take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvstrata.gateway.routing.model import Tier


class _Load(NamedTuple):
    engine: str
    tier: Tier
    source: str
    tokens: int
    began_s: float
    takes_s: float


class Loading:
    """See the module. Belongs to the event loop."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._loads: dict[int, _Load] = {}
        """By the request's number."""

    def __len__(self) -> int:
        return len(self._loads)

    def began(self, number: int, engine: str, tier: Tier, source: str, tokens: int, takes_s: float) -> None:
        """A request was sent that must load so many tokens first, which should take `takes_s`, more than 0."""
        self._loads[number] = _Load(engine, tier, source, tokens, self._now_s(), takes_s)

    def ended(self, number: int) -> None:
        """Its first token has come, or it has ended; requests that load nothing may be named too."""
        self._loads.pop(number, None)

    def queued(self, sources: Collection[str] = ()) -> Counter[tuple[str, Tier]]:
        """Tokens still to be loaded by each engine from each tier.

        Those that come from the peers `sources` are counted for the engine "" instead: they delay whoever loads from
        the same peers.
        """
        now_s, found = self._now_s(), Counter[tuple[str, Tier]]()
        for one in self._loads.values():
            left = one.tokens * max(0.0, 1.0 - (now_s - one.began_s) / one.takes_s)
            shared = one.tier == "peer" and one.source in sources
            found["" if shared else one.engine, one.tier] += round(left)
        return found
