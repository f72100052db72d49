"""Probes engines, resolves DNS names of engines, and keeps the fleet up to date.

A probe requests `/health`, `/v1/models` and, if the engine supports sleep, `/is_sleeping`.  Responses are bounded and
checked: an engine whose responses differ from vLLM's gets no requests.  An engine that starts to serve is asked where
it publishes its KV events, and so how many data-parallel ranks it has; only addresses of its own host are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import pwd
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.config.gateway_model import EngineSettings, HealthSettings
from kvstrata.gateway.engine_http import HttpClient, LinkBroken, Unreachable, addresses_of
from kvstrata.gateway.fleet import (
    DNS,
    EngineState,
    Fleet,
    Place,
    ServingEngine,
    endpoint_of,
    place_of,
)
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.residency.sources import Source, of_rank, sources_in
from kvstrata.observability.logging import EventLog
from kvstrata.process.ports import port_uids
from kvstrata.process.supervisor import Supervisor

MAX_MODELS_BYTES = 4 << 20
"""Maximum size of a probe's response; an adapter's entry takes about 500 bytes."""
MAX_ADDRESSES = 1_024
ASK_AGAIN_S = 30.0
"""Time until an engine that did not report where it publishes KV events is asked again."""
FAILURES, AGAIN_S = 2, 0.1
"""Number of failed probes in a row after which an engine is down; time between a failed probe and the next one."""


class _Models(msgspec.Struct):
    data: Annotated[list[dict[str, Any]], Meta(max_length=4_096)]


class _Sleep(msgspec.Struct):
    is_sleeping: bool = False


class _Asked(NamedTuple):
    """Under which settings an engine was asked where it publishes KV events."""

    events: Source | None
    ranks: int
    """`Place.events` and `Place.ranks` at that time."""
    again_s: float
    """Time at which it is asked again; infinite: never."""


class Probing:
    """Belongs to the event loop; the supervisor owns its tasks."""

    def __init__(
        self,
        fleet: Fleet,
        settings: HealthSettings,
        asker: HttpClient,
        supervisor: Supervisor,
        now_s: Callable[[], float],
        residency: Residency,
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._asker = asker
        self._supervisor = supervisor
        self._residency = residency
        self._listens = False
        self._asked: dict[ServingEngine, _Asked] = {}
        self._now_s = now_s
        self._engines: list[tuple[EngineSettings, str]] = []
        """The settings' engines, each with its API key."""
        self._resolved: dict[str, list[str]] = {}
        """By URL: the IP addresses of its host at the last successful resolution."""
        self._found: list[Place] = []
        """Engines from Kubernetes."""
        self._now: dict[ServingEngine, asyncio.Event] = {}
        self._log = EventLog("probing")

    def set_engines(self, engines: Iterable[tuple[EngineSettings, str]]) -> None:
        """Replace the settings' engines; DNS names keep the addresses of their last resolution."""
        self._engines = list(engines)
        self._apply()

    def set_found(self, places: list[Place]) -> None:
        """Replace the engines from Kubernetes."""
        self._found = places
        self._apply()

    def set_listening(self, wanted: bool) -> None:
        """Set whether to subscribe to engines' KV events."""
        self._listens = wanted
        if not wanted:
            for engine in list(self._asked):
                self._residency.listen(engine, {})
                self._fleet.set_ranks(engine, engine.place.ranks)
            self._asked.clear()

    def suspect(self, engine: ServingEngine) -> None:
        """The connection to an engine failed: probe it now. Only the probe decides."""
        if (now := self._now.get(engine.process)) is not None:
            now.set()

    async def keep_resolved(self) -> None:
        """Resolve the DNS names every `health.probe_s`, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.probe_s)
            await self.resolve()

    async def probed(self) -> None:
        """Wait until each engine's first probe has ended, for at most `health.timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.timeout_s):
                for engine in list(self._fleet.engines.values()):
                    await engine.probed.wait()

    async def resolve(self) -> None:
        """Resolve the DNS names once; a name that cannot be resolved keeps its engines."""
        for settings, key in self._engines:
            named = settings.url.startswith(DNS) or not endpoint_of(place_of(settings, key).address)
            if named and (addresses := await self._addresses(settings)) is not None:
                self._resolved[settings.url] = addresses
        self._apply()

    def _apply(self) -> None:
        """Give the fleet the engines of the settings and of Kubernetes, and start to probe new ones."""
        places: list[Place] = []
        for settings, key in self._engines:
            place, found = place_of(settings, key), self._resolved.get(settings.url, [])
            if not found:
                places += [] if settings.url.startswith(DNS) else [place]
            elif settings.url.startswith(DNS):
                places += [_at(place, one)._replace(name=f"{place.name}/{one}") for one in found]
            else:  # one engine by its host's name, of which Envoy needs an IP address
                places.append(_at(place, place.address.host if place.address.host in found else found[0]))
        for engine in self._fleet.set_places([*places, *self._found]):
            self._now[engine] = asyncio.Event()
            self._supervisor.spawn(self._keep_probed(engine), f"probe-{engine.name}")

    async def probe(self, engine: ServingEngine) -> None:
        """Probe an engine once, and record the result in the fleet."""
        reason, silent = "", False
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                if strangers := await asyncio.to_thread(_foreign_listener, engine.place):
                    engine.is_foreign = True
                    self._fleet.down(engine, strangers)
                    return
                engine.is_foreign = False
                status, _ = await self._get(engine, "/health")
                if status != 200:
                    reason = f"/health answers {status}"
                else:
                    status, body = await self._get(engine, "/v1/models")
                    reason = "" if status == 200 else f"/v1/models answers {status}"
                if not reason and engine.may_sleep:
                    status, said = await self._get(engine, "/is_sleeping")
                    engine.may_sleep = status == 200
                    if status == 200 and msgspec.json.decode(said, type=_Sleep).is_sleeping:
                        reason = "it sleeps (/is_sleeping)"
                if not reason:
                    models = models_in(body)
                    if self._listens and (engine.state is EngineState.DOWN or not self._has_asked(engine)):
                        await self._hear(engine)
                    self._fleet.up(engine, models)
                    return
        except Unreachable as error:
            reason = f"cannot be reached: {error}"
        except TimeoutError:
            reason, silent = f"no answer within {self.settings.timeout_s:g} s", True
            if self._now_s() - engine.heard_s < self.settings.probe_s + self.settings.timeout_s:
                return  # it has just answered a request, so it is only busy
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"the response to a probe is not vLLM's: {error}"
        except LinkBroken as error:
            reason = str(error)
        engine.failed_probes, engine.may_sleep = engine.failed_probes + 1, True
        if engine.failed_probes >= FAILURES or engine.state is EngineState.NEW:
            self._fleet.down(engine, reason, silent=silent)

    def _has_asked(self, engine: ServingEngine) -> bool:
        """Whether the engine has been asked under its current settings, and need not be asked again yet."""
        asked, place = self._asked.get(engine), engine.place
        return (
            asked is not None
            and (asked.events, asked.ranks) == (place.events, place.ranks)
            and self._now_s() < asked.again_s
        )

    async def _hear(self, engine: ServingEngine) -> None:
        """Find out an engine's ranks, and subscribe to the KV events that they publish."""
        place, again_s, sources = engine.place, math.inf, list[Source]()
        try:
            sources = await self._sources(engine)
            if sources and len(sources) != max(1, place.ranks or len(sources)):
                raise ValueError(
                    f"{len(sources)} data-parallel ranks publish events, but data_parallel_size is {place.ranks}"
                )
        except (ValueError, LinkBroken, TimeoutError) as error:
            again_s, sources = self._now_s() + ASK_AGAIN_S, []
            reason = str(error) or "no answer"
            self._log.repeated(30, engine.name, "kv_events_unknown", engine=engine.name, reason=reason)
        if not self._listens or engine.state is EngineState.LEAVING:
            return
        self._asked[engine] = _Asked(place.events, place.ranks, again_s)
        self._fleet.set_ranks(engine, place.ranks or len(sources))
        names = [target.name for target in engine.targets]
        self._residency.listen(engine, dict(zip(names, sources, strict=False)))

    async def _sources(self, engine: ServingEngine) -> list[Source]:
        """The sources of KV events of an engine's ranks. Raises ValueError, LinkBroken and TimeoutError."""
        place = engine.place
        if place.events is not None:
            if not place.events.endpoint:
                return []
            return [of_rank(place.events, rank) for rank in range(max(1, place.ranks))]
        # Half of the probe's time, so that an engine that does not answer this question can still pass the probe.
        async with asyncio.timeout(self.settings.timeout_s / 2):
            status, body = await self._get(engine, "/kv_event_sources")
        host = "127.0.0.1" if place.address.host.startswith("/") else place.address.host
        return sources_in(body, host) if status == 200 else []

    async def _get(self, engine: ServingEngine, path: str) -> tuple[int, bytes]:
        place = engine.place
        headers = {"authorization": f"Bearer {place.api_key}"} if place.api_key else {}
        return await self._asker.ask(place.address, "GET", path, headers, most_bytes=MAX_MODELS_BYTES)

    async def _addresses(self, settings: EngineSettings) -> list[str] | None:
        place = place_of(settings, "").address
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return (await addresses_of(place.host, place.port))[:MAX_ADDRESSES]
        except (OSError, TimeoutError, UnicodeError) as error:
            self._log.repeated(30, settings.url, "name_not_resolved", url=settings.url, reason=str(error))
            return None

    async def _keep_probed(self, engine: ServingEngine) -> None:
        """Probe an engine every `health.probe_s` until it is LEAVING."""
        now = self._now[engine]
        try:
            while engine.state is not EngineState.LEAVING:
                now.clear()
                await self.probe(engine)
                engine.probed.set()
                probe_s = self.settings.probe_s
                with contextlib.suppress(TimeoutError):
                    in_doubt = engine.failed_probes and engine.state is EngineState.UP
                    async with asyncio.timeout(min(AGAIN_S, probe_s) if in_doubt else probe_s):
                        await now.wait()
        finally:
            del self._now[engine]
            self._asked.pop(engine, None)
            self._residency.listen(engine, {})


