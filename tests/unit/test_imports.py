"""Imports of `kvstrata` point one way: down the floors, in no circle, and to heavy packages from few places only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = "kvstrata"

FLOORS = (
    ("__main__",),
    ("cli",),
    ("server", "controller", "gateway", "connectors", "measure"),
    ("client", "cluster", "p2p"),
    ("testing",),
    ("tiers",),
    ("storage",),
    ("session",),
    ("memory",),
    ("rpc",),
    ("process",),
    ("observability", "policy"),
    ("keys",),
    ("config",),
    ("native",),
    ("patience",),
    ("failpoints",),
    ("clock", "naming", "states", "types"),
    ("errors",),
    ("text",),
)
"""Top first.  A module imports from its own room and from lower floors; rooms of one floor do not import each other."""


def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for path in sorted((SRC / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, *, when_run: bool = False) -> Iterator[tuple[str, int]]:
    """(Module, line) of each import of a module; `when_run` leaves out those for type checkers."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if when_run and node in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in MODULES else base), node.lineno


def room(name: str) -> str:
    """The part below the package that a module belongs to; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def graph(*, when_run: bool) -> dict[str, set[tuple[str, int]]]:
    """(Module, line) of each module of the package that a module imports."""
    return {
        name: {
            (target, line)
            for target, line in imports(name, when_run=when_run)
            if target.split(".")[0] == PACKAGE and target != name
        }
        for name in MODULES
    }


GRAPH, RUN = graph(when_run=False), graph(when_run=True)


def circles() -> list[list[str]]:
    """Groups of modules that import each other, each sorted (Tarjan's strongly connected components).

    A name that only type checkers read makes no circle: a part may name the type of what it is a part of.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target, _ in RUN[name]:
            if target not in RUN:
                continue
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            cut = stack.index(name)
            group, stack[cut:] = stack[cut:], []
            if len(group) > 1:
                found.append(sorted(group))

    for name in RUN:
        if name not in index:
            visit(name)
    return sorted(found)


def upward() -> list[str]:
    """Imports that point to a higher floor or to another room of the same one."""
    floor = {each: number for number, rooms in enumerate(FLOORS) for each in rooms}
    return sorted(
        {
            f"{name} -> {target}"
            for name, targets in GRAPH.items()
            for target, _ in targets
            if room(name)
            and room(target)
            and room(target) != room(name)
            and floor[room(target)] <= floor[room(name)]
        }
    )


HEAVY = {
    "torch": ("connectors.",),
    "vllm": ("connectors.vllm",),
    "sglang": ("connectors.sglang.",),
    "zmq": ("rpc.zmq_", "testing.engine_sim.zmq_", "gateway.residency.zmq_"),
    "fastapi": ("process.http",),
}
"""Packages and the modules that may import them."""

LIGHT = (
    "cli",
    "cli.bench",
    "cli.controller",
    "cli.ctl",
    "cli.pages",
    "cli.doctor",
    "cli.gateway",
    "cli.server",
)
"""Modules that load no compiled module of ours and no package of `HEAVY` when they are imported."""


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in MODULES} - {""} <= {each for rooms in FLOORS for each in rooms}


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert circles() == []


def test_imports_point_down() -> None:
    assert upward() == []


def test_a_heavy_package_is_imported_where_it_belongs_only() -> None:
    outside = [
        f"{name} imports {target}"
        for name in MODULES
        for target, _ in imports(name, when_run=True)
        if (places := HEAVY.get(target.split(".")[0]))
        and not name.removeprefix(f"{PACKAGE}.").startswith(places)
    ]
    assert outside == []


def test_what_only_some_commands_need_is_imported_by_these_commands() -> None:
    told = f"import sys, {', '.join(f'{PACKAGE}.{name}' for name in LIGHT)}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True)
    heavy = tuple(f"{each}." for each in (f"{PACKAGE}.native", *HEAVY))
    assert [module for module in ran.stdout.split() if f"{module}.".startswith(heavy)] == []
