"""From a file for LMCache (LMCACHE_CONFIG_FILE) to one for kvstrata, with a comment for every line.

The file serves lmcache-server (`--config`) and its engines (KVSTRATA_CONFIG_FILE).  Names that have no counterpart
become comments, so that nothing of LMCache's file is lost without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.demands import bare_type, canonical, problems
from kvstrata.config.lmcache import READ_ON, VERSION
from kvstrata.config.lmcache.fates import NEARLY, NO_NAMES, TUNES, Fate, Name, find, is_on, meant
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    EXTRA_KEYS,
    EXTRA_PREFIXES,
    VARIABLE_PREFIXES,
    VARIABLES,
)
from kvstrata.config.lmcache.remote_url import Field, NotTranslated, adapter_of, directory, odirect
from kvstrata.config.lmcache.variables import FILE
from kvstrata.config.load import leaves
from kvstrata.config.model import ServerSettings
from kvstrata.config.nearest import nearest
from kvstrata.config.secrets import quoted
from kvstrata.text import one_line

ALL_WORKERS = (
    "LMCache's is for each worker process; this is for the whole host, so multiply it by the workers"
)
LEAST_DISK_GB = 0.25
"""A log of `disk` needs some segments; a smaller tier is of type `fs`."""
NO_L2 = "LMCache keeps nothing on disk unless it is told to; without this line the server would"
NO_PLUGINS = "classes for LMCache do not fit; write an adapter of type plugin (docs/writing-an-adapter.md)"
_TYPES = dict(leaves(ServerSettings)) | dict(leaves(ClientSettings))


class Setting(NamedTuple):
    """A setting of ours, and the comment beside it."""

    value: Any
    comment: str


class _Extra(dict[str, Any]):
    """LMCache's `extra_config`. `told`: its keys that an adapter has got."""

    def __init__(self, given: object) -> None:
        if isinstance(given, str):  # of a variable
            try:
                given = json.loads(given)
            except ValueError:
                given = None
        super().__init__(given if isinstance(given, Mapping) else {})
        self.told: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.told.add(name)
        return meant(super().get(name, default))


