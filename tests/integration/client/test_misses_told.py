"""Misses that a client saw in the shared index, without a lookup: the server's figures count and explain them too."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.client import LookupCall
from kvstrata.types import Next
from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration
PROMPTS, CHUNKS = 9, 4
Start = Callable[..., ServerProcess]


def ask(engine: CacheEngine, request_id: str, seed: int) -> int:
    """Ask for a prompt as a connector does; return how many chunks were found."""
    client, identity, hasher = engine.client, engine.identity(), engine.hasher(prompt(CHUNKS, seed))
    if not client.has_l2 and not client.peek(identity, hasher):
        client.missed(identity, hasher, request_id=request_id)
        return 0
    call: LookupCall = client.lookup(identity, hasher, request_id=request_id, deadline_ms=10_000)
    assert call.wait(PATIENCE_S)
    if call.result.lease is not None:
        client.release([call.result.lease])
    return call.result.n_chunks


@pytest.mark.parametrize("l2", ["none", "fs"])
def test_cold_prompts_and_a_repeat_give_the_same_figures_with_and_without_l2(start: Start, l2: str) -> None:
    server = start(l1_mb=64, l2=l2, chunk_tokens=CHUNK_TOKENS)

    def figures() -> dict[str, Any]:
        return dict(server.get("/v1/status")["trend"]["start"])

    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        for seed in range(PROMPTS):
            assert ask(engine, f"cold-{seed}", seed) == 0
            eventually("the miss is counted", lambda told=seed + 1: figures()["lookups"] == told)
            assert engine.stored(prompt(CHUNKS, seed)) == ["stored"] * CHUNKS
        assert ask(engine, "again", 0) == CHUNKS
        eventually("the hit is counted", lambda: figures()["lookups"] == PROMPTS + 1)

        status = server.get("/v1/status")
        counted, trend = status["counters"], status["trend"]
        assert (trend["start"]["lookup_chunks"], trend["start"]["l1_hit_chunks"]) == (
            (PROMPTS + 1) * CHUNKS,
            CHUNKS,
        )
        assert counted["first_miss_reasons"] == {"unknown_key": PROMPTS}
        assert counted["peeked_misses"] == (PROMPTS if l2 == "none" else 0)
        (row,) = status["engines"]
        assert (row["lookups"], row["lookup_chunks"], row["hit_chunks"]) == (
            PROMPTS + 1,
            (PROMPTS + 1) * CHUNKS,
            CHUNKS,
        )
        (asked,) = server.get("/v1/explain/cold-3")["lookups"]
        assert (asked["chunks"], asked["hits"]["served"]) == (CHUNKS, 0)
        assert asked["first_miss"]["reason"] == "unknown_key"
        metrics = read(f"{server.url}/metrics").decode()
        assert f"kvstrata_lookup_chunks_total {(PROMPTS + 1) * CHUNKS}" in metrics
        assert f'kvstrata_first_misses_total{{reason="unknown_key"}} {PROMPTS}' in metrics


def test_misses_of_identities_that_the_server_has_yet_to_learn_are_told_too(start: Start) -> None:
    """A request with a salt of its own is answered before the server knows its identity."""
    server = start(l1_mb=64, chunk_tokens=CHUNK_TOKENS)
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(CHUNKS))
        for number in range(100):
            salt = f"salt {number}"
            engine.client.missed(
                engine.identity(salt), engine.hasher(prompt(CHUNKS), salt), request_id=f"{number}-salted"
            )
        eventually("all are counted", lambda: server.get("/v1/status")["counters"]["peeked_misses"] == 100)
        (asked,) = server.get("/v1/explain/7-salted")["lookups"]
        assert (asked["first_miss"]["reason"], asked["first_miss"]["detail"]) == (
            "identity_differs",
            "salt",
        )


def test_hints_of_engines_and_of_the_admin_port_reach_the_chunks_of_their_request(start: Start) -> None:
    server = start(l1_mb=64, chunk_tokens=CHUNK_TOKENS)

    def hinted() -> int:
        return int(server.get("/v1/status")["counters"]["hinted_chunks"])

    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        assert ask(engine, "chatcmpl-1-0123abcd", 0) == 0
        assert engine.stored(prompt(CHUNKS)) == ["stored"] * CHUNKS
        last = engine.hasher(prompt(CHUNKS)).chain[-32:]
        engine.client.hint(engine.identity(), last, Next.END)
        engine.client.hint(engine.identity(), bytes(32), Next.END)  # a chunk that nobody stored
        engine.client.hint(engine.identity("new"), last, Next.END)  # nor one of this identity
        eventually("the hint is counted", lambda: hinted() == CHUNKS)
        eventually("the miss is counted", lambda: server.get("/v1/status")["counters"]["peeked_misses"] == 1)
        for number, said in enumerate(("tool_calls", 30), 2):
            answer = server.post("/v1/hint", {"request_id": "chatcmpl-1", "next": said})
            assert answer == {"chunks": CHUNKS} and hinted() == number * CHUNKS
        assert server.post("/v1/hint", {"request_id": "chatcmpl-1", "next": "length"}) == {"chunks": 0}
        for body, status, words in (
            ({"request_id": "other", "next": "end"}, 404, "'other' is not a recent request"),
            ({"request_id": "chatcmpl-1", "next": "later"}, 400, "next: must be the expected seconds"),
            ({"request_id": "chatcmpl-1", "next": -1}, 400, "got -1"),
            ({"request_id": "chatcmpl-1"}, 400, "next"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post("/v1/hint", body)
            assert refused.value.code == status
            assert words in refused.value.read().decode()
