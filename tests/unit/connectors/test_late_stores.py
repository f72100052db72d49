"""Late stores: which chunks are planned when, and what becomes of a store whose blocks vLLM reuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm import late
from kvstrata.connectors.vllm.engine import BlockPins
from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.keys import batch
from tests.harness.scheduler_side import BLOCK, CHUNK, FakeClient, ask, make_request, make_side, step

BLOCKS = 80


class Pool:
    """vLLM's block pool: a queue of free blocks, and a new hash object each time a block is filled."""

    def __init__(self):
        self.blocks = [SimpleNamespace(block_id=i, block_hash=None) for i in range(BLOCKS)]
        self.free = list(range(1, BLOCKS))
        self.free_block_queue, self.hash_block_size = self, BLOCK

    def get_cached_block(self, block_hash, groups):
        return [block for block in self.blocks if block.block_hash is block_hash] or None

    def iter_blocks_after(self, cursor):
        assert cursor is None
        return (self.blocks[i] for i in self.free)

    def take(self, n, *, hashed=True):
        taken, self.free = self.free[:n], self.free[n:]
        for block in taken:
            self.blocks[block].block_hash = object() if hashed else None
        return taken

    def reset(self):
        for block in self.blocks:
            block.block_hash = None


class L1Client(FakeClient):
    """A client that sees the chunks of `l1`."""

    def __init__(self):
        super().__init__()
        self.l1 = set()

    def peek(self, identity, hasher):
        keys = batch.split(hasher.chain)
        return next((at for at, key in enumerate(keys) if key not in self.l1), len(keys))

    def present(self, chunks):
        return [key in self.l1 for _, key in chunks]


