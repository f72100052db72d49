"""A server's settings, as its command line, the environment and the file give them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from kvstrata.config.flags import Flags, parse_server_flags
from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings


def server_settings(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Flags, Callable[[], ServerSettings]]:
    """The parsed command line of a server, and a function that reads the settings, anew each time.

    The function raises ConfigError for everything that is wrong, also about the command line.
    """
    flags = parse_server_flags(arguments)
    file = flags.config_file or environment.get("KVSTRATA_CONFIG_FILE", "")
    return flags, functools.partial(
        load,
        ServerSettings,
        file=file or None,
        environment=environment,
        flags=flags.settings,
        flag_names=flags.names,
        wrong_flags=flags.wrong,
    )
