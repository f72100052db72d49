"""From a store that LMCache's settings name to an L2 adapter that keeps KV on the same server, bucket or directory.

The records of the two are not the same: the adapter begins empty, and leaves LMCache's records alone.  No password is
copied; the adapter names a variable in its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvstrata.config.lmcache.fates import is_on, meant

PASSWORD_ENV = "KVSTRATA_REMOTE_PASSWORD"
_S3 = re.compile(r"(?P<bucket>[a-z0-9.-]+?)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com")
_SETUP = ("protocol", "device_name", "global_segment_size", "local_buffer_size")
_NOT_FOR_SETUP = ("transfer_timeout", "storage_root_dir", "prefer_local_alloc")
"""Mooncake's options that LMCache passes on from `extra_config`, and those that it keeps to itself."""
_NIXL_FIELDS = ("type", "backend", "backend_params", "pool_size", "persist_enabled")
_NO_ADAPTER = {
    "lm": "lmcache_server has no counterpart: let hosts share an adapter of type resp, or read from each other in a "
    "cluster (docs/cluster.md)",
    "infinistore": "there is no adapter for InfiniStore; a plugin can provide one (docs/writing-an-adapter.md)",
    "blackhole": "it stores nothing",
    "mock": "it stores nothing",
}


class Field(NamedTuple):
    """A field of an adapter, and a comment for it."""

    name: str
    value: Any
    comment: str = ""


class NotTranslated(Exception):
    """No adapter keeps KV there. The text says why, or what to do."""


def adapter_of(url: str, extra: Mapping[str, Any]) -> list[Field]:
    """The fields of the adapter. Raises NotTranslated.

    `extra`: LMCache's `extra_config`.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise NotTranslated("it is no URL")
    if scheme in ("redis", "rediss", "resp", "valkey"):
        return _one_server(scheme, url, extra)
    if scheme in ("redis-sentinel", "redis-cluster"):
        return _several_servers(scheme, rest)
    if scheme == "mooncakestore":
        return _mooncake(rest, extra)
    if scheme == "fs":
        return directory(urlsplit(url).path, extra)
    if scheme == "s3":
        return _bucket(rest, extra)
    if scheme == "azure":
        return _azure(rest, extra)
    why = f"there is no adapter for {scheme}; a plugin can provide one (docs/writing-an-adapter.md)"
    raise NotTranslated(_NO_ADAPTER.get(scheme, why))


def _one_server(scheme: str, url: str, extra: Mapping[str, Any]) -> list[Field]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise NotTranslated("its port is no number from 1 to 65535") from None
    if not host:
        raise NotTranslated("it names no host")
    address = f"{host}:{port or 6379}"
    if scheme == "valkey" and extra.get("valkey_mode") == "cluster":
        fields = [Field("type", "resp"), Field("startup_nodes", [address]), Field("cluster_mode", True)]
    else:
        fields = [Field("type", "resp"), Field("host", host), Field("port", port or 6379)]
        database = parts.path.strip("/") or str(extra.get("valkey_database") or "")
        if database.isdigit():
            fields.append(Field("database_id", int(database)))
    if scheme == "rediss" or is_on(extra.get("tls_enable")):
        fields.append(Field("tls_enable", True))
    user, password = (
        getattr(parts, name) or extra.get(f"valkey_{name}") or extra.get(name)
        for name in ("username", "password")
    )
    return fields + _login(user, password)


def _several_servers(scheme: str, rest: str) -> list[Field]:
    login, _, hosts = rest.rpartition("@")
    addresses = [one.split("://")[-1].strip("/") for one in hosts.split(",") if one.strip("/")]
    user, _, password = login.partition(":")
    if scheme == "redis-cluster":
        fields = [Field("type", "resp"), Field("startup_nodes", addresses), Field("cluster_mode", True)]
    else:
        why = "the name in REDIS_SERVICE_NAME of LMCache's engines"
        fields = [
            Field("type", "resp"),
            Field("sentinels", addresses),
            Field("sentinel_master", "mymaster", why),
        ]
    return fields + _login(user, password)


def _mooncake(rest: str, extra: Mapping[str, Any]) -> list[Field]:
    def given(name: str) -> Any:
        return extra.get(f"mooncake_{name}", extra.get(name))

    fields = [
        Field("type", "mooncake_store"),
        Field(
            "local_hostname", given("local_hostname") or "localhost", "the name of this host in the cluster"
        ),
        Field("metadata_server", given("metadata_server") or "P2PHANDSHAKE"),
        Field("master_server_addr", given("master_server_address") or rest.strip("/").partition("?")[0]),
    ]
    named = {field.name for field in fields} | {"master_server_address", *_NOT_FOR_SETUP}
    for name in (
        *_SETUP,
        *(key.removeprefix("mooncake_") for key in extra if key.startswith("mooncake_")),
    ):
        if name not in named and given(name) is not None:
            named.add(name)
            fields.append(Field("rdma_devices" if name == "device_name" else name, given(name)))
    if (timeout_s := meant(given("transfer_timeout"), float)) is not None:
        fields.append(Field("deadline_ms", int(timeout_s * 1000), "from transfer_timeout"))
    return fields


def directory(paths: str, extra: Mapping[str, Any]) -> list[Field]:
    """The adapter for the first of these folders, which are separated by commas. Raises NotTranslated."""
    path = paths.partition(",")[0].strip().rstrip("/")
    if not path:
        raise NotTranslated("it names no directory")
    own = "a folder of its own beside LMCache's files"
    shared = "other servers may use the directory too; false if it is on this host's own disk"
    fields = [Field("type", "fs"), Field("base_path", f"{path}/kvstrata", own), Field("shared", True, shared)]
    direct = next((key for key in ("fs_connector_use_odirect", "use_direct_io") if key in extra), "")
    return fields + odirect(extra.get(direct))


def odirect(asked: object) -> list[Field]:
    """Whether a folder's files are read and written past the page cache, if that was asked for or against."""
    return [] if (asked := meant(asked, bool)) is None else [Field("use_odirect", asked, "as there")]


