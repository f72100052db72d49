"""The choice of an engine, and the budget of retries."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.gateway.picking import Candidate, heaviest, pick
from kvstrata.gateway.retries import AT_ONCE, RetryBudget

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
FLEETS = NAMES.flatmap(
    lambda names: st.tuples(
        *(
            st.builds(Candidate, st.just(name), st.integers(0, 5), st.sampled_from([0.25, 0.5, 1.0]))
            for name in names
        )
    )
)


@given(FLEETS, st.text(), st.text(), st.integers(0, 1 << 40), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_engines(
    fleet: tuple[Candidate, ...], session: str, word: str, turn: int, random: object
) -> None:
    mixed = list(fleet)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    for policy in ("least_loaded", "session"):
        chosen = {
            order[pick(policy, order, session=session, word=word, turn=turn)].name
            for order in (list(fleet), mixed)
        }
        assert len(chosen) == 1


@given(FLEETS, st.text(), st.integers(0, 1 << 40))
def test_least_loaded_takes_none_that_has_more_for_its_share(
    fleet: tuple[Candidate, ...], word: str, turn: int
) -> None:
    chosen = fleet[pick("least_loaded", fleet, session="", word=word, turn=turn)]
    assert (chosen.in_flight + 1) / chosen.share == min((one.in_flight + 1) / one.share for one in fleet)


@given(NAMES, st.integers(0, 1 << 40))
def test_round_robin_takes_each_once_in_a_round(names: list[str], turn: int) -> None:
    fleet = [Candidate(name, 3, 1.0) for name in names]
    round_of = [pick("round_robin", fleet, session="s", word="", turn=turn + i) for i in range(len(names))]
    assert sorted(round_of) == list(range(len(names)))


@given(NAMES.filter(lambda names: len(names) > 1), st.text())
def test_an_engine_that_leaves_moves_only_its_own_sessions(names: list[str], word: str) -> None:
    chosen = names[heaviest(word, names)]
    for gone in names:
        rest = [name for name in names if name != gone]
        moved = rest[heaviest(word, rest)]
        assert moved == chosen or gone == chosen


def test_sessions_spread_evenly() -> None:
    names = [f"10.0.0.{i}:8000" for i in range(8)]
    counts = collections.Counter(heaviest(f"session-{i}", names) for i in range(8_000))
    assert all(850 < counts[i] < 1_150 for i in range(8)), counts


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
def test_retries_stay_within_their_share_of_requests(share: float, steps: list[bool]) -> None:
    budget = RetryBudget(share)
    requests = taken = 0
    for is_request in steps:
        if is_request:
            budget.request()
            requests += 1
        else:
            taken += budget.take()
        assert taken <= AT_ONCE + requests * share + 1e-6
        assert 0 <= budget.left <= AT_ONCE
