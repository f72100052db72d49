"""`lmcache-controller`: the process that tracks which instance of a cluster holds which chunk."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.process.keeper import Restarts, keep


@guarded("lmcache-controller")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: settings are wrong, 70: the controller failed)."""
    return keep("lmcache-controller", list(sys.argv[1:] if arguments is None else arguments), serve)


def serve(arguments: Sequence[str], restarts: Restarts) -> int:
    """Run the command in the process that serves. Imports are inside, so that the keeper's process stays small."""
    from kvstrata.cli.starting import start, taken
    from kvstrata.config.controller_model import ControllerSettings
    from kvstrata.config.flags import parse
    from kvstrata.controller.process import Controller, plan, tcp_ports

    def check(settings: ControllerSettings, lacking: list[str]) -> tuple[ControllerSettings, list[str]]:
        plan(settings, os.environ)
        lacking += taken(tcp_ports(settings))
        return settings, []

    flags = parse("lmcache-controller", arguments)
    read = flags.reader(ControllerSettings, os.environ)
    made = functools.partial(plan, environment=os.environ)
    return start("lmcache-controller", flags, read, restarts, Controller, made, check)


if __name__ == "__main__":
    sys.exit(main())
