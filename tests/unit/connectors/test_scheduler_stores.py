"""What the scheduler side stores, how long blocks stay allocated for it, and the events of stored chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.connectors.vllm.store_table import AWAITED_S, UNCONFIRMED_STEPS
from tests.harness.scheduler_side import (
    CHUNK,
    Clock,
    FakeClient,
    arrive,
    ask,
    hit_of,
    make_request,
    make_side,
    scene,
    step,
)

pytestmark = pytest.mark.usefixtures("patience_of_production")


def test_a_request_may_limit_how_many_of_its_tokens_are_stored():
    for limit, chunks in ((0, 0), (7, 0), (17, 2), (1000, 5), (-4, 0)):
        side = make_side()
        request = arrive(side, 40, kv_transfer_params={"lmcache.max_offload_tokens": limit})
        stores = step(side, [(request, 0, 40)]).stores
        assert sum(len(store.chain) // 32 for store in stores) == chunks


def test_blocks_that_the_engine_dropped_are_not_stored():
    _, side, request = scene(16)
    assert step(side, [(request, 0, 16)], tables={request.request_id: [0, 5, 6, 7]}).stores == []


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing():
    client = FakeClient(hits=3)
    producer = make_side(client, may_load=False)
    request = arrive(producer, 40)
    assert ask(producer, request) == (0, False) and client.calls == []
    assert len(step(producer, [(request, 0, 40)]).stores) == 1
    consumer = make_side(FakeClient(), may_store=False)
    consumer.on_new_request(request)
    assert step(consumer, [(request, 0, 40)]).stores == []


def test_blocks_are_kept_until_every_worker_has_gathered_them():
    _, side, request = scene(40, world_size=2)
    (store,) = step(side, [(request, 0, 40)]).stores
    side.heard([WorkerReport(1, gathered=[store.store_id])], [], [])
    assert side.finished(request, [list(range(1, 11))]) is True


@pytest.mark.parametrize("read", [True, False])
def test_an_engine_in_process_keeps_no_blocks_that_its_worker_has_read(read):
    asked = []
    side = make_side(read_here=lambda request_id: asked.append(request_id) or read)
    request = arrive(side, 40)
    assert step(side, [(request, 0, 40)]).stores
    assert side.finished(request, [list(range(1, 11))]) is not read
    assert asked == [request.request_id]
    assert step(side).awaited == (set() if read else {request.request_id})


def test_with_several_workers_chunks_computed_on_a_failed_load_are_not_stored():
    _, side, request = scene(43, hits=3, world_size=2)
    tokens, _ = ask(side, request)
    side.allocated(request, [list(range(1, 20))], tokens)
    plan = step(side, [(request, 24, 19)])
    side.finished(request, [list(range(1, 12))])
    side.heard([WorkerReport(plan.step), WorkerReport(plan.step, failures=1)], [], [3])
    last = step(side)
    assert last.stores == [] and last.awaited == {request.request_id}


def step_with_a_synchronous_load(side):
    """(A request with a synchronous load of 24 tokens, the number of the step that plans the load)."""
    request, tokens = hit_of(side, 43)
    side.allocated(request, [list(range(1, 20))], tokens)
    return request, step(side, [(request, 24, 8)]).step


def test_one_worker_of_several_does_not_confirm_a_load_for_the_others():
    side = make_side(FakeClient(hits=3), world_size=2)
    request, loaded = step_with_a_synchronous_load(side)
    side.heard([WorkerReport(loaded)], [], [])
    assert step(side, [(request, 32, 8)]).stores == []
    side.heard([WorkerReport(loaded)], [], [])
    (store,) = step(side, [(request, 40, 3)]).stores
    assert store.blocks == [7, 8, 9, 10]


def test_a_load_that_no_worker_reports_counts_as_failed_and_delays_no_other_store(caplog):
    side = make_side(FakeClient(hits=3), world_size=2)
    request, loaded = step_with_a_synchronous_load(side)
    for _ in range(UNCONFIRMED_STEPS):
        assert step(side, [(request, 32, 8)]).stores == [] and not caplog.messages
    assert step(side, [(request, 32, 8)]).stores == [], "the loaded blocks may be bad"
    assert len(caplog.messages) == 1 and "did not report" in caplog.messages[0]
    side.heard([WorkerReport(loaded)], [], [])
    # Blocks from vLLM's own cache may rest on the bad ones; a request computed from the start does not.
    other, fresh = make_request(40), make_request(40)
    side._client.hits = 0
    for each, computed in ((other, 8), (fresh, 0)):
        side.matched_tokens(each, computed)
    stores = step(side, [(other, 8, 32), (fresh, 0, 40)]).stores
    assert [store.request_id for store in stores] == [fresh.request_id]


@pytest.mark.parametrize("how", ["preempted", "reset"])
def test_chunks_that_wait_for_a_load_are_dropped_when_their_blocks_are_freed(how):
    side = make_side(FakeClient(hits=3), world_size=2)
    request, loaded = step_with_a_synchronous_load(side)
    if how == "reset":
        side.reset(engine_empty=True)
    else:
        step(side, preempted=[request.request_id])
    side.heard([WorkerReport(loaded)] * 2, [], [])
    side.finished(request, [list(range(1, 12))])
    assert step(side).stores == []


def test_events_tell_the_tokens_of_chunks_that_every_worker_stored():
    made = []
    side = make_side(world_size=2, events=lambda *event: made.append(event) or event)
    request = arrive(side, 40)
    (store,) = step(side, [(request, 0, 40)]).stores
    side.heard([WorkerReport(1, stored=[(store.store_id, 0b11011)])], [], [])
    assert side.stores.take_events() == []
    side.heard([WorkerReport(1, stored=[(store.store_id, 0b01111)])], [], [])
    keys = [store.chain[i : i + 32] for i in range(0, 160, 32)]
    assert side.stores.take_events() == [
        (list(range(16)), b"", keys[:2], request, 0),
        (list(range(24, 32)), keys[2], keys[3:4], request, 24),
    ]
    assert side.stores.take_events() == []


def test_chunks_that_left_l1_are_announced_as_removed_once():
    client, clock = FakeClient(), Clock()
    side = make_side(
        client, clock, events=lambda *event: ("stored", event[2]), removal=lambda keys: ("removed", keys)
    )
    request = arrive(side, 40)
    (store,) = step(side, [(request, 0, 40)]).stores
    keys = [store.chain[i : i + 32] for i in range(0, 160, 32)]
    side.heard([WorkerReport(1, gathered=[store.store_id], stored=[(store.store_id, 0b01111)])], [], [])
    assert side.stores.take_events() == [("stored", keys[:4])]
    client.evicted = {keys[1], keys[3], keys[4]}
    clock.now_s += 20
    assert side.stores.take_events() == [("removed", [keys[1], keys[3]])], (
        "the last chunk was never announced as stored"
    )
    clock.now_s += 20
    assert side.stores.take_events() == []


def test_an_engine_without_requests_steps_until_it_has_heard_of_its_stores_or_the_report_is_lost():
    clock = Clock()
    side = make_side(clock=clock)
    assert not side.stores.awaits_news
    for lost in (False, True):
        request = arrive(side, 40, request_id=f"lost {lost}")
        (store,) = step(side, [(request, 0, 40)]).stores
        side.heard([WorkerReport(1, gathered=[store.store_id])], [], [])
        assert side.stores.awaits_news
        if not lost:
            side.heard([WorkerReport(2, stored=[(store.store_id, 0b11111)])], [], [])
        clock.now_s += AWAITED_S if lost else 0.0
        assert not side.stores.awaits_news


@pytest.mark.parametrize(
    ("said", "next_"),
    [("end", 1), ("tool_calls", 2), ("stop", 3), (0, 4), (4.1, 5), (1e9, 9), ("length", 0), ("17", 6), ("soon", 0),
     (-1, 0), (True, 0), (float("nan"), 0), (["end"], 0), (10**400, 0), ({}, 0)],
)  # fmt: skip
def test_what_a_request_says_of_the_next_one_is_told_with_its_last_chunk_when_it_ends(said, next_, caplog):
    for changes in (
        {"kv_transfer_params": {"kvstrata.next": said}},
        {"kv_hints": SimpleNamespace(actions=[SimpleNamespace(action_type="other", payload={}),
                                              SimpleNamespace(action_type="kvstrata.next", payload={"next": said})])},
    ):  # fmt: skip
        caplog.clear()
        client = FakeClient()
        side = make_side(client)
        request = arrive(side, 5 * CHUNK, **changes)
        (store,) = step(side, [(request, 0, 5 * CHUNK)]).stores
        assert client.hints == []
        side.finished(request, [list(range(1, 11))])
        assert client.hints == ([(store.chain[-32:], next_)] if next_ else [])
        assert ("'kvstrata.next' is ignored: it must be" in caplog.text) == (not next_ and said != "length")


def test_requests_that_say_nothing_or_stored_nothing_tell_nothing():
    client = FakeClient()
    side = make_side(client)
    for tokens, params in ((5 * CHUNK, None), (5 * CHUNK, {}), (CHUNK - 1, {"kvstrata.next": "end"})):
        request = arrive(side, tokens, kv_transfer_params=params)
        step(side, [(request, 0, tokens)])
        side.finished(request, [list(range(1, 11))])
    assert client.hints == []
