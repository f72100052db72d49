"""The rows of the demo, and its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


class Wrong(Exception):
    """A wrong result, which ends the demo with status 1."""


class Table:
    """The rows, for the screen and for the file."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, case: str, act: int, *, run: bool = True, ok: bool = True, **values: Any) -> None:
        row: Row = {
            "case": case, "act": act, "run": run, "ok": ok, "engine": None,
            "ttft_s": None, "cached_tokens": None, "tokens_equal": None, "bytes_equal": None, "gb_per_s": None,
            **values,
        }  # fmt: skip
        self.rows.append(row)

    def print(self, act: int, columns: list[tuple[str, str, Callable[[Any], str]]]) -> None:
        lines = [["case", *(title for _, title, _ in columns)]]
        for row in self.rows:
            if row["act"] == act:
                cells = [show(row[key]) if row[key] is not None else "-" for key, _, show in columns]
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


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def say(text: str) -> None:
    print(text, flush=True)
