"""The controller's process: the order in which it starts and stops its parts (process/lifecycle.py).

    settings ─▶ ports bound ─▶ snapshot read ─▶ port read ─▶ HTTP ─▶ ready ─▶ last snapshot ─▶ stop

The snapshot's placements are restored while the controller serves, and are served as unconfirmed.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvstrata import __version__
from kvstrata.clock import Clock, SystemClock
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.load import sorted_out
from kvstrata.config.private_dir import user_folder
from kvstrata.controller.admin import OPERATIONS, Admin
from kvstrata.controller.answers import MAX_UNANSWERED, Answers, zmq_host, zmq_host_setting
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.dashboard_files import DashboardFiles
from kvstrata.controller.metrics import Surroundings, sections
from kvstrata.controller.operations import Operations
from kvstrata.controller.orders import Orders
from kvstrata.controller.peer_hosts import PeerHosts
from kvstrata.controller.snapshot import Snapshots
from kvstrata.errors import ConfigError, install
from kvstrata.observability.logging import EventLog, current_level, set_level
from kvstrata.observability.numbers import Pages
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import Port, make_port
from kvstrata.process.lifecycle import Process, soon, tell_ready
from kvstrata.process.listen import (
    Listener,
    ServedToken,
    listen,
    read_token,
    warn_if_open,
)
from kvstrata.process.ports import Listening, refuse_open, refuse_port_twice
from kvstrata.rpc.cluster_wire import TO_CONTROLLER
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import (
    ADVICE,
    OPEN,
    ClusterKeys,
    KeyFile,
    Keys,
    SharedKey,
    read_controller_keys,
)
from kvstrata.types import NOT_IN_A_NAME

if TYPE_CHECKING:
    from kvstrata.controller.election import Election

NO_SNAPSHOT = "none"
DRAIN_S = 10.0
LIVE = ("log_level",)
HTTP_TOKEN = "http.token_file"
DASHBOARD = frozenset({"/", "/dashboard/"})
"""Paths of the dashboard's files, which are the same for all users and hold no data."""
PUBLIC = {one.path.partition("{")[0] for one in OPERATIONS if one.public}


class Plan(NamedTuple):
    """Checked settings; nothing is opened or written yet."""

    settings: ControllerSettings
    http_token: str
    keys: KeyFile | None
    """None without a key file: any client that knows the server's key may connect, and use any id."""
    peer_hosts: PeerHosts


def plan(settings: ControllerSettings, environment: Mapping[str, str]) -> Plan:
    """Check the settings without opening anything. Raises ConfigError."""
    if settings.dead_after_s < 2 * settings.heartbeat_s:
        raise ConfigError(
            f"dead_after_s: {settings.dead_after_s:g} is less than twice heartbeat_s ({settings.heartbeat_s:g}), so an "
            "instance would be dead after one lost answer; make it longer",
            field="dead_after_s",
        )
    refuse_port_twice(tcp_ports(settings))
    snapshot_dir(settings, settings.http.port, environment)
    token = read_token(settings.http, insecure=settings.security.insecure)
    curve_file = settings.security.curve_secret_file
    if not (curve_file or settings.security.insecure):
        refuse_open(zmq_host(settings), zmq_host_setting(settings))
    if settings.etcd.endpoints:
        check_etcd(settings)
    keys = KeyFile(curve_file, read_controller_keys) if curve_file else None
    return Plan(settings, token, keys, PeerHosts(settings.peer_hosts))


def tcp_ports(settings: ControllerSettings) -> list[Listening]:
    """The tcp ports that the settings ask for."""
    return [
        Listening("monitor_ports.reply", zmq_host(settings), settings.monitor_ports.reply),
        Listening("http.port", settings.http.host, settings.http.port),
    ]


