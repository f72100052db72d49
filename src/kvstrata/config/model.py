"""Every setting, once: its name, type, bounds, default and meaning.

The configuration reference in docs/configuration.md is generated from these structs, and the loader
(`kvstrata.config.load`) takes names, bounds and defaults from them.  Sizes in GB are multiples of 2**30.

Size: the loader and the reference page need the settings of all processes in one place.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.l2_model import L2Settings
from kvstrata.config.metrics_model import MetricsSettings, ServerMetricsSettings
from kvstrata.config.tenant_model import TenantSettings
from kvstrata.types import MAX_L2_ADAPTERS

NAME = {"demand": "must be at most 64 letters, digits and . _ -"}


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings structs."""


class L1Settings(_Section, frozen=True, kw_only=True):
    """The shared-memory pool."""

    size_gb: Annotated[
        Annotated[float, Meta(gt=0, le=1 << 20)] | None,
        Meta(description="Size of the pool in shared memory, in GB; empty: 4, or less if less fits."),
    ] = None
    eviction_policy: Annotated[
        Literal["LRU", "ARC", "S3FIFO", "noop"],
        Meta(description="Which chunks are evicted first; `noop` never evicts and refuses stores instead."),
    ] = "LRU"
    eviction_trigger_watermark: Annotated[
        float,
        Meta(gt=0, le=1, description="Used share of the pool above which eviction starts ahead of need."),
    ] = 0.8
    eviction_ratio: Annotated[
        float, Meta(ge=0, lt=1, description="Share of the pool that one such eviction frees.")
    ] = 0.2
    entries: Annotated[
        Annotated[int, Meta(ge=1024, le=1 << 26)] | None,
        Meta(description="Chunks that the index has room for; empty: derived from the size."),
    ] = None
    segment_dir: Annotated[
        str, Meta(description="Directory of the pool's files on a tmpfs; empty: one is made under /dev/shm.")
    ] = ""
    use_hugepages: Annotated[
        bool,
        Meta(
            description="Keep L1 in pages of 2 MiB from the machine's reserve (`vm.nr_hugepages`); too few are an "
            "error. A holder process then keeps the pool, instead of files under `segment_dir`."
        ),
    ] = False
    numa: Annotated[
        str,
        Meta(
            pattern=r"^(default|interleave|gpu|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)$",
            extra={
                "demand": "must be default, interleave, gpu, or numbers of NUMA nodes such as '0,2' or '0-1'"
            },
            description="NUMA nodes that L1's pages come from: `default` (the kernel's choice), `interleave` (page by "
            "page over all nodes that the server may use), `gpu` (the nodes next to this machine's NVIDIA GPUs) or a "
            "list of nodes, such as `'0'`, `'0,2'` or `'0-1'`. Pages that an earlier server left stay where they are.",
        ),
    ] = "default"
    forget_on_exit: Annotated[
        bool,
        Meta(
            description="Remove the pool when the server ends in order (SIGTERM, SIGINT), with what it holds. If "
            "false, the next server adopts it; `kvstrata ctl pool free` frees it."
        ),
    ] = False
    core_dump: Annotated[
        bool,
        Meta(
            description="Let core dumps of the server contain L1, and with it users' prompts; if false, no process "
            "that maps L1 has it in its core dumps."
        ),
    ] = False
    prefault_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Threads that fault in the pool at the start; 0: each page is faulted in at its first use.",
        ),
    ] = 2


HTTP_HOST = "Address to listen on, or `unix:PATH`: a unix socket, which serves the same user and root without a token."


