"""`make help` names every target, and the hooks of pre-commit are what `make lint` runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()


def targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    return set(phony.split())


def test_help_describes_every_target() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    described = dict(re.findall(r"^  make ([\w-]+) +(.*)$", shown, re.MULTILINE))
    made = set(re.findall(r"^([a-z][\w-]*)[\w -]*:(?!=)", MAKEFILE, re.MULTILINE))
    assert set(described) == targets() >= made
    assert all(len(text) > 10 for text in described.values())
    assert max(map(len, shown.splitlines())) <= 120


def test_hooks_run_the_linters_of_make_lint_from_this_clone() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    recipe = recipe.replace("$(VENV_PYTHON)", ".venv/bin/python").replace("\\\n", " ")
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"] in recipe
    assert len(repo["hooks"]) == len(re.findall(r"-m ruff|-m mypy|clang-format --dry-run", recipe))
    (linted,) = re.findall(r"^LINTED := (.*)$", MAKEFILE, re.MULTILINE)
    python = [hook for hook in repo["hooks"] if "ruff" in hook["entry"]]
    for name in linted.split():
        example = name if name.endswith(".py") else f"{name}/one.py"
        assert all(re.search(hook["files"], example) for hook in python), name