def snapshot_dir(settings: ControllerSettings, port: int, environment: Mapping[str, str]) -> Path | None:
    """The snapshot's folder; None for no snapshot. Raises ConfigError."""
    given = settings.directory.snapshot_dir
    if given == NO_SNAPSHOT:
        return None
    if given:
        return Path(given)
    state = user_folder(environment, "XDG_STATE_HOME", ".local/state")
    if not state:
        raise ConfigError(
            "directory.snapshot_dir: neither XDG_STATE_HOME nor HOME names a folder for the snapshot; set one of them, "
            "or give --snapshot-dir (`none` for no snapshot)",
            field="directory.snapshot_dir",
        )
    return Path(state) / "kvstrata" / f"controller-{port}"


def check_etcd(settings: ControllerSettings) -> None:
    """Raise ConfigError if these settings allow no election."""
    if importlib.util.find_spec("aetcd") is None:
        raise ConfigError(
            f"etcd.endpoints: the client library is missing: {install('etcd')}",
            field="etcd.endpoints",
        )
    from kvstrata.controller import election  # needs the extra

    election.check(settings.etcd, insecure=settings.security.insecure)


def own_url(settings: ControllerSettings, listener: Listener) -> str:
    """The URL at which users and other controllers reach the HTTP API."""
    return settings.etcd.advertise_url.rstrip("/") or listener.url(settings.http)


def make_election(settings: ControllerSettings, name: str, clock: Clock, url: str) -> Election | None:
    """This controller's Election, not yet running; None without etcd, for the only controller. `url`: of its API."""
    if not settings.etcd.endpoints:
        return None
    from kvstrata.controller import election  # needs the extra

    return election.Election(settings.etcd, election.Candidate(name, url), clock)


