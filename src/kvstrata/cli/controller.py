"""`lmcache-controller`: the process that knows which instance of a cluster holds which chunk."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.process.keeper import EXIT_CONFIG, Restarts, keep


@guarded("lmcache-controller")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: settings are wrong, 70: the controller failed)."""
    return keep("lmcache-controller", list(sys.argv[1:] if arguments is None else arguments), serve)


def serve(arguments: Sequence[str], restarts: Restarts) -> int:
    """Run the command in the process that serves. Imports are inside, so that the keeper's process stays small."""
    import functools
    import json

    import msgspec

    from kvstrata.config.controller_model import ControllerSettings
    from kvstrata.config.flags import parse_controller_flags
    from kvstrata.config.load import load
    from kvstrata.config.pod_links import pod_link_notes
    from kvstrata.config.secrets import shown
    from kvstrata.controller.process import plan, run
    from kvstrata.errors import KvstrataError

    try:
        flags = parse_controller_flags(arguments)
        read = functools.partial(
            load,
            ControllerSettings,
            file=flags.config_file or None,
            environment=os.environ,
            flags=flags.settings,
            flag_names=flags.names,
            wrong_flags=flags.wrong,
        )
        settings = read()
        notes = [*flags.notes, *pod_link_notes(os.environ)]
        if flags.check:
            plan(settings, os.environ)
            print(json.dumps(shown(msgspec.to_builtins(settings))[0], indent=2))
            for note in notes:
                print(f"lmcache-controller: note: {note}", file=sys.stderr)
            return 0
        return run(settings, notes=notes, reread=read, ready_fd=flags.ready_fd, restarts=restarts)
    except KvstrataError as error:
        for line in error.lines:
            print(f"lmcache-controller: {line}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
