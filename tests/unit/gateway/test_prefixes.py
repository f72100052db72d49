"""What the gateway remembers of prompts, against a model that keeps whole texts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.prefixes import PIECE_BYTES, PIECE_TOKENS, Prefixes, keys_of

TEXTS = st.lists(st.sampled_from("ab"), max_size=4).map("".join)
"""Each letter stands for a whole piece."""
CALLS = st.lists(
    st.tuples(st.sampled_from(("sent", "computed", "failed", "restarted")), st.sampled_from("xy"), TEXTS),
    max_size=25,
)


def keys(text: str, context: bytes = b"m") -> list[bytes]:
    return keys_of([context], b"".join(letter.encode() * PIECE_BYTES for letter in text))


@settings(max_examples=400)
@given(CALLS, TEXTS)
def test_an_engine_has_the_longest_beginning_that_it_was_sent(calls, asked_for):
    prefixes, generations = Prefixes(), {"x": 0, "y": 0}
    model: dict[str, dict[str, bool]] = {"x": {}, "y": {}}
    for number, (what, engine, text) in enumerate(calls):
        beginnings = [text[: end + 1] for end in range(len(text))]
        if what == "restarted":
            generations[engine] += 1
            model[engine] = {}
        elif what == "failed":
            prefixes.take_back(keys(text), engine)
            for one in beginnings:
                if not model[engine].get(one, True):
                    del model[engine][one]
        else:
            computed = what == "computed"
            sent = prefixes.note(keys(text), engine, generations[engine], float(number))
            if computed:
                prefixes.computed(sent, keys(text), engine, float(number))
            for one in beginnings:
                model[engine][one] = model[engine].get(one, False) or computed
    for asked in {asked_for, *(text[:end] for _, _, text in calls for end in range(len(text) + 1))}:
        expected = {}
        for engine, known in model.items():
            count = 0
            while count < len(asked) and asked[: count + 1] in known:
                count += 1
            if count:
                certainty = "degraded" if known[asked[:count]] else "predicted"
                expected[engine] = (count * PIECE_TOKENS, certainty)
        copies = prefixes.copies(keys(asked), generations, 100.0)
        assert {copy.engine: (copy.tokens, copy.certainty) for copy in copies} == expected


def test_the_longest_unused_pieces_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.gateway.prefixes.MAX_KEYS", 6)
    prefixes = Prefixes()
    for text in ("aaa", "bbb"):
        prefixes.note(keys(text), "x", 0, 0.0, computed=True)
    prefixes.note(keys("aaa"), "x", 0, 1.0, computed=True)
    prefixes.note(keys("ccc"), "x", 0, 2.0, computed=True)
    assert len(prefixes) == 6
    found = {text: prefixes.copies(keys(text), {"x": 0}, 3.0) for text in ("aaa", "bbb", "ccc")}
    assert [bool(found[text]) for text in found] == [True, False, True]


def test_what_an_engine_had_before_it_was_emptied_counts_no_more() -> None:
    prefixes, generations = Prefixes(), {"x": 0, "y": 0}
    for engine in generations:
        prefixes.note(keys("abc"), engine, 0, 10.0, computed=True)
    prefixes.note(keys("a"), "x", 0, 12.0, computed=True)

    def tokens(emptied_s: dict[str, float]) -> dict[str, int]:
        heard = {
            name: SimpleNamespace(emptied_s=at_s, missed_s=float("-inf")) for name, at_s in emptied_s.items()
        }
        return {one.engine: one.tokens for one in prefixes.copies(keys("abc"), generations, 12.0, heard.get)}

    assert tokens({}) == tokens({"x": float("-inf")}) == {"x": 3 * PIECE_TOKENS, "y": 3 * PIECE_TOKENS}
    assert tokens({"x": 11.0, "y": 9.0}) == {"x": PIECE_TOKENS, "y": 3 * PIECE_TOKENS}
    prefixes.note(keys("abc"), "x", 0, 12.0, computed=False)
    assert tokens({"x": 13.0}) == {"y": 3 * PIECE_TOKENS}
    prefixes.forget(keys("abc"), "x")
    prefixes.note(keys("abc"), "x", 0, 12.0, computed=False)
    assert tokens({"x": 13.0}) == dict.fromkeys("xy", 3 * PIECE_TOKENS), (
        "it is under way and will be computed"
    )


def test_what_an_engine_was_sent_before_events_were_lost_counts_as_without_events() -> None:
    prefixes, generations = Prefixes(), {"x": 0}
    prefixes.note(keys("abc"), "x", 0, 10.0, computed=True)

    def found(missed_s: float) -> tuple[str, float]:
        heard = {"x": SimpleNamespace(emptied_s=float("-inf"), missed_s=missed_s)}
        [one] = prefixes.copies(keys("abc"), generations, 15.0, heard.get)
        return one.certainty, one.age_s

    assert found(float("-inf")) == found(9.0) == ("unconfirmed", 5.0)
    assert found(10.0) == found(14.0) == ("degraded", 5.0)
    prefixes.forget(keys("abc"), "x")
    prefixes.note(keys("abc"), "x", 0, 15.0, computed=False)
    assert found(16.0)[0] == "predicted"


def test_pieces_that_another_request_took_back_are_there_once_they_are_computed() -> None:
    prefixes = Prefixes()
    sent = prefixes.note(keys("ab"), "x", 0, 1.0)
    prefixes.note(keys("a"), "x", 0, 2.0)
    prefixes.take_back(keys("a"), "x")
    prefixes.computed(sent, keys("ab"), "x", 3.0)
    [copy] = prefixes.copies(keys("ab"), {"x": 0}, 3.0)
    assert copy.tokens == 2 * PIECE_TOKENS
