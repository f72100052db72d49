"""A tier that is slower than the engine's computing is left by lookups, and used again soon after it recovers."""

from __future__ import annotations

import pytest

from kvstrata.observability.load_line import LEAST_BATCHES, prompt_work
from kvstrata.types import MissReason
from tests.harness.cache_engine import CHUNK_TOKENS, prompt
from tests.world import World, tell

CHUNKS = 6
COMPUTE_S = 0.06


@pytest.mark.parametrize("load", ["auto", "always", "never"])
def test_a_tier_is_left_while_computing_is_faster_and_used_again_within_a_minute(monkeypatch, load):
    monkeypatch.setenv("WORLD_SEED", "36")
    tell(lambda world: story(world, load))


def story(world: World, load: str) -> None:
    server = world.server(tiers=1, l2={"load": load})
    engine, [shelf] = world.engine(server, block_bytes=1024), world.shelves
    world.run(lambda: engine.identity().ready, "the engine is ready")
    tokens = prompt(CHUNKS, 1)
    blocks = engine.take_blocks(CHUNKS)
    assert blocks is not None
    engine.begin_store(tokens, blocks)
    world.run(lambda: len(shelf.records) == CHUNKS, "the tier has the chunks")
    engine.client.prompt_tokens_s = prompt_work(0, CHUNKS * CHUNK_TOKENS) / COMPUTE_S
    world.sleep(5)  # a ping tells that

    def served(own_chunks: int = 0, *, of_l1: bool = False) -> int:
        """How many chunks a lookup gets of the tier. `own_chunks`: so many are in the engine's own cache.

        `of_l1`: L1 still has those of the last lookup.
        """
        world.sleep(0.5)
        if not of_l1:
            server.run(server.parts.clearing.clear("l1", None))
        call = engine.lookup(tokens, deadline_ms=10_000, own_chunks=own_chunks)
        world.run(lambda: call.done, "the lookup is answered")
        result = call.result
        if result.lease is not None:
            engine.client.release([result.lease], group=True)
        elif load == "auto":
            assert result.reason is MissReason.RECOMPUTE
        assert result.n_chunks in (0, CHUNKS), "all or nothing"
        return int(result.n_chunks)

    def takes(seconds: float) -> None:
        shelf.takes_s = lambda: seconds

    takes(0.03)
    first = {served() for _ in range(LEAST_BATCHES + 4)}
    if load == "auto":
        saved_s = server.parts.explainer.avoided_s
        assert saved_s == pytest.approx(COMPUTE_S * (LEAST_BATCHES + 4)), (
            "each hit saves what computing takes"
        )
        assert not any(served(CHUNKS) for _ in range(20)), "what the engine has itself was loaded for it"
    takes(0.2)
    slow = [served() for _ in range(60)]
    takes(0.005)
    recovered_s = world.now_s
    if load != "auto":
        assert first | set(slow) == {0 if load == "never" else CHUNKS}
        return
    assert first == {CHUNKS}
    assert 0 in slow[:20] and not any(slow[slow.index(0) :]), "it is left for good"
    newest = server.parts.explainer.recent(1)[0]["choices"]
    assert [(one["loads"], one["chunks"]) for one in newest] == [(False, CHUNKS)]
    assert newest[0]["load_s"] > newest[0]["compute_s"] == pytest.approx(COMPUTE_S)
    while not served():
        assert world.now_s - recovered_s < 60, "it is not used again"
        world.sleep(2)
    assert server.parts.prefetch.document()["adapters"]["plugin-0"]["left_bytes"] > 0
