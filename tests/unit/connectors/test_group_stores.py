"""What is stored of windows and states, and how long their blocks stay pinned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connectors.vllm.metadata import WorkerReport
from tests.harness.scheduler_side import (
    BLOCK,
    CHUNK,
    FakeClient,
    GuardedSide,
    arrive,
    ask,
    make_request,
    step,
)
from tests.unit.connectors.groups_double import FULL, STATES, make_grouped, table_of, window_group

WINDOW_BLOCKS = 500
"""Number of the first block of a request's windows; its blocks of full attention begin with 100."""


def chunks_of(store):
    """Numbers of the chunks of a store: the parent's key is that of the chunk before the first."""
    return len(store.chain) // 32


class Prompt:
    """A request that vLLM computes step by step; it frees blocks that no window sees before each step."""

    def __init__(self, side, request, window):
        self.side, self.request, self.window = side, request, window
        self.computed = 0
        self.stores = []
        side.on_new_request(request)
        ask(side, request)

    def step(self, tokens, **options):
        gone = max(0, self.computed - self.window + 1)
        length = self.computed + tokens
        tables = (table_of(length, 100), table_of(length, WINDOW_BLOCKS, gone))
        plan = step(
            self.side,
            [(self.request, self.computed, tokens)],
            tables={self.request.request_id: tables},
            **options,
        )
        self.computed = length
        self.stores += plan.stores
        return plan

    def run(self, sizes):
        """Steps of these sizes, over and over, until the prompt is computed."""
        while self.computed < self.request.num_prompt_tokens:
            size = sizes[len(self.stores) % len(sizes)]
            self.step(min(size, self.request.num_prompt_tokens - self.computed))

    def stored_tokens(self):
        """Tokens whose KV of the windows is stored."""
        blocks = [
            block - WINDOW_BLOCKS for store in self.stores if store.group == 1 for block in store.blocks
        ]
        assert len(blocks) == len(set(blocks)), "a block is stored twice"
        return {at * BLOCK + token for at in blocks for token in range(BLOCK)}


def seen_from(end, window):
    """Tokens before `end` that the window of the token at `end` covers."""
    return set(range(max(0, end - window), end))


