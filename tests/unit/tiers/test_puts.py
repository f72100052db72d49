"""Decisions of the store controller: which chunks an adapter gets, and how many chunks may wait for it."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import Hold
from kvstrata.testing.strategies import key_of
from kvstrata.tiers.puts import StoreController
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tails import KEYS_PER_ROUND, TailPuts
from tests.harness.l1 import CLOCK, L1, chain
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