class ListenSettings(_Section, frozen=True, kw_only=True):
    """Settings of an HTTP server."""

    host: Annotated[str, Meta(min_length=1, description=HTTP_HOST)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 8080
    token_file: Annotated[
        str,
        Meta(
            description="File with the bearer token that every request but the probes must carry, readable by its "
            "owner only. Empty: a token is made at each start, which `kvstrata ctl` finds if the same user runs it."
        ),
    ] = ""
    allowed_hosts: Annotated[
        list[
            Annotated[
                str,
                Meta(
                    pattern=r"^[A-Za-z0-9.:_\[\]-]{1,253}$",
                    extra={"demand": "must be a host's name or address, with or without a port"},
                ),
            ]
        ],
        Meta(
            description="Further names by which clients reach this port, such as `kvstrata` or, for browsers behind a "
            "proxy, `cache.example.net:8443`. Always allowed: the address of `host`, `localhost` and, if the port "
            "can be reached from elsewhere, this machine's name and every IP address."
        ),
    ] = []
    open_metrics: Annotated[
        bool | None, Meta(description="Serve /metrics without a token; empty: only on loopback.")
    ] = None


class HttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the server's admin HTTP port."""

    enabled: Annotated[bool, Meta(description="Open the admin HTTP port.")] = True


class PortSecuritySettings(_Section, frozen=True, kw_only=True):
    """Settings that guard ports off loopback."""

    curve_secret_file: Annotated[
        str, Meta(description="File with the server's CURVE secret key (Z85, 40 characters).")
    ] = ""
    insecure: Annotated[bool, Meta(description="Open ports that lack a key or token to everybody.")] = False


class SecuritySettings(PortSecuritySettings, frozen=True, kw_only=True):
    """Settings that guard the RPC port."""

    tenants_file: Annotated[
        str,
        Meta(
            description="File of lines `TOKEN TENANT [TENANT ...]`: a process that attaches with the token may use "
            "these tenants, any other process only the unnamed one. Empty: any local process may use any tenant."
        ),
    ] = ""
    sessions_per_process: Annotated[
        int, Meta(ge=1, le=1023, description="Most sessions that one process may have attached.")
    ] = 64
    sessions_per_token: Annotated[
        int, Meta(ge=1, le=1023, description="Most sessions of one token, if there is a tenants file.")
    ] = 512


class ControllerLinkSettings(_Section, frozen=True, kw_only=True):
    """Settings of an instance as a member of a cluster."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^(tcp://[^\s/,]+:\d{1,5}(,tcp://[^\s/,]+:\d{1,5}){0,7})?$",
            extra={
                "demand": "must be tcp://HOST:PORT with a controller's reply port; at most 8, with commas between"
            },
            description="Reply port of the cluster's controller, as `tcp://HOST:8400`; several controllers are "
            "separated by commas; empty: no cluster.",
        ),
    ] = ""
    curve_file: Annotated[
        str,
        Meta(
            description="File with the CURVE keys of a member, as `kvstrata cluster init` makes it: `secret KEY`, "
            "`server KEY` (the controller's public key) and a `client KEY` for each peer that may ask for leases. With "
            "`secret KEY` alone all members share it. Empty: the instance makes a key of its own, for a cluster on "
            "loopback."
        ),
    ] = ""


class P2pSettings(_Section, frozen=True, kw_only=True):
    """Settings for reading the L1 of other instances of the cluster, and for leasing this instance's L1 to them."""

    engine: Annotated[
        Literal["auto", "ucx", "nixl", "off"],
        Meta(
            description="Transfer engine that moves the bytes; `auto`: ucx if this build has it, else nixl if it is "
            "installed, else off. All peers must use the same engine."
        ),
    ] = "auto"
    listen: Annotated[
        str,
        Meta(
            pattern=r"^[^\s/]+:\d{1,5}$",
            extra={"demand": "must be HOST:PORT, such as localhost:0"},
            description="HOST:PORT on which peers ask for leases; port 0 takes a free one.",
        ),
    ] = "localhost:0"
    advertise: Annotated[
        str,
        Meta(
            pattern=r"^([^\s/:]+|[^\s/]+:\d{1,5})?$",
            extra={"demand": "must be HOST or HOST:PORT, or empty"},
            description="HOST or HOST:PORT at which peers reach `listen`; empty: the same as `listen`.",
        ),
    ] = ""
    zone: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra=NAME,
            description="Zone of this instance; it prefers to read from instances of its own zone.",
        ),
    ] = ""
    keep: Annotated[
        bool,
        Meta(
            description="Chunks read from peers stay in L1 as all other chunks do; if false, they are dropped as soon "
            "as nobody uses them."
        ),
    ] = True
    max_leased_share: Annotated[
        float,
        Meta(gt=0, le=0.25, description="Largest share of L1 that peers' leases and admins' pins may keep."),
    ] = 0.25
    lookup_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time for the directory and an owner to answer a lookup.")
    ] = 250
    load_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time for reading one batch from a peer.")
    ] = 5_000
    max_read_mb_s: Annotated[
        float,
        Meta(ge=0, le=1 << 20, description="Most MB per second that are read from peers; 0: no bound."),
    ] = 0.0


