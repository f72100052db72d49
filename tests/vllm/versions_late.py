"""The part of `versions_run` about late stores: vLLM's own scheduler and block pool, copies that take several steps."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

from vllm.v1.request import RequestStatus

from kvstrata.client.handles import LoadJob, StoreJob, StoreOutcome
from kvstrata.keys import batch
from tests.harness.scheduler_side import FakeCall
from tests.vllm.versions_engine import BLOCK, BLOCKS, CHUNK, Client, DryEngine, vllm_config

L1_CHUNKS = BLOCKS * BLOCK // CHUNK
"""As many as vLLM's own cache holds."""
COPIED_PER_STEP = 5
"""Fewer than a step may overwrite and store, so that stores are overtaken."""


class World:
    """An engine whose blocks hold the tokens that their KV depends on, and an L1 of whole chunks, evicted by LRU."""

    def __init__(self, folder: Path, store: str) -> None:
        Client.hits = 0
        self.engine = DryEngine(vllm_config(folder, extra={"kvstrata.store": store}))
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.l1: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self.copying: deque[tuple[StoreJob, int, bytes, list[int]]] = deque()
        self.stored = self.cancelled = self.hit_tokens = 0
        if (late := self.engine.side.stores._late) is not None:
            late._shared = lambda: True
        client, copies = self.engine.client, self.engine.copies
        client.peek, client.present, client.lookup = self.peek, self.present, self.lookup
        copies.store, copies.load = self.store, self.load  # type: ignore[method-assign]

    def peek(self, identity: Any, hasher: Any) -> int:
        keys = batch.split(hasher.chain)
        return next((at for at, key in enumerate(keys) if key not in self.l1), len(keys))

    def present(self, chunks: Any) -> list[bool]:
        return [key in self.l1 for _, key in chunks]

    def lookup(self, identity: Any, hasher: Any, **_: Any) -> FakeCall:
        call = FakeCall(self.engine.client, hasher.n_chunks)
        found = self.peek(identity, hasher)
        for key in batch.split(hasher.chain)[:found][::-1]:
            self.l1.move_to_end(key)
        call.answer(found)
        return call

    def store(self, identity: Any, store: Any, blocks: Any) -> StoreJob:
        def cancel(job: StoreJob) -> None:
            mine = [one for one in self.copying if one[0] is job]
            self.copying = deque(one for one in self.copying if one[0] is not job)
            self.cancelled += len(mine)
            job.ended_gather(len(mine))
            job.settle([at for _, at, _, _ in mine], StoreOutcome.CANCELLED)

        job = StoreJob(len(blocks), cancel)
        keys = batch.split(store.chain)
        self.copying += [(job, at, keys[at], list(chunk)) for at, chunk in enumerate(blocks)]
        return job

    def copy(self) -> None:
        """Copy some chunks; each must have the KV that its key names."""
        for _ in range(min(COPIED_PER_STEP, len(self.copying))):
            job, at, key, blocks = self.copying.popleft()
            tokens = self.blocks[blocks[-1]]
            (tracked,) = [self.blocks[block] for block in blocks[:-1]] or [tokens]
            assert tokens[: len(tracked)] == tracked, "a chunk was copied from blocks of two prompts"
            [identity] = self.engine.side._keys._identities.values()
            hasher = identity.hasher()
            hasher.feed(tokens)
            assert hasher.chain[-32:] == key, "a chunk was copied from blocks that hold other tokens"
            self.l1[key] = tokens
            self.stored += 1
            while len(self.l1) > L1_CHUNKS:
                self.l1.popitem(last=False)
            job.ended_gather(1)
            job.settle([at], StoreOutcome.STORED)

    def load(self, identity: Any, lease: Any, items: Any, *, sync: bool) -> LoadJob:
        gone = [at for at, item in enumerate(items) if item.key not in self.l1]  # nothing holds a lease here
        for item in items if not gone else ():
            tokens = self.l1[item.key]
            for at, block in enumerate(item.block_ids):
                if block >= 0:
                    self.blocks[block] = tokens[: len(tokens) - (len(item.block_ids) - 1 - at) * BLOCK]
                    self.hit_tokens += BLOCK
        job = LoadJob(lambda job: None)
        job.finish(range(len(items)) if gone else (), 0)
        return job

    def step(self) -> None:
        """One step of vLLM, whose forward pass fills the blocks of all tokens that it computes."""
        scheduler, runner = self.engine.scheduler, self.engine.runner
        forward = runner._forward

        def compute() -> None:
            forward()
            for request in scheduler.running:
                [table] = scheduler.kv_cache_manager.get_block_ids(request.request_id)
                for index in range(request.num_computed_tokens // BLOCK):
                    known = self.blocks.get(table[index], ())
                    tokens = tuple(request.all_token_ids[: (index + 1) * BLOCK])
                    assert len(tokens) == (index + 1) * BLOCK
                    if known != tokens:
                        self.blocks[table[index]] = tokens

        runner._forward = compute  # type: ignore[method-assign]
        try:
            self.engine.step()
        finally:
            runner._forward = forward  # type: ignore[method-assign]
        self.copy()


def sessions(world: World, seed: int, requests: int) -> float:
    """Sessions take turns, each prompt continuing the last one of its session; some are aborted, some preempted.

    Returns the part of the prompts' tokens that came from L1.
    """
    draw = random.Random(seed)
    prompts = {n: [n * 100_000 + i for i in range(draw.randrange(300, 900))] for n in range(10)}
    asked = 0
    live: list[Any] = []
    for number in range(requests):
        session = draw.randrange(len(prompts))
        prompts[session] += [number * 1_000 + 50_000_000 + i for i in range(draw.randrange(50, 300))]
        if len(prompts[session]) > 2_400:
            del prompts[session][600:]
        prompt = prompts[session]
        live.append(world.engine.add(0, max_tokens=draw.choice([1, 20, 150]), prompt=prompt))
        asked += len(prompt)
        for _ in range(draw.randrange(1, 12)):
            world.step()
            if draw.random() < 0.01:
                world.engine.scheduler.reset_prefix_cache(reset_running_requests=False)
        if draw.random() < 0.1:
            request = draw.choice(live)
            if not request.is_finished():
                world.engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    for _ in range(2_000):
        if not world.engine.scheduler.has_requests():
            break
        world.step()
    return world.hit_tokens / asked


def check_a_late_store_never_copies_what_its_key_does_not_name_and_adds_to_vllms_own_hits(
    folder: Path,
) -> None:
    shares: dict[str, float] = {}
    for store in ("commit", "late"):
        world = World(folder, store)
        shares[store] = sessions(world, seed=7, requests=250)
        assert world.engine.left()["blocks"] == world.engine.left()["leases"] == 0, world.engine.left()
        shares[f"{store} chunks"] = world.stored
        if store == "late":
            assert world.cancelled > 0, "no store was overtaken, so nothing was tested"
    assert shares["late"] > 1.5 * shares["commit"], shares
    assert shares["late chunks"] < shares["commit chunks"], shares
