"""A lookup waits for what another engine computes now, but not for the dead, nor for its own engine."""

from __future__ import annotations

from kvstrata.client import PromiseCall
from kvstrata.types import KEY_BYTES, MissReason
from tests.harness.cache_engine import prompt
from tests.promises.caller import Caller, Lookup, holds_nothing
from tests.world import Engine, Server, World, tell

CHUNKS = 5
TOLD_S = 0.1
"""Time in which a lookup hears that a promise is kept or broken, if nothing is cut or stands still."""


def test_a_lookup_is_answered_when_promised_chunks_are_there_or_will_not_come():
    tell(waits)
    assert Sibling.parts, "nothing was answered in parts"


def test_who_expects_a_promise_of_a_dead_engine_waits_no_longer():
    tell(forsaken)


def forsaken(world: World) -> None:
    server = world.server()
    waiting, *others = (world.engine(server, group=bytes([n]) * 16) for n in range(1, 4))
    world.run(
        lambda: all(one.client.connected and one.identity().ready for one in others), "they are attached"
    )
    call = waiting.lookup(prompt(CHUNKS, 94), wait_ms=30_000, expects=True)
    for engine in others:
        world.sleep(TOLD_S)
        assert not call.done, "an engine that lives may yet promise it"
        engine.die()
    assert world.wait(lambda: call.done, 1.0), "those that could promise it are gone, and nobody is told"
    assert (call.result.n_chunks, call.result.reason) == (0, MissReason.PROMISE_BROKEN)


