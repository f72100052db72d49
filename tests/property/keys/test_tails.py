"""Keys of tails: no two tails of different tokens share one, and no tail has the key of a chunk."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.keys import ChunkHasher, MediaItem
from kvstrata.keys.chunking import DOMAIN, media_extra, tail_keys

BLOCK = 4
ROOT = bytes(range(32))
TOKENS = st.integers(0, 2**32 - 1)


@given(
    tokens=st.lists(TOKENS, max_size=40),
    media=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=3),
    ahead=st.integers(0, 5),
)
def test_each_key_is_the_hash_that_formats_md_describes(tokens, media, ahead):
    items = [MediaItem(at, length, f"id {at}") for at, length in media]
    made = tail_keys(ROOT, tokens, BLOCK, items, first_token=8, lookahead_tokens=ahead)
    assert len(made) == max(0, len(tokens) - ahead) // BLOCK
    for number, key in enumerate(made, 1):
        leading = tokens[: number * BLOCK + ahead]
        extra = media_extra(items, 8, len(leading)) or bytes(32)
        assert (
            key == hashlib.sha256(DOMAIN + ROOT + extra + struct.pack(f"<{len(leading)}I", *leading)).digest()
        )


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=6),
    chunk_blocks=st.integers(1, 5),
    ahead=st.integers(0, 2),
)
def test_equal_keys_mean_equal_tokens_and_no_tail_is_a_chunk(prompts, chunk_blocks, ahead):
    chunk = chunk_blocks * BLOCK
    seen: dict[bytes, tuple[bool, tuple[int, ...]]] = {}
    for prompt in prompts:
        hasher = ChunkHasher(ROOT, chunk, lookahead_tokens=ahead)
        hasher.feed(prompt)
        named = [
            (hasher.key(i), (False, tuple(prompt[: (i + 1) * chunk + ahead]))) for i in range(hasher.n_chunks)
        ]
        for number in range(hasher.n_chunks + 1):
            leading = prompt[number * chunk : (number + 1) * chunk + ahead]
            for blocks, key in enumerate(hasher.tail_keys(number, leading, BLOCK), 1):
                named.append((key, (True, tuple(prompt[: number * chunk + blocks * BLOCK + ahead]))))
        for key, meaning in named:
            assert seen.setdefault(key, meaning) == meaning


def test_a_tail_needs_the_chunk_before_it_and_tokens_of_32_bits() -> None:
    hasher = ChunkHasher(ROOT, 8)
    with pytest.raises(IndexError, match="not hashed"):
        hasher.tail_keys(1, [1] * 4, BLOCK)
    with pytest.raises(ValueError, match="0 to 2"):
        tail_keys(ROOT, [1, 2, 3, -1], BLOCK)
    with pytest.raises(ValueError, match="0 to 2"):
        tail_keys(ROOT, [1, 2, 3, 2**32], BLOCK)
