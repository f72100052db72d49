"""Requests that another connector of vLLM's `MultiConnector` loads: what of them is stored, and when."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.metadata import WorkerReport
from tests.harness.scheduler_side import FakeClient, arrive, ask, make_side, scene, step

CHUNKS = 5
TOKENS, LOADED = 40, 16
TABLE = [list(range(1, 20))]


def loaded_by_another(side, *, asynchronous=False):
    """A request that missed here, and of which another connector loads LOADED tokens."""
    request = arrive(side, TOKENS)
    assert ask(side, request) == (0, False)
    side.allocated(request, TABLE, 0)
    if asynchronous:
        step(side)
    return request


def stored_chunks(plan):
    return sum(len(store.chain) // 32 for store in plan.stores)


def test_after_a_load_that_failed_all_is_stored_as_computed_again():
    side = make_side()
    request = loaded_by_another(side)
    plan = step(side, [(request, LOADED, TOKENS - LOADED)])
    side.heard([WorkerReport(plan.step)], [], {1, 2})
    again = step(side, [(request, 0, TOKENS)])
    assert stored_chunks(again) == CHUNKS and not again.others_load


def test_what_finishes_in_the_step_of_a_failed_load_is_not_stored():
    side = make_side()
    request = loaded_by_another(side)
    plan = step(side, [(request, LOADED, TOKENS - LOADED)])
    side.finished(request, TABLE)
    side.heard([WorkerReport(plan.step)], [], {1})
    assert not step(side).stores


def test_a_hit_that_another_connector_serves_is_no_hit_of_ours_and_is_not_stored_again():
    client, side, request = scene(TOKENS, hits=2)
    assert ask(side, request)[0] == LOADED
    side.allocated(request, TABLE, 0)
    assert not client.leases and not client.handed_on
    plan = step(side, [(request, LOADED, TOKENS - LOADED)])
    side.heard([WorkerReport(plan.step)], [], [])
    assert not plan.loads and stored_chunks(step(side, [(request, TOKENS, 1)])) == CHUNKS - 2
    assert side.take_counts() == {"lookups": 1}


@pytest.mark.parametrize("tokens", [6, TOKENS, TOKENS + 6])
def test_abort_while_another_connector_loads_stores_nothing(tokens):
    client = FakeClient()
    client.present = lambda chunks: [False] * len(chunks)
    side = make_side(client, settings={"save_unfull_chunk": True})
    request = arrive(side, tokens)
    ask(side, request)
    side.allocated(request, TABLE, 0)
    step(side)
    # vLLM counts tokens as computed while they are still being loaded.
    assert side.finished(request, TABLE) is False
    assert not step(side).stores


def test_after_a_load_of_another_connector_has_failed_ours_may_serve():
    client = FakeClient()
    side = make_side(client)
    request = loaded_by_another(side, asynchronous=True)
    side.heard([], [request.request_id], [], [request.request_id])
    client.hits = 2
    side._now.now_s += 1
    assert ask(side, request)[0] == LOADED


@pytest.mark.parametrize("engine_empty", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_kv_that_another_connector_may_have_kept_over_a_change_of_weights_is_not_stored(
    engine_empty, asynchronous
):
    side = make_side()
    side.reset(engine_empty=engine_empty)
    request = loaded_by_another(side, asynchronous=asynchronous)
    plan = step(side, [(request, LOADED, TOKENS - LOADED)])
    side.heard([WorkerReport(plan.step)], [], [])
    assert not step(side, [(request, TOKENS, 1)]).stores
    assert side.finished(request, TABLE) is False
    computed = arrive(side, TOKENS)
    ask(side, computed)
    assert stored_chunks(step(side, [(computed, 0, TOKENS)])) == CHUNKS
