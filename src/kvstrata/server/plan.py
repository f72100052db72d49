"""Checks settings and fills in their defaults; nothing is opened or written here.

Any wrong setting stops the start with one line that says what to change.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from kvstrata.config.model import ServerSettings
from kvstrata.config.private_dir import user_folder
from kvstrata.config.private_file import MAX_TOKEN_CHARS, MIN_TOKEN_CHARS, read_private_file
from kvstrata.errors import AllWrong, ConfigError, MachineLacks, MachineUnfit, install
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.memory.paths import segment_dir, socket_dir
from kvstrata.memory.segment_settings import (
    SegmentSettings,
    check_size,
    memory_limit,
    nodes_of,
)
from kvstrata.p2p.nixl import has_a_way, has_rdma_card
from kvstrata.process.listen import read_token
from kvstrata.process.ports import Listening, refuse_port_twice
from kvstrata.rpc.zmq_curve import read_cluster_keys
from kvstrata.server.processes import TenantTokens
from kvstrata.text import remember_secret
from kvstrata.tiers.config import TierConfig, configure_tier
from kvstrata.types import GB

DEFAULT_L1_BYTES = 4 * GB
DEFAULT_L2_GB = 20
CACHE_FOLDER = "kvstrata"
"""Name of our folder in the user's cache folder."""
L1_ALIGNMENT = 1 << 20
SERVER_BYTES, HOST_BYTES = 96 << 20, 48 << 20
"""About twice the private memory of an idle server and an idle adapter host (measured: 45 and 18 MB)."""
MAX_SESSION_SHARE = 8
"""A session may have 1/8 of its pool reserved or quarantined."""
T = TypeVar("T")


class InstanceFacts(NamedTuple):
    """Name, ports and age of an instance, for clients, controllers and admins; they do not change while it runs."""

    instance_id: str
    epoch: int
    """A number that changes with every start; every reply carries it."""
    port: int
    """The number in the names of sockets and pool; not a tcp port."""
    http_port: int
    """0: no HTTP."""
    socket_dir: Path
    chunk_tokens: int
    max_reserved_bytes: int
    """Bytes of L1 that one session may have reserved at a time."""
    started_s: float
    """Time of the start, by the instance's clock."""


class P2pEngine(NamedTuple):
    """The engine that moves bytes between instances."""

    name: Literal["tcp", "nixl"]
    why: str
    """The engine and the reason for its choice, for operators."""


class Plan(NamedTuple):
    """Checked settings, with every default filled in."""

    settings: ServerSettings
    extents_bytes: int
    adapters: list[TierConfig]
    embedded_l2: bool
    """The only adapter is the default one; if it cannot be opened, the server runs without L2."""
    tokens: TenantTokens
    http_token: str
    p2p_engine: P2pEngine | None
    """None: this instance neither reads nor serves peers."""


def plan(settings: ServerSettings, environment: Mapping[str, str], lacking: list[str] | None = None) -> Plan:
    """Check everything that can be checked without opening anything. Raises ConfigError.

    If `lacking` is given, it collects the messages of each MachineLacks, and the plan must not be run.
    """

    def here(check: Callable[[], T], otherwise: T) -> T:
        try:
            return check()
        except MachineLacks as error:
            if lacking is None:
                raise
            lacking.extend(error.lines)
            return otherwise

    if settings.l1.numa != "default":
        here(lambda: bool(nodes_of(settings.l1.numa)), False)
    refuse_port_twice(tcp_ports(settings))
    size_gb = settings.l1.size_gb
    alignment = HUGE_PAGE_BYTES if settings.l1.use_hugepages else L1_ALIGNMENT
    extents_bytes = (default_l1_bytes() if size_gb is None else round(size_gb * GB)) & ~(alignment - 1)
    entries = settings.l2_adapters
    embedded = entries is None
    if entries is None:
        entries = [embedded_adapter(settings.named_port, environment)]
    adapters, wrong = [], AllWrong()
    for index, entry in enumerate(entries):
        with wrong:
            if (config := here(functools.partial(configure_tier, entry, index), None)) is not None:
                adapters.append(config)
    wrong.tell()
    nowhere, beside_bytes = Path("/"), processes_bytes(adapters)
    here(lambda: check_size(segment_settings(settings, extents_bytes, nowhere, nowhere), beside_bytes), None)
    socket_dir(settings.socket_dir, settings.named_port, environment)
    if not settings.l1.segment_dir:
        segment_dir(settings.named_port, settings.instance_id)
    tokens = here(lambda: read_tenants_file(settings.security.tenants_file), None)
    http_token = ""
    if settings.http.enabled:
        http_token = here(lambda: read_token(settings.http, insecure=settings.security.insecure), "")
    if settings.controller.curve_file:
        here(lambda: read_cluster_keys(settings.controller.curve_file, "controller.curve_file"), None)
    engine = here(lambda: _p2p_engine(settings, environment), None)
    return Plan(
        settings,
        extents_bytes,
        adapters,
        embedded,
        tokens or TenantTokens(),
        http_token,
        engine,
    )


def used(planned: Plan, environment: Mapping[str, str]) -> ServerSettings:
    """The settings of a plan, with the server's values for all settings that are not set."""
    settings = planned.settings
    l1 = settings.l1
    shm = l1.segment_dir or str(segment_dir(settings.named_port, settings.instance_id))
    size_gb = default_l1_bytes() / GB if l1.size_gb is None else l1.size_gb
    entries = settings.l2_adapters
    return msgspec.structs.replace(
        settings,
        socket_dir=str(socket_dir(settings.socket_dir, settings.named_port, environment)),
        l1=msgspec.structs.replace(l1, size_gb=size_gb, segment_dir=shm),
        l2_adapters=[dict(tier.entry) for tier in planned.adapters] if entries is None else entries,
    )


