"""The fields of an entry of type `resp`. A wrong field raises ConfigError; no error shows a password."""

from __future__ import annotations

import os
import re
import ssl
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says
from kvstrata.config.private_file import read_private_file
from kvstrata.patience import patience
from kvstrata.text import remember_secret
from kvstrata.tiers.config import Make, Medium
from kvstrata.tiers.media.resp.adapter import RespAdapter
from kvstrata.tiers.media.resp.servers import Address, RespServers
from kvstrata.tiers.media.shared import NumWorkers, PerOpWorkers
from kvstrata.tiers.structs import Place

PORT, SENTINEL_PORT = 6379, 26379
PREFIX = re.compile(r"[A-Za-z0-9_.:/@-]{1,64}")
"""A valid `key_prefix`: no wildcards of SCAN, and no braces, which would put all keys of a cluster into one slot."""
PLACES = ("host", "startup_nodes", "sentinels")
PASSWORDS = ("password", "password_file")
TLS_FIELDS = ("tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name")


class RespConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis or Valkey server, a cluster of them, or the master that sentinels name."""

    # fmt: off
    host: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "Host of the server. Exactly one of `host`, `startup_nodes` and `sentinels` is required.",
        extra={"empty": True})] = None
    port: Annotated[Annotated[int, Meta(ge=1, le=65535)] | None, says("Port of `host`; not set: 6379.")] = None
    startup_nodes: Annotated[Any, says(
        "Addresses of a cluster's servers: `\"host:port\"`, several separated by commas or as a list.")] = None
    cluster_mode: Annotated[bool, says("The servers form a cluster.")] = False
    sentinels: Annotated[Any, says("Addresses of sentinels, as in `startup_nodes`.")] = None
    sentinel_master: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "Name of the master that the sentinels watch.")] = None
    sentinel_password_file: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "Private file with the sentinels' password; not set: the servers' password.", extra={"empty": True})] = None
    database_id: Annotated[Annotated[int, Meta(ge=0, le=1 << 20)] | None, says(
        "Number of the database; not set: 0.")] = None
    username: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "Name of the user; needs a password.", extra={"empty": True})] = None
    password: Annotated[str | None, says("Password, in plain text.", extra={"secret": True, "empty": True})] = None
    password_file: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "Private file with the password.", extra={"empty": True})] = None
    tls_enable: Annotated[bool, says("Use TLS.")] = False
    tls_ca_file: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "File with the CA certificates that verify the server's certificate; not set: the system's.")] = None
    tls_cert_file: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "File with this client's certificate.")] = None
    tls_key_file: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "File with the key of that certificate; not set: the certificate's file has the key.")] = None
    tls_server_name: Annotated[Annotated[str, Meta(min_length=1)] | None, says(
        "Name that the server's certificate must have; not set: its address.")] = None
    key_prefix: Annotated[str, says(
        "Prefix of every key; instances that share records must have the same one.", min_length=1)] = "kvstrata:"
    ttl_seconds: Annotated[float, says("Seconds that a record lives after its put; 0: no limit.", ge=0, le=1 << 31)] = 0
    max_capacity_gb: Annotated[float, says(
        "Puts stop while the servers use more GB of memory than this; 0: no cap.", ge=0, le=1 << 30)] = 0
    deadline_ms: Annotated[Annotated[int, Meta(ge=1, le=600_000)] | None, says("As for every type.")] = None
    request_timeout: Annotated[Annotated[float, Meta(ge=0.001, le=600)] | None, says(
        "Seconds to wait for an answer; not set: `deadline_ms`, or 5 s.")] = None
    connection_timeout: Annotated[float, says("Seconds to wait for a connection.", ge=0.01, le=600)] = 2.0
    # fmt: on
    num_workers: NumWorkers = 8
    per_op_workers: PerOpWorkers = {}

    def __repr__(self) -> str:
        return "RespConfig(...)"  # the fields would show the password in a log


def _servers(config: RespConfig, place: Place) -> RespServers:
    source, addresses = _named(config, place)
    _check_mode(config, source, addresses, place)
    _check_sentinel_name(config, source, place)
    if config.cluster_mode and config.database_id:
        raise place.hidden("database_id", "must be 0 or not set, since a cluster has only database 0")
    tls = _tls(config, place)
    password = _password(config, place)
    return RespServers(
        addresses=addresses,
        cluster=config.cluster_mode,
        master_name=config.sentinel_master or "",
        username=config.username or "",
        password=password,
        sentinel_password=_password_in("sentinel_password_file", config, place),
        database=config.database_id or 0,
        tls=tls,
        tls_server_name=config.tls_server_name or "",
        connection_timeout_s=patience(config.connection_timeout),
    )


def _named(config: RespConfig, place: Place) -> tuple[str, tuple[Address, ...]]:
    """The field that says where the servers are, and their addresses. Raises ConfigError."""
    source = _one_of(config, place, PLACES)
    if source is None:
        must = f"must name the server if none of {', '.join(PLACES[1:])} is given"
        raise place.wrong("host", config.host, must)
    if source != "host" and config.port is not None:
        must = f"belongs to host; remove it, {source} already says where the server is"
        raise place.wrong("port", config.port, must)
    if config.host is not None:
        return source, (Address(config.host, config.port or PORT),)
    default_port = SENTINEL_PORT if source == "sentinels" else PORT
    return source, _addresses(getattr(config, source), default_port, place, source)


def _check_mode(config: RespConfig, source: str, addresses: tuple[Address, ...], place: Place) -> None:
    """Raises ConfigError unless `cluster_mode` fits the field that says where the servers are."""
    if source == "startup_nodes" and len(addresses) > 1 and not config.cluster_mode:
        must = "must be one server unless cluster_mode is true"
        raise place.wrong("startup_nodes", config.startup_nodes, must)
    if source == "sentinels" and config.cluster_mode:
        must = "must not be true with sentinels: give startup_nodes of the cluster"
        raise place.wrong("cluster_mode", True, must)


def _check_sentinel_name(config: RespConfig, source: str, place: Place) -> None:
    """Raises ConfigError unless `sentinel_master` is given with sentinels, and what belongs to them only with them."""
    if source == "sentinels" and config.sentinel_master is None:
        raise place.wrong("sentinel_master", None, "must be a non-empty string")
    for name in ("sentinel_master", "sentinel_password_file"):
        if source != "sentinels" and (value := getattr(config, name)) is not None:
            raise place.wrong(name, value, "needs `sentinels`, their addresses")


def _addresses(value: Any, default_port: int, place: Place, name: str) -> tuple[Address, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise place.wrong(name, value, 'must be "host:port", or several separated by commas or as a list')
    addresses = []
    for text in texts:
        match = re.fullmatch(r"\s*(?:\[([^\]]+)\]|([^:\[\]\s/@]+))(?::(\d{1,5}))?\s*", text)
        port = int(match[3] or default_port) if match else 0
        if match is None or not 0 < port < 65536:
            must = f'must contain only addresses "host:port", but has {text.strip()!r:.80}'
            raise place.wrong(name, value, must)
        addresses.append(Address(match[1] or match[2], port))
    return tuple(addresses)


def _password(config: RespConfig, place: Place) -> str:
    password = config.password or ""
    if _one_of(config, place, PASSWORDS) == "password":
        remember_secret(password)
    else:
        password = _password_in("password_file", config, place)
    if config.username and not password:
        raise place.hidden("username", "a username needs a password: give password_file or password")
    return password


def _password_in(name: str, config: RespConfig, place: Place) -> str:
    """The password in the file that this field names; empty without one."""
    if (path := getattr(config, name)) is None:
        return ""
    password = read_private_file(os.path.expanduser(path), place.at(name)).rstrip("\r\n")
    if not password:
        raise place.wrong(name, path, "is empty; write the password into it")
    remember_secret(password)
    return password


def _tls(config: RespConfig, place: Place) -> ssl.SSLContext | None:
    given: dict[str, str] = {}
    for name in TLS_FIELDS:
        if (value := getattr(config, name)) is None:
            continue
        if not config.tls_enable:
            raise place.wrong(name, value, "needs tls_enable true")
        if name == "tls_key_file" and config.tls_cert_file is None:
            raise place.wrong(name, value, "needs tls_cert_file")
        if name != "tls_server_name" and not os.path.isfile(os.path.expanduser(value)):
            raise place.wrong(name, value, "must be an existing file")
        given[name] = value
    if not config.tls_enable:
        return None
    files = {name: os.path.expanduser(path) for name, path in given.items()}
    name = "tls_ca_file"
    try:
        context = ssl.create_default_context(cafile=files.get(name))
        if "tls_cert_file" in files:
            name = "tls_cert_file"
            context.load_cert_chain(files[name], files.get("tls_key_file"))
    except OSError as error:
        raise place.wrong(name, given.get(name), f"cannot be used ({error})") from None
    return context


def _one_of(config: RespConfig, place: Place, names: tuple[str, ...]) -> str | None:
    given = [name for name in names if getattr(config, name) not in (None, "")]
    if len(given) > 1:
        raise place.hidden(given[1], f"{given[0]} is given too; give one of {', '.join(names)}")
    return given[0] if given else None


def _prepare(config: RespConfig, place: Place, name: str) -> Make:
    servers = _servers(config, place)
    if PREFIX.fullmatch(config.key_prefix) is None:
        raise place.wrong("key_prefix", config.key_prefix, "must be 1 to 64 letters, digits and _ . : / @ -")
    return lambda: RespAdapter(config, servers, name=name)


MEDIUM = Medium(RespConfig, _prepare)
