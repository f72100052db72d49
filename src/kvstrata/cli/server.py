"""`lmcache-server`: one cache server on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import Exit, guarded, start_failed
from kvstrata.process.keeper import Restarts, keep


@guarded("lmcache-server")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (boundary.Exit)."""
    return keep("lmcache-server", list(sys.argv[1:] if arguments is None else arguments), serve)


def serve(arguments: Sequence[str], restarts: Restarts) -> int:
    """Run the command in the process that serves. Imports are inside, so that the keeper's process stays small."""
    import json

    import msgspec

    from kvstrata.cli.check import look_at, small_folders
    from kvstrata.config.client_model import ClientSettings
    from kvstrata.config.command_line import server_settings
    from kvstrata.config.lmcache.variables import server_notes
    from kvstrata.config.pod_links import pod_link_notes
    from kvstrata.config.secrets import shown
    from kvstrata.errors import KvstrataError
    from kvstrata.native.core import MAX_SESSIONS
    from kvstrata.server.plan import plan, tcp_ports, used
    from kvstrata.server.process import run

    try:
        flags, read = server_settings(arguments, os.environ)
        settings = read()
        notes = [
            *flags.notes,
            *server_notes(os.environ, ClientSettings.__struct_fields__),
            *pod_link_notes(os.environ),
        ]
        if settings.l1.eviction_policy == "noop":
            notes.append(
                "l1.eviction_policy is noop: nothing leaves L1, so once it is full every further store is refused; LRU "
                "evicts what was used longest ago"
            )
        if flags.check:
            lacking: list[str] = []
            planned = plan(settings, os.environ, lacking)
            lacking += look_at(planned.adapters, tcp_ports(settings))
            notes += small_folders(planned.adapters)
            print(json.dumps(shown(msgspec.to_builtins(used(planned, os.environ)))[0], indent=2))
            exposed = [f"{field} is a secret on the command line" for field in flags.exposed]
            for note in (*notes, *exposed):
                print(f"lmcache-server: note: {note}", file=sys.stderr)
            for lack in lacking:
                print(f"lmcache-server: not on this machine: {lack}", file=sys.stderr)
            where = "on a machine that has what this one lacks" if lacking else "here"
            print(
                f"lmcache-server: these settings can be used {where}: L1 of {planned.extents_bytes} bytes, up to "
                f"{MAX_SESSIONS} engine processes attached at a time",
                file=sys.stderr,
            )
            return Exit.LATER if lacking else Exit.DONE
        return run(
            settings,
            notes=notes,
            exposed=flags.exposed,
            reread=read,
            ready_fd=flags.ready_fd,
            restarts=restarts,
        )
    except KvstrataError as error:
        return start_failed("lmcache-server", error)


if __name__ == "__main__":
    sys.exit(main())
