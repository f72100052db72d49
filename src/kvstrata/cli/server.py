"""`lmcache-server`: one cache server on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from kvstrata.config.flags import parse_server_flags
from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.errors import KvstrataError
from kvstrata.service.server import EXIT_CONFIG, plan, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: settings are wrong, 70: the server failed)."""
    try:
        flags = parse_server_flags(sys.argv[1:] if arguments is None else arguments)
        file = flags.config_file or os.environ.get("KVSTRATA_CONFIG_FILE", "")
        settings = load(ServerSettings, file=file or None, environment=os.environ, flags=flags.settings)
        if flags.check:
            plan(settings, os.environ)
            print(msgspec.json.format(msgspec.json.encode(settings), indent=2).decode())
            return 0
        return run(settings, notes=flags.notes, ready_fd=flags.ready_fd)
    except KvstrataError as error:
        print(f"lmcache-server: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
