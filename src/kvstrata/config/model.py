"""Every setting, once: its name, type, bounds, default and meaning.

The configuration reference in docs/configuration.md is generated from these structs, and the loader
(`kvstrata.config.load`) takes names, bounds and defaults from them.  Sizes in GB are multiples of 2**30.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.types import MAX_L2_ADAPTERS

GB = 1 << 30


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common options of all settings structs."""


class L1Settings(_Section, frozen=True, kw_only=True):
    """The shared-memory pool."""

    size_gb: Annotated[
        Annotated[float, Meta(gt=0, le=1 << 20)] | None,
        Meta(description="Bytes of KV in shared memory, in GB; empty: 4, or less where less fits."),
    ] = None
    eviction_policy: Annotated[
        Literal["LRU", "ARC", "S3FIFO", "noop"],
        Meta(description="Which chunks leave first under pressure; `noop` never evicts and refuses instead."),
    ] = "LRU"
    eviction_trigger_watermark: Annotated[
        float, Meta(gt=0, le=1, description="Share of the pool above which eviction starts ahead of need.")
    ] = 0.8
    eviction_ratio: Annotated[
        float, Meta(ge=0, lt=1, description="Share of the pool that one such eviction frees.")
    ] = 0.2
    entries: Annotated[
        Annotated[int, Meta(ge=1024, le=1 << 26)] | None,
        Meta(description="Chunks the index can name; empty: derived from the size."),
    ] = None
    segment_dir: Annotated[
        str, Meta(description="Directory of the pool's files on tmpfs; empty: made under /dev/shm.")
    ] = ""
    use_hugepages: Annotated[
        bool,
        Meta(
            description="Keep L1 in pages of 2 MiB out of the machine's reserve (`vm.nr_hugepages`); too few are an "
            "error. The pool is then kept by a holder process instead of under `segment_dir`."
        ),
    ] = False
    numa: Annotated[
        str,
        Meta(
            pattern=r"^(default|interleave|gpu|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)$",
            description="NUMA nodes that L1's pages come from: `default` (the kernel's choice), `interleave` (all that "
            "the server may use, in turn), `gpu` (those next to this machine's NVIDIA GPUs) or nodes, as `'0'`, "
            "`'0,2'` or `'0-1'`. Pages that an earlier server left stay where they are.",
        ),
    ] = "default"
    prefault_threads: Annotated[
        int,
        Meta(ge=0, le=64, description="Threads that fault the pool in at start; 0 leaves it to first use."),
    ] = 2


class L2Settings(_Section, frozen=True, kw_only=True):
    """What holds for all L2 adapters."""

    prefetch_max_in_flight: Annotated[
        int, Meta(ge=1, le=1024, description="Lookups that may load from L2 at the same time.")
    ] = 8
    backlog_share: Annotated[
        float, Meta(gt=0, le=0.5, description="Share of L1 that chunks waiting for a put may pin.")
    ] = 0.25
    deadline_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time one adapter operation may take unless the adapter says.")
    ] = 5_000
    drain_s: Annotated[
        float, Meta(ge=0, le=600, description="Time that puts in flight get when the server stops.")
    ] = 10.0
    quotas_gb: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1 << 20)]],
        Meta(
            description="Bytes that a tenant may have in each L2 adapter, in GB, by tenant name, as far as this server "
            "knows: what it put, found or loaded there since it started."
        ),
    ] = {}