DEFAULT_HOST, DEFAULT_PORT = "localhost", 5555


class ServerSettings(_Section, frozen=True, kw_only=True):
    """Settings of `lmcache-server`."""

    instance_id: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra=NAME,
            description="Name of this instance in logs, metrics and files; empty: host name and port.",
        ),
    ] = ""
    host: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Address of the RPC port. If neither `host` nor `port` is set, RPC uses no tcp port."
        ),
    ] = None
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(
            description="RPC port on `host` (localhost); 0 takes a free one. Sockets and pool are named after it, or "
            "after 5555 if it is not set."
        ),
    ] = None
    socket_dir: Annotated[
        str,
        Meta(
            description="Directory of the local sockets; empty: kvstrata-UID/PORT in XDG_RUNTIME_DIR or /tmp."
        ),
    ] = ""
    chunk_size: Annotated[
        int,
        Meta(ge=1, le=65_536, description="Tokens in a chunk for engines that do not set their own."),
    ] = 256
    l1: L1Settings = L1Settings()
    l2: L2Settings = L2Settings()
    l2_adapters: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_L2_ADAPTERS)] | None,
        Meta(
            description=f"L2 adapters, nearest first, at most {MAX_L2_ADAPTERS}; empty list: none; not set: the "
            "embedded disk adapter."
        ),
    ] = None
    http: HttpSettings = HttpSettings()
    metrics: ServerMetricsSettings = ServerMetricsSettings()
    security: SecuritySettings = SecuritySettings()
    controller: ControllerLinkSettings = ControllerLinkSettings()
    p2p: P2pSettings = P2pSettings()
    quotas_gb: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1 << 20)]],
        Meta(description="GB that a tenant may have in L1, by tenant name."),
    ] = {}
    tenants: Annotated[
        list[TenantSettings],
        Meta(
            max_length=4096,
            description="Tenants by `name`, each with its `pool`: `shared`, as for all tenants that are not listed, or "
            "`own`: a part of L1 as large as `quotas_gb` says, in memory that only this tenant's processes map. Such a "
            "tenant needs a token that opens no other tenant. `max_gb`: up to how many GB the quota of an own pool can "
            "be raised while the server runs; empty: its quota at the start.",
        ),
    ] = []
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe level that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="Form of the log's lines: `text`, or one JSON object a line with `time`, `level`, `component`, "
            "`message` and `fields`."
        ),
    ] = "text"

    @property
    def has_tcp(self) -> bool:
        """Whether RPC is served over tcp too; engines of this host use the unix socket in any case."""
        return self.host is not None or self.port is not None

    @property
    def named_host(self) -> str:
        """Address of the RPC port, if one is to be opened."""
        return DEFAULT_HOST if self.host is None else self.host

    @property
    def named_port(self) -> int:
        """The RPC port; sockets and pool are named after it even if it is not opened."""
        return DEFAULT_PORT if self.port is None else self.port


class EtcdSettings(_Section, frozen=True, kw_only=True):
    """Settings of several controllers, one of which leads."""

    endpoints: Annotated[
        list[str],
        Meta(
            description="etcd servers as HOST:PORT, or https://HOST:PORT for TLS, tried one after the other; empty: "
            "this controller is the only one."
        ),
    ] = []
    prefix: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._/-]{1,200}$",
            extra={"demand": "must be 1 to 200 letters, digits and . _ / -"},
            description="Prefix of all of kvstrata's keys in etcd.",
        ),
    ] = "kvstrata"
    ttl_s: Annotated[
        int,
        Meta(ge=1, le=600, description="Silence after which a leader is replaced, in seconds."),
    ] = 5
    advertise_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s]+)?$",
            extra={"demand": "must be an http:// or https:// URL, or empty"},
            description="URL at which users and other controllers reach this controller's HTTP API; empty: `http://`, "
            "`http.host` and the port.",
        ),
    ] = ""
    user: Annotated[str, Meta(description="User of etcd, if etcd asks for one.")] = ""
    password_file: Annotated[
        str, Meta(description="File with that user's password, readable by its owner only.")
    ] = ""
    ca_file: Annotated[
        str,
        Meta(
            description="Certificates (PEM) of the authorities against which etcd's certificate is checked; empty: "
            "the ones that gRPC ships."
        ),
    ] = ""
    cert_file: Annotated[
        str,
        Meta(description="This controller's certificate (PEM), if etcd asks for one (`--client-cert-auth`)."),
    ] = ""
    key_file: Annotated[
        str, Meta(description="Key of `cert_file` (PEM, no passphrase), readable by its owner only.")
    ] = ""


