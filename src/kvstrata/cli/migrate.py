"""`kvstrata migrate FILE…`: prints kvstrata's configuration for a deployment of LMCache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.config.lmcache.migration import Found, Migration, merged, read
from kvstrata.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata migrate`."""
    top = argparse.ArgumentParser(
        prog="kvstrata migrate",
        description="Prints kvstrata's configuration for a deployment of LMCache, nothing "
        "is written or started. Exit status 1: something could not be translated, as a comment says.",
    )
    top.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="LMCache's file (LMCACHE_CONFIG_FILE) of one deployment, and what sets its LMCACHE_… variables or "
        "contains the file: an env file, a script, a compose file, a manifest",
    )
    return top


@guarded("kvstrata migrate")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status: 1 if something could not be translated, 2 if a file cannot be read."""
    files: dict[str, list[Found]] = {}
    status = 0
    for file in parser().parse_args(arguments).files:
        try:
            files[file] = read(file)
        except ConfigError as error:
            print(f"kvstrata migrate: {error.message}", file=sys.stderr)
            status = 2
    if files:
        migration, names = Migration(*merged(files.values())), ", ".join(files)
        print(migration.text(names), end="")
        if migration.failed:
            print(
                f"kvstrata migrate: {names}: not translated: {', '.join(migration.failed)}", file=sys.stderr
            )
            status = max(status, 1)
    return status
