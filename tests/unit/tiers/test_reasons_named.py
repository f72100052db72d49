"""Each place in the code that gives up a chunk names a reason, and reasons of the native code have a meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvstrata.native.core import reasons
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.tiers.reasons import MEANINGS, OTHER, blames_medium

SRC = Path(__file__).resolve().parents[3] / "src" / "kvstrata"
GIVEN_UP = {
    ("PutOutcome", "FAILED"): 1, ("PutOutcome", "THROTTLED"): 1, ("LoadOutcome", "FAILED"): 1,
}  # fmt: skip
"""(Class, its status) of an outcome that gives a chunk up → place of the reason among its arguments."""
ONLY_OF_PUTS = {"capacity", "disk_full", "no_room"}
"""Words that end puts only: the chunk stays in L1, and is `put_skipped` when it has left."""
OF_THE_POOL = {"sessions_full"}
"""Words that no adapter gives."""


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


def test_each_reason_of_the_native_code_has_a_meaning_or_ends_puts_only() -> None:
    words = {row.word for row in reasons()} - OF_THE_POOL
    assert {word for word in words if (word in MEANINGS) == (word in ONLY_OF_PUTS)} == set()
    given_up = set(ReserveOutcome) - {ReserveOutcome.RESERVED, ReserveOutcome.PRESENT}
    assert [one for one in given_up if MEANINGS.get(one.name.lower(), OTHER) is OTHER] == []


def test_each_reason_of_the_native_code_blames_what_the_policy_blames() -> None:
    for row in reasons():
        if row.word not in OF_THE_POOL:
            assert row.blames_medium == blames_medium(row.word), row.word