def _at(place: Place, host: str) -> Place:
    """The place with an IP address of its host; the host's name is kept for TLS."""
    return place._replace(address=place.address._replace(host=host, name=place.address.host))


def uid_of(user: str) -> int:
    """The uid of a user given by name or number; -1: no such user."""
    with contextlib.suppress(KeyError):
        return int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    return -1


def _foreign_listener(place: Place) -> str:
    """The reason why the process that listens at a local place cannot be its engine; empty: it can. Any thread."""
    uids: set[int] = set()
    host, port = place.address.host, place.address.port
    with contextlib.suppress(OSError, ValueError):
        if host.startswith("/"):
            uids = {os.stat(host).st_uid}
        elif ipaddress.ip_address(host).is_loopback:
            uids = port_uids(port, host)
    ours = {0, os.geteuid()}
    if place.user:
        ours.add(uid_of(place.user))
    if not uids - ours:
        return ""
    users = " and ".join(map(str, sorted(uids - ours)))
    return f"uid {users} listens at its address, not root or the gateway's user; set engines[].user to allow that"


def models_in(body: bytes) -> dict[str, dict[str, Any]]:
    """The entries of a response of /v1/models, by id. Raises msgspec.DecodeError."""
    entries = msgspec.json.decode(body, type=_Models).data
    found = {one["id"]: one for one in entries if isinstance(one.get("id"), str)}
    if len(found) != len(entries):
        raise msgspec.ValidationError("an entry of `data` has no `id`, or two entries have the same")
    return found
