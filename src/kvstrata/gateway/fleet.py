"""The engines: which of them serve, which models they have, and how many requests each has.

    NEW ──▶ UP ◀──▶ DOWN            by probes (probing.py) and by refused connections
     └───────┴───────┴──▶ LEAVING   left out of the settings; ends its requests

Only an engine that is UP gets requests.  After each return its share grows from LEAST_SHARE to 1 within
`slow_start_s`, since its caches are cold and its first steps compile.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvstrata.config.gateway_model import EngineSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.busy_periods import Busy, BusyPeriod
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.residency.sources import Source, source_of
from kvstrata.observability.logging import EventLog
from kvstrata.policy.routing.load_rates import LoadRates
from kvstrata.policy.routing.model import EngineState as Load
from kvstrata.policy.routing.model import Fleet as RoutingFleet
from kvstrata.policy.routing.model import Tier
from kvstrata.policy.routing.queues import Queues
from kvstrata.policy.routing.rates import Rates

LEAST_SHARE = 0.25
ASSUMED_TOKENS_S = 10_000.0
"""Rate at which engines are taken to compute prompts until one has told its tokens."""
RATED_S = 1.0
"""Time between two looks at the measured rates."""
DNS = "dns+"


class EngineState(enum.Enum):
    """See the module."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    LEAVING = "leaving"


class Place(NamedTuple):
    """Where an engine is."""

    name: str
    address: Address
    api_key: str = ""
    """Empty: the engine asks for none."""
    events: Source | None = None
    """Where it publishes KV events, as the settings say; None: it is asked."""


class ServingEngine:
    """One engine. Belongs to the event loop."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.state = EngineState.NEW
        self.reason = "not probed yet"
        self.models: dict[str, dict[str, Any]] = {}
        """Its entries of /v1/models, by id."""
        self.load = Load(name=place.name, prefill_tokens_s=ASSUMED_TOKENS_S)
        """What this gateway has sent it, and those that it hears of; the fleet's `queues` change it."""
        self.generation = 0
        """Changes with each return, after which its cache is taken for empty."""
        self.in_flight = 0
        """Requests of this gateway under way."""
        self.sent = 0
        self.failed_probes = 0
        self.probed = asyncio.Event()
        """Set after the first probe."""
        self.up_since_s = 0.0
        self.answered_s = 0.0
        """When it answered a probe for the last time, or when the gateway first heard of it."""
        self.waiting: set[asyncio.Timeout] = set()
        """The time limits of requests that wait for its first byte."""
        self.busy: BusyPeriod | None = None
        """As long as a prompt waits."""
        self.returned = False
        """Whether it has been down since the gateway knows it."""

    @property
    def name(self) -> str:
        """Its name in logs and metrics."""
        return self.place.name


