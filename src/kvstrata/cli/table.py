"""Formats nested values as aligned lines, for the human-readable output of commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.text import printable


def table(value: Any, indent: str = "") -> str:
    """Nested values as aligned lines; a list of mappings becomes a table with a header.

    Engines choose some of the texts, such as the name of a model, so nothing in them reaches the terminal as a command.
    """
    if isinstance(value, Mapping):
        named = {printable(str(key)): inner for key, inner in value.items()}
        width = max(map(len, named), default=0)
        lines = []
        for key, inner in named.items():
            if isinstance(inner, (Mapping, list)) and inner:
                lines.append(f"{indent}{key}")
                lines.append(table(inner, indent + "  "))
            else:
                lines.append(f"{indent}{key:<{width}}  {_cell(inner)}")
        return "\n".join(lines)
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        heads = list(dict.fromkeys(key for row in value for key in row))
        rows = [list(map(printable, heads))] + [
            [_cell(row.get(head, "-")) for head in heads] for row in value
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        return "\n".join(
            indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
    if isinstance(value, list):
        return "\n".join(f"{indent}{_cell(row)}" for row in value)
    return indent + _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(key)}={_part(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(_part(inner) for inner in value) or "-"
    return "-" if value is None else printable(str(value)) or "-"


def _part(value: Any) -> str:
    return f"({_cell(value)})" if isinstance(value, (Mapping, list)) and value else _cell(value)
