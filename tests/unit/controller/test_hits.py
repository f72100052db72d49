"""Prompts whose slices have spans in a controller: the hits that instances could serve, and what ends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cluster.lookups import Found, Lookups, Place
from kvstrata.controller.operations import _placement
from kvstrata.controller.prompts import Named
from kvstrata.controller.pulls import parts
from kvstrata.keys.batch import count, split
from kvstrata.native.core import Registry
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, tags_of
from kvstrata.types import KEY_BYTES
from tests.harness.amount import amount

Held = set[tuple[int, int]]
"""The (chunk, slice) that an instance has."""


def needs(n: int, spans: list[int]) -> Held:
    """What a hit of n chunks needs, by the definition."""
    return {
        (chunk, number)
        for number, span in enumerate(spans)
        for chunk in (range(n)[-span:] if span else range(n))
    }


def hit(held: Held, n_chunks: int, spans: list[int]) -> int:
    return max(n for n in range(n_chunks + 1) if needs(n, spans) <= held)


def keys_of(rng: random.Random, n_keys: int) -> bytes:
    return rng.randbytes(n_keys * KEY_BYTES)


@pytest.fixture
def registry() -> Registry:
    return Registry(max_bytes=64 << 20)


@pytest.fixture
async def lookups(registry: Registry) -> Iterator[Lookups]:
    made = Lookups(asyncio.get_running_loop(), registry)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(amount(6, 40)))
async def test_each_instance_is_found_with_the_hit_that_it_could_serve(registry, lookups, seed):
    rng = random.Random(seed)
    spans = [rng.choice([0, 1, 2, 5]) for _ in range(rng.randrange(1, 4))]
    n_chunks = rng.randrange(1, 12)
    keys = keys_of(rng, n_chunks * len(spans))
    names = split(keys)
    expected = []
    for group in range(6):
        often = rng.choice([0.6, 0.9, 1.0])
        held = {
            (chunk, number)
            for chunk in range(n_chunks)
            for number in range(len(spans))
            if rng.random() < often
        }
        tier = "l1" if group < 5 else "disk-0"
        slot = registry.open_slot(group)
        assert slot is not None
        registry.publish(slot)
        lookups.name(slot, group, tier)
        lookups.set_readable(group, group != 4)
        registry.admit(slot, tags_of(b"".join(names[c * len(spans) + s] for c, s in sorted(held))))
        if group in (0, 1, 2) and (n := hit(held, n_chunks, spans)):
            expected.append(Found(group, n))
    found = await lookups.hits(keys, spans, except_group=3, best=16)
    assert sorted(found) == expected, (seed, spans)
    assert [one.n_chunks for one in found] == sorted((one.n_chunks for one in found), reverse=True)


async def test_the_instances_with_the_first_of_single_keys_come_first(registry, lookups):
    names = split(keys_of(random.Random(1), 8))
    for group, held in enumerate(([1, 2, 3], [5, 6, 7], [0], [])):
        slot = registry.open_slot(group)
        assert slot is not None
        registry.publish(slot)
        lookups.name(slot, group, "l1")
        lookups.set_readable(group, True)
        registry.admit(slot, tags_of(b"".join(names[number] for number in held)))
    tags = tags_of(b"".join(names))
    assert await lookups.nearest(tags, None, 16) == [Found(2, 8), Found(0, 7), Found(1, 3)]
    assert await lookups.nearest(tags, 2, 1) == [Found(0, 7)]


@given(st.integers(0, 1 << 32))
def test_the_longest_hit_of_all_places_needs_each_part_once(seed: int) -> None:
    rng = random.Random(seed)
    spans = [0, *(rng.choice([0, 1, 2, 5]) for _ in range(rng.randrange(3)))]
    n_chunks = rng.randrange(1, 12)
    held = {
        (chunk, number) for chunk in range(n_chunks) for number in range(len(spans)) if rng.random() < 0.8
    }
    keys = keys_of(rng, n_chunks * len(spans))
    named = Named(keys, len(spans), b"", "", 16, tuple(spans) if any(spans) else ())
    rows = [
        [Place(1, "l1")] if (chunk, number) in held else []
        for chunk in range(n_chunks)
        for number in range(len(spans))
    ]
    found = _placement(named, [], rows)
    assert found.held_chunks == hit(held, n_chunks, spans)


@pytest.mark.parametrize(("n_chunks", "spans"), [(3, (0, 2)), (5_000, (0, 0, 4)), (9_000, (7, 2))])
def test_only_the_last_command_of_a_copy_names_windows(n_chunks: int, spans: tuple[int, ...]) -> None:
    n_slices = len(spans)
    keys = keys_of(random.Random(3), n_chunks * n_slices)
    *before, (last, last_spans) = parts(keys, n_slices, spans)
    whole = spans.count(0)
    assert last_spans == spans
    assert keys.endswith(last)
    assert count(last, n_slices) >= min(n_chunks, max(spans))
    assert all(len(part) <= MAX_PEER_KEYS * KEY_BYTES for part, _ in [*before, (last, spans)])
    assert all(part_spans == (0,) * whole for _, part_spans in before)
    if whole:
        n_before = sum(count(part, whole) for part, _ in before)
        assert n_before + count(last, n_slices) == n_chunks
    plain = parts(keys, n_slices, ())
    assert b"".join(part for part, _ in plain) == keys
