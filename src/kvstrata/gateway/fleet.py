"""The engines: which of them serve, which models they have, and how many requests each has under way.

    NEW ──▶ UP ◀──▶ DOWN            by probes (probing.py) and by refused connections
     └───────┴───────┴──▶ LEAVING   removed from the settings; its requests may end

Only an engine that is UP gets requests.  After each return its share grows from LEAST_SHARE to 1 within
`SLOW_START_S`, since its caches are cold and its first steps compile.

If an engine has several data-parallel ranks, each rank has a queue and a cache of its own, so requests are sent to
ranks: each is a `ServingEngine` named ENGINE@RANK, which exists as long as its engine.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import ipaddress
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvstrata.config.gateway_model import EngineSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.residency.sources import Source, source_of
from kvstrata.gateway.routing.model import EngineState as Load
from kvstrata.gateway.routing.model import LoadPath, Role, Tier
from kvstrata.gateway.routing.queues import Flight, Queue
from kvstrata.gateway.routing.rates import DecodeRates, PrefillRates, load_path
from kvstrata.observability.logging import EventLog

SLOW_START_S = 10.0
LEAST_SHARE = 0.25
MAX_NAMES = 16_384
ASSUMED_TOKENS_S = 10_000.0
"""Assumed rate of prefill until the rate of an engine has been measured."""
RATED_S, RATED_EACH_S = 0.1, 0.001
"""Minimum time between two updates of all rates, in total and per engine: an update takes a millisecond."""
MAX_MODELS = 1_024
DNS = "dns+"
UNIX = "unix:"


class EngineState(enum.Enum):
    """The state of an engine, as in the module's diagram."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    LEAVING = "leaving"


class Place(NamedTuple):
    """An engine's address and its settings."""

    name: str
    address: Address
    api_key: str = ""
    """Empty: the engine needs none."""
    events: Source | None = None
    """Where it publishes KV events, by the settings; None: the engine is asked."""
    ranks: int = 0
    """Number of its data-parallel ranks, by the settings; 0: the engine is asked."""
    instance: str = ""
    """The instance that it is attached to, by the settings; empty: the controllers report it."""
    role: Role = "both"
    user: str = ""
    """The user, besides root and the gateway's own, that may run it on this host; empty: no other."""
    bootstrap: str = ""
    """Address where its MooncakeConnector reports its id; empty: vLLM's default port at the engine's host."""

    @property
    def url(self) -> str:
        """The engine's URL as its instance reports it."""
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        return f"{'https' if self.address.tls else 'http'}://{host}:{self.address.port}"


class ServingEngine:
    """One engine, or one rank of it. Belongs to the event loop."""

    def __init__(
        self, place: Place, rates: PrefillRates, owner: ServingEngine | None = None, rank: int | None = None
    ) -> None:
        """`owner`: the engine whose rank this is."""
        self.place = place
        self.name = place.name
        """Name in logs and metrics."""
        self.rank = rank
        """The rank's number in its engine; None: this is an engine."""
        self.process = owner or self
        """The engine of this rank, or this engine."""
        self.ranks: list[ServingEngine] = []
        """The engine's ranks if it has several; else empty."""
        self.state = EngineState.NEW
        self.reason = "not probed yet"
        self.models: dict[str, dict[str, Any]] = {}
        """Its entries in /v1/models, by id."""
        self.load = Load(name=place.name, prefill_tokens_s=rates.rate(place.name, 0.0))
        """Its state for the choice: requests of this gateway and of the gateways that share; updated by `queue`."""
        self.queue = Queue(self.load, rates)
        self.told: dict[Tier, LoadPath] = {}
        """Rates of loads from tiers that its instance has measured (see `rates.load_path`)."""
        self.generation = 0
        """Increases when it serves again after it was down; its cache then counts as empty."""
        self.failed_probes = 0
        self.heard_s = -math.inf
        """Time of the last first token from it."""
        self.is_silent = False
        """Whether it is down only because it did not answer in time."""
        self.may_sleep = True
        """Whether probes ask it if it sleeps (/is_sleeping); False: it does not support that."""
        self.is_foreign = False
        """Whether a process of a user who may not run it listens at its address."""
        self.probed = asyncio.Event()
        """Set after the first probe."""
        self.up_since_s = 0.0
        """Time since which it is up; 0: it has never been up."""

    @property
    def in_flight(self) -> int:
        """Number of this gateway's requests under way, including those at its ranks."""
        return self.queue.ours + sum(one.queue.ours for one in self.ranks)

    @property
    def targets(self) -> list[ServingEngine]:
        """The targets of requests: its ranks, or the engine itself if it has none."""
        return self.ranks or [self]


