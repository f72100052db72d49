"""P3: bytes are not reused while anybody may still touch them; leases that nobody uses make room for others."""

from __future__ import annotations

from kvstrata.types import Role
from tests.harness.cache_engine import prompt
from tests.promises.caller import Caller, Load, Lookup, holds_nothing
from tests.world import Server, World, tell

CHUNKS = 8
PROMPTS = 6
"""Four of them fit into half of L1, which is as much as may be leased."""
BLOCK_BYTES = 4096
ROOM_S = 5.0
"""Time in which leases that nobody uses make room."""


def test_leases_in_use_keep_their_bytes_and_all_others_make_room():
    tell(revokes)


class Group:
    """An engine of two processes: its scheduler looks up and hands leases to its worker, which loads."""

    def __init__(self, world: World, server: Server, name: bytes) -> None:
        self.world = world
        self.scheduler = world.engine(server, role=Role.SCHEDULER, group=name * 16, block_bytes=BLOCK_BYTES)
        self.worker = world.engine(server, role=Role.WORKER, group=name * 16, block_bytes=BLOCK_BYTES)
        self.worker.copies.takes_s = lambda: world.random.choice([0.0, 0.01, 0.3])
        self.asks = Caller(self.scheduler, [prompt(CHUNKS, number) for number in range(PROMPTS)])
        self.loads = Caller(self.worker, [])
        self.claimed: list[Lookup] = []
        self.queued: list[Lookup] = []
        """Handed to the worker, which has not begun."""
        world.watchers.append(self.look)

    def look(self) -> None:
        if not self.scheduler.is_dead:
            assert not any(one.call.revoked for one in self.claimed), "a claimed lease was revoked"

    def act(self) -> None:
        rng = self.world.random
        if self.scheduler.is_frozen and rng.random() < 0.7:
            return
        deeds = [
            self.asks.look_up,
            self.claim,
            self.hand_on,
            self.load,
            self.unclaim,
            self.asks.release,
            self.asks.cancel,
        ]
        deed = rng.choices(deeds, [6, 4, 3, 4, 1, 1, 1])[0]
        if deed == self.load or not (self.scheduler.is_dead or self.scheduler.is_frozen):
            deed()

    def claim(self) -> None:
        if self.asks.held:
            lookup = self.asks.held.pop(0)
            if lookup.call.claim():
                self.claimed.append(lookup)
            else:  # a caller may not know that the lease was revoked
                self.scheduler.client.release([lookup.call.result.lease], group=True)

    def unclaim(self) -> None:
        if self.claimed:
            lookup = self.claimed.pop(0)
            lookup.call.unclaim()
            self.asks.held.append(lookup)

    def hand_on(self) -> None:
        if self.claimed and not self.worker.is_dead:
            lookup = self.claimed.pop(0)
            self.asks.note(f"hands {lookup.tokens[0]} on")
            self.queued.append(lookup)
            self.scheduler.client.release([lookup.call.result.lease])

    def load(self) -> None:
        if not self.queued or self.worker.is_dead:
            return
        lookup = self.queued.pop(0)
        blocks = self.worker.take_blocks(lookup.call.result.n_chunks)
        if blocks is None:
            self.queued.append(lookup)
            return
        self.loads.note(f"loads {lookup.tokens[0]}")
        job, items = self.worker.begin_load(lookup.tokens, lookup.call, blocks)
        assert not job.failed or self.scheduler.is_dead, "a lease that was handed on is gone"
        self.loads.loads.append(Load(job, lookup, items, blocks, not job.failed))

    def die(self) -> None:
        (self.scheduler if self.world.random.random() < 0.7 else self.worker).die()

    def recover(self) -> None:
        """Let every lease be used up or wait."""
        self.scheduler.is_frozen = False
        while self.claimed:
            self.unclaim()
        while self.queued and not self.worker.is_dead:
            self.load()
            self.world.run(lambda: not self.loads.waits, "a worker's load ends")