class ListenSettings(_Section, frozen=True, kw_only=True):
    """An HTTP server."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 8080
    token_file: Annotated[
        str, Meta(description="File with the bearer token that every request off loopback must carry.")
    ] = ""


class HttpSettings(ListenSettings, frozen=True, kw_only=True):
    """The admin HTTP server."""

    enabled: Annotated[bool, Meta(description="Serve it at all.")] = True


class PortSecuritySettings(_Section, frozen=True, kw_only=True):
    """What guards ports off loopback."""

    curve_secret_file: Annotated[
        str, Meta(description="File with the server's CURVE secret key (Z85, 40 characters).")
    ] = ""
    insecure: Annotated[bool, Meta(description="Allow listening off loopback without a key or token.")] = (
        False
    )


class SecuritySettings(PortSecuritySettings, frozen=True, kw_only=True):
    """What guards the RPC port."""

    tenants_file: Annotated[
        str,
        Meta(
            description="File with a line `TOKEN TENANT [TENANT ...]` each: processes that attach with the token "
            "may use these tenants, others only the unnamed one. Empty: any local process may use any tenant."
        ),
    ] = ""


class ControllerLinkSettings(_Section, frozen=True, kw_only=True):
    """How an instance is a member of a cluster."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^(tcp://[^\s/,]+:\d{1,5}(,tcp://[^\s/,]+:\d{1,5}){0,7})?$",
            description="Reply port of the cluster's controller, as `tcp://HOST:8400`; of several, all with commas "
            "between; empty: no cluster.",
        ),
    ] = ""
    curve_file: Annotated[
        str,
        Meta(
            description="File with the CURVE keys of a member: `secret KEY`, which all members may share, and where "
            "theirs differ `server KEY` (the controller's public key) and a `client KEY` for each that may ask."
        ),
    ] = ""


class P2pSettings(_Section, frozen=True, kw_only=True):
    """Reading the L1 of other instances of the cluster, and letting them read this one's."""

    engine: Annotated[
        Literal["auto", "ucx", "nixl", "off"],
        Meta(
            description="What moves the bytes; `auto`: ucx where this build has it, else nixl where it is installed, "
            "else off. Peers must use the same."
        ),
    ] = "auto"
    listen: Annotated[
        str,
        Meta(
            pattern=r"^[^\s/]+:\d{1,5}$",
            description="HOST:PORT where peers ask for leases; port 0 takes a free one.",
        ),
    ] = "localhost:0"
    advertise: Annotated[
        str,
        Meta(
            pattern=r"^([^\s/:]+|[^\s/]+:\d{1,5})?$",
            description="HOST or HOST:PORT under which peers reach `listen`; empty: as `listen` says.",
        ),
    ] = ""
    zone: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            description="Instances of one zone are near each other and read from each other first.",
        ),
    ] = ""
    keep: Annotated[
        bool,
        Meta(
            description="Keep chunks that were read from peers, as any others; else they go once they are not in use."
        ),
    ] = True
    max_leased_share: Annotated[
        float, Meta(gt=0, le=0.25, description="Share of L1 that peers may have leased at a time.")
    ] = 0.25
    lookup_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time for the directory and an owner to answer a lookup.")
    ] = 250
    load_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time for one batch to be read from a peer.")
    ] = 5_000
    max_read_mb_s: Annotated[
        float,
        Meta(ge=0, le=1 << 20, description="MB per second that are read from peers at most; 0: no bound."),
    ] = 0.0


DEFAULT_HOST, DEFAULT_PORT = "localhost", 5555


class ServerSettings(_Section, frozen=True, kw_only=True):
    """Settings of `lmcache-server`."""

    instance_id: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            description="Name of this instance in logs, metrics and files; empty: host name and port.",
        ),
    ] = ""
    host: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Address of the RPC port. With neither `host` nor `port` there is no tcp port for RPC."
        ),
    ] = None
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(
            description="RPC port on `host` (localhost); 0 takes a free one. Sockets and pool are named after it, "
            "and after 5555 where it is not set."
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
        Meta(ge=1, le=65_536, description="Tokens in a chunk, told to engines that do not say their own."),
    ] = 256
    l1: L1Settings = L1Settings()
    l2: L2Settings = L2Settings()
    l2_adapters: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_L2_ADAPTERS)] | None,
        Meta(
            description=f"L2 adapters in order of nearness, at most {MAX_L2_ADAPTERS}; empty list: none; "
            "not set: the embedded one."
        ),
    ] = None
    http: HttpSettings = HttpSettings()
    security: SecuritySettings = SecuritySettings()
    controller: ControllerLinkSettings = ControllerLinkSettings()
    p2p: P2pSettings = P2pSettings()
    quotas_gb: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1 << 20)]],
        Meta(description="L1 bytes a tenant may hold, in GB, by tenant name."),
    ] = {}
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe level that is logged.")
    ] = "info"

    @property
    def has_tcp(self) -> bool:
        """Whether RPC is asked for over tcp; engines of this host use the unix socket."""
        return self.host is not None or self.port is not None

    @property
    def named_host(self) -> str:
        """Where the RPC port is, if there is one."""
        return DEFAULT_HOST if self.host is None else self.host

    @property
    def named_port(self) -> int:
        """The RPC port, and what sockets and pool are named after, also where there is no such port."""
        return DEFAULT_PORT if self.port is None else self.port


