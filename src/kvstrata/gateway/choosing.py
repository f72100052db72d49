"""Which engine gets a request, and what is learned from how it goes.

    choose ─▶ dispatched ─▶ first_token ─▶ ended ─▶ learn        ended comes after each dispatched, and learn only after
                                                                 an answer

What is known of a prompt's KV comes from two sources.  Engines whose KV events are heard tell what they hold
(residency/); what they were sent within the last moments, whose events are still to come, and everything at other
engines, is taken from what passed through here (prefixes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.decisions import Decisions, Kept
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.prefixes import Prefixes
from kvstrata.gateway.residency.knowledge import Prompt, Residency
from kvstrata.policy.routing.choose import POLICIES, Record, choose
from kvstrata.policy.routing.model import Decision, Knowledge, Request


class Wanted(NamedTuple):
    """What the choice goes by."""

    word: str
    """The request's id."""
    number: int
    """Of all requests that have arrived."""
    model: str
    """Empty: any."""
    tokens: int
    """About how many the prompt has; at least 1."""
    session: str = ""
    made_by: str = ""
    """The only engine that can answer, while it serves; empty: each can."""
    keys: Sequence[bytes] = ()
    """Of the prompt's pieces, see prefixes.py."""
    prompt: Prompt | None = None
    """Its token ids; None: not known."""


class Choice(NamedTuple):
    """An engine for a request, and what the engine was like."""

    wanted: Wanted
    engine: ServingEngine
    cached_tokens: int
    """About how many tokens of the prompt it is taken to have cached."""
    cached_exact: int
    """Tokens that it has in its own cache for certain."""
    in_l1: int
    """Tokens that it stored in its server's L1, which are still there."""
    idle: bool
    """Whether no other prompt waited there."""
    running: float
    at_s: float
    decision: Decision | None
    """None: no other engine could answer."""
    kept: Kept | None
    """For operators; None: too many at once."""


class Choosing:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        residency: Residency,
        meters: Meters,
        now_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._residency = residency
        self._meters = meters
        self._now_s = now_s
        self.prefixes = Prefixes()
        self.decisions = Decisions(now_s)

    def choose(self, wanted: Wanted, tried: Iterable[ServingEngine] = ()) -> Choice | None:
        """The engine for a request, but those that were tried; None if no other serves its model."""
        serving = self._fleet.serving(wanted.model, tried)
        if not serving:
            return None
        for engine in serving:
            if engine.name == wanted.made_by:
                return self._choice(wanted, engine, 0, Knowledge(), None, None)
        request = Request(id=wanted.word, tokens=wanted.tokens, number=wanted.number, session=wanted.session)
        policy = POLICIES[self.settings.policy]()
        now_s = self._now_s()
        knowledge = self._knowledge(wanted, serving, now_s)
        tiers = {copy.tier for copy in knowledge.copies} - {"l0"}
        loads = self._fleet.loads(serving, tiers)
        decision = choose(request, loads, knowledge, now_s, policy=policy)
        kept = None
        if self.decisions.wanted():
            record = Record(
                request=request,
                fleet=loads,
                knowledge=knowledge,
                now_s=now_s,
                policy=policy,
                decision=decision,
            )
            kept = self.decisions.keep(record, wanted.model)
        cached_tokens = min(decision.way.cached_tokens, wanted.tokens - 1) if decision.way is not None else 0
        chosen = next(engine for engine in serving if engine.name == decision.engine)
        return self._choice(wanted, chosen, cached_tokens, knowledge, decision, kept)

    def _choice(
        self,
        wanted: Wanted,
        engine: ServingEngine,
        cached_tokens: int,
        knowledge: Knowledge,
        decision: Decision | None,
        kept: Kept | None,
    ) -> Choice:
        load, name = engine.load, engine.name
        in_l1 = [copy.tokens for copy in knowledge.copies if copy.engine == name and copy.tier == "l1"]
        exact, idle = knowledge.cached.get(name, 0), not load.waiting
        return Choice(
            wanted,
            engine,
            cached_tokens,
            exact,
            max(in_l1, default=0),
            idle,
            load.running,
            self._now_s(),
            decision,
            kept,
        )

    def _knowledge(self, wanted: Wanted, serving: list[ServingEngine], now_s: float) -> Knowledge:
        generations = {engine.name: engine.generation for engine in serving}
        if wanted.prompt is None:
            return Knowledge(copies=self.prefixes.copies(wanted.keys, generations, now_s))
        known = self._residency.known(wanted.prompt, generations)
        sent = self.prefixes.copies(wanted.keys, generations, now_s, heard=known.heard)
        return Knowledge(
            cached=known.cached,
            copies=[*known.copies, *sent],
            block_life_s=self._residency.block_life_s,
            event_lag_s=self._residency.event_lag_s,
        )

    def expected_s(self, choice: Choice) -> float | None:
        """Time to the first token, as far as it is known: None without a measured rate, and at an idle engine."""
        way = choice.decision.way if choice.decision is not None else None
        engine = choice.engine
        if way is None or not engine.load.requests or not self._fleet.measured(engine):
            return None
        return way.ttft_s

    def dispatched(self, choice: Choice) -> None:
        """The request is sent to the engine."""
        wanted, engine = choice.wanted, choice.engine
        self._fleet.began(
            engine, str(wanted.number), max(1, wanted.tokens - choice.cached_tokens), wanted.tokens
        )
        way = choice.decision.way if choice.decision is not None else None
        ready_s = choice.at_s + (way.ttft_s if way is not None else 0.0)
        self.prefixes.note(
            wanted.keys, engine.name, engine.generation, choice.at_s, computed=False, ready_at_s=ready_s
        )

    def first_token(self, choice: Choice) -> None:
        """The engine's answer has begun."""
        wanted, engine, now_s = choice.wanted, choice.engine, self._now_s()
        self._fleet.answers(str(wanted.number))
        if choice.kept is not None:
            choice.kept.ttft_s = now_s - choice.at_s
        self.prefixes.note(wanted.keys, engine.name, engine.generation, now_s, computed=True)
        if wanted.prompt is not None:
            self._residency.computed(engine.name, wanted.prompt, now_s)

    def ended(self, choice: Choice, *, answered: bool) -> None:
        """The request has ended at this engine, however. `answered`: its first token had come."""
        self._fleet.ended(choice.engine, str(choice.wanted.number))
        if not answered:
            self.prefixes.take_back(choice.wanted.keys, choice.engine.name)

    def learn(self, choice: Choice, prompt: int, cached: int, first_s: float) -> None:
        """What an answer tells: tokens of its prompt, how many of them were cached, when its first token came."""
        wanted, engine = choice.wanted, choice.engine
        if choice.kept is not None:
            choice.kept.cached_tokens = cached
        share = min(1.0, cached / prompt)
        if choice.idle:
            # In our own count of tokens, so that no engine can make itself look fast by reporting many.
            computed = round(wanted.tokens * (1.0 - share))
            seconds = first_s - choice.at_s
            loaded = min(cached, choice.in_l1) - choice.cached_exact
            if loaded > computed:
                self._fleet.loaded(engine, "l1", loaded, seconds - computed / engine.load.prefill_tokens_s)
            elif loaded <= 0:
                self._fleet.computed(engine, computed, seconds, choice.running)
        if wanted.prompt is not None:
            self._residency.reported(engine.name, wanted.prompt, choice.cached_exact, min(cached, prompt))
        if self.prefixes.mistaken(wanted.keys, engine.name, choice.cached_tokens / wanted.tokens, share):
            self._meters.mistaken[engine.name] += 1
