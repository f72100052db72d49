"""Errors of ours in the connector's worker side: loads fail, stores are dropped, no block is freed too early."""

from __future__ import annotations

import pytest

from kvstrata.connectors.boundary import guarded
from kvstrata.connectors.vllm.metadata import Load, StepPlan
from kvstrata.types import RequestIdentity
from tests.unit.connectors.worker_double import load_of, step, store_of


def guarded_step(side, plan):
    """As `step`, with each call guarded as in the connector."""
    run = guarded(None, lambda plan: side.step_failed(plan))(side.before_step)
    run(plan)
    guarded(None, lambda: side.loads_failed())(side.start_loads)()
    guarded(None, lambda: side.stores_failed())(side.start_stores)()
    sent, received = guarded(None, lambda: side.finished_failed())(side.finished)()
    bad = side.take_bad_blocks()
    return guarded(None, lambda: side.report_failed())(side.report)(), sent, received, bad


def planted(*arguments, **options):
    raise RuntimeError("planted")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("broken", ["load", "make_item"])
def test_loads_that_an_error_keeps_from_beginning_fail_and_give_their_leases_back(
    fake, side, broken, asynchronous
):
    if broken == "load":
        fake.load = planted
    else:
        side._make_item = planted
    loads = [load_of(f"r{i}", asynchronous, blocks=(1 + 2 * i, 2 + 2 * i), seq=i) for i in range(2)]
    report, _, received, bad = guarded_step(side, StepPlan(1, loads=loads, stores=[store_of(7)]))
    assert bad == {1, 2, 3, 4} and [lease.seq for lease in fake.released] == [0, 1]
    if asynchronous:
        assert received == {"r0", "r1"} and report is None and len(fake.stores) == 1
    else:
        assert (report.failures, report.dropped, received) == (1, [7], set())


def test_a_load_that_was_never_planned_fails_without_a_copy(fake, side):
    nothing = [Load(f"r{i}", None, RequestIdentity(), b"", b"", (), [4 + i], bool(i)) for i in range(2)]
    report, _, received, bad = step(side, StepPlan(1, loads=nothing))
    assert (bad, received, report.failures, fake.loads) == ({4, 5}, {"r1"}, 1, [])


def test_synchronous_loads_fail_when_the_model_cannot_be_ordered_behind_them(fake, device_side):
    fake.await_section = planted
    fake.next_takes_s = 0.5
    report, _, _, bad = guarded_step(device_side, StepPlan(1, loads=[load_of()]))
    assert (report.failures, bad, fake.loads[0][2].cancelled) == (1, {4, 5, 6}, True)
    assert guarded_step(device_side, StepPlan(2)) == (None, set(), set(), set()), "told once"


def test_stores_that_an_error_keeps_from_beginning_are_dropped_and_blocks_are_freed(fake, side):
    fake.store = planted
    plan = StepPlan(1, stores=[store_of(1), store_of(2)], awaited={"r"})
    report, sent, _, _ = guarded_step(side, plan)
    assert (report.dropped, sent) == ([1, 2], {"r"})
    assert guarded_step(side, StepPlan(2))[1] == set(), "told once"


def test_no_error_frees_blocks_that_a_store_still_reads(fake, side):
    guarded_step(side, StepPlan(1, stores=[store_of(1)], awaited={"r"}))
    side._settle_stores = planted
    assert guarded_step(side, StepPlan(2))[1] == set()
    fake.stores[0][2].end()
    assert guarded_step(side, StepPlan(3))[1] == {"r"}


def test_an_ended_load_is_reported_as_failed_when_its_result_cannot_be_recorded(fake, side):
    fake.next_takes_s = None
    guarded_step(side, StepPlan(1, loads=[load_of(asynchronous=True)]))
    side._ended_load = planted
    fake.loads[0][2].done.set()
    _, _, received, bad = guarded_step(side, StepPlan(2))
    assert (received, bad) == ({"r"}, {4, 5, 6})


def test_copies_of_preempted_blocks_are_stopped_even_after_an_error(fake, side):
    guarded_step(side, StepPlan(1, stores=[store_of(1)]))
    fake.stores[0][2].wait_gathered = planted
    guarded_step(side, StepPlan(2, preempted={"r"}, stores=[store_of(2, request="other")]))
    assert fake.stores[0][2].cancelled and len(fake.stores) == 2
