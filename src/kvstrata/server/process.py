"""The server process: what it starts, in which order, and how it ends.

    settings ─▶ ports bound ─▶ segment and pool ─▶ adapters open ─▶ HTTP made ─▶ attach socket ─▶ RPC ─▶ ready ─▶ stop

Rules:

1. Whatever is wrong with settings, ports or files stops the start with one line that says what to change.
2. Nothing listens before it can be answered: the ports are bound early (so that "taken" is known early) and
   read late.
3. SIGTERM and SIGINT stop in order: not ready, no new processes, puts get `l2.drain_s`, sockets close, the pool
   stays in shared memory for the next server (unless the port, after which it is named, was taken at random).
4. After a crash (process/lifecycle.py) the next server adopts the pool.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import getpass
import importlib.util
import os
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata import __version__
from kvstrata.clock import SystemClock
from kvstrata.config.model import ServerSettings
from kvstrata.config.private_file import MAX_TOKEN_CHARS, MIN_TOKEN_CHARS, read_private_file
from kvstrata.errors import ConfigError, StorageError
from kvstrata.memory.attach.server import AttachServer
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.memory.memory_limit import memory_limit
from kvstrata.memory.numa import placement
from kvstrata.memory.paths import ATTACH_SOCKET, RPC_SOCKET, segment_dir, socket_dir
from kvstrata.memory.segment import Segment, SegmentSettings, check_size
from kvstrata.observability.logging import EventLog
from kvstrata.observability.logging import set_up as set_up_logging
from kvstrata.p2p.lender import PeerServer
from kvstrata.policy.processes import TenantTokens, tenant_number
from kvstrata.process.keeper import NOT_RESTARTED, Restarts
from kvstrata.process.lifecycle import Process, set_up, soon, tell_ready
from kvstrata.process.lifecycle import run as run_process
from kvstrata.process.listen import listen as http_listen
from kvstrata.process.listen import prepare as http_prepare
from kvstrata.process.listen import read_token
from kvstrata.process.listen import serve as http_serve
from kvstrata.process.supervisor import PoolLane
from kvstrata.rpc.zmq_server import ClusterKeys, ZmqServer, read_cluster_keys, read_curve_file
from kvstrata.server.cluster.membership import Cluster, ClusterLink, Fence
from kvstrata.server.cluster.own_tiers import OwnTiers
from kvstrata.server.engine import MAX_SESSION_SHARE, PEER_TYPE, Engine
from kvstrata.server.housekeeping import Housekeeping
from kvstrata.server.l2.prefetch import PrefetchController, PrefetchLimits
from kvstrata.server.l2.store import StoreController, StoreLimits
from kvstrata.server.l2.tier_control import AdapterControl
from kvstrata.server.requests.handlers import Handlers
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.registry import AdapterConfig, ConfiguredAdapter, build_adapter, configure_adapter

if TYPE_CHECKING:
    from fastapi import FastAPI

GB = 1 << 30
DEFAULT_L1_BYTES = 4 * GB
DEFAULT_L2_GB = 20
L1_ALIGNMENT = 1 << 20
TICK_S = 0.1
"""Between two heartbeats in the index; readers take a heartbeat older than 1 s for a dead server."""
IN_FLIGHT_SHARE = 8
"""One adapter may have L1 / 8 under way to L1."""
_RELATIVE_AGE = re.compile(r"[^A-Za-z0-9._-]")
_PORT = re.compile(r":\d{1,5}$")


class Plan(NamedTuple):
    """Settings, checked and made definite; nothing was opened or written."""

    settings: ServerSettings
    extents_bytes: int
    adapters: list[AdapterConfig]
    embedded_l2: bool
    """The one adapter is the default one: the server runs without it where it cannot be opened."""
    tokens: TenantTokens
    http_token: str
    cluster_keys: ClusterKeys | None
    p2p_engine: str
    """ucx, nixl, or empty: peers are neither read nor served."""


def plan(settings: ServerSettings, environment: Mapping[str, str]) -> Plan:
    """Check all that can be checked without opening anything. Raises ConfigError."""
    _check_first_touch(settings)
    size_gb = settings.l1.size_gb
    alignment = HUGE_PAGE_BYTES if settings.l1.use_hugepages else L1_ALIGNMENT
    extents_bytes = (default_l1_bytes() if size_gb is None else round(size_gb * GB)) & ~(alignment - 1)
    check_size(_segment_settings(settings, extents_bytes, Path("/"), Path("/")))
    entries = settings.l2_adapters
    embedded = entries is None
    if entries is None:
        entries = [embedded_adapter(settings.named_port, environment)]
    adapters = [configure_adapter(entry, index) for index, entry in enumerate(entries)]
    socket_dir(settings.socket_dir, settings.named_port, environment)
    if not settings.l1.segment_dir:
        segment_dir(settings.named_port, settings.instance_id)
    tokens = read_tenants_file(settings.security.tenants_file)
    http_token = ""
    if settings.http.enabled:
        http_token = read_token(settings.http, insecure=settings.security.insecure)
    if settings.security.curve_secret_file:
        if not settings.has_tcp:
            raise ConfigError(
                "security.curve_secret_file: RPC is on unix sockets only, which need no keys; give --host and --port "
                "for a tcp port, or leave the file out",
                field="security.curve_secret_file",
            )
        read_curve_file(settings.security.curve_secret_file)
    keys_file = settings.controller.curve_file
    keys = read_cluster_keys(keys_file, "controller.curve_file") if keys_file else None
    return Plan(settings, extents_bytes, adapters, embedded, tokens, http_token, keys, _p2p_engine(settings))


def _check_first_touch(settings: ServerSettings) -> None:
    """Raises ConfigError where pages would be placed by the engines that touch them, not by `l1.numa`."""
    l1 = settings.l1
    if l1.use_hugepages and l1.numa != "default" and not l1.prefault_threads:
        raise ConfigError(
            f"l1.prefault_threads: 0 with l1.use_hugepages and l1.numa {l1.numa!r}: huge pages lie where the server "
            "asks for them only if it touches them first; set it to 1 or more",
            field="l1.prefault_threads",
        )


def _p2p_engine(settings: ServerSettings) -> str:
    """What moves bytes between instances here. Raises ConfigError."""
    p2p = settings.p2p
    if not settings.controller.url or p2p.engine == "off":
        return ""
    host = p2p.listen.rpartition(":")[0]
    if host in ("*", "0.0.0.0", "[::]") and not p2p.advertise:
        raise ConfigError(
            f"p2p.advertise: p2p.listen is {p2p.listen}, every address; say under which one peers find this instance "
            "(--p2p-advertise HOST)",
            field="p2p.advertise",
        )
    if p2p.engine != "auto":
        return p2p.engine
    found = [name for name, module in _P2P_MODULES.items() if importlib.util.find_spec(module) is not None]
    return found[0] if found else ""


_P2P_MODULES = {"ucx": "kvstrata.native.ucx", "nixl": "nixl"}


def default_l1_bytes() -> int:
    """4 GB, or half of what the machine or the control group gives where that is less."""
    return min(DEFAULT_L1_BYTES, memory_limit().limit_bytes // 2)


def embedded_adapter(port: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """The L2 of a server that was told nothing: a log in the user's cache directory. Raises ConfigError."""
    cache = environment.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        home = environment.get("HOME", "")
        if not home.startswith("/"):
            home = os.path.expanduser(f"~{_user_name()}")
        if not home.startswith("/"):
            raise ConfigError(
                "l2_adapters: neither XDG_CACHE_HOME nor HOME says where the embedded L2 may lie; set one of "
                "them, give --l2-adapter with a base_path, or --l2-adapter none",
                field="l2_adapters",
            )
        cache = home + "/.cache"
    return {"type": "disk", "base_path": f"{cache}/kvstrata/{port}", "capacity_gb": DEFAULT_L2_GB}


