"""Reads the source: types and bounds of fields, and the texts below fields and members."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import inspect as kinds

from kvstrata.rpc import wire

DOCS = Path(__file__).resolve().parents[1]
GENERATED = "Generated from the code by `make docs`; to change it, change {}.\n"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)


# --- texts ------------------------------------------------------------------------------------------------------


@functools.cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """By class: the text below each of its fields or members."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found[node.name] = {}
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign):
                target: ast.expr = before.target
            elif isinstance(before, ast.Assign):
                target = before.targets[0]
            else:
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[ast.unparse(target)] = line(str(after.value.value))
    return found


def line(text: str | None) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def text_of(owner: type, name: str) -> str:
    """The text below a field or member in the source."""
    ours = (kind for kind in owner.__mro__ if kind.__module__.startswith("kvstrata."))
    return next(
        filter(None, (_texts(kind.__module__).get(kind.__name__, {}).get(name, "") for kind in ours)), ""
    )


def members(words: type[enum.Enum]) -> str:
    """A table of an enum."""
    numbered = issubclass(words, int)
    rows = []
    for member in words:
        shown = [str(member.value), f"`{member.name.lower()}`"] if numbered else [f"`{member.value}`"]
        rows.append([*shown, text_of(words, member.name)])
    return table(["", *([""] if numbered else []), ""], rows)


# --- types ------------------------------------------------------------------------------------------------------


def type_text(kind: kinds.Type) -> str:
    """A field's type and bounds in words."""
    match kind:
        case kinds.NoneType():
            return "nil"
        case kinds.BoolType():
            return "bool"
        case kinds.IntType():
            return _bounded(kind)
        case kinds.StrType() | kinds.BytesType():
            return _sized("bytes" if isinstance(kind, kinds.BytesType) else "str", kind)
        case kinds.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case kinds.ListType():
            return _sized(f"list of {type_text(kind.item_type)}", kind)
        case kinds.TupleType():
            return f"[{', '.join(map(type_text, kind.item_types))}]"
        case kinds.UnionType():
            return ", or ".join(map(type_text, kind.types))
        case kinds.StructType():
            if kind.array_like:
                return f"[{', '.join(field.name for field in kind.fields)}]"
            return f"map: [{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case kinds.DictType():
            return "map"
        case kinds.AnyType():
            return "any"
    raise TypeError(f"no words for {kind!r}")


def _bounded(kind: kinds.IntType) -> str:
    least = kind.ge
    most = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
    if most is not None and most < wire.MAX_SEQ:
        return f"int, {least or 0:,} to {most:,}"
    return "int" if least is None else f"int from {least:,}"


def _sized(name: str, kind: Any) -> str:
    least, most = kind.min_length, kind.max_length
    if most is None:
        return name
    if least == most:
        return f"{most:,} {name}" if name == "bytes" else f"{name}, exactly {most:,}"
    return f"{name}, at most {most:,}"


def fields(struct: type[msgspec.Struct], without: tuple[str, ...] = ()) -> str:
    """A table of a struct's fields; those with a default may be left out."""
    info = cast(kinds.StructType, kinds.type_info(struct))
    rows = []
    for field in info.fields:
        if field.name in without:
            continue
        name = f"`{field.name}`"
        if not field.required and field.default is not msgspec.NODEFAULT and field.default != b"":
            name += f" = {json.dumps(field.default).replace('null', 'nil')}"
        elif not field.required:
            name += " = empty"
        rows.append([name, type_text(field.type), text_of(struct, field.name)])
    return table(["field", "type", ""], rows) if rows else "No fields.\n"
