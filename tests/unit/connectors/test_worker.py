"""The connector's worker side: when copies may touch which blocks, and what it reports to the scheduler."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from kvstrata.client.handles import StoreOutcome
from kvstrata.connectors.vllm.metadata import StepPlan
from kvstrata.connectors.vllm.worker import SLEEP_WAIT_S, GroupSide, WorkerSide
from tests.unit.connectors.worker_double import MINE, OTHER, load_of, step, store_of

pytestmark = pytest.mark.usefixtures("patience_of_production")


def test_a_load_without_extents_for_this_slice_names_empty_extents(fake, side):
    load = load_of()
    load.slices = (OTHER, b"\3" * 32)
    step(side, StepPlan(1, loads=[load]))
    (_, items, _) = fake.loads[0]
    assert {(item.offset_bytes, item.length_bytes) for item in items} == {(0, 0)}


def test_loads_that_end_while_others_are_looked_at_are_reported(fake, side):
    """Copies end on other threads, so they may end between any two looks."""
    fake.next_takes_s = 5.0
    loads = [load_of(name, asynchronous=True, seq=n) for n, name in enumerate("abc")]
    step(side, StepPlan(1, loads=loads))
    done = [job.done for _, _, job in fake.loads]
    done[1].set()
    looked = [0, 0, 0]

    def ends_after_the_first_look(n):
        looked[n] += 1
        done[n].set_now |= looked[n] > 1
        return done[n].set_now

    for n in (0, 2):
        done[n].is_set = partial(ends_after_the_first_look, n)
    received = [step(side, StepPlan(number))[2] for number in (2, 3, 4)]
    assert sorted(name for names in received for name in names) == ["a", "b", "c"]


def test_waiting_for_copies_is_bounded_and_ends_when_the_begun_copies_end(fake, side):
    fake.next_takes_s = 50.0
    loads = [load_of("a", seq=1), load_of("b", seq=2)]
    _, _, _, _ = step(side, StepPlan(1, loads=loads))
    assert [job.cancelled for _, _, job in fake.loads] == [True, True]
    assert fake.now_s < 1.1


def test_blocks_are_reported_as_read_once_before_the_server_has_confirmed_the_store(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)]))
    fake.stores[0][2].gathered.set()
    report, _, _, _ = step(side, StepPlan(2))
    assert (report.gathered, report.stored) == ([1], [])
    assert step(side, StepPlan(3))[0] is None
    fake.stores[0][2].done.set()
    report, _, _, _ = step(side, StepPlan(4))
    assert (report.gathered, report.stored) == ([], [(1, 0b11)])


def test_only_stores_of_reused_blocks_and_of_preempted_requests_are_cancelled(fake, side):
    step(side, StepPlan(1, stores=[store_of(1), store_of(2), store_of(3, request="preempted")]))
    side.before_step(StepPlan(2, cancel={1}, preempted={"preempted"}))
    assert [job.cancelled for _, _, job in fake.stores] == [True, False, True]


def test_what_is_copied_is_counted(fake, side):
    fake.next_failed = {1}
    step(side, StepPlan(1, loads=[load_of()]))
    step(side, StepPlan(2, stores=[store_of(1), store_of(2, request="preempted")], failures_seen=1))
    fake.stores[0][2].end()
    step(side, StepPlan(3, preempted={"preempted"}, stores=[store_of(3)]))
    fake.stores[1][2].end(StoreOutcome.CANCELLED)
    step(side, StepPlan(4))
    assert side.take_counts() == {
        "loaded_chunks": 1, "load_failed_chunks": 1, "loaded_bytes": 100, "stored_bytes": 40, "store_stored_chunks": 2,
        "store_cancelled_chunks": 2, "stores_preempted": 1, "stores_dropped": 1,
    }  # fmt: skip
    assert side.take_counts() == {}


def test_a_request_is_read_once_all_its_stores_have_gathered(fake, side):
    step(side, StepPlan(1, stores=[store_of(1), store_of(2)]))
    assert side.has_read("other", 1.0) and fake.now_s == 0.0
    fake.stores[0][2].gathered.set()
    assert not side.has_read("r", 1.0) and fake.now_s == 1.0
    fake.stores[1][2].gathered.takes_s = 2.0
    assert side.has_read("r", 10.0) and fake.now_s == 3.0
    side.before_step(StepPlan(2, stores=[store_of(3)]))
    assert not side.has_read("r", 10.0), "the store has not begun"


def test_a_step_that_computes_nothing_is_complete_without_a_call_to_begin_its_stores(fake, side):
    """vLLM 0.30 makes no such call in a step without a forward pass."""
    side.before_step(StepPlan(1, stores=[store_of(1)], awaited={"r", "done-before"}, computes=False))
    side.start_loads()
    assert side.finished()[0] == {"done-before"}
    fake.stores[0][2].end()
    side.before_step(StepPlan(2, computes=False))
    assert side.finished()[0] == {"r"}


def test_a_preemption_waits_one_second_for_all_copies_together(fake, side):
    step(side, StepPlan(1, stores=[store_of(n) for n in range(1, 6)]))
    side.before_step(StepPlan(2, preempted={"r"}))
    assert fake.now_s == pytest.approx(1.0)
    assert all(job.cancelled for _, _, job in fake.stores)


def test_closing_waits_briefly_for_stores_and_not_for_loads(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)], loads=[load_of("x", asynchronous=True)]))
    fake.loads[0][2].done.takes_s = None
    fake.loads[0][2].done.set_now = False
    side.close()
    assert fake.stores[0][2].cancelled and fake.loads[0][2].cancelled and fake.closed
    assert fake.now_s < 4.0


# -- blocks on a device -------------------------------------------------------------------------------------------


def device_step(side, plan, layers=("first", "second", "shared"), *, layerwise=True):
    """Make vLLM's calls of one step of a model with these layers; returns (report, bad blocks)."""
    side.before_step(plan)
    side.start_loads(layerwise=layerwise)
    for layer in layers:
        side.wait_layer(layer)
    side.start_stores()
    side.finished()
    return side.report(), side.take_bad_blocks()


