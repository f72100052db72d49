"""`kvstrata bench`: benchmarks of a running server, one storage adapter (`l2`), engines (`serve`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from kvstrata.cli.boundary import guarded


@guarded("kvstrata bench")
def main(arguments: Sequence[str] | None) -> int:
    """Run one benchmark, importing only that one; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words[:1] in (["l2"], ["serve"]) else "engine"
    status: int = import_module(f"kvstrata.cli.bench.{name}").main(words)
    return status


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a flag that is a whole number within bounds."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, found {text!r}")
        return int(text)

    return read
