"""Tails on the scheduler's side: what is looked up, loaded, stored and replaced."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.client.handles import LookupResult
from kvstrata.connectors.vllm.groups import whole_group
from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.keys import ChunkHasher, batch
from kvstrata.types import EXTENT, LeaseName, MissReason
from tests.harness.scheduler_side import SLICES, FakeCall, FakeClient, arrive, ask, hit_of, make_side, step
from tests.unit.connectors.groups_double import FULL, window_group

BLOCK, CHUNK = 4, 16
"""Tails of one, two and three blocks."""
GROUPS = [whole_group(BLOCK, CHUNK)]


class Call(FakeCall):
    """A lookup that is answered with what the client's L1 has, and with what its L2 has where that is asked."""

    def answer(self, keys):
        client = self.client
        n = leading(keys, client.chunks | client.chunks_in_l2)
        tail = next((tokens for tokens, key, in_l2 in self.named(n) if client.has_tail(key, in_l2)), 0)
        if not n and not tail:
            self.finish(LookupResult(0, None, b"", 0, MissReason.NEVER_STORED))
            return
        lease = LeaseName(b"s" * 16, next(client.seqs), 1)
        client.leases.append(lease)
        rows = (n + bool(tail)) * len(SLICES)
        extents = b"".join(EXTENT.pack(i, 1, i, 1, 0) for i in range(rows))
        from_l2 = n - leading(keys, client.chunks)
        self.finish(LookupResult(n, lease, extents, len(SLICES), "", from_l2, tail))

    def named(self, n):
        """(tokens, key, whether L2 is asked) of the tails behind chunk n."""
        for asked in self.tails:
            if asked.chunk == n:
                for number, tokens in enumerate(asked.tokens):
                    yield tokens, batch.nth(asked.keys, number), asked.in_l2


def leading(keys, there):
    """How many of the leading keys are there."""
    return next((i for i, key in enumerate(keys) if key not in there), len(keys))


def keys_of(chain):
    return batch.split(chain.chain if isinstance(chain, ChunkHasher) else chain)