def read_tenants_file(path: str) -> TenantTokens:
    """Tokens from a file with a line `TOKEN TENANT [TENANT ...]` each; `#` begins a comment. Raises ConfigError."""
    if not path:
        return TenantTokens()
    field = "security.tenants_file"
    text = read_private_file(path, field)
    tokens: dict[str, frozenset[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or not MIN_TOKEN_CHARS <= len(words[0]) <= MAX_TOKEN_CHARS:
            raise ConfigError(
                f"{field}: {path}: line {number}: write a token of {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} "
                "characters and its tenants",
                field=field,
            )
        tokens[words[0]] = tokens.get(words[0], frozenset()) | frozenset(words[1:])
    if not tokens:
        raise ConfigError(f"{field}: {path}: has no token; leave the setting out to do without", field=field)
    return TenantTokens(tokens)


def run(
    settings: ServerSettings, *, notes: list[str], ready_fd: int = -1, restarts: Restarts = NOT_RESTARTED
) -> int:
    """Run a server until it is told to stop; returns the exit status. Raises KvstrataError before it is ready."""
    set_up_logging(settings.log_level)
    set_up()
    checked = plan(settings, os.environ)
    log = EventLog("server")
    for note in notes:
        log.warning("setting_has_no_effect", note=note)
    return run_process(Server(checked, ready_fd, restarts))


class Server(Process):
    """One server process."""

    def __init__(self, checked: Plan, ready_fd: int = -1, restarts: Restarts = NOT_RESTARTED) -> None:
        super().__init__("server")
        self._restarts = restarts
        self._plan = checked
        self._settings = checked.settings
        self._ready_fd = ready_fd
        self._started_s = time.monotonic()
        self._clock = SystemClock()
        self._peer_adapter = ""
        """Name of the adapter that reads peers; empty where there is none."""

    # --- start -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises KvstrataError."""
        settings, loop = self._settings, self.loop
        zmq_server = ZmqServer(loop)
        self.closers.append(soon(zmq_server.close))
        curve_file = settings.security.curve_secret_file
        port = settings.named_port
        if settings.has_tcp:
            port = zmq_server.bind_tcp(
                settings.named_host,
                port,
                curve=read_curve_file(curve_file) if curve_file else None,
                insecure=settings.security.insecure,
            )
        http_port = 0
        http_socket: socket.socket | None = None
        if settings.http.enabled:
            http_socket = http_listen(settings.http)
            self.closers.append(soon(http_socket.close))
            http_port = http_socket.getsockname()[1]
        directory = socket_dir(settings.socket_dir, port)
        shm = (
            Path(settings.l1.segment_dir)
            if settings.l1.segment_dir
            else segment_dir(port, settings.instance_id)
        )
        segment = Segment.open(_segment_settings(settings, self._plan.extents_bytes, directory, shm))
        # Nobody would find the segment of a port taken at random again.
        nameless = settings.port == 0 and not settings.l1.segment_dir
        self.closers.append(soon(segment.destroy if nameless else segment.close))
        instance_id = settings.instance_id or _RELATIVE_AGE.sub("-", f"{platform.node()}-{port}")[:64]
        pool = segment.pool
        lane = PoolLane(loop)
        own_lane = PoolLane(loop, threads=1, queue=None, name="kv-own")
        self.closers += [soon(lane.close), soon(own_lane.close)]
        self._engine = engine = Engine(
            pool,
            settings,
            instance_id=instance_id,
            socket_dir=directory,
            port=port,
            supervisor=self.supervisor,
            lane=lane,
            own_lane=own_lane,
            clock=self._clock,
            tokens=self._plan.tokens,
        )
        engine.http_port = http_port
        await self._open_adapters(instance_id, port, segment)
        cluster = self._join_cluster(engine) if settings.controller.url else None
        handlers = Handlers(engine, loop)
        engine.send = zmq_server.send
        attach = AttachServer(
            directory / ATTACH_SOCKET, pool, segment.descriptors, engine, instance_id=instance_id
        )
        engine.attach = attach
        engine.extra_status["process"] = lambda: {
            "restarts": self._restarts.times,
            "last_end": self._restarts.cause,
        }
        engine.extra_status["attach"] = attach.stats
        engine.extra_status["rpc"] = zmq_server.stats
        engine.extra_status["numa"] = segment.numa_status
        self.closers.append(attach.stop)
        http_server = None if http_socket is None else await http_prepare(self._make_app)
        if http_server is not None:
            engine.extra_status["http"] = http_server.stats
        zmq_server.bind_ipc(directory / RPC_SOCKET)
        await attach.start()
        zmq_server.start(handlers.on_frame, handlers.on_frame_count)
        pool.heartbeat()
        self.supervisor.spawn(self._beat(), "heartbeat")
        self.supervisor.spawn(Housekeeping(engine).run(), "housekeeping")
        if settings.l1.prefault_threads:
            pool.prefault_start(settings.l1.prefault_threads)
        if cluster is not None:
            cluster.start()
        if http_socket is not None and http_server is not None:
            self.supervisor.spawn(http_serve(http_socket, http_server), "http")
        engine.set_ready()
        gc.collect()
        gc.freeze()
        self._announce(instance_id, port, http_port, directory, segment)

    def _join_cluster(self, engine: Engine) -> Cluster:
        """Listen for peers, and prepare the link to the controller. Raises ConfigError."""
        settings, keys, p2p = self._settings, self._plan.cluster_keys, self._settings.p2p
        peer_server, endpoint = None, ""
        if self._peer_adapter:
            peer_server = ZmqServer(self.loop)
            self.closers.append(soon(peer_server.close))
            host, _, port_text = p2p.listen.rpartition(":")
            port = peer_server.bind_tcp(
                host.strip("[]"),
                int(port_text),
                curve=keys and keys.curve,
                insecure=settings.security.insecure,
                host_setting="p2p.listen",
                port_setting="p2p.listen",
                flag="--p2p-listen",
                keys_setting="controller.curve_file (--cluster-curve-file)",
            )
            advertised = p2p.advertise or f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
            endpoint = f"tcp://{advertised if _PORT.search(advertised) else f'{advertised}:{port}'}"
        peers = PeerServer(
            engine.pool,
            self._clock,
            peer_server,
            instance_id=engine.instance_id,
            incarnation=engine.epoch,
            limit_bytes=int(engine.pool.extents_bytes * p2p.max_leased_share),
            engine=self._plan.p2p_engine,
            metadata=self._peer_metadata,
        )
        self.closers.append(soon(peers.close))
        http_host = settings.http.host
        fence, own = Fence(), OwnTiers(engine)
        cluster = Cluster(
            [
                ClusterLink(
                    engine,
                    url,
                    keys=keys,
                    incarnation=engine.epoch,
                    peers=peers,
                    peer_endpoint=endpoint,
                    zone=p2p.zone,
                    http_url=f"http://{http_host}:{engine.http_port}" if engine.http_port else "",
                    fence=fence,
                    own=own,
                )
                for url in dict.fromkeys(settings.controller.url.split(","))
            ],
            own,
        )
        self.closers.append(cluster.stop)
        engine.cluster = cluster
        assert engine.store is not None
        engine.store.watcher = cluster
        engine.extra_status["cluster"] = cluster.status
        engine.extra_status["peers_served"] = peers.status
        peers.start()
        return cluster

    def _peer_metadata(self) -> bytes:
        member = self._engine.adapters.get(self._peer_adapter)
        return b"" if member is None else member.configured.advertisement()

    def _make_app(self) -> FastAPI:
        from kvstrata.server.http.app import make_app

        return make_app(self._engine, token=self._plan.http_token)

    async def _open_adapters(self, instance_id: str, port: int, segment: Segment) -> None:
        """Open L2. Raises StorageError, except for the embedded one, without which the server can do."""
        engine, pool, settings = self._engine, self._engine.pool, self._settings
        backlog_bytes = int(pool.extents_bytes * settings.l2.backlog_share)
        store_limits = StoreLimits(backlog_bytes=backlog_bytes)
        load_limits = PrefetchLimits(
            in_flight_bytes=pool.extents_bytes // IN_FLIGHT_SHARE,
            max_in_flight=settings.l2.prefetch_max_in_flight,
        )
        store = StoreController(
            pool,
            engine.adapters,
            store_limits,
            engine.put_skipped,
            quotas={tenant_number(tenant): int(gb * GB) for tenant, gb in settings.l2.quotas_gb.items()},
            trimmed=engine.trimmed_from_l2,
        )

        def found(name: str, tenant: int, records: Sequence[tuple[bytes, int]]) -> None:
            if name == self._peer_adapter and not settings.p2p.keep:
                engine.borrowed.read(key for key, _ in records)
            store.found(name, tenant, records)

        prefetch = PrefetchController(pool, engine.adapters, load_limits, self._clock, store.dropped, found)

        def build(config: AdapterConfig) -> ConfiguredAdapter:
            return build_adapter(
                config,
                clock=self._clock,
                l1_bytes=pool.extents_bytes,
                report=engine.l2_report,
                deadline_ms=settings.l2.deadline_ms,
            )

        def context(name: str) -> AdapterContext:
            return AdapterContext(
                instance_id,
                self._clock,
                pool.extents_address,
                pool.extents_bytes,
                functools.partial(self._dropped, name),
                segment.descriptors.extents,
                segment.descriptors.sessions_lock,
                engine.payload_kinds.of,
            )

        control = AdapterControl(
            engine.adapters,
            pool,
            engine.own_lane,
            store,
            prefetch,
            build=build,
            context=context,
            forget=engine.counters.forget_adapter,
        )
        self.closers.append(control.close)
        engine.store, engine.prefetch, engine.l2 = store, prefetch, control
        engine.extra_status["l2_adapters"] = control.status
        store.start()
        await self._open_peer_adapter(control)
        adapters = self._plan.adapters
        if self._plan.embedded_l2:  # its directory is named by the port that was really taken
            adapters = [configure_adapter(embedded_adapter(port, os.environ), 0)]
        for config in adapters:
            try:
                await control.open(config)
            except StorageError as error:
                if not self._plan.embedded_l2:
                    raise
                self.log.warning("embedded_l2_off", reason=error.message)

    async def _open_peer_adapter(self, control: AdapterControl) -> None:
        """The tier that reads other instances, before all others: their RAM is nearer than a disk."""
        settings = self._settings
        if not self._plan.p2p_engine:
            if settings.controller.url and settings.p2p.engine == "auto":
                self.log.warning("p2p_off", reason="no transfer engine is installed (ucx or nixl)")
            return
        entry = {
            "type": PEER_TYPE,
            "controller": settings.controller.url,
            "engine": self._plan.p2p_engine,
            # A read of NIXL's may hang for ever; the end of its process ends it.
            "isolation": "process" if self._plan.p2p_engine == "nixl" else "in_process",
            "lookup_timeout_ms": settings.p2p.lookup_timeout_ms,
            "load_timeout_ms": settings.p2p.load_timeout_ms,
            "max_mb_s": settings.p2p.max_read_mb_s,
            # It remembers by itself, and by questions instead of keys.
            "presence_ttl_ms": 0,
            "negative_ttl_ms": 0,
            # Its own deadlines come first; the one around it is for its mistakes.
            "deadline_ms": 2 * max(settings.p2p.lookup_timeout_ms, settings.p2p.load_timeout_ms) + 2_000,
            **({"curve_file": settings.controller.curve_file} if settings.controller.curve_file else {}),
        }
        config = configure_adapter(entry, len(self._plan.adapters), path="p2p", by_server=True)
        try:
            await control.open(config)
        except StorageError as error:
            if settings.p2p.engine != "auto":
                raise
            self.log.warning("p2p_off", reason=error.message)
        else:
            self._peer_adapter = config.name

    def _dropped(self, adapter: str, key: bytes) -> None:
        """An adapter's cap dropped a key (any thread)."""
        self.loop.call_soon_threadsafe(self._engine.dropped_from_l2, adapter, key)

    def _announce(
        self, instance_id: str, port: int, http_port: int, directory: Path, segment: Segment
    ) -> None:
        pool = segment.pool
        ready = {
            "pid": os.getpid(),
            "instance_id": instance_id,
            "epoch": pool.epoch,
            "host": self._settings.named_host,
            "port": port,
            "tcp": self._settings.has_tcp,
            "http_port": http_port,
            "socket_dir": str(directory),
            "l1_bytes": pool.extents_bytes,
            "adopted": segment.adopted,
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready)
        tell_ready(self._ready_fd, ready)

    # --- periodic ----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """The heartbeat that readers of the index look at, and the pool's news for explain."""
        engine = self._engine
        while True:
            engine.pool.heartbeat()
            engine.drain_events()
            await asyncio.sleep(TICK_S)

    # --- stop --------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no new processes, and give L2 its time."""
        engine, drain_s = self._engine, self._settings.l2.drain_s
        engine.set_ready("stopping")
        if engine.cluster is not None:
            await engine.cluster.stop()
        if engine.store is not None:
            await engine.store.stop(drain_s)
        if engine.prefetch is not None:
            await engine.prefetch.stop(drain_s)


def _segment_settings(
    settings: ServerSettings, extents_bytes: int, directory: Path, shm: Path
) -> SegmentSettings:
    l1 = settings.l1
    watermark = (l1.eviction_trigger_watermark, l1.eviction_ratio) if l1.eviction_ratio else None
    return SegmentSettings(
        socket_dir=directory,
        directory=shm,
        extents_bytes=extents_bytes,
        entry_capacity=l1.entries,
        policy=l1.eviction_policy,
        watermark=watermark,
        max_session_share=MAX_SESSION_SHARE,
        huge_pages=l1.use_hugepages,
        placement=placement(l1.numa),
    )


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""
