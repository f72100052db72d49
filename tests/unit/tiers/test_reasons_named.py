"""Each place in the code that gives up a chunk names a reason, and the pool's refusals have a meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.tiers.reasons import MEANINGS, OTHER

SRC = Path(__file__).resolve().parents[3] / "src" / "kvstrata"
GIVEN_UP = "FAILED", "THROTTLED"


def places() -> Iterator[tuple[str, ast.expr | None]]:
    """(Where, the reason) of each outcome that gives a chunk up and stands in a call, or in a tuple with its reason."""
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        if "Outcome.FAILED" not in text:
            continue
        tree = ast.parse(text)
        compared = {
            id(one) for node in ast.walk(tree) if isinstance(node, ast.Compare) for one in node.comparators
        }
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call)
            parts = node.args if is_call else getattr(node, "elts", [])
            if isinstance(node, ast.Set) or id(node) in compared or not (is_call or len(parts) == 2):
                continue
            for part, reason in zip(parts, [*parts[1:], None], strict=False):
                ways = [part.body, part.orelse] if isinstance(part, ast.IfExp) else [part]
                if any(ast.unparse(way) in [f"Outcome.{word}" for word in GIVEN_UP] for way in ways):
                    yield f"{path.relative_to(SRC)}:{node.lineno}", reason


def test_no_outcome_gives_a_chunk_up_without_a_reason() -> None:
    found = list(places())
    assert len(found) > 30, "the walk finds the places"
    assert [where for where, reason in found if reason is None or ast.unparse(reason) in ("''", "None")] == []


def test_each_refusal_of_the_pool_has_a_meaning() -> None:
    given_up = set(ReserveOutcome) - {ReserveOutcome.RESERVED, ReserveOutcome.PRESENT}
    assert [one for one in given_up if MEANINGS.get(one.name.lower(), OTHER) is OTHER] == []
