"""Under which identity the scheduler side stores and looks up: resets, new weights, salts, images, LoRA adapters."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.connectors.vllm.weights import ASK_AGAIN_S, UNNAMED, WeightsVersion
from kvstrata.types import RequestIdentity
from kvstrata.types import lora_of as lora_name
from tests.harness.scheduler_side import (
    BLOCK,
    CHUNK,
    Clock,
    FakeClient,
    arrive,
    ask,
    make_request,
    make_side,
    media,
    step,
)


def run_past_reset(side, how):
    """(A request of 84 tokens that holds blocks from before a reset, the number of its computed tokens)."""
    request = arrive(side, 84)
    external, asynchronous = ask(side, request)
    assert (external, asynchronous) == ({"running": 0}.get(how, 24), how == "loading")
    side.allocated(request, [list(range(1, 100))], external)
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
        side.allocated(request, [list(range(1, 100))], 0)
        return request, 24
    return request, 40


@pytest.mark.parametrize("how", ["running", "loaded", "loading", "load handed out", "reset twice"])
def test_kv_computed_before_a_reset_is_never_stored_under_the_new_identity(how):
    client = FakeClient(hits=0 if how == "running" else 3)
    side = make_side(client, settings={"load_mode": "async" if how == "loading" else "sync"})
    request, computed = run_past_reset(side, how)
    assert step(side, [(request, computed, 84 - computed)]).stores == []
    # Tokens that it generates now attend to KV from before the reset.
    request.all_token_ids.extend(range(20))
    assert step(side, [(request, 84, 20)]).stores == []
    side.finished(request, [list(range(1, 100))])
    assert step(side).stores == [] and client.leases == []


class Workers:
    """Two workers, each with its own shard of the weights, that report digests when a plan asks for them."""

    def __init__(self, side, weights="first"):
        self.side, self.initial, self.now = side, weights, weights

    def step(self, scheduled=()):
        plan = step(self.side, scheduled)
        told = [
            (
                plan.weigh,
                self.initial if self.initial == UNNAMED else f"{self.initial} {rank}",
                f"{self.now} {rank}" if self.now else "",
            )
            for rank in range(2)
        ]
        reports = [WorkerReport(plan.step, weights=each if plan.weigh else None) for each in told]
        self.side.heard(reports, [], [])
        return plan

    def stored(self):
        """The identity under which a new request is stored."""
        request = make_request(40)
        self.side.on_new_request(request)
        while ask(self.side, request) == (None, False):
            assert self.step().stores == []
        self.side.allocated(request, [list(range(1, 20))], 0)
        (store,) = self.step([(request, 0, 40)]).stores
        return store.identity


def side_that_asks_for_weights(**changes):
    client = changes.pop("client", None) or FakeClient()
    clock = Clock()
    return make_side(client, clock, world_size=2, weights=WeightsVersion(2, clock), **changes)


def test_requests_wait_until_every_worker_has_reported_its_weights():
    side = side_that_asks_for_weights(client=FakeClient(hits=3))
    request = arrive(side, 40)
    assert ask(side, request) == (None, False)
    plan = step(side)
    assert plan.weigh > 0
    side.heard([WorkerReport(plan.step, weights=(plan.weigh, "a", "a"))], [], [])
    assert ask(side, request) == (None, False)
    assert step(side).weigh == 0, "workers are asked once"
    side.heard([WorkerReport(plan.step, weights=(plan.weigh, "b", "b"))], [], [])
    assert ask(side, request) == (24, False)


def test_engines_with_equal_new_weights_share_an_identity_other_than_the_old_one():
    engines = [Workers(side_that_asks_for_weights()) for _ in range(2)]
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


def test_workers_are_not_asked_while_the_engine_pauses_for_new_weights():
    workers = Workers(side_that_asks_for_weights())
    workers.stored()
    workers.side.reset(engine_empty=True)
    queued = make_request(40)
    workers.side.on_new_request(queued)  # a paused vLLM asks nothing about it
    assert workers.step().weigh == 0
    workers.now = "new"
    assert workers.stored() != RequestIdentity()


def test_an_empty_cache_in_the_place_of_vllms_own_one_means_that_its_weights_may_be_others():
    cache = [object()]
    workers = Workers(side_that_asks_for_weights(prefix_cache=lambda: cache[0]))
    assert workers.stored() == RequestIdentity()
    cache[0], workers.now = object(), "other"
    assert workers.stored() != RequestIdentity()
    assert ask(workers.side, arrive(workers.side, 40)) == (0, False), "workers are asked once"


def test_a_hit_from_before_a_reset_is_not_loaded_under_other_weights():
    client = FakeClient(hits=3)
    workers = Workers(side_that_asks_for_weights(client=client))
    request = arrive(workers.side, 40)
    for weights in ("first", "other"):
        workers.now = weights
        while (answer := ask(workers.side, request)) == (None, False):
            workers.step()
        assert answer == (24, False) and len(client.leases) == 1
        if weights == "first":
            workers.side.reset(engine_empty=True)
    workers.side.allocated(request, [list(range(1, 20))], 24)
    (load,) = workers.step().loads
    assert load.identity != RequestIdentity()


def test_kv_from_before_a_reset_is_stored_once_the_weights_prove_unchanged():
    side = side_that_asks_for_weights()
    workers = Workers(side)
    workers.stored()
    request = arrive(side, 84)
    ask(side, request)
    assert len(workers.step([(request, 0, 40)]).stores) == 1
    side.reset(engine_empty=False)
    assert workers.step([(request, 40, 16)]).stores == []
    workers.stored()
    (store,) = workers.step([(request, 56, 28)]).stores
    assert store.identity == RequestIdentity() and store.parent == b""
    later = arrive(side, 84)  # finds blocks from before the reset in vLLM's cache
    assert ask(side, later, computed=BLOCK) == (0, False) and not side._keys.is_stale(later)
    assert len(workers.step([(later, BLOCK, 80)]).stores) == 1
    # KV of the old weights is not stored under other weights, nor when those prove unchanged after a reset.
    side.reset(engine_empty=False)
    workers.now = "other"
    workers.stored()
    for _ in range(2):
        request.all_token_ids.extend(range(8))
        assert workers.step([(request, request.num_tokens - 8, 8)]).stores == []
        side.reset(engine_empty=False)
        workers.stored()


def test_a_request_waits_for_weights_as_long_as_for_a_lookup_and_a_lost_report_is_asked_for_again():
    clock = Clock()
    side = make_side(clock=clock, weights=WeightsVersion(1, clock), settings={"lookup_timeout_ms": 1000})
    request = make_request(40)
    assert ask(side, request) == (None, False)
    first = step(side)
    clock.now_s += 1.1
    assert ask(side, request) == (0, False)
    side.allocated(request, [list(range(1, 20))], 0)
    assert step(side, [(request, 0, 16)]).stores == []
    clock.now_s += ASK_AGAIN_S
    waiting = make_request(40)
    assert ask(side, waiting) == (None, False)
    again = step(side, [(request, 16, 16)])
    assert 0 < first.weigh < again.weigh and again.stores == []
    for plan in (first, again):
        side.heard([WorkerReport(plan.step, weights=(plan.weigh, "a", "a"))], [], [])
    assert ask(side, waiting) == (0, False)
    (store,) = step(side, [(request, 32, 8)]).stores
    assert len(store.chain) == 40 // CHUNK * 32, "chunks computed meanwhile are stored now"


def test_weights_reported_for_a_question_from_before_the_reset_do_not_count():
    side = side_that_asks_for_weights()
    request = make_request(40)
    ask(side, request)
    plan = step(side)
    side.reset(engine_empty=True)
    side.heard([WorkerReport(plan.step, weights=(plan.weigh, "a", "a")) for _ in range(2)], [], [])
    assert ask(side, request) == (None, False)
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
        request = arrive(side, 40, **changes)
        chains.append(step(side, [(request, 0, 40)]).stores[0].chain)
    assert len({chain[32:] for chain in chains}) == len(chains)
    assert chains[0][:32] == chains[3][:32] == chains[4][:32], "the chunk before the image is shared"


def test_a_requesters_name_for_an_image_is_shared_by_neither_salts_nor_tenants_nor_engines():
    chains = set()
    for tenant, salt, engine in itertools.product(("", "blue"), (None, "pepper"), ("one", "other")):
        side = make_side(settings={"tenant": tenant}, name=engine)
        request = arrive(side, 40, mm_features=[media("img-1")], cache_salt=salt)
        chains.add(step(side, [(request, 0, 40)]).stores[0].chain)
    assert len(chains) == 8


def lora_of(name="a", number=1, path="/adapters/a"):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


class AdapterWorkers:
    """Two workers that tell the content of the LoRA adapters that they have."""

    def __init__(self, side):
        self.side, self.content = side, "first"

    def step(self, scheduled=()):
        plan = step(self.side, scheduled)
        for rank in range(2):
            told = [(number, f"{self.content} {rank}") for number, _ in plan.weigh_adapters]
            self.side.heard([WorkerReport(plan.step, adapters=told)], [], [])
        return plan

    def stored(self, lora, computed=0):
        """The stores of a new request for the adapter."""
        request = arrive(self.side, 40, lora_request=lora)
        while ask(self.side, request, computed) == (None, False):
            assert self.step().stores == []
        self.side.allocated(request, [list(range(1, 20))], 0)
        stores = self.step([(request, computed, 40 - computed)]).stores
        self.side.finished(request, [list(range(1, 20))])
        return stores

    def name(self, lora):
        [store] = self.stored(lora)
        assert lora_name(store.identity.adapter) == lora.lora_name
        return store.identity.adapter


def test_vllm_is_told_to_ask_again_until_every_worker_has_told_which_adapter_it_has():
    side = make_side(FakeClient(hits=3), world_size=2)
    request = arrive(side, 40, lora_request=lora_of())
    assert ask(side, request) == (None, False)
    plan = step(side)
    [(number, lora)] = plan.weigh_adapters
    assert lora is request.lora_request
    for answer in ((None, False), (24, False)):
        assert ask(side, request)[0] is None and step(side).weigh_adapters == []
        side.heard([WorkerReport(plan.step, adapters=[(number, "content")])], [], [])
        assert ask(side, request) == answer
    side.allocated(request, [list(range(1, 20))], 24)
    [load] = step(side).loads
    assert load.adapter == number


def test_adapters_are_named_by_what_the_workers_have_wherever_it_came_from():
    workers = AdapterWorkers(make_side(world_size=2))
    first = workers.name(lora_of())
    assert workers.name(lora_of(number=2, path="org/name")) == first
    workers.content = "second"
    assert workers.name(lora_of()) == first, "vLLM still has the old weights"
    assert workers.name(lora_of(number=3)) != first
    assert workers.name(lora_of(path="/adapters/b")) != first
    assert workers.stored(None)[0].identity == RequestIdentity()


def test_what_an_adapter_was_before_it_was_replaced_is_not_mixed_with_what_it_is():
    side = make_side(world_size=2)
    workers, lora = AdapterWorkers(side), lora_of()
    first = workers.name(lora)
    running, other = arrive(side, 84, lora_request=lora), arrive(side, 84)
    for request in (running, other):
        assert ask(side, request) == (0, False)
        side.allocated(request, [list(range(1, 100))], 0)
    stores = workers.step([(running, 0, 40), (other, 0, 40)]).stores
    number = next(store.adapter for store in stores if store.request_id == running.request_id)
    workers.content = "second"
    for _ in range(2):  # each worker says so
        side.heard([WorkerReport(0, adapters=[(number, "")])], [], [])
    stores = workers.step([(running, 40, 44), (other, 40, 44)]).stores
    assert [store.request_id for store in stores] == [other.request_id]
    assert workers.stored(lora, computed=BLOCK) == [], (
        "vLLM's own cache has KV of the adapter that was replaced"
    )
    assert workers.stored(None, computed=BLOCK) != []
    second = workers.name(lora)
    assert second != first
    assert workers.step([(running, 84, 1)]).stores == [], "it has computed with both"
    side.reset(engine_empty=True)
    assert workers.stored(lora, computed=BLOCK) != []


def test_an_adapter_that_a_worker_cannot_read_is_computed_without_the_cache():
    workers = AdapterWorkers(make_side(world_size=2))
    request = arrive(workers.side, 40, lora_request=lora_of())
    [(number, _)] = step(workers.side).weigh_adapters
    workers.side.heard([WorkerReport(0, adapters=[(number, digest)]) for digest in ("", "content")], [], [])
    assert ask(workers.side, request) == (0, False)
    assert workers.step([(request, 0, 40)]).stores == []
    assert workers.side.take_counts()["skipped_unreadable_adapter"] == 1


def side_of_unnamed_weights():
    clock = Clock()
    return make_side(clock=clock, world_size=2, weights=WeightsVersion(2, clock, named=False))


@pytest.mark.parametrize("told", [("", ""), (UNNAMED, ""), ("a", "")])
def test_an_engine_that_can_name_its_weights_in_no_way_shares_with_no_other_start(told):
    identities = set()
    for _ in range(2):
        side = side_of_unnamed_weights()
        ask(side, arrive(side, 40))
        plan = step(side)
        side.heard([WorkerReport(plan.step, weights=(plan.weigh, *told)) for _ in range(2)], [], [])
        identities.add(Workers(side).stored())
    assert len(identities) == 2 and RequestIdentity() not in identities


def test_what_another_connector_loads_is_not_stored_once_weights_without_a_name_have_changed():
    workers = Workers(side_of_unnamed_weights())
    for weights, n_stores in (("first", 1), ("second", 0)):
        workers.side.reset(engine_empty=True)
        workers.now = weights
        workers.stored()
        request = arrive(workers.side, 40)
        assert ask(workers.side, request) == (0, False)
        workers.side.allocated(request, [list(range(1, 20))], 0)
        workers.step([(request, 16, 24)])  # another connector has loaded the first 16
        assert len(workers.step([(request, 40, 1)]).stores) == n_stores


def test_a_model_that_brings_weights_of_its_own_is_named_by_samples_too():
    side = side_that_asks_for_weights()
    workers = Workers(side)
    ask(side, arrive(side, 40))
    plan = step(side)
    told = [(plan.weigh, "a", "a"), (plan.weigh, UNNAMED, "b")]
    side.heard([WorkerReport(plan.step, weights=each) for each in told], [], [])
    assert workers.stored() != RequestIdentity()
