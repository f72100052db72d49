"""Directories that users name in settings."""

from __future__ import annotations

import os

from kvstrata.tiers.structs import Place


def folder_at(base_path: str) -> str:
    """The directory of an adapter. `base_path` was checked by `absolute`."""
    return os.path.abspath(os.path.expanduser(base_path))


def absolute(path: str, place: Place, name: str) -> str:
    """The directory of field `name` as an absolute path.

    Raises ConfigError if its `~` cannot be resolved, or if it contains a null byte, where the system would cut it off.
    """
    if "\0" in path:
        raise place.wrong(name, path, "must be a path without null bytes")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise place.wrong(name, path, "must be an absolute path, since the home directory is not known here")
    return os.path.abspath(expanded)
