"""The console of the pages, and pages that are drawn again and again. `rich` is imported only when a page is drawn."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstrata.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLUMNS = 80
"""Widest page."""
LINES = 40
"""Longest page of a status."""

Draw = Callable[[Any], "RenderableType"]


def console() -> Console:
    """A console on standard output: at most COLUMNS wide, with colours on a terminal only."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = (
        min(COLUMNS, os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS) if terminal else COLUMNS
    )
    return Console(
        file=sys.stdout,
        width=width,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def show(page: RenderableType) -> None:
    """Print one page."""
    console().print(page)


def watch(ask: Callable[[], Any], draw: Draw, every_s: float, *, as_json: bool, whole_screen: bool) -> None:
    """Ask and draw every `every_s` seconds until Ctrl-C, which is the usual end.

    A terminal shows one page that changes, on the whole screen if asked, and above it that the server has stopped
    answering, if it has; it is asked again. Elsewhere pages follow each other, or documents, one a line, with
    `as_json`. Raises KvstrataError if the first request fails, or elsewhere than on a terminal any request.
    """
    answer = ask()
    try:
        if as_json:
            _lines(ask, answer, every_s)
        elif sys.stdout.isatty():
            _screen(ask, answer, draw, every_s, whole_screen)
        else:
            while True:
                show(draw(answer))
                print(flush=True)
                time.sleep(every_s)
                answer = ask()
    except KeyboardInterrupt:
        return


def _lines(ask: Callable[[], Any], answer: Any, every_s: float) -> None:
    while True:
        print(json.dumps(answer), flush=True)
        time.sleep(every_s)
        answer = ask()


def _screen(ask: Callable[[], Any], answer: Any, draw: Draw, every_s: float, whole_screen: bool) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    page = draw(answer)
    with Live(page, console=console(), auto_refresh=False, screen=whole_screen) as live:
        while True:
            time.sleep(every_s)
            try:
                page = draw(ask())
                live.update(page, refresh=True)
            except Unavailable as error:
                live.update(Group(Text(error.message, style="bold red"), page), refresh=True)
