"""The scheduler side: what it promises vLLM, what it stores, and that no lease is ever lost or given back twice."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.client.calls import LookupCall, LookupResult
from kvstrata.config.model import ClientSettings
from kvstrata.connectors.vllm.boundary import guarded
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, WorkerReport
from kvstrata.connectors.vllm.scheduler import EARLY_LOOKUPS, UNCONFIRMED_STEPS, WAIT_S, SchedulerSide
from kvstrata.connectors.vllm.weights import ASK_AGAIN_S, WeightsVersion
from kvstrata.keys import ChunkHasher
from kvstrata.types import EXTENT, LayoutIdentity, LeaseName, RequestIdentity, canonical_json, identity_root

BLOCK, CHUNK = 4, 8
LAYOUT = LayoutIdentity(model="m", kv_dtype="bfloat16", chunk_tokens=CHUNK)
SLICES = (b"\1" * 32, b"\2" * 32)


class FakeCall(LookupCall):
    def __init__(self, client, n_asked):
        super().__init__(lambda call: None)
        self.client, self.n_asked, self.cancelled = client, n_asked, False
        client.may_fail("lookup")

    def wait(self, timeout_s):
        assert timeout_s <= 0.002, "longer than a call on the scheduler's thread may take"
        return super().wait(0)

    def cancel(self):
        self.client.may_fail("cancel")
        assert not self.cancelled
        self.cancelled = True
        if self.done and self.result.lease is not None and not self.revoked:
            self.client.leases.remove(self.result.lease)
        super().cancel()

    def answer(self, n):
        n = min(n, self.n_asked)
        if not n:
            self.finish(LookupResult(0, None, b"", 0, "never_stored"))
            return
        lease = LeaseName(b"s" * 16, next(self.client.seqs), 1)
        self.client.leases.append(lease)
        extents = b"".join(EXTENT.pack(i, 1, i, 1, 0) for i in range(n * len(SLICES)))
        self.finish(LookupResult(n, lease, extents, len(SLICES), ""))


class FakeClient:
    """Keeps account of leases: granted and not yet given back by the scheduler."""

    def __init__(self, hits=0, answers=True):
        self.connected, self.has_l2, self.chunk_tokens = True, False, CHUNK
        self.hits, self.answers = hits, answers
        self.calls, self.leases, self.handed_on, self.seqs = [], [], [], itertools.count(1)
        self.closed, self.identities, self.revoked = False, [], set()
        self.fails = ""
        self.evicted = set()

    def may_fail(self, method):
        """Once, if a test said so."""
        if self.fails == method:
            self.fails = ""
            raise RuntimeError(f"planted in {method}")

    def identity(self, request):
        self.may_fail("identity")
        self.identities.append(request)
        root = identity_root(LAYOUT, request)
        return SimpleNamespace(
            request=request, root=root, slices=SLICES, hasher=lambda media=(): ChunkHasher(root, CHUNK, media)
        )

    def peek(self, identity, hasher):
        self.may_fail("peek")
        return min(self.hits, hasher.n_chunks)

    def present(self, chain):
        return [chain[at : at + 32] not in self.evicted for at in range(0, len(chain), 32)]

    def lookup(self, identity, hasher, *, request_id, deadline_ms):
        call = FakeCall(self, hasher.n_chunks)
        self.calls.append(call)
        if self.answers:
            call.answer(self.hits)
        return call

    def release(self, leases, *, group=False):
        self.may_fail("release")
        for lease in leases:
            if lease in self.revoked:
                assert group, "a lease was handed on that the server has taken back"
                continue
            self.leases.remove(lease)
            if not group:
                self.handed_on.append(lease)

    def revoke(self, call):
        """The server asks for the lease: what the client's I/O thread makes of it. Whether it went back."""

        def spend(lease):
            if lease not in self.leases:
                return False
            self.leases.remove(lease)
            self.revoked.add(lease)
            return True

        return call.take_back(spend)

    def close(self, timeout_s):
        self.closed = True


_ids = itertools.count(1)


class FakeRequest(SimpleNamespace):
    @property
    def num_tokens(self):
        return len(self.all_token_ids)


def make_request(n_tokens, **changes):
    fields = {
        "request_id": f"r{next(_ids)}",
        "all_token_ids": list(range(n_tokens)),
        "num_prompt_tokens": n_tokens,
        "num_computed_tokens": n_tokens,
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "kv_transfer_params": None,
    }
    return FakeRequest(**(fields | changes))


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class GuardedSide:
    """A side as the connector calls it: an error is answered by what puts things in order."""

    RECOVERIES: ClassVar = {
        "on_new_request": lambda side, request: side.give_up(request),
        "matched_tokens": lambda side, request, _: (side.give_up(request), (0, False))[1],
        "allocated": lambda side, *arguments: side.allocated_failed(*arguments),
        "plan_step": lambda side, output: side.plan_failed(output),
        "heard": lambda side, reports, received, _: side.heard_failed(reports, received),
        "finished": lambda side, request, _: side.finished_failed(request),
        "reset": lambda side, **_: side.turn_off(),
    }

    def __init__(self, side):
        self.side = side

    def __getattr__(self, name):
        method = getattr(self.side, name)
        if name not in self.RECOVERIES:
            return method
        return guarded(None, partial(self.RECOVERIES[name], self.side))(method)


def untold_weights():
    """Workers cannot tell their weights, as is known since the start: each reset makes a mark of its own."""
    weights = WeightsVersion(1)
    weights.known, weights.can_tell = True, False
    return weights


def make_side(client=None, clock=None, world_size=1, **changes):
    options = {"chunk_size": CHUNK} | changes.pop("settings", {})
    changes.setdefault("weights", untold_weights())
    return SchedulerSide(
        client or FakeClient(),
        ClientSettings(**options),
        block_tokens=BLOCK,
        chunk_blocks=CHUNK // BLOCK,
        chunk_bytes=100,
        world_size=world_size,
        now=clock or Clock(),
        **changes,
    )


def step(side, scheduled=(), preempted=(), tables=None):
    """One scheduling step: `scheduled` is (request, computed before, tokens scheduled)."""
    scheduled = list(scheduled)
    tables = tables or {}
    output = SimpleNamespace(
        num_scheduled_tokens={r.request_id: n for r, _, n in scheduled},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, _, _ in scheduled], num_computed_tokens=[c for _, c, _ in scheduled]
        ),
        preempted_req_ids=set(preempted),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda request_id: (tables.get(request_id) or list(range(1, 100)),)
        ),
    )
    return side.plan_step(output)


def hit(side, request, computed=0):
    tokens, asynchronous = side.matched_tokens(request, computed)
    return tokens, asynchronous


# -- what is promised


def test_identity_of_plain_requests_is_declared_before_the_first_one():
    client = FakeClient()
    make_side(client, settings={"tenant": "blue"})
    assert client.identities == [RequestIdentity(tenant="blue")]


def test_nothing_stored_is_answered_at_once_and_without_a_message():
    client = FakeClient()
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert hit(side, request) == (0, False)
    assert client.calls == []