class MonitorPorts(_Section, frozen=True, kw_only=True):
    """ZMQ ports of the controller, all on one address."""

    pull: Annotated[
        int,
        Meta(ge=0, le=65_535, description="Port for the events of instances' chunks; 0 takes a free one."),
    ] = 8300
    reply: Annotated[
        int,
        Meta(
            ge=0,
            le=65_535,
            description="Port for registration, full syncs and lookups. Instances are configured with this port, and "
            "learn the others from the controller.",
        ),
    ] = 8400
    heartbeat: Annotated[int, Meta(ge=0, le=65_535, description="Port for heartbeats and commands.")] = 8082


class ControllerHttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the controller's HTTP port: API, dashboard and metrics."""

    host: Annotated[str, Meta(min_length=1, description=HTTP_HOST)] = "localhost"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 9000


class DirectorySettings(_Section, frozen=True, kw_only=True):
    """Settings of the directory, the controller's map from chunks to instances."""

    max_gb: Annotated[
        float,
        Meta(ge=0.0625, le=1024, description="Memory for placements, in GB; each takes about 11 bytes."),
    ] = 4.0
    snapshot_dir: Annotated[
        str,
        Meta(
            description="Folder of the snapshot and of the admins' orders (drains, removals, pins); empty: "
            "kvstrata/controller-PORT in XDG_STATE_HOME, or in ~/.local/state; `none`: neither is kept."
        ),
    ] = ""
    snapshot_s: Annotated[
        float, Meta(ge=1, le=86_400, description="Time between two snapshots, in seconds.")
    ] = 30.0
    snapshot_max_age_s: Annotated[
        float,
        Meta(ge=1, le=31_536_000, description="Age above which a snapshot is not served, in seconds."),
    ] = 3_600.0


