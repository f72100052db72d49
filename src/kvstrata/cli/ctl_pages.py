"""The commands of `kvstrata ctl` that draw pages: `status`, `top` and `cluster status`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvstrata.cli import live
from kvstrata.cli.asking import Ask
from kvstrata.cli.page_cluster import SeenCluster
from kvstrata.cli.page_cluster import page as cluster_page
from kvstrata.cli.page_cluster import warnings_of as warnings_of_cluster
from kvstrata.cli.page_server import Seen, warnings_of
from kvstrata.cli.page_server import page as server_page
from kvstrata.cli.page_top import Top

WATCH_S = 2.0
FASTEST_S, SLOWEST_S = 0.1, 3_600.0


def add_page_flags(status: argparse.ArgumentParser) -> None:
    """Add the flags of a `status`."""
    either = status.add_mutually_exclusive_group()
    either.add_argument("--all", action="store_true", help="print everything that is known, not a page")
    either.add_argument("--watch", nargs="?", type=interval, const=WATCH_S, metavar="SECONDS",
        help=f"draw the page again every so many seconds ({WATCH_S:g}), until Ctrl-C; with --json a document on "
        "each line")  # fmt: skip


def add_top_flags(top: argparse.ArgumentParser) -> None:
    """Add the flags of `top`."""
    top.add_argument("--every", type=interval, default=WATCH_S, metavar="SECONDS",
        help="seconds between two looks (%(default)g); Ctrl-C ends it; with --json: a document a line")  # fmt: skip


def interval(text: str) -> float:
    """The type of a time between two looks."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not FASTEST_S <= seconds <= SLOWEST_S:
        raise argparse.ArgumentTypeError(
            f"must be seconds from {FASTEST_S} to {SLOWEST_S:.0f}, found {text!r}"
        )
    return seconds


def draws(options: argparse.Namespace) -> bool:
    """Whether this command draws a page, or is repeated."""
    if options.command == "top":
        return True
    is_status = options.command == "status" or (options.command == "cluster" and options.action == "status")
    return is_status and (options.watch is not None or not (options.all or options.json))


def prints_all(options: argparse.Namespace) -> bool:
    """Whether this command prints a whole document for people."""
    is_status = options.command == "status" or (options.command == "cluster" and options.action == "status")
    return is_status and options.all and not options.json


def run(options: argparse.Namespace, ask: Callable[[Ask], Any]) -> None:
    """Draw the page, once or again and again. `ask` asks the server or controller. Raises KvstrataError."""
    look, draw = _look_and_draw(options, ask)
    if options.command == "top":
        live.watch(look, draw, options.every, as_json=options.json, whole_screen=True)
    elif options.watch is not None:
        live.watch(look, draw, options.watch, as_json=options.json, whole_screen=False)
    else:
        live.show(draw(look()))


def everything(options: argparse.Namespace, ask: Callable[[Ask], Any]) -> dict[str, Any]:
    """What `status --all` prints: first what needs attention, then the whole document. Raises KvstrataError."""
    look, _ = _look_and_draw(options, ask)
    seen = look()
    if isinstance(seen, SeenCluster):
        return {"needs_attention": warnings_of_cluster(seen) or "nothing", **seen.cluster}
    return {"needs_attention": warnings_of(seen) or "nothing", **seen.status}


def _look_and_draw(
    options: argparse.Namespace, ask: Callable[[Ask], Any]
) -> tuple[Callable[[], Any], live.Draw]:
    if options.command == "cluster":
        if options.json:
            return lambda: ask(Ask("/v1/cluster")), cluster_page
        return lambda: _see_cluster(ask), cluster_page
    if options.json:
        return lambda: ask(Ask("/v1/status")), server_page
    return lambda: Seen(ask(Ask("/v1/status")), ask(Ask("/v1/l2/adapters"))["adapters"]), (
        Top().draw if options.command == "top" else server_page
    )


def _see_cluster(ask: Callable[[Ask], Any]) -> SeenCluster:
    cluster = ask(Ask("/v1/cluster"))
    series = ask(Ask("/v1/series"))
    return SeenCluster(
        cluster,
        ask(Ask("/v1/instances"))["instances"],
        series["sample_s"],
        series["points"],
        ask(Ask("/v1/events"))["events"],
    )
