"""Chooses the engine of each request, and learns from the request's outcome.

    choose ─▶ dispatched ─▶ first_token ─▶ ended ─▶ learn        each dispatched choice is ended; learn follows only
                                                                 if there was an answer

Three sources tell the choice where a prompt's KV is: engines' KV events (residency/); for engines without events, and
for prompts whose events have not arrived yet, the requests that this gateway has sent (prefixes.py); for L1, L2 tiers
and peers, the instances that the controllers list (controllers/).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.config.gateway_model import Contract, SloSettings
from kvstrata.gateway.decisions import Decisions, Kept
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.prefixes import PIECE_TOKENS, Pieces, Prefixes
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.choose import Policy, Record, choose
from kvstrata.gateway.routing.model import Copy, Decision, Knowledge, Request, Tier, Way
from kvstrata.gateway.routing.price import longest
from kvstrata.gateway.routing.queues import Flight, Sending
from kvstrata.gateway.routing.rates import Decoded
from kvstrata.gateway.sharing.telling import EventSender, Sent

if TYPE_CHECKING:
    from kvstrata.gateway.request import Request as Arrived
    from kvstrata.gateway.residency.knowledge import Residency


PREFILL_NUMBER_OFFSET = 1 << 62
"""Added to a request's number to get the number of its prefill at another engine."""


class ChoiceInputs(NamedTuple):
    """A request's inputs for the choice."""

    word: str
    """The request's id."""
    number: int
    """Consecutive number of the request in this gateway."""
    model: str
    """Empty: any model."""
    tokens: int
    """Approximate number of the prompt's tokens; at least 1."""
    session: str = ""
    made_by: str = ""
    """Name of the engine that has the stored response which the request refers to; preferred while it serves."""
    keys: Sequence[bytes] = ()
    """Keys of the prompt's pieces (prefixes.py)."""
    prompt: Prompt | None = None
    """The prompt's token ids; None: unknown."""
    held: Sequence[Copy] = ()
    """The prompt's copies in instances and their tiers (controllers/)."""
    streams: bool = True
    """Whether the answer's first byte follows the prompt's prefill; False: the answer comes whole at its end."""
    slo: SloSettings | None = None
    """Its class of service."""
    arrived_s: float = 0.0
    contract: Contract = ""
    """How one engine may compute the prompt for another; empty: no split."""


@dataclass(slots=True)
class Choice:
    """The choice of an engine for a request, its inputs, and the request's progress at the engine."""

    wanted: ChoiceInputs
    engine: ServingEngine
    cached_tokens: int
    """Number of the prompt's tokens that the engine is expected to have cached."""
    cached_exact: int
    """Number of the prompt's tokens that its KV events confirm in its own cache."""
    loadable: int
    """Length of the longest prefix that it can load from its instance or from another one's."""
    at_s: float
    decision: Decision | None = None
    """None: only this engine has the stored response."""
    kept: Kept | None = None
    """The record for operators; None: too many decisions in this second."""
    prefill: Choice | None = None
    """The choice of the engine that computes the prompt for this one; None: no split."""
    flight: Flight | None = None
    """The request in the engine's queue; None: not dispatched."""
    sent: Pieces | None = None
    """Its prompt's pieces; None: not dispatched."""
    decoded: Decoded | None = None
    """Measurements of a streamed answer that has ended; else None."""

    @property
    def way(self) -> Way | None:
        """How the engine is to get the prompt's prefix; None: not planned."""
        return self.decision.way if self.decision is not None else None


