"""From JSON objects to msgspec structs, with errors that name the field, its value and the values that it may have.

The struct gives a field's type and bounds.  Beyond them the field's `Meta(extra=...)` may have

    secret    True: no error shows its value
    missing   the error's text if the field is required and absent, instead of the error for its type
    must      a text that the error for a wrong type appends
    empty     True: an empty string counts as absent

A field that is null counts as absent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect

from kvstrata.config.nearest import nearest
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
        return self.hidden(name, f"{must}, found {quoted(name, value)}")

    def refused(self, name: str, value: object, advice: str) -> ConfigError:
        """The error for a field that cannot be honoured."""
        return self.hidden(name, f"{quoted(name, value)} is not supported: {advice}")

    def hidden(self, name: str, must: str) -> ConfigError:
        """The error for a field's value that may be a secret."""
        return ConfigError(f"{self.at(name)}: {must}", field=self.at(name))

    def noted(self, name: str, why: str) -> None:
        """Log that a field was accepted and changes nothing."""
        log.info("%s: accepted, but has no effect here: %s", self.at(name), why)


class _Field(NamedTuple):
    """One field of a struct."""

    kind: inspect.Type
    required: bool
    extra: Mapping[str, Any]


def read(
    kind: type[S], values: Mapping[str, Any], place: Place, *, also: Iterable[str] = (), rest: str = ""
) -> S:
    """The struct with the values of a JSON object. Raises ConfigError that names every wrong field.

    `also`: names of fields that other code reads.  `rest`: the struct's field that takes all unknown fields; without it
    an unknown field is an error.
    """
    wrong = AllWrong()
    fields = {name: field for name, field in _fields(kind).items() if name != rest}
    taken: dict[str, Any] = {}
    for name, field in fields.items():
        value = values.get(name)
        if value == "" and field.extra.get("empty"):
            value = None
        if value is None and not field.required:
            continue
        if value is None and "missing" in field.extra:
            wrong.add(place.wrong(name, value, field.extra["missing"]))
            continue
        with wrong:
            must, taken[name] = _checked(field.kind, value, Place(place.at(name)))
            if must:
                must += field.extra.get("must", "")
                raise (
                    place.hidden(name, must) if field.extra.get("secret") else place.wrong(name, value, must)
                )
    unknown = {name: value for name, value in values.items() if name not in fields and name not in also}
    if rest:
        taken[rest] = unknown
    else:
        names = [*fields, *also]
        for name in unknown:
            wrong.add(place.hidden(name, f"unknown field{nearest(name, names)}"))
    wrong.tell()
    return kind(**taken)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, _Field]:
    info = cast(inspect.StructType, inspect.type_info(kind))
    found = {}
    for field in info.fields:
        bare, extra = _bare(field.type, {})
        found[field.name] = _Field(bare, field.required, extra)
    return found


def _bare(kind: inspect.Type, extra: Mapping[str, Any]) -> tuple[inspect.Type, Mapping[str, Any]]:
    """A type without its metadata and without `| None`, and the `extra` of that metadata."""
    if isinstance(kind, inspect.Metadata):
        return _bare(kind.type, {**extra, **(kind.extra or {})})
    if isinstance(kind, inspect.UnionType):
        others = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
        if len(others) == 1:
            return _bare(others[0], extra)
    return kind, extra


def _checked(kind: inspect.Type, value: Any, place: Place) -> tuple[str, Any]:
    """(the requirement that the value breaks, "" if it breaks none; the value as the struct takes it)"""
    match kind:
        case inspect.BoolType():
            return "" if isinstance(value, bool) else "must be true or false", value
        case inspect.IntType() | inspect.FloatType():
            whole = isinstance(kind, inspect.IntType)
            is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if is_number and kind.ge <= value <= kind.le:
                return "", value
            return f"must be a {'whole ' * whole}number from {_plain(kind.ge)} to {_plain(kind.le)}", value
        case inspect.StrType():
            if isinstance(value, str) and (value or not kind.min_length):
                return "", value
            return f"must be a {'non-empty ' * bool(kind.min_length)}string", value
        case inspect.EnumType():
            if isinstance(value, str) and value in _words(kind):
                return "", kind.cls(value)
            return _one_of(_words(kind), value), value
        case inspect.LiteralType():
            return "" if value in kind.values else _one_of(kind.values, value), value
        case inspect.ListType():
            if not isinstance(kind.item_type, inspect.EnumType):
                return "" if isinstance(value, list) else "must be a list", value
            words = _words(kind.item_type)
            if isinstance(value, list) and all(isinstance(word, str) and word in words for word in value):
                return "", [kind.item_type.cls(word) for word in value]
            return f"must be a list with some of {', '.join(words)}", value
        case inspect.DictType():
            return _object(kind, value, place)
    return "", value


def _object(kind: inspect.DictType, value: Any, place: Place) -> tuple[str, Any]:
    if not isinstance(kind.key_type, inspect.EnumType):
        return "" if isinstance(value, Mapping) else "must be an object", value
    words = _words(kind.key_type)
    if not isinstance(value, Mapping):
        return f"must be an object with some of {', '.join(words)}", value
    inner, _ = _bare(kind.value_type, {})
    taken = {}
    wrong = AllWrong()
    for word in words:
        if value.get(word) is not None:
            must, taken[kind.key_type.cls(word)] = _checked(inner, value[word], place)
            if must:
                wrong.add(place.wrong(word, value[word], must))
    for name in value:
        if name not in words:
            wrong.add(place.hidden(name, f"unknown field{nearest(name, words)}"))
    wrong.tell()
    return "", taken


def _words(kind: inspect.EnumType) -> list[str]:
    """REQUIRES an enum of strings."""
    return [str(member.value) for member in kind.cls]


def _one_of(words: Iterable[Any], value: Any) -> str:
    words = [str(word) for word in words]
    hint = nearest(value, words) if isinstance(value, str) else ""
    return f"must be one of {', '.join(words)}{hint}"


def _plain(bound: float | None) -> str:
    """A bound without an exponent."""
    assert bound is not None
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"
