"""What a routing policy is, and what it sees."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import msgspec
import msgspec.structs

from kvstrata.policy.routing.model import Copy, EngineState, Knowledge, Request, Tier, Way


class View(NamedTuple):
    """One decision's inputs, sorted by use. Built once for each decision; policies change nothing in it."""

    request: Request
    engines: list[EngineState]
    """The healthy ones."""
    own: dict[str, list[Copy]]
    """Copies of one engine, by its name, without those of `Knowledge.cached`."""
    shared: list[Copy]
    """Copies that any engine with a path can have."""
    knowledge: Knowledge
    now_s: float

    def held(self, engine: str) -> int:
        """Return the prefix that an engine's own cache has for certain, by `Knowledge.cached`."""
        return min(self.knowledge.cached.get(engine, 0), self.request.tokens)

    def cached(self, engine: str, *tiers: Tier) -> int:
        """Return the longest prefix of one engine's own copies in these tiers, no longer than the prompt.

        Rivals take each copy at its full length, except those that are only predicted or unconfirmed: their indices
        know only what events told.
        """
        longest = self.held(engine) if "l0" in tiers else 0
        for copy in self.own.get(engine, ()):
            if copy.tier in tiers and copy.tokens > longest and copy.certainty in ("exact", "degraded"):
                longest = copy.tokens
        return min(longest, self.request.tokens)

    def holders(self, *tiers: Tier) -> dict[str, int]:
        """Return `cached` of all engines of which something is known, by name; some may have gone or be unhealthy."""
        if "l0" not in tiers:
            return {name: self.cached(name, *tiers) for name in self.own}
        tokens = self.request.tokens
        held = {name: min(cached, tokens) for name, cached in self.knowledge.cached.items()}
        for name in self.own:
            held[name] = self.cached(name, *tiers)
        return held

    def shared_tokens(self) -> int:
        """Return the longest prefix that any engine can have."""
        return min(self.request.tokens, max((copy.tokens for copy in self.shared), default=0))


class Policy(Protocol):
    """Costs of a request at each engine; `choose` takes the lowest.

    A policy is a frozen Struct whose fields are its knobs, tagged with its name, so that a record names both.  It reads
    only the view: no clock, no I/O, no memory of earlier decisions.
    """

    __struct_config__: ClassVar[msgspec.structs.StructConfig]
    near_share: ClassVar[float]
    """Costs at most this share above the lowest are a near-tie; 0: only equal costs are."""

    @property
    def temperature(self) -> float:
        """Of a softmax over the costs, divided by their range; 0: the lowest cost wins."""

    def scores(self, view: View) -> list[float]:
        """Return the cost at each engine of the view, in its order; finite, lower is better."""

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the parts of the cost at one engine, to be read by people."""

    def way(self, view: View, index: int) -> Way | None:
        """Return how this engine should get the prefix, if the policy plans that."""


class PlainPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that draws nothing and plans no loads; base of the others."""

    near_share: ClassVar[float] = 0.0

    @property
    def temperature(self) -> float:
        """Nothing is drawn."""
        return 0.0

    def way(self, view: View, index: int) -> Way | None:
        """No load is planned."""
        return None