class Serving(NamedTuple):
    """The candidates for a model's requests, all lists in the same order. Shared: callers must not change it."""

    targets: list[ServingEngine]
    loads: list[Load]
    generations: dict[str, int]
    """By name, including `helpers`."""
    helpers: list[ServingEngine]
    """Engines of the model with the role `prefill`, if others serve it too; they only compute prompts for these."""


class Fleet:
    """All engines, by name, in the order of the settings."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.engines: dict[str, ServingEngine] = {}
        self.rates = PrefillRates(ASSUMED_TOKENS_S)
        self.decode_rates = DecodeRates()
        self._instance_of: Callable[[ServingEngine], str] = lambda engine: ""
        self._tiers: set[Tier] = set()
        """Tiers for which `EngineState.paths` has entries."""
        self.peers = False
        """Whether instances read chunks from each other."""
        self._rated_s = float("-inf")
        self._leaving: list[ServingEngine] = []
        self.served: dict[str, None] = {}
        """Names of models that engines have or had: the newest MAX_NAMES, as an ordered set."""
        self._several: bool | None = None
        self._serving: dict[str, Serving] = {}
        """Cache of `targets` by model; cleared when an engine changes."""
        self._returned: set[ServingEngine] = set()
        """Engines whose share has not grown back to 1."""
        self.changed: Callable[[], None] = lambda: None
        """Called when engines start or stop serving."""
        self._log = EventLog("engines")

    def __iter__(self) -> Iterator[ServingEngine]:
        self._leaving = [one for one in self._leaving if one.load.requests]
        return iter([*self.engines.values(), *self._leaving])

    def set_places(self, places: Iterable[Place]) -> list[ServingEngine]:
        """Replace the engines by these; one with the same name and address keeps its state. Returns the new ones."""
        wanted = {place.name: place for place in places}
        fresh: list[ServingEngine] = []
        redivided: list[ServingEngine] = []
        kept: dict[str, ServingEngine] = {}
        for name, place in wanted.items():
            engine = self.engines.get(name)
            if engine is None or engine.place.address != place.address:
                engine = ServingEngine(place, self.rates)
                fresh.append(engine)
            if engine.place.ranks != place.ranks:
                redivided.append(engine)
            engine.place = place
            kept[name] = engine
        before, self.engines, self._several = self.engines, kept, None
        self._serving.clear()
        for engine in before.values():
            if kept.get(engine.name) is not engine:
                self._log.info("engine_left", engine=engine.name, in_flight=engine.in_flight)
                self.set_ranks(engine, 0)
                self._retire(engine, "no longer in the settings")
        for engine in kept.values():
            self._update_ranks(engine)
        for engine in (*fresh, *redivided):
            self.set_ranks(engine, engine.place.ranks)
        self.changed()
        return fresh

    def set_ranks(self, engine: ServingEngine, count: int) -> None:
        """Set the number of an engine's ranks, which get its requests; fewer than two: the engine itself gets them."""
        count = count if count > 1 else 0
        left, engine.ranks = engine.ranks[count:], engine.ranks[:count]
        for rank in left:
            self._retire(rank, "its engine has fewer ranks")
        for number in range(len(engine.ranks), count):
            place = engine.place._replace(name=f"{engine.name}@{number}")
            engine.ranks.append(ServingEngine(place, self.rates, engine, number))
        self._update_ranks(engine)
        self.changed()

    def _update_ranks(self, engine: ServingEngine) -> None:
        """Copy an engine's place and state to its ranks. Must be called after each change of an engine."""
        self._serving.clear()
        for rank in engine.ranks:
            rank.place = engine.place._replace(name=rank.name)
            rank.state, rank.models, rank.generation = engine.state, engine.models, engine.generation
        for target in (engine, *engine.ranks):
            target.load.role = engine.place.role
            target.load.instance = engine.place.instance or self._instance_of(engine)
            self._rate_paths(target)

    def attach(self, instance_of: Callable[[ServingEngine], str], *, peers: bool) -> None:
        """Set how to find an engine's instance ("": unknown), and whether instances read from each other (`peers`)."""
        self._instance_of, self.peers = instance_of, peers
        self._tiers -= set() if peers else {"peer"}
        for engine in self.engines.values():
            self._update_ranks(engine)

    def _retire(self, target: ServingEngine, reason: str) -> None:
        """Send a target no more requests; it is forgotten when its requests have ended."""
        target.state, target.reason = EngineState.LEAVING, reason
        if target.queue.period is not None:
            target.queue.period.exclude_sample()
        self.rates.forget(target.name)
        self.decode_rates.forget(target.name)
        self._leaving.append(target)

    def target(self, name: str) -> ServingEngine | None:
        """The engine or rank with a name; None: unknown."""
        engine = self.engines.get(name)
        if engine is not None and not engine.ranks:
            return engine
        engine = engine or self.engines.get(name.rpartition("@")[0])
        targets = (engine, *engine.ranks) if engine is not None else ()
        return next((one for one in targets if one.name == name), None)

    def _places(self) -> Iterator[ServingEngine]:
        """All engines and all their ranks, without those that leave."""
        for engine in self.engines.values():
            yield engine
            yield from engine.ranks

    def up(self, engine: ServingEngine, models: Mapping[str, dict[str, Any]]) -> None:
        """Record a successful probe; `models`: the engine's entries of /v1/models."""
        if not models.keys() <= self.served.keys():
            self.served = dict.fromkeys([*self.served, *models][-MAX_NAMES:])
        if engine.models != models:
            engine.models, self._several = dict(models), None
            self._update_ranks(engine)
        engine.failed_probes = 0
        if engine.state is EngineState.LEAVING or engine.state is EngineState.UP:
            return
        if engine.state is EngineState.DOWN and engine.up_since_s > 0:
            engine.generation += 1
            self._returned.add(engine)
        engine.state, engine.reason, engine.is_silent = EngineState.UP, "", False
        engine.up_since_s = self._now_s()
        self._update_ranks(engine)
        self._log.info("engine_up", engine=engine.name, models=",".join(sorted(models))[:500])
        self.changed()

    def down(self, engine: ServingEngine, reason: str, *, silent: bool = False) -> None:
        """Send an engine no requests until a probe succeeds. `silent`: it did not answer in time."""
        if engine.state is EngineState.LEAVING:
            return
        if engine.state is not EngineState.DOWN:
            self._log.warning("engine_down", engine=engine.name, reason=reason, in_flight=engine.in_flight)
        engine.state, engine.reason, engine.is_silent = EngineState.DOWN, reason, silent
        self._update_ranks(engine)
        self.changed()

    def next_room_s(self) -> float:
        """The next time at which some non-streamed prompt ceases to take room at its engine; infinite: none will."""
        now_s = self._now_s()
        return min((one.queue.next_room_s(now_s) for one in self._places()), default=math.inf)

    def measured(self, engine: ServingEngine) -> bool:
        """Whether the engine's own prefill rate was measured."""
        return self.rates.samples(engine.name) > 0

    def numbers(self, engine: ServingEngine) -> dict[str, float | bool]:
        """An engine's counters and rates for the status page, aggregated over its ranks."""
        now_s, targets = self._now_s(), engine.targets
        loads = [one.load for one in targets]
        return {
            "waiting": sum(one.waiting for one in loads),
            "waiting_tokens": sum(one.prefill_tokens for one in loads),
            "queue_s": round(max(one.queue_s(now_s) for one in loads), 4),
            "prefill_tokens_s": round(sum(one.prefill_tokens_s for one in loads), 1),
            "measured": all(map(self.measured, targets)),
        }

    def answers(self, flight: Flight) -> None:
        """Record a request's first token; at intervals also update all engines' rates. `flight`: `Queue.send`'s."""
        now_s = self._now_s()
        flight.queue.first_token(flight, now_s)
        if now_s >= self._rated_s + max(RATED_S, RATED_EACH_S * len(self.engines)):
            self._rated_s, (tokens, _) = now_s, self.decode_rates.answer_tokens()
            for each in self._places():
                each.queue.rate(self.decode_rates.line(each.name), tokens, now_s)
                self._rate_paths(each)

    def share(self, engine: ServingEngine) -> float:
        """The share of its usual requests that an engine may get now: less than 1 soon after its return."""
        if engine not in self._returned:
            return 1.0
        grown = (self._now_s() - engine.up_since_s) / SLOW_START_S
        return min(1.0, LEAST_SHARE + (1 - LEAST_SHARE) * max(0.0, grown))

    def returned(self) -> list[ServingEngine]:
        """Engines whose share is still below 1."""
        for one in [one for one in self._returned if self.share(one) >= 1.0]:
            self._returned.discard(one)
        return list(self._returned)

    def serving(self, model: str, but: Iterable[ServingEngine] = ()) -> list[ServingEngine]:
        """The engines that are up and have the model (empty: any model), except those in `but` or with ranks in it.

        If there are none, the engines that are down by time-outs alone, since they may merely be busy.
        """
        without = {engine.process for engine in but}
        found = [
            engine
            for engine in self.engines.values()
            if (model in engine.models if model else engine.models or engine.state is EngineState.UP)
            and engine not in without
        ]
        up = [engine for engine in found if engine.state is EngineState.UP]
        return up or [engine for engine in found if engine.state is EngineState.DOWN and engine.is_silent]

    def targets(self, model: str, but: Iterable[ServingEngine] = ()) -> Serving:
        """The candidates for a request of the model: `serving`, with ranks in place of engines that have several."""
        known = None if but else self._serving.get(model)
        if known is None:
            found = [target for engine in self.serving(model, but) for target in engine.targets]
            generations = {target.name: target.generation for target in found}
            answering = [target for target in found if target.place.role != "prefill"]
            helpers = [target for target in found if target.place.role == "prefill"] if answering else []
            targets = answering or found
            known = Serving(targets, [target.load for target in targets], generations, helpers)
            if not but:
                if len(self._serving) >= MAX_MODELS:
                    self._serving.clear()
                self._serving[model] = known
        return known

    def _entry(self, model: str) -> dict[str, Any] | None:
        """A model's entry of /v1/models at the first engine that has it; None: no engine has it."""
        return next((one.models[model] for one in self.engines.values() if model in one.models), None)

    def adapter(self, model: str) -> str:
        """The name itself if it names an adapter; empty: it names a base model, or no engine has it."""
        return model if (self._entry(model) or {}).get("parent") else ""

    def root(self, model: str) -> str:
        """The model that a name stands for; the same for all its aliases."""
        return _word((self._entry(model) or {}).get("root")) or model

    def several(self) -> bool:
        """Whether engines serve more than one model; adapters and aliases do not count."""
        if self._several is None:
            entries = (pair for engine in self.engines.values() for pair in engine.models.items())
            roots = {str(one.get("root") or name) for name, one in entries if not one.get("parent")}
            self._several = len(roots) > 1
        return self._several

    def parent(self, model: str) -> str:
        """The base model of a name, as engines report it: the name itself unless it is an adapter; empty: unknown."""
        entry = self._entry(model)
        return "" if entry is None else _word(entry.get("parent")) or model

    def add_path_tiers(self, tiers: set[Tier]) -> None:
        """Keep `EngineState.paths` to these tiers too from now on, at their last measured rates."""
        if not tiers <= self._tiers:
            self._tiers |= tiers
            for each in self._places():
                self._rate_paths(each)

    def _rate_paths(self, target: ServingEngine) -> None:
        load = target.load
        before, load.paths = load.paths, {}
        for tier in self._tiers:
            path = load.paths[tier] = load_path(target.told, tier, load.prefill_tokens_s)
            path.free_s = before[tier].free_s if tier in before else 0.0

    def all_are_up(self) -> bool:
        """Whether all engines are up, so that a model that none of them has does not exist."""
        return bool(self.engines) and all(engine.state is EngineState.UP for engine in self.engines.values())

    def models(self) -> dict[str, dict[str, Any]]:
        """The entries of /v1/models of all serving engines, by id; of several, the first engine's."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self.serving(""):
            for name, entry in engine.models.items():
                found.setdefault(name, entry)
        return found


def _word(told: object) -> str:
    return told if isinstance(told, str) else ""


def place_of(settings: EngineSettings, api_key: str) -> Place:
    """The place of an engine in the settings; for `dns+…` URLs, with the DNS name as its host. Raises ConfigError."""
    if settings.url.startswith(UNIX):
        path = settings.url.removeprefix(UNIX)
        address, name = Address(path, 0, False, "localhost"), path[1:].replace("/", "-")
    else:
        parts = urlsplit(settings.url.removeprefix(DNS))
        try:
            port = parts.port
        except ValueError:
            port = None
        if not parts.hostname or port is None:
            says = f"engines: {settings.url!r:.200}: must name a host and a port, as http://HOST:8000"
            raise ConfigError(says, field="engines")
        address = Address(parts.hostname, port, parts.scheme == "https")
        name = f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}"
    return Place(
        settings.name or name, address, api_key, source_of(settings), settings.data_parallel_size,
        settings.instance, settings.role, settings.user, settings.bootstrap,
    )  # fmt: skip


@functools.lru_cache(8_192)
def endpoint_of(address: Address) -> str:
    """`ip:port` or socket path of an engine for Envoy; empty: the address is a host name, which Envoy cannot use."""
    if address.host.startswith("/"):
        return address.host
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return ""
    return f"[{ip}]:{address.port}" if ip.version == 6 else f"{ip}:{address.port}"
