"""Loads in parts: all blocks are filled or fail, the last part is marked, and no lease is left."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connectors.vllm.metadata import StepPlan
from kvstrata.connectors.vllm.parts import MAX_PARKED
from tests.harness.scheduler_side import BLOCK, CHUNK, FakeClient, arrive, ask, make_request, make_side, step
from tests.unit.connectors.test_worker_errors import Guarded, planted
from tests.unit.connectors.worker_double import load_of
from tests.unit.connectors.worker_double import step as worker_step

CHUNKS = 6
TOKENS = CHUNKS * CHUNK + 3
TABLE = list(range(1, TOKENS // BLOCK + 2))
WAITS = {"kv_transfer_params": {"kvstrata.wait_ms": 1_000}}


def made(**changes):
    client = FakeClient(answers=False)
    return client, make_side(client, **({"recomputes": True} | changes))


def parked(client, side, n, promised, number=0):
    """A request that holds blocks for more chunks than L1 has, and the loads of its first part."""
    request = arrive(side, TOKENS, all_token_ids=[number, *range(1, TOKENS)], **WAITS)
    client.calls[-1].answer(n, promised)
    assert ask(side, request) == (promised * CHUNK, True)
    side.allocated(request, [TABLE], promised * CHUNK)
    return request, step(side).loads


ENDS = ("whole", "broken", "nothing", "revoked", "aborted", "off", "reset", "reset and off", "server gone")


@st.composite
def courses(draw):
    """How many chunks are promised; what each part after the first is answered; how it ends."""
    promised = draw(st.integers(2, CHUNKS))
    there = sorted(draw(st.sets(st.integers(1, promised - 1), min_size=1)))
    end = draw(
        st.sampled_from(
            [
                "whole",
                "broken",
                "nothing",
                "revoked",
                "aborted",
                "off",
                "reset",
                "reset and off",
                "server gone",
            ]
        )
    )
    return promised, there, end


@given(courses())
def test_a_load_in_parts_brings_each_block_once_and_ends_with_its_last_part(course):
    promised, there, end = course
    client, side = made()
    assert not client.calls
    request, loads = parked(client, side, there[0], promised)
    assert client.calls[0].in_parts and client.calls[0].wait_ms == 1_000
    for before, n in itertools.pairwise(there):
        assert client.calls[-1].follows == before and step(side).loads == []
        client.calls[-1].answer(n, promised)
        loads += step(side).loads
    assert all(load.more and load.lease for load in loads)
    call, came = client.calls[-1], there[-1]
    if end == "whole":
        call.answer(promised)
        came = promised
    elif end == "broken":
        call.answer(came)
    elif end == "revoked":
        call.answer(promised)
        client.revoke(call)
    elif end == "aborted":
        assert side.finished(request, [TABLE]) is False, "vLLM keeps the blocks of a load by itself"
        assert call.cancelled
    elif end in ("off", "reset", "reset and off"):
        if end != "off":
            side.reset(engine_empty=False)
        if end != "reset":
            side = side.turn_off()
    else:
        call.answer(0)
    loads += step(side).loads
    assert [load.more for load in loads] == [True] * (len(loads) - 1) + [False]
    assert {load.request_id for load in loads} == {request.request_id} and all(
        one.asynchronous for one in loads
    )
    assert [block for load in loads for block in load.blocks] == TABLE[: promised * CHUNK // BLOCK]
    filled = [block for load in loads if load.lease for block in load.blocks]
    assert filled == TABLE[: came * CHUNK // BLOCK]
    assert not client.leases, "a lease is left"
    assert step(side).loads == []


@pytest.mark.parametrize(
    "changes", [{"recomputes": False}, {"settings": {"load_mode": "sync"}}, {"full": True}, {"waits": False}]
)
def test_no_request_holds_blocks_where_vllm_would_fail_it_or_for_too_many(changes):
    full, waits = changes.pop("full", False), changes.pop("waits", True)
    client, side = made(**changes)
    for number in range(MAX_PARKED if full else 0):
        parked(client, side, 1, CHUNKS, number)
    side.on_new_request(make_request(TOKENS, **(WAITS if waits else {})))
    assert not any(call.in_parts for call in client.calls if not call.follows and not call.done)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("error", [False, True])
def test_workers_report_a_load_in_parts_once_after_its_last_part(fake, side, order, error):
    fake.next_takes_s = 5.0
    side = Guarded(side)
    first = load_of(asynchronous=True, blocks=(1, 2), seq=1)
    first.more = True
    assert worker_step(side, StepPlan(1, loads=[first]))[2] == set()
    if error:
        side.side._take_up = planted
        assert worker_step(side, StepPlan(2))[2] == set()
    if order == (0, 1):
        fake.loads[0][2].done.set()
        assert worker_step(side, StepPlan(2))[2] == set(), "a part follows"
    plan = StepPlan(3, loads=[load_of(asynchronous=True, blocks=(3, 4), seq=2)])
    received, bad = worker_step(side, plan)[2:]
    for job in fake.loads:
        assert error or not received
        job[2].done.set()
    later = [worker_step(side, StepPlan(number)) for number in (4, 5)]
    assert [*received, *(name for one in later for name in one[2])] == ["r"]
    assert bad | later[0][3] >= ({3, 4} if error else set())
    assert error or not (bad | later[0][3])
