"""The rows of the demo, and its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


class Wrong(Exception):
    """A wrong result, which ends the demo with status 1."""


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "engine": ("engine", str),
    "ttft_s": ("first token, s", "{:.3f}".format),
    "cached_tokens": ("cached tokens", str),
    "tokens_equal": ("tokens equal", yes_no),
    "bytes_equal": ("bytes equal", yes_no),
    "gb_per_s": ("GB/s a process", str),
}
"""Title and format of each column."""


class Table:
    """The rows, for the screen and for the file."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, case: str, act: int, *, run: bool = True, ok: bool = True, **values: Any) -> None:
        row: Row = {"case": case, "act": act, "run": run, "ok": ok, **dict.fromkeys(COLUMNS), **values}
        self.rows.append(row)

    def print(self, act: int) -> None:
        """Print the rows of an act, with the columns in which one of them has a value."""
        rows = [row for row in self.rows if row["act"] == act]
        columns = [key for key in COLUMNS if any(row[key] is not None for row in rows)] or ["ttft_s"]
        lines = [["case", *(COLUMNS[key][0] for key in columns)]]
        for row in rows:
            cells = [COLUMNS[key][1](row[key]) if row[key] is not None else "-" for key in columns]
            lines.append([row["case"], *(cells if row["run"] else ["not run"] + [""] * (len(cells) - 1))])
        widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
        print()
        for number, line in enumerate(lines):
            print(
                "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            )
            if number == 0:
                print("  " + "  ".join("-" * width for width in widths))
        print(flush=True)

    @property
    def ok(self) -> bool:
        return all(row["ok"] for row in self.rows)


def say(text: str) -> None:
    print(text, flush=True)
