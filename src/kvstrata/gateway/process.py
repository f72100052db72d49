"""The gateway's process: the order in which it starts and stops its parts (process/lifecycle.py).

settings ─▶ port bound ─▶ engines probed once ─▶ HTTP ─▶ ready ─▶ port closed, requests end ─▶ stop
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata import __version__
from kvstrata.config.changes import Changes, changes, replaced
from kvstrata.config.gateway_model import GatewaySettings, SharingSettings
from kvstrata.gateway.door import Door
from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.plan import TTFT, Plan, plan
from kvstrata.observability.logging import current_level, set_level
from kvstrata.observability.logging import set_up as set_up_logging
from kvstrata.policy.routing.policies import POLICIES
from kvstrata.process.http_gate import Access, is_loopback
from kvstrata.process.keeper import NOT_RESTARTED, Restarts
from kvstrata.process.lifecycle import Process, set_up, soon, tell_ready
from kvstrata.process.lifecycle import run as run_process
from kvstrata.process.listen import Listener, ServedToken, listen, warn_if_plain
from kvstrata.process.threads import SWITCH_S

if TYPE_CHECKING:
    import uvicorn

    from kvstrata.gateway.admission import Admission
    from kvstrata.gateway.app import App
    from kvstrata.gateway.choosing import Choosing
    from kvstrata.gateway.controllers.asking import Controllers
    from kvstrata.gateway.engine_link import Links
    from kvstrata.gateway.forward import Forwarder
    from kvstrata.gateway.picker.server import PickerServer
    from kvstrata.gateway.probing import Probing
    from kvstrata.gateway.reading import Reader
    from kvstrata.gateway.residency.knowledge import Residency
    from kvstrata.gateway.sharing.sockets import Sharing
    from kvstrata.gateway.tokens.source import Tokens
    from kvstrata.process.http_connections import Bounds

GC_OBJECTS = 20_000
"""New objects after which garbage is collected: requests leave few cycles, and each collection delays all streams."""
RESTART = frozenset(("log_format",))
"""Settings that need a restart, beside those of OPENED."""
OPENED = ("http.", "picker.", "engines_from.", "sharing.host", "sharing.port", "sharing.curve_file")


def run(
    settings: GatewaySettings,
    *,
    notes: list[str],
    reread: Callable[[], GatewaySettings],
    ready_fd: int = -1,
    restarts: Restarts = NOT_RESTARTED,
) -> int:
    """Run a gateway until SIGTERM or Ctrl-C; returns the exit status. Raises KvstrataError before it is ready.

    `reread` reads the settings again for SIGHUP.
    """
    set_up_logging(settings.log_level, settings.log_format)
    set_up()
    gateway = Gateway(plan(settings), reread, ready_fd, restarts)
    for note in notes:
        gateway.log.warning("setting_noted", note=note)
    return run_process(gateway)


class Gateway(Process):
    """One gateway process."""

    def __init__(
        self,
        checked: Plan,
        reread: Callable[[], GatewaySettings],
        ready_fd: int = -1,
        restarts: Restarts = NOT_RESTARTED,
    ) -> None:
        super().__init__("gateway")
        self._plan = checked
        self._settings = checked.settings
        self._reread = reread
        self._ready_fd = ready_fd
        self._restarts = restarts
        self._started_s = time.monotonic()
        self._app: App
        self._door: Door
        self._fleet: Fleet
        self._links: Links
        self._meters: Meters
        self._forwarder: Forwarder
        self._probing: Probing
        self._residency: Residency
        self._choosing: Choosing
        self._admission: Admission
        self._reader: Reader
        self._picker: PickerServer | None = None
        self._sharing: Sharing | None = None
        self._controllers: Controllers
        self._tokens: Tokens
        self._server: uvicorn.Server
        self._bounds: Bounds

    async def start(self) -> None:
        """Open everything and serve. Raises KvstrataError; the closers then undo what was opened."""
        # Imported here: these need the extra, whose absence `plan` has told.
        from kvstrata.gateway.admission import Admission
        from kvstrata.gateway.app import App
        from kvstrata.gateway.choosing import Choosing
        from kvstrata.gateway.connections import make_server
        from kvstrata.gateway.controllers.asking import Controllers
        from kvstrata.gateway.engine_link import Links
        from kvstrata.gateway.forward import Forwarder
        from kvstrata.gateway.metrics import GatewayCollector
        from kvstrata.gateway.probing import Probing
        from kvstrata.gateway.reading import Reader
        from kvstrata.gateway.residency.knowledge import Residency
        from kvstrata.gateway.splicing import Splices
        from kvstrata.gateway.tokens.source import Tokens
        from kvstrata.observability.exposition import Pages

        settings, now_s = self._plan.settings, time.monotonic
        listener = listen(settings.http, flag="--port")
        self.closers.append(soon(listener.close))
        self._links = links = Links(settings.timeouts.connect_s)
        self.closers.append(links.close)
        splices = Splices()
        self.closers.append(splices.close)
        self._fleet = fleet = Fleet(now_s, settings.health.slow_start_s)
        self._meters = meters = Meters({one.name: one for one in settings.slo}, now_s)
        loopback = listener.path is not None or is_loopback(settings.http.host)
        access = Access(settings.http, self._plan.token)
        self._door = door = Door(access, now_s, loopback=loopback)
        door.set_tenants(self._plan.tenants)
        token = ServedToken(access.set_token, settings.http, listener, self._plan.token, "gateway", self.log)
        self.closers.append(soon(token.close))
        self.supervisor.spawn(token.keep(), "token")
        self._residency = residency = Residency(now_s)
        self.closers.append(soon(residency.close))
        self._tokens = tokens = Tokens(settings.tokens, self._plan.tokenizers, fleet, links, now_s)
        self.closers.append(tokens.close)
        self._choosing = choosing = Choosing(POLICIES[settings.policy](), fleet, residency, meters, now_s)
        self._reader = reader = Reader(settings, fleet)
        self._admission = admission = Admission(
            settings.queue, choosing, fleet, now_s, asyncio.get_running_loop().call_later
        )
        if settings.sharing.port:
            await self._start_sharing(settings)
        self._controllers = controllers = Controllers(
            settings.controllers, self._plan.controller_keys, listener, fleet, self.supervisor, now_s
        )
        self.closers.append(controllers.close)
        choosing.reads = controllers.reads
        controllers.numbers = lambda: (self._settings.policy, self._in_flight, sum(meters.received.values()))
        self._forwarder = Forwarder(
            settings,
            fleet,
            meters,
            links,
            splices,
            choosing,
            admission,
            reader,
            now_s,
            drop_keys=lambda: door.knows_tenants,
        )
        self._probing = probing = Probing(fleet, settings.health, links, self.supervisor, now_s, residency)
        probing.listens(settings.policy == TTFT)
        self._forwarder.suspect = probing.suspect
        self._forwarder.takes_ids = tokens.takes_ids
        pages = Pages(
            GatewayCollector(
                meters,
                fleet,
                self._numbers,
                self._door.uses,
                admission,
                self._http,
                residency.page,
                tokens,
                lambda: self._sharing.counts() if self._sharing is not None else {},
                lambda: controllers.links,
            )
        )
        self._app = App(
            settings,
            door,
            fleet,
            meters,
            self._forwarder,
            reader,
            tokens,
            self.page,
            pages,
            choosing.decisions,
            controllers.told,
        )
        self._server, self._bounds = make_server(self._app, settings.http)
        if settings.picker.enabled:
            await self._start_picker(settings)
        probing.set_engines(self._plan.engines)
        await probing.resolve()
        await self._start_watching()
        await probing.probed()  # requests that come at once find engines
        await self._first_verified()
        self.supervisor.spawn(tokens.keep_verified(lambda: self._settings.health.probe_s), "tokens")
        self.supervisor.spawn(probing.keep_resolved(), "resolve")
        self.supervisor.spawn(self._serve(listener), "http")
        if settings.insecure and not loopback and not settings.tenants:
            says = "--insecure: everybody who reaches this port may use the engines"
            self.log.warning("http_port_open", host=settings.http.host, port=listener.port, note=says)
        warn_if_plain(settings.http.host, listener.port, self.log)
        if self._picker is not None and not settings.picker.tls_cert_file:
            warn_if_plain(settings.picker.host, self._picker.port, self.log)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_OBJECTS)
        ready = {
            "pid": os.getpid(),
            "host": settings.http.host,
            "http_port": listener.port,
            "picker_port": self._picker.port if self._picker is not None else 0,
            "http_socket": str(listener.path or ""),
            "http_token_file": token.path,
            "engines": len(fleet.engines),
            "engines_up": len(fleet.serving("")),
            "policy": settings.policy,
            "tenants": len(settings.tenants),
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready)
        tell_ready(self._ready_fd, ready)

    async def _start_sharing(self, settings: GatewaySettings) -> None:
        """Tell other gateways and hear them."""
        from kvstrata.gateway.sharing.catching_up import slices
        from kvstrata.gateway.sharing.others import Others
        from kvstrata.gateway.sharing.sockets import FIELD, Sharing, piece_secret
        from kvstrata.rpc.shared_key import SharedKey

        wanted, keys = settings.sharing, self._plan.sharing_keys
        if keys is None:
            shared = SharedKey(FIELD)
            self.supervisor.spawn(shared.keep(), "cluster-key")
            keys = shared.keys
        fleet, prefixes, responses = self._fleet, self._choosing.prefixes, self._reader.responses
        others = Others(fleet, prefixes, responses, time.monotonic)
        self._sharing = sharing = Sharing(
            wanted, keys, others, lambda: slices(prefixes, fleet, responses, time.monotonic())
        )
        self.closers.append(soon(sharing.close))
        sharing.start()
        self._reader.secret = piece_secret(keys)
        self._choosing.teller = sharing.teller
        responses.made = sharing.teller.made
        await sharing.set(wanted)
        self.supervisor.spawn(sharing.keep(), "sharing")

    async def _start_watching(self) -> None:
        """Have the engines that Kubernetes names from now on, and wait a moment for the first."""
        settings, account = self._settings, self._plan.account
        service = settings.engines_from.kubernetes
        if service is None or account is None:
            return
        from kvstrata.gateway.kubernetes import Endpoints

        endpoints = Endpoints(
            service, account, self._plan.found_key, self._probing.set_found, settings.timeouts.connect_s
        )
        self.closers.append(endpoints.close)
        self.supervisor.spawn(endpoints.keep(lambda: self._settings.health.probe_s), "endpoints")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.health.timeout_s):
                await endpoints.known.wait()

    async def _start_picker(self, settings: GatewaySettings) -> None:
        from kvstrata.gateway.picker.exchange import Parts
        from kvstrata.gateway.picker.server import PickerServer

        parts = Parts(
            self._door,
            self._fleet,
            self._meters,
            self._choosing,
            self._reader,
            self._probing.suspect,
            time.monotonic,
            self._tokens,
        )
        self._picker = picker = PickerServer(settings, parts, self._tokens, self._controllers.told)
        self.closers.append(picker.close)
        await picker.start(settings.picker)

    async def _first_verified(self) -> None:
        """Compare the tokenizers with the engines that serve, if these are quick; otherwise later."""
        if self._tokens.tokenizers:
            sys.setswitchinterval(SWITCH_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.health.timeout_s):
                await self._tokens.verify()

    async def _serve(self, listener: Listener) -> None:
        try:
            await self._server.serve(sockets=[listener.socket])
        finally:
            listener.close()

    @property
    def drain_s(self) -> float:
        """Time for requests under way."""
        return self._settings.drain_s

    def under_way(self) -> dict[str, object]:
        """A stop waits for requests."""
        return {"requests": self._in_flight}

    def given_up(self) -> dict[str, object]:
        """Requests that were cut."""
        return {"requests_cut": self._in_flight}

    @property
    def _in_flight(self) -> int:
        """Requests under way, at the HTTP port and at Envoy."""
        return self._app.in_flight + (self._picker.held.exchanges if self._picker is not None else 0)

    async def drain(self, drain_s: float) -> None:
        """Take no new connections, and let requests end."""
        self._app.stopping = True
        for server in self._server.servers:
            server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                if self._picker is not None:
                    await self._picker.drain(drain_s)
                await self._app.idle()

    async def reload(self) -> dict[str, object]:
        """Apply newer settings, but those that the port was opened with. Raises ConfigError."""
        wanted = await self.loop.run_in_executor(None, self._reread)
        # The ports stay as they are, so the other settings must be allowed on them.
        kept = msgspec.structs.replace(
            wanted,
            http=self._settings.http,
            picker=self._settings.picker,
            engines_from=self._settings.engines_from,
            sharing=self._kept_sharing(wanted.sharing),
        )
        newer = await self.loop.run_in_executor(None, plan, kept, self._tokens.tokenizers)
        before = msgspec.structs.replace(self._settings, log_level=current_level())
        changed = changes(before, wanted)
        applied = {key for key in changed if not key.startswith(OPENED) and key not in RESTART}
        settings = replaced(before, newer.settings, applied)
        self._settings = settings
        set_level(settings.log_level)
        self._fleet.slow_start_s = settings.health.slow_start_s
        self._meters.slo = {one.name: one for one in settings.slo}
        self._forwarder.settings = self._app.settings = settings
        self._choosing.policy = POLICIES[settings.policy]()
        self._admission.set(settings.queue)
        self._reader.settings = settings
        if self._sharing is not None:
            await self._sharing.set(settings.sharing)
        self._controllers.set(settings.controllers, newer.controller_keys)
        if self._picker is not None:
            self._picker.held.settings = settings
        self._forwarder.budget.share = settings.retries.budget_share
        self._tokens.set(settings.tokens, newer.tokenizers)
        self._probing.settings = settings.health
        self._probing.listens(settings.policy == TTFT)
        self._links.connect_s = settings.timeouts.connect_s
        self._door.set_tenants(newer.tenants)
        self._probing.set_engines(newer.engines)
        return Changes(settings, applied, changed - applied).shown()

    def _kept_sharing(self, wanted: SharingSettings) -> SharingSettings:
        """The newer settings with the port as it is: without one, other gateways are told only after a restart."""
        now = self._settings.sharing
        gateways = wanted.gateways if now.port else []
        return msgspec.structs.replace(
            wanted, host=now.host, port=now.port, curve_file=now.curve_file, gateways=gateways
        )

    def page(self) -> dict[str, Any]:
        """The gateway at a glance."""
        fleet, meters = self._fleet, self._meters
        return {
            "gateway": {
                "version": __version__,
                "policy": self._settings.policy,
                "restarts": self._restarts.times,
                "stopping": self._app.stopping,
                **self._numbers(),
            },
            "kv_events": self._residency.page(),
            "kv_events_thread": self._residency.thread(),
            "tokens": self._tokens.page(),
            "sharing": self._sharing.page() if self._sharing is not None else {},
            "controllers": self._controllers.page(),
            "replicas": dict(self._controllers.replicas.counts),
            "engines": [
                {
                    "name": one.name,
                    "state": one.state.value,
                    "reason": one.reason,
                    "in_flight": one.in_flight,
                    "sent": one.sent + sum(rank.sent for rank in one.ranks),
                    "share": round(fleet.share(one), 3),
                    **fleet.numbers(one),
                    "models": sorted(one.models)[:64],
                    "ranks": [
                        {"name": rank.name, "in_flight": rank.ours, "sent": rank.sent, **fleet.numbers(rank)}
                        for rank in one.ranks
                    ],
                }
                for one in fleet
            ],
            "slo": [
                {"tenant": tenant, "slo": name, "requests": count, "met": meters.met[tenant, name]}
                for (tenant, name), count in sorted(meters.received.items())
            ],
            "tenants": {name: one.in_flight for name, one in self._door.uses().items()},
            "queue": self._admission.page(),
            "http": self._http(),
        }

    def _numbers(self) -> dict[str, float]:
        return {
            "in_flight": self._in_flight,
            "retry_budget": self._forwarder.budget.left,
            "prefix_pieces": len(self._choosing.prefixes),
            "token_cache_bytes": self._tokens.memory.bytes,
            "kv_events_thread": float(self._residency.thread()["hears"]),
            "other_gateways": len(self._sharing.others) if self._sharing is not None else 0,
            "others_in_flight": self._sharing.others.in_flight if self._sharing is not None else 0,
        }

    def _http(self) -> dict[str, int]:
        return self._bounds.stats()
