"""Writes the stubs of the compiled modules, for type checkers, from the annotated signatures in their Cython sources.

    python ext/make/stubs.py

A stub has what a source annotates: functions and methods with the type of their result, constants and fields with a
type, attributes that are `cdef readonly`, and the members of enums. What has no annotation is private.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

EXT = Path(__file__).resolve().parents[1]
FOLDER = EXT.parent / "src" / "kvstrata" / "native"
SOURCES = {
    "core": ["cython/kvstrata/native/core.pxd", "cython/core.pyx"],
    "connector": ["cython/connector.pyx"],
    "cuda": ["cuda/cuda.pyx"],
}
HEAD = """\
import enum
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypedDict

from kvstrata.errors import MediumError, SegmentError
"""
BUFFER = """
if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

"""
C_TYPES = {
    **dict.fromkeys(("int", "size_t", "Py_ssize_t", "unsigned char", "int64_t"), "int"),
    **dict.fromkeys(("uint8_t", "uint16_t", "uint32_t", "uint64_t"), "int"),
    **dict.fromkeys(("bint", "cbool"), "bool"),
    "double": "float",
    "const unsigned char[::1]": "Buffer",
}
CLASS = re.compile(r"(?:cdef )?class (?P<name>[A-Z]\w*)(?P<bases>\(.*\))?:")
DEF = re.compile(r"def (?P<name>\w+)\((?P<parameters>.*)\) -> (?P<result>.+):")
READONLY = re.compile(r"cdef readonly (?P<type>\w+) (?P<name>\w+)(?:  # (?P<precise>.+))?")
FIELD = re.compile(r"(?P<name>[a-zA-Z]\w*): (?P<type>[^=]+?)(?: = .+)?")
MEMBER = re.compile(r"[A-Z]+ = \d+")


def statements(path: Path) -> Iterator[str]:
    """The statements of a source and of what it includes, without docstrings, each in one line."""
    text = re.sub(r'(?s)""".*?"""', "", path.read_text())
    whole = ""
    for line in text.splitlines():
        whole = f"{whole} {line.strip()}" if whole else line
        if included := re.fullmatch(r'include "(.+)"', whole):
            yield from statements(path.parent / included[1])
        elif not whole.lstrip().startswith("def ") or whole.endswith(":"):
            yield whole
        else:
            continue
        whole = ""


def parameter(text: str) -> str:
    """A parameter as Python has it: `uint32_t tenant=0` becomes `tenant: int = 0`."""
    in_c = re.fullmatch(r"(?P<type>\w[\w \[\]:]*?) (?P<name>\w+)(?: not None)?(?P<default>=.+)?", text)
    if in_c is None or re.match(r"\w+:", text):
        return text
    kind = C_TYPES.get(in_c["type"], in_c["type"])
    return f"{in_c['name']}: {kind}{(in_c['default'] or '').replace('=', ' = ')}"


def signature(text: str) -> str:
    """The parameters of a function, divided at the commas outside brackets."""
    return ", ".join(parameter(one) for one in re.split(r", +(?![^(\[]*[)\]])", text.strip().rstrip(",")))


def stub(name: str) -> str:
    """The text of a module's stub."""
    bodies: dict[str, list[str]] = {"": []}
    headers: dict[str, str] = {}
    body, decorator = bodies[""], ""
    for source in SOURCES[name]:
        for line in statements(EXT / source):
            text = line.strip()
            depth = len(line) - len(line.lstrip())
            if depth == 0 and text and not text.startswith(("#", "@")):
                body = bodies[""]
            if depth == 0 and (found := CLASS.fullmatch(text)):
                headers[found["name"]] = f"class {found['name']}{found['bases'] or ''}:"
                body = bodies.setdefault(found["name"], [])
            elif depth != (0 if body is bodies[""] else 4):
                continue
            elif text in ("@property", "@staticmethod"):
                decorator = text
            elif found := DEF.fullmatch(text):
                called = "__init__" if found["name"] == "__cinit__" else found["name"]
                body += [decorator] if decorator else []
                body.append(f"def {called}({signature(found['parameters'])}) -> {found['result']}: ...")
            elif text.startswith("def __getbuffer__"):
                body.append("def __buffer__(self, flags: int, /) -> memoryview: ...")
            elif found := READONLY.fullmatch(text):
                kind = found["precise"] or C_TYPES.get(found["type"], found["type"])
                body += ["@property", f"def {found['name']}(self) -> {kind}: ..."]
            elif found := FIELD.fullmatch(text):
                body.append(f"{found['name']}: {found['type']}")
            elif MEMBER.fullmatch(text):
                body.append(text)
            if not text.startswith("@"):
                decorator = ""
    taken = "" if name == "core" else "from kvstrata.native.core import CopyPlan, RecordSpec\n"
    classes = [
        "\n".join([header, *(f"    {line}" for line in bodies[name] or ["..."])])
        for name, header in headers.items()
    ]
    return "\n".join([HEAD + taken + BUFFER, *bodies[""], "", *classes, ""])


def write(folder: Path) -> list[Path]:
    """Writes the stubs into a folder, and returns their paths."""
    paths = [folder / f"{name}.pyi" for name in SOURCES]
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        path.write_text(stub(path.stem))
    return paths


if __name__ == "__main__":
    write(FOLDER)