@given(
    n_tokens=st.integers(1, 120),
    window=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    junction=st.integers(0, 15),
)
def test_a_later_lookup_finds_the_windows_that_it_needs_and_little_else_is_stored(
    n_tokens, window, sizes, junction
):
    client = FakeClient()
    client.whole = junction
    group = window_group(window)
    side, pool = make_grouped(FULL, group, client=client)
    prompt = Prompt(side, make_request(n_tokens), window)
    prompt.run(sizes)
    stored = prompt.stored_tokens()
    again = (n_tokens - 1) // CHUNK * CHUNK
    longer = n_tokens // CHUNK * CHUNK
    shared = min(junction * CHUNK, again)
    assert seen_from(again, window) | seen_from(longer, window) | seen_from(shared, window) <= stored
    ends = {again, longer, junction * CHUNK}
    most = {chunk for end in ends for chunk in range(end // CHUNK - group.span, end // CHUNK) if chunk >= 0}
    assert {token // CHUNK for token in stored} <= most
    assert len(stored) <= len(most) * group.record_blocks * BLOCK
    whole = [block for store in prompt.stores if store.group == 0 for block in store.blocks]
    assert whole == list(range(100, 100 + longer // BLOCK))
    for store in prompt.stores:
        assert len(store.blocks) == chunks_of(store) * (FULL, group)[store.group].record_blocks
    windows = [block for store in prompt.stores if store.group for block in store.blocks]
    assert pool.pinned == dict.fromkeys(windows, 1)


def test_windows_in_the_answer_are_stored_with_the_answer():
    side, _ = make_grouped(FULL, window_group(4), settings={"save_decode_cache": True})
    prompt = Prompt(side, make_request(20), 4)
    prompt.step(20)
    for token in range(20):
        prompt.request.all_token_ids.append(token)
        prompt.step(1)
    stored = prompt.stored_tokens()
    assert {end for end in range(CHUNK, 41, CHUNK) if seen_from(end, 4) <= stored} == {16, 24, 32, 40}


OFFERS = [(1, 700, 8), (1, 701, 12), (1, 702, 16), (2, 703, 24), (1, 704, 32)]
"""At a chunk's end, within a chunk, at a chunk's end, of an unknown group, after what is computed of the prompt."""


def test_states_are_stored_when_vllm_offers_them_at_the_end_of_a_chunk():
    side, pool = make_grouped(FULL, STATES)
    request = arrive(side, 30)
    tables = {request.request_id: (table_of(30, 100), [0, 0, 704, 705])}
    plan = step(side, [(request, 0, 30)], tables=tables, states={request.request_id: OFFERS})
    whole, *states = plan.stores
    assert (whole.group, len(whole.blocks)) == (0, 6)
    assert [(store.group, store.blocks) for store in states] == [(1, [700]), (1, [702])]
    assert [store.chain for store in states] == [whole.chain[:32], whole.chain[32:64]]
    assert [store.parent for store in states] == [b"", whole.chain[:32]]
    assert pool.pinned == {700: 1, 702: 1}


@pytest.mark.parametrize("how", ["preempted", "unknown", "skipped"])
def test_states_of_a_request_that_is_not_stored_are_left(how):
    side, pool = make_grouped(FULL, STATES)
    request = make_request(30, **({"prompt_embeds": b"x"} if how == "skipped" else {}))
    if how != "unknown":
        side.on_new_request(request)
    plan = step(
        side,
        preempted=[request.request_id] if how == "preempted" else [],
        states={request.request_id: OFFERS},
    )
    assert plan.stores == [] and pool.pinned == {}


def stored_window(side):
    """(The request, the store of its window) of a prompt that was computed in one step."""
    request = arrive(side, 40)
    tables = {request.request_id: (table_of(40, 100), table_of(40, WINDOW_BLOCKS))}
    _, window = step(side, [(request, 0, 40)], tables=tables).stores
    assert window.group == 1 and window.blocks
    return request, window


def said(store, *, dropped=False, stored=True):
    """What a worker says last about a store."""
    names = [store.store_id]
    return WorkerReport(
        1,
        gathered=list(names),
        dropped=list(names) if dropped else [],
        stored=[(store.store_id, 3)] if stored and not dropped else [],
    )


def planted(*arguments):
    raise RuntimeError("planted")


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_pins_last_until_the_store_is_gathered_or_dropped(dropped, ended):
    side, pool = make_grouped(FULL, window_group(16))
    request, window = stored_window(side)
    assert pool.pinned == dict.fromkeys(window.blocks, 1)
    if ended:
        assert side.finished(request, ([], [])) is True
    assert pool.pinned
    for _ in range(2):  # a pin that is undone twice is a KeyError
        side.heard([said(window, dropped=dropped)], [], [])
        assert pool.pinned == {}


def test_pins_end_with_a_request_whose_blocks_the_worker_in_process_has_read():
    side, pool = make_grouped(FULL, window_group(16), read_here=lambda request_id: True)
    request, window = stored_window(side)
    assert pool.pinned
    assert side.finished(request, ([], [])) is False
    assert pool.pinned == {}
    side.heard([said(window)], [], [])
    assert pool.pinned == {}, "the report comes with a later step"


def test_pins_last_until_every_worker_has_gathered_or_dropped_the_store():
    side, pool = make_grouped(FULL, window_group(16), world_size=2)
    _, window = stored_window(side)
    side.heard([said(window, dropped=True)], [], [])
    assert pool.pinned, "the other worker may still read"
    side.heard([said(window)], [], [])
    assert pool.pinned == {}


def test_a_report_that_cannot_be_applied_still_undoes_the_pins():
    for broken in ("confirm", "_stored"):
        side, pool = make_grouped(FULL, window_group(16))
        _, window = stored_window(side)
        setattr(side.stores, broken, planted)
        GuardedSide(side).heard([said(window)], [], [])
        assert pool.pinned == {}, broken


@pytest.mark.parametrize("broken", [WINDOW_BLOCKS, 900])
def test_a_plan_that_fails_leaves_no_pin(broken):
    """It fails while the first or the second group with a window pins its blocks."""
    side, pool = make_grouped(FULL, window_group(40), window_group(40, number=2))
    pool.broken = {broken}
    request = arrive(side, 40)
    tables = table_of(40, 100), table_of(40, WINDOW_BLOCKS), table_of(40, 900)
    guarded = GuardedSide(side)
    plan = step(guarded, [(request, 0, 40)], tables={request.request_id: tables})
    guarded.take_events()
    assert plan.stores == [] and pool.pinned == {}
    assert pool.pins == (broken == 900)
    assert guarded.finished(request, tables) in (False, True)
    assert step(guarded).stores == []


def test_of_a_dropped_window_the_chunks_whose_blocks_are_there_are_stored_again():
    side, pool = make_grouped(FULL, window_group(16), settings={"save_decode_cache": True})
    request, window = stored_window(side)
    side.heard([said(window, dropped=True)], [], [])
    request.all_token_ids.extend(range(8))
    tables = {request.request_id: (table_of(48, 100), table_of(48, WINDOW_BLOCKS, gone=25))}
    stores = step(side, [(request, 40, 8)], tables=tables).stores
    again = [block for store in stores if store.group for block in store.blocks]
    assert window.blocks == list(range(WINDOW_BLOCKS + 4, WINDOW_BLOCKS + 10))
    assert again == list(range(WINDOW_BLOCKS + 6, WINDOW_BLOCKS + 12))
    assert pool.pinned == dict.fromkeys(again, 1)
