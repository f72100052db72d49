"""The fields of an entry of type `fs`."""

from __future__ import annotations

import functools
import os
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says
from kvstrata.tiers.config import Make, Medium
from kvstrata.tiers.media.fs.adapter import FsAdapter
from kvstrata.tiers.media.shared import NumWorkers, PerOpWorkers, absolute, folder_at
from kvstrata.tiers.structs import Place
from kvstrata.types import GB

WithoutEffect = Annotated[Any, Meta(description="Accepted, but has no effect.")]


class FsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of any mounted file system, with a file per record."""

    # fmt: off
    base_path: Annotated[str, says("The directory.", min_length=1)]
    relative_tmp_dir: Annotated[str, says(
        "Directory below `base_path` for records that are being written.", min_length=1)] = "tmp"
    shared: Annotated[bool, says(
        "Several servers use the directory: each caps its own records and reads those of all.")] = False
    use_odirect: Annotated[bool, says("Write and read past the page cache, where the file system can.")] = True
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
            place.noted(field, "a record is read in one piece, by the workers of num_workers")
    size_gb, same_gb = config.capacity_gb, config.max_capacity_gb
    if size_gb is not None and same_gb is not None and size_gb != same_gb:
        raise place.wrong("max_capacity_gb", same_gb, "is another name for capacity_gb; give one of them")
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
        must = "must not begin with a directory of two hex digits, since records lie in such directories"
        raise place.wrong("relative_tmp_dir", tmp, must)


MEDIUM = Medium(FsConfig, _prepare, folder=lambda config: folder_at(config.base_path))
