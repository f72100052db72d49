"""What is known of an engine's cache equals what it holds, through loss, replays, restarts and garbage."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.residency import cache as cache_module
from kvstrata.gateway.residency import zmq_watcher
from kvstrata.gateway.residency.cache import Cache as KnownCache
from kvstrata.gateway.residency.cache import decoded
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.residency.prompt import Prompt, root_of
from kvstrata.gateway.residency.sources import Source, of_rank, sources_in
from kvstrata.gateway.residency.zmq_watcher import Feed, _Subscription
from kvstrata.native.core import Registry, chain_keys
from kvstrata.rpc.cluster_wire import tags_of
from kvstrata.testing.engine_sim.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
)
from tests.harness.amount import amount
from tests.harness.cache_engine import eventually

SIZE = 4
REPLAYS = Source("tcp://h:1", "tcp://h:2")


class Cache:
    """An engine's cache: chains of blocks, each stored any number of times, under names that only it knows."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.life = 0
        self.copies: dict[tuple[int, ...], int] = {}
        """How often each prefix, given as the first tokens of its blocks, is there."""
        self.names: dict[tuple[int, ...], int] = {}

    def name(self, chain: tuple[int, ...]) -> int:
        return self.names.setdefault(chain, self.draw.getrandbits(64))

    def store(self) -> Event:
        parents = [(), *self.copies]
        parent = self.draw.choice(parents)
        chain, names = parent, []
        tokens: list[int] = []
        for _ in range(self.draw.randrange(1, 4)):
            first = self.draw.randrange(3)
            chain = (*chain, first)
            names.append(self.name(chain))
            tokens += [first] * SIZE
            self.copies[chain] = self.copies.get(chain, 0) + 1
        parent_name = self.name(parent) if parent else None
        return BlockStored(names, parent_name, tokens, SIZE, None, "GPU", None, group_idx=0)

    def remove(self) -> Event | None:
        if not self.copies:
            return None
        # As engines do, the end of a chain first: what lies below a block goes before it.
        leaves = [
            chain
            for chain in self.copies
            if not any(other[: len(chain)] == chain and other != chain for other in self.copies)
        ]
        chain = self.draw.choice(leaves)
        self.copies[chain] -= 1
        if not self.copies[chain]:
            del self.copies[chain]
        return BlockRemoved([self.name(chain)], "GPU", group_idx=0)

    def step(self) -> list[Event]:
        events: list[Event] = []
        for _ in range(self.draw.randrange(1, 4)):
            what = self.draw.random()
            event: Event | None
            if what < 0.03:
                self.copies.clear()
                event = AllBlocksCleared()
            elif what < 0.45:
                event = self.remove()
            else:
                event = self.store()
            if event is not None:
                events.append(event)
        return events or [self.store()]

    def restart(self) -> None:
        self.copies.clear()
        self.names.clear()
        self.life += 1


class Seen:
    """A registry with one engine."""

    def __init__(self) -> None:
        self.registry = Registry(max_bytes=64 << 20)
        self.now_s = 0.0
        self.cache = KnownCache(self.registry, 6, lambda: self.now_s)

    def chains(self) -> set[tuple[int, ...]]:
        """All prefixes that a lookup finds, up to six blocks long."""
        slot = self.cache.slot
        if slot is None:
            return set()
        mask = bytearray(8_192)
        mask[slot >> 3] |= 1 << (slot & 7)
        found: set[tuple[int, ...]] = set()
        heads: list[tuple[int, ...]] = [()]
        while heads:
            head = heads.pop()
            for first in range(3):
                chain = (*head, first)
                tokens = [one for one in chain for _ in range(SIZE)]
                tags = tags_of(chain_keys(root_of(SIZE), tokens, SIZE, None))
                if slot in self.registry.holders(tags)[-1]:
                    found.add(chain)
                    heads.append(chain)
        return found


def payload(events: list[Event], number: int) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(float(number), events, 0))


@settings(max_examples=amount(50, 150), deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 40))
def test_what_is_known_equals_what_the_engine_holds(seed: int, steps: int) -> None:
    cache, seen = Cache(random.Random(seed)), Seen()
    for number in range(steps):
        seen.cache.apply(decoded(payload(cache.step(), number)))
        assert seen.chains() == set(cache.copies), (seed, number)
        assert len(seen.cache) == len(cache.copies)


class Publisher:
    """An engine's publisher over a line that loses, repeats and breaks."""

    def __init__(self, draw: random.Random, kept: int) -> None:
        self.cache = Cache(draw)
        self.kept = kept
        self.sent: list[bytes] = []
        self.times = itertools.count()

    def publish(self) -> tuple[int, bytes]:
        self.sent.append(payload(self.cache.step(), next(self.times)))
        return len(self.sent) - 1, self.sent[-1]

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        return [(n, one) for n, one in enumerate(self.sent) if n >= max(first, len(self.sent) - self.kept)]

    def restart(self) -> None:
        self.cache.restart()
        self.sent.clear()


