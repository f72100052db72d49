"""P1: one outcome per request, before its deadline; nothing leaks, whatever happens to the connection."""

from __future__ import annotations

from tests.promises.caller import Caller, holds_nothing, prompts
from tests.world import Server, World, tell

BACK_S = 1.0
"""Time after which a client uses a server that is back (P4)."""
SILENT_S = 1.5
"""Time after which a client, even an idle one, has noticed that its server is silent."""


def test_clients_of_a_server_that_is_cut_off_silent_or_restarted_are_answered_and_leave_nothing():
    tell(degraded)


def degraded(world: World) -> None:
    rng = world.random
    server = world.server()
    shared = prompts(world, 4, 6)
    callers = [
        Caller(world.engine(server, group=bytes([n]) * 16, block_bytes=2048), shared) for n in range(1, 3)
    ]
    for caller in callers:
        caller.engine.copies.takes_s = lambda: rng.choice([0.0, 0.0, 0.001, 0.05])
        caller.engine.copies.room = rng.choice([1, 2, 256])
    world.splits = rng.random() < 0.3
    frozen_s = 0.0

    def look() -> None:
        nonlocal frozen_s
        frozen_s = frozen_s if server.is_frozen else world.now_s
        is_used = any(caller.engine.client.connected for caller in callers)
        assert not is_used or world.now_s - frozen_s < SILENT_S, "the server's silence is not noticed"

    world.watchers.append(look)
    for tokens in shared[1:]:
        callers[0].store(tokens)
    for _ in range(60):
        is_well = server.instance is not None and not server.is_frozen
        match rng.randrange(20):
            case 0 | 1:
                at = rng.choice([rng.randrange(100), rng.randrange(2000)])
                rng.choice(callers).engine.cut(**{rng.choice(["sent", "received"]): at})
            case 2 if is_well:
                world.note("the server is frozen")
                server.is_frozen = True
            case 3 if is_well and rng.random() < 0.5:
                server.stop()
            case 9 if is_well:
                stalls(world, rng.choice(callers))
            case 2 | 3 | 4 | 5 | 6 | 7 | 8 if not is_well:
                heal(server)
            case 10 if is_well and len(callers) > 1 and rng.random() < 0.2:
                dies_unseen(server, callers.pop())
            case _:
                rng.choice(callers).act()
        if rng.random() < 0.5:
            world.sleep(rng.choice([0.0005, 0.005, 0.05, 0.4]))
    if rng.random() < 0.3 and len(callers) > 1:
        closes(callers.pop())
    ends_well(world, server, callers)


def stalls(world: World, caller: Caller) -> None:
    """A process that does not run for a while does not take its well server for silent."""
    engine = caller.engine
    caller.look_up()
    world.step()  # it has asked, and has not seen the answer
    cut, trips = engine.is_to_be_cut or world.splits, engine.client.stats()["breaker_trips"]
    world.note(f"{engine.name} does not run")
    engine.is_frozen = True
    world.sleep(world.random.choice([0.35, 0.5, 1.5]))
    engine.is_frozen = False
    world.sleep(0.02)
    assert cut or engine.client.stats()["breaker_trips"] == trips, "a well server is taken for silent"


def dies_unseen(server: Server, caller: Caller) -> None:
    """A process that dies while no server runs, or before it has attached to the next one, leaves nothing."""
    caller.store()
    caller.world.step()
    server.stop()
    if caller.random.random() < 0.5:
        caller.engine.die()
        heal(server)
    else:
        heal(server)
        caller.engine.die()


def closes(caller: Caller) -> None:
    """A closing client ends every call, whatever its server does."""
    caller.store()
    caller.look_up()
    caller.note("closes")
    caller.engine.close()
    for lookup in caller.lookups:
        assert lookup.call.done, "a lookup outlives its client"
    for store in caller.stores:
        assert store.job.done.is_set() and store.job.gathered.is_set(), "a store outlives its client"


def heal(server: Server) -> None:
    server.world.note("the server is well")
    server.is_frozen = False
    if server.instance is None:
        server.start()


def ends_well(world: World, server: Server, callers: list[Caller]) -> None:
    """The cache is in use again soon, all calls are answered, and the pool holds what the callers own."""
    heal(server)
    for caller in callers:
        caller.engine.cut()
    clients, links = [caller.engine.client for caller in callers], [caller.engine.link for caller in callers]
    assert world.wait(lambda: all(link.usable for link in links), BACK_S), "the server is not used again"
    world.run(lambda: not any(caller.waits for caller in callers), "all calls are answered")
    for client in clients:
        under_way = ("copies_running", "requests_under_way", "store_backlog_bytes")
        world.run(lambda: not any(client.stats()[name] for name in under_way), "the client is idle")  # noqa: B023
    for caller in callers:
        outcomes, ends_s = {"unavailable"}, world.now_s + BACK_S
        while not outcomes <= {"stored", "present"}:  # it may have fallen silent in the moment of its return
            assert world.now_s < ends_s, outcomes
            world.sleep(0.02)
            job = caller.store()
            assert job is not None
            world.run(lambda: not caller.waits, "a store is answered")  # noqa: B023
            outcomes = set(job.outcomes)
    stats = server.parts.pool.stats
    owned = sum(len(caller.owned()) for caller in callers)
    world.run(lambda: stats()["leases"] == owned, f"{owned} leases, not {stats()['leases']}")
    world.sleep(2.0)
    assert stats()["leases"] == owned == sum(len(caller.owned()) for caller in callers)
    for caller in callers:
        while caller.held:
            caller.load()
            world.run(lambda: not caller.waits, "a load ends")  # noqa: B023
    holds_nothing(server)
