"""What `lmcache-server --check` looks at beyond the settings themselves.

The settings may be for another machine, so what this machine lacks is told apart from a setting that is wrong
everywhere.  A server starts here with neither.  Nothing is opened, written or asked over the network.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.process.ports import Listening, port_holder
from kvstrata.tiers.config import TierConfig, load
from kvstrata.types import GB


def look_at(tiers: list[TierConfig], ports: list[Listening]) -> list[str]:
    """What keeps a server with these tiers and ports from working on this machine now.

    Raises ConfigError for a plugin that can be imported and refuses its settings.
    """
    return [*(said for tier in tiers for said in _tier(tier)), *taken(ports)]


def small_folders(tiers: list[TierConfig]) -> Iterator[str]:
    """The new folders of tiers that have more capacity than their file systems have free."""
    for tier in tiers:
        capacity_gb = tier.entry.get("capacity_gb")
        if tier.folder is None or not isinstance(capacity_gb, int | float):
            continue
        folder = Path(tier.folder)
        existing_folder = existing(folder.absolute())
        free_gb = shutil.disk_usage(existing_folder).free / GB
        if not folder.exists() and capacity_gb > free_gb:
            free = f"the file system of {str(existing_folder)!r} has {free_gb:.1f} GB free"
            yield f"{tier.place.at('capacity_gb')}: {capacity_gb}, but {free}"


def existing(path: Path) -> Path:
    """The nearest folder at or above `path` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _tier(tier: TierConfig) -> Iterator[str]:
    place, medium = tier.place, load(tier.medium)
    try:
        tier.make()
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        yield error.message
    if medium.look is not None:
        try:
            medium.look(tier.fields, tier.name)
        except KvstrataError as error:
            yield f"{place.path}: {error.message}"
    if tier.folder:
        folder = existing(Path(tier.folder).absolute())
        if not os.access(folder, os.W_OK | os.X_OK):
            yield f"{place.path}: {tier.folder!r}: {str(folder)!r} cannot be written to by uid {os.geteuid()}"


def taken(ports: list[Listening]) -> Iterator[str]:
    """The ports that another process has now."""
    for asked in ports:
        if asked.port and (holder := port_holder(asked.port)):
            yield f"{asked.setting}: {asked.port} is held by {holder} now"
