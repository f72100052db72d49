"""Converts JSON objects to msgspec structs, with errors that name the field, its value and the allowed values.

config/demands.py checks a field's value by the field's type.  Beyond that the field's `Meta(extra=...)` may have

    secret    True: no error shows its value
    missing   the error's text if the field is required and absent, instead of the error for its type
    must      a text that is appended to the error for a wrong type
    empty     True: an empty string counts as absent

A field that is null counts as absent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstrata.config.demands import demand, nearest, problems, unwrapped
from kvstrata.config.secrets import quoted
from kvstrata.errors import AllWrong, ConfigError

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)


class Place(NamedTuple):
    """The place of a JSON object in the settings."""

    path: str

    def at(self, name: str) -> str:
        """The path of one of the object's fields."""
        return f"{self.path}.{name}"

    def wrong(self, name: str, value: object, must: str) -> ConfigError:
        """The error for a field's value."""
        found = "but is not given" if value is None else f"found {quoted(name, value)}"
        return self.hidden(name, f"{must}, {found}")

    def refused(self, name: str, value: object, advice: str) -> ConfigError:
        """The error for a field whose value is not supported."""
        return self.hidden(name, f"{quoted(name, value)} is not supported: {advice}")

    def hidden(self, name: str, must: str) -> ConfigError:
        """The error for a field's value that may be a secret."""
        return ConfigError(f"{self.at(name)}: {must}", field=self.at(name))

    def log_no_effect(self, name: str, why: str) -> None:
        """Log that a field was accepted without effect."""
        log.info("%s: accepted, but has no effect here: %s", self.at(name), why)


def read(
    kind: type[S], values: Mapping[str, Any], place: Place, *, also: Iterable[str] = (), rest: str = ""
) -> S:
    """The struct with the values of a JSON object. Raises ConfigError that names every wrong field.

    `also`: names of fields that other code reads.  `rest`: the struct's field that collects all unknown fields; without
    it an unknown field is an error.
    """
    wrong = AllWrong()
    fields = [field for field in msgspec.structs.fields(kind) if field.name != rest]
    names = [field.name for field in fields]
    taken: dict[str, Any] = {}
    for field in fields:
        name, value = field.name, values.get(field.name)
        extra = {key: one for meta in unwrapped(field.type)[1] for key, one in (meta.extra or {}).items()}
        must = demand(field.type) + extra.get("must", "")
        if value == "" and extra.get("empty"):
            value = None
        if value is None:
            if field.required:
                wrong.add(place.wrong(name, value, extra.get("missing", must)))
            continue
        found = list(problems(field.type, value, name))
        for path, says in found:
            if extra.get("secret"):
                says = must
            elif path == name and "must" in extra:
                says = f"{must}, found {quoted(name, value)}"
            wrong.add(place.hidden(path, says))
        if not found:
            taken[name] = msgspec.convert(value, field.type)
    unknown = {name: value for name, value in values.items() if name not in names and name not in also}
    if rest:
        taken[rest] = unknown
    else:
        for name in unknown:
            wrong.add(place.hidden(name, f"unknown field{nearest(name, [*names, *also])}"))
    wrong.tell()
    return kind(**taken)
