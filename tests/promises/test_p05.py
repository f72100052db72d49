"""P5: L1 first; a tier that is slow, fails or hangs costs nobody else anything; an L2 hit is promoted to L1."""

from __future__ import annotations

from tests.harness.cache_engine import CHUNK_TOKENS, prompt
from tests.harness.shelf import Shelf
from tests.promises.caller import Caller, disturb, holds_nothing, prompts, relieve
from tests.world import Server, World, tell

WELL_AGAIN_S = 31.0
"""Time after which a breaker has let a probe through (tiers/tier.py)."""
BLOCK_BYTES = 1024


def test_lookups_are_right_and_in_time_whatever_the_tiers_do():
    tell(tiers)


class Asker(Caller):
    """A caller that knows what L1 had when a lookup began."""

    def look_up_in_l1(self) -> None:
        """L1's chunks are found at once, whatever the tiers do."""
        tokens = self.some_prompt()
        hasher = self.engine.hasher(tokens)
        in_l1 = self.engine.client.peek(self.engine.identity(), hasher)
        begun_s = self.world.now_s
        lookup = self.look_up(tokens, 2000)
        if in_l1 < hasher.n_chunks:
            return
        self.world.run(lambda: lookup.call.done, "a lookup is answered")
        assert self.world.now_s == begun_s, "a lookup of what L1 has waited"
        assert lookup.call.result.n_chunks == in_l1 or lookup.call.result.reason == "refused", (
            lookup.call.result
        )
        assert not lookup.call.result.l2_chunks

    def look_up_in_time(self, tokens: list[int]) -> None:
        """At its deadline a lookup gets what L1 has, though nobody says what the tiers have."""
        n_stored = len(tokens) // CHUNK_TOKENS - 2
        self.store(tokens[: n_stored * CHUNK_TOKENS])
        self.world.run(lambda: not self.stores, "a store ends")
        in_l1 = self.engine.client.peek(self.engine.identity(), self.engine.hasher(tokens))
        self.random.choice(self.world.shelves).shut("exists")
        lookup = self.look_up(tokens, self.random.choice([50, 200]))
        self.world.run(lambda: lookup.call.done, "a lookup is answered")
        result = lookup.call.result
        assert result.n_chunks >= in_l1 or result.reason == "refused", (in_l1, result)


def tiers(world: World) -> None:
    rng = world.random
    server = world.server(tiers=2)
    shared = prompts(world, 5, 6)
    callers = [
        Asker(world.engine(server, group=bytes([n]) * 16, block_bytes=BLOCK_BYTES), shared) for n in (1, 2)
    ]
    world.run(lambda: all(caller.engine.identity().ready for caller in callers), "all engines are ready")
    for tokens in shared[1:]:
        callers[0].store(tokens)
    for number in range(27):
        caller = rng.choice(callers)
        match rng.randrange(16):
            case 0 | 1 | 2:
                disturb(world, rng.choice(world.shelves))
            case 3 | 4:
                world.note("L1 is cleared")
                server.run(server.parts.clearing.clear("l1", None))
            case 5:
                damage(world, rng.choice(world.shelves))
            case 6 | 7:
                caller.look_up_in_l1()
            case 8:
                caller.look_up_in_time(prompt(4, 2000 + number))
            case 9:
                one_hangs(world, server, caller, prompt(2, 1000 + number))
            case _:
                caller.act()
        if rng.random() < 0.4:
            world.sleep(rng.choice([0.001, 0.05, 0.5]))
    all_is_well(world, server, callers)


def one_hangs(world: World, server: Server, caller: Caller, tokens: list[int]) -> None:
    """A tier that hangs keeps no chunk from the other, in neither direction."""
    hung, well = world.random.sample(world.shelves, 2)
    relieve(well)
    relieve(hung)
    hung.shut("exists", "put", "load")
    keys, ends_s = caller.engine.keys(tokens), world.now_s + WELL_AGAIN_S
    while not well.records.keys() >= set(keys):  # until its breaker has closed
        assert world.now_s < ends_s, "a hung tier keeps the other from getting chunks"
        caller.store(tokens)
        world.run(lambda: not caller.stores, "a store ends")
        world.sleep(0.1)
        server.run(server.parts.clearing.clear("l1", None))
    found = 0
    while found < len(keys):
        assert world.now_s < ends_s, "a hung tier hides what the other has"
        lookup = caller.look_up(tokens, 2000)
        world.run(lambda: lookup.call.done, "a lookup is answered")  # noqa: B023
        found = lookup.call.result.n_chunks
        world.sleep(0.1)


def damage(world: World, shelf: Shelf) -> None:
    """Change one byte of a record."""
    if shelf.records:
        key = world.random.choice(list(shelf.records))
        record = bytearray(shelf.records[key])
        record[world.random.randrange(len(record))] ^= 1 << world.random.randrange(8)
        shelf.records[key] = bytes(record)
        world.note("a record is damaged")


def all_is_well(world: World, server: Server, callers: list[Asker]) -> None:
    """When the tiers work again, what is stored reaches them and comes back from them once, right."""
    for shelf in world.shelves:
        relieve(shelf)
    world.run(lambda: not any(caller.waits for caller in callers), "all calls are answered")
    for caller in callers:
        while caller.held:
            caller.release()
    server.run(server.parts.clearing.clear("l1", None))
    caller, ends_s, number = callers[0], world.now_s + WELL_AGAIN_S, 99
    while not goes_and_comes_back(world, server, caller, prompt(3, number)):
        assert world.now_s < ends_s, "the tiers are not used again"
        world.sleep(0.5)
        number += 1
    holds_nothing(server)


def goes_and_comes_back(world: World, server: Server, caller: Caller, tokens: list[int]) -> bool:
    """Whether chunks reach all tiers, come back from them once, and are in L1 then."""
    before = [len(shelf.records) for shelf in world.shelves]
    job = caller.store(tokens)
    assert job is not None
    world.run(lambda: not caller.waits and not server.parts.store.undone, "the chunks are stored and put")
    assert set(job.outcomes) == {"stored"}, job.outcomes
    n = len(job.outcomes)
    is_put = [len(shelf.records) for shelf in world.shelves] == [n + n_before for n_before in before]
    server.run(server.parts.clearing.clear("l1", None))
    found = []
    for _ in range(2):
        lookup = caller.look_up(tokens, 2000)
        world.run(lambda: lookup.call.done, "a lookup is answered")  # noqa: B023
        found.append((lookup.call.result.n_chunks, lookup.call.result.l2_chunks))
        caller.load()
        world.run(lambda: not caller.waits, "a load ends")
    assert found[0][0] == n or found[0] == (0, 0) or not is_put, found
    return is_put and found == [(n, n), (n, 0)]
