"""Each place in the code that gives up a chunk names a reason, and each reason of the closed list has such a place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.policy.reasons import MEANINGS
from kvstrata.types import MissReason

SRC = Path(__file__).resolve().parents[3] / "src" / "kvstrata"
GIVEN_UP = {
    ("PutOutcome", "FAILED"): 1, ("PutOutcome", "THROTTLED"): 1, ("LoadOutcome", "FAILED"): 1, ("Found", "UNKNOWN"): 2,
}  # fmt: skip
"""(Class, its status) of an outcome that gives a chunk up → place of the reason among its arguments."""
TREES = {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def outcomes() -> Iterator[tuple[str, ast.Call, int]]:
    """(Where, the call, place of its reason) of each outcome that gives a chunk up."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                status = node.args[0]
                word = status.attr if isinstance(status, ast.Attribute) else ""
                if (place := GIVEN_UP.get((node.func.id, word))) is not None:
                    yield f"{path.relative_to(SRC)}:{node.lineno}", node, place


def reason_of(call: ast.Call, place: int) -> ast.expr | None:
    named = next((word.value for word in call.keywords if word.arg == "reason"), None)
    return call.args[place] if len(call.args) > place else named


def test_no_outcome_gives_a_chunk_up_without_a_reason() -> None:
    found = list(outcomes())
    assert len(found) > 30, "the walk finds the places"
    silent = [where for where, call, place in found if (reason := reason_of(call, place)) is None
              or (isinstance(reason, ast.Constant) and not reason.value)]  # fmt: skip
    assert silent == []


@pytest.mark.parametrize("reason", MissReason)
def test_each_reason_of_a_miss_is_given_somewhere(reason: MissReason) -> None:
    """By code that names it, or by a word of `MEANINGS`."""
    named = any(
        isinstance(node, ast.Attribute)
        and node.attr == reason.name
        and ast.unparse(node.value) == "MissReason"
        for path, tree in TREES.items()
        if path.name not in ("types.py", "reasons.py")
        for node in ast.walk(tree)
    )
    assert named or any(meaning.miss is reason for meaning in MEANINGS.values())
