"""A lookup at one server waits for what an engine of another server computes, whoever dies, stops or is cut off.

The servers are real; what a controller knows, the links between the servers, and reads of each other's L1 are played.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from typing import Any

import msgspec

from kvstrata.errors import InternalError, Unavailable
from kvstrata.p2p.awaiting import AwaitedPeers
from kvstrata.p2p.settings import PeerSettings
from kvstrata.rpc.cluster_wire import ANSWERS, TO_INSTANCE, Await, Awaited, Owner, Where, encode, tags_of
from kvstrata.server.requests.elsewhere import Elsewhere
from kvstrata.types import MissReason
from tests.harness.cache_engine import prompt
from tests.harness.shelf import Shelf
from tests.promises.caller import holds_nothing
from tests.promises.test_pending_hits import CHUNKS, Prefill, Sibling
from tests.world import World, tell

KEY = "k" * 40


class Host:
    """A server, and what others know of it and ask it."""

    def __init__(self, world: World, name: str, hosts: list[Host]) -> None:
        self.world, self.name, self.hosts = world, name, hosts
        self.firsts: dict[bytes, int] = {}
        """What the directory knows: promises by the tag of their first chunk."""
        self.is_cut = False
        self.asked: set[asyncio.Task[None]] = set()
        self.server = world.server(tiers=1)
        hosts.append(self)
        self.begin()

    def begin(self) -> None:
        """The server has been started: it joins the others."""

        async def join() -> None:
            parts = self.server.parts
            [tier] = parts.tiers
            tier.medium.shelf = Shelf()
            tier.medium.shelf.records = Records(self)
            parts.facts = parts.facts._replace(instance_id=self.name)
            parts.peer_reads._name = tier.name
            parts.grants.promises.begin_to_tell(self)
            parts.requests.lookups._elsewhere = Elsewhere(parts, Peers(self))

        self.server.run(join())

    def end(self) -> None:
        """Stop the server; whoever asks it is told that the connection has ended."""
        self.firsts = {}
        for task in self.asked:
            task.cancel()
        self.server.stop()

    def others(self) -> list[Host]:
        return [one for one in self.hosts if one is not self and not (one.is_cut or self.is_cut)]

    # --- what its promises tell followers --------------------------------------------------------------------

    def promised(self, first: bytes) -> bool:
        self._known(self.firsts, first, 1)
        return True

    def promise_ended(self, first: bytes) -> None:
        self._known(self.firsts, first, -1)

    def _known(self, firsts: dict[bytes, int], first: bytes, more: int) -> None:
        """The directory knows of it some milliseconds later, unless it is gone."""
        tag = tags_of(first)

        def know() -> None:
            firsts[tag] = firsts.get(tag, 0) + more

        self.server.loop.call_later(self.world.random.choice([0.0, 0.017, 0.05]), know)

    # --- questions of others ---------------------------------------------------------------------------------

    async def ask(self, asker: Host, request: Await, timeout_s: float) -> Awaited:
        """Ask this server, from another one's loop."""
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        async def answered() -> None:
            frame = None
            try:
                asked = TO_INSTANCE.decode(encode(msgspec.structs.replace(request, seq=1)))
                assert isinstance(asked, Await)
                parts = self.server.parts
                found = await parts.grants.promises.for_peer(asker.name, asked, self._stage)
                frame = encode(Awaited(1, parts.facts.epoch, *found))
            finally:
                if not asker.server.loop.is_closed():
                    asker.server.loop.call_soon(lambda: None if answer.done() else answer.set_result(frame))

        if self in asker.others() and self.server.instance is not None:
            self.server.loop.call_soon(lambda: self._keep(self.server.loop.create_task(answered())))
        try:
            async with asyncio.timeout(timeout_s):
                told = await answer
        except TimeoutError:
            told = None
        if told is None or self not in asker.others():
            raise Unavailable("no answer")
        reply = ANSWERS.decode(told)
        assert isinstance(reply, Awaited)
        return reply

    async def _stage(self, chain: bytes) -> Awaitable[None] | None:
        return None

    def _keep(self, task: asyncio.Task[None]) -> None:
        self.asked.add(task)
        task.add_done_callback(self.asked.discard)


class Records(dict[bytes, bytes]):
    """The records of the other servers' L1."""

    def __init__(self, reader: Host) -> None:
        super().__init__()
        self.reader = reader

    def get(self, key: bytes, default: Any = None) -> Any:
        for host in self.reader.others():
            if host.server.instance is None or host.server.is_frozen:
                continue
            with host.server.parts.pool.hold(key) or _Nothing() as hold:
                if hold is not None:
                    return bytes(hold.view())
        return default

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return self.get(key) is not None

    def __setitem__(self, key: bytes, value: bytes) -> None:
        pass


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Link:
    connected = True

    def __init__(self, here: Host, there: Host) -> None:
        self.here, self.there = here, there

    async def ask(self, request: Await, answer: object, timeout_s: float) -> Awaited:
        return await self.there.ask(self.here, request, timeout_s)

    def close(self) -> None:
        pass


