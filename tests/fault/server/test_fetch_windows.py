"""Fetches of slices with spans load what the longest hit needs and nothing else, whatever L1 and the tier have."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.testing.strategies import IDENTITY
from kvstrata.types import MissReason
from tests.fault.server.tier_rig import Rig, Start
from tests.harness.amount import amount
from tests.harness.l1 import CLOCK, L1, LATER_S, RECORD, chain
from tests.harness.shelf import SHELVES
from tests.harness.waiting import until

Places = set[tuple[int, int]]


class Prompt:
    """A prompt of some chunks and slices. `in_l1`, `in_l2`: the (chunk, slice) that are there."""

    def __init__(self, name: str, n_chunks: int, spans: list[int]) -> None:
        self.n_chunks, self.spans = n_chunks, spans
        self.keys = chain(name, n_chunks, len(spans))
        self.places = [(chunk, number) for chunk in range(n_chunks) for number in range(len(spans))]
        self.in_l1: Places = set()
        self.in_l2: Places = set()

    def key(self, place: tuple[int, int]) -> bytes:
        return self.keys[place[0] * len(self.spans) + place[1]]

    async def lay(self, rig: Rig, l1: L1) -> None:
        """Put the records where they are to be."""
        stored = l1.store(self.keys, len(self.spans))
        assert set(stored) == set(self.keys)
        rig.store.committed(stored)
        await rig.store.idle()
        for place in reversed(self.places):
            if place not in self.in_l1:
                assert l1.pool.remove(self.key(place))
            if place not in self.in_l2:
                del SHELVES["a"].records[self.key(place)]

    def needs(self, n: int) -> Places:
        return {
            (chunk, number)
            for number, span in enumerate(self.spans)
            for chunk in (range(n)[-span:] if span else range(n))
        }

    def longest(self, there: Places, max_loads: int | None = None) -> int:
        """The longest hit of what is there; with `max_loads` needing no more loads than these."""
        return max(
            n
            for n in range(self.n_chunks + 1)
            if self.needs(n) <= there and (max_loads is None or len(self.needs(n) - self.in_l1) <= max_loads)
        )

    async def fetch(self, rig: Rig, budget_bytes: int | None = None) -> FetchOutcome:
        return await rig.prefetch.fetch(
            b"".join(self.keys),
            len(self.spans),
            identity=IDENTITY,
            tenant=1,
            deadline_s=CLOCK.monotonic_s() + LATER_S,
            budget_bytes=budget_bytes,
            spans=self.spans,
        )

    def now_in(self, l1: L1) -> Places:
        return {place for place in self.places if l1.pool.peek(self.key(place))}

    def leased(self, l1: L1) -> int:
        """Lease what L1 has, and return the length."""
        ticket, n_chunks, *_ = l1.pool.lease(
            b"".join(self.keys), len(self.spans), [l1.row], IDENTITY, self.spans
        )
        assert not ticket or l1.pool.release(ticket, l1.row)
        return n_chunks


def random_prompt(rng: random.Random, name: str) -> Prompt:
    spans = [rng.choice([0, 0, 1, 2, 3, 12]) for _ in range(rng.randrange(1, 4))]
    prompt = Prompt(name, rng.randrange(1, 9), [*spans, rng.randrange(1, 4)][-3:])
    often = rng.choice([0.2, 0.5, 0.8])
    prompt.in_l1 = {place for place in prompt.places if rng.random() < often}
    prompt.in_l2 = {place for place in prompt.places if rng.random() < 0.8}
    return prompt


@pytest.mark.parametrize("seed", range(amount(10, 40)))
async def test_a_fetch_loads_what_the_longest_hit_needs_and_nothing_else(start, l1, seed):
    rig = start()
    await rig.open("a")
    rng = random.Random(seed)
    prompt = random_prompt(rng, f"prompt {seed}")
    await prompt.lay(rig, l1)
    budget = rng.choice([None, None, rng.randrange(8)])
    n = prompt.longest(prompt.in_l1 | prompt.in_l2, budget)
    outcome = await prompt.fetch(rig, None if budget is None else budget * RECORD)
    assert outcome.n_chunks == n
    assert bool(outcome.reason) is (n < prompt.n_chunks)
    assert prompt.now_in(l1) == prompt.in_l1 | prompt.needs(n)
    assert prompt.leased(l1) == n


@pytest.mark.parametrize("seed", range(amount(5, 20)))
async def test_a_fetch_whose_loads_fail_tells_the_hit_that_l1_then_leases(start, l1, seed):
    rig = start()
    await rig.open("a")
    rng = random.Random(seed)
    prompt = random_prompt(rng, f"prompt {seed}")
    prompt.in_l2 = set(prompt.places)
    await prompt.lay(rig, l1)
    shelf = SHELVES["a"]
    shelf.shut("load")
    fetch = asyncio.create_task(prompt.fetch(rig))
    await until(lambda: fetch.done() or shelf.waiting["load"] > 0)
    lost = rng.sample(sorted(prompt.needs(prompt.n_chunks)), 1)
    for place in lost:
        del shelf.records[prompt.key(place)]
    shelf.let_go()
    outcome = await fetch
    assert outcome.n_chunks == prompt.longest(prompt.now_in(l1)) == prompt.leased(l1)
    assert (outcome.n_chunks < prompt.n_chunks) is bool(set(lost) - prompt.in_l1)


async def test_windows_that_no_hit_needs_are_neither_loaded_nor_missed(start: Start, l1: L1) -> None:
    rig = start()
    await rig.open("a")
    prompt = Prompt("long", 12, [0, 2])
    prompt.in_l2 = {(chunk, 0) for chunk in range(12)} | {(10, 1), (11, 1)}
    await prompt.lay(rig, l1)
    outcome = await prompt.fetch(rig)
    assert (outcome.n_chunks, outcome.reason) == (12, "")
    assert prompt.now_in(l1) == prompt.in_l2


async def test_a_window_with_a_gap_is_not_loaded(start: Start, l1: L1) -> None:
    rig = start()
    await rig.open("a")
    prompt = Prompt("gap", 6, [0, 3])
    prompt.in_l2 = set(prompt.places) - {(3, 1), (1, 1)}
    await prompt.lay(rig, l1)
    outcome = await prompt.fetch(rig)
    assert (outcome.n_chunks, outcome.reason) == (1, MissReason.NEVER_STORED)
    assert prompt.now_in(l1) == {(0, 0), (0, 1)}
