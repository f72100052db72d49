"""Chain keys of one request while its tokens grow."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvstrata.keys import ChunkHasher, MediaItem
from tests.oracles import keys as oracle

ROOT = hashlib.sha256(b"root").digest()


def some_tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1 << 32) for _ in range(n)]


def test_gap_before_the_tail_is_refused():
    hasher = ChunkHasher(ROOT, 16)
    hasher.feed(some_tokens(100))
    before = hasher.chain
    with pytest.raises(ValueError, match="next token to hash is 96"):
        hasher.feed(some_tokens(100), start=97)
    assert hasher.chain == before


def test_hashed_tokens_are_not_read_again():
    tokens = some_tokens(64)
    hasher = ChunkHasher(ROOT, 16)
    hasher.feed(tokens)
    changed = [*([-1] * 64), *some_tokens(16, seed=9)]  # hashing a -1 would raise
    assert hasher.feed(changed) == 1


def test_probe_names_the_first_chunk_of_tokens_and_no_identity():
    tokens = some_tokens(64)
    one, two = ChunkHasher(ROOT, 16), ChunkHasher(bytes(32), 16)
    one.feed(tokens)
    two.feed(tokens[:16])
    assert one.probe == two.probe == hashlib.sha256(oracle.token_bytes(tokens[:16])).digest()[:8]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (MediaItem(-1, 2, "cat"), "'cat': offset_tokens -1"),
        (MediaItem(0, -2, "cat"), "length_tokens -2"),
        (MediaItem(3, 2, ""), "at token 3: content_id is empty"),
    ],
)
def test_media_with_an_impossible_place_or_name_is_refused(item, says):
    with pytest.raises(ValueError, match=says):
        ChunkHasher(ROOT, 16, [item])


@pytest.mark.parametrize(("root", "size"), [(b"short", 16), (ROOT, 0)])
def test_a_hasher_with_an_impossible_root_or_size_is_refused(root, size):
    with pytest.raises(ValueError):
        ChunkHasher(root, size)
