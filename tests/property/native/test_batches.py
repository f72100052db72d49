"""Names of keys, and types of values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import names_of, types_of

keys = st.lists(st.binary(min_size=32, max_size=32))
other_keys = st.binary(max_size=70).filter(lambda key: len(key) != 32)


@given(keys, other_keys, keys)
def test_a_key_of_another_length_is_refused(before: list[bytes], other: bytes, after: list[bytes]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        names_of("", [*before, other, *after])


@given(st.lists(st.integers() | st.booleans() | st.text() | st.none()))
def test_types_of_values_are_all_of_their_types(values: list[object]) -> None:
    assert types_of(values) == {type(value) for value in values}


@pytest.mark.parametrize("key", [None, 3.5, "0" * 32, [256]])
def test_a_value_that_is_no_key_raises(key: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        names_of("", [bytes(32), key])


def test_a_prefix_that_is_not_ascii_is_refused() -> None:
    with pytest.raises(ValueError, match="ASCII"):
        names_of("größe-", [bytes(32)])
