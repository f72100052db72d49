"""The gateway's process: the order in which it starts and stops its parts (process/lifecycle.py).

settings ─▶ port bound ─▶ engines probed once ─▶ picker, Envoy ─▶ ready ─▶ drained: requests end ─▶ stop
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata import __version__
from kvstrata.config.gateway_model import GatewaySettings, SharingSettings
from kvstrata.config.load import Changes, changes, replaced
from kvstrata.errors import ConfigError
from kvstrata.gateway.admin import OPERATIONS, Admin
from kvstrata.gateway.admission import Admission
from kvstrata.gateway.choosing import Choosing
from kvstrata.gateway.controllers.asking import Controllers
from kvstrata.gateway.door import Door
from kvstrata.gateway.engine_http import HttpClient
from kvstrata.gateway.envoy.process import Envoy, program
from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.handover.legs import Legs
from kvstrata.gateway.kubernetes import Endpoints
from kvstrata.gateway.metering import Measured, Meters, measured
from kvstrata.gateway.metrics import Glance, sections
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker.front import AuthzServer
from kvstrata.gateway.plan import Plan, plan
from kvstrata.gateway.probing import Probing
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.request import Requests
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.routing.choose import POLICIES
from kvstrata.gateway.sharing.others import Others
from kvstrata.gateway.sharing.sockets import FIELD, Sharing, piece_secret
from kvstrata.gateway.tokens.source import Tokens
from kvstrata.observability.logging import current_level, set_level
from kvstrata.observability.numbers import Numbers, Pages
from kvstrata.patience import patience
from kvstrata.process.http_gate import Access, is_loopback
from kvstrata.process.http_thread import Port, make_port
from kvstrata.process.lifecycle import Process, soon, tell_ready
from kvstrata.process.listen import Listener, ServedToken, listen, warn_if_plain
from kvstrata.process.ports import host_and_port
from kvstrata.process.supervisor import SWITCH_S
from kvstrata.rpc.zmq_curve import SharedKey

if TYPE_CHECKING:
    from kvstrata.gateway.picker.server import PickerServer

LINGER_S = 5.0
"""While a gateway whose readiness is probed stops, its port closes once no request has arrived for this long."""
WATCHED_S = 60.0
"""A gateway counts as probed if the last readiness probe is no older than this."""
GC_OBJECTS = 20_000
"""Allocations between garbage collections: requests leave few cycles, and each collection delays all streams."""
RESTART = frozenset(("drain_s", "log_format", "queue.max_requests", "split", "tokens.deadline_ms"))
"""Settings besides those of OPENED that need a restart, most of them because Envoy is started with them."""
OPENED = ("http.", "picker.", "engines_from.", "sharing.listen", "sharing.curve_file", "timeouts.", "envoy")


class Gateway(Process):
    """One gateway process."""

    _plan: Plan
    _settings: GatewaySettings
    _picker: PickerServer | None = None
    _envoy: Envoy | None = None

    async def start(self) -> None:
        """Open everything and serve. Raises KvstrataError; the closers then undo what was opened."""
        settings, now_s = self._plan.settings, time.monotonic
        listener = listen(settings.http, flag="--port")
        self.closers.append(soon(listener.close))
        asker = HttpClient()
        fleet = Fleet(now_s)
        meters = Meters({one.name: one for one in settings.slo})
        requests, legs = Requests(), Legs(asker)
        self.closers.append(legs.close)
        loopback = is_loopback(settings.http.host)
        http = settings.http
        if settings.tenants and http.open_metrics is None:
            http = msgspec.structs.replace(http, open_metrics=False)
        access = Access(http, self._plan.token)
        door = Door(access, now_s, loopback=loopback)
        door.set_tenants(self._plan.tenants)
        residency = Residency(now_s)
        self.closers.append(soon(residency.close))
        tokens = Tokens(settings.tokens, self._plan.tokenizers, fleet, asker, now_s)
        self.closers.append(tokens.close)
        choosing = Choosing(POLICIES[settings.policy], fleet, residency, meters, now_s)
        reader = Reader(settings, fleet)
        admission = Admission(settings.queue, choosing, fleet, now_s, asyncio.get_running_loop().call_later)
        sharing = await self._start_sharing(fleet, choosing, reader) if settings.sharing.listen else None

        async def numbers() -> tuple[str, int, int, Measured]:
            told = await measured(fleet, meters, self._settings.split)
            return self._settings.policy, requests.in_flight, sum(meters.received.values()), told

        controllers = Controllers(
            settings.controllers, self._plan.controller_keys, listener, fleet, self.supervisor, now_s, numbers
        )
        self.closers.append(controllers.close)
        self._probing = probing = Probing(fleet, settings.health, asker, self.supervisor, now_s, residency)
        probing.set_listening(settings.predicts)
        self._parts = parts = Parts(
            settings, now_s, door, fleet, meters, reader, residency, tokens, choosing, admission, controllers,
            requests, probing.suspect, legs, sharing,
        )  # fmt: skip
        requests.parts = legs.parts = parts
        self._glance = glance = Glance(parts)
        self._numbers: tuple[Numbers, ...] = ()
        pages = Pages(lambda: sections(parts, glance, self._numbers))
        admin = Admin(parts, self.page, pages.page)
        port = await make_port("kvstrata gateway", OPERATIONS, admin, access)
        self._numbers = port.numbers
        token = ServedToken(port.set_token, settings.http, listener.port, self._plan.token, self.log)
        self.closers.append(soon(token.close))
        self.supervisor.spawn(token.keep(), "token")
        if settings.picker.listen:
            await self._start_picker()
        probing.set_engines(self._plan.engines)
        await probing.resolve()
        await self._start_watching()
        await probing.probed()  # so that the first requests find engines
        await self._first_verified()
        self.supervisor.spawn(tokens.keep_verified(lambda: self._settings.health.probe_s), "tokens")
        self.supervisor.spawn(probing.keep_resolved(), "resolve")
        if settings.picker.only:
            self.supervisor.spawn(port.serve(listener), "http")
        else:
            await self._start_envoy(listener, port)
        if settings.insecure and not loopback and not settings.tenants:
            says = "--insecure: anyone who can reach this port can use the engines"
            self.log.warning("http_port_open", host=settings.http.host, port=listener.port, note=says)
        warn_if_plain(settings.http.host, listener.port, self.log)
        if self._picker is not None and not settings.picker.tls_cert_file:
            warn_if_plain(host_and_port(settings.picker.listen)[0], self._picker.port, self.log)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_OBJECTS)
        ready = {
            "pid": os.getpid(),
            "host": settings.http.host,
            "http_port": listener.port,
            "picker_port": self._picker.port if self._picker is not None else 0,
            "http_token_file": token.path,
            "engines": len(fleet.engines),
            "engines_up": len(fleet.serving("")),
            "policy": settings.policy,
            "tenants": len(settings.tenants),
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready)
        tell_ready(self._ready_fd, ready)

    async def _start_sharing(self, fleet: Fleet, choosing: Choosing, reader: Reader) -> Sharing:
        """Start to exchange events with the other gateways."""
        wanted, keys = self._settings.sharing, self._plan.sharing_keys
        if keys is None:
            shared = SharedKey(FIELD)
            self.supervisor.spawn(shared.keep(), "cluster-key")
            keys = shared.keys
        others = Others(fleet, choosing.prefixes, time.monotonic)
        sharing = Sharing(wanted, keys, others)
        self.closers.append(soon(sharing.close))
        sharing.start()
        reader.secret = piece_secret(keys)
        choosing.teller = sharing.teller
        await sharing.set(wanted)
        self.supervisor.spawn(sharing.keep(), "sharing")
        return sharing

    async def _start_envoy(self, listener: Listener, port: Port) -> None:
        """Start Envoy on the clients' port, and the picker and the gateway's own pages on unix sockets behind it."""
        path, version = await self.loop.run_in_executor(None, program, self._settings)
        parts, family = self._parts, listener.socket.family
        host = listener.socket.getsockname()[0]
        listener.close()
        # This socket reserves the port; it never listens. Envoy's sockets share the port with it by SO_REUSEPORT.
        held = socket.socket(family, socket.SOCK_STREAM)
        self.closers.append(soon(held.close))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, listener.port))
        self._envoy = envoy = Envoy(self._settings, parts.fleet, parts.requests, host, listener.port)
        self.closers.append(envoy.close)
        front = AuthzServer(parts)
        await front.start(envoy.place.picker)
        pages = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pages.bind(str(envoy.place.pages))
        pages.listen(128)
        pages.setblocking(False)
        self.closers.append(front.close)
        self.supervisor.spawn(port.serve(Listener(pages, listener.port)), "http")
        admits = parts.fleet.changed

        def changed() -> None:
            envoy.write_engines()
            admits()

        parts.fleet.changed = changed
        await envoy.start(path, version)
        self.supervisor.spawn(envoy.watch(), "envoy")

    async def _start_watching(self) -> None:
        """Start to follow the endpoints that Kubernetes lists, and wait up to `health.timeout_s` for the first list."""
        settings, account = self._settings, self._plan.account
        service = settings.engines_from.kubernetes
        if service is None or account is None:
            return
        endpoints = Endpoints(service, account, self._plan.found_key, self._probing.set_found)
        self.supervisor.spawn(endpoints.keep(lambda: self._settings.health.probe_s), "endpoints")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.health.timeout_s):
                await endpoints.known.wait()

    async def _start_picker(self) -> None:
        from kvstrata.gateway.picker.server import PickerServer  # needs the extra `picker`

        self._picker = picker = PickerServer(self._parts)
        self.closers.append(picker.close)
        await picker.start()
        self.supervisor.spawn(picker.find_lost(), "picker")

    async def _first_verified(self) -> None:
        """Compare the tokenizers with the serving engines for at most `health.timeout_s`, and with the rest later."""
        if self._parts.tokens.tokenizers:
            sys.setswitchinterval(SWITCH_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.health.timeout_s):
                await self._parts.tokens.verify()

    @property
    def drain_s(self) -> float:
        """Maximum time that a stop waits for requests under way."""
        return self._settings.drain_s

    def under_way(self) -> dict[str, object]:
        """The number of requests that a stop waits for, for the log."""
        return {"requests": self._in_flight}

    def given_up(self) -> dict[str, object]:
        """The number of requests that a stop cuts off, for the log."""
        return {"requests_cut": self._in_flight}

    @property
    def _in_flight(self) -> int:
        """Number of requests under way."""
        return self._parts.requests.in_flight

    async def drain(self, drain_s: float) -> None:
        """Report not ready, have clients close their connections, and wait for requests to end; new ones are served.

        Where readiness is probed, requests arrive until every load balancer has seen the change, so the port stays open
        until none has arrived for LINGER_S. Returns after `drain_s` at the latest.
        """
        parts, requests = self._parts, self._parts.requests
        parts.stopping, idle = True, asyncio.Event()
        requests.idle = idle.set
        quiet_s = parts.now_s()
        lingers_s = patience(LINGER_S) if quiet_s < parts.asked_s + WATCHED_S else 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                if self._envoy is not None:
                    await self._envoy.drain()
                while True:
                    idle.clear()
                    left_s = max(quiet_s, requests.newest_arrival_s) + lingers_s - parts.now_s()
                    if self._in_flight:
                        await idle.wait()
                    elif left_s > 0:
                        await asyncio.sleep(left_s)
                    else:
                        break
                if self._picker is not None:
                    await self._picker.drain(drain_s)

    async def reload(self) -> dict[str, object]:
        """Apply the settings file's new values, except those of OPENED and RESTART. Raises ConfigError."""
        wanted = await self.loop.run_in_executor(None, self._reread)
        if bool(wanted.tenants) != bool(
            self._settings.tenants
        ):  # Envoy asks about keys, or lets requests pass
            says = (
                "tenants: whether clients need keys is fixed at the start; restart the gateway to change it"
            )
            raise ConfigError(says, field="tenants")
        # The ports stay as they are, so the new settings are checked together with the old ports.
        kept = msgspec.structs.replace(
            wanted,
            http=self._settings.http,
            picker=self._settings.picker,
            engines_from=self._settings.engines_from,
            sharing=self._kept_sharing(wanted.sharing),
        )
        newer = await self.loop.run_in_executor(None, plan, kept, self._parts.tokens.tokenizers)
        before = msgspec.structs.replace(self._settings, log_level=current_level())
        changed = changes(before, wanted)
        applied = {key for key in changed if not key.startswith(OPENED) and key not in RESTART}
        settings = replaced(before, newer.settings, applied)
        parts, self._settings = self._parts, settings
        set_level(settings.log_level)
        parts.settings = parts.reader.settings = settings
        parts.meters.slo = {one.name: one for one in settings.slo}
        parts.choosing.policy = POLICIES[settings.policy]
        parts.admission.set(settings.queue)
        if parts.sharing is not None:
            await parts.sharing.set(settings.sharing)
        parts.controllers.set(settings.controllers, newer.controller_keys)
        parts.tokens.set(settings.tokens, newer.tokenizers)
        self._probing.settings = settings.health
        self._probing.set_listening(settings.predicts)
        parts.door.set_tenants(newer.tenants)
        self._probing.set_engines(newer.engines)
        return Changes(settings, applied, changed - applied).shown()

    def _kept_sharing(self, wanted: SharingSettings) -> SharingSettings:
        """The new settings with the old port and key; without a port, sharing begins only after a restart."""
        now = self._settings.sharing
        gateways = wanted.gateways if now.listen else []
        return msgspec.structs.replace(
            wanted, listen=now.listen, curve_file=now.curve_file, gateways=gateways
        )

    def page(self) -> dict[str, Any]:
        """The document of /gateway/status."""
        parts = self._parts
        fleet, meters = parts.fleet, parts.meters
        return {
            "gateway": {
                "version": __version__,
                "policy": self._settings.policy,
                "restarts": self._restarts.times,
                "stopping": parts.stopping,
                **self._glance.document(),
            },
            "kv_events": parts.residency.page(),
            "tokens": parts.tokens.page(),
            "sharing": parts.sharing.page() if parts.sharing is not None else {},
            "controllers": parts.controllers.page(),
            "followed": parts.controllers.following.page(),
            "engines": [
                {
                    "name": one.name,
                    "state": one.state.value,
                    "reason": one.reason,
                    "in_flight": one.in_flight,
                    "sent": one.queue.sent + sum(rank.queue.sent for rank in one.ranks),
                    "share": round(fleet.share(one), 3),
                    **fleet.numbers(one),
                    "models": sorted(one.models)[:64],
                    "ranks": [
                        {
                            "name": rank.name,
                            "in_flight": rank.queue.ours,
                            "sent": rank.queue.sent,
                            **fleet.numbers(rank),
                        }
                        for rank in one.ranks
                    ],
                }
                for one in fleet
            ],
            "slo": [
                {"tenant": tenant, "slo": name, "requests": count, "met": meters.met[tenant, name]}
                for (tenant, name), count in sorted(meters.received.items())
            ],
            "tenants": {name: one.in_flight for name, one in parts.door.uses().items()},
            "queue": parts.admission.page(),
            "envoy_pid": self._envoy.pid if self._envoy is not None else 0,
        }