def replayed(feed: Feed, publisher: Publisher) -> None:
    """A replay."""
    for number, one in publisher.replay(feed.next):
        feed.take(number, one)
    feed.asked(answered=True)


@settings(max_examples=amount(60, 200), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    lost=st.sampled_from((0.0, 0.1, 0.5)),
    kept=st.sampled_from((3, 1_000)),
    steps=st.integers(1, 50),
)
def test_a_feed_with_replays_is_exact_whatever_is_lost(seed: int, lost: float, kept: int, steps: int) -> None:
    draw = random.Random(seed)
    publisher, seen = Publisher(draw, kept), Seen()
    feed = Feed(seen.cache, REPLAYS)
    replayed(feed, publisher)
    for _ in range(steps):
        if draw.random() < 0.05:
            publisher.restart()
            feed.restarted()
            assert not seen.chains()
            if draw.random() < 0.5:
                publisher.publish()
            replayed(feed, publisher)
        number, one = publisher.publish()
        if draw.random() < lost:
            continue
        if feed.published(number, one):
            replayed(feed, publisher)
            assert not feed.published(number, one)
        before = len(seen.cache)
        assert not feed.published(number, one) and len(seen.cache) == before, "a repeated batch is no news"
    replayed(feed, publisher)
    held = set(publisher.cache.copies)
    # What is lost for good is forgotten, and prefixes below blocks that were told before the feed joined have no key.
    assert seen.chains() <= held, seed
    assert not feed.whole or seen.chains() == held, seed
    assert feed.whole or kept < 1_000, "nothing was lost for good"
    assert feed.whole or seen.cache.missed_s > float("-inf"), "somebody must know that not all was heard"


def test_a_replay_that_cannot_be_had_forgets() -> None:
    publisher, seen = Publisher(random.Random(1), 1_000), Seen()
    feed = Feed(seen.cache, REPLAYS)
    publisher.publish()
    replayed(feed, publisher)
    assert feed.whole and seen.chains()
    feed.asked(answered=False)
    assert not feed.whole and not seen.chains() and feed.gaps == 1
    assert not feed.published(*publisher.publish()), "it goes on with whatever comes"


@settings(max_examples=amount(40, 100), deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 50))
def test_without_replays_what_may_be_gone_is_forgotten(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    publisher, seen = Publisher(draw, 0), Seen()
    feed = Feed(seen.cache, Source("tcp://h:1"))
    for _ in range(steps):
        if draw.random() < 0.05:
            publisher.restart()
            feed.restarted()
        number, one = publisher.publish()
        if draw.random() > 0.2:
            assert not feed.published(number, one)
            assert seen.chains() <= set(publisher.cache.copies), seed


def stored(names: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def test_garbage_is_counted_and_costs_the_rest() -> None:
    for body in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0, [{"type": "Other"}]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1, 2, 3])]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1, 2, 3, -4])]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1, 2, 3, 1 << 33])]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1] * 4, extra_keys=[])]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1] * 4, block_size=0)]]),
        b"\x91" * 5_000,
    ):
        seen = Seen()
        feed = Feed(seen.cache, Source("tcp://h:1"))
        feed.published(0, msgspec.msgpack.encode([1.0, [stored([9], [5] * 4)]]))
        assert not feed.published(1, body)
        assert feed.malformed == 1 and feed.gaps == 1 and seen.cache.missed_s > float("-inf")
        assert not len(seen.cache) and seen.cache.slot is None


def test_an_engine_cannot_fill_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_BLOCKS", 3)
    seen = Seen()
    feed = Feed(seen.cache, Source("tcp://h:1"))
    for number in range(5):
        feed.published(number, msgspec.msgpack.encode([1.0, [stored([number], [number] * 4)]]))
    assert feed.malformed == 1 and len(seen.cache) <= 3


def test_adapters_and_salts_are_apart() -> None:
    seen = Seen()
    tokens = [1] * 4 + [2] * 4
    plain = stored([1, 2], tokens)
    adapter = stored([3, 4], tokens, lora_name="a", extra_keys=[("a",), ("a",)])
    salted = stored([5, 6], tokens, extra_keys=[("s",), None])
    for event in (adapter, salted, plain):
        prompts = {
            "plain": Prompt(tokens),
            "adapter": Prompt(tokens, adapter="a"),
            "salted": Prompt(tokens, salt="s"),
        }
        before = {name: held(seen, one) for name, one in prompts.items()}
        seen.cache.apply(decoded(msgspec.msgpack.encode([1.0, [event]])))
        after = {name: held(seen, one) for name, one in prompts.items()}
        changed = [name for name in prompts if before[name] != after[name]]
        assert len(changed) == 1 and after[changed[0]] == 2, event
    # An engine's connector keeps the blocks of a tenant that a request names apart, by a salt that only it knows.
    assert not held(seen, Prompt(tokens, tenant="s")) and not held(seen, Prompt(tokens, tenant="s", salt="s"))


