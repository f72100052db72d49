"""What holds for all native sources and classes."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvstrata.native

EXT = Path(__file__).resolve().parents[3] / "ext"
SOURCES = EXT / "core" / "src"
PUBLIC = EXT / "core" / "include"
OTHERS = {"cuda", "cython"}

ARROWS: dict[str, set[str]] = {
    "include": set(),
    "base": set(),
    "memory": {"base"},
    "hash": {"base"},
    "codec": {"base"},
    "files": {"base"},
    "registry": {"base", "files", "hash"},
    "record": {"base", "hash"},
    "copy": {"base", "hash", "codec", "record"},
    "pool": {"base", "hash", "memory", "record"},
    "lanes": {"base", "record"},
    "disk": {"base", "files", "hash", "record"},
    "fs": {"base", "files", "hash", "record"},
    "cuda": {"base", "codec", "copy", "record"},
    "cython": {
        *("base", "codec", "copy", "disk", "files", "fs", "hash", "lanes"),
        *("memory", "pool", "record", "registry"),
    },
}
"""What a folder may include besides itself and the public headers, `include`."""

INCLUDE = re.compile(r'^\s*(?:#\s*include|cdef extern from)\s+"([^"]+)"', re.MULTILINE)


def files() -> Iterator[tuple[str, Path]]:
    """Every source with the folder it belongs to; tests may include anything."""
    for top in (SOURCES, PUBLIC, *(EXT / name for name in sorted(OTHERS))):
        for path in sorted(top.rglob("*")):
            inner = path.relative_to(top).parts
            if path.suffix in {".h", ".cpp", ".cu", ".pyx", ".pxi", ".pxd"} and inner[0] != "tests":
                yield "include" if top == PUBLIC else inner[0] if top == SOURCES else top.name, path


def resolved(path: Path, name: str) -> Path | None:
    """The file of ours that `name` means in `path`; None for a header of somebody else."""
    for folder in (path.parent, SOURCES, PUBLIC, EXT / "cython"):
        if (folder / name).is_file():
            return folder / name
    return None


def folder_of(path: Path) -> str:
    if path.is_relative_to(PUBLIC):
        return "include"
    return path.relative_to(SOURCES if path.is_relative_to(SOURCES) else EXT).parts[0]


GRAPH = {
    path: [target for name in INCLUDE.findall(path.read_text()) if (target := resolved(path, name))]
    for _, path in files()
}


def test_includes_point_down() -> None:
    wrong = {
        f"{path.relative_to(EXT)} -> {target.relative_to(EXT)}"
        for folder, path in files()
        for target in GRAPH[path]
        if folder_of(target) not in ARROWS[folder] | {folder, "include"}
    }
    assert wrong == set()


def test_headers_do_not_include_each_other_in_circles() -> None:
    left = {path: set(targets) for path, targets in GRAPH.items()}
    while done := [path for path, targets in left.items() if not targets]:
        for path in done:
            del left[path]
        for targets in left.values():
            targets.difference_update(done)
    assert sorted(str(path.relative_to(EXT)) for path in left) == []


def test_every_native_thread_is_started_without_signals() -> None:
    """A signal that reaches one of them interrupts its system calls, and is not seen by the application's threads."""
    started = re.compile(r"std::thread\(|(?:threads|helpers)_?\.emplace_back\(\[|std::jthread|pthread_create")
    wrong = [
        f"{path.relative_to(EXT)}: {found[0]}"
        for path in sorted(EXT.rglob("*.*"))
        if path.suffix in (".cpp", ".h", ".pyx", ".pxi") and not {"tests", "bench"} & set(path.parts)
        if path.name != "threads.h"
        for found in started.finditer(path.read_text())
    ]
    assert not wrong, "start threads with start_thread() of base/threads.h"


HEAP_TYPE = 1 << 9
# Uses every attribute of an object that only `__new__` has made, with arguments of a few kinds.
USE = """
import importlib, sys
ARGUMENTS = ((), (0,), (bytes(32),), ([],), (0, 0), (bytes(32), 0), ([], []), (0, 0, 0), (0, 0, 0, 0))
for named in sys.argv[1:]:
    print(named, flush=True)
    module, name = named.rsplit(".", 1)
    kind = getattr(importlib.import_module(module), name)
    try:
        made = kind.__new__(kind)
    except TypeError:
        continue
    for one in dir(kind):
        if one.startswith("__") and one not in ("__len__", "__repr__", "__enter__", "__exit__"):
            continue
        for arguments in ARGUMENTS:
            try:
                found = getattr(made, one)
                found(*arguments)
            except Exception:
                pass
    del made
"""


def test_an_object_that_only_new_has_made_is_refused_or_harmless() -> None:
    named = []
    for info in pkgutil.iter_modules(kvstrata.native.__path__, "kvstrata.native."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if isinstance(kind, type) and kind.__module__ == info.name and not kind.__flags__ & HEAP_TYPE:
                named.append(f"{info.name}.{name}")
    assert len(named) > 10
    done = subprocess.run(
        [sys.executable, "-c", USE, *named], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout.split()[-1] + done.stderr
