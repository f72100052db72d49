"""The engines: which of them serve, which models they have, and how many requests each has under way.

    NEW ──▶ UP ◀──▶ DOWN            by probes (probing.py) and by refused connections
     └───────┴───────┴──▶ LEAVING   removed from the settings; ends its requests

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
"""Assumed prefill rate until one engine has reported its tokens."""
RATED_S, RATED_EACH_S = 0.1, 0.001
"""Minimum interval of reads of the measured rates, and its increase per engine: a read takes a millisecond."""
MAX_MODELS = 1_024
DNS = "dns+"
UNIX = "unix:"


class EngineState(enum.Enum):
    """See the module."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    LEAVING = "leaving"


class Place(NamedTuple):
    """The address of an engine, and its settings."""

    name: str
    address: Address
    api_key: str = ""
    """The engine's API key; empty: it requires none."""
    events: Source | None = None
    """Where it publishes KV events, by the settings; None: it is asked."""
    ranks: int = 0
    """Number of its data-parallel ranks, by the settings; 0: it is asked."""
    instance: str = ""
    """The instance that it is attached to, by the settings; empty: instances report it."""
    role: Role = "both"
    user: str = ""
    """User that may run it, besides root and this user, if it is on this host."""
    bootstrap: str = ""
    """Address of its MooncakeConnector's bootstrap server; empty: vLLM's default port at its host."""

    @property
    def url(self) -> str:
        """The engine's URL in the form that its instance reports."""
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
        """Number of this rank in its engine; None: this is an engine."""
        self.process = owner or self
        """The engine itself."""
        self.ranks: list[ServingEngine] = []
        """The ranks of an engine with several."""
        self.state = EngineState.NEW
        self.reason = "not probed yet"
        self.models: dict[str, dict[str, Any]] = {}
        """Its entries in /v1/models, by id."""
        self.load = Load(name=place.name, prefill_tokens_s=rates.rate(place.name, 0.0))
        """The requests that this gateway, and the gateways that it hears from, have sent it; changed by `queue`."""
        self.queue = Queue(self.load, rates)
        self.told: dict[Tier, LoadPath] = {}
        """Its load rates from tiers as reported by its instance, see `rates.load_path`."""
        self.generation = 0
        """Changes with each return, after which its cache is assumed empty."""
        self.failed_probes = 0
        self.heard_s = -math.inf
        """When it last answered a request of this gateway."""
        self.is_silent = False
        """Whether it is down by time-outs alone."""
        self.may_sleep = True
        """Whether it may support /is_sleeping."""
        self.is_foreign = False
        """Whether a process of another user listens at its address."""
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
        """The targets of its requests: its ranks, or the engine itself if it has none."""
        return self.ranks or [self]


class Serving(NamedTuple):
    """The targets of requests for a model, in a fixed order; immutable."""

    targets: list[ServingEngine]
    loads: list[Load]
    generations: dict[str, int]
    """Generations by name, including those of `helpers`."""
    helpers: list[ServingEngine]
    """Engines of the model that compute prompts for others, and answer only if there are no others."""


