"""The worker side: whose blocks may be touched when, and what is told to the scheduler."""

from __future__ import annotations

from functools import partial

import pytest

from kvstrata.client.calls import LoadItem, StoreOutcome
from kvstrata.connectors.vllm.boundary import guarded
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan, Store
from kvstrata.connectors.vllm.worker import SLEEP_WAIT_S, WorkerSide
from kvstrata.types import EXTENT, LeaseName, RequestIdentity

MINE, OTHER = b"\2" * 32, b"\1" * 32


class Flag:
    """An Event whose waits are recorded; `on_wait` may set it, as a copy that ends meanwhile would."""

    def __init__(self, clock):
        self.clock, self.set_now, self.takes_s, self.waited_s = clock, False, None, 0.0

    def is_set(self):
        return self.set_now

    def set(self):
        self.set_now = True

    def wait(self, timeout_s):
        if not self.set_now:
            needed = timeout_s if self.takes_s is None else min(timeout_s, self.takes_s)
            self.clock.now_s += needed
            self.waited_s += needed
            if self.takes_s is not None:
                self.takes_s -= needed
                self.set_now = self.takes_s <= 0
        return self.set_now


class FakeStoreJob:
    def __init__(self, clock, n):
        self.gathered, self.done, self.cancelled, self.bytes = Flag(clock), Flag(clock), False, 10 * n
        self.outcomes = [StoreOutcome.STORED] * n

    def wait_gathered(self, timeout_s):
        return self.gathered.wait(timeout_s)

    def cancel(self):
        self.cancelled = True

    def end(self, outcome=None):
        if outcome is not None:
            self.outcomes = [outcome] * len(self.outcomes)
        self.gathered.set()
        self.done.set()


class FakeLoadJob:
    def __init__(self, clock):
        self.done, self.failed, self.cancelled, self.bytes = Flag(clock), set(), False, 100

    def wait(self, timeout_s):
        return self.done.wait(timeout_s)

    def cancel(self):
        self.cancelled = True
        self.done.takes_s = 0.01


class Fake:
    """Client, mover and clock in one."""

    def __init__(self):
        self.now_s = 0.0
        self.stores, self.loads, self.released, self.closed = [], [], [], False
        self.next_failed, self.next_takes_s = set(), 0.0
        self.sections, self.broken = {}, False
        self.ordered, self.unordered = [], set()
        self.counted = {}

    def __call__(self):
        return self.now_s

    def identity(self, request):
        return request

    def store(self, identity, store, blocks):
        job = FakeStoreJob(self, len(blocks))
        self.stores.append((store, [list(ids) for ids in blocks], job))
        return job

    def load(self, lease, items, *, sync):
        job = FakeLoadJob(self)
        job.failed, job.done.takes_s = set(self.next_failed), self.next_takes_s
        if sync and not self.next_takes_s:
            job.done.set()
        self.loads.append((lease, items, job))
        return job

    def await_section(self, job, section, timeout_s):
        self.ordered.append((job, section))
        return section not in self.unordered

    def release(self, leases, *, group=False):
        self.released.extend(leases)

    def take_counts(self):
        counts, self.counted = self.counted, {}
        return counts

    def close(self, timeout_s=0.0):
        self.closed = True


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def side(fake):
    return WorkerSide(fake, fake, slice_digest=MINE, chunk_blocks=2, make_item=LoadItem, now=fake)


def store_of(store_id, request="r", chunks=2):
    blocks = list(range(1, 1 + 2 * chunks))
    return Store(store_id, request, RequestIdentity(), b"", b"k" * 32 * chunks, blocks, b"")


def load_of(request="r", asynchronous=False, blocks=(SKIP_BLOCK, 4, 5, 6), seq=1):
    chunks = len(blocks) // 2
    extents = b"".join(EXTENT.pack(100 * i + s, 7, 0, 0, 0) for i in range(chunks) for s in range(2))
    lease = LeaseName(b"s" * 16, seq, 1)
    return Load(request, lease, b"k" * 32 * chunks, extents, (OTHER, MINE), list(blocks), asynchronous)


def step(side, plan):
    """What vLLM calls in one step; (report, sent, received, bad blocks)."""
    side.before_step(plan)
    side.start_loads()
    side.start_stores()
    sent, received = side.finished()
    bad = side.take_bad_blocks()
    return side.report(), sent, received, bad


def test_a_worker_takes_the_extents_of_its_own_slice(fake, side):
    step(side, StepPlan(1, loads=[load_of()]))
    (_, items, _) = fake.loads[0]
    assert [item.offset_bytes for item in items] == [1, 101]
    assert [list(item.block_ids) for item in items] == [[SKIP_BLOCK, 4], [5, 6]]


def test_a_load_without_extents_for_this_slice_cannot_touch_anything_valid(fake, side):
    load = load_of()
    load.slices = (OTHER, b"\3" * 32)
    step(side, StepPlan(1, loads=[load]))
    (_, items, _) = fake.loads[0]
    assert {(item.offset_bytes, item.length_bytes) for item in items} == {(0, 0)}


