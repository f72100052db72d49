"""`kvstrata migrate FILE…`: from a deployment of LMCache to a configuration of kvstrata.

`read` finds LMCache's settings in its own file (LMCACHE_CONFIG_FILE), or in the `LMCACHE_…` lines of an env file or a
script.  `Migration` translates them into one file for
lmcache-server (`--config`) and its engines (KVSTRATA_CONFIG_FILE).  Names that have no counterpart become comments.

A store that LMCache's settings name becomes an L2 adapter that keeps KV on the same server, bucket or directory.  The
adapter begins empty, and leaves LMCache's records alone.  No password is copied; the adapter names a file instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kvstrata.cli.boundary import guarded
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.demands import bare_type, canonical, nearest, problems
from kvstrata.config.flags import CLASSIC_POLICIES
from kvstrata.config.lmcache import READ_ON, VERSION
from kvstrata.config.lmcache.fates import NEARLY, NO_NAMES, find, is_on, meant
from kvstrata.config.lmcache.flags import odirect
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    FILE,
    PREFIX,
    VARIABLE_PREFIXES,
    VARIABLES,
)
from kvstrata.config.load import leaves
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata.text import one_line

PASSWORD_FILE = "~/kvstrata-remote-password"
LEAST_DISK_GB = 0.25
"""A log of `disk` needs some segments; a smaller tier is of type `fs`."""
_TYPES = dict(leaves(ServerSettings)) | dict(leaves(ClientSettings))
_NO_PLUGINS = "classes for LMCache do not fit; write an adapter of type plugin (docs/writing-an-adapter.md)"
_DANGEROUS_EXTRA = {
    "storage_root_dir": "set MOONCAKE_STORAGE_ROOT_DIR in the environment of lmcache-server to it",
    "prefer_local_alloc": '"replicate": {"preferred_segment": "HOST:PORT"} of the adapter names one place',
}
"""Keys of `extra_config` whose meaning would be lost, also with `mooncake_` before them."""

# --- settings in files ------------------------------------------------------------------------------------------------

_LINE = re.compile(rf"(?:^|\s)({PREFIX}[A-Z0-9_]+)=(\"[^\"]*\"|'[^']*'|\{{.*\}}|\S*)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*", re.MULTILINE)

Found = tuple[str, Any]
"""A setting as a source spells it: the key of a file, or a variable, and its value."""


def merged(sources: Iterable[Sequence[Found]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of several sources, and what is said of those that have two values.

    Variables win over files, as in LMCache; else the first source wins.
    """
    values: dict[str, Any] = {}
    twice: dict[str, str] = {}
    found = [one for source in sources for one in source]
    for of_variables in (True, False):
        given: dict[str, Any] = {}
        for name, value in found:
            if name.startswith(PREFIX) is of_variables:
                key = _key(name)
                if str(meant(given.setdefault(key, value))) != str(meant(value)):
                    twice[key] = "it has two values; the first one is kept, migrate the other one by itself"
        values = given | values
    return values, twice


