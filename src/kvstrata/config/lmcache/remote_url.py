"""From `remote_url` of LMCache to an L2 adapter that keeps KV on the same server, bucket or directory.

The records of the two are not the same: the adapter begins empty, and leaves LMCache's records alone.  No password is
copied; the adapter names a variable in its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

PASSWORD_ENV = "KVSTRATA_REMOTE_PASSWORD"
_S3 = re.compile(r"(?P<bucket>[a-z0-9.-]+?)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com")
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
        return _directory(url)
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
    if scheme == "rediss" or str(extra.get("tls_enable")).lower() == "true":
        fields.append(Field("tls_enable", True))
    user, password = _credentials(parts)
    return fields + _login(user or extra.get("valkey_username"), password or extra.get("valkey_password"))


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
    for name, ours in (
        ("protocol", "protocol"),
        ("device_name", "rdma_devices"),
        ("global_segment_size", "global_segment_size"),
        ("local_buffer_size", "local_buffer_size"),
    ):
        if given(name):
            fields.append(Field(ours, given(name)))
    return fields


def _directory(url: str) -> list[Field]:
    path = urlsplit(url).path.partition(",")[0].rstrip("/")
    if not path:
        raise NotTranslated("it names no directory")
    own = "a folder of its own beside LMCache's files"
    shared = "other servers may use the directory too; false if it is on this host's own disk"
    return [Field("type", "fs"), Field("base_path", f"{path}/kvstrata", own), Field("shared", True, shared)]


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


def _credentials(parts: SplitResult) -> tuple[str, str]:
    return parts.username or "", parts.password or ""


def _login(user: object, password: object) -> list[Field]:
    fields = [Field("username", str(user))] if user and password else []
    if password:
        fields.append(Field("password_env", PASSWORD_ENV, "set this variable of the server to the password"))
    return fields
