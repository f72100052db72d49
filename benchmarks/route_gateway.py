"""The gateway's choice in virtual time: the production `Choosing`, `Fleet`, index and queues before simulated engines.

Nothing of the walk is replaced but the wire: the engines' KV events are encoded as vLLM encodes them and decoded by the
gateway's code, after a lag, and may be lost; first tokens and ends are told when they happen.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from benchmarks.route_loads import Asked
from kvstrata.config.gateway_model import Contract, SloSettings
from kvstrata.gateway.choosing import PREFILL_NUMBER_OFFSET, Choice, ChoiceInputs, Choosing
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.prefixes import keys_of
from kvstrata.gateway.residency.cache import Cache, decoded
from kvstrata.gateway.residency.knowledge import Index
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.choose import POLICIES, Policy
from kvstrata.gateway.routing.model import LoadPath, Role
from kvstrata.testing.engine_sim.blocks import Sequence
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.kv_events import KVEventBatch
from kvstrata.testing.engine_sim.requests import SimRequest

MODEL = "m"
TICK_S = 0.02
"""The gateway hears at least so often of first tokens, ends and events."""
HANDOVER_S, LOADED_TOKENS_S = 0.036, 200_000.0
"""From one engine's last step to the load of another, and tokens that are loaded a second: 128 KiB each at 25 GB/s."""


class Result(NamedTuple):
    """What became of a request."""

    engine: str
    ttft_s: float
    tokens: int
    """Of the prompt."""
    cached: int
    hot: bool
    whole_s: float
    """Until the last token."""
    answer: int
    """Tokens of the answer."""
    prefill: str = ""
    """The other engine that has computed the prompt; empty: none has."""
    at_s: float = 0.0
    """When it came."""


class Death(NamedTuple):
    """An engine that is killed, and comes back with nothing."""

    engine: str
    at_s: float
    back_s: float


class Outside:
    """A choice that is not the gateway's; it hears what it needs. Base of those that need less."""

    name = ""
    knobs: Mapping[str, str] = {}

    def begin(self, names: list[str]) -> None:
        """A run begins, with these engines."""

    def finish(self) -> None:
        """It has ended, also by an error."""

    def engine_for(self, engines: Mapping[str, SimEngine], request: SimRequest, at_ps: int) -> str:
        """The name of the engine that gets a request. The engines are those that may; look at them, change nothing."""
        raise NotImplementedError

    def event(self, engine: str, encoded: bytes | None) -> None:
        """A batch of an engine's KV events has come; None: it was lost on its way."""

    def gone(self, engine: str) -> None:
        """An engine was killed; its requests have ended."""

    def back(self, engine: str) -> None:
        """A killed engine serves again."""

    def first_token(self, request: SimRequest) -> None:
        """A request's answer has begun."""

    def ended(self, request: SimRequest) -> None:
        """A request has ended."""


