"""Each test lies in the folder of the room that it guards: tests/KIND/ROOM/test_SUBJECT.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
WITH_ROOMS = ("conformance", "fault", "fuzz", "integration", "model", "property", "unit")
"""Kinds of tests that have folders of rooms; tests/conftest.py knows the folders `gpu` and `vllm`."""
BESIDE = {"repository", "tools"}
"""What lies outside src: pages, images, manifests, benchmarks; and tests/tools."""


def test_each_test_lies_in_the_folder_of_its_room() -> None:
    package = ROOT / "src" / "kvstrata"
    rooms = {path.name for path in package.iterdir() if path.is_dir()}
    wrong = []
    for kind in WITH_ROOMS:
        for path in (TESTS / kind).rglob("test_*.py"):
            folders = path.relative_to(TESTS / kind).parts[:-1]
            ground = kind == "unit" and not folders
            if not ground and not (len(folders) == 1 and folders[0] in rooms | BESIDE):
                wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_a_helper_of_one_user_lies_beside_it() -> None:
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in (*TESTS.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "Makefile")
    }
    lonely = []
    for helper in sorted((TESTS / "harness").glob("[!_]*.py")):
        name = rf"{helper.stem}\b"
        used = re.compile(rf"tests[./]harness[./]{name}|from tests\.harness import [^\n]*\b{name}")
        if sum(path != helper and used.search(text) is not None for path, text in texts.items()) < 2:
            lonely.append(helper.name)
    assert lonely == ["mooncake_holder.py"]  # run by its path, by harness/mooncake.py
