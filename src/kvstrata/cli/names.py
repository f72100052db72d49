"""`kvstrata names`: the commands `lmcache`, `lmcache_controller` and `lmcache_server`, as scripts that run kvstrata.

The scripts belong to no distribution.  A wheel with commands of these names would overwrite LMCache's in an environment
that has both, and take them along when it is removed.  So `install` writes a script only where there is no file of that
name, and `remove` removes only files that `install` wrote; pip may overwrite or remove the scripts like any file.
A script hands over to LMCache where that is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.cli.boundary import guarded

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

NAMES = ("lmcache", "lmcache_controller", "lmcache_server")
MARK = "# Written by `kvstrata names install`; `kvstrata names remove` removes it."
# The first lines are a comment and a command for sh, and a text for Python: paths may be long and have spaces.
SCRIPT = """\
#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
{mark}
import sys

try:
    from kvstrata.cli.names import run
except ImportError:
    sys.exit(f"{name}: kvstrata is not installed any more; delete {{__file__}}")
sys.exit(run("{name}", sys.argv[1:]))
"""
ABSENT, OURS, OTHER = "not there", "runs kvstrata", "belongs to another package"


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata names`."""
    import argparse
    import sysconfig
    from pathlib import Path

    top = argparse.ArgumentParser(
        prog="kvstrata names",
        description="The commands `lmcache server …`, `lmcache_controller …` and `lmcache_server`, run by kvstrata. "
        "A command that LMCache has installed is left alone.",
    )
    top.add_argument("step", choices=("install", "remove"), help="what to do with the commands")
    top.add_argument("--dir", type=Path, default=Path(sysconfig.get_path("scripts")),
        help="folder of the commands (%(default)s)")  # fmt: skip
    return top


@guarded("kvstrata names")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status: 1 if a name belongs to another package or cannot be written."""
    options = parser().parse_args(arguments)
    status = 0
    for name in NAMES:
        path = options.dir / name
        try:
            if options.step == "install" and state(path) != OTHER:
                partial = path.with_name(f".{name}.new")
                partial.write_text(SCRIPT.format(python=sys.executable, mark=MARK, name=name))
                partial.chmod(0o755)
                partial.replace(path)
            elif options.step == "remove" and state(path) == OURS:
                path.unlink()
        except OSError as error:
            print(f"kvstrata names: {path}: {error.strerror}", file=sys.stderr)
            status = 1
            continue
        now = state(path)
        print(f"{path}: {now}")
        if options.step == "install" and now == OTHER:
            status = 1
    return status


def state(path: Path) -> str:
    """Whose the command is."""
    try:
        with open(path, "rb") as file:
            return OURS if MARK.encode() in file.read(4096) else OTHER
    except FileNotFoundError:
        return ABSENT


def run(name: str, arguments: Sequence[str]) -> int:
    """Run LMCache's command `name`: LMCache's own where it is installed, else ours. Returns the exit status.

    Little is imported before the server or the controller has forked (process/keeper.py).
    """
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
    from kvstrata.config.lmcache import COMMANDS

    asked = f"{name} {arguments[0]}" if name == "lmcache" and arguments else name
    if asked in COMMANDS:
        use = f"use {COMMANDS[asked]}" if COMMANDS[asked] else "kvstrata has no such command"
        print(f"{asked}: {use} (this is kvstrata)", file=sys.stderr)
        return 2
    print("kvstrata runs LMCache's commands:\n")
    for command, ours in COMMANDS.items():
        print(f"  {command:20}{ours or '(nothing)'}")
    return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