@pytest.mark.parametrize(
    ("n_tokens", "chunks", "computed", "promised"),
    [
        (100, 12, 0, 96),
        (100, 3, 0, 24),
        (96, 12, 0, 95),  # the whole prompt: one token is left to compute
        (100, 3, 20, 4),
        (100, 3, 24, 0),
        (100, 3, 40, 0),
        (7, 0, 0, 0),
        (8, 1, 0, 7),
    ],
)
def test_promise_is_what_the_cache_adds_and_never_the_whole_prompt(n_tokens, chunks, computed, promised):
    side = make_side(FakeClient(hits=chunks))
    request = make_request(n_tokens)
    side.on_new_request(request)
    assert hit(side, request, computed) == (promised, False)


def test_unanswered_lookup_is_asked_again_until_its_time_is_over():
    clock, client = Clock(), FakeClient(hits=5, answers=False)
    side = make_side(client, clock, settings={"lookup_timeout_ms": 500})
    request = make_request(100)
    side.on_new_request(request)
    for _ in range(3):
        assert hit(side, request) == (None, False)
        clock.now_s += 0.1
    clock.now_s += 0.3
    assert hit(side, request) == (0, False)
    assert len(client.calls) == 1 and client.calls[0].cancelled
    assert side.take_counts()["lookup_timeouts"] == 1


def test_an_answer_that_comes_later_is_used_when_asked_again():
    client = FakeClient(hits=5, answers=False)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert hit(side, request) == (None, False)
    client.calls[0].answer(5)
    assert hit(side, request) == (40, False)


def test_all_lookups_of_one_step_are_waited_for_no_longer_than_one():
    client, clock, waited_s = FakeClient(hits=5, answers=False), Clock(), []
    side = make_side(client, clock)
    requests = [make_request(40) for _ in range(20)]
    for request in requests:
        side.on_new_request(request)
        assert hit(side, request) == (None, False)

    def wait(call, timeout_s):
        # A thread sleeps a little longer than it asked for, and not at all when the answer is there.
        slept_s = 0.0 if call.done or not timeout_s else min(timeout_s, 0.0004) * 1.1
        waited_s.append(slept_s)
        clock.now_s += slept_s
        return call.done

    for call in client.calls:
        call.wait = lambda timeout_s, call=call: wait(call, timeout_s)
    for _ in range(2):
        step(side)
        waited_s.clear()
        assert [hit(side, request) for request in requests] == [(None, False)] * 20
        assert 0.9 * WAIT_S < sum(waited_s) < 1.1 * WAIT_S
    # What was answered meanwhile is heard, though there is no time left in this step.
    for call in client.calls:
        call.answer(5)
    assert {hit(side, request) for request in requests} == {(39, False)}


def test_many_questions_for_one_request_send_one_lookup_and_hold_one_lease():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    for _ in range(50):
        assert hit(side, request) == (40, False)
    assert len(client.calls) == 1 and len(client.leases) == 1


def test_without_a_server_everything_is_a_miss_until_it_is_back():
    clock, client = Clock(), FakeClient(hits=5)
    client.connected = False
    side = make_side(client, clock)
    request = make_request(100)
    side.on_new_request(request)
    assert hit(side, request) == (0, False)
    client.connected = True
    clock.now_s += 0.2
    assert hit(side, request) == (40, False)


def test_first_requests_wait_a_moment_for_a_server_that_is_there():
    for seen, expected in ((True, (None, False)), (False, (0, False))):
        clock, client = Clock(), FakeClient(hits=5)
        client.connected = False
        side = make_side(client, clock, server_seen=lambda seen=seen: seen)
        request = make_request(100)
        side.on_new_request(request)
        assert hit(side, request) == expected
        clock.now_s += 0.6
        assert hit(side, request) == (0, False)


def test_a_missed_prefix_is_found_when_somebody_else_stored_it_meanwhile():
    clock, client = Clock(), FakeClient(hits=0)
    side = make_side(client, clock)
    request = make_request(100)
    side.on_new_request(request)
    assert hit(side, request) == (0, False)
    client.hits = 4
    assert hit(side, request) == (0, False)
    clock.now_s += 0.2
    assert hit(side, request) == (32, False)


def test_with_l2_the_server_is_asked_although_l1_has_nothing():
    client = FakeClient(hits=0)
    client.has_l2 = True
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert len(client.calls) == 1
    assert hit(side, request) == (0, False)


def test_lookups_that_found_nothing_are_not_taken_back_and_leave_room_for_others():
    clock, client = Clock(), FakeClient(hits=0)
    client.has_l2 = True
    side = make_side(client, clock)
    for _ in range(2 * EARLY_LOOKUPS):
        request = make_request(100)
        side.on_new_request(request)
        assert hit(side, request) == (0, False)
    clock.now_s += 0.2
    assert hit(side, request) == (0, False)
    side.finished(request, [])
    assert len(client.calls) == 2 * EARLY_LOOKUPS
    assert not any(call.cancelled for call in client.calls)


def test_short_hits_are_computed_when_the_settings_say_so():
    client = FakeClient(hits=5)
    side = make_side(client, settings={"min_retrieve_tokens": 41})
    request = make_request(100)
    side.on_new_request(request)
    assert hit(side, request) == (0, False)
    side.allocated(request, list(range(1, 30)), 0)
    assert client.leases == []


@pytest.mark.parametrize("changes", [{"prompt_embeds": object()}, {"resumable": True}])
def test_requests_whose_tokens_do_not_decide_their_kv_are_left_alone(changes):
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100, **changes)
    side.on_new_request(request)
    assert hit(side, request) == (0, False)
    assert step(side, [(request, 0, 100)]).stores == []


def test_requests_that_want_all_activations_read_nothing_and_store_all():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100, skip_reading_prefix_cache=True)
    side.on_new_request(request)
    assert hit(side, request) == (0, False) and client.calls == []
    assert len(step(side, [(request, 0, 100)]).stores) == 1


def test_queue_of_new_requests_pins_few_leases():
    client = FakeClient(hits=5, answers=False)
    side = make_side(client)
    for _ in range(50):
        side.on_new_request(make_request(100))
    assert len(client.calls) == EARLY_LOOKUPS


def test_a_long_prompt_is_hashed_in_pieces():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(200_000)
    side.on_new_request(request)
    asked = 0
    while hit(side, request) == (None, False):
        asked += 1
    assert 1 <= asked <= 3
    assert hit(side, request) == (40, False)


@pytest.mark.parametrize(("mode", "expected"), [("auto", False), ("sync", False), ("async", True)])
def test_load_mode_decides_between_waiting_and_not(mode, expected):
    side = make_side(FakeClient(hits=5), settings={"load_mode": mode})
    request = make_request(100)
    side.on_new_request(request)
    assert hit(side, request) == (40, expected)


# -- leases that the server takes back


def revoked_while_waiting(side, client, request, promised=40):
    """A step in which vLLM had no blocks for the request; then the server asks for its lease."""
    assert hit(side, request) == (promised, False)
    step(side)
    return client.revoke(client.calls[-1])