class Choosing:
    """Chooses engines, and learns from outcomes. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        residency: Residency,
        meters: Meters,
        now_s: Callable[[], float],
    ) -> None:
        self.policy = policy
        self._fleet = fleet
        self._residency = residency
        self._meters = meters
        self._now_s = now_s
        self.prefixes = Prefixes()
        self.decisions = Decisions(now_s)
        self.teller: EventSender | None = None
        """Sends this gateway's events to other gateways; None: no sharing."""
        self._busy: dict[str, float] = {}
        """By peer: when all planned loads from it are expected to have ended."""
        self.freed: Callable[[], None] = lambda: None
        """Called when an engine may have room again."""
        self._sent: dict[bytes, int] = {}
        """By key of a piece: number of requests in flight whose prompts have it."""

    def candidates(self, model: str, without: Iterable[ServingEngine]) -> list[ServingEngine]:
        """The engines and ranks to which a request of a model may be sent."""
        return self._fleet.targets(model, without).targets

    def choose(self, wanted: ChoiceInputs, tried: Iterable[ServingEngine] = ()) -> Choice | None:
        """Choose an engine for a request, without those in `tried`; None if no other engine serves its model."""
        serving = self._fleet.targets(wanted.model, tried)
        if not serving.targets:
            return None
        if wanted.made_by:
            for engine in serving.targets:
                if engine.name == wanted.made_by:
                    return self._choice(wanted, engine, Knowledge(), None)
        now_s = self._now_s()
        knowledge, slo = self._knowledge(wanted, serving.generations, now_s), wanted.slo
        if returned := self._fleet.returned():
            names = *knowledge.cached, *(copy.engine for copy in knowledge.copies)
            holders = {name.partition("@")[0] for name in names}
            held_back = [
                one for one in returned if one.name not in holders and not self._takes(one, wanted.number)
            ]
            rest = self._fleet.targets(wanted.model, (*tried, *held_back))
            serving = rest if rest.targets else serving
        answer_tokens, short_tokens = self._fleet.decode_rates.answer_tokens(wanted.model)
        request = Request(
            id=wanted.word,
            tokens=wanted.tokens,
            number=wanted.number,
            session=wanted.session,
            answer_tokens=answer_tokens,
            short_tokens=short_tokens,
            sharing=self._sharing(wanted, knowledge),
            within_s=max(1e-3, wanted.arrived_s + slo.ttft_ms / 1_000 - now_s)
            if slo and slo.ttft_ms
            else 0.0,
            token_within_s=slo.tpot_ms / 1_000 if slo else 0.0,
        )
        tiers: set[Tier] = {copy.tier for copy in knowledge.copies} - {"l0"}
        if wanted.contract:
            tiers |= {"l1", "peer"} if self._fleet.peers and wanted.contract == "kvstrata" else {"l1"}
        self._fleet.add_path_tiers(tiers)
        loads = serving.loads
        helpers = [one.load for one in serving.helpers]
        decision = choose(
            request, loads, knowledge, now_s, policy=self.policy, helpers=helpers, contract=wanted.contract
        )
        kept = None
        if self.decisions.wanted():
            record = Record(
                request=request,
                engines=loads,
                helpers=helpers,
                knowledge=knowledge,
                now_s=now_s,
                policy=self.policy.name,
                contract=wanted.contract,
                decision=decision,
            )
            kept = self.decisions.keep(record, wanted.model)
        chosen = self._fleet.target(decision.engine)
        assert chosen is not None
        choice = self._choice(wanted, chosen, knowledge, decision)
        choice.kept = kept
        if (leg := decision.prefill) is None:
            return choice
        helper = self._fleet.target(leg.engine)
        assert helper is not None
        number = PREFILL_NUMBER_OFFSET + wanted.number
        theirs = wanted._replace(number=number, word=f"{wanted.word}-prefill", streams=True, slo=None)
        own = Decision(policy=decision.policy, engine=leg.engine, reason=decision.reason, way=leg.way)
        choice.prefill = self._choice(theirs, helper, knowledge, own)
        return choice

    def _takes(self, engine: ServingEngine, number: int) -> bool:
        """Whether a request may go to an engine that has none of its prefix; a returned engine gets a share of them."""
        share = self._fleet.share(engine)
        return share >= 1.0 or zlib.crc32(f"{number} {engine.name}".encode()) < share * (1 << 32)

    def _choice(
        self, wanted: ChoiceInputs, engine: ServingEngine, knowledge: Knowledge, decision: Decision | None
    ) -> Choice:
        name, way = engine.name, decision.way if decision is not None else None
        held = (copy.tokens for copy in knowledge.copies if copy.engine == name and copy.tier != "l0")
        loadable, exact = max(held, default=0), knowledge.cached.get(name, 0)
        cached_tokens = min(way.cached_tokens, wanted.tokens - 1) if way is not None else 0
        return Choice(wanted, engine, cached_tokens, exact, loadable, self._now_s(), decision)

    def _knowledge(self, wanted: ChoiceInputs, generations: Mapping[str, int], now_s: float) -> Knowledge:
        if wanted.prompt is None:
            return Knowledge(copies=self.prefixes.copies(wanted.keys, generations, now_s))
        known = self._residency.known(wanted.prompt)
        sent = self.prefixes.copies(wanted.keys, generations, now_s, self._residency.heard)
        self._busy = {source: free_s for source, free_s in self._busy.items() if free_s > now_s}
        return Knowledge(
            cached={name: tokens for name, tokens in known.items() if name in generations},
            copies=[*wanted.held, *sent],
            busy=self._busy,
            block_life_s=self._residency.block_life_s,
        )

    def _sharing(self, wanted: ChoiceInputs, knowledge: Knowledge) -> int:
        """Number of requests in flight whose prompts begin with this prompt's longest prefix that an engine has."""
        pieces = longest(knowledge) // PIECE_TOKENS
        return (
            self._sent.get(wanted.keys[min(pieces, len(wanted.keys)) - 1], 0) if pieces and wanted.keys else 0
        )

    def no_engine_failure(self, model: str) -> Failure:
        """The refusal if no engine was found for a model (empty: for any model)."""
        is_known = model in self._fleet.served  # an engine that had it may be restarting
        if model and not is_known and self._fleet.all_are_up() and not self._fleet.serving(model):
            return Failure(404, "model_not_found", f"model: no engine here has {model!a:.200}", "model")
        known = len(self._fleet.engines)
        that = f" that has the model {model!a:.200}" if model else ""
        says = f"no engine serves now ({known} known){that}; try again in a second"
        return Failure(503, "no_engine", says, retry_after_s=1)

    def slo_of(self, request: Arrived) -> SloSettings | None:
        """The class of service of a request."""
        return self._meters.slo.get(request.slo)

    def late_s(self, choice: Choice, request: Arrived) -> float:
        """Seconds by which the first token is expected after its class's limit; 0 or less: in time, or unknown.

        It is unknown without a measured rate; an idle engine counts as in time.
        """
        slo, way, engine = self.slo_of(request), choice.way, choice.engine
        is_known = way is not None and engine.load.requests and self._fleet.measured(engine)
        if slo is None or not slo.ttft_ms or way is None or not is_known:
            return 0.0
        return self._now_s() - request.arrived_s + way.ttft_s - slo.ttft_ms / 1_000

    def unreachable(self, slo: SloSettings, late_s: float) -> Failure:
        """The refusal of a request whose first token would be `late_s` seconds late."""
        says = f"the first token is expected {late_s:.2f} s later than class {slo.name!r} allows; try again later"
        return Failure(429, "slo_unreachable", says, retry_after_s=max(1, math.ceil(late_s)))

    def dispatched(self, choice: Choice) -> None:
        """Count the request at its engine, and a split's prefill at the engine that computes it."""
        wanted, engine, way = choice.wanted, choice.engine, choice.way
        ready_in_s = way.ttft_s if way is not None else 0.0
        for key in wanted.keys:
            self._sent[key] = self._sent.get(key, 0) + 1
        if choice.prefill is not None:
            self.dispatched(choice.prefill)
        choice.flight = engine.queue.send(
            self._uncached(choice),
            self._now_s(),
            Sending(
                streams=wanted.streams,
                until_s=math.inf if wanted.streams else choice.at_s + ready_in_s,
                token_within_s=wanted.slo.tpot_ms / 1_000 if wanted.slo is not None else 0.0,
                held=choice.prefill is not None,
            ),
        )
        if choice.prefill is None:
            self._begins(choice, ready_in_s)
        ready_at_s = choice.at_s + ready_in_s
        choice.sent = self.prefixes.note(wanted.keys, engine.name, engine.generation, choice.at_s, ready_at_s)

    def _uncached(self, choice: Choice) -> int:
        return max(1, choice.wanted.tokens - choice.cached_tokens)

    def _begins(self, choice: Choice, ready_in_s: float) -> None:
        """Count the start of the prompt's prefill, or of the load before it, and tell other gateways."""
        wanted, engine, way = choice.wanted, choice.engine, choice.way
        loads = way is not None and way.load_tokens > 0
        if way is not None and loads and choice.flight is not None:
            choice.flight.exclude_sample()  # its time to first token includes a load
            if (path := engine.load.paths.get(way.tier)) is not None:  # peers may have gone since the choice
                before_s = self._busy.get(way.source, 0.0)
                path.free_s = max(path.free_s, before_s, self._now_s()) + way.load_tokens / path.tokens_s
                if way.tier == "peer":
                    self._busy[way.source] = path.free_s
        if self.teller is not None:
            self.teller.sent(
                Sent(
                    number=wanted.number,
                    engine=engine.name,
                    uncached=self._uncached(choice),
                    keys=b"".join(wanted.keys),
                    ready_in_s=max(0.0, ready_in_s),
                    streams=wanted.streams,
                    loads=loads,
                )
            )

    def prefilled(self, choice: Choice, *, computed: bool) -> None:
        """End a split's prefill; `computed`: it succeeded, so the answering engine begins. Idempotent."""
        leg = choice.prefill
        if leg is None or leg.flight is None or leg.flight.ended:
            return
        if computed:
            self.first_token(leg)
        self.ended(leg, answered=computed)
        way, flight = choice.way, choice.flight
        if flight is not None and way is not None and not (flight.ended or flight.running):
            tokens = choice.wanted.tokens
            uncached = self._uncached(choice) if computed else max(1, tokens - choice.cached_exact)
            flight.queue.begin(flight, uncached, self._now_s())
            self._begins(choice, way.load_s)

    def first_token(self, choice: Choice) -> None:
        """Record the first token of the answer."""
        wanted, engine, now_s = choice.wanted, choice.engine, self._now_s()
        if choice.flight is not None:
            self._fleet.answers(choice.flight)
        if self.teller is not None:
            self.teller.first(wanted.number)
        if choice.kept is not None:
            choice.kept.ttft_s = now_s - choice.at_s
        if choice.sent is not None:
            self.prefixes.computed(choice.sent, wanted.keys, engine.name, now_s)
        self.freed()

    def ended(self, choice: Choice, *, answered: bool) -> None:
        """Release what a dispatched choice occupies, whatever its outcome. `answered`: it had a first token."""
        leg = choice.prefill
        if leg is not None and leg.flight is not None and not leg.flight.ended:
            self.ended(leg, answered=False)
        if choice.flight is not None:
            decoded = choice.flight.queue.end(choice.flight, self._now_s())
            choice.decoded = decoded if choice.wanted.streams else None
        for key in choice.wanted.keys:
            if (left := self._sent.pop(key, 0) - 1) > 0:
                self._sent[key] = left
        if self.teller is not None:
            self.teller.ended(choice.wanted.number, answered=answered)
        if not answered:
            self.prefixes.take_back(choice.wanted.keys, choice.engine.name)
        self.freed()

    def answered(self, choice: Choice, request: Arrived) -> None:
        """Learn from the `usage` of an answer that has ended."""
        tokens = request.tokens
        prompt, cached = tokens.get("prompt", 0), tokens.get("cached")
        if prompt and cached is not None:
            self.learn(choice, prompt, cached)
        self.learn_answer(choice, tokens.get("completion", request.events))

    def learn_answer(self, choice: Choice, tokens: int) -> None:
        """Learn the decode rate and the length of an ended answer; `tokens`: the answer's."""
        if choice.decoded is not None:
            self._fleet.decode_rates.observe(choice.engine.name, choice.wanted.model, choice.decoded, tokens)

    def learn(self, choice: Choice, prompt: int, cached: int) -> None:
        """Learn from an answer's `usage`: the number of its prompt's tokens, and how many of them were cached."""
        wanted, engine = choice.wanted, choice.engine
        if choice.kept is not None:
            choice.kept.cached_tokens = cached
        share = min(1.0, cached / prompt)
        if choice.flight is not None:
            if min(cached, choice.loadable) > choice.cached_exact:
                choice.flight.exclude_sample()  # part of the prompt was loaded, not computed
            # Only the share is the engine's: an engine that reports too many tokens must not seem faster for it.
            choice.flight.report(round(wanted.tokens * (1.0 - share)))
        lacking = self.prefixes.mistaken(
            wanted.keys, engine.name, choice.cached_tokens / wanted.tokens, share
        )
        if lacking is not None:
            self._meters.mistaken[engine.name] += 1