class Migration:
    """What becomes of the values of one deployment. `failed`: names whose meaning could not be kept.

    `twice`: names that are given with different values, and what is said of them.
    """

    def __init__(self, values: Mapping[str, Any], twice: Mapping[str, str] = NO_NAMES) -> None:
        self.settings: dict[str, Setting] = {}
        self.adapters: list[list[Field]] = []
        self.remarks: list[str] = []
        self.failed: list[str] = []
        self._values = values
        self._extra = _Extra(meant(values.get("extra_config")))
        self._told: set[str] = set()
        for name, why in twice.items():
            self._fail(name, why)
        self._l1()
        self._disk()
        self._remote()
        self._plugins()
        self._cluster()
        for name, value in values.items():
            if name not in self._told:
                self._other(name, value)
        for key, value in self._extra.items():
            if key not in self._extra.told:
                self._of_extra(key, value)
        said = self.text("")
        for name in values:
            if not re.search(rf"\b{re.escape(name)}\b", said):
                above = name == "extra_config" and self.adapters
                self._remark(name, "its keys are in l2_adapters" if above else "no setting is needed")

    def text(self, source: str) -> str:
        """The YAML file."""
        lines = [
            f"# kvstrata's configuration from {source} (LMCache {VERSION}, names of {READ_ON}), for",
            "# `lmcache-server --config` and, in KVSTRATA_CONFIG_FILE, for its engines.",
            "# KV that LMCache stored is not read: the cache begins empty.",
        ]
        section = ""
        order = list(_TYPES)
        for key in sorted(self.settings, key=lambda key: ("." in key, order.index(key))):
            parent, _, name = key.rpartition(".")
            if parent != section:
                lines.append(f"{parent}:")
                section = parent
            lines.append(_line("  " if parent else "", name, *self.settings[key]))
        if self.adapters:
            lines.append("l2_adapters:  # nearest first")
        else:
            lines.append(f"l2_adapters: []  # {NO_L2}")
        for adapter in self.adapters:
            first, *others = adapter
            lines.append(_line("  - ", first.name, first.value, first.comment))
            lines += [_line("    ", one.name, one.value, one.comment) for one in others]
        return "\n".join([*lines, *(f"# {one_line(remark)}" for remark in self.remarks)]) + "\n"

    def _get(self, name: str) -> Any:
        """The value of a name, which then counts as dealt with."""
        self._told.add(name)
        return meant(self._values.get(name))

    def _number(self, name: str) -> float:
        """The number that a name has; 0 if it has none, which is told."""
        value = meant(self._get(name), float) or 0
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return value
        self._fail(name, f"must be a number above 0, found {value!r:.80}")
        return 0

    def _set(self, key: str, value: Any, name: str, comment: str = "") -> None:
        """Give a setting a value, unless the value is not among those that the setting can have."""
        value = canonical(_TYPES[key], meant(value, bare_type(_TYPES[key])))
        for problem in problems(_TYPES[key], value, key):
            self._fail(name, f"{problem.path} {problem.says}")
            return
        self.settings[key] = Setting(value, f"from {name}" + (f"; {comment}" if comment else ""))

    def _remark(self, name: str, why: str) -> None:
        self.remarks.append(f"{name}: {why}")

    def _fail(self, name: str, why: str) -> None:
        self.failed.append(name)
        self._remark(name, f"NOT TRANSLATED: {why}")

    def _l1(self) -> None:
        if "local_cpu" in self._values:
            why = (
                ""
                if is_on(self._get("local_cpu"))
                else "; it cannot be turned off, but l1.size_gb may be small"
            )
            self._remark("local_cpu", f"no setting is needed, L1 is always on{why}")
        for name in ("max_local_cache_size", "max_local_cpu_size"):
            if size_gb := self._number(name):
                self._set("l1.size_gb", size_gb, name, ALL_WORKERS)
        if is_on(self._get("local_cpu_use_hugepages")):
            self._set("l1.use_hugepages", True, "local_cpu_use_hugepages")
        policy = self._get("cache_policy")
        if str(policy).upper() in ("LRU", "ARC"):
            self._set("l1.eviction_policy", policy, "cache_policy")
        elif policy:
            self._fail(
                "cache_policy", f"{policy!r:.80} is none of LRU, ARC, S3FIFO and noop; LRU is the default"
            )
        mode = self._get("numa_mode")
        mapping = self._extra.get("gpu_to_numa_mapping")
        if mode == "auto":
            self._remark(
                "numa_mode",
                "no setting is needed, the kernel places L1; on a host with several NUMA nodes l1.numa may name those "
                "next to the GPUs, which `kvstrata doctor` tells",
            )
        elif mode == "manual" and isinstance(mapping, Mapping):
            nodes = ",".join(sorted({str(node) for node in mapping.values()}))
            self._set("l1.numa", nodes, "numa_mode and gpu_to_numa_mapping", "one pool over these nodes")
        elif mode:
            self._fail("numa_mode", "set l1.numa to the numbers of the nodes")

    def _disk(self) -> None:
        paths, size_gb = self._get("local_disk"), self._number("max_local_disk_size")
        if isinstance(paths, bool):
            self._fail("local_disk", f"must be a path, found {paths}")
        elif not paths or not size_gb:
            for name, value in (("local_disk", paths), ("max_local_disk_size", size_gb)):
                if value:
                    self._remark(
                        name, "LMCache uses no disk unless local_disk and max_local_disk_size are set"
                    )
        else:
            own = "from local_disk; a folder of its own beside LMCache's files, which can be deleted"
            texts = paths if isinstance(paths, list) else str(paths).split(",")
            path, *others = [
                text for each in texts if (text := str(each).strip().removeprefix("file://").rstrip("/"))
            ] or [""]
            self.adapters.append([
                Field("type", "disk" if size_gb >= LEAST_DISK_GB else "fs", "from local_disk"),
                Field("base_path", f"{path}/kvstrata", own),
                Field("capacity_gb", size_gb, f"from max_local_disk_size; {ALL_WORKERS}"),
                *odirect(self._extra.get("use_odirect")),
            ])  # fmt: skip
            self._one_folder("local_disk", others)

    def _one_folder(self, name: str, others: Sequence[str]) -> None:
        """Tell which folders are left out: LMCache spreads KV over them, and each of our adapters gets all of it."""
        if others:
            self._fail(
                name,
                f"{', '.join(others)} left out: an adapter has one folder, and each of several gets every chunk; "
                "join the disks to one file system (RAID 0, LVM) for an adapter with the room of all",
            )

    def _remote(self) -> None:
        serde, url = self._get("remote_serde"), self._get("remote_url")
        if url:
            try:
                first, *others = adapter_of(str(url), self._extra)
                self.adapters.append([first._replace(comment="from remote_url"), *others])
                self._one_folder("remote_url", str(url).split(",")[1:] if str(url).startswith("fs:") else ())
            except NotTranslated as error:
                self._fail("remote_url", str(error))
        if str(serde).lower() in ("naive", "null", "none") and "remote_serde" in self._values:
            self._remark("remote_serde", "records are stored as they are unless an adapter has a codec")
        elif serde:
            self._fail("remote_serde", 'an adapter\'s "codec" may be zstd (lossless) or fp8 (8-bit floats)')

    def _plugins(self) -> None:
        names = self._get("remote_storage_plugins") or []
        for name in names if isinstance(names, list) else str(names).split(","):
            paths = self._extra.get(f"remote_storage_plugin.{str(name).strip()}.base_path")
            if str(name).strip().partition(".")[0] == "fs" and paths:
                self._folder("remote_storage_plugins", str(paths), f"from remote_storage_plugins: {name}")
            else:
                self._fail("remote_storage_plugins", f"{name}: {NO_PLUGINS}")
        if not is_on(self._extra.get("enable_nixl_storage")):
            return
        for name in self._values.keys() & {"nixl_buffer_size", "nixl_buffer_device"}:
            self._told.add(name)
            self._remark(name, "no setting is needed, the buffer is L1")
        kind, paths = self._extra.get("nixl_backend"), self._extra.get("nixl_path")
        if kind == "POSIX" and paths:
            comment = "from extra_config.nixl_path; without a cap unless capacity_gb sets one"
            self._folder("extra_config.nixl_path", str(paths), comment)
        else:
            why = f"{kind!r:.80}: adapters of type disk and fs keep KV in a folder of any disk"
            self._fail("extra_config.nixl_backend", why)

    def _folder(self, name: str, paths: str, comment: str) -> None:
        first, *others = directory(paths, self._extra)
        self.adapters.append([first._replace(comment=comment), *others])
        self._one_folder(name, paths.split(",")[1:])

    def _cluster(self) -> None:
        given = {
            name: self._get(name)
            for name in ("controller_reply_url", "controller_pull_url", "controller_url")
        }
        name, url = next(((name, str(url)) for name, url in given.items() if url), ("", ""))
        url = url.rpartition("://")[2]
        on = is_on(self._get("enable_controller"))
        if on and url:
            if name != "controller_reply_url":  # another port of the same controller
                url = f"{url.partition(':')[0]}:8400"
            self._set("controller.url", f"tcp://{url}", name, "the reply port of an lmcache-controller")
        elif on:
            self._fail(
                "enable_controller",
                "set controller.url to tcp://HOST:8400, an lmcache-controller's reply port",
            )
        p2p = is_on(self._get("enable_p2p"))
        if not p2p:
            if "controller.url" in self.settings:
                self._set("p2p.engine", "off", "enable_p2p", "instances do not read from each other")
            return
        if not on:
            self._fail(
                "enable_p2p", "set controller.url: instances find each other through an lmcache-controller"
            )
        host, ports = self._get("p2p_host"), self._get("p2p_init_ports")
        first = ports[0] if isinstance(ports, list) and ports else str(ports or 0).partition(",")[0]
        if host:
            comment = "one port for the whole host, not one for each worker"
            self._set("p2p.listen", f"{host}:{first}", "p2p_host and p2p_init_ports", comment)
        if self._get("transfer_channel"):
            self._remark(
                "transfer_channel",
                "no setting is needed, p2p.engine auto takes what is there; between hosts without RDMA cards p2p.tcp "
                "must be true",
            )

    def _other(self, name: str, value: Any) -> None:
        """A name that needs no more than its entry in the table of keys."""
        entry = find(name, CLIENT_KEYS, CLIENT_KEY_PREFIXES)
        value = meant(value)
        entry = entry or find(name, VARIABLES, VARIABLE_PREFIXES)
        if name == "lmcache_instance_id" and value:
            self._set("instance_id", value, name, "each server needs its own")
        elif name == "mp_host":
            self._remark(name, "engines always attach to the server of their own host")
        elif name == FILE:
            self._remark(
                name, f"{value!s:.200} must be among the files given to kvstrata migrate, or inside one"
            )
        elif entry is None and name in ClientSettings.__struct_fields__:
            self._set(name, value, name)
        elif entry is None:
            self._fail(name, f"unknown key{nearest(name, CLIENT_KEYS, cutoff=NEARLY)}")
        elif entry.fate is Fate.KEPT and value is not None:
            self._set(entry.target, value, name)
        elif name in ("storage_plugins", "external_backends") and value:
            self._fail(name, NO_PLUGINS)
        elif name == "extra_config":
            if value and not self._extra:
                self._fail(name, f"must be an object, found {type(value).__name__}")
        else:
            self._by_fate(name, entry, value)

    def _of_extra(self, key: str, value: Any) -> None:
        """A key of `extra_config` that is no field of an adapter."""
        entry = find(key.removeprefix("mooncake_"), EXTRA_KEYS, EXTRA_PREFIXES) or TUNES
        self._by_fate(f"extra_config.{key}", entry, value)

    def _by_fate(self, name: str, entry: Name, value: Any) -> None:
        if entry.fate is Fate.REFUSED and entry.asks(value):
            self._fail(name, f"{entry.say} (value {quoted(name, value)})")
        else:
            self._remark(name, f"no effect: {entry.say}")


def _line(indent: str, name: str, value: Any, comment: str) -> str:
    """`name: value  # comment`; JSON is YAML, and has no values that YAML takes for others."""
    line = f"{indent}{name}: {json.dumps(value)}"
    return f"{line}  # {one_line(comment)}" if comment else line
