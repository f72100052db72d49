"""`kvstrata migrate FILE…`: from a deployment of LMCache to a configuration of kvstrata.

`read` finds LMCache's settings in its own file (LMCACHE_CONFIG_FILE), or in the `LMCACHE_…` lines of an env file or a
script.  `Migration` translates them into one file for lmcache-server (`--config`) and its engines
(KVSTRATA_CONFIG_FILE).  Names that have no counterpart become comments.

A store that LMCache's settings name becomes an L2 adapter that keeps KV on the same server or in the same directory.
The adapter begins empty, and leaves LMCache's records alone.  No password is copied; the adapter names a file instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kvstrata.cli.boundary import guarded
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.demands import bare_type, canonical, nearest, problems
from kvstrata.config.lmcache import READ_ON, VERSION
from kvstrata.config.lmcache.fates import NEARLY, find, is_on, meant
from kvstrata.config.lmcache.flags import odirect
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    FILE,
    PREFIX,
    VARIABLE_PREFIXES,
    VARIABLES,
)
from kvstrata.config.load import leaves, merge, put
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata.text import one_line

PASSWORD_FILE = "~/kvstrata-remote-password"
LEAST_DISK_GB = 0.25
"""A log of `disk` needs some segments; a smaller tier is of type `fs`."""
_TYPES = dict(leaves(ServerSettings)) | dict(leaves(ClientSettings))
_TARGETS = {
    "max_local_cache_size": "l1.size_gb",
    "max_local_cpu_size": "l1.size_gb",
    "local_cpu_use_hugepages": "l1.use_hugepages",
    "lmcache_instance_id": "instance_id",
}
"""Our setting for a key that gives the server one, where no more is to be said."""
_NOT_TRANSLATED = {
    **dict.fromkeys(
        ("storage_plugins", "external_backends", "remote_storage_plugins"),
        "classes for LMCache do not fit; write an entry of l2_adapters, or an adapter (docs/writing-an-adapter.md)",
    ),
    "remote_serde": 'an adapter\'s "codec" may be zstd',
    "numa_mode": "set l1.numa",
    "enable_controller": "set controller.url to tcp://HOST:8400, the reply port of an lmcache-controller",
    "enable_p2p": "set controller.url: instances find each other by an lmcache-controller, and p2p.listen on each host",
}
"""Keys that ask for something that only a user can write here."""
_HARMLESS = ("naive", "auto")
"""Values of these keys with which they ask for nothing."""
_MOONCAKE = {
    "local_hostname": "local_hostname",
    "metadata_server": "metadata_server",
    "protocol": "protocol",
    "device_name": "rdma_devices",
    "global_segment_size": "global_segment_size",
    "local_buffer_size": "local_buffer_size",
}
"""Keys of `extra_config`, with `mooncake_` before them or not, and the fields of an adapter that they give."""
_OF_ADAPTERS = ("mooncake_", "nixl_", "enable_nixl", "remote_storage_plugin", "valkey_", "storage_root_dir")
"""How those keys begin that say something about a store."""
_LINE = re.compile(rf"(?:^|\s)({PREFIX}[A-Z0-9_]+)=(\"[^\"]*\"|'[^']*'|\{{.*\}}|\S*)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*", re.MULTILINE)


def read(path: str) -> dict[str, Any]:
    """The settings in LMCache's file, or the variables in an env file or a script. Raises ConfigError that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if found := dict(_LINE.findall(_COMMENT.sub("", text))):
            return found
        settings = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", field="config") from None
    if settings is None:
        return {}
    if isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings):
        return dict(settings)
    raise ConfigError(
        f"{path}: must be a mapping of setting names, or lines {PREFIX}NAME=VALUE, found {type(settings).__name__}",
        field="config",
    )


