"""`kvstrata names`: the commands `lmcache`, `lmcache_controller` and `lmcache_server`, as scripts that run kvstrata.

The scripts belong to no distribution.  A wheel with commands of these names would overwrite LMCache's in an environment
that has both, and take them along when it is removed.  So `install` writes a script only where there is no file of that
name, and `remove` removes only files that `install` wrote; pip may overwrite or remove the scripts like any file.
A script hands over to LMCache where that is installed (lmcache_scripts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from kvstrata.cli.boundary import guarded

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
    from kvstrata.cli.lmcache_scripts import run
except ImportError:
    sys.exit(f"{name}: kvstrata is not installed any more; delete {{__file__}}")
sys.exit(run("{name}", sys.argv[1:]))
"""
ABSENT, OURS, OTHER = "not there", "runs kvstrata", "belongs to another package"


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata names`."""
    top = argparse.ArgumentParser(
        prog="kvstrata names",
        description="The commands `lmcache server …`, `lmcache_controller …` and `lmcache_server`, run by kvstrata. "
        "A command that LMCache has installed is left alone.",
    )
    top.add_argument("step", choices=("install", "remove", "list"), help="what to do with the commands")
    top.add_argument(
        "--dir",
        type=Path,
        default=Path(sysconfig.get_path("scripts")),
        help="folder of the commands (%(default)s)",
    )
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
                _write(path, name)
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


def _write(path: Path, name: str) -> None:
    partial = path.with_name(f".{name}.{os.getpid()}")
    try:
        partial.write_text(SCRIPT.format(python=sys.executable, mark=MARK, name=name))
        partial.chmod(0o755)
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
