"""Settings of the server: name, type, bounds, default and meaning of each.

controller_model.py, gateway_model.py and client_model.py have those of the other processes, common_model.py the shared
ones.  The configuration reference in docs/configuration.md is generated from these structs, and the loader
(`kvstrata.config.load`) takes names, bounds and defaults from them.  Sizes in GB are multiples of 2**30.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import HTTP_HOST, NAME, ListenSettings, LogFormat, LogLevel, says
from kvstrata.types import MAX_L2_ADAPTERS, MAX_QUOTAS

# fmt: off


class L1Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared-memory pool."""

    size_gb: Annotated[Annotated[float, Meta(gt=0, le=1 << 20)] | None, says(
        "Size of the pool in shared memory, in GB; empty: 4, or less if the machine has less.")] = None
    eviction_policy: Annotated[Literal["VALUE", "LRU", "noop"], says(
        "Which chunks are evicted first: `VALUE`, those with the lowest learned value; `LRU`, the least recently "
        "used; `noop` never evicts and refuses stores instead.")] = "VALUE"
    entries: Annotated[Annotated[int, Meta(ge=1024, le=1 << 26)] | None, says(
        "Capacity of the index in chunks; empty: derived from the size.")] = None
    segment_dir: Annotated[str, says(
        "Directory of the pool's files on a tmpfs; empty: one is created under /dev/shm.")] = ""
    use_hugepages: Annotated[bool, says(
        "Keep L1 in pages of 2 MiB from the machine's reserve (`vm.nr_hugepages`); too few are an error. L1 then has "
        "no files under `segment_dir`, and ends with the keeper.")] = False
    numa: Annotated[str, says(
        "NUMA nodes that the server's memory, and so L1, comes from: `default` (the kernel's choice), `interleave` "
        "(page by page over all nodes), or the number of a node, used as long as it has free memory. Pages taken "
        "over from an earlier server stay where they are.",
        pattern=r"^(default|interleave|\d{1,4})$",
        demand="must be default, interleave, or the number of a NUMA node")] = "default"
    forget_on_exit: Annotated[bool, says(
        "Remove the pool and its contents when the server ends in order (SIGTERM, SIGINT). If false, the next server "
        "adopts the pool; `kvstrata ctl pool free` frees it.")] = False


class L2Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all L2 adapters together."""

    tails_after_s: Annotated[float, says(
        "Seconds after which the tail of a prompt (its unfinished last chunk) is put to L2, unless it has been "
        "replaced; -1: tails stay in L1.", ge=-1, le=86_400)] = 60.0
    load: Annotated[Literal["auto", "always", "never"], says(
        "Whether lookups load chunks that L1 lacks: `auto` loads unless the engine should compute them faster, by "
        "measurements of both; prewarms always load.")] = "auto"
    drain_s: Annotated[float, says(
        "Seconds that the server waits for puts and loads under way when it stops; closing takes up to 5 s more.",
        limit=True, ge=0, le=600)] = 10.0


NO_HTTP = "none"


class HttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the server's admin HTTP port."""

    host: Annotated[str, says(f"{HTTP_HOST} `none`: no admin port.", min_length=1)] = "127.0.0.1"

    @property
    def enabled(self) -> bool:
        """Whether there is an admin port."""
        return self.host != NO_HTTP


class SecuritySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that guard the sockets and the admin port."""

    insecure: Annotated[bool, says("Open ports that require no key or token, to anyone who can reach them.")] = False

    tenants_file: Annotated[str, says(
        "File of lines `TOKEN TENANT [TENANT ...]`: a process that attaches with the token may use these tenants, "
        "all other processes only the unnamed tenant. Empty: every local process may use every tenant.")] = ""


class ControllerLinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an instance as a member of a cluster."""

    url: Annotated[str, says(
        "Reply port of the cluster's controller, as `tcp://HOST:8400`; several controllers are separated by commas; "
        "empty: no cluster.",
        pattern=r"^(tcp://[^\s/,]+:\d{1,5}(,tcp://[^\s/,]+:\d{1,5}){0,7})?$",
        demand="must be tcp://HOST:PORT with a controller's reply port; at most 8, with commas between")] = ""
    curve_file: Annotated[str, says(
        "File with the CURVE keys of a member, as `kvstrata cluster init` creates it: `secret KEY`, `server KEY` "
        "(the controller's public key) and a `client KEY` for each peer that may request leases. With `secret KEY` "
        "alone all members share that key. Empty: the processes of this user share a key automatically, for a "
        "cluster on loopback.")] = ""


