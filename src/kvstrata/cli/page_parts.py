"""The parts that pages consist of: figures for people, bars, and tables that fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.text import printable
from kvstrata.types import GB

if TYPE_CHECKING:
    from rich.console import RenderableType

MB = 1 << 20
BAR_CELLS = 20
FAULTS = ("corrupt", "l2_failed", "breaker_open", "deadline", "put_skipped", "refused", "evicted")
"""Reasons of a miss that somebody can do something about, the worst first."""


class Column(NamedTuple):
    """One column of a table. `right`: its cells are numbers."""

    head: str
    right: bool = False


def size(n_bytes: float) -> str:
    """Bytes in GB or MB, as the settings count them."""
    return f"{n_bytes / GB:,.2f} GB" if n_bytes >= GB / 10 else f"{n_bytes / MB:,.1f} MB"


def count(number: float) -> str:
    """A number of at most 9 characters."""
    for limit, unit, by in ((1e5, "", 1.0), (1e8, " k", 1e3), (1e11, " M", 1e6)):
        if abs(number) < limit:
            return f"{number / by:,.0f}{unit}"
    return f"{number / 1e9:,.0f} G"


def span(seconds: float) -> str:
    """A time, with its two largest units."""
    if abs(seconds) < 10:
        return f"{seconds:.1f} s"
    whole = round(abs(seconds))
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    for (large, large_s), (small, small_s) in itertools.pairwise(units):
        if whole >= large_s:
            return (
                f"{'-' if seconds < 0 else ''}{whole // large_s} {large} {whole % large_s // small_s} {small}"
            )
    return f"{seconds:.0f} s"


def share(part: float, whole: float) -> str:
    """A share in percent; a dash of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def bar(part: float, whole: float) -> str:
    """A share as a bar."""
    filled = round(BAR_CELLS * min(1.0, max(0.0, part / whole))) if whole else 0
    return "█" * filled + "░" * (BAR_CELLS - filled)


def line(text: str, style: str = "") -> RenderableType:
    """One line of text, cut where the page ends."""
    from rich.text import Text

    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def grid(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], most: int, more: str
) -> list[RenderableType]:
    """A table without lines, and below it the number of rows beyond `most`; `more` says where they are."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.head, justify="right" if column.right else "left", no_wrap=True, overflow="ellipsis"
        )
    left = 0
    for number, row in enumerate(rows):
        if number < most:
            table.add_row(*(line(cell) for cell in row))
        else:
            left += 1
    return [table, *([line(f"and {left} more: {more}", "dim")] if left else [])]


def worst_reason(misses: Mapping[str, int]) -> str:
    """The worst reason among first misses, and the most frequent one if it is another; empty without a miss."""
    if not misses:
        return ""
    total = sum(misses.values())
    worst = next((reason for reason in FAULTS if misses.get(reason)), "")
    most = max(misses, key=lambda reason: misses[reason])
    told = [f"{reason} {misses[reason]} of {total}" for reason in dict.fromkeys((worst, most)) if reason]
    return ", mostly ".join(told)


def warnings(found: Sequence[str], most: int) -> list[RenderableType]:
    """The first warnings as lines, and how many more there are."""
    shown = [line(f"! {text}", "bold yellow") for text in found[:most]]
    return shown + ([line(f"! and {len(found) - most} more: --all", "yellow")] if len(found) > most else [])


def not_closed(breakers: Mapping[str, Any]) -> str:
    """The operations of a tier whose breaker is not closed."""
    return ", ".join(f"{operation} {state}" for operation, state in breakers.items() if state != "closed")
