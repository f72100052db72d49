"""`lmcache-server`: one cache server on this host."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.process.keeper import EXIT_CONFIG, Restarts, keep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: settings are wrong, 70: the server failed)."""
    return keep("lmcache-server", list(sys.argv[1:] if arguments is None else arguments), serve)


def serve(arguments: Sequence[str], restarts: Restarts) -> int:
    """The command in the process that serves. What it needs is imported here, so that its keeper stays small."""
    import json

    import msgspec

    from kvstrata.config.flags import parse_server_flags
    from kvstrata.config.load import load
    from kvstrata.config.model import ServerSettings
    from kvstrata.errors import KvstrataError
    from kvstrata.native.pool import MAX_SESSIONS
    from kvstrata.server.process import plan, run

    try:
        flags = parse_server_flags(arguments)
        file = flags.config_file or os.environ.get("KVSTRATA_CONFIG_FILE", "")
        settings = load(ServerSettings, file=file or None, environment=os.environ, flags=flags.settings)
        if flags.check:
            planned = plan(settings, os.environ)
            print(json.dumps(shown(msgspec.to_builtins(settings)), indent=2))
            print(
                f"lmcache-server: these settings can be used: L1 of {planned.extents_bytes} bytes, up to "
                f"{MAX_SESSIONS} engine processes attached at a time",
                file=sys.stderr,
            )
            return 0
        return run(settings, notes=flags.notes, ready_fd=flags.ready_fd, restarts=restarts)
    except KvstrataError as error:
        print(f"lmcache-server: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


_SECRET = re.compile(r"password|passwd|secret|token|credential|access_key|private_key", re.IGNORECASE)


def shown(settings: Any, name: str = "") -> Any:
    """Settings as they may be printed: values whose name tells of a secret are masked, paths of files are not."""
    if isinstance(settings, Mapping):
        return {key: shown(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list):
        return [shown(value, name) for value in settings]
    if settings and _SECRET.search(name) and not name.endswith(("_file", "_env")):
        return "***"
    return settings


if __name__ == "__main__":
    sys.exit(main())
