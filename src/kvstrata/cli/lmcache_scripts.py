"""What the scripts of `kvstrata names install` run.

Little is imported before the server or the controller has forked (process/keeper.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def run(name: str, arguments: Sequence[str]) -> int:
    """Run LMCache's command `name`: LMCache's own where it is installed, else ours. Returns the exit status."""
    if importlib.util.find_spec("lmcache") is not None:
        from importlib.metadata import entry_points

        for found in entry_points(group="console_scripts", name=name):
            return found.load()() or 0
    if name == "lmcache_controller":
        from kvstrata.cli.controller import main as controller

        return controller(arguments)
    if name == "lmcache" and arguments[:1] == ["server"]:
        from kvstrata.cli.server import main as server

        return server(arguments[1:])
    return _refuse(name, arguments)


def _refuse(name: str, arguments: Sequence[str]) -> int:
    from kvstrata.config.lmcache.interfaces import COMMANDS, advice

    asked = f"{name} {arguments[0]}" if name == "lmcache" and arguments else name
    if asked in COMMANDS:
        print(f"{asked}: {advice(COMMANDS[asked])} (this is kvstrata)", file=sys.stderr)
        return 2
    print("kvstrata runs LMCache's commands:\n")
    for command, entry in COMMANDS.items():
        print(f"  {command:20}{advice(entry)}")
    return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