class Prefill:
    """One prompt that an engine computes, chunk by chunk, and has promised."""

    def __init__(self, caller: Caller, tokens: list[int]) -> None:
        self.caller, self.tokens = caller, tokens
        self.call: PromiseCall | None = None
        self.first = 0

    @property
    def engine(self) -> Engine:
        return self.caller.engine

    def promise(self) -> None:
        engine = self.engine
        chain = engine.hasher(self.tokens).chain
        self.caller.note(f"promises {len(chain) // KEY_BYTES} chunks of {self.tokens[0]}")
        self.call = engine.client.promise(engine.identity(), chain)

    def step(self) -> None:
        """Compute and store some more chunks."""
        last = min(self.first + self.caller.random.randrange(1, 3), len(self.tokens) // 16)
        if last > self.first and self.caller.store(self.tokens[: 16 * last], self.first) is not None:
            self.first = last

    def withdraw(self) -> None:
        assert self.call is not None
        self.caller.note(f"withdraws {self.tokens[0]}")
        self.call.withdraw()
        self.call = None


class Sibling(Caller):
    """Looks up, with time to wait, and asks for the rest of what is answered in parts."""

    parts = 0

    def look_up_and_wait(self, tokens: list[int], wait_ms: int, follows: int = 0) -> None:
        in_parts = follows > 0 or self.random.random() < 0.5
        if in_parts:
            for process in self.world.servers[0].parts.processes:
                process.load_rate = 0.001, 1e6  # as if it had told how fast it loads
        call = self.engine.lookup(
            tokens, deadline_ms=200, wait_ms=wait_ms, expects=self.random.random() < 0.3,
            in_parts=in_parts, follows=follows,
        )  # fmt: skip
        self.note(f"looks {tokens[0]} up, and waits {wait_ms} ms")
        self.lookups.append(Lookup(tokens, call, self.world.now_s + (200 + wait_ms) / 1000))

    def answered(self, lookup: Lookup) -> None:
        found = lookup.call.result
        if found.promised > found.n_chunks:
            assert found.lease, "a part brings nothing"
            Sibling.parts += 1
            self.look_up_and_wait(lookup.tokens, 500, found.n_chunks)


def waits(world: World) -> None:
    rng = world.random
    server = world.server()
    engines = [world.engine(server, group=bytes([n]) * 16) for n in range(1, 4)]
    callers = [Sibling(engine, []) for engine in engines]
    prefills: list[Prefill] = []
    for number in range(40):
        living = [caller for caller in callers if not caller.engine.is_dead]
        running = [one for one in prefills if one.call is not None and not one.engine.is_dead]
        match rng.randrange(14):
            case 0 | 1 | 2:
                prefills.append(Prefill(rng.choice(living), prompt(CHUNKS, number % 6)))
                prefills[-1].promise()
            case 3 | 4 | 5 if running:
                rng.choice(running).step()
            case 6 if running:
                rng.choice(running).withdraw()
            case 7 if len(living) == 3 and rng.random() < 0.3:
                rng.choice(living[:2]).engine.die()
            case 8 if rng.random() < 0.5:
                rng.choice(living).engine.cut(sent=rng.randrange(2000))
            case 9 if rng.random() < 0.3:
                server.stop()
                world.sleep(0.2)
                server.start()
            case 10:
                rng.choice(living).cancel()
            case _:
                rng.choice(living).look_up_and_wait(prompt(CHUNKS, rng.randrange(6)), rng.choice([50, 2_000]))
        world.sleep(rng.choice([0.0005, 0.005, 0.05]))
    for one in prefills:
        if one.call is not None and not one.engine.is_dead:
            one.withdraw()
    ends_well(world, server, [caller for caller in callers if not caller.engine.is_dead])


def ends_well(world: World, server: Server, callers: list[Sibling]) -> None:
    """Nobody waits for anything any more, and nothing is left."""
    world.run(lambda: not any(caller.waits for caller in callers), "all calls end")
    promises = server.parts.grants.promises
    left = ("_live", "_by_first", "_waits", "_expecting", "awaited")
    world.run(lambda: not any(getattr(promises, name) for name in left), "nobody promises or waits any more")
    for caller in callers:
        while caller.held:
            caller.engine.client.release([caller.held.pop().call.result.lease], group=True)
    holds_nothing(server)
    working, waiting = callers[0], callers[1]
    keeps_and_breaks(world, working, waiting)
    holds_nothing(server)


def keeps_and_breaks(world: World, working: Sibling, waiting: Sibling) -> None:
    """A kept promise is a hit, a broken one a miss that says so. No engine waits for itself, or without leave."""
    engines = working.engine, waiting.engine
    for engine in engines:
        if engine.is_to_be_cut:
            engine.cut(sent=0)
    world.sleep(2.0)  # what is cut is back
    world.run(
        lambda: all(one.client.connected and one.identity().ready for one in engines), "they are attached"
    )
    whole, other = prompt(CHUNKS, 90), prompt(CHUNKS, 91)
    kept, broken = Prefill(working, whole), Prefill(working, other)
    expecting = waiting.engine.lookup(whole, wait_ms=30_000, expects=True)
    in_vain = waiting.engine.lookup(prompt(CHUNKS, 93), wait_ms=1_000, expects=True)
    world.sleep(TOLD_S)
    kept.promise()
    broken.promise()
    world.run(lambda: waiting.engine.client.has_promises, "the promises are known")
    calls = [waiting.engine.lookup(tokens, wait_ms=30_000) for tokens in (whole, other)]
    for engine, wait_ms in ((working.engine, 30_000), (waiting.engine, 0)):
        call = engine.lookup(whole, wait_ms=wait_ms)
        assert world.wait(lambda call=call: call.done, TOLD_S) and not call.result.n_chunks
    world.sleep(1.0)
    assert not any(call.done for call in [*calls, expecting]), "a promise stands, and nobody waits for it"
    world.run(lambda: in_vain.done, "nobody promises what one lookup expects")
    assert not in_vain.result.n_chunks
    while kept.first < CHUNKS:
        kept.step()
        world.run(lambda: not working.waits, "the chunks are stored")
    assert world.wait(lambda: calls[0].done, TOLD_S), "what was promised is there, and nobody is told"
    for call in (calls[0], expecting):
        assert (call.result.n_chunks, call.result.reason) == (CHUNKS, ""), "it has waited, and got less"
        waiting.engine.client.release([call.result.lease], group=True)
    if world.random.random() < 0.5:
        broken.withdraw()
    else:
        working.engine.die()
    assert world.wait(lambda: calls[1].done, TOLD_S), "a promise is broken, and nobody is told"
    assert (calls[1].result.n_chunks, calls[1].result.reason) == (0, MissReason.PROMISE_BROKEN)
    if working.engine.is_dead:
        return
    kept.withdraw()
    # Two others look a prompt up and promise it, as engines do, while this one computes it, and gives it up.
    third = world.engine(waiting.engine.world.servers[0], group=bytes([7]) * 16)
    world.run(lambda: third.client.connected and third.identity().ready, "a third engine is attached")
    tokens, calls = prompt(CHUNKS, 92), []
    prefills = [Prefill(caller, tokens) for caller in (working, waiting, Sibling(third, []))]
    prefills[0].promise()
    world.sleep(TOLD_S)
    for prefill in prefills[1:]:
        calls.append(prefill.engine.lookup(tokens, wait_ms=30_000))
        prefill.promise()
        world.sleep(TOLD_S)
    assert not any(call.done for call in calls)
    prefills[0].withdraw()
    world.sleep(TOLD_S)
    assert [call.done for call in calls] == [True, False], "both compute, or each waits for the other"
    for prefill in prefills[1:]:
        prefill.withdraw()
    assert world.wait(lambda: calls[1].done, TOLD_S)
