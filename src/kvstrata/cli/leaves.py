"""The parsers of a command: those without subcommands, and all of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the subcommands of a parser, by name."""
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers below this one that have no subcommands."""
    for child in children(parser).values():
        if children(child):
            yield from leaves(child)
        else:
            yield child
