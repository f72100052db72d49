"""`route_ha`: four gateways before eight simulated engines, in virtual time, beside one gateway.

Each request comes to a gateway at random, as behind a load balancer without affinity.  Each gateway is the production
code (benchmarks/route_gateway.py) with an index, queues, rates and prefixes of its own; they tell each other frames of
the production code (`EventSender`, `Others`), which arrive FRAME_S later.  Three settings:

    heard       all gateways hear the engines' KV events, and share
    unheard     the engines publish none, or their prompts' token ids are unknown: only what was sent is known; shared
    alone       the same, without sharing

The figure is the mean time to the last token with four beside that with one, the mean over the loads with reuse, for
the worse of `heard` and `unheard`; `hit_ratio` has the tokens of prompts that the engines had cached.  Sketch: 1, if
what one gateway knows all know at once.
"""

from __future__ import annotations

import heapq
import random
import statistics
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import compared, percentile, sized
from benchmarks.route_fleet import ENGINES, LEVEL, MODEL, SEED
from benchmarks.route_gateway import Heard, Run
from benchmarks.route_loads import LOADS, at_rate
from kvstrata.gateway.choosing import Choice, ChoiceInputs, Choosing
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.residency.cache import Batch, decoded
from kvstrata.gateway.residency.knowledge import Index
from kvstrata.gateway.routing.choose import POLICIES
from kvstrata.gateway.sharing.others import Others
from kvstrata.gateway.sharing.sockets import FLUSH_S
from kvstrata.gateway.sharing.telling import EventSender, frame_of
from kvstrata.testing.engine_sim.engine_model import EngineModel

GATEWAYS = 4
REQUESTS = sized(500, 40)
SEEDS = sized(2, 1)
FRAME_S = FLUSH_S + 0.001
"""From an event to its arrival at the other gateways."""
TOLD = "told"


class Gateway(NamedTuple):
    """One of them."""

    choosing: Choosing
    index: Index
    others: Others
    teller: EventSender


class Gateways(Run):
    """Several gateways in place of one: what `Run` tells its choice and its index goes to the right ones."""

    def __init__(
        self, models: dict[str, EngineModel], gateways: int, *, shares: bool, heard: bool, seed: int
    ) -> None:
        super().__init__(POLICIES["auto"], models, seed=seed)
        self._heard = heard
        self._gateways = [self._made(models, shares=shares) for _ in range(gateways)]
        self._at = random.Random(seed)
        self._of: dict[int, Gateway] = {}
        """The gateway of each request."""
        self.choosing = self  # type: ignore[assignment]
        self.index = self  # type: ignore[assignment]
        self.caches = {name: Applied([one.index.caches[name] for one in self._gateways]) for name in models}

    def _made(self, models: dict[str, EngineModel], *, shares: bool) -> Gateway:
        fleet, index = Fleet(self.clock), Index(self.clock)
        fleet.set_places(
            Place(name, Address("127.0.0.1", number + 1, False)) for number, name in enumerate(models)
        )
        for engine in fleet.engines.values():
            fleet.up(engine, {"m": {}})
            index.add(engine.name)
        choosing = Choosing(POLICIES["auto"], fleet, Heard(index), Meters({}), self.clock)
        teller = EventSender(lambda: self._push(self.now_s + FRAME_S, TOLD, teller))
        choosing.teller = teller if shares else None
        return Gateway(choosing, index, Others(fleet, choosing.prefixes, self.clock), teller)

    def choose(self, wanted: ChoiceInputs) -> Choice | None:
        """By the gateway at which the request arrives."""
        gateway = self._of[wanted.number] = self._at.choice(self._gateways)
        return gateway.choosing.choose(wanted if self._heard else wanted._replace(prompt=None))

    def dispatched(self, choice: Choice) -> None:
        """See Choosing."""
        self._of[choice.wanted.number].choosing.dispatched(choice)

    def first_token(self, choice: Choice) -> None:
        """See Choosing."""
        self._of[choice.wanted.number].choosing.first_token(choice)

    def ended(self, choice: Choice, *, answered: bool) -> None:
        """See Choosing."""
        self._of[choice.wanted.number].choosing.ended(choice, answered=answered)

    def learn(self, choice: Choice, prompt: int, cached: int) -> None:
        """See Choosing."""
        self._of[choice.wanted.number].choosing.learn(choice, prompt, cached)

    def learn_answer(self, choice: Choice, tokens: int) -> None:
        """See Choosing."""
        self._of.pop(choice.wanted.number).choosing.learn_answer(choice, tokens)

    def _apply_events(self, until_s: float) -> None:
        while self._coming and self._coming[0][0] <= until_s:
            at_s, _, name, what, _ = heapq.heappop(self._coming)
            self.now_s = max(self.now_s, at_s)
            if name != TOLD:
                self.caches[name].apply(decoded(msgspec.msgpack.encode(what)))
                continue
            teller = what
            for frame in teller.take():
                for gateway in self._gateways:
                    if gateway.teller is not teller:
                        gateway.others.hear(frame_of(frame))

    def left(self) -> int:
        """Requests of others that are still counted once all frames have arrived."""
        self._apply_events(float("inf"))
        return sum(gateway.others.in_flight for gateway in self._gateways)


