"""Packed batches are read back, and other bytes are not taken for a batch."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.batches import names_of, pack_found, pack_keys, read_found, split_keys, types_of
from tests.oracles import batches as oracle

MAX_REASON_BYTES = 48

keys = st.lists(st.binary(min_size=32, max_size=32))
other_keys = st.binary(max_size=70).filter(lambda key: len(key) != 32)
# Few different answers, so that many are equal and some are the same object.
answers = st.tuples(
    st.integers(0, 2), st.sampled_from([0, 4608, 4609, 2**32 - 1]), st.sampled_from(["", "io", "ö" * 9])
)
rows = st.builds(
    oracle.pack_found,
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([0, 1 << 20]),
            st.sampled_from([b"", b"io", b"\xff", b"x" * 49]),
        )
    ),
)


@given(keys)
def test_keys_are_read_as_they_were_packed(given_keys: list[bytes]) -> None:
    packed = pack_keys(given_keys)
    assert packed == b"".join(given_keys)
    assert split_keys(packed) == split_keys(memoryview(packed)) == given_keys


@given(keys, other_keys, keys)
def test_a_key_of_another_length_is_refused(before: list[bytes], other: bytes, after: list[bytes]) -> None:
    for make in (pack_keys, lambda given_keys: names_of("", given_keys)):
        with pytest.raises(ValueError, match="32 bytes"):
            make([*before, other, *after])
    if len(other) % 32:
        with pytest.raises(ValueError, match="multiple of 32 bytes"):
            split_keys(other)


@given(st.lists(st.integers() | st.booleans() | st.text() | st.none()))
def test_types_of_values_are_all_of_their_types(values: list[object]) -> None:
    assert types_of(values) == {type(value) for value in values}


@pytest.mark.parametrize("key", [None, 3.5, "0" * 32, [256]])
def test_a_value_that_is_no_key_raises(key: object) -> None:
    for make in (pack_keys, lambda given_keys: names_of("", given_keys)):
        with pytest.raises((TypeError, ValueError)):
            make([bytes(32), key])


def test_a_prefix_that_is_not_ascii_is_refused() -> None:
    with pytest.raises(ValueError, match="ASCII"):
        names_of("größe-", [bytes(32)])


@given(st.lists(answers))
def test_answers_are_packed_and_read_as_the_oracle_does(outcomes: list[tuple[int, int, str]]) -> None:
    packed = pack_found(outcomes, str.encode)
    assert packed == oracle.pack_found([(presence, size, word.encode()) for presence, size, word in outcomes])
    made = read_found(packed, len(outcomes), MAX_REASON_BYTES, lambda *answer: answer)
    assert made == outcomes == oracle.read_found(packed, len(outcomes), MAX_REASON_BYTES)


@given(rows, st.integers(-2, 2), st.data())
def test_any_rows_are_read_or_refused_as_the_oracle_does(
    given_rows: bytes, more: int, data: st.DataObject
) -> None:
    damaged = bytearray(given_rows)
    if damaged and data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    whole = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    count = max(0, len(given_rows) // 6 + more)
    try:
        expected = oracle.read_found(whole, count, MAX_REASON_BYTES)
    except (ValueError, struct.error):
        with pytest.raises(ValueError, match=r"."):
            read_found(whole, count, MAX_REASON_BYTES, lambda *answer: answer)
    else:
        assert read_found(whole, count, MAX_REASON_BYTES, lambda *answer: answer) == expected


@given(st.binary(max_size=100), st.integers(0, 20))
def test_other_bytes_are_refused(given_rows: bytes, count: int) -> None:
    try:
        assert len(read_found(given_rows, count, MAX_REASON_BYTES, lambda *answer: answer)) == count
    except ValueError:
        pass


@pytest.mark.parametrize(
    "answer", [(-1, 0, ""), (256, 0, ""), (1, 1 << 32, ""), (1, 0), (1, "", ""), None, 3]
)
def test_an_answer_that_fits_no_row_is_an_exception(answer: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        pack_found([answer], str.encode)  # type: ignore[list-item]


@given(st.integers(256, 400))
def test_a_reason_that_fits_no_row_is_an_exception(length: int) -> None:
    with pytest.raises(ValueError, match="255"):
        pack_found([(2, 0, "x" * length)], str.encode)
