"""The adapter of `{"type": "flat_files", "base_path": "/data/kv", "capacity_gb": 20}`, whose medium is in C++.

The connector is in connector.cpp; kvstrata's NativeAdapter makes an adapter of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.tiers.native_adapter import NativeAdapter
from kvstrata_flat_files import _connector

GB = 1 << 30
FIELDS = ("base_path", "capacity_gb", "num_workers")


def make_adapter(base_path: str, capacity_bytes: int = 0, num_workers: int = 4) -> NativeAdapter:
    """Make the adapter, not opened yet; `capacity_bytes` 0: no cap."""
    capsule = _connector.connector(base_path, capacity_bytes)
    return NativeAdapter(capsule, name="flat_files", num_workers=num_workers)


def from_fields(fields: Mapping[str, Any], path: str) -> NativeAdapter:
    """The entry point: make the adapter of an `l2_adapters` entry at `path`. Raises ConfigError naming the field."""

    def wrong(name: str, must: str) -> ConfigError:
        return ConfigError(f"{path}.{name}: {must}, found {fields.get(name)!r}", field=f"{path}.{name}")

    for name in fields:
        if name not in FIELDS:
            raise wrong(name, f"unknown field; the fields are {', '.join(FIELDS)}")
    base_path, capacity_gb = fields.get("base_path"), fields.get("capacity_gb", 0)
    num_workers = fields.get("num_workers", 4)
    if not isinstance(base_path, str) or not base_path or "\0" in base_path:
        raise wrong("base_path", "must name a directory")
    if isinstance(capacity_gb, bool) or not isinstance(capacity_gb, (int, float)) or capacity_gb < 0:
        raise wrong("capacity_gb", "must be a number of GB, 0 for no cap")
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or not 1 <= num_workers <= 256:
        raise wrong("num_workers", "must be a whole number from 1 to 256")
    return make_adapter(base_path, int(capacity_gb * GB), num_workers)
