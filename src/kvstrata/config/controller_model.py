"""Settings of the controller."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import (
    HTTP_HOST,
    NAME,
    ListenSettings,
    LogFormat,
    LogLevel,
    PortSecuritySettings,
    says,
)

# fmt: off
PeerHost = Annotated[str, Meta(
    pattern=r"^[A-Za-z0-9._:/-]{1,253}$",
    extra={"demand": "must be a host's name, an address, or a network such as 10.1.0.0/16"})]


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of several controllers, one of which leads."""

    endpoints: Annotated[list[str], says(
        "etcd servers as HOST:PORT, or https://HOST:PORT for TLS, tried one after the other; empty: this controller "
        "is the only one.")] = []
    prefix: Annotated[str, says(
        "Prefix of all of kvstrata's keys in etcd.",
        pattern=r"^[A-Za-z0-9._/-]{1,200}$", demand="must be 1 to 200 letters, digits and . _ / -")] = "kvstrata"
    ttl_s: Annotated[int, says("Silence after which another controller leads, in seconds.", ge=1, le=600)] = 5
    advertise_url: Annotated[str, says(
        "URL at which users and other controllers reach this controller's HTTP API; empty: `http://`, `http.host` and "
        "the port.", pattern=r"^(https?://[^\s]+)?$", demand="must be an http:// or https:// URL, or empty")] = ""
    user: Annotated[str, says("User of etcd, if etcd requires one.")] = ""
    password_file: Annotated[str, says("File with that user's password, readable by its owner only.")] = ""
    ca_file: Annotated[str, says(
        "CA certificates (PEM) that verify etcd's certificate; empty: those shipped with gRPC.")] = ""
    cert_file: Annotated[str, says(
        "This controller's certificate (PEM), if etcd requires one (`--client-cert-auth`).")] = ""
    key_file: Annotated[str, says("Key of `cert_file` (PEM, no passphrase), readable by its owner only.")] = ""


class MonitorPorts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controller's ZMQ port."""

    reply: Annotated[int, says(
        "Port for registrations, lookups and gateways; 0 takes a free one.", ge=0, le=65_535)] = 8400
    pull: Annotated[int | None, says("Has no effect: the controller polls instances at their own ports.")] = None
    heartbeat: Annotated[int | None, says("Has no effect, for the same reason.")] = None


class ControllerHttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the controller's HTTP port: API, dashboard and metrics."""

    host: Annotated[str, says(HTTP_HOST, min_length=1)] = "localhost"
    port: Annotated[int, says("Port; 0 takes a free one.", ge=0, le=65_535)] = 9000


class DirectorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the directory, the controller's map from chunks to instances."""

    max_gb: Annotated[float, says("Memory for placements, in GB; each takes about 11 bytes.", ge=0.0625, le=1024)] = 4.0
    snapshot_dir: Annotated[str, says(
        "Folder of the snapshot and of admins' orders (drains, removals); empty: kvstrata/controller-PORT in "
        "XDG_STATE_HOME, or in ~/.local/state; `none`: neither is kept.")] = ""
    snapshot_s: Annotated[float, says("Time between two snapshots, in seconds.", ge=1, le=86_400)] = 30.0


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `lmcache-controller`."""

    name: Annotated[str, says(
        "Name of this controller in logs and in its answers; empty: host name and reply port.",
        pattern=r"^[A-Za-z0-9._-]{0,64}$", demand=NAME)] = ""
    http: ControllerHttpSettings = ControllerHttpSettings()
    monitor_host: Annotated[str, says(
        "Address of the ZMQ port; empty: that of `http.host`.")] = ""
    monitor_ports: MonitorPorts = MonitorPorts()
    heartbeat_s: Annotated[float, says(
        "Silence after which an instance is late, in seconds; it is then polled twice as often.",
        ge=0.05, le=3_600)] = 10.0
    dead_after_s: Annotated[float, says(
        "Silence after which an instance is dead and its chunks are dropped from the directory, in seconds; at least "
        "twice `heartbeat_s`.", limit=True, ge=0.1, le=86_400)] = 30.0
    peer_hosts: Annotated[list[PeerHost], says(
        "Hosts that instances may name in `p2p.advertise`, besides the source of their connection: names, addresses, "
        "or networks such as `10.1.0.0/16`.")] = []
    copies_mb_s: Annotated[float, says(
        "Bandwidth for copying hot prefixes ahead of requests, for all instances together, in MB (2^20 bytes) per "
        "second; 0: no copies.", ge=0, le=1_000_000)] = 100.0
    directory: DirectorySettings = DirectorySettings()
    etcd: EtcdSettings = EtcdSettings()
    security: PortSecuritySettings = PortSecuritySettings()
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
