"""From a file for LMCache (LMCACHE_CONFIG_FILE) to one for kvstrata, with a comment for every line.

The file serves lmcache-server (`--config`) and its engines (KVSTRATA_CONFIG_FILE).  Names that have no counterpart
become comments, so that nothing of LMCache's file is lost without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.demands import problems
from kvstrata.config.lmcache import READ_ON, VERSION
from kvstrata.config.lmcache.fates import Fate, find
from kvstrata.config.lmcache.keys import CLIENT_KEY_PREFIXES, CLIENT_KEYS
from kvstrata.config.lmcache.remote_url import Field, NotTranslated, adapter_of
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
_TYPES = dict(leaves(ServerSettings)) | dict(leaves(ClientSettings))


class Setting(NamedTuple):
    """A setting of ours, and the comment beside it."""

    value: Any
    comment: str


class Migration:
    """What becomes of the values of one file. `failed`: names whose meaning could not be kept."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.settings: dict[str, Setting] = {}
        self.adapters: list[list[Field]] = []
        self.remarks: list[str] = []
        self.failed: list[str] = []
        self._values = values
        extra = values.get("extra_config")
        self._extra: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
        self._told: set[str] = set()
        self._l1()
        self._disk()
        self._remote()
        self._cluster()
        for name, value in values.items():
            if name not in self._told:
                self._other(name, value)
        said = self.text("")
        for name in values:
            if not re.search(rf"\b{re.escape(name)}\b", said):
                self._remark(name, "no setting is needed")

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
        for adapter in self.adapters:
            first, *others = adapter
            lines.append(_line("  - ", first.name, first.value, first.comment))
            lines += [_line("    ", one.name, one.value, one.comment) for one in others]
        return "\n".join([*lines, *(f"# {one_line(remark)}" for remark in self.remarks)]) + "\n"

    def _get(self, name: str) -> Any:
        """The value of a name, which then counts as dealt with."""
        self._told.add(name)
        return self._values.get(name)

    def _set(self, key: str, value: Any, name: str, comment: str = "") -> None:
        """Give a setting a value, unless the value is not among those that the setting can have."""
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
            why = "" if self._get("local_cpu") else "; it cannot be turned off, but l1.size_gb may be small"
            self._remark("local_cpu", f"no setting is needed, L1 is always on{why}")
        if size_gb := self._get("max_local_cpu_size"):
            self._set("l1.size_gb", size_gb, "max_local_cpu_size", ALL_WORKERS)
        if self._get("local_cpu_use_hugepages"):
            self._set("l1.use_hugepages", True, "local_cpu_use_hugepages")
        policy = self._get("cache_policy")
        if policy in ("LRU", "ARC"):
            self._set("l1.eviction_policy", policy, "cache_policy")
        elif policy:
            self._fail(
                "cache_policy", f"{policy!r:.80} is none of LRU, ARC, S3FIFO and noop; LRU is the default"
            )
        mode = self._get("numa_mode")
        mapping = self._extra.get("gpu_to_numa_mapping")
        if mode == "auto":
            self._set("l1.numa", "gpu", "numa_mode", "memory next to the GPUs")
        elif mode == "manual" and isinstance(mapping, Mapping):
            nodes = ",".join(sorted({str(node) for node in mapping.values()}))
            self._set("l1.numa", nodes, "numa_mode and gpu_to_numa_mapping", "one pool over these nodes")
        elif mode:
            self._fail("numa_mode", "set l1.numa to the numbers of the nodes")

    def _disk(self) -> None:
        paths, size_gb = self._get("local_disk"), self._get("max_local_disk_size")
        if not paths or not size_gb:
            for name, value in (("local_disk", paths), ("max_local_disk_size", size_gb)):
                if value:
                    self._remark(
                        name, "LMCache uses no disk unless local_disk and max_local_disk_size are set"
                    )
            return
        if isinstance(size_gb, bool) or not isinstance(size_gb, int | float) or not size_gb > 0:
            self._fail("max_local_disk_size", f"must be a number above 0, found {size_gb!r:.80}")
            return
        own = "from local_disk; a folder of its own beside LMCache's files, which can be deleted"
        texts = paths if isinstance(paths, list) else str(paths).split(",")
        for path in (str(text).strip().removeprefix("file://").rstrip("/") for text in texts):
            kind = "disk" if size_gb >= LEAST_DISK_GB else "fs"
            self.adapters.append([
                Field("type", kind, "from local_disk"),
                Field("base_path", f"{path}/kvstrata", own),
                Field("capacity_gb", size_gb, f"from max_local_disk_size; {ALL_WORKERS}"),
            ])  # fmt: skip

    def _remote(self) -> None:
        serde, url = self._get("remote_serde"), self._get("remote_url")
        if url:
            try:
                first, *others = adapter_of(str(url), self._extra)
                self.adapters.append([first._replace(comment="from remote_url"), *others])
            except NotTranslated as error:
                self._fail("remote_url", str(error))
        if serde == "naive":
            self._remark("remote_serde", "records are stored as they are unless an adapter has a codec")
        elif serde:
            self._fail("remote_serde", 'an adapter\'s "codec" may be zstd (lossless) or fp8 (8-bit floats)')

    def _cluster(self) -> None:
        given = {
            name: self._get(name)
            for name in ("controller_reply_url", "controller_pull_url", "controller_url")
        }
        name, url = next(((name, str(url)) for name, url in given.items() if url), ("", ""))
        url = url.rpartition("://")[2]
        on = self._get("enable_controller")
        if on and url:
            if name != "controller_reply_url":  # another port of the same controller
                url = f"{url.partition(':')[0]}:8400"
            self._set("controller.url", f"tcp://{url}", name, "the reply port of an lmcache-controller")
        elif on:
            self._fail(
                "enable_controller",
                "set controller.url to tcp://HOST:8400, an lmcache-controller's reply port",
            )
        p2p = self._get("enable_p2p")
        if not p2p:
            if "controller.url" in self.settings:
                self._set("p2p.engine", "off", "enable_p2p", "instances do not read from each other")
            return
        if not on:
            self._fail(
                "enable_p2p", "set controller.url: instances find each other through an lmcache-controller"
            )
        host, ports = self._get("p2p_host"), self._get("p2p_init_ports")
        first = ports[0] if isinstance(ports, list) and ports else ports
        if host:
            comment = "one port for the whole host, not one for each worker"
            self._set("p2p.listen", f"{host}:{first or 0}", "p2p_host and p2p_init_ports", comment)
        channel = self._get("transfer_channel")
        if channel == "nixl":
            self._set("p2p.engine", "nixl", "transfer_channel", "all peers need the same engine")
        elif channel:
            self._fail(
                "transfer_channel", f"{channel!r:.80} is none of auto, ucx, nixl and off; auto is the default"
            )

    def _other(self, name: str, value: Any) -> None:
        """A name that needs no more than its entry in the table of keys."""
        entry = find(name, CLIENT_KEYS, CLIENT_KEY_PREFIXES)
        if name == "lmcache_instance_id" and value:
            self._set("instance_id", value, name, "each server needs its own")
        elif name == "mp_host":
            self._remark(name, "engines always attach to the server of their own host")
        elif entry is None:
            self._fail(name, f"unknown key{nearest(name, CLIENT_KEYS)}")
        elif entry.fate is Fate.KEPT:
            self._set(entry.target, value, name)
        elif name in ("storage_plugins", "remote_storage_plugins", "external_backends") and value:
            self._fail(name, "write an adapter of type plugin (docs/writing-an-adapter.md)")
        elif entry.fate is Fate.REFUSED and entry.asks(value):
            self._fail(name, f"{entry.say} (value {quoted(name, value)})")
        else:
            self._remark(name, f"no effect: {entry.say}")


def _line(indent: str, name: str, value: Any, comment: str) -> str:
    """`name: value  # comment`; JSON is YAML, and has no values that YAML takes for others."""
    line = f"{indent}{name}: {json.dumps(value)}"
    return f"{line}  # {one_line(comment)}" if comment else line