def test_a_promised_lease_is_kept_until_vllm_took_it_or_the_step_is_over():
    client = FakeClient(hits=5)
    side = make_side(client)
    taken, left = make_request(100), make_request(100)
    for request in (taken, left):
        side.on_new_request(request)
        assert hit(side, request) == (40, False)
    side.allocated(taken, list(range(1, 30)), 40)
    of_taken, of_left = client.calls
    assert not client.revoke(of_taken) and not client.revoke(of_left)
    (load,) = step(side).loads
    assert load.lease == of_taken.result.lease
    assert client.revoke(of_left), "it waits in vLLM's queue"
    assert not client.revoke(of_taken), "its workers copy"


def test_an_early_lookup_can_be_taken_back_before_vllm_asks():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert client.revoke(client.calls[0])
    assert hit(side, request) == (40, False)
    assert len(client.calls) == 2 and len(client.leases) == 1
    assert side.take_counts()["leases_revoked"] == 1


def test_a_revoked_lookup_is_made_again_when_vllm_asks_next():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert revoked_while_waiting(side, client, request)
    assert client.leases == []
    client.hits = 3
    assert hit(side, request) == (24, False)
    (load,) = load_of(side, request, 0, 24, list(range(1, 30)))
    assert load.lease == client.calls[-1].result.lease
    assert len(client.calls) == 2


def test_a_revoked_lookup_whose_chunks_are_gone_is_a_miss_without_a_message():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert revoked_while_waiting(side, client, request)
    client.hits = 0
    assert hit(side, request) == (0, False)
    assert len(client.calls) == 1


def test_a_lookup_revoked_again_and_again_is_made_anew_only_now_and_then():
    clock, client = Clock(), FakeClient(hits=5)
    side = make_side(client, clock)
    request = make_request(100)
    side.on_new_request(request)
    for _ in range(1000):
        tokens, _ = hit(side, request)
        assert tokens in (0, 40)
        step(side)
        client.revoke(client.calls[-1])
        clock.now_s += 0.001
    assert 5 <= len(client.calls) <= 25, "about one in each tenth of a second"
    assert client.leases == []


def test_a_lease_taken_back_between_two_looks_is_not_promised():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    call = client.calls[0]
    claim = call.claim
    call.claim = lambda: client.revoke(call) and claim()
    assert hit(side, request) == (None, False)
    assert hit(side, request) == (40, False)
    assert client.calls[1].result.lease in client.leases


def test_a_request_that_ends_after_its_lease_was_taken_back_gives_nothing_back_twice():
    client = FakeClient(hits=5)
    side = make_side(client)
    request = make_request(100)
    side.on_new_request(request)
    assert revoked_while_waiting(side, client, request)
    assert side.finished(request, []) is False
    side.close()
    assert client.leases == [] and client.handed_on == []


# -- loads


def load_of(side, request, computed, tokens, table):
    side.allocated(request, table, tokens)
    return step(side).loads


def test_load_names_the_blocks_that_are_missing_and_skips_the_rest():
    client = FakeClient(hits=4)
    side = make_side(client)
    request = make_request(31)
    side.on_new_request(request)
    tokens, _ = hit(side, request, computed=12)
    assert tokens == 12  # three whole chunks are known, of which the first one and a half are computed
    (load,) = load_of(side, request, 12, tokens, list(range(101, 109)))
    assert load.blocks == [SKIP_BLOCK, 104, 105, 106]
    assert len(load.chain) == 2 * 32
    assert [e[0] for e in EXTENT.iter_unpack(load.extents)] == [2, 3, 4, 5]


def test_whole_prompt_hit_loads_every_block():
    side = make_side(FakeClient(hits=4))
    request = make_request(32)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    assert tokens == 31
    (load,) = load_of(side, request, 0, tokens, list(range(1, 9)))
    assert load.blocks == list(range(1, 9))


def test_lease_goes_to_the_workers_with_the_load_and_to_nobody_else():
    client = FakeClient(hits=4)
    side = make_side(client)
    request = make_request(40)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    (load,) = load_of(side, request, 0, tokens, list(range(1, 20)))
    assert client.leases == [] and client.handed_on == [load.lease]
    assert side.finished(request, []) is False
    assert client.handed_on == [load.lease]


@pytest.mark.parametrize("how", ["nothing taken", "aborted", "preempted", "closed"])
def test_a_hit_that_is_not_loaded_gives_its_lease_back_once(how):
    client = FakeClient(hits=4)
    side = make_side(client)
    request = make_request(40)
    side.on_new_request(request)
    assert hit(side, request)[0] == 32
    if how == "nothing taken":
        side.allocated(request, list(range(1, 20)), 0)
    elif how == "aborted":
        side.finished(request, [])
    elif how == "preempted":
        step(side, preempted=[request.request_id])
    else:
        side.close()
    assert client.leases == [] and client.handed_on == []


def test_after_a_preemption_the_request_is_looked_up_anew():
    client = FakeClient(hits=4)
    side = make_side(client)
    request = make_request(40)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    load_of(side, request, 0, tokens, list(range(1, 20)))
    step(side, preempted=[request.request_id])
    request.all_token_ids.extend(range(10))
    for _ in range(30):
        assert hit(side, request) == (32, False)
    assert len(client.calls) == 2 and len(client.leases) == 1
    side.finished(request, [])
    assert client.leases == []


def test_a_request_preempted_and_loaded_anew_in_one_step_is_stored_again_when_that_load_fails():
    """As vLLM does when its cache is reset with requests running."""
    side = make_side(FakeClient(hits=4))
    request = make_request(40)
    side.on_new_request(request)
    for preempted in ([], [request.request_id]):
        tokens, _ = hit(side, request)
        side.allocated(request, list(range(1, 20)), tokens)
        (load,) = step(side, preempted=preempted).loads
    side.heard([WorkerReport(2, failures=1)], [], load.blocks)
    (store,) = step(side, [(request, 0, 40)]).stores
    assert store.blocks == list(range(1, 11))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_is_as_it_was_promised_however_few_of_its_tokens_vllm_takes(asynchronous):
    """Else vLLM waits for ever for the end of a load that it was promised as asynchronous."""
    side = make_side(FakeClient(hits=4), sync_load_bytes=399 if asynchronous else 400)
    request = make_request(40)
    side.on_new_request(request)
    assert hit(side, request) == (32, asynchronous)
    (load,) = load_of(side, request, 0, 20, list(range(1, 20)))
    assert load.asynchronous == asynchronous and load.blocks == [1, 2, 3, 4, 5, SKIP_BLOCK]


def test_abort_during_an_asynchronous_load_leaves_the_blocks_to_vllm():
    client = FakeClient(hits=4)
    side = make_side(client, settings={"load_mode": "async"})
    request = make_request(40)
    side.on_new_request(request)
    tokens, asynchronous = hit(side, request)
    assert asynchronous
    load_of(side, request, 0, tokens, list(range(1, 20)))
    assert side.finished(request, list(range(1, 9))) is False
    side.heard([], [request.request_id], [])


def test_a_request_whose_load_failed_is_computed_and_stored_again():
    client = FakeClient(hits=4)
    side = make_side(client)
    request = make_request(40)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    (load,) = load_of(side, request, 0, tokens, list(range(1, 20)))
    side.heard([WorkerReport(1, failures=1)], [], {load.blocks[3]})
    assert hit(side, request) == (0, False)
    (store,) = step(side, [(request, 12, 28)]).stores
    assert store.blocks == list(range(3, 11)), "from the chunk with the bad block on"


