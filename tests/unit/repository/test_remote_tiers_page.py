"""docs/remote-tiers.md names, for each fault that it tells of, the test that shows it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_fault_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "remote-tiers.md").read_text()
    tables = re.findall(r"^\| fault \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert len(tables) == 3
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in "".join(tables).splitlines():
        names = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert names and all(f"def {name}" in code for name in names), row
