"""A gateway that begins to listen late learns all that vLLM's own cache has, from what is still sent again."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.connectors.vllm import own_cache
from kvstrata.connectors.vllm.own_cache import AnnouncedBlocks, EngineView, OwnCache
from kvstrata.gateway.residency.cache import Cache
from kvstrata.gateway.residency.sources import Source
from kvstrata.gateway.residency.zmq_watcher import Feed
from kvstrata.native.core import Registry
from kvstrata.testing.engine_sim.kv_events import BlockRemoved, BlockStored, Event, KVEventBatch

SIZE = 2


class Stored(BlockStored, tag="BlockStored"):
    """What our connector publishes."""

    again: bool = False


def hash_of(tokens: tuple[int, ...], extra: Any) -> bytes:
    """The engine's hash of the block at the end of a prefix."""
    return hashlib.sha256(repr((tokens, extra)).encode()).digest()


class Engine:
    """A pool of blocks, an LRU whose events are kept for the last batches."""

    def __init__(self, blocks: int, kept: int) -> None:
        self.pool: dict[bytes, None] = {}
        """By hash, the least recently used first."""
        self.blocks = blocks
        self.events: list[Event] = []
        self.batches: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.number = 0
        self.told = 0
        view = EngineView(
            lambda request: request.hashes,
            self.pool.__contains__,
            lambda request, first, n: [request.extra] * n,
            self.event,
            blocks,
        )
        self.own = OwnCache(view, block_tokens=SIZE, kept_batches=kept)

    def event(self, blocks: AnnouncedBlocks) -> Event:
        self.told += len(blocks.hashes)
        return self.stored(blocks.hashes, blocks.parent, blocks.tokens, blocks.extra_keys, again=True)

    @staticmethod
    def stored(
        hashes: list[bytes], parent: bytes | None, tokens: list[int], extra: list[Any], *, again: bool
    ) -> Event:
        return Stored(hashes, parent, tokens, SIZE, None, "GPU", None, extra, 0, again=again)

    def serve(self, tokens: tuple[int, ...], extra: Any) -> None:
        """A request comes and ends within a step."""
        hashes = [hash_of(tokens[: (at + 1) * SIZE], extra) for at in range(len(tokens) // SIZE)]
        hashes = hashes[: self.blocks]
        cached = 0
        while cached < len(hashes) and hashes[cached] in self.pool:
            cached += 1
        while len(self.pool) > self.blocks - (len(hashes) - cached):
            gone = next(name for name in self.pool if name not in hashes[:cached])
            del self.pool[gone]
            self.events.append(BlockRemoved([gone], "GPU", 0))
        for name in reversed(hashes[cached:]):
            if name in self.pool:  # below a block that was evicted: once more
                del self.pool[name]
                self.events.append(BlockRemoved([name], "GPU", 0))
            self.pool[name] = None
        for name in reversed(hashes):  # the end of a chain goes first
            self.pool[name] = self.pool.pop(name)
        if hashes[cached:]:
            parent = hashes[cached - 1] if cached else None
            fresh = list(tokens[cached * SIZE : len(hashes) * SIZE])
            self.events.append(
                self.stored(hashes[cached:], parent, fresh, [extra] * (len(hashes) - cached), again=False)
            )
        self.own.finished(
            SimpleNamespace(hashes=hashes, all_token_ids=list(tokens), extra=extra, lora_request=None)
        )

    def step(self) -> None:
        """End a step: publish its events."""
        events, self.events = self.events, []
        events += self.own.take_events()
        if events:
            self.batches.append((self.number, msgspec.msgpack.encode(KVEventBatch(0.0, events))))
            self.number += 1


def late(engine: Engine) -> Feed:
    """A gateway that begins to listen now."""
    feed = Feed(Cache(Registry(max_bytes=1 << 26), 0, lambda: 0.0), Source("tcp://h:1", "tcp://h:2"))
    for number, payload in engine.batches:
        feed.take(number, payload)
    feed.asked(answered=True)
    return feed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 60), st.sampled_from([4, 10, 40]))
def test_who_listens_late_learns_every_block(seed: int, blocks: int, kept: int) -> None:
    draw = random.Random(seed)
    engine = Engine(blocks, kept)
    known: list[tuple[int, ...]] = [()]
    for _ in range(draw.randrange(5, 120)):
        if draw.random() < 0.5:
            tokens = (*draw.choice(known), *(draw.randrange(3) for _ in range(draw.randrange(12))))
            known.append(tokens)
            engine.serve(tokens, draw.choice([None, ("salt",)]))
        engine.step()
    for _ in range(2 * kept):  # no request: only what is told again
        engine.step()
    feed = late(engine)
    assert feed.malformed == 0
    assert set(feed.cache._keys) == set(engine.pool)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_told_again_is_not_one_more_copy(seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(12, 6)
    feed = Feed(Cache(Registry(max_bytes=1 << 26), 0, lambda: 0.0), Source("tcp://h:1", "tcp://h:2"))
    feed.asked(answered=True)
    published = 0
    for _ in range(60):
        if draw.random() < 0.4:
            engine.serve(tuple(draw.randrange(3) for _ in range(draw.randrange(12))), None)
        engine.step()
        for number, payload in engine.batches:
            if number >= published:
                assert not feed.published(number, payload)
        published = engine.number
        assert set(feed.cache._keys) == set(engine.pool)
        assert not feed.cache._more


def test_no_step_tells_more_than_its_share_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_cache, "STEP_BLOCKS", 4)
    engine = Engine(40, 4)
    engine.serve(tuple(range(60)), None)
    told = []
    for _ in range(30):
        before = engine.told
        engine.step()
        told.append(engine.told - before)
    assert max(told) == 4 and sum(told) > 30
    draw = random.Random(1)
    for _ in range(300):  # the whole pool is replaced again and again
        engine.serve(tuple(draw.randrange(9) for _ in range(80)), None)
        engine.step()
        assert len(engine.own) <= 4 * engine.blocks
    for _ in range(1_000):
        engine.step()
    assert len(engine.own) <= engine.blocks  # nothing that is gone stays
