"""The gateway's choice in virtual time: the production `Choosing`, `Fleet`, index and queues before simulated engines.

Nothing of the walk is replaced but the wire: the engines' KV events are encoded as vLLM encodes them and decoded by the
gateway's code, after a lag, and may be lost; first tokens and ends are told when they happen.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from benchmarks.route_loads import Asked
from kvstrata.gateway.choosing import Choice, Choosing, Wanted
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.prefixes import keys_of
from kvstrata.gateway.residency.batches import decoded
from kvstrata.gateway.residency.knowledge import Index, Known
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.policy.routing.choose import AnyPolicy
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.kv_events import KVEventBatch
from kvstrata.testing.engine_sim.requests import SimRequest

MODEL = "m"
TICK_S = 0.02
"""The gateway hears at least so often of first tokens, ends and events."""
FOREVER_S = 1e6


class Result(NamedTuple):
    """What became of a request."""

    engine: str
    ttft_s: float
    tokens: int
    """Of the prompt."""
    cached: int
    hot: bool


class Heard:
    """The index, without sockets: see Residency."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def known(self, prompt: Prompt, names: Iterable[str]) -> Known:
        return self.index.known(prompt, list(names))

    def computed(self, name: str, prompt: Prompt, at_s: float) -> None:
        self.index.caches[name].computed(prompt, at_s)

    def reported(self, name: str, prompt: Prompt, expected: int, cached: int) -> None:
        self.index.caches[name].reported(prompt, expected, cached)

    @property
    def block_life_s(self) -> float:
        return self.index.block_life_s

    @property
    def event_lag_s(self) -> float:
        return self.index.event_lag_s


class Run:
    """One load through one policy."""

    def __init__(
        self,
        policy: AnyPolicy,
        models: dict[str, EngineModel],
        *,
        lag_s: float = 0.005,
        lost: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`models`: the engines by name. `lag_s`: from a step's end to its events. `lost`: share of batches."""
        self.now_s = 0.0
        self.lag_s, self.lost = lag_s, lost
        self.draw = random.Random(seed)
        self.engines = {name: SimEngine(model) for name, model in models.items()}
        self.fleet = Fleet(self.clock, 0.0)
        self.fleet.set_places(
            Place(name, Address("127.0.0.1", number + 1, False)) for number, name in enumerate(models)
        )
        self.index = Index(self.clock)
        for engine in self.fleet.engines.values():
            self.fleet.up(engine, {MODEL: {}})
            self.index.add(engine.name)
        self.choosing = Choosing(policy, self.fleet, Heard(self.index), Meters({}, self.clock), self.clock)
        self._coming: list[tuple[float, int, str, Any]] = []
        """Events under way, as (time, number, engine, batch)."""
        self._numbers = itertools.count()
        self._under_way: dict[str, tuple[Asked, Choice, SimRequest]] = {}
        self._first: set[str] = set()
        self.results: list[Result] = []

    def clock(self) -> float:
        """The time in the simulation."""
        return self.now_s

    def serve(self, load: list[Asked]) -> list[Result]:
        """Serve a load to its end."""
        for number, asked in enumerate(load):
            while self.now_s + TICK_S < asked.at:
                self._hear(self.now_s + TICK_S)
            self._hear(asked.at)
            self._send(number, asked)
        while self._under_way:
            self._hear(self.now_s + 5 * TICK_S)
        return self.results

    def _send(self, number: int, asked: Asked) -> None:
        prompt = Prompt(asked.prompt)
        wanted = Wanted(
            word=str(number),
            number=number,
            model=MODEL,
            tokens=len(asked.prompt),
            session=asked.session,
            keys=keys_of((), prompt.tokens.tobytes()),
            prompt=prompt,
        )
        choice = self.choosing.choose(wanted)
        assert choice is not None
        self.choosing.dispatched(choice)
        request = SimRequest(str(number), asked.prompt, answer=asked.answer)
        self._under_way[request.name] = asked, choice, request
        self.engines[choice.engine.name].submit(request, int(asked.at * PS_PER_S))

    def _hear(self, until_s: float) -> None:
        """Everything that happens until a time, in its order."""
        told: list[tuple[float, int, SimRequest]] = []
        for name, engine in self.engines.items():
            engine.advance(int(until_s * PS_PER_S))
            for at_ps, events in engine.take_events():
                if self.lost and self.draw.random() < self.lost:
                    self._push(at_ps / PS_PER_S + self.lag_s, name, None)
                else:
                    self._push(at_ps / PS_PER_S + self.lag_s, name, KVEventBatch(at_ps / PS_PER_S, events, 0))
            for request in engine.take_changed():
                if request.produced and request.name not in self._first:
                    self._first.add(request.name)
                    told.append((request.first_token_ps / PS_PER_S, 0, request))
                if request.end is not None:
                    told.append((request.ended_ps / PS_PER_S, 1, request))
        for at_s, what, request in sorted(told, key=lambda one: one[:2]):
            self._apply_events(at_s)
            self.now_s = max(self.now_s, min(at_s, until_s))
            if what:
                self._ended(request)
            else:
                self.choosing.first_token(self._under_way[request.name][1])
        self._apply_events(until_s)
        self.now_s = max(self.now_s, until_s)

    def _push(self, at_s: float, name: str, batch: Any) -> None:
        heapq.heappush(self._coming, (at_s, next(self._numbers), name, batch))

    def _apply_events(self, until_s: float) -> None:
        while self._coming and self._coming[0][0] <= until_s:
            at_s, _, name, batch = heapq.heappop(self._coming)
            self.now_s = max(self.now_s, at_s)
            if batch is None:
                self.index.caches[name].doubt()
            else:
                self.index.caches[name].apply(decoded(msgspec.msgpack.encode(batch)))

    def _ended(self, request: SimRequest) -> None:
        asked, choice, _ = self._under_way.pop(request.name)
        first_s = request.first_token_ps / PS_PER_S
        cached = request.cached_tokens or 0
        self.choosing.ended(choice, answered=True)
        self.choosing.learn(choice, len(asked.prompt), cached, first_s)
        self.results.append(
            Result(choice.engine.name, first_s - asked.at, len(asked.prompt), cached, asked.hot)
        )