def test_failed_chunks_name_the_blocks_that_must_be_computed(fake, side):
    fake.next_failed = {0}
    report, _, _, bad = step(side, StepPlan(1, loads=[load_of()]))
    assert bad == {4} and report.failures == 1
    assert step(side, StepPlan(2))[3] == set()


def test_failed_asynchronous_load_is_reported_as_received_with_its_blocks(fake, side):
    fake.next_failed, fake.next_takes_s = {1}, 5.0
    _, _, received, _ = step(side, StepPlan(1, loads=[load_of(asynchronous=True)]))
    assert received == set()
    fake.loads[0][2].done.set()
    report, _, received, bad = step(side, StepPlan(2))
    assert received == {"r"} and bad == {5, 6}
    assert report is None, "nothing computed rests on it, so no store is in doubt"
    assert step(side, StepPlan(3))[2] == set()


def test_loads_that_end_while_others_are_looked_at_are_reported(fake, side):
    """Copies end on other threads, so between any two looks."""
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


def test_waiting_for_copies_is_bounded_and_ends_with_the_copies_begun(fake, side):
    fake.next_takes_s = 50.0
    loads = [load_of("a", seq=1), load_of("b", seq=2)]
    _, _, _, _ = step(side, StepPlan(1, loads=loads))
    assert [job.cancelled for _, _, job in fake.loads] == [True, True]
    assert fake.now_s < 1.1


def test_loads_that_would_begin_too_late_fail_and_give_their_lease_back(fake, side):
    original = fake.load

    def slow(lease, items, *, sync):
        fake.now_s += 2.0
        return original(lease, items, sync=sync)

    fake.load = slow
    _, _, _, bad = step(side, StepPlan(1, loads=[load_of("a", seq=1), load_of("b", blocks=(7, 8), seq=2)]))
    assert len(fake.loads) == 1 and [lease.seq for lease in fake.released] == [2]
    assert bad == {7, 8}


def test_nothing_computed_on_a_failed_load_is_stored(fake, side):
    fake.next_failed = {0}
    report, _, _, _ = step(side, StepPlan(1, loads=[load_of()], stores=[store_of(1), store_of(2, "other")]))
    assert report.dropped == [1, 2] and fake.stores == []
    # Planned before the scheduler knew of it.
    report, _, _, _ = step(side, StepPlan(2, stores=[store_of(3)], failures_seen=0))
    assert report.dropped == [3] and fake.stores == []
    report, _, _, _ = step(side, StepPlan(3, stores=[store_of(4)], failures_seen=1))
    assert report is None and len(fake.stores) == 1


def test_stores_are_told_when_they_are_done(fake, side):
    report, _, _, _ = step(side, StepPlan(1, stores=[store_of(1, chunks=3)]))
    assert report is None
    assert fake.stores[0][1] == [[1, 2], [3, 4], [5, 6]]
    job = fake.stores[0][2]
    job.outcomes[1] = StoreOutcome.POOL_PINNED
    job.outcomes[2] = StoreOutcome.PRESENT
    job.end()
    report, _, _, _ = step(side, StepPlan(2))
    assert report.gathered == [1] and report.stored == [(1, 0b101)] and report.dropped == []


def test_blocks_of_a_finished_request_are_let_go_when_no_store_reads_them(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)]))
    _, sent, _, _ = step(side, StepPlan(2, awaited={"r", "done-before"}))
    assert sent == {"done-before"}
    fake.stores[0][2].gathered.set()
    _, sent, _, _ = step(side, StepPlan(3))
    assert sent == {"r"}
    assert step(side, StepPlan(4))[1] == set()


def test_a_store_begun_in_the_step_that_awaits_it_is_waited_for(fake, side):
    _, sent, _, _ = step(side, StepPlan(1, stores=[store_of(1)], awaited={"r"}))
    assert sent == set()
    fake.stores[0][2].end()
    assert step(side, StepPlan(2))[1] == {"r"}


def test_preempted_blocks_are_overwritten_only_after_the_copies_that_began(fake, side):
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


def test_preemption_waits_one_second_in_all(fake, side):
    step(side, StepPlan(1, stores=[store_of(n) for n in range(1, 6)]))
    side.before_step(StepPlan(2, preempted={"r"}))
    assert fake.now_s == pytest.approx(1.0)
    assert all(job.cancelled for _, _, job in fake.stores)


def test_steps_with_synchronous_loads_are_always_confirmed(fake, side):
    report, _, _, _ = step(side, StepPlan(7, loads=[load_of()]))
    assert report.step == 7 and report.failures == 0


def test_closing_gives_stores_a_moment_and_loads_none(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)], loads=[load_of("x", asynchronous=True)]))
    fake.loads[0][2].done.takes_s = None
    fake.loads[0][2].done.set_now = False
    side.close()
    assert fake.stores[0][2].cancelled and fake.loads[0][2].cancelled and fake.closed
    assert fake.now_s < 4.0


