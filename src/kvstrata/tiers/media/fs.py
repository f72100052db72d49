"""The `fs` adapter: one self-describing file per record in a directory of any mounted file system.

    <base_path>/<2 hex>/<2 hex>/<64 hex>.kvc     the record, byte for byte as it lies in L1
    <base_path>/<relative_tmp_dir>/*.part        records being written, removed at the next start
    <base_path>/.kvstrata.lock                   lock of the server that owns the directory

With `shared` all this lies in <base_path>/server-<number>, one folder for each server.  The medium is C++, with its
invariants in ext/core/src/fs/connector.h and fs/others.h.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says
from kvstrata.native.connector import fs_connector
from kvstrata.tiers.config import Make, Medium
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.shared import NumWorkers, PerOpWorkers, absolute, folder_at, medium_name
from kvstrata.tiers.native_adapter import NativeAdapter
from kvstrata.tiers.structs import Place
from kvstrata.types import GB

WithoutEffect = Annotated[Any, Meta(description="Accepted, but has no effect.")]


class FsAdapter(NativeAdapter):
    """The `fs` adapter. One instance owns its directory, or its folder there, from `open` to `close`."""

    def __init__(
        self,
        base_path: str,
        *,
        relative_tmp_dir: str = "tmp",
        shared: bool = False,
        use_odirect: bool = True,
        capacity_bytes: int = 0,
        min_free_bytes: int | None = None,
        num_workers: int = 4,
        per_op_workers: Mapping[Lane, int] | None = None,
        name: str = "fs",
    ) -> None:
        """`shared`: several servers use the directory; each has a cap of its own and reads all records.

        `use_odirect` bypasses the page cache; on a file system without direct I/O, the adapter logs that and uses the
        cache.  `capacity_bytes` 0: the only limit is `min_free_bytes`, the bytes to leave free on the file system
        (None: 1 % of it, at least 256 MiB, at most a tenth).  The other parameters: tiers/lanes.py.
        """
        self.base_path = Path(os.path.abspath(base_path))
        capsule = fs_connector(
            str(self.base_path),
            relative_tmp_dir,
            shared=shared,
            use_odirect=use_odirect,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
        )
        super().__init__(capsule, name=name, num_workers=num_workers, per_op_workers=per_op_workers)
        if shared:
            medium = medium_name("fs", self.base_path.resolve())
            self.capabilities = msgspec.structs.replace(self.capabilities, medium=medium)

    def path(self, key: bytes) -> Path:
        """The path of a key's record, whether or not it is stored. REQUIRES a directory that is not shared."""
        name = key.hex()
        return self.base_path / name[:2] / name[2:4] / f"{name}.kvc"


class FsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of any mounted file system, with a file per record."""

    # fmt: off
    base_path: Annotated[str, says("The directory.", min_length=1)]
    relative_tmp_dir: Annotated[str, says(
        "Directory below `base_path` for records that are being written.", min_length=1)] = "tmp"
    shared: Annotated[bool, says(
        "Several servers use the directory: each caps its own records and reads the records of all.")] = False
    use_odirect: Annotated[bool, says("Write and read without the page cache, if the file system supports it.")] = True
    capacity_gb: Annotated[Annotated[float, Meta(ge=0, le=1 << 30)] | None, says(
        "GB that the records may take; the least recently used are evicted first; not set or 0: no cap.")] = None
    max_capacity_gb: Annotated[Annotated[float, Meta(ge=0, le=1 << 30)] | None, says(
        "Another name for `capacity_gb`.")] = None
    min_free_gb: Annotated[Annotated[float, Meta(ge=0, le=1 << 30)] | None, says(
        "GB to leave free on the file system; not set: 1 % of it, at least 256 MiB, at most a tenth.")] = None
    # fmt: on
    read_ahead_size: WithoutEffect = None
    num_read_workers: WithoutEffect = None
    read_max_bytes_in_flight: WithoutEffect = None
    num_workers: NumWorkers = 4
    per_op_workers: PerOpWorkers = {}


def _prepare(config: FsConfig, place: Place, name: str) -> Make:
    path = absolute(config.base_path, place, "base_path")
    _check_tmp_dir(config.relative_tmp_dir, place)
    for field in ("read_ahead_size", "num_read_workers", "read_max_bytes_in_flight"):
        if getattr(config, field) is not None:
            place.log_no_effect(field, "a record is read in one piece, by the workers of num_workers")
    size_gb, same_gb = config.capacity_gb, config.max_capacity_gb
    if size_gb is not None and same_gb is not None and size_gb != same_gb:
        raise place.wrong(
            "max_capacity_gb", same_gb, "must equal capacity_gb, its other name; remove one of them"
        )
    free_gb = config.min_free_gb
    return functools.partial(
        FsAdapter,
        path,
        relative_tmp_dir=config.relative_tmp_dir,
        shared=config.shared,
        use_odirect=config.use_odirect,
        capacity_bytes=int((config.capacity_gb or config.max_capacity_gb or 0) * GB),
        min_free_bytes=None if free_gb is None else int(free_gb * GB),
        num_workers=config.num_workers,
        per_op_workers=config.per_op_workers,
        name=name,
    )


def _check_tmp_dir(tmp: str, place: Place) -> None:
    """Raises ConfigError unless `tmp` is a path below `base_path` outside the directories of records."""
    parts = tmp.split(os.sep)
    if os.path.isabs(tmp) or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise place.wrong("relative_tmp_dir", tmp, "must be a plain path below base_path")
    if re.fullmatch("[0-9a-f]{2}", parts[0]):
        must = "must not begin with a directory of two hex digits, since such directories hold the records"
        raise place.wrong("relative_tmp_dir", tmp, must)


MEDIUM = Medium(FsConfig, _prepare, folder=lambda config: folder_at(config.base_path))
