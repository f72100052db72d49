"""Wrong fields of `--l2-adapter` entries: all are named at once, and no secret is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.server.plan import plan
from kvstrata.storage.entry import configure_tier

SECRET = "hunter2"

LEAST: dict[str, dict[str, Any]] = {
    "disk": {"base_path": "/nowhere/log", "capacity_gb": 1},
    "fs": {"base_path": "/nowhere/kv"},
    "resp": {"host": "h"},
    "mooncake_store": {"local_hostname": "h", "metadata_server": "m"},
    "object_store": {"url": "s3://bucket/kv", "region": "r", "skip_signature": True},
    "fault_inject": {"inner": {"type": "fs", "base_path": "/nowhere/kv"}},
    "plugin": {"module_path": "m", "class_name": "C"},
}
"""An entry of each type with as little as it needs."""

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("zzzzzzzz", {}, "type"),
    ("moncake", {}, "type"),
    ("peer", {"controller": "tcp://h:1"}, "type"),
    ("disk", {"serde": {"type": "fp8"}}, "serde"),
    ("disk", {"segment_mb": 100}, "segment_mb"),
    ("disk", {"policy": "thrugh"}, "policy"),
    ("disk", {"base_path": "\ud800"}, "base_path"),
    ("disk", {"per_op_workers": {"store": 0}}, "per_op_workers.store"),
    ("disk", {"codec": ["zst"]}, "codec[0]"),
    ("disk", {"codec": ["zstd", "zstd"]}, "codec[1]"),
    ("disk", {"codec": ["aes-gcm"]}, "codec[0].key_file"),
    ("disk", {"capacity_gb": float("inf")}, "capacity_gb"),
    ("fs", {"isolation": "process", "host_kill_ms": 5}, "host_kill_ms"),
    ("fs", {"base_path": "~nobody-of-that-name/kv"}, "base_path"),
    ("fs", {"relative_tmp_dir": "../x"}, "relative_tmp_dir"),
    ("fs", {"capacity_gb": 1, "max_capacity_gb": 2}, "max_capacity_gb"),
    ("resp", {"host": None}, "host"),
    ("resp", {"url": "redis://h", "host": None, "port": 6379}, "port"),
    ("resp", {"url": f"http://u:{SECRET}@h", "host": None}, "url"),
    ("resp", {"url": f"redis://:{SECRET}@h", "host": None}, "url"),
    ("resp", {"url": "redis://u@h", "host": None, "username": "u", "password": SECRET}, "username"),
    ("resp", {"url": "rediss://h", "host": None, "tls_enable": False}, "tls_enable"),
    ("resp", {"password": SECRET, "password_file": "/x"}, "password_file"),
    ("resp", {"username": "u"}, "username"),
    ("resp", {"key_prefix": "a{b}"}, "key_prefix"),
    ("resp", {"database_id": 1, "cluster_mode": True}, "database_id"),
    ("resp", {"host": None, "startup_nodes": "a:1,b:2"}, "startup_nodes"),
    ("resp", {"host": None, "startup_nodes": ["a:70000"]}, "startup_nodes"),
    ("resp", {"host": None, "sentinels": "a"}, "sentinel_master"),
    ("resp", {"host": None, "sentinels": "a", "sentinel_master": "m", "cluster_mode": True}, "cluster_mode"),
    ("resp", {"sentinel_master": "m"}, "sentinel_master"),
    ("resp", {"sentinel_password_file": "f"}, "sentinel_password_file"),
    ("resp", {"tls_enable": True, "tls_ca_file": "/nowhere"}, "tls_ca_file"),
    ("mooncake_store", {"num_wrkers": 1}, "num_wrkers"),
    ("mooncake_store", {"metadata_server": None}, "metadata_server"),
    ("object_store", {"url": "s4://bucket"}, "url"),
    ("object_store", {"url": "file:///nowhere/kv"}, "url"),
    ("object_store", {"url": f"s3://u:{SECRET}@bucket"}, "url"),
    ("object_store", {"secret_acess_key": SECRET}, "secret_acess_key"),
    ("object_store", {"endpoint": "http://127.0.0.1:9000"}, "endpoint"),
    ("object_store", {"max_capacity_gb": 1}, "max_capacity_gb"),
    ("object_store", {"s3_region": "a"}, "region"),
    ("fault_inject", {"inner": None}, "inner"),
    ("fault_inject", {"inner": {"type": "fs", "base_path": "/x", "isolation": "process"}}, "inner.isolation"),
    ("fault_inject", {"faults": ["bang"]}, "faults"),
    ("plugin", {"class_name": None}, "class_name"),
]  # fmt: skip
"""A type, what is changed in its least entry (None: left out), and the field that the error names."""


@pytest.mark.parametrize("kind", LEAST)
def test_the_least_entry_is_right_and_each_of_its_fields_is_checked(kind: str) -> None:
    entry = {"type": kind, **LEAST[kind]}
    configure_tier(entry, 0)
    for field in ("type", *LEAST[kind]):
        with pytest.raises(ConfigError, match=rf"^l2_adapters\[2\]\.{field}: "):
            configure_tier({**entry, field: [5]}, 2)


@pytest.mark.parametrize(("kind", "change", "field"), WRONG)
def test_an_error_names_the_field_and_shows_no_secret(kind: str, change: dict[str, Any], field: str) -> None:
    entry = {"type": kind, **LEAST.get(kind, {}), **change}
    with pytest.raises(ConfigError) as raised:
        configure_tier({name: value for name, value in entry.items() if value is not None}, 2)
    assert raised.value.field == f"l2_adapters[2].{field}"
    assert raised.value.message.startswith(f"l2_adapters[2].{field}: ")
    assert SECRET not in raised.value.message


FS = {"type": "fs", "base_path": "/data/kv"}


def said(entry: dict[str, Any]) -> dict[str, str]:
    """What is said about an entry, by field."""
    with pytest.raises(ConfigError) as raised:
        configure_tier(entry, 2)
    found = [line.partition(": ") for line in raised.value.lines]
    assert all(field.startswith("l2_adapters[2].") for field, _, _ in found)
    return {field.removeprefix("l2_adapters[2]."): says for field, _, says in found}


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ({"type": "fss", "deadline_ms": 0, "isolation": "no"}, ["type", "deadline_ms", "isolation"]),
        ({**FS, "per_op_workers": {"store": 0, "retreive": 1}}, ["per_op_workers.store", "per_op_workers.retreive"]),
        ({**FS, "num_workers": 0, "capacity_gb": "1", "codec": "zip"}, ["codec", "capacity_gb", "num_workers"]),
        ({**FS, "codec": ["zip", {"name": "zstd", "level": "x", "planes": 3, "lvl": 1}]},
         ["codec[0]", "codec[1].level", "codec[1].planes", "codec[1].lvl"]),
        # Rules about fields are checked once all of them are right by themselves.
        ({**FS, "host_kill_ms": 500, "num_workers": 0, "relative_tmp_dir": "/tmp"}, ["host_kill_ms", "num_workers"]),
        ({**FS, "host_kill_ms": 500, "relative_tmp_dir": "/tmp"}, ["host_kill_ms", "relative_tmp_dir"]),
    ],
)  # fmt: skip
def test_all_wrong_fields_of_an_entry_are_named(entry: dict[str, Any], wrong: list[str]) -> None:
    assert list(said(entry)) == wrong


def test_all_entries_are_looked_at(tmp_path: Path) -> None:
    entries = [{**FS, "num_workers": 0}, FS, {"type": "fss"}, {"type": "disk", "base_path": str(tmp_path)}]
    with pytest.raises(ConfigError) as raised:
        plan(ServerSettings(l2_adapters=entries), {"HOME": str(tmp_path)})
    fields = [line.partition(": ")[0] for line in raised.value.lines]
    assert fields == ["l2_adapters[0].num_workers", "l2_adapters[2].type", "l2_adapters[3].capacity_gb"]


def test_what_several_entries_lack_on_this_machine_is_no_error_of_a_check(tmp_path: Path) -> None:
    entries = [{**FS, "codec": [{"name": "mac", "key_file": f"/no/such/{n}"}]} for n in range(2)]
    lacking: list[str] = []
    plan(ServerSettings(l2_adapters=entries), {"HOME": str(tmp_path)}, lacking)
    assert [lack.partition(": ")[0] for lack in lacking] == [
        "l2_adapters[0].codec[0].key_file",
        "l2_adapters[1].codec[0].key_file",
    ]
    with pytest.raises(MachineLacks):
        plan(ServerSettings(l2_adapters=entries), {"HOME": str(tmp_path)})
