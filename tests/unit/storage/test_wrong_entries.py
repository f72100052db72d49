"""The field that an error about a wrong `--l2-adapter` entry names, which never shows a secret."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.errors import ConfigError
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
    ("hf3fs", {}, "type"),
    ("peer", {"controller": "tcp://h:1"}, "type"),
    ("disk", {"shared": True}, "shared"),
    ("disk", {"serde": {"type": "fp8"}}, "serde"),
    ("disk", {"segment_mb": 100}, "segment_mb"),
    ("disk", {"host_kill_ms": 500}, "host_kill_ms"),
    ("disk", {"policy": "thrugh"}, "policy"),
    ("disk", {"isolation": "thread"}, "isolation"),
    ("disk", {"base_path": "\ud800"}, "base_path"),
    ("disk", {"per_op_workers": {"retreive": 1}}, "per_op_workers.retreive"),
    ("disk", {"per_op_workers": {"store": 0}}, "per_op_workers.store"),
    ("disk", {"per_op_workers": [1]}, "per_op_workers"),
    ("disk", {"codec": ["zst"]}, "codec[0]"),
    ("disk", {"codec": 5}, "codec"),
    ("disk", {"codec": [["zstd"]]}, "codec[0]"),
    ("disk", {"codec": ["zstd", "zstd"]}, "codec[1]"),
    ("disk", {"codec": ["zstd", "fp8"]}, "codec[1]"),
    ("disk", {"codec": [{"name": "zstd", "level": "high"}]}, "codec[0].level"),
    ("disk", {"codec": ["aes-gcm"]}, "codec[0].key_file"),
    ("disk", {"codec": [{"name": "mac", "key_file": "/no/such/file"}]}, "codec[0].key_file"),
    ("disk", {"capacity_gb": float("inf")}, "capacity_gb"),
    ("fs", {"host_kill_ms": 500}, "host_kill_ms"),
    ("fs", {"isolation": "process", "host_kill_ms": 5}, "host_kill_ms"),
    ("fs", {"base_path": "~nobody-of-that-name/kv"}, "base_path"),
    ("fs", {"relative_tmp_dir": "../x"}, "relative_tmp_dir"),
    ("fs", {"relative_tmp_dir": "/tmp"}, "relative_tmp_dir"),
    ("fs", {"relative_tmp_dir": "ab"}, "relative_tmp_dir"),
    ("fs", {"capacity_gb": 1, "max_capacity_gb": 2}, "max_capacity_gb"),
    ("resp", {"host": None}, "host"),
    ("resp", {"url": "redis://h"}, "host"),
    ("resp", {"url": "redis://h", "host": None, "port": 6379}, "port"),
    ("resp", {"url": f"http://u:{SECRET}@h", "host": None}, "url"),
    ("resp", {"url": f"redis://u:{SECRET}@h:port", "host": None}, "url"),
    ("resp", {"url": "redis://u@h/name", "host": None}, "url"),
    ("resp", {"url": f"redis://:{SECRET}@h", "host": None}, "url"),
    ("resp", {"url": "redis://u@h", "host": None, "username": "u", "password": SECRET}, "username"),
    ("resp", {"url": "redis://h/1", "host": None, "database_id": 1}, "database_id"),
    ("resp", {"url": "rediss://h", "host": None, "tls_enable": False}, "tls_enable"),
    ("resp", {"password": SECRET, "password_file": "/x"}, "password_file"),
    ("resp", {"password_file": "/nowhere/password"}, "password_file"),
    ("resp", {"username": "u"}, "username"),
    ("resp", {"key_prefix": "a{b}"}, "key_prefix"),
    ("resp", {"key_prefix": "x" * 65}, "key_prefix"),
    ("resp", {"startup_nodes": [5]}, "startup_nodes"),
    ("resp", {"database_id": 1, "cluster_mode": True}, "database_id"),
    ("resp", {"host": None, "startup_nodes": "a:1,b:2"}, "startup_nodes"),
    ("resp", {"host": None, "startup_nodes": "a:x"}, "startup_nodes"),
    ("resp", {"host": None, "startup_nodes": ["a:70000"]}, "startup_nodes"),
    ("resp", {"host": None, "sentinels": "a"}, "sentinel_master"),
    ("resp", {"host": None, "sentinels": "a", "sentinel_master": "m", "cluster_mode": True}, "cluster_mode"),
    ("resp", {"sentinel_master": "m"}, "sentinel_master"),
    ("resp", {"sentinel_password_file": "f"}, "sentinel_password_file"),
    ("resp", {"tls_ca_file": "/nowhere"}, "tls_ca_file"),
    ("resp", {"tls_enable": True, "tls_ca_file": "/nowhere"}, "tls_ca_file"),
    ("resp", {"tls_enable": True, "tls_key_file": "/nowhere"}, "tls_key_file"),
    ("mooncake_store", {"local_hostname": None}, "local_hostname"),
    ("mooncake_store", {"num_wrkers": 1}, "num_wrkers"),
    ("mooncake_store", {"metadata_server": None}, "metadata_server"),
    ("mooncake_store", {"replicate": [1]}, "replicate"),
    ("mooncake_store", {"rdma_devices": ["mlx5_0"]}, "rdma_devices"),
    ("object_store", {"url": "s4://bucket"}, "url"),
    ("object_store", {"url": "s3://"}, "url"),
    ("object_store", {"url": "file:///nowhere/kv"}, "url"),
    ("object_store", {"url": f"s3://u:{SECRET}@bucket"}, "url"),
    ("object_store", {"secret_acess_key": SECRET}, "secret_acess_key"),
    ("object_store", {"secret_access_key": [SECRET]}, "secret_access_key"),
    ("object_store", {"endpoint": "http://127.0.0.1:9000"}, "endpoint"),
    ("object_store", {"s3_endpoint": "bucket.example"}, "s3_endpoint"),
    ("object_store", {"max_capacity_gb": 1}, "max_capacity_gb"),
    ("object_store", {"s3_region": "a"}, "region"),
    ("object_store", {"per_op_workers": {"store": 0}}, "per_op_workers.store"),
    ("object_store", {"timeout": "soon"}, "timeout"),
    ("fault_inject", {"inner": None}, "inner"),
    ("fault_inject", {"inner": {"type": "fss"}}, "inner.type"),
    ("fault_inject", {"inner": {"type": "fs", "base_path": "/x", "isolation": "process"}}, "inner.isolation"),
    ("fault_inject", {"faults": ["bang"]}, "faults"),
    ("fault_inject", {"faults": [[1]]}, "faults"),
    ("plugin", {"class_name": None}, "class_name"),
    ("plugin", {"adapter_params": [1]}, "adapter_params"),
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
