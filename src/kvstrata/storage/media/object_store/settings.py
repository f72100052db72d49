"""Checked settings of the `object_store` adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvstrata.storage.lanes import Lane


class ObjectStoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings. Only `connect`, which makes the library's store, has the credentials; `url` has none."""

    url: str
    connect: Callable[[], Any]
    medium: str = ""
    """As in the adapter's `Capabilities`."""
    multipart_bytes: int = 64 << 20
    part_bytes: int = 8 << 20
    num_workers: int = 4
    per_op_workers: dict[Lane, int] = {}
