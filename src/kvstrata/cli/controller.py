"""`lmcache-controller`: the one that knows which instance of a cluster holds which chunk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import msgspec

from kvstrata.cli.server import shown
from kvstrata.config.flags import parse_controller_flags
from kvstrata.config.load import load
from kvstrata.config.model import ControllerSettings
from kvstrata.controller.server import plan, run
from kvstrata.errors import KvstrataError
from kvstrata.process.lifecycle import EXIT_CONFIG


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: settings are wrong, 70: the controller failed)."""
    try:
        flags = parse_controller_flags(sys.argv[1:] if arguments is None else arguments)
        settings = load(
            ControllerSettings,
            file=flags.config_file or None,
            environment=os.environ,
            flags=flags.settings,
        )
        if flags.check:
            plan(settings, os.environ)
            print(json.dumps(shown(msgspec.to_builtins(settings)), indent=2))
            return 0
        return run(settings, ready_fd=flags.ready_fd)
    except KvstrataError as error:
        print(f"lmcache-controller: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
