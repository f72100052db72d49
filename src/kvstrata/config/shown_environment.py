"""The environment variables that an admin is shown: those of a fixed list, without the secrets in their values."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping

from kvstrata.config.demands import bare_type
from kvstrata.config.load import OTHER_ENV, parse_yaml, variables
from kvstrata.config.model import ServerSettings
from kvstrata.config.secrets import shown
from kvstrata.errors import ConfigError
from kvstrata.text import one_line

MAX_SHOWN_CHARS = 2_000
"""Most characters of a variable's value that are shown."""
OTHERS = frozenset({
    *OTHER_ENV,
    "LANG", "TZ", "MALLOC_ARENA_MAX", "MALLOC_CONF", "OMP_NUM_THREADS",
    "UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "UCX_RNDV_SCHEME", "UCX_RNDV_THRESH", "UCX_MAX_RNDV_RAILS",
    "UCX_IB_GID_INDEX", "UCX_IB_ROCE_VERSION_NUM", "UCX_MEMTYPE_CACHE", "UCX_PROTO_ENABLE", "UCX_TCP_PORT_RANGE",
    "NIXL_LOG_LEVEL", "NIXL_PLUGIN_DIR",
})  # fmt: skip
"""Variables that are not settings but are shown too.  Nothing is taken out of their values."""


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The listed variables that are set, with their values; a setting's value is read as YAML to leave out its secrets.

    A variable whose value cannot be read is left out, since its secrets cannot be found.
    """
    settings = variables(ServerSettings)
    found = {}
    for name, text in sorted(environment.items()):
        if name in OTHERS:
            found[name] = one_line(text, MAX_SHOWN_CHARS)
        elif name in settings:
            key, kind = settings[name]
            value: object = text
            bare = bare_type(kind)
            if bare is not str:
                try:
                    value = parse_yaml(text)
                except (ConfigError, ValueError, RecursionError):
                    continue
                if typing.get_origin(bare) in (list, dict) and not isinstance(value, list | dict):
                    continue
            last = key.rpartition(".")[2]
            public = shown({last: value})[0][last]
            spelt = public if isinstance(public, str) else json.dumps(public, default=str)
            found[name] = one_line(spelt, MAX_SHOWN_CHARS)
    return found