class Heard:
    """The index, without sockets: see Residency."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def known(self, prompt: Prompt) -> dict[str, int]:
        return self.index.known(prompt)

    def heard(self, name: str) -> Cache:
        return self.index.caches[name]

    @property
    def block_life_s(self) -> float:
        return self.index.block_life_s


class Run:
    """One load through one policy."""

    def __init__(
        self,
        policy: Policy | Outside,
        models: dict[str, EngineModel],
        *,
        lag_s: float = 0.005,
        lost: float = 0.0,
        seed: int = 0,
        deaths: Iterable[Death] = (),
        roles: Mapping[str, Role] | None = None,
        contract: Contract = "",
        always: bool = False,
        slo: SloSettings | None = None,
    ) -> None:
        """`models`: the engines by name. `lag_s`: from a step's end to its events. `lost`: share of batches.

        `roles` and `contract`: how requests are split; `always`: each is. `slo`: the class of service of all.
        """
        self.contract, self.always, self.slo = contract, always, slo
        self.now_s = 0.0
        self.models, self.deaths = models, list(deaths)
        self.lag_s, self.lost = lag_s, lost
        self.draw = random.Random(seed)
        self.engines = {name: SimEngine(model) for name, model in models.items()}
        self.fleet = Fleet(self.clock)
        self.fleet.set_places(
            Place(
                name,
                Address("127.0.0.1", number + 1, False),
                instance="one",
                role=(roles or {}).get(name, "both"),
            )
            for number, name in enumerate(models)
        )
        self.index = Index(self.clock)
        for engine in self.fleet.engines.values():
            self.fleet.up(engine, {MODEL: {}})
            self.index.add(engine.name)
            engine.told["l1"] = LoadPath(latency_s=0.0, tokens_s=LOADED_TOKENS_S)
        self.outside = policy if isinstance(policy, Outside) else None
        inside: Any = POLICIES["least_loaded"] if isinstance(policy, Outside) else policy
        self.choosing = Choosing(inside, self.fleet, Heard(self.index), Meters({}), self.clock)
        self._coming: list[tuple[float, int, str, Any, bool]] = []
        """Events under way, as (time, number, engine, batch, whether it is lost)."""
        self._missing: dict[str, list[bytes]] = {}
        """Lost batches by engine, until the next one comes."""
        self._numbers = itertools.count()
        self._under_way: dict[str, tuple[Asked, Choice, SimRequest]] = {}
        self._legs: dict[str, tuple[Choice, SimRequest, SimRequest]] = {}
        """Requests that compute a prompt for another engine, with the one that waits there for it."""
        self._ready: list[tuple[float, int, str, SimRequest]] = []
        """Prompts that are being loaded: when that ends, and where."""
        self._first: set[str] = set()
        self.results: list[Result] = []

    def clock(self) -> float:
        """The time in the simulation."""
        return self.now_s

    def serve(self, load: list[Asked]) -> list[Result]:
        """Serve a load to its end."""
        if self.outside is None:
            return self._serve(load)
        self.outside.begin(list(self.engines))
        try:
            return self._serve(load)
        finally:
            self.outside.finish()

    def _serve(self, load: list[Asked]) -> list[Result]:
        turns: list[tuple[float, Callable[[], None]]] = []
        for number, asked in enumerate(load):
            turns.append((asked.at, functools.partial(self._send, number, asked, asked.at)))
        for death in self.deaths:
            turns.append((death.at_s, functools.partial(self._kill, death)))
            turns.append((death.back_s, functools.partial(self._revive, death)))
        for at_s, turn in sorted(turns, key=lambda one: one[0]):
            while self.now_s + TICK_S < at_s:
                self._hear(self.now_s + TICK_S)
            self._hear(at_s)
            turn()
        while self._under_way:
            self._hear(self.now_s + 5 * TICK_S)
        return self.results

    def _send(self, number: int, asked: Asked, at_s: float, again: str = "") -> None:
        request = SimRequest(f"{number}{again}", asked.prompt, answer=asked.answer)
        at_ps = int(at_s * PS_PER_S)
        made_by = ""
        if self.outside is not None:
            serving = {one.name: self.engines[one.name] for one in self.fleet.serving(MODEL)}
            made_by = self.outside.engine_for(serving, request, at_ps)
        wanted = ChoiceInputs(
            word=str(number),
            number=number,
            model=MODEL,
            tokens=len(asked.prompt),
            session=asked.session,
            made_by=made_by,
        )
        if self.outside is None:
            prompt = Prompt(asked.prompt)
            wanted = wanted._replace(
                keys=keys_of((), prompt.tokens.tobytes()), prompt=prompt, contract=self.contract, slo=self.slo,
                arrived_s=at_s,
            )  # fmt: skip
        choice = self.choosing.choose(wanted)
        assert choice is not None
        if self.always:
            choice = self._split(choice)
        self.choosing.dispatched(choice)
        self._under_way[request.name] = asked, choice, request
        if choice.prefill is None:
            self.engines[choice.engine.name].submit(request, at_ps)
            return
        leg = SimRequest(f"{request.name}/prefill", asked.prompt, answer=asked.answer[:1])
        self._legs[leg.name] = choice, leg, request
        self.engines[choice.prefill.engine.name].submit(leg, at_ps)

    def _split(self, choice: Choice) -> Choice:
        """A choice of a fixed split: its prompt goes to the prefilling engine with the shortest queue."""
        helpers = self.fleet.targets(MODEL).helpers
        best = min(helpers, key=lambda one: (one.load.queue_s(self.now_s), one.load.requests, one.name))
        wanted = choice.wanted
        theirs = wanted._replace(number=PREFILL_NUMBER_OFFSET + wanted.number, slo=None)
        exact, loadable = choice.cached_exact, choice.loadable
        choice.prefill = Choice(theirs, best, 0, exact, loadable, choice.at_s)
        choice.cached_tokens = max(0, wanted.tokens - 1)
        return choice

    def _kill(self, death: Death) -> None:
        """An engine dies; who waits there for a first token goes to another one, the other answers are cut."""
        self.fleet.down(self.fleet.engines[death.engine], "killed")
        theirs = [one for one in self._under_way.values() if one[1].engine.name == death.engine]
        for asked, choice, request in theirs:
            if request.name in self._first:
                self._ended(asked, choice, request, cut=True)
                continue
            del self._under_way[request.name]
            self.choosing.ended(choice, answered=False)
            if self.outside is not None:
                self.outside.ended(request)
        self.engines[death.engine] = SimEngine(self.models[death.engine])
        if self.outside is not None:
            self.outside.gone(death.engine)
        for asked, choice, request in theirs:
            if request.name not in self._first:
                self._send(choice.wanted.number, asked, self.now_s, again="/2")

    def _revive(self, death: Death) -> None:
        self.index.caches[death.engine].emptied()
        self._missing.pop(death.engine, None)
        self.fleet.up(self.fleet.engines[death.engine], {MODEL: {}})
        if self.outside is not None:
            self.outside.back(death.engine)

    def _hear(self, until_s: float) -> None:
        """Everything that happens until a time, in its order."""
        told: list[tuple[float, int, SimRequest]] = []
        for name, engine in self.engines.items():
            engine.advance(int(until_s * PS_PER_S))
            for at_ps, events in engine.take_events():
                batch = KVEventBatch(at_ps / PS_PER_S, events, 0)
                lost = bool(self.lost) and self.draw.random() < self.lost
                self._push(at_ps / PS_PER_S + self.lag_s, name, batch, lost)
            for request in engine.take_changed():
                if request.name in self._legs:
                    if request.end is not None:
                        told.append((request.ended_ps / PS_PER_S, 2, request))
                    continue
                if request.produced and request.name not in self._first:
                    self._first.add(request.name)
                    told.append((request.first_token_ps / PS_PER_S, 0, request))
                if request.end is not None:
                    told.append((request.ended_ps / PS_PER_S, 1, request))
        for at_s, what, request in sorted(told, key=lambda one: one[:2]):
            self._apply_events(at_s)
            self.now_s = max(self.now_s, min(at_s, until_s))
            if what == 2:
                self._prefilled(*self._legs.pop(request.name))
            elif what:
                self._ended(*self._under_way[request.name])
            else:
                self.choosing.first_token(self._under_way[request.name][1])
                if self.outside is not None:
                    self.outside.first_token(request)
        self._apply_events(until_s)
        self.now_s = max(self.now_s, until_s)
        while self._ready and self._ready[0][0] <= until_s:
            _, _, name, request = heapq.heappop(self._ready)
            bring(self.engines[name], request)
            self.engines[name].submit(request, int(until_s * PS_PER_S))

    def _prefilled(self, choice: Choice, leg: SimRequest, request: SimRequest) -> None:
        assert choice.prefill is not None
        self.choosing.prefilled(choice, computed=True)
        self.choosing.learn(choice.prefill, leg.prompt_tokens, leg.cached_tokens or 0)
        ready_s = leg.ended_ps / PS_PER_S + HANDOVER_S + leg.prompt_tokens / LOADED_TOKENS_S
        heapq.heappush(self._ready, (ready_s, next(self._numbers), choice.engine.name, request))

    def _push(self, at_s: float, name: str, batch: Any, lost: bool = False) -> None:
        heapq.heappush(self._coming, (at_s, next(self._numbers), name, batch, lost))

    def _apply_events(self, until_s: float) -> None:
        while self._coming and self._coming[0][0] <= until_s:
            at_s, _, name, batch, lost = heapq.heappop(self._coming)
            self.now_s = max(self.now_s, at_s)
            encoded = msgspec.msgpack.encode(batch)
            if self.outside is not None:
                self.outside.event(name, None if lost else encoded)
                continue
            missing = self._missing.setdefault(name, [])
            missing.append(encoded)
            if not lost:  # the gap shows, and the engine sends again what was lost
                for one in missing:
                    self.index.caches[name].apply(decoded(one))
                missing.clear()

    def _ended(self, asked: Asked, choice: Choice, request: SimRequest, *, cut: bool = False) -> None:
        del self._under_way[request.name]
        first_s = request.first_token_ps / PS_PER_S
        cached = request.cached_tokens or 0
        self.choosing.ended(choice, answered=True)
        if self.outside is not None:
            self.outside.ended(request)
        if not cut:  # what an answer tells comes with its end
            self.choosing.learn(choice, len(asked.prompt), cached)
            self.choosing.learn_answer(choice, len(asked.answer))
        self.results.append(
            Result(
                choice.engine.name,
                first_s - asked.at,
                len(asked.prompt),
                cached,
                asked.hot,
                request.ended_ps / PS_PER_S - asked.at,
                len(asked.answer),
                choice.prefill.engine.name if choice.prefill is not None else "",
                asked.at,
            )
        )


def bring(engine: SimEngine, request: SimRequest) -> None:
    """Let an engine find a prompt's blocks, if it has room for them."""
    blocks, sequence = engine._blocks, Sequence(request.tokens)
    if blocks.admit(sequence, request.prompt_tokens):
        blocks.grow(sequence, request.prompt_tokens)
        blocks.release(sequence)
