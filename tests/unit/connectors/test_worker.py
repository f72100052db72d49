"""The connector's worker side: when copies may touch which blocks, and what it reports to the scheduler."""

from __future__ import annotations

from functools import partial

import pytest

from kvstrata.client.handles import StoreOutcome
from kvstrata.connectors.vllm.metadata import StepPlan
from kvstrata.connectors.vllm.worker import SLEEP_WAIT_S
from tests.unit.connectors.worker_double import OTHER, load_of, step, store_of

pytestmark = pytest.mark.usefixtures("patience_of_production")


def test_a_load_without_extents_for_this_slice_names_empty_extents(fake, side):
    load = load_of()
    load.slices = (OTHER, b"\3" * 32)
    step(side, StepPlan(1, loads=[load]))
    (_, items, _) = fake.loads[0]
    assert {(item.offset_bytes, item.length_bytes) for item in items} == {(0, 0)}


def test_a_failed_asynchronous_load_is_reported_as_received_with_its_bad_blocks(fake, side):
    fake.next_failed, fake.next_takes_s = {1}, 5.0
    _, _, received, _ = step(side, StepPlan(1, loads=[load_of(asynchronous=True)]))
    assert received == set()
    fake.loads[0][2].done.set()
    report, _, received, bad = step(side, StepPlan(2))
    assert received == {"r"} and bad == {5, 6}
    assert report is None, "nothing was computed on the load, so no store is in doubt"
    assert step(side, StepPlan(3))[2] == set()


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


def test_loads_that_would_begin_too_late_fail_and_give_their_lease_back(fake, side):
    original = fake.load

    def slow(identity, lease, items, *, sync):
        fake.now_s += 2.0
        return original(identity, lease, items, sync=sync)

    fake.load = slow
    _, _, _, bad = step(side, StepPlan(1, loads=[load_of("a", seq=1), load_of("b", blocks=(7, 8), seq=2)]))
    assert len(fake.loads) == 1 and [lease.seq for lease in fake.released] == [2]
    assert bad == {7, 8}


def test_stores_are_reported_once_they_are_done(fake, side):
    report, _, _, _ = step(side, StepPlan(1, stores=[store_of(1, chunks=3)]))
    assert report is None
    assert fake.stores[0][1] == [[1, 2], [3, 4], [5, 6]]
    job = fake.stores[0][2]
    job.outcomes[1] = StoreOutcome.POOL_PINNED
    job.outcomes[2] = StoreOutcome.PRESENT
    job.end()
    report, _, _, _ = step(side, StepPlan(2))
    assert report.gathered == [1] and report.stored == [(1, 0b101)] and report.dropped == []


def test_blocks_are_reported_as_read_once_before_the_server_has_confirmed_the_store(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)]))
    fake.stores[0][2].gathered.set()
    report, _, _, _ = step(side, StepPlan(2))
    assert (report.gathered, report.stored) == ([1], [])
    assert step(side, StepPlan(3))[0] is None
    fake.stores[0][2].done.set()
    report, _, _, _ = step(side, StepPlan(4))
    assert (report.gathered, report.stored) == ([], [(1, 0b11)])


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


def test_a_step_waits_for_the_begun_copies_of_preempted_blocks(fake, side):
    step(side, StepPlan(1, stores=[store_of(1), store_of(2, "other")]))
    (_, _, lost), (_, _, kept) = fake.stores
    lost.gathered.takes_s = 0.2
    side.before_step(StepPlan(2, preempted={"r"}))
    assert lost.cancelled and not kept.cancelled
    assert lost.gathered.is_set() and fake.now_s == pytest.approx(0.2)
    lost.end(StoreOutcome.CANCELLED)
    side.start_loads()
    side.start_stores()
    side.finished()
    assert side.report().dropped == [1]


