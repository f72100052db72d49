"""What followers are told of an instance's chunks and tiers: in time, once, and within bounds."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.errors import BadRequest, TooOld
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import MAX_CHANGES, TAG_BYTES, Change, Run, tags_of
from kvstrata.server.cluster.held import (
    MAX_L2_TAGS,
    MAX_NAME_CHARS,
    MAX_PROMISED,
    PROMISES_S,
    HeldChunks,
    tier_name,
)
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import TierState
from tests.harness.l1 import L1, chain

LONG = "a_plugin_with_a_really_long_name_for_its_type"


def shared(name: str) -> Any:
    return SimpleNamespace(
        name=name, state=TierState.ACTIVE, shown_state=TierState.ACTIVE,
        capabilities=SimpleNamespace(takes_puts=True, shared=True, lists=True, medium="w"),
    )  # fmt: skip


@pytest.fixture
def l1() -> L1:
    return L1()


@pytest.fixture
async def held(l1: L1) -> AsyncIterator[HeldChunks]:
    tiers = cast(TierSet, [shared("resp-0"), shared(f"{LONG}-1")])
    made = HeldChunks(l1.pool, tiers, Supervisor(asyncio.get_running_loop()))
    yield made
    await made.stop()


def found(following: int, runs: list[Run]) -> tuple[int, list[Run]]:
    return following, runs


def test_long_names_are_cut_and_stay_apart() -> None:
    assert tier_name("disk-0") == "disk-0"
    cut = {tier_name(f"{LONG}-{number}") for number in range(20)}
    assert len(cut) == 20
    assert {len(name) for name in cut} == {MAX_NAME_CHARS}


async def test_a_poll_that_waits_is_answered_with_the_changes_of_every_tier(held: HeldChunks, l1: L1) -> None:
    cursor, none = await held.changes(-1, 60.0, found)
    assert none == []
    waiting = held.changes(cursor, 60.0, found)
    await asyncio.sleep(0)
    assert not waiting.done()
    a, b = chain("a", 2)
    l1.store([a])
    held.tier_got(f"{LONG}-1", [a, b])
    held.tier_lost(f"{LONG}-1", [a])
    held.tier_emptied("resp-0")
    following, runs = await waiting
    long = tier_name(f"{LONG}-1")
    by_tier = {tier: [run for run in runs if run.tier == tier] for tier in ("l1", long, "resp-0")}
    assert [*by_tier["l1"], *by_tier[long], *by_tier["resp-0"]] == [
        Run(Change.ADMIT, "l1", tags_of(a)),
        Run(Change.EVICT, long, tags_of(a)),
        Run(Change.ADMIT, long, tags_of(b)),
        Run(Change.CLEAR, "resp-0", b""),
    ]
    assert await held.changes(following, 0.0, found) == (following, [])
    assert await held.page(long, 0) == (0, tags_of(b), True)


async def test_a_poll_without_changes_is_answered_in_the_end(held: HeldChunks) -> None:
    cursor, _ = await held.changes(-1, 0.0, found)
    assert await held.changes(cursor, 0.001, found) == (cursor, [])


async def test_an_answer_sums_up_a_bounded_number_of_changes(held: HeldChunks) -> None:
    cursor, _ = await held.changes(-1, 0.0, found)
    keys = chain("many", 100) * (2 * MAX_CHANGES // 100)
    held.tier_got("resp-0", keys)
    following, [run] = await held.changes(cursor, 0.0, found)
    assert following == cursor + MAX_CHANGES and len(run.tags) == 100 * TAG_BYTES


async def test_polls_that_wait_at_one_cursor_are_answered_together(held: HeldChunks) -> None:
    cursor, _ = await held.changes(-1, 0.0, found)
    polls = [held.changes(cursor, 60.0, found) for _ in range(3)]
    held.tier_got("resp-0", chain("shared", 2))
    other = held.changes(cursor, 60.0, found)
    answers = await asyncio.gather(*polls, other)
    assert all(answer == answers[0] for answer in answers) and len(answers[0][1][0].tags) == 2 * TAG_BYTES
    assert all(answer[1] is answers[0][1] for answer in answers), "the changes are read once"
    assert held.polls == 4 and not held._waiting


async def test_a_cursor_that_is_not_known_is_too_old(held: HeldChunks) -> None:
    with pytest.raises(TooOld):
        await held.changes(1_000, 60.0, found)
    assert held.too_old == 1


async def test_tags_of_a_tier_whose_keys_are_not_listed_are_kept_up_to_a_bound(held: HeldChunks) -> None:
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(3)]
    held.tier_got("resp-0", keys)
    held.tier_lost("resp-0", keys[1:2])
    assert (await held.page("resp-0", 0))[1] == tags_of(keys[0] + keys[2])
    held.tier_emptied("resp-0")
    assert (await held.page("resp-0", 0))[1] == b""
    held.tier_got("resp-0", [number.to_bytes(8, "little") * 4 for number in range(MAX_L2_TAGS + 5)])
    _, tags, _ = await held.page("resp-0", 0)
    assert len(tags) == MAX_L2_TAGS * TAG_BYTES and tags[:TAG_BYTES] == (5).to_bytes(8, "little")


async def test_a_tier_that_is_not_there_is_refused_by_name(held: HeldChunks) -> None:
    with pytest.raises(BadRequest, match="'gone' is not one of l1, resp-0"):
        await held.page("gone", 0)


async def test_followers_are_told_of_the_first_chunk_of_promises_until_the_last_of_them_ends(
    held: HeldChunks,
) -> None:
    cursor, _ = await held.changes(-1, 60.0, found)
    waiting = held.changes(cursor, 60.0, found)
    first, other = chain("promised", 2)
    assert held.promised(first) and held.promised(first) and held.promised(other)
    assert held._gathering is not None and held._gathering.when() <= asyncio.get_running_loop().time()
    following, runs = await waiting
    assert runs == [Run(Change.ADMIT, "promised", tags_of(other + first))]
    held.promise_ended(first)
    assert (await held.page("promised", 0))[1] == tags_of(first + other)
    held.promise_ended(first)
    assert (await held.changes(following, 0.0, found))[1] == [Run(Change.EVICT, "promised", tags_of(first))]
    assert (await held.page("promised", 0))[1] == tags_of(other)
    assert "promised" not in held.tiers()


async def test_no_more_promises_are_told_than_at_a_time_and_in_a_second(
    held: HeldChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(MAX_PROMISED + 1)]
    now_s = [100.0]
    monkeypatch.setattr(held, "_loop", SimpleNamespace(time=lambda: now_s[0]))
    told = 0
    while told < MAX_PROMISED:
        fits = sum(held.promised(key) for key in keys[told : told + 2 * PROMISES_S])
        assert 0 < fits <= PROMISES_S
        told, now_s[0] = told + fits, now_s[0] + 1.0
    assert not held.promised(keys[told]) and held.promised(keys[0])
    held.promise_ended(keys[1])
    assert held.promised(keys[told]), "its place is not given to another one"
    held._loop = asyncio.get_running_loop()