def merged(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of several sources by LMCache's keys; variables win over files, as there, else the first source."""
    values: dict[str, Any] = {}
    for of_variables in (True, False):
        for source in sources:
            for name, value in source.items():
                if name.startswith(PREFIX) is of_variables:
                    values.setdefault(_key(name), value)
    return values


def _key(name: str) -> str:
    """The key of LMCache's file that a variable gives; the variable's own name if it gives none."""
    if not name.startswith(PREFIX) or name == FILE or find(name, VARIABLES, VARIABLE_PREFIXES):
        return name
    return name.removeprefix(PREFIX).lower()


class NotTranslated(Exception):
    """No adapter keeps KV there. The text says why, or what to do."""


def adapter_of(url: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter for LMCache's `remote_url` and `extra_config`. Raises NotTranslated."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise NotTranslated("it is no URL")
    if scheme in ("redis", "rediss", "resp", "valkey", "redis-sentinel", "redis-cluster"):
        return _resp(scheme, rest, extra)
    if scheme == "mooncakestore":
        given = {name: extra.get(f"mooncake_{name}", extra.get(name)) for name in _MOONCAKE}
        entry: dict[str, Any] = {
            "type": "mooncake_store",
            "local_hostname": "localhost",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_addr": extra.get("master_server_address") or rest.strip("/").partition("?")[0],
        }
        return entry | {_MOONCAKE[name]: value for name, value in given.items() if value is not None}
    if scheme == "fs":
        path, *others = (one.strip().rstrip("/") for one in urlsplit(url).path.split(","))
        if others or not path:
            raise NotTranslated("it must name one folder; each of several adapters would get every chunk")
        return {
            "type": "fs",
            "base_path": f"{path}/kvstrata",
            "shared": True,
            **odirect(extra.get("fs_connector_use_odirect")),
        }
    raise NotTranslated(
        f"there is no adapter for {scheme} URLs; docs/remote-tiers.md has those that there are"
    )


def _resp(scheme: str, rest: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    login, _, hosts = rest.rpartition("@")
    user, _, password = login.partition(":")
    user, password = user or str(extra.get("username") or ""), password or str(extra.get("password") or "")
    secret: dict[str, Any] = {**({"username": user} if user else {}), "password_file": PASSWORD_FILE}
    entry: dict[str, Any] = {"type": "resp"}
    addresses = [one.split("://")[-1].strip("/") for one in hosts.split(",") if one.strip("/")]
    if scheme == "redis-cluster":
        entry |= {"startup_nodes": addresses, "cluster_mode": True}
    elif scheme == "redis-sentinel":  # the name is that in REDIS_SERVICE_NAME of LMCache's engines
        entry |= {"sentinels": addresses, "sentinel_master": "mymaster"}
    else:
        try:
            parts = urlsplit(f"//{hosts}")
            host, port = parts.hostname, parts.port or 6379
        except ValueError:
            raise NotTranslated("its port is no number from 1 to 65535") from None
        if not host:
            raise NotTranslated("it names no host")
        entry |= {"host": host, "port": port}
        if (database := parts.path.strip("/")).isdigit():
            entry["database_id"] = int(database)
    if scheme == "rediss" or is_on(extra.get("tls_enable")):
        entry["tls_enable"] = True
    return entry | (secret if password else {})


class Migration:
    """What becomes of the values of one deployment.

    `settings`: nested as in the file.  `failed`: names whose meaning could not be kept, with the reason.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.settings: dict[str, Any] = {}
        self.adapters: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self._values = {name: meant(value) for name, value in values.items()}
        extra = self._values.get("extra_config") or {}
        if isinstance(extra, str):  # of a variable
            with contextlib.suppress(ValueError):
                extra = json.loads(extra)
        if not isinstance(extra, Mapping):
            self.failed["extra_config"] = f"must be an object, found {type(extra).__name__}"
            extra = {}
        self._extra = {str(key): meant(value) for key, value in extra.items()}
        self._stores()
        for name, value in self._values.items():
            self._other(name, value)
        for key, value in self._extra.items():
            if (
                is_on(value)
                and key.startswith(_OF_ADAPTERS)
                and key.removeprefix("mooncake_") not in _MOONCAKE
            ):
                self.failed[f"extra_config.{key}"] = (
                    "write it into the adapter's entry, if it has such a field"
                )

    def text(self, source: str) -> str:
        """The YAML file."""
        # Without a list of adapters the server would keep an L2 on disk, LMCache would not.
        whole = {**self.settings, "l2_adapters": self.adapters}
        body = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)
        lines = [
            f"# kvstrata's configuration from {source} (LMCache {VERSION}, names of {READ_ON}), for",
            "# `lmcache-server --config` and, in KVSTRATA_CONFIG_FILE, for its engines.",
            "# KV that LMCache stored is not read: the cache begins empty.",
            "# Sizes are for the whole host, LMCache's are for each worker process: multiply them by the workers.",
        ]
        if PASSWORD_FILE in body:
            lines.append(
                f"# Write the password into {PASSWORD_FILE}, which only its owner may read (chmod 600)."
            )
        wrong = [f"# {name}: NOT TRANSLATED: {one_line(why)}" for name, why in self.failed.items()]
        names = [name for name in self._values if name not in self.failed]
        return "\n".join([*lines, body.rstrip(), *wrong, f"# From: {one_line(', '.join(names))}"]) + "\n"

    def _set(self, key: str, value: Any, name: str) -> None:
        """Give a setting a value, unless the value is not among those that the setting can have."""
        value = canonical(_TYPES[key], meant(value, bare_type(_TYPES[key])))
        for problem in problems(_TYPES[key], value, key):
            self.failed[name] = f"{problem.path} {problem.says}"
            return
        placed: dict[str, Any] = {}
        put(placed, key, value)
        self.settings = merge(self.settings, placed)

    def _stores(self) -> None:
        path, size_gb = self._values.get("local_disk"), self._values.get("max_local_disk_size")
        if path and size_gb:  # LMCache uses no disk without one of the two
            size_gb = meant(size_gb, float)
            if not isinstance(size_gb, int | float) or size_gb <= 0:
                self.failed["max_local_disk_size"] = f"must be a number above 0, found {size_gb!r:.80}"
            elif isinstance(path, bool):
                self.failed["local_disk"] = f"must be a path, found {path}"
            else:
                path, *others = path if isinstance(path, list) else str(path).split(",")
                if others:
                    left = ", ".join(map(str, others))
                    self.failed["local_disk"] = (
                        f"{left} left out: an adapter has one folder; join disks (RAID 0, LVM)"
                    )
                self.adapters.append({
                    "type": "disk" if size_gb >= LEAST_DISK_GB else "fs",
                    "base_path": f"{str(path).strip().removeprefix('file://').rstrip('/')}/kvstrata",
                    "capacity_gb": size_gb,
                    **odirect(self._extra.get("use_odirect")),
                })  # fmt: skip
        if url := self._values.get("remote_url"):
            try:
                self.adapters.append(adapter_of(str(url), self._extra))
            except NotTranslated as error:
                self.failed["remote_url"] = str(error)

    def _other(self, name: str, value: Any) -> None:
        """A name that needs no more than its entry in the tables."""
        entry = find(name, CLIENT_KEYS, CLIENT_KEY_PREFIXES) or find(name, VARIABLES, VARIABLE_PREFIXES)
        if name in _TARGETS:
            if is_on(value):
                self._set(_TARGETS[name], value, name)
        elif name in _NOT_TRANSLATED:
            if is_on(value) and value not in _HARMLESS:
                self.failed[name] = _NOT_TRANSLATED[name]
        elif entry is None and name in ClientSettings.__struct_fields__:
            self._set(name, value, name)
        elif entry is None and name != FILE:
            self.failed[name] = f"unknown key{nearest(name, CLIENT_KEYS, cutoff=NEARLY)}"
        elif entry is not None and entry.target and name != "mp_host" and value is not None:
            self._set(entry.target, value, name)  # not mp_host: engines attach to their own host's server
        elif entry is not None and entry.asks(value):
            self.failed[name] = entry.say


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata migrate`."""
    top = argparse.ArgumentParser(
        prog="kvstrata migrate",
        description="Prints kvstrata's configuration for a deployment of LMCache, nothing "
        "is written or started. Exit status 1: something could not be translated, as a comment says.",
    )
    top.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="LMCache's file (LMCACHE_CONFIG_FILE) of one deployment, and an env file or script that sets its "
        "LMCACHE_… variables",
    )
    return top


@guarded("kvstrata migrate")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status: 1 if something could not be translated. Raises ConfigError."""
    files = parser().parse_args(arguments).files
    migration, names = Migration(merged([read(file) for file in files])), ", ".join(files)
    print(migration.text(names), end="")
    if migration.failed:
        print(f"kvstrata migrate: {names}: not translated: {', '.join(migration.failed)}", file=sys.stderr)
    return int(bool(migration.failed))