class World:
    """A scheduler's side with late stores. vLLM computes CHUNK tokens in a step, so a look reaches few blocks."""

    def __init__(self, **changes):
        self.pool, self.client = Pool(), L1Client()
        self.side = make_side(
            self.client,
            store_late=lambda: True,
            step_tokens=CHUNK,
            pins=BlockPins(lambda: self.pool),
            **{"shares_l1": lambda: True} | changes,
        )
        self.tables = {}

    def start(self, n_tokens, first=0):
        """Compute a prompt in one step; returns (request, the step's plan)."""
        request = make_request(n_tokens, all_token_ids=list(range(first, first + n_tokens)))
        self.side.on_new_request(request)
        assert ask(self.side, request)[0] == 0
        self.tables[request.request_id] = self.pool.take(-(-n_tokens // BLOCK))
        return request, self.step([(request, 0, n_tokens)])

    def step(self, scheduled=(), **more):
        return step(self.side, scheduled, tables=self.tables, **more)

    def end(self, request):
        """End a request: vLLM frees its last block first."""
        table = self.tables[request.request_id]
        assert self.side.finished(request, [table]) is False, "a late store keeps no blocks allocated"
        self.pool.free += table[::-1]

    def ended(self, n_tokens, first=0):
        request, plan = self.start(n_tokens, first)
        assert plan.stores == []
        self.end(request)
        return request

    def exhaust(self, left):
        """Take all unused blocks in front of the queue until `left` of them are left, without a step."""
        unused = next(i for i, block in enumerate(self.pool.free) if self.pool.blocks[block].block_hash)
        self.pool.take(unused - left, hashed=False)

    def outcome(self, plan, mask=-1, **fields):
        stores = [store.store_id for store in plan.stores]
        stored = [(store, mask) for store in stores] if not fields.get("dropped") else []
        for store in plan.stores if stored and mask else ():
            self.client.l1 |= set(batch.split(store.chain))
        self.side.heard([WorkerReport(plan.step, gathered=stores, stored=stored, **fields)], [], [])


def chunks(plan):
    return sum(len(store.chain) // 32 for store in plan.stores)


@pytest.mark.parametrize("late", [True, False])
def test_a_lookup_tells_how_much_vllm_has_and_whether_its_hits_are_uses_of_l1(late):
    client, pool = FakeClient(hits=8), Pool()
    side = make_side(client, store_late=lambda: late, step_tokens=CHUNK, pins=BlockPins(lambda: pool))
    request = make_request(6 * CHUNK)
    cached = pool.take(2 * CHUNK // BLOCK + 1)
    request.block_hashes = [pool.blocks[block].block_hash for block in cached] + [
        object() for _ in range((6 * CHUNK) // BLOCK - len(cached))
    ]
    side.on_new_request(request)
    client.revoke(client.calls[-1])  # looked up anew when vLLM asks, which tells what it has
    assert ask(side, request, 5 * CHUNK + 1) == (CHUNK - 2, False)
    assert [(call.own_chunks, call.stores_late) for call in client.calls] == [(2, late), (5, late)]


def test_only_what_l1_lacks_is_stored_and_nothing_behind_a_hole():
    world = World()
    world.ended(3 * CHUNK)
    world.exhaust(left=0)
    keys = batch.split(world.step().stores[0].chain)
    for in_l1, reused, planned in (
        (1, (), [(1, 3)]),
        (0, (1,), [(0, 1)]),
        (2, (0,), [(2, 3)]),
        (0, (0,), []),
    ):
        world = World()
        world.client.l1 = set(keys[:in_l1])
        request = world.ended(3 * CHUNK)
        table = world.tables[request.request_id]
        world.exhaust(left=0)
        for chunk in reused:
            world.pool.blocks[table[2 * chunk]].block_hash = object()
        assert [s.blocks for s in world.step().stores] == [table[2 * a : 2 * b] for a, b in planned]


@pytest.mark.parametrize(
    ("event", "planned", "cancelled"),
    [
        # (what happens after the chunk was recorded, chunks planned in the next look, whether a store is cancelled)
        ("nothing", 2, False),
        ("touched before the look", 0, False),
        ("reused before the look", 0, False),
        ("reset before the look", 0, False),
        ("weights may have changed", 0, False),
        ("preempted", 2, False),
        ("l1 has it", 0, False),
        ("server away", 0, False),
        ("reused while copied", 2, True),
        ("refilled with the same tokens while copied", 2, True),
        ("reset while copied", 2, True),
        ("touched while copied", 2, False),
        ("copied before reuse", 2, False),
        ("turned off while copied", 2, True),
    ],
)
def test_what_becomes_of_a_chunk(event, planned, cancelled):
    world = World()
    pool = world.pool
    request, _ = world.start(2 * CHUNK)
    table = world.tables[request.request_id]
    if event == "preempted":
        pool.free += table[::-1]
        assert world.step(preempted=[request.request_id]).stores == []
    else:
        world.end(request)
    world.exhaust(left=0)
    if event == "touched before the look":
        pool.free = []
    elif event == "reused before the look":
        pool.take(4)
    elif event == "reset before the look":
        pool.reset()
    elif event == "weights may have changed":
        world.side.reset(engine_empty=False)
    elif event == "l1 has it":
        world.client.peek = lambda identity, hasher: 2
    elif event == "server away":
        world.client.connected = False
    plan = world.step()
    assert chunks(plan) == planned and plan.cancel == set()
    if event == "copied before reuse":
        world.outcome(plan)
        pool.take(2)
    elif event.startswith("re") and "while copied" in event:
        pool.reset() if event.startswith("reset") else pool.take(1)
    elif event == "touched while copied":
        pool.free = []
    elif event == "turned off while copied":
        pool.take(1)
        world.side = world.side.turn_off()
    later = world.step()
    assert later.cancel == ({plan.stores[0].store_id} if cancelled else set())
    assert world.step().cancel == set(), "a store is cancelled once"


def test_chunks_of_an_adapter_that_has_been_replaced_meanwhile_are_not_stored():
    for replaced in (False, True):
        world = World()
        side, adapter = world.side, SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a")
        request = make_request(2 * CHUNK, lora_request=adapter)
        side.on_new_request(request)
        [(number, _)] = world.step().weigh_adapters
        side.heard([WorkerReport(1, adapters=[(number, "content")])], [], [])
        assert ask(side, request)[0] == 0
        world.tables[request.request_id] = world.pool.take(2 * CHUNK // BLOCK)
        assert world.step([(request, 0, 2 * CHUNK)]).stores == []
        world.end(request)
        if replaced:
            side.heard([WorkerReport(2, adapters=[(number, "")])], [], [])
        world.exhaust(left=0)
        assert chunks(world.step()) == (0 if replaced else 2)


def test_what_a_preempted_request_computes_again_is_stored_from_its_new_blocks():
    world = World()
    request, _ = world.start(2 * CHUNK)
    world.step(preempted=[request.request_id])
    world.pool.reset()
    assert ask(world.side, request)[0] == 0
    table = world.tables[request.request_id] = world.pool.take(2 * CHUNK // BLOCK)
    world.step([(request, 0, 2 * CHUNK)])
    world.end(request)
    world.exhaust(left=0)
    assert [store.blocks for store in world.step().stores] == [table]


def test_a_store_may_be_cancelled_until_every_worker_has_read_its_blocks():
    world = World(world_size=2)
    world.ended(2 * CHUNK)
    world.exhaust(left=0)
    (store,) = world.step().stores
    world.side.heard([WorkerReport(1, gathered=[store.store_id])], [], [])
    world.pool.take(1)
    assert world.step().cancel == {store.store_id}


@pytest.mark.parametrize(
    ("outcome", "again"), [("refused", False), ("dropped", True), ("report lost", False)]
)
def test_a_store_that_came_to_nothing_is_planned_again_only_where_that_may_help(outcome, again):
    world = World()
    world.ended(CHUNK)
    world.exhaust(left=0)
    plan = world.step()
    if outcome == "refused":
        world.outcome(plan, mask=0)
    elif outcome == "dropped":
        world.outcome(plan, dropped=[plan.stores[0].store_id])
    assert bool(world.step().stores) is again
    for _ in range(late.RETRY_STEPS - 2 if not again else 0):
        assert world.step().stores == []
    assert again or world.step().stores, "at its next approach"


def test_nothing_is_recorded_on_top_of_a_load_that_may_have_failed():
    for failed, in_l1 in ((False, 0), (True, 2), (True, 3)):
        world = World(settings={"save_unfull_chunk": True})
        request = make_request(3 * CHUNK + BLOCK + 1)
        world.client.hits, world.client.has_l2 = 1, True
        world.side.on_new_request(request)
        tokens, _ = ask(world.side, request)
        table = world.tables[request.request_id] = world.pool.take(8)
        world.side.allocated(request, [table], tokens)
        plan = world.step([(request, tokens, request.num_tokens - tokens)])
        assert plan.loads and not plan.loads[0].asynchronous
        world.end(request)
        world.step()  # vLLM plans the next step before it hears of this one
        world.exhaust(left=0)
        world.side.heard([WorkerReport(plan.step, failures=int(failed))], [], table[:2] if failed else [])
        if failed:
            for block in table[:4]:  # vLLM does so with a request that runs, and this one has ended
                world.pool.blocks[block].block_hash = None
            # What another engine has stored meanwhile.
            world.client.peek = lambda identity, hasher, in_l1=in_l1: in_l1
        assert chunks(world.step()) == (0 if failed else 3 + 1)


def test_a_tail_is_stored_after_the_chunks_before_it():
    world = World(settings={"save_unfull_chunk": True})
    request = world.ended(2 * CHUNK + BLOCK)
    world.exhaust(left=0)
    stores = world.step().stores
    table = world.tables[request.request_id]
    assert [(store.blocks, store.tail_tokens) for store in stores] == [(table[:4], 0), (table[4:], BLOCK)]
    assert stores[1].parent == stores[0].chain[-32:]


def test_a_hit_waits_at_most_two_steps_for_what_lies_in_the_blocks_that_it_will_take():
    world = World()
    world.ended(4 * CHUNK)
    world.exhaust(left=6)
    other = make_request(6 * CHUNK, all_token_ids=list(range(1000, 1000 + 6 * CHUNK)))
    world.client.hits, world.client.has_l2 = 6, True
    world.side.on_new_request(other)
    assert ask(world.side, other) == (None, False)
    plan = world.step()
    assert chunks(plan) == 4, "a look reaches the blocks that the hit will take"
    world.outcome(plan)
    assert ask(world.side, other)[0] == 6 * CHUNK - 1
    assert world.side.take_counts()["late_held_hits"] == 1


def test_what_is_reused_before_it_is_planned_is_counted():
    world = World()
    world.ended(2 * CHUNK)
    world.exhaust(left=0)
    world.start(2 * CHUNK, first=500)
    assert world.side.take_counts()["late_missed_chunks"] == 2


def test_bounds_per_step_and_in_flight():
    world = World()
    world.pool.free = []
    world.pool.blocks = [SimpleNamespace(block_id=i, block_hash=None) for i in range(4000)]
    world.pool.free = list(range(1, 4000))
    world.ended(200 * CHUNK)
    world.exhaust(left=0)
    sizes = []
    for _ in range(4):
        plan = world.step()
        assert max([len(store.chain) // 32 for store in plan.stores], default=0) <= late.CHUNKS_PER_STORE
        sizes.append(chunks(plan))
    assert sizes == [late.CHUNKS_PER_STEP, late.CHUNKS_IN_FLIGHT - late.CHUNKS_PER_STEP, 0, 0]


def test_a_drain_stores_the_whole_queue_and_keeps_an_idle_engine_stepping():
    world = World()
    for n in range(4):
        world.ended(2 * CHUNK, first=n * 100)
    assert world.step().stores == [] and not world.side.awaits_news
    world.side.on_new_request(make_request(1, kv_transfer_params={"kvstrata.drain": True}))
    assert world.side.awaits_news
    plan = world.step()
    assert chunks(plan) == 8
    world.outcome(plan)
    assert world.step().stores == [] and not world.side.awaits_news
    world.side.on_new_request(make_request(1, kv_transfer_params={"kvstrata.drain": True}))
    world.client.connected = False
    world.step()
    assert not world.side.awaits_news, "the engine rests while the server is away"


@pytest.mark.parametrize("shared", [True, False])
def test_a_point_where_two_prompts_part_is_stored_at_once_if_other_engines_share_l1(shared):
    world = World(shares_l1=lambda: shared)
    head = list(range(2 * CHUNK))

    def asked(*rest, table=()):
        tokens = [*head, *rest]
        request = make_request(len(tokens), all_token_ids=tokens)
        world.side.on_new_request(request)
        ask(world.side, request)
        more = world.pool.take(len(tokens) // BLOCK - len(table))
        world.tables[request.request_id] = [*table, *more]
        return request, world.step([(request, 0, len(tokens))])

    first, _ = asked(*range(100, 100 + CHUNK))
    table = world.tables[first.request_id]
    _, plan = asked(*range(100, 100 + 2 * CHUNK), table=table)
    assert plan.stores == [], "the next turn of the same session"
    _, plan = asked(*range(300, 300 + CHUNK), table=table[:4])
    assert [store.blocks for store in plan.stores] == ([table[:4]] if shared else [])


def test_auto_stores_late_only_while_l1_is_small_and_does_not_swing():
    sizes = [0, 0]
    auto = late.LateWhileSmall(lambda: (sizes[0], sizes[1]))
    for l1, engines, expected in (
        (0, 0, False),
        (199, 100, True),
        (249, 100, True),
        (250, 100, False),
        (200, 100, False),
        (250, 126, True),
        (250, 0, True),  # the server does not answer
    ):
        sizes[:] = l1, engines
        assert auto() is expected, (l1, engines)


def test_a_request_may_be_stored_at_once_and_an_odd_wish_has_no_effect():
    world = World()
    for store, chunks_stored in (("commit", 2), ("late", 0), (["commit"], 0), (10**400, 0), ({}, 0)):
        request = make_request(2 * CHUNK, kv_transfer_params={"kvstrata.store": store})
        request.all_token_ids[0] = 10_000 + len(world.tables)
        world.side.on_new_request(request)
        assert ask(world.side, request)[0] == 0
        world.tables[request.request_id] = world.pool.take(2 * CHUNK // BLOCK)
        plan = world.step([(request, 0, 2 * CHUNK)])
        assert chunks(plan) == chunks_stored
        world.outcome(plan)
