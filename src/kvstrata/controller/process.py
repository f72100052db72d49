"""The controller's process: what it starts, in which order, and how it ends (process/lifecycle.py).

    settings ─▶ ports bound ─▶ snapshot read ─▶ sockets read ─▶ HTTP ─▶ ready ─▶ last snapshot ─▶ stop

A snapshot is brought back beside the work: what it tells is served as unconfirmed as soon as it is there.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstrata import __version__
from kvstrata.clock import SystemClock
from kvstrata.config.model import ControllerSettings
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.operations import Operations
from kvstrata.controller.snapshot import Snapshots
from kvstrata.controller.sockets import Links
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import set_up as set_up_logging
from kvstrata.process.keeper import NOT_RESTARTED, Restarts
from kvstrata.process.lifecycle import Process, set_up, soon, tell_ready
from kvstrata.process.lifecycle import run as run_process
from kvstrata.process.listen import listen, prepare, read_token, serve
from kvstrata.rpc.zmq_server import CurveKeys, read_curve_file

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvstrata.controller.election import Election

_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]")
NO_SNAPSHOT = "none"
STREAMS = frozenset({"/v1/events/stream", "/v1/live"})
"""Paths of the API that bound their readers themselves."""


class Plan(NamedTuple):
    """Settings, checked; nothing was opened or written."""

    settings: ControllerSettings
    http_token: str
    curve: CurveKeys | None


def plan(settings: ControllerSettings, environment: Mapping[str, str]) -> Plan:
    """Check all that can be checked without opening anything. Raises ConfigError."""
    if settings.dead_after_s < 2 * settings.heartbeat_s:
        raise ConfigError(
            f"dead_after_s: {settings.dead_after_s:g} is less than twice heartbeat_s ({settings.heartbeat_s:g}): one "
            "lost heartbeat would be a death; make it longer",
            field="dead_after_s",
        )
    snapshot_dir(settings, settings.http.port, environment)
    token = read_token(settings.http, insecure=settings.security.insecure)
    curve_file = settings.security.curve_secret_file
    if settings.etcd.endpoints:
        check_etcd(settings)
    return Plan(settings, token, read_curve_file(curve_file) if curve_file else None)


def snapshot_dir(settings: ControllerSettings, port: int, environment: Mapping[str, str]) -> Path | None:
    """Where the snapshot lies; None for none. Raises ConfigError."""
    given = settings.directory.snapshot_dir
    if given == NO_SNAPSHOT:
        return None
    if given:
        return Path(given)
    state = environment.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        home = environment.get("HOME", "")
        if not home.startswith("/"):
            home = os.path.expanduser("~")
        if not home.startswith("/"):
            raise ConfigError(
                "directory.snapshot_dir: neither XDG_STATE_HOME nor HOME says where the snapshot may lie; set one of "
                "them, or give --snapshot-dir (`none` for no snapshot)",
                field="directory.snapshot_dir",
            )
        state = home + "/.local/state"
    return Path(state) / "kvstrata" / f"controller-{port}"


def check_etcd(settings: ControllerSettings) -> None:
    """Raises ConfigError where no election can be held with these settings."""
    if importlib.util.find_spec("aetcd") is None:
        raise ConfigError(
            "etcd.endpoints: the client library is missing; install it: pip install 'kvstrata[etcd]'",
            field="etcd.endpoints",
        )
    from kvstrata.controller import election  # needs the extra

    election.check(settings.etcd, insecure=settings.security.insecure)


def make_election(settings: ControllerSettings, cluster: Cluster, http_port: int) -> Election:
    """This controller's part in the election; it has not begun."""
    from kvstrata.controller import election

    host = settings.http.host
    shown = f"[{host}]" if ":" in host else platform.node() if host in ("*", "0.0.0.0") else host
    url = settings.etcd.advertise_url or f"http://{shown}:{http_port}"
    me = election.Member(cluster.name, url.rstrip("/"))
    return election.Election(settings.etcd, me, cluster.clock, cluster.leadership_changed, cluster.orders)


def run(settings: ControllerSettings, *, ready_fd: int = -1, restarts: Restarts = NOT_RESTARTED) -> int:
    """Run a controller until it is told to stop; returns the exit status. Raises KvstrataError before it is ready."""
    set_up_logging(settings.log_level)
    set_up()
    return run_process(Controller(plan(settings, os.environ), ready_fd, restarts))


class Controller(Process):
    """One controller process."""

    def __init__(self, checked: Plan, ready_fd: int = -1, restarts: Restarts = NOT_RESTARTED) -> None:
        super().__init__("controller")
        self._restarts = restarts
        self._plan = checked
        self._ready_fd = ready_fd
        self._started_s = time.monotonic()
        self._snapshots: Snapshots | None = None

    async def start(self) -> None:
        """Raises KvstrataError."""
        settings, loop = self._plan.settings, self.loop
        http_socket = listen(settings.http, flag="--port")
        self.closers.append(soon(http_socket.close))
        http_port = http_socket.getsockname()[1]
        cluster = Cluster(loop, settings, SystemClock(), name="")
        cluster.restarts = self._restarts
        self.closers.append(soon(cluster.close))
        links = Links(loop, cluster, self.supervisor)
        self.closers.append(soon(links.close))
        links.bind(settings, self._plan.curve)
        cluster.name = settings.name or _UNNAMEABLE.sub("-", f"{platform.node()}-{links.ports['reply']}")[:64]
        self._cluster, self._links = cluster, links
        folder = snapshot_dir(settings, http_port, os.environ)
        # Nobody would look for the snapshot of a port taken at random again.
        if folder is not None and (settings.http.port or settings.directory.snapshot_dir):
            self._snapshots = Snapshots(loop, cluster, folder, settings.directory)
            self.closers.append(self._snapshots.close)
            await self._snapshots.open()
        http_server = await prepare(self._make_app, streams=STREAMS)
        cluster.http_stats = http_server.stats
        links.start()
        if settings.etcd.endpoints:
            cluster.election = elected = make_election(settings, cluster, http_port)
            cluster.orders.write_first = elected.write
            self.closers.append(elected.close)
            self.supervisor.spawn(elected.run(), "election")
        self.supervisor.spawn(cluster.keep_time(), "time")
        self.supervisor.spawn(cluster.keep_orders(), "orders")
        self.supervisor.spawn(cluster.directory.keep_swept(), "sweep")
        if self._snapshots is not None:
            self.supervisor.spawn(self._snapshots.keep(), "snapshots")
        self.supervisor.spawn(serve(http_socket, http_server), "http")
        cluster.set_ready()
        gc.collect()
        gc.freeze()
        ready = {
            "pid": os.getpid(),
            "name": cluster.name,
            "epoch": cluster.epoch,
            "host": settings.http.host,
            "http_port": http_port,
            "ports": links.ports,
            "snapshot_dir": str(folder) if self._snapshots is not None else "",
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready)
        tell_ready(self._ready_fd, ready)

    async def drain(self) -> None:
        """The last snapshot."""
        self._cluster.set_ready("stopping")
        if self._snapshots is not None:
            await self._snapshots.finish()

    def _make_app(self) -> FastAPI:
        from kvstrata.controller.app import make_app

        operations = Operations(self._cluster, self.supervisor)
        return make_app(self._cluster, operations, self._links.stats, token=self._plan.http_token)
