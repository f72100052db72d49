"""What the scheduler side tells of the chunks that it computes, until when, and how long its own requests wait."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.lookup_table import WAIT_SHARE
from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.connectors.vllm.store_table import UNCONFIRMED_STEPS
from kvstrata.observability.load_line import prompt_work
from tests.harness.scheduler_side import BLOCK, CHUNK, Clock, FakeClient, arrive, ask, make_side, scene, step

pytestmark = pytest.mark.usefixtures("patience_of_production")

CHUNKS = 6
TOKENS = CHUNKS * CHUNK + 3
HALF = TOKENS // 2
STORED, REFUSED = -1, 0b10
TABLE = [list(range(1, TOKENS // BLOCK + 2))]


def sharing(**more):
    return scene(TOKENS, shares_l1=lambda: True, **more)


def report(stores, mask=STORED, **more):
    names = [store.store_id for store in stores]
    return WorkerReport(1, gathered=names, stored=[(name, mask) for name in names], **more)


@pytest.mark.parametrize("may_load", [True, False])
def test_a_prompt_is_promised_when_it_arrives_alone(may_load):
    client, side, _ = sharing(may_load=may_load)
    assert list(client.promised.values()) == [CHUNKS]
    late = arrive(side, TOKENS)
    assert len(client.promised) == 1, "it may have to wait in vLLM's queue"
    side.finished(late, TABLE)
    assert len(client.promised) == 1


def test_what_a_prompt_lacks_in_l1_is_promised_with_its_first_step_and_withdrawn_with_its_last_store():
    client, side, first = sharing(hits=2)
    request = arrive(side, TOKENS)
    side.finished(first, TABLE)
    side.matched_tokens(request, 0)
    side.allocated(request, TABLE, 2 * CHUNK)
    assert not client.promised
    plan = step(side, [(request, 2 * CHUNK, CHUNK)])
    assert list(client.promised.values()) == [CHUNKS - 2]
    side.heard([report(plan.stores)], [], [])
    assert client.promised, "more chunks follow"
    last = step(side, [(request, 3 * CHUNK, TOKENS - 3 * CHUNK)])
    step(side, [(request, TOKENS, 1)])
    side.heard([WorkerReport(2)], [], [])
    assert client.promised, "the last store is not in L1 yet"
    side.heard([report(last.stores)], [], [])
    assert not client.promised


def lost(side):
    """A report with the outcome of a synchronous load never comes."""
    other = arrive(side, CHUNK + 1)
    side.matched_tokens(other, 0)
    side.allocated(other, TABLE, CHUNK)
    for _ in range(UNCONFIRMED_STEPS + 2):
        step(side)


def failed(side, request, plan):
    """The request ends while its last chunks wait for a load of two workers, which fails."""
    other = arrive(side, CHUNK + 1)
    side.matched_tokens(other, 0)
    side.allocated(other, TABLE, CHUNK)
    loading = step(side, [(request, HALF, TOKENS - HALF), (other, CHUNK, 1)])
    for ended in (request, other):
        side.finished(ended, TABLE)
    side.heard(2 * [report(plan.stores)], [], [])
    assert side.stores.promised
    side.heard(2 * [WorkerReport(loading.step)], [], {1})


ENDS = {
    "preempted": lambda side, request, plan: step(side, preempted=[request.request_id]),
    "aborted": lambda side, request, plan: (side.finished(request, TABLE), side.heard([report(plan.stores)], [], [])),
    "ended before it stored": lambda side, request, plan: (
        side.heard([report(plan.stores)], [], []),
        side.finished(request, TABLE),
    ),
    "refused": lambda side, request, plan: side.heard([report(plan.stores, REFUSED)], [], []),
    "dropped": lambda side, request, plan: side.heard(
        [WorkerReport(1, dropped=[store.store_id for store in plan.stores])], [], []
    ),
    "stale": lambda side, request, plan: (side.reset(engine_empty=False), step(side, [(request, HALF, CHUNK)])),
    "a report is lost": lambda side, request, plan: lost(side),
    "a load fails": failed,
    "turned off": lambda side, request, plan: side.turn_off().take_events(),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_promise_ends_with_what_ends_the_stores(end):
    loads = end in ("a report is lost", "a load fails")
    client, side, request = sharing(hits=int(loads), world_size=2 if end == "a load fails" else 1)
    plan = step(side, [(request, 0, HALF)])
    assert client.promised
    ENDS[end](side, request, plan)
    assert not client.promised
    if end == "preempted":
        side.matched_tokens(request, 0)
        step(side, [(request, 0, HALF)])
        assert client.promised, "it is computed again"


@pytest.mark.parametrize(
    "changes",
    [
        {"shares_l1": lambda: False},
        {"settings": {"await_siblings": False}},
        {"may_store": False},
    ],
)
def test_nothing_is_promised_to_nobody_or_without_a_store(changes):
    client, side, request = scene(TOKENS, **({"shares_l1": lambda: True} | changes))
    step(side, [(request, 0, CHUNK - 1)])
    assert not client.promised


def waiting_scene(**settings):
    client = FakeClient(answers=False)
    client.prompt_tokens_s, client.has_promises = 100.0, True
    clock = Clock()
    side = make_side(client, clock, settings={"lookup_timeout_ms": 500} | settings)
    return client, clock, side


@pytest.mark.parametrize("computed", [0, CHUNK])
def test_a_request_waits_by_the_time_that_computing_would_take(computed):
    client, clock, side = waiting_scene()
    request = arrive(side, TOKENS)
    client.calls.clear()
    side = make_side(client, clock, settings={"lookup_timeout_ms": 500})
    assert ask(side, request, computed) == (None, False)
    wait_s = WAIT_SHARE * prompt_work(computed, TOKENS) / client.prompt_tokens_s
    assert client.calls[-1].wait_ms == int(1000 * wait_s)
    clock.now_s += 0.5 + wait_s - 0.01
    assert ask(side, request, computed) == (None, False)
    clock.now_s += 0.02
    assert ask(side, request, computed) == (0, False) and client.calls[-1].cancelled


def test_a_request_that_waits_costs_the_steps_of_others_nothing():
    client, clock, side = waiting_scene()
    request = arrive(side, TOKENS)
    awaited = []
    client.calls[-1].wait = awaited.append
    ask(side, request)
    clock.now_s += 0.02
    ask(side, request)
    assert awaited[0] > 0 and awaited[1:] == [0.0]


@pytest.mark.parametrize("missing", ["setting", "rate", "promise"])
def test_without_setting_rate_or_promise_nobody_waits(missing):
    client, _, side = waiting_scene(await_siblings=missing != "setting")
    client.prompt_tokens_s = 100.0 * (missing != "rate")
    client.has_promises = missing != "promise"
    assert ask(side, arrive(side, TOKENS)) == (0, False) and not client.calls


def test_a_request_that_another_engine_computes_waits_as_it_says_and_promises_nothing():
    client, side, first = sharing()
    side.finished(first, TABLE)
    client.calls.clear()
    for said, wait_ms in ((5_000, 5_000), (-1, 0), (60_001, 0), ("5", 0), (True, 0)):
        request = arrive(side, TOKENS, kv_transfer_params={"kvstrata.wait_ms": said})
        assert [(call.wait_ms, call.expects) for call in client.calls] == [(wait_ms, True)] * bool(wait_ms)
        assert bool(client.promised) != bool(wait_ms)
        side.finished(request, TABLE)
        client.calls.clear()
    for said, source in (("host-a", "host-a"), ("a b", ""), ("a" * 65, ""), (7, ""), ({}, "")):
        params = {"kvstrata.wait_ms": 5_000, "kvstrata.from": said}
        request = arrive(side, TOKENS, kv_transfer_params=params)
        assert [call.source for call in client.calls] == [source]
        side.finished(request, TABLE)
        client.calls.clear()


def loading_scene(**other):
    """(client, side, a request whose asynchronous load is under way, another one of the same prompt)"""
    client, side, first = scene(TOKENS, hits=CHUNKS, settings={"load_mode": "async"})
    second = arrive(side, TOKENS, **other)
    assert ask(side, first) == (CHUNKS * CHUNK, True)
    side.allocated(first, TABLE, CHUNKS * CHUNK)
    return client, side, first, second


def test_one_request_of_an_engine_loads_and_the_others_find_it_in_vllms_own_cache():
    _, side, first, second = loading_scene()
    assert ask(side, second) == (None, False) and step(side).loads
    assert ask(side, second) == (None, False)
    side.heard([], [first.request_id], [])
    assert ask(side, second, CHUNKS * CHUNK) == (0, False)


@pytest.mark.parametrize("why", ["it has ended", "another prompt", "little in common", "another tenant"])
def test_a_request_loads_by_itself_what_no_other_loads(why):
    most = CHUNKS * CHUNK // 2 - CHUNK
    other = list(range(most if why == "little in common" else 0)) + [7] * TOKENS
    changes = {
        "it has ended": {},
        "another tenant": {"cache_salt": "other"},
    }.get(why, {"all_token_ids": other[:TOKENS]})
    _, side, first, second = loading_scene(**changes)
    if why == "it has ended":
        side.finished(first, TABLE)
    assert ask(side, second) == (CHUNKS * CHUNK, True)
