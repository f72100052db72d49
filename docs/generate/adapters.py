"""docs/adapters.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import msgspec

from docs.generate.configuration import rows as setting_rows
from docs.generate.source import GENERATED, table
from kvstrata.tiers.config import TYPES, CommonFields, Medium, load

ADAPTERS = """# Types of L2 adapters

{}
An entry of `l2_adapters`, or the JSON of `--l2-adapter`, has the fields of its type and those common to all types. A
wrong field stops the start with an error that names it; a field that is `null` counts as not set. Refused credentials
and records of another version also stop the start. If a storage cannot be reached, the server starts without it, and
retries after 0.5 s and then doubling delays, up to 30 s.
This page omits types of installed packages (see [Writing an adapter](writing-an-adapter.md)).
"""
NOT_FOR_USERS = ("peer",)
"""Adapters that only the server itself creates."""


def media() -> dict[str, tuple[Medium, list[str]]]:
    """Our own media by their places, each with all names of its type."""
    found: dict[str, tuple[Medium, list[str]]] = {}
    for name, place in sorted(TYPES.items()):
        if name not in NOT_FOR_USERS:
            found.setdefault(place, (load(place), []))[1].append(name)
    return found


def adapters() -> str:
    """docs/adapters.md"""

    def fields_of(struct: type[msgspec.Struct], rest: str = "", without: Iterable[str] = ()) -> str:
        rows = [
            [
                "every other field" if name == rest else f"`{name}`",
                kind,
                "" if name == rest else f"`{default}`",
                says,
            ]
            for name, kind, default, says in setting_rows(struct)
            if name not in without
        ]
        return table(["field", "values", "default", "meaning"], rows)

    parts = [ADAPTERS.format(GENERATED.format("the structs in `src/kvstrata/tiers`"))]
    parts.append(f"\n## Every type\n\n{fields_of(CommonFields)}")
    for medium, names in media().values():
        parts.append(f"\n## {', '.join(f'`{name}`' for name in names)}\n\n{inspect.getdoc(medium.config)}")
        if medium.hosted:
            parts.append(" It runs in a process of its own unless `isolation` says otherwise.")
        parts.append(f"\n\n{fields_of(medium.config, medium.rest, ('deadline_ms',))}")
    return "".join(parts)