def held(seen: Seen, prompt: Prompt) -> int:
    found = seen.registry.lookup_prefix(tags_of(prompt.keys(SIZE)))
    return found[0][1] if found else 0


def test_events_of_other_media_are_left_out_and_a_restart_empties_the_cache() -> None:
    seen = Seen()
    feed = Feed(seen.cache, Source("tcp://h:1"))
    own = stored([1], [1] * 4)
    chunk = stored([2], [1] * 8, block_size=8, medium="CPU")
    feed.published(0, msgspec.msgpack.encode([1.0, [own, chunk]]))
    assert len(seen.cache) == 1 and seen.cache.sizes == (SIZE,)
    feed.published(1, msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}]]))
    cleared_s = seen.cache.emptied_s
    assert not len(seen.cache) and cleared_s > float("-inf")
    feed.published(2, msgspec.msgpack.encode([1.0, [own]]))
    assert len(seen.cache) == 1
    feed.restarted()
    assert feed.restarts == 1 and not len(seen.cache) and seen.cache.emptied_s >= cleared_s


def sources() -> Iterator[tuple[dict[str, Any], str, list[Source]]]:
    on = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    yield {}, "h", []
    yield {"0": {"enable_kv_cache_events": False}}, "h", []
    yield {"0": on}, "h", [Source("tcp://h:5557")]
    yield {"0": {**on, "endpoint": "tcp://10.1.2.3:5557"}}, "::1", [Source("tcp://[::1]:5557")]
    yield {"0": {**on, "replay_endpoint": "tcp://*:5558"}}, "h", [Source("tcp://h:5557", "tcp://h:5558")]
    yield {"0": {**on, "replay_endpoint": "tcp://*:5558", "buffer_steps": 0}}, "h", [Source("tcp://h:5557")]
    # Ranks are chosen by their place in this order: behind one port of several they need not begin with 0.
    ranks = {str(rank): {**on, "endpoint": f"tcp://*:{6_000 + rank}"} for rank in (10, 9, 11)}
    yield ranks, "h", [Source(f"tcp://h:{port}") for port in (6_009, 6_010, 6_011)]


def test_events_are_heard_at_the_engines_own_host() -> None:
    for answer, host, wanted in list(sources()):
        assert sources_in(msgspec.json.encode(answer), host) == wanted


ON = b'{"enable_kv_cache_events": true, "endpoint": "tcp://*:1"}'


def test_sources_that_cannot_be_heard_are_told() -> None:
    for answer in (
        b"",
        b"[]",
        b'{"0": 1}',
        b'{"x": {}}',
        b'{"0": {"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/x"}}',
        b'{"0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}}',
        b'{"0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:99999"}}',
        b'{"0": ' + ON + b', "1": {}}',
        b"{" + b", ".join(b'"%d": %s' % (rank, ON) for rank in range(1_025)) + b"}",
    ):
        with pytest.raises(ValueError, match="event"):
            sources_in(answer, "h")


def test_ranks_publish_at_ports_in_a_row() -> None:
    first = Source("tcp://[::1]:65534", "tcp://h:5557", "kv")
    assert of_rank(first, 0) == first
    assert of_rank(first, 1) == Source("tcp://[::1]:65535", "tcp://h:5558", "kv")
    assert of_rank(Source("tcp://h:1"), 9) == Source("tcp://h:10")
    with pytest.raises(ValueError, match="65536"):
        of_rank(first, 2)


def test_a_name_of_a_block_has_a_bound() -> None:
    for length, sound in ((32, True), (64, True), (65, False), (1 << 20, False)):
        event = {"type": "BlockRemoved", "block_hashes": [bytes(length)]}
        payload = msgspec.msgpack.encode([0.0, [event]])
        if sound:
            assert len(decoded(payload).events) == 1
        else:
            with pytest.raises(ValueError, match="64"):
                decoded(payload)


def test_a_defect_is_told_and_the_engine_is_heard_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, begun, fails = _Subscription._connections, threading.Event(), True

    def connections(self: _Subscription, monitor: Any, *, met: bool) -> bool:
        if fails and self.feed.name == "a":
            raise RuntimeError("defect")
        if self.feed.name == "a":
            begun.set()
        return sound(self, monitor, met=met)

    monkeypatch.setattr(_Subscription, "_connections", connections)
    monkeypatch.setattr(zmq_watcher, "AGAIN_MAX_S", 0.01)
    residency = Residency(time.monotonic)
    try:
        for name in "ab":
            residency.watch(name, Source("tcp://127.0.0.1:9", "", ""))
        feeds = residency._feeds
        eventually("it is told", lambda: feeds["a"].failures > 1 and feeds["a"].restarts > 1)
        assert residency.page()["a"]["error"] == "RuntimeError: defect"
        assert residency.heard("a") is None and not feeds["b"].failures, "others are heard on"
        fails = False
        assert begun.wait(60)
    finally:
        residency.close()
