"""Policies that know nothing of caches: what every other policy has to beat."""

from __future__ import annotations

from typing import Literal

from kvstrata.policy.routing.hashing import first
from kvstrata.policy.routing.interface import PlainPolicy, View


def load_of(view: View, by: str) -> list[float]:
    """Return the load of each engine: its requests in flight, their uncached tokens, or the seconds of its queue."""
    if by == "requests":
        return [(engine.requests + 1) / engine.share - 1.0 for engine in view.engines]
    if by == "tokens":
        return [float(engine.prefill_tokens) for engine in view.engines]
    return [engine.queue_s(view.now_s) for engine in view.engines]


class LeastLoaded(PlainPolicy, frozen=True, kw_only=True, tag="least_loaded", tag_field="policy"):
    """The engine with the least load; `by` says what counts, by default the requests in flight."""

    by: Literal["requests", "tokens", "seconds"] = "requests"

    def scores(self, view: View) -> list[float]:
        """Return the loads."""
        return load_of(view, self.by)

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the load under its name."""
        return {self.by: load_of(view._replace(engines=[view.engines[index]]), self.by)[0]}


class RoundRobin(PlainPolicy, frozen=True, kw_only=True, tag="round_robin", tag_field="policy"):
    """The engines in turn, in the order of their names, by the request's number."""

    def scores(self, view: View) -> list[float]:
        """Return 0 for the engine whose turn it is, 1 for the others."""
        names = sorted(engine.name for engine in view.engines)
        turn = names[view.request.number % len(names)] if names else ""
        return [0.0 if engine.name == turn else 1.0 for engine in view.engines]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the number that decided."""
        return {"number": view.request.number}


class Session(PlainPolicy, frozen=True, kw_only=True, tag="session", tag_field="policy"):
    """Every request of a session at one engine, by rendezvous hash; without a session, the least requests in flight."""

    def scores(self, view: View) -> list[float]:
        """Return 0 for the session's engine, 1 for the others."""
        if not view.request.session:
            return load_of(view, "requests")
        if not view.engines:
            return []
        chosen = first(view.request.session, [engine.name for engine in view.engines])
        return [0.0 if index == chosen else 1.0 for index in range(len(view.engines))]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the requests, which decide without a session."""
        return {"requests": view.engines[index].requests}
