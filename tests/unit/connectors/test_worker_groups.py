"""The worker's side of an engine whose KV has several groups, or one of which a hit is of use only as a whole."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan
from kvstrata.connectors.vllm.worker import IDENTITIES_REMEMBERED, GroupSide, WorkerSide
from kvstrata.types import RequestIdentity
from tests.unit.connectors.test_worker_errors import Guarded, planted
from tests.unit.connectors.worker_double import MINE, OTHER, Fake, load_of, step, store_of


@pytest.fixture
def fakes():
    """The client and mover of each of two groups."""
    return [Fake(), Fake()]


@pytest.fixture
def side(fakes):
    """The second group has another slice than the first, and one block for each chunk."""
    groups = [
        GroupSide(fakes[0], fakes[0], slice_digest=MINE, record_blocks=2),
        GroupSide(fakes[1], fakes[1], slice_digest=OTHER, record_blocks=1),
    ]
    return WorkerSide(groups, by_request=True, now=fakes[0])


def loads_of(request="r", seq=1):
    """The loads of a hit of two chunks, one for each group."""
    whole, window = (load_of(request, asynchronous=True, seq=seq) for _ in range(2))
    window.group, window.blocks = 1, [9, SKIP_BLOCK]
    return [whole, window]


def jobs(fakes, number=0):
    """The jobs of each group's load of this number."""
    return [fake.loads[number][2] for fake in fakes]


def received_of(side, plan):
    """(requests received, those of them of which a load failed), as the connector tells vLLM."""
    _, _, received, bad_blocks = step(side, plan)
    assert bad_blocks == set(), "vLLM would end the engine"
    return received, side.take_bad_requests(received)


def test_each_group_copies_its_own_slice_and_as_many_blocks_as_its_records_hold(fakes, side):
    store = store_of(1)
    window = store_of(2)
    window.group, window.blocks = 1, [7, 8]
    step(side, StepPlan(1, loads=loads_of(), stores=[store, window]))
    whole, last = ([list(item.block_ids) for item in fake.loads[0][1]] for fake in fakes)
    assert (whole, last) == ([[SKIP_BLOCK, 4], [5, 6]], [[9], [SKIP_BLOCK]])
    assert [[item.offset_bytes for item in fake.loads[0][1]] for fake in fakes] == [[1, 101], [0, 100]]
    assert [fake.stores[0][1] for fake in fakes] == [[[1, 2], [3, 4]], [[7], [8]]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("failed", [[0], [1], [0, 1]])
def test_a_request_of_which_a_load_failed_is_told_once_with_the_last_of_its_loads(fakes, side, first, failed):
    for group in failed:
        fakes[group].next_failed = {1}
    received_of(side, StepPlan(1, loads=[*loads_of(), *loads_of("other", seq=2)]))
    for job in jobs(fakes, 1):
        job.failed = set()
        job.done.set()
    jobs(fakes)[first].done.set()
    assert received_of(side, StepPlan(2)) == ({"other"}, set())
    jobs(fakes)[1 - first].done.set()
    assert received_of(side, StepPlan(3)) == ({"r"}, {"r"})
    assert side.take_bad_requests(["r"]) == set()
    # The request may be loaded again.
    for fake in fakes:
        fake.next_failed = set()
    received_of(side, StepPlan(4, loads=loads_of(seq=3)))
    for job in jobs(fakes, 2):
        job.done.set()
    assert received_of(side, StepPlan(5)) == ({"r"}, set())


def test_a_hit_whose_loads_never_begin_is_received_at_once_and_every_group_gives_its_lease_back(fakes, side):
    side.suspend()
    assert received_of(side, StepPlan(1, loads=loads_of())) == ({"r"}, {"r"})
    assert [[lease.seq for lease in fake.released] for fake in fakes] == [[1], [1]]
    nothing = Load("q", None, RequestIdentity(), b"", b"", (), [4], True)
    assert received_of(side, StepPlan(2, loads=[nothing])) == ({"q"}, {"q"})


def test_an_error_after_loads_have_ended_fails_their_request_when_all_have_ended(fakes, side):
    guarded = Guarded(side)
    step(guarded, StepPlan(1, loads=loads_of()))
    jobs(fakes)[0].done.set()
    side._ended_load = planted
    assert step(guarded, StepPlan(2))[2] == set()
    jobs(fakes)[1].done.set()
    assert step(guarded, StepPlan(3))[2] == {"r"}
    assert guarded.take_bad_requests({"r"}) == {"r"}


def test_close_ends_the_copies_movers_and_clients_of_all_groups(fakes):
    clients = [Fake(), Fake()]
    groups = [
        GroupSide(client, mover, slice_digest=MINE, record_blocks=2)
        for client, mover in zip(clients, fakes, strict=True)
    ]
    side = WorkerSide(groups, by_request=True, now=fakes[0])
    step(side, StepPlan(1, loads=loads_of()))
    side.close()
    assert all(job.cancelled for job in jobs(fakes))
    assert all(each.closed for each in (*fakes, *clients))


def test_a_group_remembers_a_bounded_number_of_identities(fakes):
    asked = []
    fakes[0].identity = lambda request: asked.append(request) or request
    group = GroupSide(fakes[0], fakes[0], slice_digest=MINE, record_blocks=2)
    requests = [RequestIdentity(tenant=str(n)) for n in range(IDENTITIES_REMEMBERED + 1)]
    for request in (*requests, requests[-1], requests[0]):
        assert group.identity(request) == request
    assert asked == [*requests, requests[0]]
