"""What an engine asks its client to do, at random, and the check that each answer keeps the promises.

A caller notices after each step of the world what has ended: a lookup by its deadline, a store with its blocks free, a
load with every byte right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.client import LoadItem, LoadJob, LookupCall, StoreJob, StoreOutcome
from tests.harness.cache_engine import prompt
from tests.harness.shelf import Shelf
from tests.world import Engine, Server, World

LATE_S = 0.001
"""A lookup may be answered so much after its deadline, since passes take no time."""


class Lookup(NamedTuple):
    tokens: list[int]
    call: LookupCall
    ends_s: float


class Load(NamedTuple):
    job: LoadJob
    lookup: Lookup
    items: list[LoadItem]
    blocks: list[list[int]]
    has_begun: bool


class Store(NamedTuple):
    tokens: list[int]
    job: StoreJob
    blocks: list[list[int]]


class Caller:
    """The caller of one engine, that uses these prompts."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        self.engine, self.world, self.prompts = engine, engine.world, prompts
        self.lookups: list[Lookup] = []
        """Not answered yet."""
        self.held: list[Lookup] = []
        """Leases that are this caller's."""
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.outcomes: dict[StoreOutcome, int] = {}
        self.stored: set[bytes] = set()
        """Storage keys of the chunks that were stored for this caller."""
        self.world.watchers.append(self.look)

    @property
    def random(self) -> random.Random:
        return self.world.random

    @property
    def waits(self) -> bool:
        return bool(self.lookups or self.loads or self.stores)

    def owned(self) -> list[Lookup]:
        """The leases of the present server that this caller holds."""
        epoch = self.engine.client.epoch
        return [one for one in self.held if not one.call.revoked and one.call.result.lease.epoch == epoch]

    # --- deeds --------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do one thing, if it can be done."""
        self.random.choices(
            [
                self.store,
                self.look_up,
                self.load,
                self.release,
                self.cancel,
                self.cancel_store,
                self.cancel_load,
                self.store_rest,
            ],
            [4, 8, 4, 2, 2, 1, 1, 1],
        )[0]()

    def store(self, tokens: list[int] | None = None, first: int = 0) -> StoreJob | None:
        tokens = tokens or self.some_prompt()
        blocks = self.engine.take_blocks(len(tokens) // 16 - first)
        if blocks is None:
            return None
        was_connected = self.engine.client.connected
        job = self.engine.begin_store(tokens, blocks, first)
        self.note(f"stores {len(blocks)} chunks of {tokens[0]}")
        assert was_connected or job.done.is_set(), "a store waits for an absent server"
        self.stores.append(Store(tokens, job, blocks))
        return job

    def store_rest(self) -> None:
        """Store the end of a prompt, whose beginning may be present."""
        tokens = self.some_prompt()
        self.store(tokens, self.random.randrange(len(tokens) // 16))

    def look_up(self, tokens: list[int] | None = None, deadline_ms: int | None = None) -> Lookup:
        tokens = tokens or self.some_prompt()
        deadline_ms = deadline_ms or self.random.choice([20, 200, 2000])
        was_connected = self.engine.client.connected
        call = self.engine.lookup(tokens, deadline_ms=deadline_ms)
        self.note(f"looks {len(tokens) // 16} chunks of {tokens[0]} up, {deadline_ms} ms")
        assert was_connected or call.done, "a lookup waits for an absent server"
        self.lookups.append(Lookup(tokens, call, self.world.now_s + deadline_ms / 1000))
        return self.lookups[-1]

    def load(self) -> None:
        if not self.held:
            return
        lookup = self.held.pop(self.random.randrange(len(self.held)))
        blocks = self.engine.take_blocks(lookup.call.result.n_chunks)
        if blocks is None:
            self.held.append(lookup)
            return
        is_ours = not lookup.call.revoked and lookup.call.result.lease.epoch == self.engine.client.epoch
        job, items = self.engine.begin_load(
            lookup.tokens, lookup.call, blocks, sync=self.random.random() < 0.3
        )
        self.note(f"loads {len(items)} chunks of {lookup.tokens[0]}")
        assert not job.done.is_set() or not job.failed or not is_ours, "a load under a good lease failed"
        self.loads.append(Load(job, lookup, items, blocks, not job.failed))

    def release(self) -> None:
        if not self.held:
            return
        lookup = self.held.pop(self.random.randrange(len(self.held)))
        self.note(f"releases {lookup.tokens[0]}")
        # A scheduler gives back for its workers too: they were not told of this lease, so they would keep it.
        group = self.random.random() < 0.5 or not self.engine.client.slice_digest
        self.engine.client.release([lookup.call.result.lease], group=group)
        blocks = (
            self.engine.take_blocks(lookup.call.result.n_chunks) if self.engine.client.slice_digest else None
        )
        if blocks is not None:
            job, items = self.engine.begin_load(lookup.tokens, lookup.call, blocks, sync=True)
            assert len(job.failed) == len(items), "a lease that was given back is loaded"
            self.engine.free_blocks(blocks)

    def cancel(self) -> None:
        """Cancel a lookup, before or after its answer."""
        both = self.lookups + self.held
        if both:
            lookup = self.random.choice(both)
            (self.lookups if lookup in self.lookups else self.held).remove(lookup)
            self.note(f"cancels the lookup of {lookup.tokens[0]}")
            lookup.call.cancel()

    def cancel_store(self) -> None:
        """Cancel a store, and write its blocks at once, though they are free only when they are gathered."""
        if self.stores:
            store = self.random.choice(self.stores)
            store.job.cancel()
            for ids in store.blocks:
                self.engine.fill(ids, "written early")

    def cancel_load(self) -> None:
        """Cancel a load that runs, or give back its lease, which the load keeps to its end."""
        if self.loads:
            load = self.random.choice(self.loads)
            if self.random.random() < 0.5:
                load.job.cancel()
            else:
                self.engine.client.release([load.lookup.call.result.lease])

    def some_prompt(self) -> list[int]:
        tokens = self.random.choice(self.prompts)
        return tokens[: 16 * self.random.randrange(1, len(tokens) // 16 + 1)]

    def note(self, what: str) -> None:
        self.world.note(f"{self.engine.name} {what}")

    def answered(self, lookup: Lookup) -> None:
        """For a caller that knows more of what an answer may be."""

    # --- answers ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note what has ended, and check it."""
        if self.engine.is_dead or not self.waits:
            return
        for lookup in [one for one in self.lookups if one.call.done]:
            self.lookups.remove(lookup)
            self.note(
                f"found {lookup.call.result.n_chunks} of {lookup.tokens[0]} {lookup.call.result.reason}"
            )
            self.answered(lookup)
            if lookup.call.result.lease:
                self.held.append(lookup)
        now_s = self.world.now_s
        late = [one for one in self.lookups if now_s > one.ends_s + LATE_S and not self.engine.is_frozen]
        assert not late, f"a lookup is not answered by its deadline: {late[0].tokens[0]}"
        for store in self.stores:
            if store.blocks and store.job.gathered.is_set():
                for ids in store.blocks:
                    self.engine.fill(ids, "used for something else")
                self.engine.free_blocks(store.blocks)
                store.blocks.clear()
        for store in [one for one in self.stores if one.job.done.is_set()]:
            self.stores.remove(store)
            assert not store.blocks, "a store is done, and its blocks are still read"
            keys = self.engine.keys(store.tokens)[-len(store.job.outcomes) :]
            for key, outcome in zip(keys, store.job.outcomes, strict=True):
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
                if outcome is StoreOutcome.STORED:
                    self.stored.add(key)
            self.note(f"stored {store.tokens[0]}: {' '.join(store.job.outcomes)}")
        for load in [one for one in self.loads if one.job.done.is_set()]:
            self.loads.remove(load)
            if load.has_begun and not load.job.cancelled:
                assert not load.job.failed, "a load that had begun failed"
            self.engine.check_loaded(load.job, load.items)
            assert not self.engine.client.stats()["corrupt_chunks"], "a chunk was damaged"
            self.engine.free_blocks(load.blocks)


def prompts(world: World, count: int, most_chunks: int) -> list[list[int]]:
    """Prompts that share no chunk."""
    return [prompt(world.random.randrange(1, most_chunks + 1), number) for number in range(count)]


def relieve(shelf: Shelf) -> None:
    """Let a tier be well."""
    shelf.takes_s, shelf.fails = (lambda: 0.0), (lambda: False)
    shelf.let_go()


def disturb(world: World, shelf: Shelf) -> None:
    """Let a tier be well, slow, fail, or hang."""
    rng = world.random
    relieve(shelf)
    how = rng.choice(["well", "slow", "fails", "hangs", "loads hang"])
    world.note(f"medium {world.shelves.index(shelf)}: {how}")
    match how:
        case "slow":
            shelf.takes_s = lambda: rng.choice([0.001, 0.05, 0.4])
        case "fails":
            shelf.fails = lambda: rng.random() < 0.7
        case "hangs":
            shelf.shut("exists", "put", "load")
        case "loads hang":
            shelf.shut("load", "put")


def holds_nothing(server: Server) -> None:
    """The pool holds nothing for anybody, soon."""
    names = ("leases", "reservations", "reserved_bytes", "leased_bytes", "quarantined_bytes", "holds")
    stats = server.parts.pool.stats
    server.world.run(lambda: not any(stats()[name] for name in names), "the pool holds nothing")
    server.check()
