"""Sizes of modules, classes and native units have a limit, unless a line at the top says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FOLDERS = ("src/kvstrata", "tests", "benchmarks", "docs", "examples", "ext/make")
MOST_LINES = 500
MOST_METHODS = 20
MOST_NATIVE_LINES = 600
WHY = "Size: "
"""Begins the line that gives the reason: in a module's or class's docstring, or the first comment of a native unit."""


def modules() -> list[Path]:
    """Python sources of the package."""
    return sorted((ROOT / "src/kvstrata").rglob("*.py"))


def python_files() -> list[Path]:
    """All Python files of the repository."""
    found = (path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [*sorted(found), ROOT / "setup.py"]


def native_units() -> list[Path]:
    """C++, CUDA and Cython sources and headers, tests included."""
    return sorted(path for path in (ROOT / "ext").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".pyx"))


def says_why(text: str) -> bool:
    """Whether one of the first lines gives the reason for a size."""
    return any(line.strip(' "/*#').startswith(WHY) for line in text.splitlines()[:40])


def too_long(paths: list[Path], most: int) -> list[str]:
    """`path: lines` of each file beyond `most` that does not say why."""
    found = []
    for path in paths:
        text = path.read_text()
        lines = text.count("\n")
        if lines > most and not says_why(text):
            found.append(f"{path.relative_to(ROOT)}: {lines}")
    return found


def classes(path: Path) -> Iterator[ast.ClassDef]:
    """All classes of a module."""
    yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def public_methods(node: ast.ClassDef) -> set[str]:
    """Names of the methods and properties that do not begin with an underscore."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {each.name for each in node.body if isinstance(each, functions) and not each.name.startswith("_")}


def test_a_module_has_at_most_500_lines_or_says_why() -> None:
    assert too_long(python_files(), MOST_LINES) == []


def test_a_native_unit_has_at_most_600_lines_or_says_why() -> None:
    assert too_long(native_units(), MOST_NATIVE_LINES) == []


def test_a_class_has_at_most_20_public_methods_or_says_why() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.name} has {len(public_methods(node))}"
        for path in modules()
        for node in classes(path)
        if len(public_methods(node)) > MOST_METHODS and not says_why(ast.get_docstring(node) or "")
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["/* Size: one table */", '"""A suite.\n\nSize: authors subclass it."""', "# Size: x"]
)
def test_the_reason_is_found_in_any_comment(text: str) -> None:
    assert says_why(text)
    assert not says_why(text.replace("Size: ", "Size "))
