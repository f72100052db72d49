"""Any body of a request is refused, or read as Python's own parser reads it."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.process import http_body
from kvstrata.process.http_body import Arriving, BodyRefused, shorten
from tests.harness.amount import amount

TOKEN = st.integers(0, (1 << 32) - 1)
TEXT = st.text(st.sampled_from('abé\U0001f600"\\[]{},: 12\n'), max_size=12)
LEAF = st.none() | st.booleans() | TOKEN | st.integers(-9, 1 << 70) | st.floats(allow_nan=False) | TEXT
VALUE = st.recursive(
    LEAF | st.lists(TOKEN, max_size=60) | st.lists(TEXT, max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
JSON = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_).encode(),
    VALUE,
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
NEARLY = st.lists(
    st.sampled_from(
        [b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b" ", b" " * 15, b"1", b"1,1,1,1,", b'"a",']
    )
)
GARBAGE = NEARLY.map(b"".join) | st.binary(max_size=200)


@pytest.fixture(autouse=True)
def lists_of_40_bytes_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "SHORT_BYTES", 40)
    monkeypatch.setattr(http_body, "PIECE_BYTES", 24)


async def read(body: bytes) -> Any:
    """The value of a body. Raises BodyRefused, or ValueError from the parser."""
    rest, taken = await shorten(bytearray(body))

    def restored(value: Any) -> Any:
        match value:
            case str() if value in taken:
                return list(taken[value])
            case list():
                return [restored(one) for one in value]
            case dict():
                return {name: restored(one) for name, one in value.items()}
        return value

    return restored(json.loads(rest))


@given(JSON | GARBAGE)
@settings(max_examples=amount(166, 500))
async def test_a_body_is_refused_or_read_as_python_reads_it(body: bytes) -> None:
    try:
        found = await read(body)
    except (BodyRefused, ValueError):
        return
    assert found == json.loads(body)


@given(
    st.lists(TOKEN, min_size=40), st.lists(st.text("0123456789abcdef", min_size=8, max_size=8), min_size=5)
)
async def test_long_lists_of_tokens_and_of_keys_are_taken_out(tokens: list[int], keys: list[str]) -> None:
    rest, taken = await shorten(
        bytearray(json.dumps({"tokens": tokens, "keys": keys, "model": "m"}).encode())
    )
    assert list(map(type, taken.values())) == [array, list]
    assert list(map(list, taken.values())) == [tokens, keys]
    first, second = taken
    assert json.loads(rest) == {"tokens": first, "keys": second, "model": "m"}


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(0, 300))
async def test_how_a_body_is_cut_into_parts_changes_nothing(parts: list[bytes], limit: int) -> None:
    def result(cut: list[bytes]) -> bytes | str:
        arriving = Arriving(limit)
        try:
            for part in cut:
                arriving.add(part)
            return bytes(arriving.whole())
        except BodyRefused as error:
            return error.message

    assert result(parts) == result([b"".join(parts)])
