"""Tails with a real server: conversations that grow, a killed server, and tails in L2. Every byte is checked."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest

from kvstrata.client import LoadItem
from kvstrata.client.handles import LookupResult
from kvstrata.keys import batch
from kvstrata.rpc.wire import TailSet
from kvstrata.types import unpack_extents
from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually
from tests.harness.server_process import ServerProcess

BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS


class Engine(CacheEngine):
    """Four blocks a chunk, so that a chunk has tails of one, two and three blocks."""

    chunk_blocks = BLOCKS_PER_CHUNK

    def blocks_of(self, chunk: int, first_block: int = 0) -> list[int]:
        begin = first_block + chunk * BLOCKS_PER_CHUNK
        return list(range(begin, begin + BLOCKS_PER_CHUNK))


class Conversation:
    """One conversation of an engine, which stores and loads its tails as vLLM's connector does."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.draw = random.Random(seed)
        self.tokens: list[int] = []

    def grow(self, n_tokens: int) -> None:
        self.tokens += [self.draw.randrange(1 << 31) for _ in range(n_tokens)]

    def keys(self, chunk: int) -> list[bytes]:
        """The keys of the tails of a chunk as far as the tokens go, the shortest first."""
        start = chunk * CHUNK_TOKENS
        part = self.tokens[start : start + CHUNK_TOKENS - BLOCK_TOKENS]
        return self.engine.hasher(self.tokens).tail_keys(chunk, part, BLOCK_TOKENS)

    def present(self, keys: list[bytes]) -> list[bytes]:
        root = self.engine.identity().root
        there = self.engine.client.pool.present([(root, key) for key in keys])
        return [key for key, is_there in zip(keys, there or [], strict=False) if is_there]

    def store(self) -> None:
        """Store the chunks that L1 lacks, and the tail; each replaces the tails of its tokens."""
        engine, hasher = self.engine, self.engine.hasher(self.tokens)
        absent = engine.client.peek(engine.identity(), hasher)
        if absent < hasher.n_chunks:
            replaces = b"".join(self.present(self.keys(absent)))
            job = engine.store(self.tokens, first=absent, replaces=replaces)
            assert job.done.wait(PATIENCE_S) and set(job.outcomes) == {"stored"}, job.outcomes
        keys = self.keys(hasher.n_chunks)
        if keys and keys[-1] not in self.present(keys):
            blocks = engine.blocks_of(hasher.n_chunks)[: len(keys)]
            engine.blocks.fill(blocks, engine._seed(keys[-1]))
            job = engine.client.store(
                engine.identity(),
                hasher.key(hasher.n_chunks - 1) if hasher.n_chunks else b"",
                keys[-1],
                engine.blocks.plan,
                [blocks],
                tail_tokens=len(keys) * BLOCK_TOKENS,
                replaces=b"".join(self.present(keys[:-1])),
            )
            assert job.done.wait(PATIENCE_S) and job.outcomes == ["stored"], job.outcomes

    def look_up(self, *, in_l2: bool = False) -> LookupResult:
        engine, hasher = self.engine, self.engine.hasher(self.tokens)
        chunk = hasher.n_chunks if in_l2 else engine.client.peek(engine.identity(), hasher)
        keys = self.keys(chunk)[::-1]
        tokens = [(len(keys) - number) * BLOCK_TOKENS for number in range(len(keys))]
        tails = [TailSet(chunk, tokens, b"".join(keys), in_l2)] if keys else []
        call = engine.client.lookup(
            engine.identity(), hasher.chain, request_id="request", deadline_ms=10_000, tails=tails
        )
        assert call.wait(PATIENCE_S)
        return call.result

    def hit(self, *, in_l2: bool = False) -> int:
        """Look the conversation up, load what there is and check it; return the tokens."""
        result = self.look_up(in_l2=in_l2)
        if result.lease is None:
            return 0
        return self.load(result)

    def load(self, result: LookupResult) -> int:
        engine, chain = self.engine, self.engine.hasher(self.tokens).chain
        half = engine.blocks.num_blocks // 2
        items, n = [], result.n_chunks
        for chunk, extent in enumerate(unpack_extents(result.extents)):
            blocks, key = engine.blocks_of(chunk, half), chain[chunk * 32 : chunk * 32 + 32]
            if chunk == n:
                count = result.tail_tokens // BLOCK_TOKENS
                blocks, key = blocks[:count], self.keys(n)[count - 1]
            items.append(LoadItem(key, extent.offset_bytes, extent.length_bytes, blocks))
        assert len(items) == n + bool(result.tail_tokens) and result.lease is not None
        for item in items:
            engine.blocks.fill(item.block_ids, "not loaded")
        job = engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan)
        assert job.wait(PATIENCE_S) and not job.failed
        for item in items:
            spare = engine.blocks_of(0, engine.blocks.num_blocks - BLOCKS_PER_CHUNK)[: len(item.block_ids)]
            engine.blocks.fill(spare, engine._seed(item.key))
            assert engine.blocks.read(item.block_ids) == engine.blocks.read(spare)
        return n * CHUNK_TOKENS + result.tail_tokens

    @property
    def whole(self) -> int:
        return len(self.tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def tails(server: ServerProcess) -> int:
    return int(server.get("/v1/status")["pool"]["tails"]["entries"])


@pytest.fixture
def server(start: Callable[..., ServerProcess]) -> ServerProcess:
    return start(l1_mb=32, l2="fs", environment=os.environ | {"KVSTRATA_L2_TAILS_AFTER_S": "0"})


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    with Engine(server.socket_dir) as made:
        made.connect()
        yield made


def test_conversations_leave_one_tail_each_and_hit_their_last_block(server, engine):
    seed = random.randrange(10_000)
    draw = random.Random(seed)
    all_of_them = [Conversation(engine, seed + number) for number in range(3)]
    for turn in range(6):
        for one in all_of_them:
            before = one.whole
            one.grow(draw.randrange(1, 2 * CHUNK_TOKENS))
            assert one.hit() == before, (seed, turn)
            one.store()
            assert one.hit() == one.whole, (seed, turn)
        ending = sum(one.whole % CHUNK_TOKENS > 0 for one in all_of_them)
        eventually("replaced tails leave L1", lambda: tails(server) == ending)  # noqa: B023
    eventually("all leases end", lambda: server.get("/v1/status")["pool"]["leases"] == 0)


def test_a_killed_server_serves_its_tails_again_and_replaces_them(server, engine):
    one = Conversation(engine, 1)
    one.grow(CHUNK_TOKENS + 3 * BLOCK_TOKENS + 1)
    one.store()
    server.kill()
    assert server.start()["adopted"]
    eventually("the client attaches again", lambda: engine.client.connected)
    eventually("the tail is verified and hit", lambda: one.hit() == one.whole)
    assert tails(server) == 1
    one.grow(CHUNK_TOKENS)
    one.store()
    assert one.hit() == one.whole
    eventually("the replaced tail leaves L1", lambda: tails(server) == 1)


def test_a_prompt_that_comes_again_from_disk_hits_its_tail_and_its_next_turn_deletes_it(server, engine):
    one = Conversation(engine, 2)
    one.grow(2 * CHUNK_TOKENS + 2 * BLOCK_TOKENS)
    one.store()
    folder = server.folder / "l2"

    def stored() -> set[str]:
        return {path.name for path in folder.rglob("*.kvc")}

    eventually("the chunks and the tail are put", lambda: len(stored()) == 3)
    before = stored()
    server.stop()
    server.wipe_segment()
    server.start()
    eventually("the client attaches again", lambda: engine.client.connected)
    longer = Conversation(engine, 2)
    longer.grow(2 * CHUNK_TOKENS + 3 * BLOCK_TOKENS + 1)
    assert longer.tokens[: len(one.tokens)] == one.tokens
    assert longer.hit(in_l2=True) == one.whole, "the longest tail that L2 has"
    longer.store()
    assert longer.hit() == longer.whole
    eventually("the replaced tail leaves L1", lambda: tails(server) == 1)
    eventually("the replaced tail is deleted", lambda: len(before - stored()) == 1)
    eventually("the new one is put", lambda: len(stored()) == 3)
    server.stop()
    server.wipe_segment()
    server.start()
    eventually("the client attaches again", lambda: engine.client.connected)
    assert longer.hit(in_l2=True) == longer.whole


@pytest.mark.long
def test_an_engine_that_knows_no_tails_meets_none(server: ServerProcess, engine: Engine) -> None:
    one = Conversation(engine, 4)
    one.grow(CHUNK_TOKENS + 3 * BLOCK_TOKENS)
    one.store()
    assert engine.looked_up(one.tokens).n_chunks == 1 and engine.looked_up(one.tokens).tail_tokens == 0
    # Another size of chunks is another identity: nothing is found under it.
    assert batch.count(engine.hasher(one.tokens).chain) == 1


def test_odd_requests_about_tails_are_refused(engine: Engine) -> None:
    one = Conversation(engine, 5)
    one.grow(CHUNK_TOKENS)
    with pytest.raises(ValueError, match="by itself"):
        engine.store([*one.tokens, *one.tokens], tail_tokens=3)
    call = engine.client.lookup(
        engine.identity(), b"", request_id="odd", tails=[TailSet(0, [1, 2], bytes(32))]
    )
    assert call.wait(PATIENCE_S) and call.result.lease is None