class Applied:
    """The caches of one engine in all gateways."""

    def __init__(self, of: list[Any]) -> None:
        self._of = of

    def apply(self, batch: Batch) -> None:
        """See Caches."""
        for caches in self._of:
            caches.apply(batch)


class Row(NamedTuple):
    """What came of a load."""

    hit: float
    p50_s: float
    p99_s: float
    whole_s: float


def served(load: str, gateways: int, *, shares: bool, heard: bool) -> Row:
    """Serve all draws of a load."""
    results = []
    for seed in range(SEED, SEED + SEEDS):
        asked = at_rate(LOADS[load](random.Random(seed), REQUESTS), MODEL, ENGINES, LEVEL)
        models = {f"engine-{number}": MODEL for number in range(ENGINES)}
        run = Gateways(models, gateways, shares=shares, heard=heard, seed=seed)
        results += run.serve(asked)
        assert not run.left(), f"{run.left()} requests of others are counted after the end"
    hit = sum(one.cached for one in results) / sum(one.tokens for one in results)
    times = [one.ttft_s for one in results]
    whole_s = statistics.fmean(one.whole_s for one in results)
    return Row(*(round(one, 4) for one in (hit, percentile(times, 0.5), percentile(times, 0.99), whole_s)))


def run() -> list[dict[str, Any]]:
    """Serve the loads with reuse by one gateway and by four."""
    loads = ("conversations", "shared", "agents")
    settings = {
        "heard": {"shares": True, "heard": True},
        "unheard": {"shares": True, "heard": False},
        "heard, alone": {"shares": False, "heard": True},
        "unheard, alone": {"shares": False, "heard": False},
    }
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    ratios: dict[str, float] = {}
    slower: dict[str, float] = {}
    whole: dict[str, float] = {}
    for name, how in settings.items():
        by = {load: (served(load, 1, **how), served(load, GATEWAYS, **how)) for load in loads}
        rows[name] = {
            load: {"one": one._asdict(), "four": four._asdict()} for load, (one, four) in by.items()
        }
        ratios[name] = statistics.fmean(four.hit / one.hit for one, four in by.values())
        slower[name] = statistics.fmean(four.p99_s / one.p99_s for one, four in by.values())
        whole[name] = statistics.fmean(four.whole_s / one.whole_s for one, four in by.values())
    return [
        compared(
            "route_ha",
            max(whole["heard"], whole["unheard"]),
            "× the time to the last token by one gateway",
            "one gateway before the same engines",
            1.0,
            most=1.02,
            whole_ratio=whole,
            hit_ratio=ratios,
            p99_ratio=slower,
            loads=rows,
        )
    ]