def test_counts_are_sums_since_the_last_time(fake, side):
    fake.next_failed, fake.counted = {1}, {"pinned_bytes": 7}
    step(side, StepPlan(1, loads=[load_of()]))
    counts = side.take_counts()
    assert counts["pinned_bytes"] == 7
    assert (counts["loaded_chunks"], counts["load_failed_chunks"], counts["loaded_bytes"]) == (1, 1, 100)
    assert side.take_counts() == {}


# -- blocks on a device -------------------------------------------------------------------------------------------


@pytest.fixture
def device_side(fake):
    """Two sections; layer `shared` lies in that of `first`."""
    fake.sections = {"first": 0, "second": 1, "shared": 0}
    return WorkerSide(fake, fake, slice_digest=MINE, chunk_blocks=2, make_item=LoadItem, now=fake)


def device_step(side, plan, layers=("first", "second", "shared"), *, layerwise=True):
    """What vLLM calls in one step of a model with these layers; (report, bad blocks)."""
    side.before_step(plan)
    side.start_loads(layerwise=layerwise)
    for layer in layers:
        side.wait_layer(layer)
    side.start_stores()
    side.finished()
    return side.report(), side.take_bad_blocks()


def test_each_layer_is_put_behind_its_own_section_and_nothing_is_waited_for_before_the_model(
    fake, device_side
):
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


def test_without_layers_that_ask_the_whole_model_is_put_behind_all_sections(fake, device_side):
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
def test_a_model_that_could_not_be_put_behind_its_load_in_time_computes_it_again(
    fake, device_side, section, layerwise
):
    fake.unordered = {section}
    loads, stores = [load_of()], [store_of(7)]
    report, bad = device_step(device_side, StepPlan(1, loads=loads, stores=stores), layerwise=layerwise)
    assert (report.failures, bad, report.dropped) == (1, {4, 5, 6}, [7])
    assert not fake.stores, "what was computed on it is not stored"


def test_the_blocks_of_a_load_on_a_device_are_not_let_go_before_its_copies_ended(fake, device_side):
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
    """What vLLM calls where a draft model runs behind the report; (report, bad blocks)."""
    side.before_step(plan)
    side.start_loads()
    side.finished()
    bad = side.take_bad_blocks()
    report = side.report()
    side.start_stores()
    return report, bad


def test_a_failed_load_is_told_in_its_own_step_also_when_the_report_precedes_the_stores(fake, device_side):
    fake.next_failed = {0}
    report, bad = step_with_draft_model(device_side, StepPlan(1, loads=[load_of()]))
    assert (report.step, report.failures, bad) == (1, 1, {4})


def test_a_store_dropped_after_the_report_is_told_in_the_next_one(fake, device_side):
    fake.next_failed = {0}
    plans = [
        StepPlan(1, loads=[load_of()], stores=[store_of(1)]),
        StepPlan(2, stores=[store_of(2)]),
        StepPlan(3),
    ]
    reports = [step_with_draft_model(device_side, plan)[0] for plan in plans]
    assert [(report.step, report.dropped) for report in reports] == [(1, []), (2, [1]), (3, [2])]
    assert device_side.report() is None, "each is told once"


# -- errors of ours


def guarded_step(side, plan):
    """As `step`, each call guarded as in the connector."""
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
    nothing = [Load(f"r{i}", None, b"", b"", (), [4 + i], bool(i)) for i in range(2)]
    report, _, received, bad = step(side, StepPlan(1, loads=nothing))
    assert (bad, received, report.failures, fake.loads) == ({4, 5}, {"r1"}, 1, [])


def test_synchronous_loads_fail_when_the_model_cannot_be_put_behind_them(fake, device_side):
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


def test_an_ended_load_is_told_as_failed_when_its_account_cannot_be_kept(fake, side):
    fake.next_takes_s = None
    guarded_step(side, StepPlan(1, loads=[load_of(asynchronous=True)]))
    side._ended_load = planted
    fake.loads[0][2].done.set()
    _, _, received, bad = guarded_step(side, StepPlan(2))
    assert (received, bad) == ({"r"}, {4, 5, 6})


def test_copies_of_preempted_blocks_are_stopped_also_after_an_error(fake, side):
    guarded_step(side, StepPlan(1, stores=[store_of(1)]))
    fake.stores[0][2].wait_gathered = planted
    guarded_step(side, StepPlan(2, preempted={"r"}, stores=[store_of(2, request="other")]))
    assert fake.stores[0][2].cancelled and len(fake.stores) == 2


# -- vLLM's sleep mode: the memory of the blocks is taken away and comes back -----------------------------------------


def test_no_copy_goes_on_and_none_begins_while_the_memory_of_the_blocks_is_gone(fake, side):
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


def test_memory_that_a_copy_still_touches_is_not_given_up(fake, side):
    step(side, StepPlan(1, stores=[store_of(1)]))
    with pytest.raises(RuntimeError, match="request r goes on after 30 s"):
        side.suspend()
    assert fake.now_s == SLEEP_WAIT_S
    step(side, StepPlan(2, stores=[store_of(2)]))
    assert len(fake.stores) == 2, "vLLM did not sleep"
