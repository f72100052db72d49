"""Says in English what a setting's type demands of its value, and finds all values that break their demand.

A setting that restricts its values beyond their type says so in `Meta(extra={"demand": "must be …"})`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvstrata.config.secrets import quoted


class Problem(NamedTuple):
    """A wrong value, or a key that should not be there. `path` is dotted; `says` does not repeat it."""

    path: str
    says: str


def bare_type(kind: Any) -> Any:
    """A field's type without Annotated and without `| None`."""
    return unwrapped(kind)[0]


def demand(kind: Any) -> str:
    """What a value of this type must be."""
    bare, metas = unwrapped(kind)
    for meta in metas:
        if meta.extra and "demand" in meta.extra:
            return str(meta.extra["demand"])
    if words := words_of(bare):
        return f"must be one of {', '.join(words)}"
    if bare is bool:
        return "must be true or false"
    if bare in (int, float):
        return f"must be a {'whole ' if bare is int else ''}number{_range(metas)}"
    most = next((meta.max_length for meta in metas if meta.max_length is not None), None)
    if bare is str:
        least = any(meta.min_length for meta in metas)
        return f"must be {'non-empty ' if least else ''}text" + (
            f" of at most {most} characters" if most else ""
        )
    if typing.get_origin(bare) is list:
        return "must be a list" + (f" of at most {most} items" if most else "")
    some = words_of(typing.get_args(bare)[0]) if typing.get_origin(bare) is dict else []
    return "must be a mapping" + (f" with some of {', '.join(some)}" if some else "")


def words_of(bare: Any) -> list[str]:
    """The words that a type lists; empty for any other type."""
    if typing.get_origin(bare) is typing.Literal:
        return [str(value) for value in typing.get_args(bare)]
    return [str(one.value) for one in bare] if isinstance(bare, type) and issubclass(bare, enum.Enum) else []


def problems(kind: Any, value: Any, path: str = "") -> Iterator[Problem]:
    """Every wrong value and unknown key in the value of a setting, or of a struct of settings."""
    try:
        msgspec.convert(value, kind)
        return
    except msgspec.ValidationError:
        pass
    bare = bare_type(kind)
    inner = list(_inner_problems(bare, value, path))
    name = path.rpartition(".")[2].partition("[")[0]
    near = nearest(value, words_of(bare)) if isinstance(value, str) else ""
    yield from inner or [Problem(path, f"{demand(kind)}{near}, found {quoted(name, value)}")]


@functools.cache
def field_types(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The type of each field; msgspec evaluates all annotations at each question."""
    return types.MappingProxyType({field.name: field.type for field in msgspec.structs.fields(struct)})


def canonical(kind: Any, value: Any) -> Any:
    """The value with the words of settings that have a few words spelt as the settings spell them.

    The case of such a word does not matter.
    """
    bare = bare_type(kind)
    if typing.get_origin(bare) is typing.Literal:
        if isinstance(value, str):
            return next((one for one in typing.get_args(bare) if one.lower() == value.lower()), value)
    elif _is_struct(bare) and isinstance(value, Mapping):
        kinds = field_types(bare)
        return {key: canonical(kinds[key], one) if key in kinds else one for key, one in value.items()}
    elif typing.get_origin(bare) is list and isinstance(value, list):
        return [canonical(typing.get_args(bare)[0], one) for one in value]
    return value


def _inner_problems(bare: Any, value: Any, path: str) -> Iterator[Problem]:
    """The problems of the parts of a struct, list or mapping."""
    if isinstance(value, Mapping) and _is_struct(bare):
        fields = {field.name: field for field in msgspec.structs.fields(bare)}
        for key, one in value.items():
            below = f"{path}.{key}" if path else str(key)
            if key in fields:
                yield from problems(fields[key].type, one, below)
            else:
                yield Problem(below, f"unknown key{nearest(str(key), fields)}")
        for name, field in fields.items():
            if field.required and name not in value:
                yield Problem(f"{path}.{name}" if path else name, f"{demand(field.type)}, but is not given")
    elif isinstance(value, Mapping) and typing.get_origin(bare) is dict:
        kind, inner = typing.get_args(bare)
        words = words_of(kind)
        for key, one in value.items():
            if words and key not in words:
                yield Problem(f"{path}.{key}", f"unknown key{nearest(str(key), words)}")
            else:
                yield from problems(inner, one, f"{path}.{key}")
    elif isinstance(value, list) and typing.get_origin(bare) is list:
        for number, one in enumerate(value):
            yield from problems(typing.get_args(bare)[0], one, f"{path}[{number}]")


def _is_struct(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def unwrapped(kind: Any) -> tuple[Any, list[msgspec.Meta]]:
    """A type without Annotated and without `| None`, and the Meta objects that stood around it."""
    metas: list[msgspec.Meta] = []
    while True:
        if typing.get_origin(kind) is typing.Annotated:
            kind, *more = typing.get_args(kind)
            metas += more
            continue
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            others = [arg for arg in typing.get_args(kind) if arg is not type(None)]
            if len(others) == 1:
                kind = others[0]
                continue
        return kind, metas


def _range(metas: list[msgspec.Meta]) -> str:
    """The bounds of a number, as ` from 0 to 10`; empty if it has none."""
    bounds = {
        name: bound
        for meta in metas
        for name in ("ge", "gt", "le", "lt")
        if (bound := getattr(meta, name)) is not None
    }
    if bounds.keys() == {"ge", "le"}:
        return f" from {_plain(bounds['ge'])} to {_plain(bounds['le'])}"
    words = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    said = " and ".join(f"{word} {_plain(bounds[name])}" for name, word in words if name in bounds)
    return f" of {said}" if said.startswith("at") else f" {said}" if said else ""


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


def number_in(text: str) -> int | float | str:
    """The number that a text spells, else the text itself, about which its setting complains with all others."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


MAX_NAME_CHARS = 80


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """` (did you mean 'x'?)` with the nearest known name, or an empty string."""
    close = nearest_name(name, known, cutoff=cutoff)
    return f" (did you mean '{close}'?)" if close else ""


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The nearest known name, or an empty string.

    A name that is longer than any of ours is not compared: that would take time that grows with its length.
    """
    if len(name) > MAX_NAME_CHARS:
        return ""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")
