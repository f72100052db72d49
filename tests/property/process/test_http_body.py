"""Any body of a request is refused, or read as Python's own parser reads it; others have turns meanwhile."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from kvstrata.errors import BadRequest
from kvstrata.process import operations
from kvstrata.process.operations import MAX_REST_BYTES, PIECE_BYTES, Operation, Token, TooLarge, asked
from tests.harness.amount import amount

TOKEN = st.integers(0, (1 << 32) - 1)
TEXT = st.text(st.sampled_from('abé\U0001f600"\\[]{},: 12\n'), max_size=12)
KEYS = st.lists(st.text("0123456789abcdef", min_size=8, max_size=8), max_size=8)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "tokens": st.lists(TOKEN, max_size=60) | KEYS | TEXT,
        "keys": KEYS | st.lists(TEXT, max_size=20) | st.none(),
        "model": TEXT | TOKEN,
        "other": TOKEN,
    },
)
JSON = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_).encode(),
    FIELDS,
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
NEARLY = st.lists(
    st.sampled_from(
        [
            b"[",
            b"]",
            b"{",
            b"}",
            b",",
            b":",
            b'"',
            b"\\",
            b" " * 15,
            b"1,1,1,1,",
            b'"tokens":[',
            b'"keys":[',
            b'"a",',
        ]
    )
)
GARBAGE = NEARLY.map(b"".join) | st.binary(max_size=200)
MOST = 500_000


class Ask(msgspec.Struct):
    """What operations with long lists ask for."""

    tokens: Annotated[list[Token], Meta(max_length=MOST)] | None = None
    keys: list[str] | None = None
    model: str = ""


ASKS = Operation("POST", "/ask", lambda: None, Ask, None)


async def read(body: bytes) -> Any:
    """The value of a body. Raises BadRequest."""
    return await asked(ASKS, {}, {}, body)


@given(JSON | GARBAGE)
@settings(max_examples=amount(166, 500))
async def test_a_body_is_refused_or_read_as_python_reads_it(body: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "PIECE_BYTES", 24)
        patch.setattr(operations, "MAX_REST_BYTES", 40)
        try:
            found = await read(body)
        except BadRequest:
            return
    value = json.loads(body) if body else {}
    same = Ask(value.get("tokens"), value.get("keys"), value.get("model", ""))
    tokens = None if found.tokens is None else list(found.tokens)
    assert (tokens, found.keys, found.model) == (same.tokens, same.keys, same.model)


async def test_long_lists_of_tokens_and_of_keys_are_read() -> None:
    tokens, keys = list(range(MOST)), [f"{number:064x}" for number in range(3_000)]
    assert (await read(json.dumps({"tokens": tokens}).encode())).tokens == array("I", tokens)
    assert (await read(json.dumps({"keys": keys, "model": "m"}).encode())).keys == keys


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        (b"1," * MOST + b"1", "tokens: must be a list of at most 500000 items, found 500001"),
        (b"1," * 50_000 + b"-1", "tokens[50000]: Expected `int` >= 0"),
        (b"1," * 50_000 + b'"a"', "tokens[50000]: Expected `int`, got `str`"),
        (b"1," * 50_000, "JSON is malformed"),
        (b"1," * 50_000 + b",1", "JSON is malformed"),
        (b"1," * 32_768 + (b" " * 60_000 + b",") * 2 + b"1", "tokens[32768]: an item is missing"),
        (
            b'"' + b"x" * (PIECE_BYTES + 1) + b'"',
            "tokens[0]: an item is missing, or has more than 65536 bytes",
        ),
    ],
)
async def test_a_long_list_of_anything_else_is_refused_by_its_first_wrong_item(listed, says):
    with pytest.raises(BadRequest) as refused:
        await read(b'{"model": "m", "tokens" : [' + listed + b"]}")
    assert says in refused.value.message
    assert refused.value.field.startswith("tokens")


async def test_what_is_no_long_list_has_a_bound() -> None:
    body = b'{"model": "' + b"x" * (MAX_REST_BYTES - 13) + b'"}'
    assert len((await read(body)).model) == MAX_REST_BYTES - 13
    for long in (
        body.replace(b"x", b"xx", 1),
        b'{"model": "' + b"x" * MAX_REST_BYTES + b'", "tokens": [' + b"1," * 50_000 + b"1]}",
        b" " * (32 << 20),
        b"1," * (8 << 20) + b"]" * 512,
    ):
        with pytest.raises(TooLarge, match="at most 65536 bytes besides its list"):
            await read(long)


async def test_others_have_a_turn_after_each_piece_of_a_long_list() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    n_pieces = 12
    await read(b'{"tokens": [' + b"1," * (n_pieces * PIECE_BYTES // 2) + b"1]}")
    beside.cancel()
    assert turns >= n_pieces
