"""Which hits the scheduler side promises vLLM, when it asks the server, and leases that the server takes back."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.lookup_table import EARLY_LOOKUPS, WAIT_S
from kvstrata.types import RequestIdentity
from tests.harness.scheduler_side import (
    CHUNK,
    Clock,
    FakeClient,
    arrive,
    ask,
    make_request,
    make_side,
    planned_loads,
    scene,
    step,
)

pytestmark = pytest.mark.usefixtures("patience_of_production")


def test_the_identity_of_plain_requests_is_declared_before_the_first_request():
    client = FakeClient()
    make_side(client, settings={"tenant": "blue"})
    assert client.identities == [RequestIdentity(tenant="blue")]


def test_a_prompt_with_nothing_stored_is_a_miss_without_a_message_and_told_once():
    client, side, request = scene(100)
    assert ask(side, request) == ask(side, request) == (0, False)
    assert client.calls == []
    assert client.missed_chunks == [(request.request_id, 100 // CHUNK)]


@pytest.mark.parametrize(
    "params",
    [*({"lmcache.skip_load": word} for word in (True, 1, "true", "yes")), {"max_load_tokens": 0, "more": 1}],
)
def test_a_request_may_ask_for_no_load_and_is_stored_all_the_same(params):
    client = FakeClient(hits=5)
    side = make_side(client)
    request = arrive(side, 40, kv_transfer_params=params)
    assert ask(side, request) == (0, False) and client.calls == []
    assert sum(len(store.chain) // 32 for store in step(side, [(request, 0, 40)]).stores) == 5


@pytest.mark.parametrize("named", ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x" * 10_000])
def test_the_trace_of_a_request_goes_with_its_lookup_and_its_stores(named):
    client = FakeClient(hits=1)
    side = make_side(client)
    request = arrive(side, 40, trace_headers={"traceparent": named})
    ask(side, request)
    [store] = step(side, [(request, 0, 40)]).stores
    assert client.calls[0].traceparent == store.traceparent == (named if len(named) == 55 else "")


@pytest.mark.parametrize(
    "params",
    [
        *(None, "text", {"max_load_tokens": 41}),
        *({"lmcache.skip_load": word} for word in (False, None, "", "false", "0")),
        *({"max_load_tokens": odd} for odd in (-1, True, 8.0, "8", None)),
    ],
)
def test_any_other_request_is_loaded(params):
    side = make_side(FakeClient(hits=5))
    assert ask(side, arrive(side, 50, kv_transfer_params=params)) == (40, False)


def test_a_request_may_bound_what_is_loaded_beyond_vllms_own_cache():
    client = FakeClient(hits=9)
    side = make_side(client)
    for computed, most, promised in ((0, 20, 16), (8, 20, 16), (4, 20, 20), (0, 7, 0), (16, 7, 0)):
        request = arrive(side, 100, kv_transfer_params={"max_load_tokens": most})
        assert not any(call.n_asked for call in client.calls), "what vLLM has is not known yet"
        assert ask(side, request, computed) == (promised, False), (computed, most)
        client.calls.clear()


def test_the_promise_is_what_the_cache_adds_and_never_the_whole_prompt():
    for n_tokens, chunks, computed, promised in (
        (100, 12, 0, 96),
        (96, 12, 0, 95),  # the whole prompt is cached: one token is left for vLLM to compute
        (100, 3, 20, 4),
        (100, 3, 24, 0),
        (8, 1, 0, 7),
    ):
        _, side, request = scene(n_tokens, hits=chunks)
        assert ask(side, request, computed) == (promised, False)
    assert ask(make_side(FakeClient(hits=1)), make_request(7)) == (0, False), "too short to be looked up"


def test_vllm_is_told_to_ask_again_until_the_lookup_times_out():
    clock, client = Clock(), FakeClient(hits=5, answers=False)
    side = make_side(client, clock, settings={"lookup_timeout_ms": 500})
    request = arrive(side, 100)
    for _ in range(3):
        assert ask(side, request) == (None, False)
        clock.now_s += 0.1
    clock.now_s += 0.3
    assert ask(side, request) == (0, False)
    assert len(client.calls) == 1 and client.calls[0].cancelled
    assert side.take_counts()["lookup_timeouts"] == 1


def misses(side):
    """The reasons counted since the last call."""
    return {name: n for name, n in side.take_counts().items() if name.startswith("miss_")}


@pytest.mark.parametrize(
    ("reason", "client"),
    [
        ("not_in_l1", FakeClient()),
        ("never_stored", FakeClient(has_l2=True)),
        ("breaker_open", FakeClient(hits=5, connected=False)),
        ("deadline", FakeClient(hits=5, answers=False)),
        ("refused", FakeClient(hits=5, slices=())),
    ],
)
def test_a_miss_is_counted_once_by_its_reason_however_often_vllm_asks(reason, client):
    clock = Clock()
    side = make_side(client, clock, settings={"lookup_timeout_ms": 500})
    request = arrive(side, 100)
    while ask(side, request) == (None, False):
        clock.now_s += 0.3
    for _ in range(5):
        clock.now_s += 0.3
        ask(side, request)
    assert misses(side) == {f"miss_{reason}": 1}


def test_a_request_that_needs_all_activations_loads_nothing_and_is_stored():
    side = make_side(FakeClient(hits=5))
    request = arrive(side, 100, skip_reading_prefix_cache=True)
    assert ask(side, request) == (0, False) and side._client.calls == []
    assert side.take_counts() == {"lookups_left_out": 1}
    assert len(step(side, [(request, 0, 100)]).stores) == 1


def test_all_lookups_of_a_step_together_wait_no_longer_than_one_alone():
    client, clock, waited_s = FakeClient(hits=5, answers=False), Clock(), []
    side = make_side(client, clock)
    requests = [make_request(40) for _ in range(20)]
    for request in requests:
        side.on_new_request(request)
        assert ask(side, request) == (None, False)

    def wait(call, timeout_s):
        # A thread sleeps a little longer than it asked to, and does not sleep once the call has ended.
        slept_s = 0.0 if call.done or not timeout_s else min(timeout_s, 0.0004) * 1.1
        waited_s.append(slept_s)
        clock.now_s += slept_s
        return call.done

    for call in client.calls:
        call.wait = lambda timeout_s, call=call: wait(call, timeout_s)
    for _ in range(2):
        step(side)
        waited_s.clear()
        assert [ask(side, request) for request in requests] == [(None, False)] * 20
        assert 0.9 * WAIT_S < sum(waited_s) < 1.1 * WAIT_S
    # Answers that have arrived are used, although this step has no time left to wait.
    for call in client.calls:
        call.answer(5)
    assert {ask(side, request) for request in requests} == {(39, False)}


def test_first_requests_wait_briefly_for_a_server_that_was_seen():
    for seen, expected in ((True, (None, False)), (False, (0, False))):
        clock, client = Clock(), FakeClient(hits=5)
        client.connected = False
        side = make_side(client, clock, server_seen=lambda seen=seen: seen)
        request = arrive(side, 100)
        assert ask(side, request) == expected
        clock.now_s += 0.6
        assert ask(side, request) == (0, False)


def test_a_missed_prefix_is_found_once_another_engine_has_stored_it():
    clock = Clock()
    client, side, request = scene(100, hits=0, clock=clock)
    assert ask(side, request) == (0, False)
    client.hits = 4
    assert ask(side, request) == (0, False)
    clock.now_s += 0.2
    assert ask(side, request) == (32, False)


def test_lookups_without_a_hit_are_not_cancelled_and_leave_room_for_more_lookups():
    clock, client = Clock(), FakeClient(hits=0)
    client.has_l2 = True
    side = make_side(client, clock)
    for _ in range(2 * EARLY_LOOKUPS):
        request = arrive(side, 100)
        assert ask(side, request) == (0, False)
    clock.now_s += 0.2
    assert ask(side, request) == (0, False)
    side.finished(request, [[]])
    assert len(client.calls) == 2 * EARLY_LOOKUPS
    assert not any(call.cancelled for call in client.calls)


def test_a_queue_of_new_requests_starts_a_bounded_number_of_lookups():
    client = FakeClient(hits=5, answers=False)
    side = make_side(client)
    for _ in range(50):
        side.on_new_request(make_request(100))
    assert len(client.calls) == EARLY_LOOKUPS


def test_a_long_prompt_is_hashed_in_pieces():
    _client, side, request = scene(200_000, hits=5)
    asked = 0
    while ask(side, request) == (None, False):
        asked += 1
    assert 1 <= asked <= 3
    assert ask(side, request) == (40, False)


@pytest.mark.parametrize(("mode", "expected"), [("auto", False), ("async", True)])
def test_load_mode_decides_whether_a_load_is_asynchronous(mode, expected):
    _, side, request = scene(100, hits=5, settings={"load_mode": mode})
    assert ask(side, request) == (40, expected)


def revoke_while_vllm_has_no_blocks(side, client, request):
    """Promise a hit in a step in which vLLM has no blocks for it; then the server asks for the lease."""
    assert ask(side, request) == (40, False)
    step(side)
    return client.revoke(client.calls[-1])


def test_a_promised_lease_cannot_be_revoked_before_vllm_takes_it_or_the_step_ends():
    client = FakeClient(hits=5)
    side = make_side(client)
    taken, left = make_request(100), make_request(100)
    for request in (taken, left):
        side.on_new_request(request)
        assert ask(side, request) == (40, False)
    side.allocated(taken, [list(range(1, 30))], 40)
    of_taken, of_left = client.calls
    assert not client.revoke(of_taken) and not client.revoke(of_left)
    (load,) = step(side).loads
    assert load.lease == of_taken.result.lease
    assert client.revoke(of_left), "its request waits in vLLM's queue"
    assert not client.revoke(of_taken), "the workers copy under it"


def test_a_revoked_lookup_is_sent_again_when_vllm_asks_next():
    client, side, request = scene(100, hits=5)
    assert revoke_while_vllm_has_no_blocks(side, client, request)
    assert client.leases == []
    client.hits = 3
    assert ask(side, request) == (24, False)
    (load,) = planned_loads(side, request, 24, [list(range(1, 30))])
    assert load.lease == client.calls[-1].result.lease
    assert len(client.calls) == 2


def test_a_lookup_that_is_revoked_repeatedly_is_sent_about_ten_times_a_second_at_most():
    clock = Clock()
    client, side, request = scene(100, hits=5, clock=clock)
    for _ in range(1000):
        tokens, _ = ask(side, request)
        assert tokens in (0, 40)
        step(side)
        client.revoke(client.calls[-1])
        clock.now_s += 0.001
    assert 5 <= len(client.calls) <= 25, "about ten lookups in each second"
    assert client.leases == []


def test_a_lease_revoked_while_it_is_being_claimed_is_not_promised():
    client, side, request = scene(100, hits=5)
    call = client.calls[0]
    claim = call.claim
    call.claim = lambda: client.revoke(call) and claim()
    assert ask(side, request) == (None, False)
    assert ask(side, request) == (40, False)
    assert client.calls[1].result.lease in client.leases
