"""Each place in the code that gives up a chunk names a reason, and the pool's refusals have a meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.tiers.reasons import MEANINGS, OTHER

SRC = Path(__file__).resolve().parents[3] / "src" / "kvstrata"
GIVEN_UP = {
    ("PutOutcome", "FAILED"): 1, ("PutOutcome", "THROTTLED"): 1, ("LoadOutcome", "FAILED"): 1,
}  # fmt: skip
"""(Class, its status) of an outcome that gives a chunk up → place of the reason among its arguments."""


def outcomes() -> Iterator[tuple[str, ast.Call, int]]:
    """(Where, the call, place of its reason) of each outcome that gives a chunk up."""
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name, _ in GIVEN_UP):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                status = node.args[0]
                word = status.attr if isinstance(status, ast.Attribute) else ""
                if (place := GIVEN_UP.get((node.func.id, word))) is not None:
                    yield f"{path.relative_to(SRC)}:{node.lineno}", node, place


def test_no_outcome_gives_a_chunk_up_without_a_reason() -> None:
    found, silent = 0, []
    for where, call, place in outcomes():
        found += 1
        named = next((word.value for word in call.keywords if word.arg == "reason"), None)
        reason = call.args[place] if len(call.args) > place else named
        if reason is None or (isinstance(reason, ast.Constant) and not reason.value):
            silent.append(where)
    assert found > 30, "the walk finds the places"
    assert silent == []


def test_each_refusal_of_the_pool_has_a_meaning() -> None:
    given_up = set(ReserveOutcome) - {ReserveOutcome.RESERVED, ReserveOutcome.PRESENT}
    assert [one for one in given_up if MEANINGS.get(one.name.lower(), OTHER) is OTHER] == []