class Peers(AwaitedPeers):
    """Asks other hosts."""

    def __init__(self, host: Host) -> None:
        super().__init__(PeerSettings(("tcp://x:1",), "tcp"), host.world.clock, host.name)
        self.host = host

    async def on_disks(self, keys: bytes, n_slices: int, most_s: float) -> tuple[str, int]:
        return "", 0

    async def _asked(self, where: Where, most_s: float) -> list[Owner] | None:
        await asyncio.sleep(self.host.world.random.choice([0.0005, 0.01]))
        tags = [where.tags[at : at + 8] for at in range(0, len(where.tags), 8)]
        found = [
            (min(at), host)
            for host in self.host.others()
            if (at := [n for n, tag in enumerate(tags) if host.firsts.get(tag)])
        ]
        named = [(0, host) for host in self.host.others() if host.name == where.named]
        return [
            Owner(host.name, host.server.parts.facts.epoch, "", 0, True, KEY)
            for _, host in sorted([*found, *named], key=lambda one: one[0])
            if host.server.instance is not None
        ]

    def _linked(self, entry: Owner) -> Any:
        return _Link(self.host, next(one for one in self.host.hosts if one.name == entry.instance))


def test_a_lookup_is_answered_when_what_another_host_computes_is_there_or_will_not_come():
    tell(waits)


def waits(world: World) -> None:
    rng = world.random
    hosts: list[Host] = []
    for name in ("a", "b"):
        Host(world, name, hosts)
    engines = [world.engine(hosts[n % 2].server, group=bytes([n + 1]) * 16) for n in range(4)]
    callers = [Sibling(engine, []) for engine in engines]
    prefills: list[Prefill] = []
    for number in range(40):
        living = [caller for caller in callers if not caller.engine.is_dead]
        running = [one for one in prefills if one.call is not None and not one.engine.is_dead]
        host = rng.choice(hosts)
        match rng.randrange(16):
            case 0 | 1 | 2:
                prefills.append(Prefill(rng.choice(living), prompt(CHUNKS, number % 6)))
                prefills[-1].promise()
            case 3 | 4 | 5 if running:
                rng.choice(running).step()
            case 6 if running:
                rng.choice(running).withdraw()
            case 7 if len(living) == 4 and rng.random() < 0.3:
                rng.choice(living).engine.die()
            case 8 if rng.random() < 0.5:
                rng.choice(living).engine.cut(sent=rng.randrange(2000))
            case 9 if rng.random() < 0.3 and not host.server.is_frozen:
                host.end()
                world.sleep(0.2)
                gc.collect()  # questions to others, which the stop has cancelled, refer to the pool
                host.server.start()
                host.begin()
            case 10:
                rng.choice(living).cancel()
            case 11:
                world.note(f"{host.name} is cut off, or back")
                host.is_cut = not host.is_cut
            case 12 if rng.random() < 0.5:
                world.note(f"{host.name} stands still, or goes on")
                host.server.is_frozen = not host.server.is_frozen
            case _:
                rng.choice(living).look_up_and_wait(prompt(CHUNKS, rng.randrange(6)), rng.choice([50, 2_000]))
        world.sleep(rng.choice([0.0005, 0.005, 0.05]))
    for host in hosts:
        host.is_cut = host.server.is_frozen = False
    for one in prefills:
        if one.call is not None and not one.engine.is_dead:
            one.withdraw()
    ends_well(world, hosts, [caller for caller in callers if not caller.engine.is_dead])


def ends_well(world: World, hosts: list[Host], callers: list[Sibling]) -> None:
    """Nobody waits any more and nothing is left; then a new promise of one host is kept for the other one."""
    world.run(lambda: not any(caller.waits for caller in callers), "all calls end")
    left = ("_live", "_by_first", "_waits", "_expecting", "awaited", "peers_wait_now")
    for host in hosts:
        promises = host.server.parts.grants.promises
        world.run(
            lambda promises=promises: not any(getattr(promises, name) for name in left),
            "nobody promises or waits any more",
        )
    world.run(
        lambda: not any(any(host.firsts.values()) for host in hosts), "the directory knows of no promise"
    )
    for caller in callers:
        while caller.held:
            caller.engine.client.release([caller.held.pop().call.result.lease], group=True)
    for host in hosts:
        holds_nothing(host.server)
        assert not host.server.parts.counters.errors[InternalError.code], "the server failed on a request"
    working, waiting = (next(one for one in callers if one.engine.name == f"engine {n}"
                             or one.engine.name == f"engine {n + 2}") for n in (0, 1))  # fmt: skip
    for one in (working, waiting):
        if one.engine.is_to_be_cut:
            one.engine.cut(sent=0)
    world.sleep(32.0)  # what is cut is back, and owners that failed are asked again
    world.run(
        lambda: all(
            one.engine.client.connected and one.engine.identity().ready for one in (working, waiting)
        ),
        "they are attached",
    )
    kept = Prefill(working, prompt(CHUNKS, 90))
    kept.promise()
    world.sleep(0.1)
    call = waiting.engine.lookup(kept.tokens, wait_ms=30_000)
    world.sleep(1.0)
    assert not call.done, "a promise of another host stands, and nobody waits for it"
    while kept.first < CHUNKS:
        kept.step()
        world.run(lambda: not working.waits, "the chunks are stored")
    assert world.wait(lambda: call.done, 2.0), "what was promised is there, and nobody is told"
    assert (call.result.n_chunks, call.result.reason) == (CHUNKS, ""), "it has waited, and got less"
    waiting.engine.client.release([call.result.lease], group=True)
    kept.withdraw()
    still = Prefill(working, prompt(CHUNKS, 91))
    still.promise()
    world.sleep(0.1)
    call = waiting.engine.lookup(still.tokens, deadline_ms=200, wait_ms=500)
    world.sleep(0.05)
    assert not call.done
    hosts[0].server.is_frozen = True
    world.run(lambda: call.done, "the server of a lookup answers, though the other one stands still")
    assert call.result.reason == MissReason.PROMISED, "the client has given up before its server did"
    hosts[0].server.is_frozen = False