def test_each_layer_waits_for_its_own_section_and_nothing_waits_before_the_model(fake, device_side):
    fake.next_takes_s = 0.3
    device_side.before_step(StepPlan(1, loads=[load_of("a"), load_of("b", seq=2)]))
    device_side.start_loads(layerwise=True)
    assert (fake.ordered, fake.now_s) == ([], 0.0)
    jobs = [job for _, _, job in fake.loads]
    for layer, section in fake.sections.items():
        del fake.ordered[:]
        device_side.wait_layer(layer)
        assert fake.ordered == [(job, section) for job in jobs]
    device_side.wait_layer("of no KV")
    assert fake.now_s == 0.0
    device_side.start_stores()
    assert 0.3 <= fake.now_s < 0.7 and device_side.take_bad_blocks() == set()
    assert device_side.report().failures == 0


@pytest.mark.parametrize("layers", [("first", "shared"), ()])
def test_a_layer_that_did_not_ask_fails_the_load(fake, device_side, layers):
    report, bad = device_step(device_side, StepPlan(1, loads=[load_of()]), layers)
    assert (report.failures, bad) == (1, {4, 5, 6})
    report, bad = device_step(device_side, StepPlan(2, loads=[load_of(seq=2)]))
    assert (report.failures, bad) == (1, set())


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_section_that_did_not_come_in_time_fails_the_load(fake, device_side, layerwise):
    fake.unordered = {1, None}
    assert device_step(device_side, StepPlan(1, loads=[load_of()]), layerwise=layerwise)[1] == {4, 5, 6}


def test_a_broken_worker_says_so_in_each_report(fake, device_side):
    assert device_step(device_side, StepPlan(1))[0] is None
    fake.broken = True
    assert device_step(device_side, StepPlan(2))[0].broken


# -- a step that is reported before its stores begin ----------------------------------------------------------------


def test_a_failed_load_is_in_the_report_of_its_own_step_and_nothing_of_the_step_is_stored(fake, device_side):
    fake.next_failed = {0}
    device_side.before_step(StepPlan(7, loads=[load_of()], stores=[store_of(1)]))
    device_side.start_loads(layerwise=True)
    for layer in fake.sections:
        device_side.wait_layer(layer)
    device_side.finished()
    report = device_side.report()
    assert (report.step, report.failures, device_side.take_bad_blocks()) == (7, 1, {4})
    device_side.start_stores()
    assert fake.stores == []


# -- vLLM's sleep mode: the memory of the blocks is taken away and comes back -----------------------------------------


