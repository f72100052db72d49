"""`ext/make` compiles nothing twice, and never takes a stale or damaged object for a current one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "ext"))

from make import build as maker  # noqa: E402


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def clone(folder: Path, value: int = 1) -> Path:
    """A tree of one source that includes one header and not another."""
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "used.h").write_text(f"inline int used() {{ return {value}; }}\n")
    (folder / "include" / "unused.h").write_text("\n")
    (folder / "one.cpp").write_text('#include "used.h"\nint one() { return used(); }\n')
    return folder


def build(folder: Path, store: Path, *flags: str) -> list[str]:
    """Bring the tree's object up to date; returns the sources that were compiled."""
    builder = maker.Builder(store)
    builder.make(maker.compile_step("one.cpp", "out/one.o", ["-Iinclude", *flags], folder))
    return builder.ran


def age(*paths: Path) -> None:
    """Give files a time in the past, as in a tree that nobody edits."""
    for path in paths:
        os.utime(path, (1_600_000_000, 1_600_000_000))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    made = clone(tmp_path / "tree")
    age(*made.rglob("*.*"))
    return made


def test_a_second_clone_compiles_nothing(tree: Path, store: Path, tmp_path: Path) -> None:
    build(tree, store)
    other = clone(tmp_path / "elsewhere")
    assert build(other, store) == []
    assert (other / "out" / "one.o").read_bytes() == (tree / "out" / "one.o").read_bytes()


def test_only_the_contents_of_the_files_that_the_compiler_read_decide_what_is_compiled(tree, store):
    build(tree, store)
    (tree / "include" / "unused.h").write_text("changed\n")
    (tree / "include" / "used.h").touch()
    assert build(tree, store) == []
    (tree / "include" / "used.h").write_text("inline int used() { return 2; }\n")
    age(tree / "include" / "used.h")
    assert build(tree, store) == ["out/one.o"]
    (tree / "include" / "used.h").write_text("inline int used() { return 1; }\n")
    assert build(tree, store) == [], "the edition before is kept as well"


@pytest.mark.parametrize("change", ["flag", "environment", "compiler"])
def test_other_flags_or_another_compiler_are_another_entry(tree, store, change, monkeypatch, tmp_path):
    build(tree, store)
    if change == "environment":
        monkeypatch.setenv("CPATH", str(tmp_path))
    elif change == "compiler":
        other = tmp_path / "g++"
        other.write_text('#!/bin/sh\n[ "$1" = --version ] && echo newer && exit\nexec g++ "$@"\n')
        other.chmod(0o755)
        monkeypatch.setenv("CXX", str(other))
    assert build(tree, store, *(["-O2"] if change == "flag" else [])) == ["out/one.o"]


def test_an_object_whose_source_changed_during_the_compilation_is_not_kept(tree: Path, store: Path) -> None:
    os.utime(tree / "include" / "used.h", (2_000_000_000, 2_000_000_000))
    build(tree, store)
    assert list(store.glob("??/*")) == []


def test_a_source_with_a_mistake_leaves_no_object(tree: Path, store: Path) -> None:
    build(tree, store)
    (tree / "one.cpp").write_text("int one( { }\n")
    with pytest.raises(maker.BuildFailed, match="expected"):
        build(tree, store)
    assert not (tree / "out" / "one.o").exists()


def test_the_cache_stays_below_its_limit_and_keeps_the_newest_entries(store: Path, tmp_path: Path) -> None:
    limited = maker.Builder(store, limit_bytes=10_000)
    for number in range(20):
        product = tmp_path / "product"
        product.write_bytes(bytes([number]) * 1000)
        before = {*store.glob("??/*")}
        limited.add(f"{number:064x}", tmp_path, [], product, "")
        for path in {*store.glob("??/*")} - before:
            os.utime(path, (1_600_000_000 + number, 1_600_000_000 + number))
    limited.sweep(now=True)
    assert sum(path.stat().st_size for path in store.glob("??/*")) <= 10_000
    kept = {path.read_bytes()[0] for path in store.glob("??/*.product")}
    assert kept == {*range(20 - len(kept), 20)}


def test_make_learns_what_an_object_was_made_from(tree: Path, store: Path) -> None:
    command = [sys.executable, ROOT / "ext" / "make", "compile", "-Iinclude", "-c", "one.cpp", "-o", "one.o"]
    environment = {**os.environ, "KVSTRATA_CACHE": str(store)}
    for _ in range(2):
        subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
        rule = (tree / "one.d").read_text()
        assert rule.startswith("one.o: one.cpp ") and "include/used.h" in rule.splitlines()[0]
        (tree / "one.d").unlink()
