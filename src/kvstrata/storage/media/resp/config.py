"""From the fields of a `resp` entry to settings. Whatever is wrong is a ConfigError; none shows a password."""

from __future__ import annotations

import os
import re
import ssl
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError
from kvstrata.storage.media.resp.adapter import RespSettings
from kvstrata.storage.media.resp.servers import Address, RespServers

if TYPE_CHECKING:
    from kvstrata.storage.fields import Fields

GB = 1 << 30
PORT, SENTINEL_PORT = 6379, 26379
PREFIX = re.compile(r"[A-Za-z0-9_.:/@-]{1,64}")
"""No braces, which would put all keys of a cluster into one slot; nothing that means something to SCAN."""
PLACES = ("url", "host", "startup_nodes", "sentinels")
PASSWORDS = ("password", "password_file", "password_env")
TLS_FIELDS = ("tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name")


def settings_from(fields: Fields) -> RespSettings:
    """Checked settings; nothing is connected. Raises ConfigError."""
    servers = _servers(fields)
    prefix = fields.text("key_prefix", "kvstrata:")
    if PREFIX.fullmatch(prefix) is None:
        raise fields.wrong("key_prefix", "must be 1 to 64 letters, digits and _ . : / @ -")
    deadline_ms = fields.number("deadline_ms", 5_000, least=1, most=600_000, whole=True) or 0
    timeout_s = fields.number("request_timeout", deadline_ms / 1000, least=0.001, most=600) or 0
    settings = RespSettings(
        servers=servers,
        key_prefix=prefix,
        ttl_ms=int((fields.number("ttl_seconds", 0, least=0, most=1 << 31) or 0) * 1000),
        capacity_bytes=int((fields.number("max_capacity_gb", 0, least=0, most=1 << 30) or 0) * GB),
        request_timeout_s=timeout_s,
        num_workers=int(fields.number("num_workers", 8, least=1, most=256, whole=True) or 8),
        per_op_workers=fields.workers("per_op_workers"),
    )
    fields.finish()
    return settings


class _Url(NamedTuple):
    address: Address
    username: str
    database: int | None
    tls: bool


def _servers(fields: Fields) -> RespServers:
    place = _one_of(fields, PLACES)
    if place is None:
        raise fields.wrong("host", f"must name the server, or give {', '.join(PLACES[2:])} or url instead")
    if place != "host" and fields.get("port") is not None:
        raise fields.wrong("port", f"goes with host; remove it, {place} says where the server is")
    url = _url(fields) if place == "url" else None
    if url is not None:
        addresses: tuple[Address, ...] = (url.address,)
    elif place == "host":
        port = fields.number("port", PORT, least=1, most=65535, whole=True)
        addresses = (Address(fields.text("host"), int(port or 0)),)
    else:
        addresses = _addresses(fields, place, SENTINEL_PORT if place == "sentinels" else PORT)
    cluster = fields.flag("cluster_mode", False)
    if place == "startup_nodes" and len(addresses) > 1 and not cluster:
        raise fields.wrong("startup_nodes", "must be one server unless cluster_mode is true")
    if place == "sentinels":
        if cluster:
            raise fields.wrong(
                "cluster_mode", "must not be true with sentinels: give startup_nodes of the cluster"
            )
        master_name = fields.text("sentinel_master")
    else:
        master_name = ""
        if fields.get("sentinel_master") is not None:
            raise fields.wrong("sentinel_master", "goes with sentinels, the addresses of the sentinels")
    database = int(fields.number("database_id", 0, least=0, most=1 << 20, whole=True) or 0)
    if url is not None and url.database is not None:
        if fields.get("database_id") is not None:
            raise fields.wrong("database_id", "is in url too; give one of them")
        database = url.database
    if cluster and database:
        raise _wrong(
            fields,
            "url" if url is not None and url.database else "database_id",
            "a cluster has database 0 only",
        )
    username, password = _credentials(fields, url)
    return RespServers(
        addresses=addresses,
        cluster=cluster,
        master_name=master_name,
        username=username,
        password=password,
        database=database,
        tls=_tls(fields, url),
        tls_server_name=fields.text("tls_server_name", "")
        if fields.get("tls_server_name") is not None
        else "",
        connection_timeout_s=fields.number("connection_timeout", 2.0, least=0.01, most=600) or 0,
    )