def test_no_copy_runs_or_begins_while_the_memory_of_the_blocks_is_unmapped(fake, side):
    fake.next_takes_s = 50.0
    step(side, StepPlan(1, loads=[load_of("a", asynchronous=True)], stores=[store_of(1)]))
    (_, _, load), (_, _, store) = fake.loads[0], fake.stores[0]
    store.gathered.takes_s = 0.5
    side.suspend()
    assert (load.cancelled, store.cancelled) == (True, True)
    assert load.done.is_set() and store.gathered.is_set()

    store.end(StoreOutcome.CANCELLED)
    again = [load_of("b", seq=2, blocks=(8, 9)), load_of("c", asynchronous=True, seq=3, blocks=(10, 11))]
    report, _, received, bad = step(side, StepPlan(2, loads=again, stores=[store_of(2)]))
    assert len(fake.loads) == len(fake.stores) == 1
    assert sorted(report.dropped) == [1, 2] and {8, 9, 10, 11} <= bad and {"a", "c"} == received
    assert {lease.seq for lease in fake.released} == {2, 3}
    report, *_ = step(side, StepPlan(3, stores=[store_of(3)], failures_seen=1))
    assert report.gathered == report.dropped == [3] and len(fake.stores) == 1

    side.suspend()
    side.resume()
    fake.next_takes_s = 0.0
    step(side, StepPlan(4, stores=[store_of(4)], failures_seen=1))
    assert len(fake.stores) == 2


def test_vllm_sleeps_once_the_load_for_which_a_step_waits_has_ended(fake, device_side):
    fake.next_takes_s = 0.5
    device_side.before_step(StepPlan(1, loads=[load_of()]))
    device_side.start_loads(layerwise=True)
    device_side.suspend()
    assert fake.loads[0][2].done.is_set()


def test_vllm_may_not_sleep_while_a_copy_touches_its_memory(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)]))
    with pytest.raises(RuntimeError, match="request r still runs after 30 s"):
        side.suspend()
    assert fake.now_s == SLEEP_WAIT_S
    step(side, StepPlan(2, stores=[store_of(2)]))
    assert len(fake.stores) == 2, "vLLM did not sleep"


class OneAdapter:
    """The LoRA adapters of a worker, which has the one it told while `has`."""

    has = True

    def digest(self, number, lora):
        return f"digest of {lora}"

    def still(self, number):
        return self.has


def test_with_another_adapter_than_it_told_a_worker_neither_loads_nor_stores(fake, side):
    side._adapters = adapters = OneAdapter()
    report, *_ = step(side, StepPlan(1, weigh_adapters=[(7, "one"), (8, "other")]))
    assert report.adapters == [(7, "digest of one"), (8, "digest of other")]
    load, store = load_of(), store_of(1)
    load.adapter = store.adapter = 7
    assert step(side, StepPlan(2, loads=[load], stores=[store]))[3] == set()
    assert len(fake.loads) == len(fake.stores) == 1
    adapters.has = False
    again, plain = store_of(2), store_of(3, request="of the model itself")
    again.adapter = 7
    load.lease = load.lease._replace(seq=2)
    report, _, _, bad = step(side, StepPlan(3, loads=[load], stores=[again, plain]))
    assert bad == {4, 5, 6} and [lease.seq for lease in fake.released] == [2]
    assert report.adapters == [(7, "")]
    # Nothing of a step in which a load failed is stored.
    assert report.dropped == [2, 3] and len(fake.loads) == len(fake.stores) == 1
    report, *_ = step(side, StepPlan(4, stores=[again, plain], failures_seen=1))
    assert report.dropped == [2] and report.adapters == [(7, "")] and len(fake.stores) == 2


def test_a_worker_that_is_asked_for_its_weights_names_those_of_its_start_and_of_now(fake):
    weights = SimpleNamespace(initial="first", digest=lambda: "second")
    side = WorkerSide([GroupSide(fake, fake, slice_digest=MINE, record_blocks=2)], weights=weights, now=fake)
    assert step(side, StepPlan(1, weigh=5))[0].weights == (5, "first", "second")


def test_a_worker_without_adapters_says_that_it_cannot_tell(side):
    report, *_ = step(side, StepPlan(1, weigh_adapters=[(7, "one")]))
    assert report.adapters == [(7, "")]
