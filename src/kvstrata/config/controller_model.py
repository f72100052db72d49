"""Settings of the controller."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import HTTP_HOST, LIMIT, NAME, ListenSettings, PortSecuritySettings
from kvstrata.config.log_model import LogFormat, LogLevel


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class MonitorPorts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class DirectorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
            extra=LIMIT,
            ge=0.1,
            le=86_400,
            description="Silence after which an instance is dead and its chunks are forgotten, in seconds; at least "
            "twice `heartbeat_s`.",
        ),
    ] = 30.0
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
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
