"""A server's settings, as its command line, the environment and the file give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvstrata.config.flags import Flags, parse_server_flags
from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings

LMCACHE_NEEDS = {"size_gb", "eviction_policy"}
"""Settings of L1 whose flags `lmcache server` requires, and no command line of ours needs both."""


def server_settings(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Flags, Callable[[], ServerSettings]]:
    """The parsed command line of a server, and a function that reads the settings, anew each time.

    The function raises ConfigError for everything that is wrong, also about the command line.
    """
    flags = parse_server_flags(arguments)
    file = flags.config_file or environment.get("KVSTRATA_CONFIG_FILE", "")
    named = file or "l2_adapters" in flags.settings or environment.get("KVSTRATA_L2_ADAPTERS")
    no_l2 = not named and flags.settings.get("l1", {}).keys() >= LMCACHE_NEEDS
    if no_l2:
        flags.notes.append(
            "no --l2-adapter: with --l1-size-gb and --eviction-policy, which `lmcache server` requires, nothing is "
            'kept on disk, as there; --l2-adapter \'{"type": "disk", …}\' makes an L2'
        )

    def read() -> ServerSettings:
        settings = load(
            ServerSettings,
            file=file or None,
            environment=environment,
            flags=flags.settings,
            flag_names=flags.names,
            wrong_flags=flags.wrong,
        )
        return msgspec.structs.replace(settings, l2_adapters=[]) if no_l2 else settings

    return flags, read
