"""Chunks and tails share a key exactly when their KV means the same, in any process, also while a prompt grows."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstrata.keys import ChunkHasher, MediaItem
from kvstrata.keys.chunking import DOMAIN, media_extra, tail_keys
from kvstrata.types import LayoutIdentity, RequestIdentity, Slice, identity_root
from tests.harness.amount import amount
from tests.oracles import keys as oracle

TEXT = st.text(max_size=6)
NAMES = st.sampled_from(["", "a", "b", "ab", 'a","tenant":"b', "a\x00", "ä"]) | TEXT
TOKENS = st.integers(0, 3) | st.integers(0, 2**32 - 1)

layouts = st.builds(
    LayoutIdentity,
    model=NAMES,
    revision=NAMES,
    weights=NAMES,
    tokenizer=NAMES,
    kv_dtype=NAMES,
    kv_scales=NAMES,
    fidelity=NAMES,
    chunk_tokens=st.integers(1, 5),
    lookahead_tokens=st.just(msgspec.UNSET) | st.integers(1, 3),
    format_version=st.integers(1, 2),
)
requests = st.builds(RequestIdentity, adapter=NAMES, tenant=NAMES, salt=NAMES)
slices = st.builds(
    Slice,
    layers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    kv_heads=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    group=st.integers(0, 2),
    layout=NAMES,
)
media = st.lists(
    st.builds(MediaItem, st.integers(0, 12), st.integers(1, 6), st.sampled_from(["x", "y", "xy"])), max_size=2
)
prompts = st.tuples(layouts, requests, st.lists(TOKENS, max_size=14), media)


def hasher_of(layout, request, items):
    root = identity_root(layout, request)
    return ChunkHasher(root, layout.chunk_tokens, items, lookahead_tokens=layout.lookahead)


def chain(prompt) -> list[bytes]:
    layout, request, tokens, items = prompt
    hasher = hasher_of(layout, request, items)
    hasher.feed(tokens)
    return [hasher.key(i) for i in range(hasher.n_chunks)]


def meaning(prompt, chunk: int) -> tuple:
    """Return all values that decide the meaning of a chunk's KV bytes, to be compared without a hash."""
    layout, request, tokens, items = prompt
    ahead = layout.lookahead
    end = (chunk + 1) * layout.chunk_tokens + ahead
    seen = sorted(item for item in items if item.offset_tokens < end)
    # An item's length follows from its content id and needs no place here; the chunks into which it reaches do.
    reach = sorted(
        (item.offset_tokens, item.content_id, i)
        for item in seen
        for i in range(chunk + 1)
        if item.offset_tokens < (i + 1) * layout.chunk_tokens + ahead
        and item.offset_tokens + item.length_tokens > i * layout.chunk_tokens
    )
    return (layout, request, tuple(tokens[:end]), tuple(reach))


@settings(max_examples=amount(133, 400))
@given(prompts, prompts)
def test_chunks_share_a_key_exactly_when_they_mean_the_same(one, two):
    keys = {}
    for prompt in (one, two):
        for i, key in enumerate(chain(prompt)):
            assert keys.setdefault(key, meaning(prompt, i)) == meaning(prompt, i)
    meanings = {}
    for key, what in keys.items():
        assert meanings.setdefault(what, key) == key


@given(prompts, st.data())
def test_each_field_of_the_identity_changes_every_key(prompt, data):
    layout, request, tokens, items = prompt
    assume(len(tokens) >= layout.chunk_tokens + layout.lookahead)
    other_layout, other_request = layout, request
    field = data.draw(
        st.sampled_from([*LayoutIdentity.__struct_fields__, *RequestIdentity.__struct_fields__])
    )
    if field in RequestIdentity.__struct_fields__:
        other_request = RequestIdentity(**{**_fields(request), field: getattr(request, field) + "!"})
    elif field == "lookahead_tokens":
        other_layout = LayoutIdentity(**{**_fields(layout), field: layout.lookahead + 1})
    elif isinstance(getattr(layout, field), int):
        assume(field != "chunk_tokens" or len(tokens) > layout.chunk_tokens)
        other_layout = LayoutIdentity(**{**_fields(layout), field: getattr(layout, field) + 1})
    else:
        other_layout = LayoutIdentity(**{**_fields(layout), field: getattr(layout, field) + "!"})
    assert not set(chain(prompt)) & set(chain((other_layout, other_request, tokens, items)))


