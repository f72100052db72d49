"""Where copies of hot prefixes are to be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.controller import copies
from kvstrata.controller.copies import FIRST_WORTH, LESS, MORE_WORTH, Copies, Place, next_place, wanted
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, Shared, SharedPrefix
from tests.harness.known_members import KEY
from tests.harness.waiting import HANG_S
from tests.unit.controller.member_messages import register

WORTH = st.floats(0, 1e6)
COUNT = st.integers(1, 12)
PLACES = st.lists(
    st.builds(
        Place,
        name=st.text("abcdef", min_size=1, max_size=3),
        zone=st.sampled_from(["", "", "east", "west"]),
        host=st.sampled_from(["h1", "h2", "h3"]),
        has=st.integers(0, 9),
        load=st.floats(0, 1),
    ),
    max_size=8,
    unique_by=lambda one: one.name,
)


@given(WORTH, COUNT, COUNT)
def test_the_wanted_number_is_at_least_one_at_most_all_and_grows_with_the_worth(worth, before, places):
    number = wanted(worth, before, places)
    assert 1 <= number <= places
    assert wanted(worth * 2, before, places) >= number
    assert worth >= FIRST_WORTH * LESS or number == 1


@given(st.integers(1, 5), st.floats(0.75, 1.25))
def test_noise_around_a_bound_changes_the_wanted_number_once_at_most(bound, noise):
    worth, seen = FIRST_WORTH * MORE_WORTH ** (bound - 1), [1]
    for each in (1.0, noise, 1.0, noise, 1.0):
        seen.append(wanted(worth * each, seen[-1], 12))
    assert seen == sorted(seen) and seen[-1] == bound + 1


@given(PLACES, st.data(), COUNT)
def test_copies_are_made_until_enough_instances_and_zones_have_the_prefix_and_no_further(
    places, data, number
):
    n_holders = data.draw(st.integers(0, len(places)))
    holders, others = places[:n_holders], places[n_holders:]

    def zones(some: list[Place]) -> set[str]:
        return {one.zone or one.host for one in some}

    ways, had = zones(places), len(holders)
    while (to := next_place(holders, others, number)) is not None:
        new = zones(others) - zones(holders)
        assert to in others and (not new or (to.zone or to.host) in new)
        holders, others = [*holders, to], [one for one in others if one is not to]
    if not had:
        assert holders == [], "nobody has it"
        return
    assert len(holders) >= min(number, len(places))
    assert len(zones(holders)) >= min(number, len(ways))
    assert len(holders) <= max(number, had + min(number, len(ways)) - 1)


NUMBERS = st.sampled_from([0, 1, 2, 3, MAX_PEER_KEYS])
PREFIXES = st.builds(
    SharedPrefix,
    root=st.just(bytes(32)),
    chain=st.builds(bytes, st.sampled_from([32, 33, 64, 96, 32 * MAX_PEER_KEYS])),
    slices=st.builds(lambda n: [bytes(32)] * max(1, n), NUMBERS),
    spans=st.builds(lambda n: [1] * n, NUMBERS),
    record_bytes=st.builds(lambda n: [4096] * n, NUMBERS),
    tenant=st.just(""),
    requests_s=st.floats(0, 1e9),
    own_chunks=st.integers(1, 2 * MAX_PEER_KEYS),
    compute_s=st.floats(0, 1e9),
)


@given(st.builds(Shared, st.lists(PREFIXES, max_size=3), st.just([7]), st.just([]), st.floats(1e-9, 1e9)))
def test_what_an_instance_tells_that_does_not_fit_is_ignored(told):
    cluster: Any = SimpleNamespace(
        settings=SimpleNamespace(copies_mb_s=1.0), clock=SimpleNamespace(monotonic_s=lambda: 0.0)
    )
    made = Copies(cluster)
    asyncio.run(made._learn([], [told]))
    for row in (made._hot, made.page()["prefixes"]):
        assert len(row) <= 1
    for hot in made._hot.values():
        assert len(hot.named.keys) <= 32 * MAX_PEER_KEYS
        assert hot.own_chunks * hot.chunk_bytes > 0


async def test_a_repair_begins_as_soon_as_an_instance_is_gone(cluster, monkeypatch):
    monkeypatch.setattr(copies, "STEP_S", 1e9)  # so that nothing but a wake begins another step
    steps = asyncio.Queue[float]()
    monkeypatch.setattr(cluster.copies, "bytes_s", 1.0)
    monkeypatch.setattr(cluster.copies, "step", steps.put)
    keeping = asyncio.create_task(cluster.copies.keep())
    member = cluster.members.register(register(), KEY, 0.0)
    await steps.get()
    cluster.members.remove(member)  # as at its death
    cluster.settle()
    assert cluster.copies.wake.is_set()
    await asyncio.wait_for(steps.get(), HANG_S)
    keeping.cancel()