class ControllerSettings(_Section, frozen=True, kw_only=True):
    """Settings of `lmcache-controller`."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra=NAME,
            description="Name of this controller in logs and in its answers; empty: host name and reply port.",
        ),
    ] = ""
    http: ControllerHttpSettings = ControllerHttpSettings()
    metrics: MetricsSettings = MetricsSettings()
    monitor_host: Annotated[
        str,
        Meta(
            description="Address of the ZMQ ports; empty: that of `http.host`, or localhost beside a unix socket."
        ),
    ] = ""
    monitor_ports: MonitorPorts = MonitorPorts()
    heartbeat_s: Annotated[
        float, Meta(ge=0.05, le=3_600, description="Time between two heartbeats of an instance, in seconds.")
    ] = 10.0
    dead_after_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400,
            description="Silence after which an instance is dead and its chunks are forgotten, in seconds; at least "
            "twice `heartbeat_s`.",
        ),
    ] = 30.0
    max_instances: Annotated[
        int, Meta(ge=1, le=4_000, description="Instances that may be registered at a time; more are refused.")
    ] = 1_000
    peer_hosts: Annotated[
        list[
            Annotated[
                str,
                Meta(
                    pattern=r"^[A-Za-z0-9._:/-]{1,253}$",
                    extra={"demand": "must be a host's name, an address, or a network such as 10.1.0.0/16"},
                ),
            ]
        ],
        Meta(
            description="Hosts that instances may name in `p2p.advertise` besides the one that their connection comes "
            "from: names, addresses, or networks such as `10.1.0.0/16`."
        ),
    ] = []
    directory: DirectorySettings = DirectorySettings()
    etcd: EtcdSettings = EtcdSettings()
    security: PortSecuritySettings = PortSecuritySettings()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe level that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="Form of the log's lines: `text`, or one JSON object a line with `time`, `level`, `component`, "
            "`message` and `fields`."
        ),
    ] = "text"


class ClientSettings(_Section, frozen=True, kw_only=True):
    """Settings of a process that attaches to a server (the vLLM connector and other clients)."""

    host: Annotated[str, Meta(min_length=1, description="Host of the server; must be this host.")] = (
        "localhost"
    )
    port: Annotated[int, Meta(ge=1, le=65_535, description="RPC port of the server.")] = 5555
    socket_dir: Annotated[
        str,
        Meta(description="Directory of the server's sockets; empty: each default place (docs/protocol.md)."),
    ] = ""
    chunk_size: Annotated[int, Meta(ge=1, le=65_536, description="Tokens in a chunk.")] = 256
    lookup_timeout_ms: Annotated[
        int,
        Meta(ge=1, le=60_000, description="Longest wait for a request's lookup, which is a miss after that."),
    ] = 3_000
    min_retrieve_tokens: Annotated[
        int, Meta(ge=0, description="A hit with fewer tokens than this is computed instead of loaded.")
    ] = 0
    save_decode_cache: Annotated[bool, Meta(description="Store chunks made of generated tokens too.")] = False
    enable_kv_events: Annotated[
        bool, Meta(description="Hand stored and removed chunks to vLLM as events.")
    ] = False
    copy_threads: Annotated[
        int,
        Meta(ge=1, le=64, description="Native threads that copy between the engine's blocks and the pool."),
    ] = 2
    load_mode: Annotated[
        Literal["auto", "sync", "async"],
        Meta(
            description="When hits are loaded: `sync` before the forward pass, `async` beside it, `auto` as their "
            "size suggests. If vLLM plans a step before the previous one has ended (asynchronous scheduling, pipeline "
            "parallelism), `sync` is refused and `auto` loads beside the pass."
        ),
    ] = "auto"
    tenant: Annotated[str, Meta(description="Tenant that this engine's requests belong to.")] = ""
    token_file: Annotated[
        str,
        Meta(
            description="File with the token that permits `tenant` on a server with a tenants file; readable by its "
            "owner only, read again at every attach. Empty: no token."
        ),
    ] = ""
    fidelity: Annotated[
        Literal["lossless", "fp8"],
        Meta(
            description="`fp8`: accept KV that adapters with the codec `fp8` have rounded to 8-bit floats. Engines "
            "with different settings share no chunks."
        ),
    ] = "lossless"
    gpu_fp8: Annotated[
        bool,
        Meta(
            description="With `fidelity: fp8` and 16-bit KV on a GPU: round the KV on the GPU, so that the link and L1 "
            "carry half the bytes. Such chunks are shared only with engines that have the same setting."
        ),
    ] = False
    gpu_copy_engine: Annotated[
        Literal["auto", "dma", "kernel", "staged"],
        Meta(
            description="How KV is copied between a GPU and the pool: `dma`: batched copies that use no SM; `kernel`: "
            "a kernel that accesses host memory; `staged`: a kernel into a buffer on the GPU, and one large copy; "
            "`auto`: the fastest of them, as measured at the start."
        ),
    ] = "auto"
    gpu_copy_max_sms: Annotated[
        int, Meta(ge=1, le=1024, description="Most SMs that one of our kernels takes from the model.")
    ] = 4
    gpu_staging_mb: Annotated[
        int,
        Meta(
            ge=1, le=65_536, description="MB of GPU memory for the copy engine `staged`, and for `gpu_fp8`."
        ),
    ] = 64
    gpu_pin: Annotated[
        bool,
        Meta(
            description="Register the pool with the GPU's driver, slab by slab in the background, so that the GPU "
            "reads and writes the pool directly; registered memory cannot be swapped."
        ),
    ] = True
    max_store_backlog_gb: Annotated[
        float,
        Meta(gt=0, description="Most bytes waiting to be copied into the pool; further stores are skipped."),
    ] = 1.0
