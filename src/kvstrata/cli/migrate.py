"""`kvstrata migrate FILE…`: prints kvstrata's configuration for files that were written for LMCache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.config.lmcache.migration import Migration
from kvstrata.config.load import read_yaml
from kvstrata.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata migrate`."""
    top = argparse.ArgumentParser(
        prog="kvstrata migrate",
        description="Prints kvstrata's configuration for files that were written for LMCache (LMCACHE_CONFIG_FILE), "
        "with a comment for each line. Nothing is written or started. Exit status 1: something could not be "
        "translated, as a comment says.",
    )
    top.add_argument("files", metavar="FILE", nargs="+", help="a YAML or JSON file of LMCache")
    return top


@guarded("kvstrata migrate")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status: 1 if something could not be translated, 2 if a file cannot be read."""
    status = 0
    for number, file in enumerate(parser().parse_args(arguments).files):
        try:
            migration = Migration(read_yaml(file))
        except ConfigError as error:
            print(f"kvstrata migrate: {error.message}", file=sys.stderr)
            status = 2
            continue
        print("---\n" * bool(number) + migration.text(file), end="")
        if migration.failed:
            print(f"kvstrata migrate: {file}: not translated: {', '.join(migration.failed)}", file=sys.stderr)
            status = max(status, 1)
    return status