def revokes(world: World) -> None:
    rng = world.random
    server = world.server()
    store_all(world, server)
    shared = [prompt(CHUNKS, number) for number in range(PROMPTS)]
    groups = [Group(world, server, name) for name in (b"a", b"b")]
    writer = Caller(world.engine(server, group=b"writer" * 2 + b"1234", block_bytes=BLOCK_BYTES), shared)
    writer.engine.copies.takes_s = lambda: rng.choice([0.0, 0.3])
    engines = [engine for group in groups for engine in (group.scheduler, group.worker)]
    world.run(lambda: all(engine.identity().ready for engine in engines), "all engines are ready")
    for number in range(44):
        group = rng.choice(groups)
        match rng.randrange(24):
            case 0:
                group.scheduler.is_frozen = not group.scheduler.is_frozen
            case 1 if rng.random() < 0.15 and not (group.scheduler.is_dead or group.worker.is_dead):
                group.die()
            case 2:
                rng.choice(engines).cut(**{rng.choice(["sent", "received"]): rng.randrange(500)})
            case 3 | 4:
                writer.store(prompt(4, 100 + number))
            case 5 | 6 | 7 | 8:
                writer.act()
            case 9 | 10 | 11 if writer.held or writer.loads:
                give_back_while_it_loads(writer, number)
            case _:
                group.act()
        if rng.random() < 0.5:
            world.sleep(rng.choice([0.0005, 0.005, 0.05]))
        stats = server.parts.pool.stats()
        assert stats["leased_bytes"] <= stats["extents_bytes"] // 2
    for group in groups:
        group.recover()
    newcomer_gets_room(world, server)
    world.run(lambda: not writer.waits, "the writer's calls end")
    server.check()
    for engine in world.engines:
        engine.close()
    holds_nothing(server)


def give_back_while_it_loads(caller: Caller, number: int) -> None:
    """A lease that is given back stays until the load under it has ended, also when its bytes are wanted."""
    caller.load()
    if not caller.loads:
        return
    caller.engine.client.release([caller.loads[-1].lookup.call.result.lease])
    for prompt_number in range(1000 + 8 * number, 1008 + 8 * number):
        caller.store(prompt(CHUNKS, prompt_number))


def store_all(world: World, server: Server) -> None:
    engine = world.engine(server, group=b"g" * 16, block_bytes=BLOCK_BYTES)
    world.run(lambda: engine.client.connected, "the first engine connects")
    caller = Caller(engine, [])
    for number in range(PROMPTS):
        caller.store(prompt(CHUNKS, number))
    world.run(lambda: not caller.waits, "all prompts are stored")
    assert caller.outcomes == {"stored": PROMPTS * CHUNKS}
    engine.close()


def newcomer_gets_room(world: World, server: Server) -> None:
    """An engine that comes later gets the room of leases that wait, after some requests."""
    engine = world.engine(server, group=b"n" * 16, block_bytes=BLOCK_BYTES)
    world.run(lambda: engine.client.connected and engine.identity().ready, "the newcomer connects")
    caller = Caller(engine, [])
    for number in world.random.sample(range(PROMPTS), 3):
        ends_s = world.now_s + ROOM_S
        found = 0
        while found < CHUNKS:
            assert world.now_s < ends_s, "leases that wait kept another engine out"
            world.run(lambda: not caller.waits, "the newcomer's calls end")
            for lookup in [one for one in caller.held if one.tokens == prompt(CHUNKS, number)]:
                found = lookup.call.result.n_chunks
                if found < CHUNKS:
                    caller.held.remove(lookup)
                    engine.client.release([lookup.call.result.lease])
            if found < CHUNKS:
                caller.store(prompt(CHUNKS, number))  # others may have evicted some of it
                world.run(lambda: not caller.stores, "the newcomer's store ends")
                caller.look_up(prompt(CHUNKS, number), 2000)
                world.sleep(0.02)
