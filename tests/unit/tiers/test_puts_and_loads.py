"""Decisions of tiers: which chunks are put, how many wait, who waits for room, and a reason for each that is not."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import Hold, LoadRequest
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.testing.strategies import IDENTITY, key_of
from kvstrata.tiers.puts import StoreController
from kvstrata.tiers.reasons import MEANINGS, OTHER
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.staging import Block, Staging
from kvstrata.tiers.tails import KEYS_PER_ROUND, TailPuts
from tests.harness.l1 import CLOCK, L1, RECORD, chain
from tests.harness.validation import validate

A, B = (key_of(n) for n in range(2))
EXTENT = 57_344


@given(st.lists(st.tuples(st.sampled_from("hud"), st.integers(0, 7)), max_size=100))
def test_the_backlog_counts_each_chunk_once_and_stays_within_its_limit(steps: list[tuple[str, int]]) -> None:
    """`h`old a chunk, un`u`count or `d`rop one of the holds."""
    l1 = L1(16 * EXTENT)
    keys = l1.store(chain("a", 6))
    keys += chain("absent", 2)
    counted: list[tuple[bytes, Hold]] = []
    uncounted: list[Hold] = []
    for step, number in steps:
        key = keys[number]
        now = {key for key, _ in counted}
        if step == "h":
            holds, left_out = l1.pool.hold_batch(key, 3 * EXTENT)
            expected = 1 if number >= 6 else 0 if key in now or len(now) < 3 else 2
            assert left_out == bytes([expected]) and len(holds) == (not expected)
            counted += [(key, hold) for hold in holds]
        elif step == "u" and counted:
            _, hold = counted.pop(number % len(counted))
            hold.uncount()
            hold.uncount()
            uncounted.append(hold)
        elif counted or uncounted:
            hold = uncounted.pop() if uncounted else counted.pop(0)[1]
            hold.drop()
            hold.uncount()
        assert l1.pool.counted_bytes == EXTENT * len({key for key, _ in counted})
        assert l1.pool.stats()["holds"] == len(counted) + len(uncounted)
        validate(l1.pool)


async def test_replaced_tails_in_use_do_not_keep_others_behind_them_from_being_dropped() -> None:
    l1 = L1(128 * EXTENT)
    used = [key for n in range(KEYS_PER_ROUND) for key in l1.store(chain(f"used {n}", 1))]
    [free] = l1.store(chain("free", 1))
    holds = l1.pool.hold_batch(b"".join([*used, free]), 128 * EXTENT)[0]
    tails = TailPuts(l1.pool, cast("StoreController", None), TierSet(), CLOCK, after_s=-1)
    tails.replaced(b"".join([*used, free]))
    holds[-1].drop()
    for _ in range(2):
        tails.tick()
    assert tails.lingering == len(used) and not l1.pool.peek(free) and l1.pool.peek(used[0])


def request(keys: list[bytes], n_slices: int = 1) -> LoadRequest:
    return LoadRequest(b"".join(keys), b"", [RECORD] * n_slices, IDENTITY, 1)


def test_from_the_first_refused_chunk_on_nothing_is_reserved_in_any_slice() -> None:
    l1 = L1()
    keys = chain("a", 6, 2)
    l1.store(keys[:2], 2)
    ticket, _, _ = l1.pool.reserve(keys[7], keys[5], RECORD, l1.row, IDENTITY, 1)  # chunk 3 of slice 1
    batch = l1.pool.reserve_batch(request(keys, 2), range(12))
    assert (batch.present, sorted(batch.numbers)) == ([0, 1], [2, 3, 4, 5])
    assert batch.refusal == (3, ReserveOutcome.IN_FLIGHT)
    assert l1.pool.abort(ticket) == 1
    for number, hold in zip(batch.numbers, batch.holds, strict=True):
        l1.write(keys[number], hold.offset, IDENTITY)
        hold.drop()
    loaded = bytes(number != 4 for number in batch.numbers)
    ended = dict(zip(batch.numbers, batch.finish(loaded), strict=True))
    assert ended == {**dict.fromkeys((2, 3, 5), CommitOutcome.COMMITTED), 4: 255}
    assert l1.pool.has(b"".join(keys[:8])) == bytes([1, 1, 1, 1, 0, 1, 0, 0])
    l1.nothing_in_use()


def test_a_batch_that_is_not_finished_gives_its_extents_back_and_another_record_is_not_committed() -> None:
    l1 = L1()
    keys = chain("a", 3)
    batch = l1.pool.reserve_batch(request(keys), [0, 2])
    l1.write(keys[1], batch.holds[0].offset, IDENTITY)  # of another key
    for hold in batch.holds:
        hold.drop()
    assert batch.finish(b"\1\0") == bytes([CommitOutcome.BAD_RECORD, 255])
    given_up = l1.pool.reserve_batch(request(keys), range(3))
    assert given_up.numbers == [0, 1, 2] and given_up.refusal is None
    del given_up
    l1.nothing_in_use()
    assert not any(l1.pool.has(b"".join(keys)))


SIZE = 1 << 20


async def full() -> tuple[Staging, Block]:
    staging = Staging(SIZE)
    whole = await staging.take(SIZE, for_put=False)
    assert whole is not None
    return staging, whole


async def test_a_wait_that_is_cancelled_while_room_becomes_free_takes_nothing_and_stops_nobody() -> None:
    staging, whole = await full()
    waits = [asyncio.create_task(staging.take(SIZE, for_put=False)) for _ in range(2)]
    await asyncio.sleep(0)
    del whole  # those who wait are served in a later turn of the loop
    waits[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    block = await waits.pop()
    assert block is not None
    del block
    assert staging.used_bytes == 0


async def test_loads_that_wait_are_served_before_puts() -> None:
    staging, whole = await full()
    put = asyncio.create_task(staging.take(SIZE // 2, for_put=True))
    await asyncio.sleep(0)
    load = asyncio.create_task(staging.take(SIZE, for_put=False))
    await asyncio.sleep(0)
    del whole
    block = await load
    assert block is not None
    assert not put.done()
    del block, load
    block = await put
    assert block is not None


SRC = Path(__file__).resolve().parents[3] / "src" / "kvstrata"
GIVEN_UP = "FAILED", "THROTTLED"


def places() -> Iterator[tuple[str, ast.expr | None]]:
    """(Where, the reason) of each outcome that gives a chunk up and stands in a call, or in a tuple with its reason."""
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        if "Outcome.FAILED" not in text:
            continue
        tree = ast.parse(text)
        compared = {
            id(one) for node in ast.walk(tree) if isinstance(node, ast.Compare) for one in node.comparators
        }
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call)
            parts = node.args if is_call else getattr(node, "elts", [])
            if isinstance(node, ast.Set) or id(node) in compared or not (is_call or len(parts) == 2):
                continue
            for part, reason in zip(parts, [*parts[1:], None], strict=False):
                ways = [part.body, part.orelse] if isinstance(part, ast.IfExp) else [part]
                if any(ast.unparse(way) in [f"Outcome.{word}" for word in GIVEN_UP] for way in ways):
                    yield f"{path.relative_to(SRC)}:{node.lineno}", reason


def test_no_outcome_gives_a_chunk_up_without_a_reason() -> None:
    found = list(places())
    assert len(found) > 30, "the walk finds the places"
    assert [where for where, reason in found if reason is None or ast.unparse(reason) in ("''", "None")] == []


def test_each_refusal_of_the_pool_has_a_meaning() -> None:
    given_up = set(ReserveOutcome) - {ReserveOutcome.RESERVED, ReserveOutcome.PRESENT}
    assert [one for one in given_up if MEANINGS.get(one.name.lower(), OTHER) is OTHER] == []