def read(path: str) -> list[Found]:
    """The settings in LMCache's file, or the variables in an env file or a script. Raises ConfigError that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if found := _LINE.findall(_COMMENT.sub("", text)):
            return found
        settings = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", field="config") from None
    if settings is None:
        return []
    if isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings):
        return list(settings.items())
    raise ConfigError(
        f"{path}: must be a mapping of setting names, or lines {PREFIX}NAME=VALUE, found {type(settings).__name__}",
        field="config",
    )


def _key(name: str) -> str:
    """The key of LMCache's file that a variable gives; the variable's own name if it gives none."""
    if not name.startswith(PREFIX) or name == FILE or find(name, VARIABLES, VARIABLE_PREFIXES):
        return name
    return name.removeprefix(PREFIX).lower()


# --- stores -----------------------------------------------------------------------------------------------------------


class NotTranslated(Exception):
    """No adapter keeps KV there. The text says why, or what to do."""


def adapter_of(url: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter for LMCache's `remote_url` and `extra_config`. Raises NotTranslated."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise NotTranslated("it is no URL")
    if scheme in ("redis", "rediss", "resp", "valkey"):
        return _one_server(scheme, url, extra)
    if scheme in ("redis-sentinel", "redis-cluster"):
        login, _, hosts = rest.rpartition("@")
        addresses = [one.split("://")[-1].strip("/") for one in hosts.split(",") if one.strip("/")]
        user, _, password = login.partition(":")
        several: dict[str, Any] = {"startup_nodes": addresses, "cluster_mode": True}
        if scheme == "redis-sentinel":  # the name is that in REDIS_SERVICE_NAME of LMCache's engines
            several = {"sentinels": addresses, "sentinel_master": "mymaster"}
        return {"type": "resp", **several, **_login(user, password)}
    if scheme == "mooncakestore":
        return _mooncake(rest, extra)
    if scheme == "fs":
        return directory(urlsplit(url).path, extra)
    if scheme in ("s3", "azure"):
        raise NotTranslated(
            'write {"type": "object_store", "url": "s3://BUCKET/PREFIX"}, or az://… (docs/remote-tiers.md)'
        )
    raise NotTranslated(f"there is no adapter for {scheme}; docs/remote-tiers.md has those that there are")


def _one_server(scheme: str, url: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError:
        raise NotTranslated("its port is no number from 1 to 65535") from None
    if not host:
        raise NotTranslated("it names no host")
    entry: dict[str, Any] = {"type": "resp", "host": host, "port": port}
    database = parts.path.strip("/") or str(extra.get("valkey_database") or "")
    if scheme == "valkey" and extra.get("valkey_mode") == "cluster":
        entry = {"type": "resp", "startup_nodes": [f"{host}:{port}"], "cluster_mode": True}
    elif database.isdigit():
        entry["database_id"] = int(database)
    if scheme == "rediss" or is_on(extra.get("tls_enable")):
        entry["tls_enable"] = True
    user, password = (
        getattr(parts, name) or extra.get(f"valkey_{name}") or extra.get(name)
        for name in ("username", "password")
    )
    return entry | _login(user, password)


def _login(user: object, password: object) -> dict[str, Any]:
    if not password:
        return {}
    return {**({"username": str(user)} if user else {}), "password_file": PASSWORD_FILE}


def _mooncake(rest: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    def given(name: str) -> Any:
        return extra.get(f"mooncake_{name}", extra.get(name))

    entry: dict[str, Any] = {
        "type": "mooncake_store",
        "local_hostname": given("local_hostname") or "localhost",
        "metadata_server": given("metadata_server") or "P2PHANDSHAKE",
        "master_server_addr": given("master_server_address") or rest.strip("/").partition("?")[0],
    }
    ours = {"master_server_address": "", "transfer_timeout": "", "device_name": "rdma_devices"}
    ours |= dict.fromkeys(_DANGEROUS_EXTRA, "")
    passed_on = [key.removeprefix("mooncake_") for key in extra if key.startswith("mooncake_")]
    for name in ("protocol", "device_name", "global_segment_size", "local_buffer_size", *passed_on):
        if (field := ours.get(name, name)) and field not in entry and given(name) is not None:
            entry[field] = given(name)
    if (timeout_s := meant(given("transfer_timeout"), float)) is not None:
        entry["deadline_ms"] = int(timeout_s * 1000)
    return entry


def directory(paths: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter for the first of these folders, which are separated by commas. Raises NotTranslated."""
    path = paths.partition(",")[0].strip().rstrip("/")
    if not path:
        raise NotTranslated("it names no directory")
    direct = next((key for key in ("fs_connector_use_odirect", "use_direct_io") if key in extra), "")
    return {"type": "fs", "base_path": f"{path}/kvstrata", "shared": True, **odirect(extra.get(direct))}


# --- a deployment -----------------------------------------------------------------------------------------------------


