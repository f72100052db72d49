"""Computing is measured from lookups to commits, and what hits save follows from it."""

from __future__ import annotations

import pytest

from kvstrata.policy.savings import MAX_COMPUTING, MAX_LAYOUTS, EngineUse, Savings
from kvstrata.types import LayoutIdentity


def layout(model: str = "m") -> LayoutIdentity:
    return LayoutIdentity(model=model, kv_dtype="bfloat16", chunk_tokens=256)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_hit_saves_what_computing_a_chunk_took():
    savings, engine = Savings(), EngineUse()
    savings.looked_up(engine, layout(), 10, 5, key(1), 100.0)
    assert savings.avoided_s == 0, "nothing has been measured yet"
    savings.committed(engine, [key(7), key(1)], 102.0)
    assert (savings.computed.seconds, savings.computed.chunks) == (2.0, 5)
    savings.looked_up(engine, layout(), 10, 10, key(1), 103.0)
    assert savings.avoided_s == engine.avoided_s == pytest.approx(4.0)
    assert (engine.lookups, engine.lookup_chunks, engine.hit_chunks, engine.stored_records) == (2, 20, 15, 2)


def test_prompts_that_one_engine_computes_at_once_count_their_time_once():
    savings, engine = Savings(), EngineUse()
    savings.looked_up(engine, layout(), 4, 0, key(1), 0.0)
    savings.looked_up(engine, layout(), 4, 0, key(2), 1.0)
    savings.committed(engine, [key(1)], 10.0)
    savings.committed(engine, [key(2)], 11.0)
    assert (savings.computed.seconds, savings.computed.chunks) == (11.0, 8)


def test_a_prompt_that_was_given_up_counts_nothing():
    savings, engine = Savings(), EngineUse()
    savings.looked_up(engine, layout(), 4, 0, key(1), 0.0)
    savings.looked_up(engine, layout(), 4, 0, key(2), 1_000.0)
    savings.committed(engine, [key(2), key(2)], 1_001.0)
    assert (savings.computed.seconds, savings.computed.chunks) == (1.0, 4)


def test_models_have_paces_of_their_own():
    savings, small, large = Savings(), EngineUse(), EngineUse()
    savings.looked_up(small, layout("small"), 1, 0, key(1), 0.0)
    savings.committed(small, [key(1)], 1.0)
    savings.looked_up(large, layout("large"), 8, 8, key(2), 5.0)
    assert large.avoided_s == 0
    savings.looked_up(small, layout("small"), 8, 8, key(3), 6.0)
    assert small.avoided_s == savings.avoided_s == 8.0


def test_its_memory_is_bounded():
    savings, engine = Savings(), EngineUse()
    for number in range(2 * MAX_COMPUTING):
        savings.looked_up(engine, layout(str(number % (2 * MAX_LAYOUTS))), 1, 0, key(number), float(number))
    assert len(savings._computing) == MAX_COMPUTING and len(savings._paces) == MAX_LAYOUTS