def test_a_preemption_waits_one_second_for_all_copies_together(fake, side):
    step(side, StepPlan(1, stores=[store_of(n) for n in range(1, 6)]))
    side.before_step(StepPlan(2, preempted={"r"}))
    assert fake.now_s == pytest.approx(1.0)
    assert all(job.cancelled for _, _, job in fake.stores)


def test_steps_with_synchronous_loads_are_always_confirmed(fake, side):
    report, _, _, _ = step(side, StepPlan(7, loads=[load_of()]))
    assert report.step == 7 and report.failures == 0


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


def test_without_layers_that_ask_the_whole_model_waits_for_all_sections(fake, device_side):
    report, bad = device_step(device_side, StepPlan(1, loads=[load_of()]), (), layerwise=False)
    assert [section for _, section in fake.ordered] == [None]
    assert (report.failures, bad) == (0, set())


@pytest.mark.parametrize("layers", [("first", "shared"), ()])
def test_a_layer_that_did_not_ask_fails_the_load(fake, device_side, layers):
    report, bad = device_step(device_side, StepPlan(1, loads=[load_of()]), layers)
    assert (report.failures, bad) == (1, {4, 5, 6})
    report, bad = device_step(device_side, StepPlan(2, loads=[load_of(seq=2)]))
    assert (report.failures, bad) == (1, set())


@pytest.mark.parametrize(("section", "layerwise"), [(1, True), (None, False)])
def test_a_load_that_the_model_could_not_be_ordered_behind_in_time_is_computed_again(
    fake, device_side, section, layerwise
):
    fake.unordered = {section}
    loads, stores = [load_of()], [store_of(7)]
    report, bad = device_step(device_side, StepPlan(1, loads=loads, stores=stores), layerwise=layerwise)
    assert (report.failures, bad, report.dropped) == (1, {4, 5, 6}, [7])
    assert not fake.stores, "chunks computed on the failed load are not stored"


def test_blocks_of_a_load_on_a_device_are_kept_until_its_copies_have_ended(fake, device_side):
    fake.next_takes_s = 50.0
    device_step(device_side, StepPlan(1, loads=[load_of()]))
    [(_, _, job)] = fake.loads
    assert job.cancelled and job.done.is_set() and fake.now_s < 1.1


def test_a_broken_worker_says_so_in_each_report(fake, device_side):
    assert device_step(device_side, StepPlan(1))[0] is None
    fake.broken = True
    assert device_step(device_side, StepPlan(2))[0].broken


# -- a step that is reported before its stores begin ----------------------------------------------------------------


def step_with_draft_model(side, plan):
    """Make vLLM's calls of a step in which a draft model runs after the report; returns (report, bad blocks)."""
    side.before_step(plan)
    side.start_loads()
    side.finished()
    bad = side.take_bad_blocks()
    report = side.report()
    side.start_stores()
    return report, bad


def test_a_store_dropped_after_the_report_is_in_the_next_report(fake, device_side):
    fake.next_failed = {0}
    plans = [
        StepPlan(1, loads=[load_of()], stores=[store_of(1)]),
        StepPlan(2, stores=[store_of(2)]),
        StepPlan(3),
    ]
    reports = [step_with_draft_model(device_side, plan)[0] for plan in plans]
    assert [(report.step, report.dropped) for report in reports] == [(1, []), (2, [1]), (3, [2])]
    assert device_side.report() is None, "each dropped store is reported once"


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

    side.suspend()
    side.resume()
    fake.next_takes_s = 0.0
    step(side, StepPlan(3, stores=[store_of(3)], failures_seen=1))
    assert len(fake.stores) == 2


def test_vllm_may_not_sleep_while_a_copy_touches_its_memory(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)]))
    with pytest.raises(RuntimeError, match="request r goes on after 30 s"):
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


def test_a_worker_without_adapters_says_that_it_cannot_tell(side):
    report, *_ = step(side, StepPlan(1, weigh_adapters=[(7, "one")]))
    assert report.adapters == [(7, "")]
