"""The environment of child processes: without our settings, which may hold passwords that no child reads."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.config.load import ENV_PREFIX, OTHER_ENV

PLAIN = frozenset({"PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "TZ", *OTHER_ENV})


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """For a child in which an SDK runs, which may read any variable that is not ours."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV
    }


def plain(environment: Mapping[str, str]) -> dict[str, str]:
    """For a child of which nothing but our own code runs: only what Python itself needs."""
    return {name: value for name, value in environment.items() if name in PLAIN}