class Migration:
    """What becomes of the values of one deployment.

    `settings`: by dotted name.  `failed`: names whose meaning could not be kept, with the reason.  `twice`: names that
    are given with different values, and what is said of them.
    """

    def __init__(self, values: Mapping[str, Any], twice: Mapping[str, str] = NO_NAMES) -> None:
        self.settings: dict[str, Any] = {}
        self.adapters: list[dict[str, Any]] = []
        self.failed = dict(twice)
        self._values = values
        extra = meant(values.get("extra_config"))
        if isinstance(extra, str):  # of a variable
            with contextlib.suppress(ValueError):
                extra = json.loads(extra)
        if extra and not isinstance(extra, Mapping):
            self.failed["extra_config"] = f"must be an object, found {type(extra).__name__}"
        given = extra if isinstance(extra, Mapping) else {}
        self._extra = {str(key): meant(value) for key, value in given.items()}
        self._l1()
        self._disk()
        self._remote()
        self._cluster()
        for name, value in values.items():
            self._other(name, meant(value))
        for key, value in self._extra.items():
            why = _DANGEROUS_EXTRA.get(key.removeprefix("mooncake_"))
            if why and is_on(value):
                self.failed[f"extra_config.{key}"] = why

    def text(self, source: str) -> str:
        """The YAML file."""
        nested: dict[str, Any] = {}
        for key in sorted(self.settings, key=lambda key: ("." in key, list(_TYPES).index(key))):
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = self.settings[key]
        # Without a list of adapters the server would keep an L2 on disk, LMCache would not.
        body = yaml.safe_dump({**nested, "l2_adapters": self.adapters}, sort_keys=False, allow_unicode=True)
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

    def _on(self, name: str) -> bool:
        return is_on(self._values.get(name))

    def _get(self, name: str) -> Any:
        return meant(self._values.get(name))

    def _number(self, name: str) -> float:
        """The number that a name has; 0 if it has none."""
        value = meant(self._get(name), float) or 0
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return value
        self.failed[name] = f"must be a number above 0, found {value!r:.80}"
        return 0

    def _set(self, key: str, value: Any, name: str) -> None:
        """Give a setting a value, unless the value is not among those that the setting can have."""
        value = canonical(_TYPES[key], meant(value, bare_type(_TYPES[key])))
        for problem in problems(_TYPES[key], value, key):
            self.failed[name] = f"{problem.path} {problem.says}"
            return
        self.settings[key] = value

    def _l1(self) -> None:
        for name in ("max_local_cache_size", "max_local_cpu_size"):
            if size_gb := self._number(name):
                self._set("l1.size_gb", size_gb, name)
        if self._on("local_cpu_use_hugepages"):
            self._set("l1.use_hugepages", True, "local_cpu_use_hugepages")
        policy = self._get("cache_policy")
        if str(policy).lower() in CLASSIC_POLICIES:
            self._set("l1.eviction_policy", "VALUE", "cache_policy")
        elif policy:
            self.failed["cache_policy"] = f"{policy!r:.80} is no policy of LMCache; VALUE is the default"
        if self._get("numa_mode") not in (None, "auto"):
            self.failed["numa_mode"] = "set l1.numa"

    def _disk(self) -> None:
        paths, size_gb = self._get("local_disk"), self._number("max_local_disk_size")
        if isinstance(paths, bool):
            self.failed["local_disk"] = f"must be a path, found {paths}"
        elif paths and size_gb:  # LMCache uses no disk without one of the two
            texts = paths if isinstance(paths, list) else str(paths).split(",")
            path, *others = [
                text for each in texts if (text := str(each).strip().removeprefix("file://").rstrip("/"))
            ] or [""]
            self.adapters.append({
                "type": "disk" if size_gb >= LEAST_DISK_GB else "fs",
                "base_path": f"{path}/kvstrata",
                "capacity_gb": size_gb,
                **odirect(self._extra.get("use_odirect")),
            })  # fmt: skip
            self._one_folder("local_disk", others)

    def _one_folder(self, name: str, others: Sequence[str]) -> None:
        """Name the folders left out: LMCache spreads KV over them, each of our adapters would get all of it."""
        if others:
            self.failed[name] = (
                f"{', '.join(others)} left out: an adapter has one folder, and each of several gets every chunk; join "
                "the disks to one file system (RAID 0, LVM) for an adapter with the room of all"
            )

    def _folder(self, name: str, paths: str) -> None:
        self.adapters.append(directory(paths, self._extra))
        self._one_folder(name, paths.split(",")[1:])

    def _remote(self) -> None:
        if url := self._get("remote_url"):
            try:
                self.adapters.append(adapter_of(str(url), self._extra))
                self._one_folder("remote_url", str(url).split(",")[1:] if str(url).startswith("fs:") else ())
            except NotTranslated as error:
                self.failed["remote_url"] = str(error)
        if str(serde := self._get("remote_serde")).lower() not in ("naive", "null", "none"):
            self.failed["remote_serde"] = f'{serde!r:.80}: an adapter\'s "codec" may be zstd'
        names = self._get("remote_storage_plugins") or []
        for name in names if isinstance(names, list) else str(names).split(","):
            paths = self._extra.get(f"remote_storage_plugin.{str(name).strip()}.base_path")
            if str(name).strip().partition(".")[0] == "fs" and paths:
                self._folder("remote_storage_plugins", str(paths))
            else:
                self.failed["remote_storage_plugins"] = f"{name}: {_NO_PLUGINS}"
        if is_on(self._extra.get("enable_nixl_storage")):
            kind, paths = self._extra.get("nixl_backend"), self._extra.get("nixl_path")
            if kind == "POSIX" and paths:
                self._folder("extra_config.nixl_path", str(paths))
            else:
                self.failed["extra_config.nixl_backend"] = f"{kind!r:.80}: use an adapter of type disk or fs"

    def _cluster(self) -> None:
        on, names = (
            self._on("enable_controller"),
            ("controller_reply_url", "controller_pull_url", "controller_url"),
        )
        name, url = next(((name, str(self._get(name))) for name in names if self._get(name)), ("", ""))
        url = url.rpartition("://")[2]
        if on and url:
            if name != "controller_reply_url":  # another port of the same controller
                url = f"{url.partition(':')[0]}:8400"
            self._set("controller.url", f"tcp://{url}", name)
        elif on:
            why = "set controller.url to tcp://HOST:8400, an lmcache-controller's reply port"
            self.failed["enable_controller"] = why
        if not self._on("enable_p2p"):
            if "controller.url" in self.settings:
                self._set("p2p.engine", "off", "enable_p2p")
            return
        if not on:
            why = "set controller.url: instances find each other through an lmcache-controller"
            self.failed["enable_p2p"] = why
        host, ports = self._get("p2p_host"), self._get("p2p_init_ports")
        first = ports[0] if isinstance(ports, list) and ports else str(ports or 0).partition(",")[0]
        if host:  # one port for the whole host, not one for each worker
            self._set("p2p.listen", f"{host}:{first}", "p2p_host")

    def _other(self, name: str, value: Any) -> None:
        """A name that needs no more than its entry in the tables."""
        entry = find(name, CLIENT_KEYS, CLIENT_KEY_PREFIXES) or find(name, VARIABLES, VARIABLE_PREFIXES)
        if name == "lmcache_instance_id" and value:
            self._set("instance_id", value, name)
        elif entry is None and name in ClientSettings.__struct_fields__:
            self._set(name, value, name)
        elif entry is None and name != FILE:
            self.failed[name] = f"unknown key{nearest(name, CLIENT_KEYS, cutoff=NEARLY)}"
        elif name in ("storage_plugins", "external_backends") and value:
            self.failed[name] = _NO_PLUGINS
        elif entry is not None and entry.target and name != "mp_host" and value is not None:
            self._set(
                entry.target, value, name
            )  # engines attach to the server of their own host, so not mp_host
        elif entry is not None and entry.asks(value):
            self.failed[name] = entry.say


# --- the command ------------------------------------------------------------------------------------------------------


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
    """Run the command; returns the exit status: 1 if something could not be translated, 2 if a file cannot be read."""
    files: dict[str, list[Found]] = {}
    status = 0
    for file in parser().parse_args(arguments).files:
        try:
            files[file] = read(file)
        except ConfigError as error:
            print(f"kvstrata migrate: {error.message}", file=sys.stderr)
            status = 2
    if files:
        migration, names = Migration(*merged(files.values())), ", ".join(files)
        print(migration.text(names), end="")
        if migration.failed:
            print(
                f"kvstrata migrate: {names}: not translated: {', '.join(migration.failed)}", file=sys.stderr
            )
            status = max(status, 1)
    return status
