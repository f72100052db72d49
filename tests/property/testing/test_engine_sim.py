"""The simulated engine: nothing is lost, its blocks add up, and further looks change nothing."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_US, EngineModel
from kvstrata.testing.engine_sim.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvstrata.testing.engine_sim.requests import End, SimRequest

FOREVER = 1 << 100


class Arrival(NamedTuple):
    """A request of a load. `stays_us` is the time until its client leaves, None for a patient one."""

    gap_us: int
    family: int
    prompt_tokens: int
    answer_tokens: int
    stays_us: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 400),
        st.integers(0, 2),
        st.integers(1, 30),
        st.integers(1, 18),
        st.none() | st.integers(0, 2000),
    ),
    min_size=1,
    max_size=14,
)
MODELS = st.builds(
    EngineModel,
    block_tokens=st.integers(1, 5),
    kv_blocks=st.integers(48, 70),
    max_model_tokens=st.just(48),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 24),
    prefix_caching=st.booleans(),
    step_us=st.integers(1, 100),
    prefill_token_us=st.just(3.25),
    prefill_pair_us=st.just(0.125),
    decode_sequence_us=st.just(2.5),
    decode_context_token_us=st.just(0.0625),
)


def request(name: str, arrival: Arrival) -> SimRequest:
    """The prompt of each family is one sequence, cut at different lengths; answers go on with it."""
    tokens = [(arrival.family + 1) * 100 + n % 7 for n in range(60)]
    cut = arrival.prompt_tokens
    return SimRequest(name, tokens[:cut], answer=tokens[cut : cut + arrival.answer_tokens])


class Told(NamedTuple):
    """Everything that can be seen of a run."""

    times: list[list[int]]
    ends: list[tuple[End | None, int, int | None, int]]
    events: list[tuple[int, list[Event]]]
    stored: dict[int, int]


def serve(model: EngineModel, arrivals: list[Arrival], *, looks_us: list[int], checked: bool = False) -> Told:
    """Serve a load, looking at the engine at some further times."""
    engine = SimEngine(model)
    requests, calls, now = [], [], 0
    for number, arrival in enumerate(arrivals):
        now += arrival.gap_us * PS_PER_US
        each = request(str(number), arrival)
        requests.append(each)
        calls.append((now, 0, each))
        if arrival.stays_us is not None:
            calls.append((now + arrival.stays_us * PS_PER_US, 1, each))
    calls += [(at * PS_PER_US, 2, requests[0]) for at in looks_us]
    for at_ps, kind, each in sorted(calls, key=lambda call: call[:2]):
        if kind == 0:
            engine.submit(each, at_ps)
        elif kind == 1:
            engine.abort(each.name, at_ps)
        else:
            engine.advance(at_ps)
        if checked:
            engine.validate()
    engine.advance(FOREVER)
    engine.validate()
    assert engine.next_ps() is None
    assert engine.used_share == 0
    return Told(
        [each.token_times_ps for each in requests],
        [(each.end, each.ended_ps, each.cached_tokens, each.preemptions) for each in requests],
        engine.take_events(),
        engine.stored_keys(),
    )


@given(MODELS, ARRIVALS, st.lists(st.integers(0, 6000), max_size=40))
def test_blocks_add_up_at_any_time_and_no_token_is_lost(model, arrivals, looks_us):
    told = serve(model, arrivals, looks_us=looks_us, checked=True)
    for arrival, times, (end, ended_ps, _, _) in zip(arrivals, told.times, told.ends, strict=True):
        assert times == sorted(set(times))
        if end is End.ABORT:
            assert arrival.stays_us is not None
            assert len(times) < arrival.answer_tokens
        else:
            assert len(times) == arrival.answer_tokens
            assert ended_ps == times[-1]


@given(MODELS, ARRIVALS, st.lists(st.integers(0, 6000), max_size=40))
def test_further_looks_change_nothing(model, arrivals, looks_us):
    assert serve(model, arrivals, looks_us=looks_us) == serve(model, arrivals, looks_us=[])


@given(MODELS, ARRIVALS)
def test_who_follows_the_events_knows_which_blocks_are_stored(model, arrivals):
    told = serve(model, arrivals, looks_us=[])
    known: Counter[int] = Counter()
    for _, events in told.events:
        for event in events:
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or known[event.parent_block_hash]
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                known.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                known.subtract(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                known.clear()
            assert min(known.values(), default=0) >= 0
    assert +known == Counter(told.stored)