class EtcdSettings(_Section, frozen=True, kw_only=True):
    """Several controllers, of which one leads."""

    endpoints: Annotated[
        list[str],
        Meta(
            description="etcd servers as HOST:PORT, or https://HOST:PORT for TLS, tried in turn; empty: this "
            "controller is the only one."
        ),
    ] = []
    prefix: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._/-]{1,200}$", description="What the names of all keys begin with.")
    ] = "kvstrata"
    ttl_s: Annotated[
        int,
        Meta(ge=1, le=600, description="A leader that was silent so long is replaced, in seconds."),
    ] = 5
    advertise_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s]+)?$",
            description="Where users and other controllers reach this one's HTTP API; empty: `http://`, `http.host` "
            "and the port.",
        ),
    ] = ""
    user: Annotated[str, Meta(description="User of etcd, where it asks for one.")] = ""
    password_file: Annotated[
        str, Meta(description="File with that user's password, readable by its owner alone.")
    ] = ""
    ca_file: Annotated[
        str,
        Meta(
            description="Certificates (PEM) of the authorities that etcd's certificate is checked against; empty: "
            "those that gRPC ships."
        ),
    ] = ""
    cert_file: Annotated[
        str,
        Meta(
            description="This controller's certificate (PEM), where etcd asks for one (`--client-cert-auth`)."
        ),
    ] = ""
    key_file: Annotated[
        str, Meta(description="Key of `cert_file` (PEM, no passphrase), readable by its owner alone.")
    ] = ""


class MonitorPorts(_Section, frozen=True, kw_only=True):
    """ZMQ ports of the controller, all on one address."""

    pull: Annotated[
        int, Meta(ge=0, le=65_535, description="What instances store and drop; 0 takes a free one.")
    ] = 8300
    reply: Annotated[
        int,
        Meta(
            ge=0,
            le=65_535,
            description="Registration, full syncs and lookups; instances are told this one and learn the others.",
        ),
    ] = 8400
    heartbeat: Annotated[int, Meta(ge=0, le=65_535, description="Heartbeats and commands.")] = 8082


class ControllerHttpSettings(ListenSettings, frozen=True, kw_only=True):
    """API, dashboard and metrics of the controller."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "localhost"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 9000


class DirectorySettings(_Section, frozen=True, kw_only=True):
    """What the controller knows of chunks."""

    max_gb: Annotated[
        float,
        Meta(ge=0.0625, le=1024, description="Memory for placements, in GB; about 11 bytes each are needed."),
    ] = 4.0
    snapshot_dir: Annotated[
        str,
        Meta(
            description="Directory of the snapshot and of what admins have ordered "
            "(drains, removals, pins); empty: kvstrata/controller-PORT in "
            "XDG_STATE_HOME, or in ~/.local/state; `none`: neither is kept."
        ),
    ] = ""
    snapshot_s: Annotated[
        float, Meta(ge=1, le=86_400, description="Time between two snapshots, in seconds.")
    ] = 30.0
    snapshot_max_age_s: Annotated[
        float,
        Meta(ge=1, le=31_536_000, description="An older snapshot is not served after a start, in seconds."),
    ] = 3_600.0


class ControllerSettings(_Section, frozen=True, kw_only=True):
    """Settings of `lmcache-controller`."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            description="Name of this controller in logs and answers; empty: host name and reply port.",
        ),
    ] = ""
    http: ControllerHttpSettings = ControllerHttpSettings()
    monitor_host: Annotated[
        str, Meta(description="Address of the ZMQ ports; empty: the same as `http.host`.")
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
            description="An instance that was silent so long is dead and its chunks are forgotten, in seconds; at "
            "least twice `heartbeat_s`.",
        ),
    ] = 30.0
    max_instances: Annotated[
        int, Meta(ge=1, le=4_000, description="Instances that may be registered at a time; more are refused.")
    ] = 1_000
    directory: DirectorySettings = DirectorySettings()
    etcd: EtcdSettings = EtcdSettings()
    security: PortSecuritySettings = PortSecuritySettings()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe level that is logged.")
    ] = "info"