def entry_of_ours(entry: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """An entry of `--l2-adapter` with a type of ours, and what is to be said if its type was LMCache's `nixl_store`.

    An entry of any other type is returned as it is.
    """
    params = entry.get("backend_params")
    kind = entry.get("type")
    if kind not in ("nixl_store", "nixl_store_dynamic") or entry.get("backend") != "POSIX":
        return entry, ""
    if not isinstance(params, Mapping) or not params.get("file_path"):
        return entry, ""
    path = f"{str(params['file_path']).rstrip('/')}/kvstrata"
    fields = [Field("type", "fs"), Field("base_path", path), *odirect(params.get("use_direct_io"))]
    if capacity_gb := meant(params.get("max_capacity_gb"), float):
        fields.append(Field("capacity_gb", capacity_gb))
    others = {name: value for name, value in entry.items() if name not in _NIXL_FIELDS}
    cap = "" if capacity_gb else ", without a cap: capacity_gb sets one"
    return others | {
        one.name: one.value for one in fields
    }, f"{kind} with POSIX is taken as fs in {path}{cap}"


def _bucket(rest: str, extra: Mapping[str, Any]) -> list[Field]:
    found = _S3.fullmatch(rest.strip("/"))
    if found is None or found["region"].startswith("express"):
        raise NotTranslated(
            'write {"type": "object_store", "url": "s3://BUCKET/PREFIX", "endpoint": "https://…"}'
        )
    return [
        Field("type", "object_store"),
        Field(
            "url", f"s3://{found['bucket']}/kvstrata", "credentials are not copied: see docs/remote-tiers.md"
        ),
        Field("region", extra.get("s3_region") or found["region"]),
    ]


def _azure(rest: str, extra: Mapping[str, Any]) -> list[Field]:
    account = re.fullmatch(r"https://([a-z0-9]+)\.blob\..*", str(extra.get("azure_account_url")))
    container = rest.strip("/")
    if account is None or not container:
        raise NotTranslated(
            'write {"type": "object_store", "url": "az://CONTAINER/PREFIX", "account_name": "…"}'
        )
    return [
        Field("type", "object_store"),
        Field("url", f"az://{container}/kvstrata", "credentials are not copied: see docs/remote-tiers.md"),
        Field("account_name", account[1]),
    ]


def _login(user: object, password: object) -> list[Field]:
    fields = [Field("username", str(user))] if user and password else []
    if password:
        fields.append(Field("password_env", PASSWORD_ENV, "set this variable of the server to the password"))
    return fields