class Fleet:
    """All engines, by name, in the order of the settings."""

    def __init__(self, now_s: Callable[[], float], slow_start_s: float) -> None:
        self._now_s = now_s
        self.slow_start_s = slow_start_s
        self.engines: dict[str, ServingEngine] = {}
        self.queues = Queues()
        """Requests under way by their numbers, and the loads of the engines."""
        self.rates = Rates(ASSUMED_TOKENS_S)
        self.load_rates = LoadRates()
        self._rated_s = float("-inf")
        self._leaving: list[ServingEngine] = []
        self._log = EventLog("engines")

    def __iter__(self) -> Iterator[ServingEngine]:
        return iter([*self.engines.values(), *self._leaving])

    def set_places(self, places: Iterable[Place]) -> list[ServingEngine]:
        """Have exactly these engines; those that stay keep their state. Returns the new ones."""
        wanted = {place.name: place for place in places}
        fresh = []
        kept: dict[str, ServingEngine] = {}
        for name, place in wanted.items():
            engine = self.engines.get(name)
            if engine is None or engine.place.address != place.address:
                engine = ServingEngine(place)
                engine.answered_s = self._now_s()
                engine.load.prefill_tokens_s = self.rates.rate(name, 0.0)
                self.queues.add(engine.load)
                fresh.append(engine)
            engine.place = place
            kept[name] = engine
        for engine in self.engines.values():
            if kept.get(engine.name) is not engine:
                self._log.info("engine_left", engine=engine.name, in_flight=engine.in_flight)
                engine.state, engine.reason = EngineState.LEAVING, "no longer in the settings"
                self.rates.forget(engine.name)
                self.load_rates.forget(engine.name)
                if engine.in_flight:
                    self._leaving.append(engine)
                elif engine.name not in wanted:
                    self.queues.gone(engine.name)
        self.engines = kept
        return fresh

    def up(self, engine: ServingEngine, models: Mapping[str, dict[str, Any]]) -> None:
        """A probe was answered."""
        engine.models = dict(models)
        engine.failed_probes = 0
        engine.answered_s = self._now_s()
        if engine.state is EngineState.LEAVING or engine.state is EngineState.UP:
            return
        engine.returned = engine.state is EngineState.DOWN
        engine.generation += engine.returned
        engine.state, engine.reason = EngineState.UP, ""
        engine.up_since_s = self._now_s()
        self._log.info("engine_up", engine=engine.name, models=",".join(sorted(models))[:500])

    def down(self, engine: ServingEngine, reason: str) -> None:
        """The engine gets no requests until a probe is answered."""
        if engine.state is EngineState.LEAVING:
            return
        if engine.state is not EngineState.DOWN:
            self._log.warning("engine_down", engine=engine.name, reason=reason, in_flight=engine.in_flight)
        engine.state, engine.reason = EngineState.DOWN, reason

    def abandon(self, engine: ServingEngine) -> None:
        """Requests that wait for this engine's first byte wait no longer."""
        for limit in list(engine.waiting):
            limit.reschedule(0.0)

    def began(
        self, engine: ServingEngine, number: str, uncached_tokens: int, tokens: int, *, ours: bool = True
    ) -> BusyPeriod:
        """A request of about `tokens` is sent to the engine, which must compute `uncached_tokens` of them.

        `ours`: by this gateway.
        """
        now_s, load = self._now_s(), engine.load
        if not load.waiting or engine.busy is None:
            engine.busy = BusyPeriod(now_s, load.running)
        engine.busy.add()
        self.queues.dispatched(number, engine.name, uncached_tokens, tokens, now_s)
        engine.sent += ours
        engine.in_flight += ours
        return engine.busy

    def computed(self, engine: ServingEngine, busy: Busy) -> None:
        """The engine has computed prompts."""
        now_s = self._now_s()
        if (
            self.rates.observe(engine.name, busy.tokens, busy.seconds, busy.running)
            and now_s >= self._rated_s + RATED_S
        ):
            self._rated_s = now_s
            for each in self.engines.values():
                self.queues.rate(each.name, self.rates.rate(each.name, each.load.running), now_s)

    def measured(self, engine: ServingEngine) -> bool:
        """Whether the engine's own rate was measured."""
        return self.rates.samples(engine.name) > 0

    def loaded(self, engine: ServingEngine, tier: Tier, tokens: int, seconds: float) -> None:
        """A prompt that did not wait had so many tokens loaded from a tier in this time."""
        self.load_rates.observe(engine.name, tier, tokens, seconds)

    def answers(self, engine: ServingEngine, number: str) -> None:
        """The first part of a request's answer has come."""
        self.queues.first_token(number, self._now_s())
        self._rests(engine)

    def _rests(self, engine: ServingEngine) -> None:
        """End the busy period if no prompt waits any more."""
        if engine.busy is not None and not engine.load.waiting:
            engine.busy.end(self._now_s())
            engine.busy = None

    def ended(self, engine: ServingEngine, number: str, *, ours: bool = True) -> None:
        """A request that `began` has ended, however."""
        engine.in_flight -= ours
        self.queues.ended(number, self._now_s())
        self._rests(engine)
        if engine in self._leaving and not engine.in_flight:
            self._leaving.remove(engine)
            if engine.name not in self.engines:
                self.queues.gone(engine.name)

    def share(self, engine: ServingEngine) -> float:
        """The share of the usual load that an engine may get now."""
        if not engine.returned or not self.slow_start_s:
            return 1.0
        grown = (self._now_s() - engine.up_since_s) / self.slow_start_s
        return min(1.0, LEAST_SHARE + (1 - LEAST_SHARE) * max(0.0, grown))

    def serving(self, model: str, but: Iterable[ServingEngine] = ()) -> list[ServingEngine]:
        """The engines that are up and have the model (empty: any model), without those in `but`."""
        without = set(but)
        return [
            engine
            for engine in self.engines.values()
            if engine.state is EngineState.UP
            and (not model or model in engine.models)
            and engine not in without
        ]

    def adapter(self, model: str) -> str:
        """The adapter that a model's name stands for; empty: it stands for a base model, or nobody has it."""
        for engine in self.engines.values():
            entry = engine.models.get(model)
            if entry is not None:
                return model if entry.get("parent") else ""
        return ""

    def parent(self, model: str) -> str:
        """The base model of a model's name, as engines tell it: itself unless it is an adapter; empty: unknown."""
        for engine in self.engines.values():
            entry = engine.models.get(model)
            if entry is not None:
                parent = entry.get("parent")
                return parent if isinstance(parent, str) and parent else model
        return ""

    def loads(self, engines: Iterable[ServingEngine], tiers: Collection[Tier] = ()) -> RoutingFleet:
        """What the choice needs to know of these engines, with their paths to tiers that hold something."""
        loads = []
        for engine in engines:
            load = engine.load
            load.share = self.share(engine)
            load.paths = {
                tier: self.load_rates.path(engine.name, tier, load.prefill_tokens_s) for tier in tiers
            }
            loads.append(load)
        return RoutingFleet(engines=loads)

    def knows_all_models(self) -> bool:
        """Whether each engine has told its models, so that a model that none has does not exist."""
        return bool(self.engines) and all(engine.state is EngineState.UP for engine in self.engines.values())

    def models(self) -> dict[str, dict[str, Any]]:
        """The entries of /v1/models of all engines that are up, by id; the first engine's stands for a model."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self.serving(""):
            for name, entry in engine.models.items():
                found.setdefault(name, entry)
        return found


def place_of(settings: EngineSettings, api_key: str) -> Place:
    """The place of an engine that the settings name."""
    parts = urlsplit(settings.url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise ConfigError(
            f"engines: {settings.url!r:.200}: must name a host and a port, as http://HOST:8000",
            field="engines",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = Address(parts.hostname, port, parts.scheme == "https")
    return Place(settings.name or f"{host}:{port}", address, api_key, source_of(settings))


@functools.lru_cache(8_192)
def endpoint_of(address: Address) -> str:
    """`ip:port` of an engine; empty: it is known by a name, which Envoy cannot be told."""
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return ""
    return f"[{ip}]:{address.port}" if ip.version == 6 else f"{ip}:{address.port}"