class ClientSettings(_Section, frozen=True, kw_only=True):
    """Settings of a process that attaches to a server (the vLLM connector and other clients)."""

    host: Annotated[str, Meta(min_length=1, description="Host of the server; must be this one.")] = (
        "localhost"
    )
    port: Annotated[int, Meta(ge=1, le=65_535, description="RPC port of the server.")] = 5555
    socket_dir: Annotated[
        str, Meta(description="Directory of the server's sockets; empty: derived from the port.")
    ] = ""
    chunk_size: Annotated[int, Meta(ge=1, le=65_536, description="Tokens in a chunk.")] = 256
    lookup_timeout_ms: Annotated[
        int,
        Meta(ge=1, le=60_000, description="Longest time a request waits for its lookup; then it is a miss."),
    ] = 3_000
    min_retrieve_tokens: Annotated[
        int, Meta(ge=0, description="Hits shorter than this are computed instead of loaded.")
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
            description="Load hits before the forward pass, beside it, or whichever suits their size. `sync` is "
            "refused where vLLM plans a step before the one before has ended: with asynchronous scheduling or pipeline "
            "parallelism; `auto` loads beside it there."
        ),
    ] = "auto"
    tenant: Annotated[str, Meta(description="Tenant that this engine's requests belong to.")] = ""
    token_file: Annotated[
        str,
        Meta(
            description="File with the token that opens `tenant` on a server with a tenants file, readable by "
            "its owner alone; read again at every attach. Empty: no token."
        ),
    ] = ""
    fidelity: Annotated[
        Literal["lossless", "fp8"],
        Meta(
            description="`fp8`: accept KV that adapters with the codec `fp8` have rounded to 8-bit floats; it is kept "
            "apart from that of engines that do not."
        ),
    ] = "lossless"
    gpu_fp8: Annotated[
        bool,
        Meta(
            description="With `fidelity: fp8` and KV of 16 bits on a GPU: round it there, so that the link and L1 "
            "carry half the bytes. Such chunks are shared with engines of the same setting only."
        ),
    ] = False
    gpu_copy_engine: Annotated[
        Literal["auto", "dma", "kernel", "staged"],
        Meta(
            description="How KV is copied between a GPU and the pool: `dma` batched copies that use no SM, `kernel` a "
            "gather kernel straight on host memory, `staged` a kernel into a buffer on the GPU and one large copy, "
            "`auto` the fastest of them, as measured at the start."
        ),
    ] = "auto"
    gpu_copy_max_sms: Annotated[
        int, Meta(ge=1, le=1024, description="Most SMs that a kernel of ours takes from the model.")
    ] = 4
    gpu_staging_mb: Annotated[
        int, Meta(ge=1, le=65_536, description="GPU memory of the copy engine `staged`, and of `gpu_fp8`.")
    ] = 64
    gpu_pin: Annotated[
        bool,
        Meta(
            description="Register the pool with the GPU's driver, slab by slab in the background, so that the GPU "
            "reads and writes it itself; such memory cannot be swapped."
        ),
    ] = True
    max_store_backlog_gb: Annotated[
        float,
        Meta(gt=0, description="Bytes waiting to be copied into the pool; stores above it are skipped."),
    ] = 1.0
