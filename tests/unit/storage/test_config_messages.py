"""The errors of every kind of wrong `--l2-adapter` entry, word for word, and the fields that right entries pass on.

`python -m tests.unit.storage.test_config_messages` writes the file of messages anew; check each change that it makes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.storage.entry import configure_tier

GOLDEN = Path(__file__).parent / "golden" / "l2_config_messages.json"
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

NUMBERS = {
    "disk": (
        "capacity_gb", "segment_mb", "min_free_gb", "reinsert_percent", "scrub_mb_s", "num_workers",
        "deadline_ms", "max_stuck_mb", "host_kill_ms", "codec_staging_mb", "codec_workers",
    ),
    "fs": ("capacity_gb", "max_capacity_gb", "min_free_gb", "num_workers"),
    "resp": (
        "port", "database_id", "ttl_seconds", "max_capacity_gb", "request_timeout", "connection_timeout", "num_workers",
    ),
    "mooncake_store": ("num_workers",),
    "object_store": ("max_retries", "retry_timeout_ms", "multipart_mb", "part_mb", "num_workers"),
    "fault_inject": ("rate", "seed"),
    "plugin": (),
}  # fmt: skip
TEXTS = {
    "disk": ("type", "base_path", "policy", "isolation"),
    "fs": ("base_path", "relative_tmp_dir"),
    "resp": (
        "host", "key_prefix", "username", "password", "password_file", "password_env", "url", "startup_nodes",
        "sentinels",
    ),
    "mooncake_store": ("local_hostname", "protocol"),
    "object_store": ("url", "region"),
    "fault_inject": (),
    "plugin": ("module_path", "class_name"),
}  # fmt: skip
FLAGS = {
    "disk": ("use_odirect", "shared"),
    "fs": ("use_odirect", "shared"),
    "resp": ("cluster_mode", "tls_enable"),
    "mooncake_store": ("preregister_l1_memory",),
    "object_store": (),
    "fault_inject": (),
    "plugin": (),
}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("zzzzzzzz", {}),
    ("moncake", {}),
    ("hf3fs", {}),
    ("peer", {"controller": "tcp://h:1"}),
    ("disk", {"shared": True}),
    ("disk", {"serde": {"type": "fp8"}}),
    ("disk", {"segment_mb": 100}),
    ("disk", {"host_kill_ms": 500}),
    ("disk", {"policy": "thrugh"}),
    ("disk", {"isolation": "thread"}),
    ("disk", {"base_path": "\ud800"}),
    ("disk", {"per_op_workers": {"retreive": 1}}),
    ("disk", {"per_op_workers": {"store": 0}}),
    ("disk", {"per_op_workers": [1]}),
    ("disk", {"codec": ["zst"]}),
    ("disk", {"codec": 5}),
    ("disk", {"codec": [["zstd"]]}),
    ("disk", {"codec": ["zstd", "zstd"]}),
    ("disk", {"codec": ["zstd", "fp8"]}),
    ("disk", {"codec": [{"name": "zstd", "level": "high", "planes": 3, "lvel": 3}]}),
    ("disk", {"codec": ["aes-gcm"]}),
    ("disk", {"codec": [{"name": "mac", "key_file": "/no/such/file"}, "mac"]}),
    ("disk", {"capacity_gb": float("inf")}),
    ("fs", {"host_kill_ms": 500}),
    ("fs", {"isolation": "process", "host_kill_ms": 5}),
    ("fs", {"base_path": "~nobody-of-that-name/kv"}),
    ("fs", {"relative_tmp_dir": "../x"}),
    ("fs", {"relative_tmp_dir": "/tmp"}),
    ("fs", {"relative_tmp_dir": "ab"}),
    ("fs", {"capacity_gb": 1, "max_capacity_gb": 2}),
    ("resp", {"host": None}),
    ("resp", {"url": "redis://h"}),
    ("resp", {"url": "redis://h", "host": None, "port": 6379}),
    ("resp", {"url": f"http://u:{SECRET}@h", "host": None}),
    ("resp", {"url": f"redis://u:{SECRET}@h:port", "host": None}),
    ("resp", {"url": "redis://u@h/name", "host": None}),
    ("resp", {"url": f"redis://:{SECRET}@h", "host": None}),
    ("resp", {"url": "redis://u@h", "host": None, "username": "u", "password": SECRET}),
    ("resp", {"url": "redis://h/1", "host": None, "database_id": 1}),
    ("resp", {"url": "rediss://h", "host": None, "tls_enable": False}),
    ("resp", {"password": SECRET, "password_env": "X"}),
    ("resp", {"password_env": "NOT_SET_ANYWHERE"}),
    ("resp", {"password_file": "/nowhere/password"}),
    ("resp", {"username": "u"}),
    ("resp", {"key_prefix": "a{b}"}),
    ("resp", {"key_prefix": "x" * 65}),
    ("resp", {"startup_nodes": [5]}),
    ("resp", {"database_id": 1, "cluster_mode": True}),
    ("resp", {"host": None, "startup_nodes": "a:1,b:2"}),
    ("resp", {"host": None, "startup_nodes": "a:x"}),
    ("resp", {"host": None, "startup_nodes": ["a:70000"]}),
    ("resp", {"host": None, "sentinels": "a"}),
    ("resp", {"host": None, "sentinels": "a", "sentinel_master": "m", "cluster_mode": True}),
    ("resp", {"sentinel_master": "m"}),
    ("resp", {"tls_ca_file": "/nowhere"}),
    ("resp", {"tls_enable": True, "tls_ca_file": "/nowhere"}),
    ("resp", {"tls_enable": True, "tls_key_file": "/nowhere"}),
    ("mooncake_store", {"local_hostname": None}),
    ("mooncake_store", {"num_wrkers": 1}),
    ("mooncake_store", {"metadata_server": None}),
    ("mooncake_store", {"tenant_id": None}),
    ("mooncake_store", {"protocl": "rdma"}),
    ("mooncake_store", {"replicate": [1]}),
    ("mooncake_store", {"rdma_devices": ["mlx5_0"]}),
    ("object_store", {"url": "s4://bucket"}),
    ("object_store", {"url": "s3://"}),
    ("object_store", {"url": "file:///nowhere/kv"}),
    ("object_store", {"url": f"s3://u:{SECRET}@bucket"}),
    ("object_store", {"secret_acess_key": SECRET}),
    ("object_store", {"secret_access_key": [SECRET]}),
    ("object_store", {"endpoint": "http://127.0.0.1:9000"}),
    ("object_store", {"s3_endpoint": "bucket.example"}),
    ("object_store", {"max_capacity_gb": 1}),
    ("object_store", {"s3_region": "a"}),
    ("object_store", {"virtual_hosted_style_request": "maybe"}),
    ("object_store", {"per_op_workers": {"store": 0}}),
    ("object_store", {"timeout": "soon"}),
    ("fault_inject", {"inner": None}),
    ("fault_inject", {"inner": {"type": "fss"}}),
    ("fault_inject", {"inner": {"type": "fs", "base_path": "/x", "isolation": "process"}}),
    ("fault_inject", {"faults": ["bang"]}),
    ("fault_inject", {"faults": [[1]]}),
    ("plugin", {"class_name": None}),
    ("plugin", {"adapter_params": [1]}),
]


def cases() -> Iterator[dict[str, Any]]:
    """Entries, wrong ones most of them."""
    for kind, least in LEAST.items():
        least = {"type": kind, **least}
        yield least
        for name in least:
            yield {key: value for key, value in least.items() if key != name}
        for name in NUMBERS[kind]:
            for value in (-1, "four"):
                yield {**least, name: value}
        for name in TEXTS[kind]:
            for value in (5, ""):
                yield {**least, name: value}
        for name in FLAGS[kind]:
            yield {**least, name: "yes"}
        yield {**least, f"{list(least)[-1][:-1]}": SECRET}
    for kind, change in MORE:
        merged = {"type": kind, **LEAST.get(kind, {}), **change}
        yield {key: value for key, value in merged.items() if value is not None}


def told(entry: dict[str, Any]) -> list[str]:
    """The error's field and message, or nothing; then what was logged."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("kvstrata.storage")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        configure_tier(entry, 2)
    except ConfigError as error:
        return [error.field, error.message, *lines]
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return ["", "", *lines]


def all_told() -> dict[str, list[str]]:
    """By entry."""
    return {json.dumps(entry): told(entry) for entry in cases()}


def test_every_message_is_what_it_was_and_shows_no_secret() -> None:
    wanted = json.loads(GOLDEN.read_text())
    found = all_told()
    assert list(found) == list(wanted)
    assert {entry: says for entry, says in found.items() if says != wanted[entry]} == {}
    assert [
        says
        for entry, says in found.items()
        if SECRET in f"{says}" and json.loads(entry)["type"] in ("resp", "object_store")
    ] == []


if __name__ == "__main__":
    os.environ["KVSTRATA_TESTING"] = "1"
    GOLDEN.write_text(json.dumps(all_told(), indent=1, ensure_ascii=False) + "\n")
    print(f"{len(all_told())} entries", file=sys.stderr)
