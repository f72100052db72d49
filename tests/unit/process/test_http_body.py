"""The bounds of bodies at their edges; others have turns of the loop while a long body is read."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.process.http_body import (
    MAX_CONTAINERS,
    MAX_MEMBERS,
    MAX_QUOTES,
    MAX_REST_BYTES,
    MAX_TOKENS,
    PIECE_BYTES,
    SHORT_BYTES,
    Arriving,
    BodyRefused,
    shorten,
)


@pytest.mark.parametrize(
    ("one", "most", "what"),
    [
        (b"[", MAX_CONTAINERS, "512 objects and lists"),
        (b"]", MAX_CONTAINERS, "512 ends of lists"),
        (b":", MAX_MEMBERS, "4096 colons"),
        (b'"', MAX_QUOTES, "139264 quotes"),
        (b" ", 200_000, "200000 bytes"),
    ],
)
def test_each_bound_holds_at_its_edge_over_all_parts(one: bytes, most: int, what: str) -> None:
    arriving = Arriving(200_000)
    arriving.add(one * (most - 1))
    arriving.add(one)
    assert arriving.whole() == one * most
    with pytest.raises(BodyRefused, match=f"more than {what}") as refused:
        arriving.add(one)
        arriving.add(b"what follows is not kept")
        arriving.whole()
    assert (refused.value.status, refused.value.field) == (413, "body")


async def test_no_more_tokens_than_a_call_takes() -> None:
    listed = b"1," * (MAX_TOKENS - 1) + b"1"
    _, taken = await shorten(bytearray(b'{"tokens": [' + listed + b"]}"))
    assert [len(items) for items in taken.values()] == [MAX_TOKENS]
    with pytest.raises(BodyRefused, match="tokens: more than 4194304 items"):
        await shorten(bytearray(b'{"tokens": [' + listed + b",1]}"))


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        (b"1," * 50_000 + b"-1", "tokens.50000: Expected `int` >= 0"),
        (b"1," * 50_000 + b'"a"', "tokens.50000: Expected `int`, got `str`"),
        (b'"a",' * 50_000 + b"1", "tokens.50000: Expected `str`, got `int`"),
        (b"1," * 50_000, "JSON is malformed"),
        (b"1," * 50_000 + b",1", "JSON is malformed"),
        (b"1," * 32_768 + (b" " * 60_000 + b",") * 2 + b"1", "tokens.32768: an item is missing"),
        (b'"' + b"x" * (PIECE_BYTES + 1) + b'"', "tokens.0: an item of more than 65536 bytes"),
    ],
)
async def test_a_long_list_of_anything_else_is_refused_by_its_first_wrong_item(
    listed: bytes, says: str
) -> None:
    with pytest.raises(BodyRefused) as refused:
        await shorten(bytearray(b'{"model": "m", "tokens" : [' + listed + b"]}"))
    assert says in refused.value.message
    assert (refused.value.status, refused.value.field) == (400, "tokens")


async def test_what_is_no_long_list_has_a_bound() -> None:
    body = b'{"model": "' + b"x" * (SHORT_BYTES - 13) + b'"}'
    assert await shorten(bytearray(body)) == (body, {})
    for long in (
        body.replace(b"x", b"xx", 1),
        b'{"model": "' + b"x" * MAX_REST_BYTES + b'", "tokens": [' + b"1," * 50_000 + b"1]}",
        b" " * (32 << 20),
        b"1," * (8 << 20) + b"]" * MAX_CONTAINERS,
    ):
        with pytest.raises(BodyRefused, match="more than 65536 bytes beside its lists") as refused:
            await shorten(bytearray(long))
        assert refused.value.status == 413


async def test_a_long_list_within_a_text_is_refused() -> None:
    for text in (b"\\[", b"x[", b" ["):
        with pytest.raises(BodyRefused, match=r"a list begins at byte 1[12], behind no colon"):
            await shorten(bytearray(b'{"model": "' + text + b"1," * 50_000 + b'1]"}'))


async def test_others_have_a_turn_after_each_piece_of_a_long_list() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    n_pieces = 64
    await shorten(bytearray(b'{"tokens": [' + b"1," * (n_pieces * PIECE_BYTES // 2) + b"1]}"))
    beside.cancel()
    assert turns >= n_pieces