@given(prompts, slices, slices)
def test_slices_share_no_storage_key(prompt, one, two):
    layout, request, tokens, items = prompt
    hasher = hasher_of(layout, request, items)
    hasher.feed(tokens)
    first, second = hasher.storage_keys((one.digest(),)), hasher.storage_keys((two.digest(),))
    if one == two:
        assert first == second
    else:
        split = {first[i : i + 32] for i in range(0, len(first), 32)}
        assert not split & {second[i : i + 32] for i in range(0, len(second), 32)}


@given(
    st.lists(TOKENS, max_size=60),
    st.integers(1, 7),
    st.lists(st.integers(0, 60), max_size=5),
    media,
    st.integers(0, 3) | st.just(20),
)
def test_any_way_of_feeding_gives_the_oracle_chain(tokens, size, cuts, items, ahead):
    root = identity_root(LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=size), RequestIdentity())
    hasher = ChunkHasher(root, size, items, lookahead_tokens=ahead)
    whole = ChunkHasher(root, size, items, lookahead_tokens=ahead)
    for cut in [*sorted(cuts), 60]:
        start = hasher.n_chunks * size
        hasher.feed(tokens[start:cut] if cut % 2 else tokens[:cut], start if cut % 2 else 0)
    whole.feed(tokens)
    assert hasher.chain == whole.chain
    if not items:
        n_chunks = max(0, len(tokens) - ahead) // size
        extras = {i: oracle.lookahead(tokens[(i + 1) * size :][:ahead]) for i in range(n_chunks) if ahead}
        assert hasher.chain == oracle.chain_keys(root, tokens[: n_chunks * size], size, extras)


PRINT_KEYS = """
import json, sys
from kvstrata.keys import ChunkHasher, MediaItem
from kvstrata.types import LayoutIdentity, RequestIdentity, Slice, identity_root
values = json.load(sys.stdin)
layout, request, part = LayoutIdentity(**values[0]), RequestIdentity(**values[1]), Slice(**values[2])
hasher = ChunkHasher(identity_root(layout, request), layout.chunk_tokens, [MediaItem(30, 9, "ä cat")])
hasher.feed(list(range(100)))
print(hasher.storage_keys((part.digest(),)).hex())
"""


def test_another_process_derives_the_same_keys():
    what = [
        {"model": "m ü", "kv_dtype": "bf16", "chunk_tokens": 16, "revision": "r"},
        {"adapter": "l", "tenant": "t", "salt": "s"},
        {"layers": [0, 4], "kv_heads": [0, 2], "layout": "f"},
    ]
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            input=json.dumps(what),
            env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, locale in [("0", "C"), ("1", "C.UTF-8"), ("31337", "C.UTF-8")]
    }
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 6 * 64


def test_keys_do_not_change_between_versions():
    layout = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=4)
    hasher = ChunkHasher(identity_root(layout, RequestIdentity(salt="s")), 4, [MediaItem(5, 1, "cat")])
    hasher.feed(list(range(9)))
    part = Slice(layers=(0, 4), kv_heads=(0, 2), layout="f")
    assert hasher.storage_keys((part.digest(),)).hex() == GOLDEN, "derivation changed: bump FORMAT_VERSION"


GOLDEN = (
    "8732a29e681f3bceee40a32be69330b07d756f2140fcc779e69f74a67b2ab9a2"
    "82bfbe8b8e8736fbaef2aaff8882daf5e8cfcd7cd629372985f5891a394da1cc"
)


def _fields(struct) -> dict:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


BLOCK = 4
ROOT = bytes(range(32))


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
