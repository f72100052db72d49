"""`lmcache-server`: one cache server on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.process.keeper import Restarts, keep


@guarded("lmcache-server")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (boundary.Exit)."""
    return keep("lmcache-server", list(sys.argv[1:] if arguments is None else arguments), serve)


def serve(arguments: Sequence[str], restarts: Restarts) -> int:
    """Run the command in the process that serves. Imports are inside, so that the keeper's process stays small."""
    from kvstrata.cli.starting import look_at, small_folders, start
    from kvstrata.config.client_model import ClientSettings
    from kvstrata.config.flags import server_settings
    from kvstrata.config.lmcache.keys import server_notes
    from kvstrata.config.model import ServerSettings
    from kvstrata.native.core import MAX_SESSIONS
    from kvstrata.server.plan import plan, tcp_ports, used
    from kvstrata.server.process import Server

    def notes(settings: ServerSettings) -> list[str]:
        noop = (
            "l1.eviction_policy is noop: nothing is evicted from L1, so once it is full every store is refused; VALUE "
            "evicts the chunks with the lowest value"
        )
        about = [noop] if settings.l1.eviction_policy == "noop" else []
        return [*server_notes(os.environ, ClientSettings.__struct_fields__), *about]

    def check(settings: ServerSettings, lacking: list[str]) -> tuple[ServerSettings, list[str]]:
        found = plan(settings, os.environ, lacking)
        lacking += look_at(found.adapters, tcp_ports(settings))
        where = "on a machine that has what this machine lacks" if lacking else "here"
        return used(found, os.environ), [
            *(f"note: {note}" for note in small_folders(found.adapters)),
            f"these settings can be used {where}: L1 of {found.extents_bytes} bytes, up to {MAX_SESSIONS} engine "
            "processes attached at a time",
        ]

    flags, read = server_settings(arguments, os.environ)
    return start(
        "lmcache-server", flags, read, restarts, Server, lambda one: plan(one, os.environ), check, notes
    )


if __name__ == "__main__":
    sys.exit(main())
