"""Settings of the server: name, type, bounds, default and meaning of each.

controller_model.py and client_model.py have those of the other processes, common_model.py those that several have.  The
configuration reference in docs/configuration.md is generated from these structs, and the loader
(`kvstrata.config.load`) takes names, bounds and defaults from them.  Sizes in GB are multiples of 2**30.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import LIMIT, NAME, ListenSettings
from kvstrata.config.l2_model import L2Settings
from kvstrata.config.log_model import LogFormat, LogLevel
from kvstrata.types import MAX_L2_ADAPTERS


class L1Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
            "error. L1 then has no files under `segment_dir`, and ends with the keeper."
        ),
    ] = False
    numa: Annotated[
        str,
        Meta(
            pattern=r"^(default|interleave|\d{1,4})$",
            extra={"demand": "must be default, interleave, or the number of a NUMA node"},
            description="NUMA nodes that the server's memory, and so L1, comes from: `default` (the kernel's choice), "
            "`interleave` (page by page over all nodes), or the number of a node, which is used as long as it has "
            "memory. Pages that an earlier server left stay where they are.",
        ),
    ] = "default"
    recut: Annotated[
        bool,
        Meta(
            description="Serve an engine from chunks that an engine of the same model with other tensor- or pipeline-"
            "parallel sizes, another block size or another order of axes has stored."
        ),
    ] = True
    forget_on_exit: Annotated[
        bool,
        Meta(
            description="Remove the pool when the server ends in order (SIGTERM, SIGINT), with what it holds. If "
            "false, the next server adopts it; `kvstrata ctl pool free` frees it."
        ),
    ] = False


class HttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the server's admin HTTP port."""

    enabled: Annotated[bool, Meta(description="Open the admin HTTP port.")] = True


class SecuritySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that guard the sockets and the admin port."""

    insecure: Annotated[bool, Meta(description="Open ports that lack a key or token to everybody.")] = False

    tenants_file: Annotated[
        str,
        Meta(
            description="File of lines `TOKEN TENANT [TENANT ...]`: a process that attaches with the token may use "
            "these tenants, any other process only the unnamed one. Empty: any local process may use any tenant."
        ),
    ] = ""


class ControllerLinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
            "`secret KEY` alone all members share it. Empty: the processes of this user share a key that they find by "
            "themselves, for a cluster on loopback."
        ),
    ] = ""


class P2pSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    tcp: Annotated[
        bool,
        Meta(
            description="UCX may use tcp. Whoever reaches its ports can read and write the memory of the server, so "
            "keep them in a network that only the instances share. If false, UCX uses RDMA cards and, on one host, "
            "shared memory, unless `UCX_TLS` in the environment says otherwise."
        ),
    ] = False
    mac: Annotated[
        bool,
        Meta(
            description="The owner of each record that is read computes its MAC with a key of that read, and only "
            "bytes with that MAC are served, so bytes that somebody has changed on the network are not. Needs a "
            "cluster with keys and the Python package `cryptography`. All peers must use the same value."
        ),
    ] = False
    zone: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra=NAME,
            description="Zone of this instance; it prefers to read from instances of its own zone.",
        ),
    ] = ""
    lookup_timeout_ms: Annotated[
        int,
        Meta(
            extra=LIMIT,
            ge=1,
            le=60_000,
            description="Time for the directory and an owner to answer a lookup.",
        ),
    ] = 250
    load_timeout_ms: Annotated[
        int, Meta(extra=LIMIT, ge=1, le=60_000, description="Time for reading one batch from a peer.")
    ] = 5_000


DEFAULT_PORT = 5555


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `lmcache-server`."""

    instance_id: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra=NAME,
            description="Name of this instance in logs, metrics and files; empty: host name and port.",
        ),
    ] = ""
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65_535)] | None,
        Meta(
            description="Number after which the sockets and the pool are named (5555). No tcp port is opened for it."
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
    security: SecuritySettings = SecuritySettings()
    controller: ControllerLinkSettings = ControllerLinkSettings()
    p2p: P2pSettings = P2pSettings()
    quotas_gb: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1 << 20)]],
        Meta(description="GB that a tenant may have in L1, by tenant name."),
    ] = {}
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    @property
    def named_port(self) -> int:
        """The number after which sockets and pool are named."""
        return DEFAULT_PORT if self.port is None else self.port