def tcp_ports(settings: ServerSettings) -> list[Listening]:
    """The tcp ports that the settings ask for."""
    found = []
    if settings.http.enabled:
        found.append(Listening("http.port", settings.http.host, settings.http.port))
    if settings.controller.url and settings.p2p.engine != "off":
        host, _, port = settings.p2p.listen.rpartition(":")
        found.append(Listening("p2p.listen", host.strip("[]"), int(port)))
        found.append(Listening("p2p.data_port", host.strip("[]"), settings.p2p.data_port))
    return found


def _p2p_engine(settings: ServerSettings, environment: Mapping[str, str]) -> P2pEngine | None:
    """The engine that moves bytes between instances; None: no engine. Raises ConfigError, and MachineUnfit."""
    p2p = settings.p2p
    if not settings.controller.url or p2p.engine == "off":
        return None
    host = p2p.listen.rpartition(":")[0]
    if host in ("*", "0.0.0.0", "[::]") and not p2p.advertise:
        raise ConfigError(
            f"p2p.advertise: p2p.listen is {p2p.listen}, which means every address; set the one at which peers reach "
            "this instance (--p2p-advertise HOST)",
            field="p2p.advertise",
        )
    if p2p.seal:
        _check_seal(settings)
    if p2p.engine == "nixl" and not has_a_way(environment, tcp=p2p.tcp):
        raise MachineUnfit(
            "p2p.engine: nixl without an RDMA card needs TCP, and anyone who can reach a TCP port of UCX can read and "
            "write this process's memory; set p2p.tcp to true (--p2p-tcp) if only the instances reach the port, or "
            "p2p.engine to tcp (--p2p-engine tcp)",
            field="p2p.engine",
        )
    if p2p.engine != "auto":
        return P2pEngine(p2p.engine, f"{p2p.engine}, as p2p.engine says")
    if not has_rdma_card():
        return P2pEngine("tcp", "tcp, since this host has no RDMA card")
    if p2p.seal:
        return P2pEngine("tcp", "tcp, since only tcp supports p2p.seal, though this host has an RDMA card")
    if importlib.util.find_spec("nixl") is None:
        return P2pEngine("tcp", "tcp, since NIXL is not installed, though this host has an RDMA card")
    return P2pEngine("nixl", "nixl, since this host has an RDMA card")


def _check_seal(settings: ServerSettings) -> None:
    """Raises ConfigError if p2p.seal would protect nothing, MachineUnfit if the package that it needs is missing."""
    if settings.p2p.engine == "nixl":
        raise ConfigError(
            "p2p.seal: true has no effect with p2p.engine nixl, where readers fetch the bytes themselves; set "
            "p2p.engine to tcp (--p2p-engine tcp)",
            field="p2p.seal",
        )
    if settings.security.insecure and not settings.controller.curve_file:
        raise ConfigError(
            "p2p.seal: true, but with security.insecure and without controller.curve_file the cluster has no keys, so "
            "anyone can open a sealed connection; make key files with kvstrata cluster init and set "
            "controller.curve_file (--cluster-curve-file), or start without --insecure",
            field="p2p.seal",
        )
    if importlib.util.find_spec("cryptography") is None:
        raise MachineUnfit(
            f"p2p.seal: true needs the Python package 'cryptography', which is not installed: {install('codecs')}",
            field="p2p.seal",
        )


def default_l1_bytes() -> int:
    """4 GB, or half of the memory of the machine or the control group if that is less."""
    return min(DEFAULT_L1_BYTES, memory_limit().limit_bytes // 2)


def processes_bytes(adapters: list[TierConfig]) -> int:
    """Bytes of memory, besides L1 and its index, that the server and its adapter hosts use when they begin to serve."""
    hosts = sum(config.isolated for config in adapters)
    staging_bytes = sum(
        int(config.common.codec_staging_mb * (1 << 20)) for config in adapters if config.chain.encodes
    )
    return SERVER_BYTES + hosts * HOST_BYTES + staging_bytes


def embedded_adapter(port: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """The L2 of a server without L2 settings: a disk log in the user's cache directory. Raises ConfigError."""
    cache = user_folder(environment, "XDG_CACHE_HOME", ".cache")
    if not cache:
        raise ConfigError(
            "l2_adapters: the embedded L2 needs a folder, but neither XDG_CACHE_HOME nor HOME is set; set one of "
            "them, give --l2-adapter with a base_path, or --l2-adapter none",
            field="l2_adapters",
        )
    return {"type": "disk", "base_path": f"{cache}/{CACHE_FOLDER}/{port}", "capacity_gb": DEFAULT_L2_GB}


def read_tenants_file(path: str) -> TenantTokens:
    """Tokens from a file with lines `TOKEN TENANT [TENANT ...]`; `#` begins a comment. Raises ConfigError."""
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
        remember_secret(words[0])
        tokens[words[0]] = tokens.get(words[0], frozenset()) | frozenset(words[1:])
    if not tokens:
        raise ConfigError(f"{field}: {path}: has no token; add one, or leave the setting out", field=field)
    return TenantTokens(tokens)


def segment_settings(
    settings: ServerSettings, extents_bytes: int, directory: Path, shm: Path
) -> SegmentSettings:
    """The layout of L1. `directory` is for sockets, `shm` for shared memory."""
    l1 = settings.l1
    return SegmentSettings(
        socket_dir=directory,
        directory=shm,
        extents_bytes=extents_bytes,
        entry_capacity=l1.entries,
        policy=l1.eviction_policy,
        max_session_share=MAX_SESSION_SHARE,
        huge_pages=l1.use_hugepages,
        numa=l1.numa,
    )
