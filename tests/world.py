"""A whole small world in one thread, on virtual time, from one seed: a server and its engines, with planned faults.

The server is opened as a server process opens it (`open_instance`), with a real pool, a real attach socket and tiers
on shelves in memory.  Engines are real clients with real blocks.  What these get from the operating system is
played: time, threads, process numbers, pidfds and lock bytes.  So a process can die, be stopped, or be cut off after
any byte, and nothing depends on the machine.

    world ─▶ turn of each server's loop, turn of each engine ─▶ nothing to do: time jumps to what is due next

A story is a function of a world.  `tell` runs it for many seeds; a failure shows the seed and the history.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import math
import os
import random
import selectors
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.client import LoadItem, LoadJob, LookupCall, StoreJob
from kvstrata.config.model import ServerSettings
from kvstrata.memory import linux
from kvstrata.native.core import storage_keys
from kvstrata.process.keeper import NOT_RESTARTED
from kvstrata.process.supervisor import Supervisor
from kvstrata.server.housekeeping import heartbeat
from kvstrata.server.instance import Instance, open_instance
from kvstrata.server.plan import Plan, plan
from kvstrata.session.attach import LockHolder
from kvstrata.types import KEY_BYTES, Role
from tests.harness import played
from tests.harness.amount import amount
from tests.harness.amount import seed as drawn
from tests.harness.cache_engine import BLOCKS_PER_CHUNK, CHUNK_TOKENS, CacheEngine
from tests.harness.played import Copies, Drained, Kernel, PlayedLink, Wire
from tests.harness.shelf import SHELVES, Shelf
from tests.harness.shelf import entry as shelf_entry
from tests.harness.validation import validate
from tests.harness.virtual import VirtualClock, VirtualLoop

STANDS_STILL_S = 60.0
"""Virtual time in which everything that a story waits for must happen."""
STEPS_WITHOUT_TIME = 20_000
TIER = {"deadline_ms": 300}
SHOWN = 60
"""Lines of the history that a failure shows."""


class StandsStill(AssertionError):
    """What a story waits for does not happen."""


class Engine(CacheEngine):
    """One process of an engine: a client, its blocks, and what it does by itself."""

    def __init__(self, world: World, server: Server, **more: Any) -> None:
        self.world, self.name = world, f"engine {len(world.engines)}"
        self.pid = world.kernel.born()
        self.locks = LockHolder()
        self.cut_next = math.inf, math.inf
        self.wire: Wire | None = None
        self.is_dead = self.is_frozen = self._is_attaching = False
        self._link_due_s = 0.0
        super().__init__(server.folder, block_bytes=more.pop("block_bytes", 256), num_blocks=128, **more)
        self.link: PlayedLink = self.client._link  # type: ignore[assignment]
        self.copies: Copies = self.client._copier._engine  # type: ignore[assignment]
        self.client.drained = Drained()
        self.requests = self._requests = itertools.count(1_000_000 * len(world.engines))
        """Numbers of its lookups' requests."""
        self._free = [range(at, at + BLOCKS_PER_CHUNK) for at in range(0, 126, BLOCKS_PER_CHUNK)]
        world.engines.append(self)
        self.client.start()

    def turn(self) -> bool:
        """Do what is due. Returns whether anything was."""
        if self.is_dead or self.is_frozen:
            return False
        before, self.world.kernel.running = self.world.kernel.running, self.pid
        try:
            busy = self.copies.turn()
            link, now_s = self.link, self.world.now_s
            if link._stopping and not link._dead:
                link._end()
            elif not link._dead and (link._inbox or self._link_due_s <= now_s or link._poll.poll(0)):
                link._pass(0.0)
                self._link_due_s = now_s + link._timeout_s(now_s)
                busy = True
            if link.attach_due_s <= now_s and not self._is_attaching and not link._dead:
                self._attach()
                busy = True
            return busy
        finally:
            self.world.kernel.running = before

    def _attach(self) -> None:
        self._is_attaching, self.world.attaching, before = True, self, self.world.attaching
        try:
            self.link.attach_due_s = math.inf
            pause_s = self.link._try_to_attach()
            if pause_s < math.inf:
                self.link.attach_due_s = self.world.now_s + pause_s
        finally:
            self._is_attaching, self.world.attaching = False, before

    def due_s(self) -> float:
        """When something is due even if nothing happens before."""
        if self.is_dead or self.is_frozen or self.link._dead:
            return math.inf
        attach_s = math.inf if self._is_attaching else self.link.attach_due_s
        return min(self._link_due_s, attach_s, self.copies.due_s())

    def cut(self, *, sent: float = math.inf, received: float = math.inf) -> None:
        """Cut its connection, or the next one, after so many further bytes."""
        if self.wire is not None and self.wire.fileno() >= 0:
            self.wire.may_send, self.wire.may_receive = sent, received
        else:
            self.cut_next = sent, received

    @property
    def is_to_be_cut(self) -> bool:
        """Whether its connection is cut, or will be."""
        wire = self.wire
        return wire is None or wire.fileno() < 0 or min(wire.may_send, wire.may_receive) < math.inf

    def die(self) -> None:
        """Play the death of the process."""
        self.world.note(f"{self.name} dies")
        self.is_dead = True
        if self.wire is not None:
            self.wire.close()
        self.world.kernel.died(self.pid)
        self._end()

    def close(self) -> None:
        """Close the client in order, while the world goes on, then end the process."""
        if not self.is_dead:
            self.client.close()
            assert self.link._dead, "a closing client did not end"
            self.die()

    def _end(self) -> None:
        link = self.link
        link.closing = link._dead = True
        if link._attachment is not None:
            link._attachment.close()
        link.close()
        self.client._ledger.close()
        self.copies.close()
        linux.close_all(list(self.locks._files.values()))
        self.blocks.close()

    def take_blocks(self, n_chunks: int) -> list[list[int]] | None:
        """Blocks for so many chunks, or None if it has not so many; give them back with `free_blocks`."""
        if len(self._free) < n_chunks:
            return None
        return [list(self._free.pop()) for _ in range(n_chunks)]

    def free_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        self._free += [range(ids[0], ids[-1] + 1) for ids in blocks]

    def fill(self, block_ids: Sequence[int], seed: object) -> None:
        """As `PagedBlocks.fill`, and faster."""
        content, blocks = self._content(seed), self.blocks
        for layer in range(blocks.layers):
            for block in block_ids:
                at = (layer * blocks.num_blocks + block) * blocks.block_bytes
                blocks._memory[at : at + blocks.block_bytes] = content

    def _content(self, seed: object) -> bytes:
        return hashlib.sha256(repr(seed).encode()).digest() * (self.blocks.block_bytes // 32)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Storage keys of a prompt's chunks."""
        identity, chain = self.identity(), self.hasher(tokens).chain
        keys = storage_keys(identity.root, chain, self.client.slice_digest)
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def begin_store(self, tokens: Sequence[int], blocks: list[list[int]], first: int = 0) -> StoreJob:
        """Compute the chunks of a prompt from number `first` on into these blocks, and begin to store them."""
        hasher = self.hasher(tokens)
        for chunk, ids in enumerate(blocks, first):
            self.fill(ids, self._seed(hasher.key(chunk)))
        parent = hasher.key(first - 1) if first else b""
        chain = hasher.chain[KEY_BYTES * first :]
        return self.client.store(self.identity(), parent, chain, self.blocks.plan, blocks, probe=hasher.probe)

    def begin_load(
        self, tokens: Sequence[int], call: LookupCall, blocks: list[list[int]], *, sync: bool = False
    ) -> tuple[LoadJob, list[LoadItem]]:
        """Begin to load a lookup's chunks into these blocks."""
        assert call.result.lease is not None
        items = self.items(tokens, call.result)
        items = [item._replace(block_ids=ids) for item, ids in zip(items, blocks, strict=True)]
        for item in items:
            self.fill(item.block_ids, "not loaded")
        return self.client.load(self.identity(), call.result.lease, items, self.blocks.plan, sync=sync), items

    def check_loaded(self, job: LoadJob, items: Sequence[LoadItem]) -> None:
        """Assert that every loaded byte is right."""
        for number, item in enumerate(items):
            if number not in job.failed:
                wanted = self._content(self._seed(item.key)) * (len(item.block_ids) * self.blocks.layers)
                assert self.blocks.read(item.block_ids) == wanted, f"chunk {number} is wrong"


class _Selector(selectors.DefaultSelector):
    """Never waits."""

    found = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        self.found = len(ready)
        return ready


class ServerLoop(VirtualLoop):
    """A loop that a world turns."""

    def __init__(self, clock: VirtualClock) -> None:
        self.selector = _Selector()
        asyncio.SelectorEventLoop.__init__(self, self.selector)
        self.clock = clock

    def turn(self) -> bool:
        """One turn. Returns whether anything was ready."""
        ready = bool(self._ready) or self.due_s() <= self.clock.now_s  # type: ignore[attr-defined]
        self.call_soon(self.stop)
        self.run_forever()
        return ready or self.selector.found > 0

    def due_s(self) -> float:
        """When its next timer is due."""
        timers = self._scheduled  # type: ignore[attr-defined]
        return timers[0].when() if timers else math.inf


class Server:
    """A server, which can be stopped, started again and frozen. Its pool outlives it."""

    def __init__(self, world: World, settings: ServerSettings, extents_bytes: int) -> None:
        self.world = world
        self.folder = Path(settings.socket_dir)
        self._plan = _planned(settings)._replace(extents_bytes=extents_bytes)
        self.loop = ServerLoop(world.clock)
        self.is_frozen = False
        self.instance: Instance | None = None
        world.servers.append(self)
        self.start()

    @property
    def parts(self) -> Any:
        assert self.instance is not None, "the server does not run"
        return self.instance.parts

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop, while the world goes on."""
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(work)
        self.world.run(task.done, f"the server's {task.get_coro()}")
        return task.result()

    def start(self) -> None:
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._supervisor = Supervisor(self.loop)
        self.instance = self.run(
            open_instance(self._plan, self._supervisor, self._closers, NOT_RESTARTED, self.world.now_s)
        )
        parts = self.parts
        self.run(self.instance.attach.start(self.instance.parts.requests))
        parts.pool.heartbeat()
        self._supervisor.spawn(heartbeat(parts.pool, parts.events), "heartbeat")
        self._supervisor.spawn(self.instance.housekeeping.run(), "housekeeping")
        parts.readiness.set()
        self.world.note(f"the server is up, epoch {parts.facts.epoch}")

    def stop(self) -> None:
        """End without draining anything; the pool stays."""
        self.world.note("the server stops")
        self.check()
        self.run(self._supervisor.stop())
        self.instance = None
        for closer in reversed(self._closers):
            self.run(closer())
        self._closers.clear()
        gc.collect()  # the pool's lock ends with the last reference

    def check(self) -> None:
        """Assert every invariant of pool and sessions, and that no task of the server has crashed."""
        validate(self.parts.pool)
        assert not self._supervisor.failure.done(), self._supervisor.failure.result()
        assert not self._supervisor.failed_jobs, "a job of the server failed, see the log"

    def turn(self) -> bool:
        return not (self.is_frozen or self.loop.is_closed()) and self.loop.turn()

    def due_s(self) -> float:
        return math.inf if self.is_frozen or self.loop.is_closed() else self.loop.due_s()

    def close(self) -> None:
        self.is_frozen = False
        if self.instance is not None:
            self.stop()
        self.loop.close()


_plans: dict[bytes, Plan] = {}


def _planned(settings: ServerSettings) -> Plan:
    """The plan of these settings. Only folders and the shelf's name differ between worlds, and need no check."""
    l1 = msgspec.structs.replace(settings.l1, segment_dir="/world")
    same = msgspec.structs.replace(settings, socket_dir="/world", l1=l1)
    name = msgspec.json.encode(same)
    if name not in _plans:
        _plans[name] = plan(same, {})
    return _plans[name]._replace(settings=settings)


class World:
    """See the module."""

    def __init__(self, seed: int, folder: Path) -> None:
        played.playing = self
        self.seed, self.folder = seed, folder
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.kernel = Kernel()
        self.numbers = itertools.count()
        self.servers: list[Server] = []
        self.engines: list[Engine] = []
        self.attaching: Any = None
        self.history: list[str] = []
        self.shelves: list[Shelf] = []
        self.watchers: list[Callable[[], None]] = []
        """Called after each step."""
        self._idle_steps = 0
        self.splits = False
        """Whether a process often reads less than has arrived."""

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def note(self, what: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.now_s:9.4f}  {what}")

    def server(self, l1_bytes: int = 1 << 20, tiers: int = 0, **settings: Any) -> Server:
        """A server that runs; each of its `tiers` lies on one of the world's shelves."""
        folder = self.folder / f"{self.seed}.{len(self.servers)}"
        (folder / "pool").mkdir(parents=True, mode=0o700)
        l1 = {"size_gb": 1, "entries": 1024, "segment_dir": str(folder / "pool"), **settings.pop("l1", {})}
        self.shelves = [Shelf() for _ in range(tiers)]
        SHELVES.update({f"world {number}": shelf for number, shelf in enumerate(self.shelves)})
        adapters = [shelf_entry(f"world {number}", **TIER) for number in range(tiers)]
        whole = {
            "socket_dir": str(folder), "chunk_size": CHUNK_TOKENS, "l1": l1, "l2_adapters": adapters,
            "http": {"host": "none"}, **settings,
        }  # fmt: skip
        return Server(self, msgspec.convert(whole, ServerSettings), l1_bytes)

    def engine(self, server: Server, **more: Any) -> Engine:
        """A process that attaches. `more`: see CacheEngine."""
        return Engine(self, server, role=more.pop("role", Role.CLIENT), **more)

    def piece(self) -> float:
        """How many bytes a read may get."""
        return self.random.randrange(1, 40) if self.splits and self.random.random() < 0.5 else math.inf

    def step(self, until_s: float = math.inf) -> None:
        """Let everybody do what is due; if nothing was, let time pass, at most until `until_s`."""
        parties: list[Server | Engine] = [*self.servers, *self.engines]
        first = self.random.randrange(len(parties))
        if sum(party.turn() for party in parties[first:] + parties[:first]):
            self._idle_steps += 1
            assert self._idle_steps < STEPS_WITHOUT_TIME, "busy without end"
        else:
            self._idle_steps = 0
            due_s = min(until_s, *(party.due_s() for party in parties))
            if due_s == math.inf:
                raise StandsStill("nothing is due")
            self.clock.now_s = max(self.now_s, due_s)
        for watch in self.watchers:
            watch()

    def wait(self, until: Callable[[], object], most_s: float) -> bool:
        """Go on until this holds, for at most `most_s`. Returns whether it holds."""
        ends_s = self.now_s + most_s
        while not until():
            if self.now_s >= ends_s:
                return False
            self.step(ends_s)
        return True

    def run(self, until: Callable[[], object], what: str) -> None:
        """Go on until this holds. Raises StandsStill if it does not happen."""
        if not self.wait(until, STANDS_STILL_S):
            raise StandsStill(f"this never happens: {what}")

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.wait(lambda: False, seconds)

    def close(self) -> None:
        for party in [*self.engines, *self.servers]:
            party.close()
        self.kernel.close()


def tell(story: Callable[[World], None]) -> None:
    """Tell a story for many seeds: 200 in the gate, 1,700 new ones in test-all. WORLD_SEED=n tells it for one."""
    first = amount(0, drawn())
    seeds = range(first, first + amount(200, 1_700))
    if named := os.environ.get("WORLD_SEED"):
        seeds = range(int(named), int(named) + 1)
    root = Path(tempfile.mkdtemp(prefix="kvstrata-world-", dir="/dev/shm"))
    gc.collect()
    gc.freeze()  # so that each later collection looks at one world only
    try:
        with played.played():
            for seed in seeds:
                world = World(seed, root)
                try:
                    story(world)
                    world.close()
                except BaseException as error:
                    error.add_note(f"WORLD_SEED={seed}, the end of the history:")
                    error.add_note("\n".join(world.history[-SHOWN:]))
                    for engine in world.engines:
                        engine.link.closing = True  # or the end of the process would close its client
                    raise
                shutil.rmtree(root / f"{seed}.0", ignore_errors=True)
    finally:
        gc.unfreeze()
        shutil.rmtree(root, ignore_errors=True)
