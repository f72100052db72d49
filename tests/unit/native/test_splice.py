"""The splicer's reading of chunked coding against the grammar; ext/core/tests/splice tests what it passes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import decoded
from tests.oracles.chunks import body_of

PIECES = st.sampled_from(
    [b"5\r\nhello\r\n", b"1;a=b\r\nx\r\n", b"0\r\n", b"\r\n", b"0\r\n\r\n", b"X: y\r\n", b"a", b";", b"\n", b"\r",
     b"5 \r\n", b"-5\r\n", b"0x5\r\n", b"5;a\x01\r\n", b"1000000000000000\r\n", b"FFFFFFFFFFFFFFFFF\r\n"]
)  # fmt: skip
BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


@given(BODIES, st.binary(max_size=10))
def test_a_body_ends_where_it_was_made_to_end(bodies: list[bytes], rest: bytes) -> None:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in bodies) + b"0\r\n\r\n"
    assert decoded(coded + rest) == (b"".join(bodies), len(coded), "done")


@given(st.lists(PIECES, max_size=8).map(b"".join))
def test_whatever_comes_is_read_as_the_grammar_says(coded: bytes) -> None:
    body, used, how = decoded(coded)
    if how == "done":
        assert body_of(coded) == (body, used)
    else:
        assert body_of(coded) is None


def test_lines_and_trailers_are_bounded() -> None:
    line, trailers = b"5;" + b"a" * (4096 - 1), b"X: 0123456789\r\n" * (4700)
    assert [decoded(line)[2], decoded(line + b"a")[2], decoded(b"0\r\n" + trailers)[2]] == [
        "more",
        "broken",
        "broken",
    ]
