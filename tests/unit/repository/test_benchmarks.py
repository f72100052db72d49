"""Benchmarks reach the product by its public names, and the pages name benchmarks and figures that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.run import modules

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Names of NamedTuple and of `os` that begin with an underscore so as not to clash."""
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_FIGURES = ("performance.md", "performance-gpu.md")
LITERAL = re.compile(r"[a-z0-9_]{4,}")


def reached_into(source: str) -> list[str]:
    """Private attributes of other objects that a module reads or sets; any use of `setattr`, which could set one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            own = ast.unparse(owner) in ("self", "cls", "super()")
            if not own and node.attr not in PUBLIC:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "__setattr__")):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def figures() -> Iterator[str]:
    """Regular expressions of the names that benchmarks give to figures: string literals and f-strings of modules."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and LITERAL.fullmatch(node.value)
            ):
                yield re.escape(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values]
                if LITERAL.fullmatch("".join(parts)):
                    yield "".join(re.escape(part) if part else r"\w+" for part in parts)


def test_a_benchmark_uses_no_private_attribute_of_others() -> None:
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert reached_into(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "line", ["client.pool._index = reader", "print(server._flags)", "setattr(x, 'y', 1)"]
)
def test_a_private_attribute_is_seen(line: str) -> None:
    assert reached_into(line)


def test_each_benchmark_that_a_page_names_exists() -> None:
    known = {*modules(), *(script.stem for script in (ROOT / "benchmarks").glob("*.py")), "name"}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        named = {name for names in re.findall(r'BENCH="?([a-z0-9_ ]+)', text) for name in names.split()}
        named |= set(re.findall(r"(?<!test_)benchmarks[./]([a-z0-9_]+)", text))
        assert named <= known, path


@pytest.mark.parametrize("name", WITH_FIGURES)
def test_each_figure_of_the_pages_of_figures_exists(name: str) -> None:
    known = re.compile("|".join(figures()))
    rows = [
        line for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines() if line[:3] == "| `"
    ]
    named = [figure for row in rows for figure in re.findall(r"`([a-z]\w+)`", row.split("|")[1])]
    assert len(named) > 10
    assert [figure for figure in named if known.fullmatch(figure) is None] == []
