"""`kvstrata ctl log-level` and `kvstrata ctl cluster log-level`: what a server or controller logs."""

from __future__ import annotations

import argparse
from typing import get_args

from kvstrata.cli.asking import Ask
from kvstrata.config.log_model import Level


def add(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the command."""
    parser.add_argument(
        "level",
        nargs="?",
        type=str.lower,
        choices=get_args(Level),
        metavar="LEVEL",
        help=f"from now on, log from {', '.join(get_args(Level)[:-1])} or {get_args(Level)[-1]} upwards, until the "
        "process ends or gets SIGHUP (only show the level)",
    )


def request(options: argparse.Namespace) -> Ask:
    """The request for these arguments."""
    if options.level is None:
        return Ask("/v1/log-level")
    return Ask("/v1/log-level", {"level": options.level}, "PUT")