class P2pSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for reading the L1 of other instances of the cluster, and for sending them this instance's."""

    engine: Annotated[Literal["auto", "tcp", "nixl", "off"], says(
        "Transfer engine between peers. `tcp`: owners send the bytes over kvstrata's own connections (a unix socket "
        "on one host); `nixl`: readers fetch them through NIXL; `auto`: nixl if this host has an RDMA card and NIXL "
        "is installed, else tcp. All peers must use the same engine.")] = "auto"
    listen: Annotated[str, says(
        "HOST:PORT of the control port for controllers, gateways and peers; port 0 takes a free one.",
        pattern=r"^[^\s/]+:\d{1,5}$", demand="must be HOST:PORT, such as localhost:0")] = "localhost:0"
    advertise: Annotated[str, says(
        "HOST or HOST:PORT at which other processes reach `listen`; empty: the same as `listen`.",
        pattern=r"^([^\s/:]+|[^\s/]+:\d{1,5})?$", demand="must be HOST or HOST:PORT, or empty")] = ""
    tcp: Annotated[bool, says(
        "Allow NIXL to use UCX over TCP. Anyone who reaches its ports can read and write the memory of the adapter "
        "host and L1, so keep them in a network that only the instances share. If false, NIXL uses RDMA cards, "
        "unless `UCX_TLS` in the environment overrides this. `engine` tcp does not need it.")] = False
    data_port: Annotated[int, says(
        "Port on the host of `listen` that sends records; 0 takes a free one.", ge=0, le=65_535)] = 0
    seal: Annotated[bool, says(
        "Encrypt and authenticate the records that owners send (AES-256-GCM), so that nobody on the network can read "
        "or change them. Needs `engine` tcp, a cluster with keys and the Python package `cryptography`. All peers "
        "must use the same value.")] = False
    zone: Annotated[str, says(
        "Zone of this instance, which prefers to read from instances of its own zone.",
        pattern=r"^[A-Za-z0-9._-]{0,64}$", demand=NAME)] = ""
    lookup_timeout_ms: Annotated[int, says(
        "Time limit for the directory, or an owner asked about single chunks, to answer a "
        "lookup.", limit=True, ge=1, le=60_000
        )] = 250
    load_timeout_ms: Annotated[int, says(
        "Time limit for reading one batch from a peer.", limit=True, ge=1, le=60_000)] = 5_000


DEFAULT_PORT = 5555


class ObservabilitySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's log of requests, and its traces."""

    record: Annotated[str, says(
        "Folder for a log of requests, for `kvstrata replay`: 16 files of 64 MB, without prompts or keys; empty: none.")
    ] = ""
    otlp_endpoint: Annotated[str, says(
        "OpenTelemetry collector, as `http://HOST:4318`, that gets the spans of traced requests by OTLP over HTTP; "
        "the default path is `/v1/traces`. Needs the extra `otel`. Empty: no spans.",
        pattern=r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?$",
        demand="must be http://HOST:PORT or https://HOST:PORT, with or without a path, or empty")] = ""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `lmcache-server`."""

    instance_id: Annotated[str, says(
        "Name of this instance in logs, metrics and files; empty: host name and port.",
        pattern=r"^[A-Za-z0-9._-]{0,64}$", demand=NAME)] = ""
    port: Annotated[Annotated[int, Meta(ge=1, le=65_535)] | None, says(
        "Number that names the sockets and the pool (5555). No TCP port is opened for it.")] = None
    socket_dir: Annotated[str, says(
        "Directory of the local sockets; empty: kvstrata-UID/PORT in XDG_RUNTIME_DIR or /tmp.")] = ""
    chunk_size: Annotated[int, says("Tokens in a chunk for engines that do not set their own.", ge=1, le=65_536)] = 256
    l1: L1Settings = L1Settings()
    l2: L2Settings = L2Settings()
    l2_adapters: Annotated[Annotated[list[dict[str, Any]], Meta(max_length=MAX_L2_ADAPTERS)] | None, says(
        f"L2 adapters, nearest first, at most {MAX_L2_ADAPTERS}; empty list: none; not set: the embedded disk "
        "adapter.")] = None
    http: HttpSettings = HttpSettings()
    security: SecuritySettings = SecuritySettings()
    controller: ControllerLinkSettings = ControllerLinkSettings()
    p2p: P2pSettings = P2pSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    quotas_gb: Annotated[dict[str, Annotated[float, Meta(gt=0, le=1 << 20)]], says(
        "GB of a tenant's chunks in L1 that other tenants cannot evict, by tenant name.", max_length=MAX_QUOTAS)] = {}
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    @property
    def named_port(self) -> int:
        """The number after which sockets and pool are named."""
        return DEFAULT_PORT if self.port is None else self.port
