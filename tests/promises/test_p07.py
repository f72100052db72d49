"""P7: pressure evicts, L1 wins over L2, and nothing is dropped in silence."""

from __future__ import annotations

import itertools

import pytest

from kvstrata.types import MissReason
from tests.harness.cache_engine import prompt
from tests.promises.caller import Caller, disturb, holds_nothing, prompts, relieve
from tests.world import Server, World, tell

BLOCK_BYTES = 8192
STORED_S = 0.5
"""Time in which a store ends whose chunks fit into L1."""
PUT_S = 40.0
"""Time in which a tier that is well again gets all chunks that wait for it."""


def test_a_full_l1_takes_new_chunks_and_tells_of_every_chunk_that_it_or_a_tier_did_not_take():
    tell(pressure)


def pressure(world: World) -> None:
    rng = world.random
    server = world.server(tiers=1)
    [shelf] = world.shelves
    shared = prompts(world, 16, 6)
    callers = [
        Caller(world.engine(server, group=bytes([n]) * 16, block_bytes=BLOCK_BYTES), shared) for n in (1, 2)
    ]
    world.run(lambda: all(caller.engine.identity().ready for caller in callers), "all engines are ready")
    stored: set[bytes] = set()

    def look() -> None:
        stats, store = server.parts.pool.stats(), server.parts.store.document()
        assert stats["leased_bytes"] <= stats["extents_bytes"] // 2
        assert store["backlog_bytes"] <= store["backlog_limit_bytes"]

    for number in range(30):
        caller = rng.choice(callers)
        match rng.randrange(12):
            case 0 | 1:
                disturb(world, shelf)
            case 2 | 3 if not caller.stores:
                fits(caller, prompt(4, 100 + number))
            case 4 | 5 | 6:
                caller.store()
            case _:
                caller.act()
        look()
        if rng.random() < 0.4:
            world.sleep(rng.choice([0.001, 0.05, 0.3]))
    world.run(lambda: not any(caller.waits for caller in callers), "all calls are answered")
    for caller in callers:
        stored |= caller.stored
        while caller.held:
            caller.release()
    accounts(world, server, callers, stored)


def fits(caller: Caller, tokens: list[int]) -> None:
    """A store that is much smaller than what nobody uses is taken at once, whatever waits for a tier."""
    world = caller.world
    job = caller.store(tokens)
    if job is not None:
        assert world.wait(job.done.is_set, STORED_S), "a store that fits waits"
        assert set(job.outcomes) == {"stored"}, job.outcomes


@pytest.mark.parametrize("late", [True, False])
def test_a_hit_in_an_engines_own_cache_is_no_use_of_l1_if_that_engine_stores_late(late):
    tell(lambda world: own_hits(world, late))


def own_hits(world: World, late: bool) -> None:
    server = world.server(l1={"eviction_policy": "LRU"})
    engine = world.engine(server, block_bytes=BLOCK_BYTES)
    world.run(lambda: engine.identity().ready, "the engine is ready")

    seeds = itertools.count(2)

    def store(seed: int) -> None:
        blocks = engine.take_blocks(4)
        assert blocks is not None
        job = engine.begin_store(prompt(4, seed), blocks)
        world.run(job.done.is_set, "the store ends")
        engine.free_blocks(blocks)

    def cached(seed: int) -> int:
        """Asked of the pool, since a client does not believe an index whose server this machine has stopped."""
        return server.parts.pool.peek(b"".join(engine.keys(prompt(4, seed))))

    def look_up() -> None:
        call = engine.lookup(prompt(4, 0), own_chunks=4, stores_late=late)
        world.run(lambda: call.done, "the lookup is answered")
        assert call.result.lease is not None and call.result.n_chunks == 4
        engine.client.release([call.result.lease], group=True)

    store(0)
    store(1)
    while cached(0) == cached(1) == 4:  # until L1 is full
        look_up()
        world.run(lambda: not server.parts.pool.stats()["leased_bytes"], "the lease is given back")
        store(next(seeds))
    assert (cached(0) < 4) == late


def accounts(world: World, server: Server, callers: list[Caller], stored: set[bytes]) -> None:
    """The answers agree with what the server counted; each chunk is in the tier, or noted as skipped."""
    [shelf] = world.shelves
    relieve(shelf)
    assert world.wait(lambda: not server.parts.store.undone, PUT_S), "puts never end"
    counters, told = server.parts.counters, [caller.outcomes for caller in callers]
    assert counters.committed_chunks == sum(outcomes.get("stored", 0) for outcomes in told)
    for word in ("pool_pinned", "session_limit", "chain_exceeds_pool", "entries_full"):
        was_told = any(outcomes.get(word) for outcomes in told)
        assert was_told == bool(counters.reserve_outcomes.get(word)), word
    explainer = server.parts.explainer
    for key in stored - shelf.records.keys():
        note = explainer.note_of(key)
        assert note is not None and note.reason is MissReason.PUT_SKIPPED, (
            f"a chunk was dropped in silence: {note}"
        )
    holds_nothing(server)