class Controller(Process):
    """One controller process."""

    _plan: Plan
    _settings: ControllerSettings
    _snapshots: Snapshots | None = None
    _http_port: Port | None = None

    async def start(self) -> None:
        """Open everything and serve. Raises KvstrataError; the closers then undo what was opened."""
        settings, loop, clock = self._plan.settings, self.loop, SystemClock()
        listener = listen(settings.http, flag="--port")
        self.closers.append(soon(listener.close))
        url = own_url(settings, listener)
        epoch = clock.unix_ms()
        keys, note = self._keys()
        asked = ControlPort(loop, epoch, keys, requests=TO_CONTROLLER, max_later=MAX_UNANSWERED)
        self.closers.append(asked.close)
        port_number = asked.server.bind_tcp(
            zmq_host(settings),
            settings.monitor_ports.reply,
            keys=keys,
            anywhere=settings.security.insecure or self._plan.keys is not None,
            host_setting=zmq_host_setting(settings),
            port_setting="monitor_ports.reply",
            flag="--monitor-ports",
            refused_note=note,
        )
        if keys is OPEN:
            self.log.warning(
                "cluster_ports_open",
                port=port_number,
                note="--insecure: anyone who can reach this port can join the cluster and read its chunks; start "
                "controller and instances without it, or give key files (kvstrata cluster init)",
            )
        if settings.monitor_ports.pull is not None or settings.monitor_ports.heartbeat is not None:
            self.log.warning("no_effect", settings="monitor_ports.pull, monitor_ports.heartbeat",
                             why="the controller reaches instances on their own ports")  # fmt: skip
        name = settings.name or NOT_IN_A_NAME.sub("-", f"{platform.node()}-{port_number}")[:64]
        election = make_election(settings, name, clock, url)
        self._cluster = cluster = Cluster(
            settings,
            clock,
            Orders(election.write if election is not None else None),
            name=name,
            epoch=epoch,
            supervisor=self.supervisor,
            keys=keys.now(),
            election=election,
            listed=lambda: keys.now().listed,
        )
        # The cluster is closed after the port, so that no frame reaches a closed cluster.
        self.closers.insert(-1, cluster.close)
        folder = snapshot_dir(settings, listener.port, os.environ)
        # A free port differs at each start, so the next start would not find a snapshot that is named after it.
        if folder is not None and (settings.http.port or settings.directory.snapshot_dir):
            self._snapshots = Snapshots(loop, cluster, folder, settings.directory.snapshot_s)
            self.closers.append(self._snapshots.close)
            await self._snapshots.open()
        operations = Operations(cluster, self.supervisor)
        Answers(cluster, asked, self._plan.peer_hosts)
        self._around = around = Surroundings(
            port=asked,
            port_number=port_number,
            http=lambda: self._http_port.numbers if self._http_port is not None else (),
            snapshots=self._snapshots,
            restarts=self._restarts,
        )
        token, insecure = self._plan.http_token, settings.security.insecure
        warn_if_open(settings.http, token, listener.port, self.log, insecure=insecure)
        own_name = urlsplit(settings.etcd.advertise_url).netloc
        access = Access(settings.http, token, public=PUBLIC, pages=DASHBOARD, names=[own_name])
        pages = await loop.run_in_executor(None, Pages, functools.partial(sections, cluster, around))
        admin = Admin(
            cluster,
            operations,
            around,
            url,
            pages.page,
            DashboardFiles(),
            EventLog("controller"),
        )
        self._http_port = port = await make_port("kvstrata controller", OPERATIONS, admin, access)
        self._http_token = ServedToken(port.set_token, settings.http, listener.port, token, self.log)
        self.closers.append(soon(self._http_token.close))
        self.supervisor.spawn(self._http_token.keep(), "token")
        asked.start()
        if election is not None:
            self.closers.append(election.close)
            self.supervisor.spawn(election.run(cluster.orders, cluster.leadership_changed), "election")
        self.supervisor.spawn(cluster.keep_time(), "time")
        self.supervisor.spawn(cluster.keep_orders(), "orders")
        self.supervisor.spawn(cluster.planning.keep(), "plan")
        self.supervisor.spawn(cluster.copies.keep(), "copies")
        if self._snapshots is not None:
            self.supervisor.spawn(self._snapshots.keep(), "snapshots")
        self.supervisor.spawn(port.serve(listener), "http")
        cluster.set_ready()
        gc.collect()
        gc.freeze()
        ready = {
            "pid": os.getpid(),
            "name": name,
            "epoch": epoch,
            "host": settings.http.host,
            "http_port": listener.port,
            "http_token_file": self._http_token.path,
            "ports": {"reply": port_number},
            "snapshot_dir": str(folder) if self._snapshots is not None else "",
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready)
        self.log.info("dashboard", open=f"{url}/", log_in_by="kvstrata ctl cluster dashboard-link")
        tell_ready(self._ready_fd, ready)

    def _keys(self) -> tuple[Keys, str]:
        """The keys of the ZMQ port, with which the controller asks instances too: those of the key file, open ones, or
        the secret that this user's processes share; and what the log advises about a client with others.
        """
        if self._plan.keys is not None:
            return self._plan.keys, ""
        if self._plan.settings.security.insecure:
            return OPEN, ""
        shared = SharedKey("security.curve_secret_file")
        self.supervisor.spawn(shared.keep(), "cluster-key")
        return ClusterKeys(shared.keys.secret), ADVICE

    @property
    def drain_s(self) -> float:
        """Time for the last snapshot."""
        return DRAIN_S

    def under_way(self) -> dict[str, object]:
        """A stop waits for the snapshot."""
        return {"snapshot": self._snapshots is not None}

    def given_up(self) -> dict[str, object]:
        """Instances that were registered; they continue, and look for a controller."""
        return {"instances": len(list(self._cluster.members))}

    async def reload(self) -> dict[str, object]:
        """Apply another log level and another token of the HTTP port. Raises ConfigError."""
        newer = await self.loop.run_in_executor(None, lambda: plan(self._reread(), os.environ))
        before = msgspec.structs.replace(self._settings, log_level=current_level())
        found = sorted_out(before, newer.settings, LIVE, (HTTP_TOKEN,))
        has_token = HTTP_TOKEN not in found.restart and bool(newer.settings.http.token_file)
        if has_token and self._http_token.replace(newer.http_token):
            found.applied.add(HTTP_TOKEN)
        self._settings = found.in_force
        set_level(found.in_force.log_level)
        return found.shown()

    async def drain(self, drain_s: float) -> None:
        """Write the last snapshot."""
        self._cluster.set_ready("stopping")
        if self._snapshots is not None:
            await self._snapshots.finish()
