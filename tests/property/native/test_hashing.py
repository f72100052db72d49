"""Native chunk keys and storage keys against an oracle that uses `hashlib`."""

from __future__ import annotations

import array
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native import core
from tests.oracles import keys as oracle

digests = st.binary(min_size=32, max_size=32)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(
    start=digests,
    tokens=tokens_lists,
    chunk_tokens=st.integers(1, 40),
    first=st.integers(0, 60),
    extras=st.dictionaries(st.integers(0, 8), digests),
)
def test_chain_keys_follow_the_definition_for_every_container_of_tokens(
    start: bytes, tokens: list[int], chunk_tokens: int, first: int, extras: dict[int, bytes]
) -> None:
    chunks = max(len(tokens) - first, 0) // chunk_tokens
    extras = {chunk: extra for chunk, extra in extras.items() if chunk < chunks}
    expected = oracle.chain_keys(start, tokens, chunk_tokens, extras, first)
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    unaligned = memoryview(b"\0" + packed)[1:]
    for held in (tokens, tuple(tokens), array.array("I", tokens), packed, unaligned):
        assert core.chain_keys(start, held, chunk_tokens, extras, first) == expected


@given(digests, st.lists(digests, max_size=20), st.lists(digests, min_size=1, max_size=20))
def test_storage_keys_are_those_of_the_definition(root, chain, slices):
    joined, digest = b"".join(chain), b"".join(slices)
    expected = oracle.storage_keys(root, joined, digest)
    assert core.storage_keys(root, joined, digest) == expected


@given(
    st.lists(digests, min_size=2, max_size=2, unique=True),
    st.lists(digests, min_size=1, max_size=8),
    st.lists(digests, min_size=1, max_size=3),
)
def test_no_chain_key_gives_a_storage_key_of_another_identity(roots, chain, slices):
    """Also if the chain keys are the other identity's roots, slices or storage keys."""
    one, two = roots
    digest = b"".join(slices)
    of_one = core.storage_keys(one, b"".join(chain), digest)
    named = b"".join([*chain, one, two, *slices]) + of_one
    of_two = core.storage_keys(two, named, digest)
    first, second = ({keys[at : at + 32] for at in range(0, len(keys), 32)} for keys in (of_one, of_two))
    assert not first & second


def test_long_batches_equal_short_ones() -> None:
    """Batches of 64 chunks or more release the GIL; neither that nor the size of a batch changes the keys."""
    tokens = [(i * 2654435761) % 200_000 for i in range(100 * 16 + 5)]
    whole = core.chain_keys(bytes(32), tokens, 16)
    assert whole == oracle.chain_keys(bytes(32), tokens, 16)
    grown, previous = b"", bytes(32)
    for first in range(0, 100 * 16, 7 * 16):
        piece = core.chain_keys(previous, tokens[: first + 7 * 16 + 3], 16, None, first)
        grown, previous = grown + piece, piece[-32:]
    assert grown == whole
    slices = b"a" * 32 + b"b" * 32 + b"c" * 32
    assert core.storage_keys(whole[:32], whole, slices) == oracle.storage_keys(whole[:32], whole, slices)


class Odd:
    """Has `__index__` but is not an `int`."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("bad", [1.5, "7", None, b"1"])
def test_the_error_for_a_token_that_is_not_an_int_names_its_index(bad: object) -> None:
    with pytest.raises(TypeError, match=rf"tokens\[3\]: must be an int, not {type(bad).__name__}"):
        core.chain_keys(bytes(32), [0, 1, 2, bad], 4)  # type: ignore[list-item]


def test_a_list_that_shrinks_while_it_is_read_is_an_error_not_a_crash() -> None:
    tokens: list[int] = []

    class Shrinks(Odd):
        def __index__(self) -> int:
            del tokens[2:]
            return self.value

    tokens.extend([0, Shrinks(1), *range(1000)])
    with pytest.raises(ValueError, match="became shorter"):
        core.chain_keys(bytes(32), tokens, 1)