def _url(fields: Fields) -> _Url:
    """One that holds a password is refused: it would be shown wherever the entry is, here it is not."""
    text = fields.get("url")
    if not isinstance(text, str):
        raise _wrong(fields, "url", "must be a non-empty string")
    try:
        parts: SplitResult = urlsplit(text)
        host, port = parts.hostname, parts.port or PORT
    except ValueError:
        raise _wrong(fields, "url", "its port must be a number from 1 to 65535") from None
    if (
        parts.scheme not in ("redis", "rediss", "valkey", "valkeys")
        or not host
        or parts.query
        or parts.fragment
    ):
        raise _wrong(fields, "url", "must be redis://[user@]host[:port][/database], or rediss:// for TLS")
    if parts.password is not None:
        raise _wrong(fields, "url", "must hold no password: use password_file, password_env or password")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise _wrong(fields, "url", "its path must be the number of a database")
    return _Url(
        Address(host, port),
        unquote(parts.username or ""),
        int(database) if database else None,
        parts.scheme in ("rediss", "valkeys"),
    )


def _addresses(fields: Fields, name: str, default_port: int) -> tuple[Address, ...]:
    value = fields.get(name)
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise fields.wrong(name, 'must be "host:port", several with commas between or as a list')
    addresses = []
    for text in texts:
        match = re.fullmatch(r"\s*(?:\[([^\]]+)\]|([^:\[\]\s/@]+))(?::(\d{1,5}))?\s*", text)
        port = int(match[3] or default_port) if match else 0
        if match is None or not 0 < port < 65536:
            raise fields.wrong(name, f'must hold "host:port" each, {text.strip()!r:.80} is none')
        addresses.append(Address(match[1] or match[2], port))
    return tuple(addresses)


def _credentials(fields: Fields, url: _Url | None) -> tuple[str, str]:
    source = _one_of(fields, PASSWORDS)
    username = fields.text("username", "") if fields.get("username") not in (None, "") else ""
    password = ""
    if source == "password":
        value = fields.get("password")
        if not isinstance(value, str):
            raise _wrong(fields, "password", "must be a string")
        password = value
    elif source == "password_file":
        path = os.path.expanduser(fields.text("password_file"))
        password = read_private_file(path, f"{fields.path}.password_file").rstrip("\r\n")
        if not password:
            raise fields.wrong("password_file", "is empty, write the password into it")
    elif source == "password_env":
        password = os.environ.get(fields.text("password_env"), "")
        if not password:
            raise fields.wrong("password_env", "must name an environment variable that holds the password")
    if url is not None and url.username:
        if username:
            raise fields.wrong("username", "is in url too; give one of them")
        username = url.username
    if username and not password:
        raise _wrong(
            fields, "username", "a username needs a password: give password_file, password_env or password"
        )
    return username, password


def _tls(fields: Fields, url: _Url | None) -> ssl.SSLContext | None:
    given = [name for name in TLS_FIELDS if fields.get(name) is not None]
    enabled = fields.flag("tls_enable", url is not None and url.tls)
    if not enabled:
        if url is not None and url.tls:
            raise fields.wrong("tls_enable", "must not be false with a URL that says TLS")
        if given:
            raise fields.wrong(given[0], "needs tls_enable true, or a rediss:// URL")
        return None
    files = {name: os.path.expanduser(fields.text(name)) for name in given if name != "tls_server_name"}
    if "tls_key_file" in files and "tls_cert_file" not in files:
        raise fields.wrong("tls_key_file", "goes with tls_cert_file")
    for name, path in files.items():
        if not os.path.isfile(path):
            raise fields.wrong(name, "must be a file that is there")
    name = "tls_ca_file"
    try:
        context = ssl.create_default_context(cafile=files.get(name))
        if "tls_cert_file" in files:
            name = "tls_cert_file"
            context.load_cert_chain(files[name], files.get("tls_key_file"))
    except OSError as error:
        raise fields.wrong(name, f"cannot be used ({error})") from None
    return context


def _one_of(fields: Fields, names: tuple[str, ...]) -> str | None:
    given = [name for name in names if fields.get(name) not in (None, "")]
    if len(given) > 1:
        raise _wrong(fields, given[1], f"{given[0]} is given too; give one of {', '.join(names)}")
    return given[0] if given else None


def _wrong(fields: Fields, name: str, must: str) -> ConfigError:
    """As `fields.wrong`, for a value that may be a secret."""
    where = f"{fields.path}.{name}"
    return ConfigError(f"{where}: {must}", field=where)
