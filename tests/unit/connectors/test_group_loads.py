"""Hits of an engine in which a hit is of use only as a whole: what vLLM is offered, what is loaded, and failures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connectors.vllm.groups import whole_group
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK
from kvstrata.types import EXTENT
from tests.harness.scheduler_side import (
    BLOCK,
    CHUNK,
    SLICES,
    FakeClient,
    GuardedSide,
    arrive,
    ask,
    chunks_of,
    step,
)
from tests.unit.connectors.groups_double import FULL, STATES, make_grouped, table_of, window_group

WINDOW = window_group(16)
KINDS = {
    "full and window": (FULL, WINDOW),
    "window": (window_group(16, number=0),),
    "full and states": (FULL, STATES),
    "two of full attention": (FULL, whole_group(BLOCK, CHUNK, number=1)),
}


@pytest.fixture(params=KINDS)
def groups(request):
    return KINDS[request.param]


def hit_of(groups, n_tokens=41, hits=4, **changes):
    """(side, client, a request for which `hits` chunks were found, what vLLM is offered)"""
    client = FakeClient(hits=hits)
    side, _ = make_grouped(*groups, client=client, **changes)
    request = arrive(side, n_tokens)
    return side, client, request, ask(side, request)


def tables_of(groups, n_tokens=41, gone=16):
    """A request's block tables; of windows and states the blocks of the first `gone` tokens are not there."""
    tables = []
    for group in groups:
        if group is STATES:
            tables.append([0, 0, 0, 304, 305, 306])
        else:
            tables.append(table_of(n_tokens, 100 + 100 * group.number, gone if group.span else 0))
    return tables


@pytest.mark.parametrize("hits", [4, 5])
def test_the_index_is_looked_at_after_a_lookup_only_if_that_did_not_find_all(hits):
    client, looked = FakeClient(hits=hits), []
    client.peek_whole = lambda identity, chain: looked.append(chunks_of(chain)) or 4
    side, _ = make_grouped(*KINDS["full and window"], client=client)
    request = arrive(side, 41)
    ask(side, request)
    assert looked == ([5] if hits < 5 else [])


@given(n_tokens=st.integers(1, 100), hits=st.integers(0, 15), computed_blocks=st.integers(0, 25))
def test_an_offer_ends_with_a_chunk_and_leaves_a_token_to_compute(n_tokens, hits, computed_blocks):
    computed = min(computed_blocks * BLOCK, (n_tokens - 1) // BLOCK * BLOCK)
    for kinds in KINDS.values():
        client = FakeClient(hits=hits)
        side, _ = make_grouped(*kinds, client=client, settings={"load_mode": "sync"})
        request = arrive(side, n_tokens)
        tokens, asynchronous = ask(side, request, computed)
        end = min(hits, (n_tokens - 1) // CHUNK) * CHUNK
        assert tokens == max(0, end - computed)
        if tokens:
            assert asynchronous and (computed + tokens) % CHUNK == 0 and computed + tokens < n_tokens
        assert all(call.n_asked <= (n_tokens - 1) // CHUNK for call in client.calls)


def test_each_group_loads_what_a_hit_needs_of_it_under_one_lease():
    side, client, request, (tokens, _) = hit_of((FULL, WINDOW))
    side.allocated(request, tables_of((FULL, WINDOW), gone=20), tokens)
    whole, window = step(side).loads
    assert (whole.group, whole.blocks) == (0, list(range(100, 108)))
    assert (window.group, window.blocks) == (1, [SKIP_BLOCK, 205, 206, 207])
    assert window.chain == whole.chain[-64:] and len(whole.chain) == 4 * 32
    rows = [[extent[0] for extent in EXTENT.iter_unpack(load.extents)] for load in (whole, window)]
    assert rows == [list(range(8)), [4, 5, 6, 7]] and whole.slices == window.slices == SLICES
    assert whole.lease == window.lease and client.handed_on == [whole.lease] and client.leases == []
    assert whole.asynchronous and window.asynchronous


def test_of_states_only_the_last_one_is_loaded():
    side, _, request, (tokens, _) = hit_of((FULL, STATES))
    side.allocated(request, tables_of((FULL, STATES)), tokens)
    _, states = step(side).loads
    assert (states.blocks, len(states.chain)) == ([304], 32)


def test_a_request_of_which_a_load_failed_is_not_loaded_again_and_stored_from_its_start():
    side, client, request, (tokens, _) = hit_of((FULL, WINDOW))
    side.allocated(request, tables_of((FULL, WINDOW)), tokens)
    assert len(step(side).loads) == 2
    side.heard([], [request.request_id], [], [request.request_id])
    assert ask(side, request) == (0, False) and len(client.calls) == 1
    tables = {request.request_id: tuple(tables_of((FULL, WINDOW), gone=0))}
    stores = step(side, [(request, 0, 41)], tables=tables).stores
    assert [(store.group, store.blocks) for store in stores] == [
        (0, list(range(100, 110))),
        (1, list(range(206, 210))),
    ]


def test_an_error_after_loads_were_planned_hands_their_lease_on_once(groups):
    side, client, request, (tokens, _) = hit_of(groups)
    client.fails = "release"
    guarded = GuardedSide(side)
    guarded.allocated(request, tables_of(groups), tokens)
    guarded.take_events()
    loads = step(guarded).loads
    assert len(loads) == len(groups) and {load.lease for load in loads} == set(client.handed_on)
    assert client.leases == []