# -- stores


def test_each_chunk_is_stored_once_in_the_step_that_completes_it():
    side = make_side()
    request = make_request(43)
    side.on_new_request(request)
    hit(side, request)
    table = {request.request_id: list(range(201, 212))}
    computed, seen = 0, []
    for tokens in (10, 3, 3, 20, 7):
        plan = step(side, [(request, computed, tokens)], tables=table)
        computed += tokens
        seen += [block for store in plan.stores for block in store.blocks]
        assert len(seen) == computed // CHUNK * (CHUNK // BLOCK)
    assert seen == list(range(201, 211))


def test_parent_of_a_store_is_the_chunk_before_it():
    side = make_side()
    request = make_request(40)
    side.on_new_request(request)
    (first,) = step(side, [(request, 0, 16)]).stores
    (second,) = step(side, [(request, 16, 24)]).stores
    assert first.parent == b"" and second.parent == first.chain[-32:]


def test_generated_chunks_are_stored_only_when_asked_for():
    for save, expected in ((False, 2), (True, 4)):
        side = make_side(settings={"save_decode_cache": save})
        request = make_request(20)
        side.on_new_request(request)
        step(side, [(request, 0, 20)])
        chunks = 2
        for computed in range(20, 32):
            request.all_token_ids.append(computed)
            chunks += sum(len(s.chain) // 32 for s in step(side, [(request, computed, 1)]).stores)
        assert chunks == expected


def test_tokens_not_known_yet_are_not_stored():
    """Speculated or not yet sampled tokens are computed before they are known."""
    side = make_side(settings={"save_decode_cache": True})
    request = make_request(15)
    side.on_new_request(request)
    assert len(step(side, [(request, 0, 15)]).stores[0].chain) == 32
    assert step(side, [(request, 15, 4)]).stores == []
    request.all_token_ids.extend([7, 8])
    assert len(step(side, [(request, 17, 1)]).stores) == 1


def test_what_was_loaded_is_not_stored_again():
    side = make_side(FakeClient(hits=3))
    request = make_request(40)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    side.allocated(request, list(range(1, 20)), tokens)
    (store,) = step(side, [(request, 24, 16)]).stores
    assert store.blocks == list(range(7, 11))


@pytest.mark.parametrize(("limit", "chunks"), [(0, 0), (7, 0), (17, 2), (1000, 5), (-4, 0)])
def test_offload_limit_of_a_request_is_respected(limit, chunks):
    side = make_side()
    request = make_request(40, kv_transfer_params={"lmcache.max_offload_tokens": limit})
    side.on_new_request(request)
    stores = step(side, [(request, 0, 40)]).stores
    assert sum(len(store.chain) // 32 for store in stores) == chunks


def test_blocks_that_the_engine_dropped_are_not_stored():
    side = make_side()
    request = make_request(16)
    side.on_new_request(request)
    assert step(side, [(request, 0, 16)], tables={request.request_id: [0, 5, 6, 7]}).stores == []


def test_roles_limit_what_is_done():
    client = FakeClient(hits=3)
    producer = make_side(client, may_load=False)
    request = make_request(40)
    producer.on_new_request(request)
    assert hit(producer, request) == (0, False) and client.calls == []
    assert len(step(producer, [(request, 0, 40)]).stores) == 1
    consumer = make_side(FakeClient(), may_store=False)
    consumer.on_new_request(request)
    assert step(consumer, [(request, 0, 40)]).stores == []


def test_blocks_of_a_finished_request_are_kept_while_a_store_reads_them():
    side = make_side()
    request = make_request(40)
    side.on_new_request(request)
    (store,) = step(side, [(request, 0, 40)]).stores
    assert side.finished(request, list(range(1, 11))) is True
    assert step(side).awaited == {request.request_id}
    assert step(side).awaited == set()
    other = make_request(40)
    side.on_new_request(other)
    (store,) = step(side, [(other, 0, 40)]).stores
    side.heard([WorkerReport(4, gathered=[store.store_id], stored=[(store.store_id, 31)])], [], [])
    assert side.finished(other, list(range(1, 11))) is False


def test_every_worker_must_have_gathered():
    side = make_side(world_size=2)
    request = make_request(40)
    side.on_new_request(request)
    (store,) = step(side, [(request, 0, 40)]).stores
    side.heard([WorkerReport(1, gathered=[store.store_id])], [], [])
    assert side.finished(request, list(range(1, 11))) is True


def test_dropped_stores_are_made_again():
    side = make_side()
    request = make_request(40)
    side.on_new_request(request)
    (store,) = step(side, [(request, 0, 24)]).stores
    side.heard([WorkerReport(1, dropped=[store.store_id])], [], [])
    (again,) = step(side, [(request, 24, 16)]).stores
    assert again.blocks[:6] == store.blocks


def test_with_several_workers_nothing_is_stored_on_top_of_an_unconfirmed_load():
    side = make_side(FakeClient(hits=3), world_size=2)
    request = make_request(43)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    side.allocated(request, list(range(1, 20)), tokens)
    plan = step(side, [(request, 24, 19)])
    assert plan.stores == []
    assert side.finished(request, list(range(1, 12))) is True
    later = step(side)
    assert later.stores == [] and later.awaited == set()
    side.heard([WorkerReport(plan.step), WorkerReport(plan.step)], [], [])
    last = step(side)
    assert [s.blocks for s in last.stores] == [[7, 8, 9, 10]]
    assert last.awaited == {request.request_id}


def test_with_several_workers_a_failed_load_takes_what_rests_on_it_along():
    side = make_side(FakeClient(hits=3), world_size=2)
    request = make_request(43)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    side.allocated(request, list(range(1, 20)), tokens)
    plan = step(side, [(request, 24, 19)])
    side.finished(request, list(range(1, 12)))
    side.heard([WorkerReport(plan.step), WorkerReport(plan.step, failures=1)], [], [3])
    last = step(side)
    assert last.stores == [] and last.awaited == {request.request_id}


def loaded_synchronously(side):
    """A request with a synchronous load of 24 tokens, and the step of that."""
    request = make_request(43)
    side.on_new_request(request)
    tokens, _ = hit(side, request)
    side.allocated(request, list(range(1, 20)), tokens)
    return request, step(side, [(request, 24, 8)]).step


def test_one_worker_of_several_does_not_confirm_a_load_for_the_others():
    side = make_side(FakeClient(hits=3), world_size=2)
    request, loaded = loaded_synchronously(side)
    side.heard([WorkerReport(loaded)], [], [])
    assert step(side, [(request, 32, 8)]).stores == []
    side.heard([WorkerReport(loaded)], [], [])
    (store,) = step(side, [(request, 40, 3)]).stores
    assert store.blocks == [7, 8, 9, 10]


def test_a_load_that_no_worker_tells_of_any_more_counts_as_failed_and_holds_up_no_others(caplog):
    side = make_side(FakeClient(hits=3), world_size=2)
    request, loaded = loaded_synchronously(side)
    for _ in range(UNCONFIRMED_STEPS):
        assert step(side, [(request, 32, 8)]).stores == [] and not caplog.messages
    assert step(side, [(request, 32, 8)]).stores == [], "its blocks may be bad"
    assert len(caplog.messages) == 1 and "did not report" in caplog.messages[0]
    side.heard([WorkerReport(loaded)], [], [])
    # What vLLM still has may rest on them; what is computed from the start does not.
    other, fresh = make_request(40), make_request(40)
    side._client.hits = 0
    for each, computed in ((other, 8), (fresh, 0)):
        side.matched_tokens(each, computed)
    stores = step(side, [(other, 8, 32), (fresh, 0, 40)]).stores
    assert [store.request_id for store in stores] == [fresh.request_id]


@pytest.mark.parametrize("how", ["preempted", "reset"])
def test_chunks_that_waited_for_a_load_are_forgotten_with_the_blocks_they_lay_in(how):
    side = make_side(FakeClient(hits=3), world_size=2)
    request, loaded = loaded_synchronously(side)
    if how == "reset":
        side.reset(engine_empty=True)
    else:
        step(side, preempted=[request.request_id])
    side.heard([WorkerReport(loaded)] * 2, [], [])
    side.finished(request, list(range(1, 12)))
    assert step(side).stores == []


def test_plans_say_which_failures_they_know_of():
    side = make_side()
    assert step(side).failures_seen == 0
    side.heard([WorkerReport(1, failures=2)], [], [])
    assert step(side).failures_seen == 2


# -- events, reset, identity


def test_events_tell_the_tokens_of_chunks_that_every_worker_stored():
    made = []
    side = make_side(world_size=2, events=lambda *event: made.append(event) or event)
    request = make_request(40)
    side.on_new_request(request)
    (store,) = step(side, [(request, 0, 40)]).stores
    side.heard([WorkerReport(1, stored=[(store.store_id, 0b11011)])], [], [])
    assert side.take_events() == []
    side.heard([WorkerReport(1, stored=[(store.store_id, 0b01111)])], [], [])
    keys = [store.chain[i : i + 32] for i in range(0, 160, 32)]
    assert side.take_events() == [
        (list(range(16)), b"", keys[:2], None),
        (list(range(24, 32)), keys[2], keys[3:4], None),
    ]
    assert side.take_events() == []


def test_chunks_that_left_l1_are_told_as_removed_once():
    client, clock = FakeClient(), Clock()
    side = make_side(
        client, clock, events=lambda *event: ("stored", event[2]), removal=lambda keys: ("removed", keys)
    )
    request = make_request(40)
    side.on_new_request(request)
    (store,) = step(side, [(request, 0, 40)]).stores
    keys = [store.chain[i : i + 32] for i in range(0, 160, 32)]
    side.heard([WorkerReport(1, gathered=[store.store_id], stored=[(store.store_id, 0b01111)])], [], [])
    assert side.take_events() == [("stored", keys[:4])]
    client.evicted = {keys[1], keys[3], keys[4]}
    clock.now_s += 20
    assert side.take_events() == [("removed", [keys[1], keys[3]])], "the last one was never told as stored"
    clock.now_s += 20
    assert side.take_events() == []


def test_new_weights_make_everything_older_unfindable():
    side = make_side()
    before, after = make_request(40), make_request(40)
    side.on_new_request(before)
    (old,) = step(side, [(before, 0, 40)]).stores
    side.reset(engine_empty=True)
    side.on_new_request(after)
    (new,) = step(side, [(after, 0, 40)]).stores
    assert old.chain != new.chain


def run_until_reset(side, how):
    """A request of 84 tokens that holds blocks of before the reset, and its computed tokens."""
    request = make_request(84)
    side.on_new_request(request)
    external, asynchronous = hit(side, request)
    assert (external, asynchronous) == ({"running": 0}.get(how, 24), how == "loading")
    side.allocated(request, list(range(1, 100)), external)
    if how == "load handed out":
        side.reset(engine_empty=False)
        step(side, [(request, 24, 16)])
        return request, 40
    step(side, [] if how == "loading" else [(request, external, 40 - external)])
    if how == "reset twice":
        side.reset(engine_empty=False)
        assert step(side, [(request, 40, 16)]).stores == []
    side.reset(engine_empty=False)
    if how == "loading":
        side.heard((), [request.request_id], ())
        side.allocated(request, list(range(1, 100)), 0)
        return request, 24
    return request, 40


HOW_IT_RAN = ["running", "loaded", "loading", "load handed out", "reset twice"]


@pytest.mark.parametrize("how", HOW_IT_RAN)
def test_what_rests_on_old_weights_is_never_stored_under_the_new_identity(how):
    client = FakeClient(hits=0 if how == "running" else 3)
    side = make_side(client, settings={"load_mode": "async" if how == "loading" else "sync"})
    request, computed = run_until_reset(side, how)
    assert step(side, [(request, computed, 84 - computed)]).stores == []
    # What it generates now was computed by attending to what it had before.
    request.all_token_ids.extend(range(20))
    assert step(side, [(request, 84, 20)]).stores == []
    side.finished(request, list(range(1, 100)))
    assert step(side).stores == [] and client.leases == []


def test_old_chunks_that_waited_for_a_load_are_not_stored_at_their_end():
    side = make_side(FakeClient(hits=3), world_size=2)
    (other, request), loads = (make_request(40), make_request(80)), []
    side.on_new_request(other)
    side.allocated(other, list(range(50, 70)), hit(side, other)[0])
    side.on_new_request(request)
    loads.append(step(side, [(request, 0, 80)]))
    side.reset(engine_empty=False)
    assert side.finished(request, list(range(1, 30))) is False
    side.heard([WorkerReport(loads[0].step)] * 2, [], [])
    assert step(side).stores == []


def test_what_ended_before_the_reset_is_stored_as_what_it_was():
    side = make_side(FakeClient(hits=3), world_size=2)
    other, request, same = make_request(40), make_request(80), make_request(80)
    side.on_new_request(other)
    side.allocated(other, list(range(50, 70)), hit(side, other)[0])
    side.on_new_request(request)
    plan = step(side, [(request, 0, 80)])
    assert side.finished(request, list(range(1, 30))) is True
    side.reset(engine_empty=False)
    side.heard([WorkerReport(plan.step)] * 2, [], [])
    (store,) = step(side).stores
    assert store.identity == RequestIdentity()
    side.on_new_request(same)
    assert step(side, [(same, 0, 80)]).stores[0].identity != store.identity


@pytest.mark.parametrize("how", HOW_IT_RAN)
def test_a_request_computed_anew_after_the_reset_is_stored(how):
    client = FakeClient(hits=0 if how == "running" else 3)
    side = make_side(client, settings={"load_mode": "async" if how == "loading" else "sync"})
    request, _ = run_until_reset(side, how)
    client.hits = 0
    step(side, preempted=[request.request_id])
    assert hit(side, request) == (0, False)
    side.allocated(request, list(range(1, 100)), 0)
    (store,) = step(side, [(request, 0, 84)]).stores
    assert len(store.chain) == 84 // CHUNK * 32 and store.parent == b""


@pytest.mark.parametrize("may_load", [True, False])
def test_what_vllm_still_has_of_before_the_reset_is_not_stored(may_load):
    side = make_side(may_load=may_load)
    running, after, other = make_request(84), make_request(84), make_request(84)
    side.on_new_request(running)
    hit(side, running)
    step(side, [(running, 0, 40)])
    side.reset(engine_empty=False)
    # Preempted, it finds its own old blocks in vLLM's cache; so does a request of the same prompt.
    side.on_new_request(after)
    for request, preempted in ((running, [running.request_id]), (after, [])):
        hit(side, request, computed=BLOCK)
        assert step(side, [(request, BLOCK, 80)], preempted).stores == []
    side.on_new_request(other)
    hit(side, other, computed=0)
    assert len(step(side, [(other, 0, 84)]).stores) == 1
    # Emptied at last, it has nothing old.
    side.reset(engine_empty=True)
    request = make_request(84)
    side.on_new_request(request)
    hit(side, request, computed=BLOCK)
    assert len(step(side, [(request, BLOCK, 80)]).stores) == 1


def test_requests_that_the_reset_preempted_are_computed_and_stored_in_the_very_next_step():
    side = make_side()
    request = make_request(84)
    side.on_new_request(request)
    hit(side, request)
    (old,) = step(side, [(request, 0, 84)]).stores
    side.reset(engine_empty=True)
    hit(side, request)
    (store,) = step(side, [(request, 0, 84)], preempted=[request.request_id]).stores
    assert len(store.chain) == len(old.chain) and store.identity != old.identity


class Workers:
    """What two workers with weights of their own answer to a plan."""

    def __init__(self, side, weights="first"):
        self.side, self.initial, self.now = side, weights, weights

    def step(self, scheduled=()):
        plan = step(self.side, scheduled)
        told = [
            (plan.weigh, f"{self.initial} {rank}", f"{self.now} {rank}" if self.now else "")
            for rank in range(2)
        ]
        reports = [WorkerReport(plan.step, weights=each if plan.weigh else None) for each in told]
        self.side.heard(reports, [], [])
        return plan

    def stored(self):
        """Identity of what a new request stores."""
        request = make_request(40)
        self.side.on_new_request(request)
        while hit(self.side, request) == (None, False):
            assert self.step().stores == []
        self.side.allocated(request, list(range(1, 20)), 0)
        (store,) = self.step([(request, 0, 40)]).stores
        return store.identity


def weighing_side(**changes):
    client = changes.pop("client", None) or FakeClient()
    clock = Clock()
    return make_side(client, clock, world_size=2, weights=WeightsVersion(2, clock), **changes)


def test_requests_wait_until_every_worker_told_its_weights():
    side = weighing_side(client=FakeClient(hits=3))
    request = make_request(40)
    side.on_new_request(request)
    assert hit(side, request) == (None, False)
    plan = step(side)
    assert plan.weigh > 0
    side.heard([WorkerReport(plan.step, weights=(plan.weigh, "a", "a"))], [], [])
    assert hit(side, request) == (None, False)
    assert step(side).weigh == 0, "asked once"
    side.heard([WorkerReport(plan.step, weights=(plan.weigh, "b", "b"))], [], [])
    assert hit(side, request) == (24, False)


@pytest.mark.parametrize("empty", [True, False])
def test_equal_weights_share_again_after_a_reset(empty):
    workers = Workers(weighing_side())
    before = workers.stored()
    assert before == RequestIdentity()
    workers.side.reset(engine_empty=empty)
    assert workers.stored() == before


def test_engines_with_equal_new_weights_share_and_share_nothing_of_before():
    engines = [Workers(weighing_side()) for _ in range(2)]
    engines[1].initial = "of another start"
    for workers in engines:
        workers.stored()
        workers.side.reset(engine_empty=True)
        workers.now = "trained further"
    first, second = [workers.stored() for workers in engines]
    assert first == second != RequestIdentity()
    for workers in engines:
        workers.side.reset(engine_empty=True)
        workers.now = workers.initial
        assert workers.stored() == RequestIdentity()


def test_weights_that_were_changed_before_the_first_request_are_not_those_of_the_start():
    workers = Workers(weighing_side())
    workers.now = "trained"
    assert workers.stored() != RequestIdentity()


def test_an_emptied_prefix_cache_may_mean_new_weights():
    cache = [object()]
    workers = Workers(weighing_side(prefix_cache=lambda: cache[0]))
    before = workers.stored()
    cache[0], workers.now = object(), "reloaded"
    after = workers.stored()
    assert after != before
    cache[0] = object()
    assert workers.stored() == after


def test_workers_are_not_asked_while_the_engine_pauses_for_new_weights():
    workers = Workers(weighing_side())
    workers.stored()
    workers.side.reset(engine_empty=True)
    queued = make_request(40)
    workers.side.on_new_request(queued)  # vLLM asks nothing about it until it goes on
    assert workers.step().weigh == 0
    workers.now = "new"
    assert workers.stored() != RequestIdentity()


def test_what_rests_on_old_weights_is_stored_again_once_they_prove_to_be_the_same():
    side = weighing_side()
    workers = Workers(side)
    workers.stored()
    request = make_request(84)
    side.on_new_request(request)
    hit(side, request)
    assert len(workers.step([(request, 0, 40)]).stores) == 1
    side.reset(engine_empty=False)
    assert workers.step([(request, 40, 16)]).stores == []
    workers.stored()
    (store,) = workers.step([(request, 56, 28)]).stores
    assert store.identity == RequestIdentity() and store.parent == b""
    # With other weights it stays out, and stays so when these prove to be the same.
    side.reset(engine_empty=False)
    workers.now = "other"
    workers.stored()
    for _ in range(2):
        request.all_token_ids.extend(range(8))
        assert workers.step([(request, request.num_tokens - 8, 8)]).stores == []
        side.reset(engine_empty=False)
        workers.stored()


def test_where_weights_cannot_be_told_each_reset_ends_sharing_and_nobody_waits_again():
    side = weighing_side()
    request = make_request(40)
    side.on_new_request(request)
    assert hit(side, request) == (None, False)
    plan = step(side)
    told = [(plan.weigh, "a", "a"), (plan.weigh, "", "")]
    side.heard([WorkerReport(plan.step, weights=each) for each in told], [], [])
    workers, identities = Workers(side), []
    for _ in range(3):
        assert step(side).weigh == 0
        identities.append(workers.stored())
        side.reset(engine_empty=True)
    assert identities[0] == RequestIdentity() and len(set(identities)) == 3


def test_a_request_waits_for_an_answer_as_long_as_for_a_lookup_and_a_lost_answer_is_asked_for_again():
    clock = Clock()
    side = make_side(clock=clock, weights=WeightsVersion(1, clock), settings={"lookup_timeout_ms": 1000})
    request = make_request(40)
    assert hit(side, request) == (None, False)
    first = step(side)
    clock.now_s += 1.1
    assert hit(side, request) == (0, False)
    side.allocated(request, list(range(1, 20)), 0)
    assert step(side, [(request, 0, 16)]).stores == []
    clock.now_s += ASK_AGAIN_S
    waiting = make_request(40)
    assert hit(side, waiting) == (None, False)
    again = step(side, [(request, 16, 16)])
    assert 0 < first.weigh < again.weigh and again.stores == []
    for plan in (first, again):
        side.heard([WorkerReport(plan.step, weights=(plan.weigh, "a", "a"))], [], [])
    assert hit(side, waiting) == (0, False)
    (store,) = step(side, [(request, 32, 8)]).stores
    assert len(store.chain) == 40 // CHUNK * 32, "what was computed meanwhile is stored now"


def test_an_answer_to_a_question_of_before_a_reset_does_not_count():
    side = weighing_side()
    request = make_request(40)
    hit(side, request)
    plan = step(side)
    side.reset(engine_empty=True)
    side.heard([WorkerReport(plan.step, weights=(plan.weigh, "a", "a")) for _ in range(2)], [], [])
    assert hit(side, request) == (None, False)
    assert step(side).weigh > plan.weigh


def test_salt_and_media_change_the_keys():
    side = make_side()
    chains = []
    for changes in (
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"mm_features": [media("cat")]},
        {"mm_features": [media("dog")]},
    ):
        request = make_request(40, **changes)
        side.on_new_request(request)
        chains.append(step(side, [(request, 0, 40)]).stores[0].chain)
    assert len({chain[32:] for chain in chains}) == len(chains)
    assert chains[0][:32] == chains[3][:32] == chains[4][:32], "the chunk before the picture is shared"


def test_a_name_for_a_medium_crosses_neither_salts_nor_tenants_nor_engines():
    chains = set()
    for tenant, salt, engine in itertools.product(("", "blue"), (None, "pepper"), ("one", "other")):
        side = make_side(settings={"tenant": tenant}, engine=engine)
        request = make_request(40, mm_features=[media("img-1")], cache_salt=salt)
        side.on_new_request(request)
        chains.add(step(side, [(request, 0, 40)]).stores[0].chain)
    assert len(chains) == 8


def test_adapter_is_waited_for_by_asking_again(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    side = make_side(FakeClient(hits=3))
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))
    request = make_request(40, lora_request=lora)
    side.on_new_request(request)
    answers = []
    while not answers or answers[-1] == (None, False):
        answers.append(hit(side, request))
    assert answers[-1] == (24, False)
    side.close()