class Client(FakeClient):
    """A cache that keeps chunks and tails by their keys."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.chunk_tokens = CHUNK
        self.chunks, self.tails, self.chunks_in_l2, self.tails_in_l2 = set(), set(), set(), set()

    def has_tail(self, key, in_l2):
        return key in self.tails or (in_l2 and key in self.tails_in_l2)

    def peek(self, identity, chain):
        return leading(keys_of(chain), self.chunks)

    def present(self, chunks):
        return [key in self.tails for _, key in chunks]

    def lookup(self, identity, chain, *, request_id, probe, deadline_ms, tails=(), **_):
        call = Call(self, len(keys_of(chain)))
        call.tails = list(tails)
        self.calls.append(call)
        call.answer(keys_of(chain))
        return call

    def store(self, store):
        """Do what a server does when the store is committed."""
        self.tails.difference_update(batch.split(store.replaces))
        (self.tails if store.tail_tokens else self.chunks).update(batch.split(store.chain))

    def evict(self, *, to_l2):
        """Lose everything, or move it to L2."""
        if to_l2:
            self.chunks_in_l2, self.tails_in_l2 = self.chunks, self.tails
        self.chunks, self.tails = set(), set()


def cache_and_side(*, ahead=0, has_l2=False, groups=GROUPS, may_store=True, **settings):
    """(A cache, the scheduler's side of an engine); the engine's draft layers read so many tokens ahead."""
    client = Client(has_l2=has_l2)
    client.ahead = ahead
    settings = {"chunk_size": groups[0].chunk_tokens, "save_unfull_chunk": True, **settings}
    return client, make_side(
        client, groups=groups, settings=settings, lookahead_tokens=ahead, may_store=may_store
    )


def compute(side, client, request, computed=0):
    """Compute a request's whole prompt in one step, and store what the step stores."""
    plan = step(side, [(request, computed, request.num_tokens - computed)])
    for store in plan.stores:
        client.store(store)
    ids = [store.store_id for store in plan.stores]
    side.heard([WorkerReport(plan.step, gathered=list(ids), stored=[(one, -1) for one in ids])], (), ())
    return plan.stores


def computed(side, client, n_tokens, **changes):
    """A new request whose whole prompt is computed and stored."""
    request = arrive(side, n_tokens, **changes)
    compute(side, client, request)
    return request


def test_with_draft_layers_a_hit_needs_the_tokens_behind_it():
    """The draft layers' KV at the last position of a record depends on the token behind it."""
    for ahead, same, hit in ((0, 32, 32), (1, 32, 16), (1, 33, 32), (3, 35, 32), (1, 37, 36)):
        client, side = cache_and_side(ahead=ahead)
        computed(side, client, 40)
        branch = arrive(side, 40, all_token_ids=[*range(same), *range(100, 140 - same)])
        assert ask(side, branch)[0] == hit


@pytest.mark.parametrize(("ahead", "stored_tokens"), [(1, 32), (2, 16)])
def test_tokens_that_a_chain_of_draft_layers_reads_again_are_not_stored(ahead, stored_tokens):
    _client, side = cache_and_side(ahead=ahead, save_unfull_chunk=False)
    request = arrive(side, 60)
    (store,) = step(side, [(request, 0, 32)]).stores
    assert len(store.blocks) * BLOCK == stored_tokens


def test_an_own_hit_inside_the_tail_leaves_its_blocks_alone():
    client, side = cache_and_side()
    computed(side, client, 30)
    again = arrive(side, 30)
    hit, _ = ask(side, again, computed=20)
    assert hit == 8
    side.allocated(again, [list(range(1, 30))], hit)
    (load,) = step(side).loads
    assert load.blocks == [-1, 6, 7], "blocks before the hit are not written"


def test_a_chunk_replaces_the_tails_of_its_tokens_only():
    client, side = cache_and_side()
    for tokens in (range(24), [*range(20), 7, 7, 7, 7]):  # they part in the second block of the second chunk
        computed(side, client, 24, all_token_ids=list(tokens))
    assert len(client.tails) == 2
    longer = arrive(side, 40)
    ask(side, longer)
    stores = compute(side, client, longer)
    assert [len(store.replaces) // 32 for store in stores] == [1, 0]
    assert len(client.tails) == 2, "the other prompt's tail, and the new one"


def test_l2_is_asked_for_tails_only_behind_chunks_that_l1_lacks():
    client, side = cache_and_side(has_l2=True)
    computed(side, client, 40)
    client.tails_in_l2, client.tails = client.tails, set()
    there = arrive(side, 40)
    assert ask(side, there)[0] == 32 and client.calls[-1].tails == [], "L1 has all chunks"
    there_chunks = client.chunks
    client.evict(to_l2=False)
    client.chunks_in_l2 = there_chunks
    again = arrive(side, 46)
    assert ask(side, again)[0] == 40, "the tail follows chunks that L2 has"


def test_a_lookup_that_ends_within_the_prompt_in_l2_is_made_once_more_for_the_tails_there():
    client, side = cache_and_side(has_l2=True)
    computed(side, client, 40)
    client.evict(to_l2=True)
    longer = arrive(side, 70)
    assert ask(side, longer)[0] is None and ask(side, longer)[0] == 40
    assert [call.n_asked for call in client.calls[-2:]] == [4, 2]
    assert len(client.leases) == 1, "the first answer's lease was given back"


def test_the_tail_of_an_answer_is_stored_when_it_ends_if_answers_are_stored():
    for save in (True, False):
        client, side = cache_and_side(save_decode_cache=save)
        request = computed(side, client, 21)
        for number in range(5):
            request.all_token_ids.append(number)
            request.num_computed_tokens = request.num_tokens
            assert step(side, [(request, request.num_tokens - 1, 1)]).stores == []
        request.all_token_ids.append(9)
        request.num_computed_tokens = request.num_tokens - 1  # 26 tokens are computed
        assert side.finished(request, [list(range(1, 30))]) is save
        stores = step(side).stores
        assert [store.tail_tokens for store in stores] == [8] * save
        for store in stores:
            assert len(store.replaces) == 32
            client.store(store)
        assert len(client.tails) == 1


def test_models_with_windows_and_engines_that_do_not_want_them_have_no_tails():
    for groups, wanted in (([FULL, window_group(4)], True), (GROUPS, False)):
        client, side = cache_and_side(groups=groups, save_unfull_chunk=wanted)
        request = arrive(side, 7)
        assert ask(side, request) == (0, False)
        assert step(side, [(request, 0, 7)]).stores == [] and client.calls == []


def test_an_engine_that_stores_nothing_keeps_no_blocks_for_a_tail():
    _, side = cache_and_side(may_store=False)
    request = arrive(side, 9)
    assert step(side, [(request, 0, 9)]).stores == []
    request.all_token_ids.append(1)
    assert side.finished(request, [list(range(1, 30))]) is False


def test_a_tail_that_was_dropped_is_stored_again():
    _client, side = cache_and_side()
    request = arrive(side, 22)
    plan = step(side, [(request, 0, 22)])
    assert [store.tail_tokens for store in plan.stores] == [0, 4]
    side.heard([WorkerReport(plan.step, dropped=[store.store_id for store in plan.stores])], (), ())
    request.all_token_ids.append(1)
    assert [store.tail_tokens for store in step(side, [(request, 22, 1)]).stores] == [0, 4]


@given(
    turns=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 20)), min_size=1, max_size=8),
    decode=st.booleans(),
)
def test_a_conversation_has_at_most_one_tail_and_hits_its_last_whole_block(turns, decode):
    """After each turn. `turns`: tokens that the user adds, and tokens of the answer."""
    client, side = cache_and_side(save_decode_cache=decode)
    fresh = itertools.count()
    history: list[int] = []
    held = 0
    for added, answered in turns:
        history += itertools.islice(fresh, added)
        request, hit = hit_of(side, len(history), all_token_ids=list(history))
        assert hit == max(0, min(held, len(history) - 1))
        side.allocated(request, [list(range(1, 400))], hit)
        compute(side, client, request, hit)
        held = len(history) // BLOCK * BLOCK
        for number in range(answered):
            if number:  # the first token is sampled in the step that computes the prompt
                for store in step(side, [(request, len(history) - 1, 1)]).stores:
                    client.store(store)
            history.append(next(fresh))
            request.all_token_ids.append(history[-1])
        request.num_computed_tokens = len(history) - bool(answered)
        side.finished(request, [list(range(1, 400))])
        for store in step(side).stores:
            client.store(store)
        if decode and answered:
            held = max(held, (len(history) - 1) // BLOCK * BLOCK)
        assert len(client.tails) <= 1
