"""Requests that the scheduler side leaves to vLLM, and errors of our own: neither loses a lease or a block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.metadata import WorkerReport
from tests.harness.scheduler_side import (
    BLOCK,
    FakeClient,
    GuardedSide,
    arrive,
    ask,
    make_side,
    media,
    scene,
    step,
)


def test_a_broken_worker_turns_the_cache_off(caplog):
    client = FakeClient(hits=5)
    side = make_side(client)
    first = arrive(side, 100)
    assert ask(side, first) == (40, False)
    for _ in range(2):
        side.heard([WorkerReport(1, broken=True)], [], [])
    assert len([line for line in caplog.records if "cache is off" in line.message]) == 1
    again = arrive(side, 100, request_id="again")
    assert ask(side, again) == (0, False)
    assert ask(side, first) == (0, False)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("prompt_embeds", {"prompt_embeds": object()}),
        ("resumable", {"resumable": True}),
        ("unnamed_media", {"mm_features": [media("cat"), media("")]}),
        ("counted_media", {"mm_features": [media("renderer0-mm-1-image-0")]}),
    ],
)
def test_requests_whose_tokens_do_not_decide_their_kv_are_computed_without_the_cache(reason, changes):
    client = FakeClient(hits=5)
    side = make_side(client, media_are_counted=reason == "counted_media")
    request = arrive(side, 40, **changes)
    assert ask(side, request) == (0, False)
    side.allocated(request, [list(range(1, 20))], 0)
    assert step(side, [(request, 0, 40)]).stores == []
    assert side.finished(request, [list(range(1, 11))]) is False
    assert client.calls == [] and side.take_counts()[f"skipped_{reason}"] == 1


@pytest.mark.parametrize("params", ["text", ["list"], 7, {"lmcache.max_offload_tokens": "all"}])
def test_malformed_kv_transfer_params_are_ignored(params):
    side = make_side()
    request = arrive(side, 40, kv_transfer_params=params)
    assert len(step(side, [(request, 0, 40)]).stores) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_promised_load_that_cannot_be_planned_fails_in_the_workers(mode):
    client, side, request = scene(43, hits=3, settings={"load_mode": mode})
    assert ask(side, request, computed=BLOCK) == (20, mode == "async")
    side._load_of = None
    guarded_side = GuardedSide(side)
    guarded_side.allocated(request, [list(range(1, 12))], 20)
    assert guarded_side.take_events() == [] and client.leases == []
    plan = guarded_side.plan_step(
        SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={})
    )  # lacks the rest
    [load] = plan.loads
    assert (load.lease, load.blocks, load.asynchronous) == (None, [2, 3, 4, 5, 6], mode == "async")


def test_after_an_error_nothing_is_loaded_or_stored_and_what_vllm_waits_for_ends():
    client = FakeClient(hits=3)
    side = GuardedSide(make_side(client))
    waiting, storing, bad = arrive(side, 40), arrive(side, 40), arrive(side, 40)
    assert ask(side, waiting) == (24, False)
    [store] = step(side, [(storing, 0, 40)]).stores
    bad.num_prompt_tokens = None
    assert step(side, [(bad, 0, 40)]).stores == [] and side.is_off
    assert side.take_events() == [] and client.leases == []
    for request in (waiting, arrive(side, 40)):
        assert ask(side, request) == (0, False)
        assert step(side, [(request, 0, 40)]).stores == []
        assert side.finished(request, [list(range(1, 11))]) is False, "no store reads its blocks"
    assert side.finished(storing, [list(range(1, 11))]) is True
    assert step(side).awaited == {storing.request_id}
    side.heard([WorkerReport(1, gathered=[store.store_id])], [], [])
    side.close()
    assert client.closed


def test_preempted_requests_and_loads_are_passed_on_even_when_the_plan_fails():
    client = FakeClient()
    side = GuardedSide(make_side(client))
    request, ended = arrive(side, 40), arrive(side, 48)
    assert len(step(side, [(request, 0, 40), (ended, 0, 48)]).stores) == 2
    assert side.finished(ended, [list(range(1, 13))]) is True
    client.hits = 3
    loading = arrive(side, 43)
    side.allocated(loading, [list(range(1, 12))], ask(side, loading)[0])
    side.first.stores.plan = None
    plan = step(side, preempted=[request.request_id])
    assert plan.preempted == {request.request_id}
    assert [load.request_id for load in plan.loads] == [loading.request_id]
    assert plan.awaited == {ended.request_id}, "vLLM keeps its blocks until the workers report it as sent"