class Fleet:
    """All engines, by name, in the order of the settings."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.engines: dict[str, ServingEngine] = {}
        self.rates = PrefillRates(ASSUMED_TOKENS_S)
        self.decode_rates = DecodeRates()
        self._instance_of: Callable[[ServingEngine], str] = lambda engine: ""
        self._tiers: set[Tier] = set()
        """Tiers for which the engines' load rates are known."""
        self.peers = False
        """Whether instances read from each other."""
        self._rated_s = float("-inf")
        self._leaving: list[ServingEngine] = []
        self.served: dict[str, None] = {}
        """Names of models that some engine had: the newest MAX_NAMES."""
        self._several: bool | None = None
        self._serving: dict[str, Serving] = {}
        """Serving engines by model, until an engine changes."""
        self._returned: set[ServingEngine] = set()
        """Engines that may not have their full share yet."""
        self.changed: Callable[[], None] = lambda: None
        """Called when engines begin or cease to serve."""
        self._log = EventLog("engines")

    def __iter__(self) -> Iterator[ServingEngine]:
        self._leaving = [one for one in self._leaving if one.load.requests]
        return iter([*self.engines.values(), *self._leaving])

    def set_places(self, places: Iterable[Place]) -> list[ServingEngine]:
        """Replace the engines by these; those that stay keep their state. Returns the new ones."""
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
                self._leaves(engine, "no longer in the settings")
        for engine in kept.values():
            self._tell_ranks(engine)
        for engine in (*fresh, *redivided):
            self.set_ranks(engine, engine.place.ranks)
        self.changed()
        return fresh

    def set_ranks(self, engine: ServingEngine, count: int) -> None:
        """Set an engine's number of ranks, each of which gets requests; fewer than two: it is not divided."""
        count = count if count > 1 else 0
        left, engine.ranks = engine.ranks[count:], engine.ranks[:count]
        for rank in left:
            self._leaves(rank, "its engine has fewer ranks")
        for number in range(len(engine.ranks), count):
            place = engine.place._replace(name=f"{engine.name}@{number}")
            engine.ranks.append(ServingEngine(place, self.rates, engine, number))
        self._tell_ranks(engine)
        self.changed()

    def _tell_ranks(self, engine: ServingEngine) -> None:
        """Copy an engine's place and state to its ranks. Called after each change of an engine."""
        self._serving.clear()
        for rank in engine.ranks:
            rank.place = engine.place._replace(name=rank.name)
            rank.state, rank.models, rank.generation = engine.state, engine.models, engine.generation
        for target in (engine, *engine.ranks):
            target.load.role = engine.place.role
            target.load.instance = engine.place.instance or self._instance_of(engine)
            self._rate_paths(target)

    def attach(self, instance_of: Callable[[ServingEngine], str], *, peers: bool) -> None:
        """Set the instances to which engines are attached (empty: unknown), and whether these read each other."""
        self._instance_of, self.peers = instance_of, peers
        self._tiers -= set() if peers else {"peer"}
        for engine in self.engines.values():
            self._tell_ranks(engine)

    def _leaves(self, target: ServingEngine, reason: str) -> None:
        """Wait for the end of a target's requests, then forget it."""
        target.state, target.reason = EngineState.LEAVING, reason
        if target.queue.period is not None:
            target.queue.period.spoil()
        self.rates.forget(target.name)
        self.decode_rates.forget(target.name)
        self._leaving.append(target)

    def target(self, name: str) -> ServingEngine | None:
        """The engine or rank with this name."""
        engine = self.engines.get(name)
        if engine is not None and not engine.ranks:
            return engine
        engine = engine or self.engines.get(name.rpartition("@")[0])
        targets = (engine, *engine.ranks) if engine is not None else ()
        return next((one for one in targets if one.name == name), None)

    def _places(self) -> Iterator[ServingEngine]:
        """All engines of the settings and all their ranks."""
        for engine in self.engines.values():
            yield engine
            yield from engine.ranks

    def up(self, engine: ServingEngine, models: Mapping[str, dict[str, Any]]) -> None:
        """A probe was answered."""
        if not models.keys() <= self.served.keys():
            self.served = dict.fromkeys([*self.served, *models][-MAX_NAMES:])
        if engine.models != models:
            engine.models, self._several = dict(models), None
            self._tell_ranks(engine)
        engine.failed_probes = 0
        if engine.state is EngineState.LEAVING or engine.state is EngineState.UP:
            return
        if engine.state is EngineState.DOWN and engine.up_since_s > 0:
            engine.generation += 1
            self._returned.add(engine)
        engine.state, engine.reason, engine.is_silent = EngineState.UP, "", False
        engine.up_since_s = self._now_s()
        self._tell_ranks(engine)
        self._log.info("engine_up", engine=engine.name, models=",".join(sorted(models))[:500])
        self.changed()

    def down(self, engine: ServingEngine, reason: str, *, silent: bool = False) -> None:
        """The engine gets no requests until a probe is answered. `silent`: it did not answer in time."""
        if engine.state is EngineState.LEAVING:
            return
        if engine.state is not EngineState.DOWN:
            self._log.warning("engine_down", engine=engine.name, reason=reason, in_flight=engine.in_flight)
        engine.state, engine.reason, engine.is_silent = EngineState.DOWN, reason, silent
        self._tell_ranks(engine)
        self.changed()

    def next_room_s(self) -> float:
        """Time at which a prompt will free its place at an engine without a report; infinite: none will."""
        now_s = self._now_s()
        return min((one.queue.next_room_s(now_s) for one in self._places()), default=math.inf)

    def measured(self, engine: ServingEngine) -> bool:
        """Whether the engine's own rate was measured."""
        return self.rates.samples(engine.name) > 0

    def numbers(self, engine: ServingEngine) -> dict[str, float | bool]:
        """An engine's counters and measurements for the status page; summed over its ranks."""
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
        """The first part of a request's answer has come. `flight`: what `began` returned."""
        now_s = self._now_s()
        flight.queue.first_token(flight, now_s)
        if now_s >= self._rated_s + max(RATED_S, RATED_EACH_S * len(self.engines)):
            self._rated_s, (tokens, _) = now_s, self.decode_rates.answer_tokens()
            for each in self._places():
                each.queue.rate(self.decode_rates.line(each.name), tokens, now_s)
                self._rate_paths(each)

    def share(self, engine: ServingEngine) -> float:
        """The share of the usual load that an engine may get now."""
        if engine not in self._returned:
            return 1.0
        grown = (self._now_s() - engine.up_since_s) / SLOW_START_S
        return min(1.0, LEAST_SHARE + (1 - LEAST_SHARE) * max(0.0, grown))

    def returned(self) -> list[ServingEngine]:
        """Engines that may not get their whole share yet."""
        for one in [one for one in self._returned if self.share(one) >= 1.0]:
            self._returned.discard(one)
        return list(self._returned)

    def serving(self, model: str, but: Iterable[ServingEngine] = ()) -> list[ServingEngine]:
        """The engines that are up and have the model (empty: any model), without those in `but` and their ranks.

        If there are none, those that are down by time-outs alone: engines that are merely busy must not all be lost.
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
        """The targets of a request for the model: `serving`, with ranks in place of engines that have several."""
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
        """The entry of a model in /v1/models of the first engine that has it."""
        return next((one.models[model] for one in self.engines.values() if model in one.models), None)

    def adapter(self, model: str) -> str:
        """The adapter that a model's name denotes; empty: it denotes a base model, or no engine has it."""
        return model if (self._entry(model) or {}).get("parent") else ""

    def root(self, model: str) -> str:
        """The model that a name denotes, equal for all its aliases."""
        return _word((self._entry(model) or {}).get("root")) or model

    def several(self) -> bool:
        """Whether engines serve different models, adapters and aliases aside."""
        if self._several is None:
            entries = (pair for engine in self.engines.values() for pair in engine.models.items())
            roots = {str(one.get("root") or name) for name, one in entries if not one.get("parent")}
            self._several = len(roots) > 1
        return self._several

    def parent(self, model: str) -> str:
        """The base model of a model's name, as engines report it: itself unless it is an adapter; empty: unknown."""
        entry = self._entry(model)
        return "" if entry is None else _word(entry.get("parent")) or model

    def know_paths(self, tiers: set[Tier]) -> None:
        """Add these tiers to those with known load rates, with the last measured rates."""
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

    def knows_all_models(self) -> bool:
        """Whether each engine has reported its models, so that a model that none has does not exist."""
        return bool(self.engines) and all(engine.state is EngineState.UP for engine in self.engines.values())

    def models(self) -> dict[str, dict[str, Any]]:
        """The entries of /v1/models of all engines that are up, by id; the first engine's stands for a model."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self.serving(""):
            for name, entry in engine.models.items():
                found.setdefault(name, entry)
        return found


def _word(told: object) -> str:
    return told if isinstance(told, str) else ""


def place_of(settings: EngineSettings, api_key: str) -> Place:
    """The place of an engine that the settings name; for a DNS name, of one with this name."""
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
    """`ip:port` or socket of an engine; empty: it is known by a name, which Envoy cannot be told."""
    if address.host.startswith("/"):
        return address.host
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return ""
    return f"[{ip}]:{address.port}" if ip.version == 6 else f"{ip}:{address.port}"
