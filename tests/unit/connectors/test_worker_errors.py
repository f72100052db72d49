"""Errors of ours in the connector's worker side: it is off from then on, and no block is freed or used too early."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.metadata import StepPlan
from tests.unit.connectors.worker_double import load_of, step, store_of


class Guarded:
    """The worker's side as the connector calls it: after an error it is off, and the call is made again."""

    def __init__(self, side):
        self.side = side

    def __getattr__(self, name):
        def call(*arguments):
            try:
                return getattr(self.side, name)(*arguments)
            except RuntimeError:
                self.side = self.side.turn_off()
                return getattr(self.side, name)(*arguments)

        return call


def planted(*arguments, **options):
    raise RuntimeError("planted")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("broken", ["load", "identity", "_take_up"])
def test_loads_and_stores_that_an_error_keeps_from_beginning_end_and_give_their_leases_back(
    fake, side, broken, asynchronous
):
    setattr(side if broken == "_take_up" else fake, broken, planted)
    loads = [load_of(f"r{i}", asynchronous, blocks=(1 + 2 * i, 2 + 2 * i), seq=i) for i in range(2)]
    guarded = Guarded(side)
    plan = StepPlan(1, loads=loads, stores=[store_of(7)], awaited={"r"})
    report, sent, received, bad = step(guarded, plan)
    assert bad == {1, 2, 3, 4} and {lease.seq for lease in fake.released} == {0, 1}
    assert received == ({"r0", "r1"} if asynchronous else set())
    assert (report.failures, report.gathered, report.broken, sent) == (1, [7], True, {"r"})
    later = StepPlan(2, loads=[load_of("r2")], stores=[store_of(8)], awaited={"r2"})
    report, sent, _, bad = step(guarded, later)
    assert (report.gathered, sent, bad, fake.stores, fake.loads) == ([8], {"r2"}, {4, 5, 6}, [], [])
    guarded.close()
    assert fake.closed


def test_synchronous_loads_fail_when_the_model_cannot_be_ordered_behind_them(fake, device_side):
    fake.await_section = planted
    fake.next_takes_s = 0.5
    guarded = Guarded(device_side)
    report, _, _, bad = step(guarded, StepPlan(1, loads=[load_of()]))
    assert (report.failures, bad, fake.loads[0][2].cancelled) == (1, {4, 5, 6}, True)
    assert step(guarded, StepPlan(2))[1:] == (set(), set(), set()), "reported once"


def test_blocks_that_a_copy_still_touches_are_freed_after_it_has_ended(fake, side):
    guarded = Guarded(side)
    fake.next_takes_s = None
    plan = StepPlan(1, loads=[load_of("l", asynchronous=True)], stores=[store_of(1)], awaited={"r"})
    assert step(guarded, plan)[1:] == (set(), set(), set())
    side._settle_stores = planted
    assert step(guarded, StepPlan(2))[1:] == (set(), set(), set())
    (_, _, storing), (_, _, loading) = fake.stores[0], fake.loads[0]
    assert storing.cancelled and loading.cancelled
    storing.gathered.set()
    loading.done.set()
    report, sent, received, bad = step(guarded, StepPlan(3))
    assert (report.gathered, sent, received, bad) == ([1], {"r"}, {"l"}, {4, 5, 6})