# -- any order of events


class Scheduling(RuleBasedStateMachine):
    """vLLM's calls in any order it may make them: leases are never lost, blocks never let go too early.

    Each reset begins a generation of KV; what is stored under an identity rests on KV of its generation alone.
    """

    @initialize(
        hits=st.sampled_from([0, 2, 6]),
        answers=st.booleans(),
        world_size=st.sampled_from([1, 2]),
        mode=st.sampled_from(["sync", "async"]),
    )
    def begin(self, hits, answers, world_size, mode):
        self.clock = Clock()
        self.client = FakeClient(hits=hits, answers=answers)
        side = make_side(self.client, self.clock, world_size=world_size, settings={"load_mode": mode})
        self.side = GuardedSide(side)
        self.world_size = world_size
        self.waiting, self.running, self.loading = [], {}, []
        self.reading, self.kept = {}, set()
        self.generation, self.generations = 0, {"": 0}
        self.in_engine = 0  # the oldest generation that may be in vLLM's own cache
        self.rests_on, self.preempted_by_reset = {}, set()
        self.unreported = []

    @rule(tokens=st.integers(1, 60))
    def arrive(self, tokens):
        request = make_request(tokens)
        self.side.on_new_request(request)
        self.waiting.append(request)

    @rule(method=st.sampled_from(["lookup", "cancel", "identity", "peek", "release"]))
    def fail_once(self, method):
        """An error of ours, soon."""
        self.client.fails = method

    @rule(n=st.integers(0, 6))
    def answer(self, n):
        for call in self.client.calls:
            if not call.done and not call.cancelled:
                call.answer(n)
                return

    @rule(tokens=st.integers(9, 60))
    def arrive_and_run(self, tokens):
        self.arrive(tokens)
        self.waiting.insert(0, self.waiting.pop())
        self.schedule(0, True)

    @rule()
    def server_asks_for_everything(self):
        """Whatever waits goes back; what workers may copy never does (`FakeClient.release` looks)."""
        for call in self.client.calls:
            if self.client.revoke(call):
                assert call.result.lease not in self.client.handed_on

    @precondition(lambda self: self.waiting)
    @rule(computed=st.integers(0, 6), fits=st.booleans(), asked_back=st.booleans())
    def schedule(self, computed, fits, asked_back=False):
        request = self.waiting[0]
        computed = min(computed * BLOCK, (request.num_tokens - 1) // BLOCK * BLOCK)
        tokens, asynchronous = self.side.matched_tokens(request, computed)
        if tokens is None:
            return
        assert 0 <= tokens <= request.num_tokens - 1 - computed
        if asked_back:
            self.server_asks_for_everything()
        if not fits:
            # No blocks: it stays in the queue, and the step goes on without it.
            self.plan([])
            return
        self.waiting.pop(0)
        self.side.allocated(request, list(range(1, 40)), tokens)
        self.rests_on[request.request_id] = self.in_engine if computed else self.generation
        if asynchronous and tokens:
            self.plan([])
            self.loading.append((request, computed + tokens))
        else:
            count = request.num_tokens - computed - tokens
            self.plan([(request, computed + tokens, count)])
            self.running[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "preempt", "go on"]))
    def continue_or_end(self, data, how):
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if how == "go on":
            request.all_token_ids.append(1)
            self.plan([(request, request.num_tokens - 1, 1)])
            return
        del self.running[request.request_id]
        if how == "preempt":
            for store, owner in list(self.reading.items()):
                if owner == request.request_id:
                    del self.reading[store]
            self.plan([], preempted=[request.request_id])
            self.waiting.insert(0, request)
        else:
            self.end(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def abort_waiting(self):
        self.end(self.waiting.pop())

    @precondition(lambda self: self.loading)
    @rule(failed=st.booleans(), aborted=st.booleans())
    def load_ends(self, failed, aborted):
        request, computed = self.loading.pop(0)
        if aborted:
            assert self.side.finished(request, list(range(1, 40))) is False
        self.side.heard([], [request.request_id], range(1, 40) if failed and not aborted else ())
        if failed and not aborted:
            self.waiting.insert(0, request)
        elif not aborted:
            self.side.allocated(request, list(range(1, 40)), 0)
            self.plan([(request, computed, request.num_tokens - computed)])
            self.running[request.request_id] = request

    @rule(preempt=st.booleans())
    def weights_change(self, preempt):
        """As vLLM's `reset_prefix_cache`, with `reset_running_requests` or without."""
        if preempt:
            self.preempted_by_reset |= self.running.keys()
            self.reading = {
                store: owner for store, owner in self.reading.items() if owner not in self.running
            }
            self.waiting[:0] = self.running.values()
            self.running.clear()
        empty = not (self.running or self.loading or self.reading or self.kept)
        if preempt and not empty:
            return  # vLLM gives up before it asks the connector
        self.side.reset(engine_empty=empty)
        self.generation += 1
        mark = self.side._weights.mark
        self.generations[canonical_json(["weights", mark, ""]).decode() if mark else ""] = self.generation
        if empty:
            self.in_engine = self.generation

    @rule()
    def workers_report(self):
        for plan in self.unreported:
            stores = [store.store_id for store in plan.stores]
            report = WorkerReport(plan.step, gathered=stores, stored=[(s, 1) for s in stores])
            self.side.heard([report] * self.world_size, [], [])
            for store in stores:
                self.reading.pop(store, None)
        self.unreported.clear()

    @rule(seconds=st.sampled_from([0.01, 0.2, 4.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    def plan(self, scheduled, preempted=()):
        plan = step(self.side, scheduled, self.preempted_by_reset.union(preempted))
        self.preempted_by_reset.clear()
        for store in plan.stores:
            self.reading[store.store_id] = store.request_id
            assert self.rests_on[store.request_id] == self.generations[store.identity.adapter]
        self.kept -= plan.awaited
        self.unreported.append(plan)
        assert not (plan.awaited & {s.request_id for s in self.side._finished_stores})

    def end(self, request):
        kept = self.side.finished(request, list(range(1, 40)))
        if kept:
            self.kept.add(request.request_id)
        if request.request_id in self.reading.values():
            assert kept, "blocks that a store reads were let go"

    @invariant()
    def leases_have_an_owner(self):
        if not hasattr(self, "side"):
            return
        tracked = list(self.side._tracked.values())
        held = [t.hit.lease for t in tracked if t.hit is not None and not t.call.revoked]
        pending = [
            call.result.lease
            for call in self.client.calls
            if call.done and not call.cancelled and call.result.lease is not None
        ]
        asked = [t.call for t in tracked if t.call is not None and t.hit is None and not t.call.revoked]
        answered = [c.result.lease for c in asked if c.done and c.result.lease is not None]
        assert sorted(self.client.leases) == sorted(held + answered)
        assert set(self.client.leases) <= set(pending)

    def teardown(self):
        if hasattr(self, "side"):
            self.client.fails = ""
            self.side.close()
            assert self.client.leases == []


TestScheduling = Scheduling.TestCase
TestScheduling.settings = hypothesis_settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_a_worker_that_copies_nothing_any_more_ends_the_use_of_the_cache(caplog):
    client = FakeClient(hits=5)
    side = make_side(client)
    first = make_request(100)
    side.on_new_request(first)
    assert hit(side, first) == (40, False)
    for _ in range(2):
        side.heard([WorkerReport(1, broken=True)], [], [])
    assert len([line for line in caplog.records if "cache is off" in line.message]) == 1
    again = make_request(100, request_id="again")
    side.on_new_request(again)
    assert hit(side, again) == (0, False)
    assert hit(side, first) == (0, False)


# -- errors of ours


def media(identifier, offset=9, length=3):
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length), identifier=identifier)


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
    request = make_request(40, **changes)
    side.on_new_request(request)
    assert hit(side, request) == (0, False)
    side.allocated(request, list(range(1, 20)), 0)
    assert step(side, [(request, 0, 40)]).stores == []
    assert side.finished(request, list(range(1, 11))) is False
    assert client.calls == [] and side.take_counts()[f"skipped_{reason}"] == 1


@pytest.mark.parametrize("params", ["text", ["list"], 7, {"lmcache.max_offload_tokens": "all"}])
def test_transfer_parameters_of_any_shape_are_survived(params):
    side = make_side()
    request = make_request(40, kv_transfer_params=params)
    side.on_new_request(request)
    assert len(step(side, [(request, 0, 40)]).stores) == 1


def test_an_adapter_whose_files_cannot_be_read_is_used_without_the_cache():
    path = "a" * 5000
    side = make_side(FakeClient(hits=3))
    request = make_request(40, lora_request=SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path))
    side.on_new_request(request)
    answers = []
    while not answers or answers[-1] == (None, False):
        answers.append(hit(side, request))
    assert answers[-1] == (0, False)
    assert step(side, [(request, 0, 40)]).stores == []
    assert side.take_counts()["skipped_unreadable_adapter"] == 1
    side.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_load_that_vllm_was_promised_and_that_cannot_be_planned_fails_in_the_workers(mode):
    client = FakeClient(hits=3)
    side = make_side(client, settings={"load_mode": mode})
    request = make_request(43)
    side.on_new_request(request)
    assert hit(side, request, computed=BLOCK) == (20, mode == "async")
    side._load_of = None
    guarded_side = GuardedSide(side)
    guarded_side.allocated(request, list(range(1, 12)), 20)
    assert client.leases == []
    plan = guarded_side.plan_step(
        SimpleNamespace(preempted_req_ids=None)
    )  # has no more that could be planned
    [load] = plan.loads
    assert (load.lease, load.blocks, load.asynchronous) == (None, [2, 3, 4, 5, 6], mode == "async")


def test_a_request_whose_store_cannot_be_planned_is_not_in_the_way_of_others():
    side = GuardedSide(make_side())
    bad, good = make_request(40), make_request(40)
    side.on_new_request(bad)
    side.on_new_request(good)
    bad.num_prompt_tokens = None
    assert step(side, [(good, 0, 16), (bad, 0, 40)]).stores == []
    assert len(step(side, [(bad, 40, 1), (good, 16, 24)]).stores) == 1
    assert side.finished(bad, []) is False
    assert side.take_counts()["skipped_error"] == 1


def test_blocks_of_preempted_requests_are_let_go_also_when_a_plan_fails():
    side = GuardedSide(make_side())
    request = make_request(40)
    side.on_new_request(request)
    [_] = step(side, [(request, 0, 40)]).stores
    side.side._plan_stores = None
    assert step(side, preempted=[request.request_id]).preempted == {request.request_id}


def test_blocks_of_a_finished_request_stay_until_the_workers_let_them_go_also_after_an_error():
    side = GuardedSide(make_side())
    request = make_request(40)
    side.on_new_request(request)
    [_] = step(side, [(request, 0, 40)]).stores
    forget, results = side.side._forget_lookup, iter([RuntimeError("planted"), None])

    def fail_first(tracked):
        error = next(results)
        if error is not None:
            raise error
        forget(tracked)

    side.side._forget_lookup = fail_first
    assert side.finished(request, list(range(1, 11))) is True
    assert step(side).awaited == {request.request_id}


def test_after_a_reset_that_failed_nothing_is_loaded_or_stored_again():
    client = FakeClient(hits=3)
    side = GuardedSide(make_side(client))
    before, after = make_request(40), make_request(40)
    side.on_new_request(before)
    client.fails = "cancel"
    side.reset(engine_empty=True)
    side.on_new_request(after)
    for request in (before, after):
        assert hit(side, request) == (0, False)
        assert step(side, [(request, 0, 40)]).stores == []
    assert client.leases == []


def test_what_workers_reported_of_loads_counts_also_after_an_error():
    side = GuardedSide(make_side(FakeClient(hits=3), world_size=2))
    request = make_request(43)
    side.on_new_request(request)
    side.allocated(request, list(range(1, 20)), hit(side, request)[0])
    plan = step(side, [(request, 24, 19)])
    assert plan.stores == []
    side.heard([WorkerReport(plan.step, failures=1, stored=[None]), WorkerReport(plan.step)], [], [])
    later = step(side, [(request, 43, 1)])
    assert len(later.stores) == 1 and later.failures_seen == 1
