"""Simulated engines on a real server: what one computes the other loads, and a server's death costs only hits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from kvstrata.testing.engine_sim.kv_events import MEDIUM_HOST, BlockStored, KVEventBatch
from tests.harness.server_process import ServerProcess
from tests.integration.testing.test_engine_sim import HANG_MS, Sim, metric

pytestmark = pytest.mark.integration

CHUNK = 16
PATIENCE_S = 120.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server", l1_mb=64, chunk_tokens=CHUNK) as server:
        server.start()
        yield server


def config(server: ServerProcess, **settings: Any) -> str:
    """A `--kv-transfer-config` for this server."""
    extra = {"socket_dir": str(server.socket_dir), "port": server.port, "chunk_size": CHUNK, **settings}
    return json.dumps(
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )


class Engine:
    """A simulated engine, attached to the server."""

    def __init__(self, server: ServerProcess, *flags: str, **settings: Any) -> None:
        self.sim = Sim("--model", "m", "--kv-transfer-config", config(server, **settings), *flags)
        self.client = httpx.Client(base_url=self.sim.url, timeout=HANG_MS / 1000, trust_env=False)

    def ask(self, prompt: list[int], **body: Any) -> int:
        """Answer a prompt; returns its cached tokens."""
        reply = self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **body})
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["completion_tokens"] == 3
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def metric(self, name: str) -> float:
        return metric(self.client, name)

    def close(self) -> None:
        self.client.close()
        try:
            assert self.sim.stop() == 0
        finally:
            self.sim.process.kill()
            self.sim.process.wait()


@pytest.fixture
def start(server: ServerProcess) -> Iterator[Callable[..., Engine]]:
    """Starts engines on the server, which end in order."""
    engines: list[Engine] = []

    def started(*flags: str, **settings: Any) -> Engine:
        engines.append(Engine(server, *flags, **settings))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def prompt(seed: int, tokens: int = 400) -> list[int]:
    return [seed * 10_000 + number for number in range(tokens)]


def until_hit(engine: Engine, other: Engine, first: int, tokens: int = 400) -> int:
    """Let one engine compute prompts until the other hits one; returns the cached tokens of the hit.

    Engines attach, and stores end, in the background: prompts before that are misses.
    """
    ends_s = time.monotonic() + PATIENCE_S
    for seed in range(first, first + 1000):
        engine.ask(prompt(seed, tokens))
        if cached := other.ask(prompt(seed, tokens)):
            return cached
        assert time.monotonic() < ends_s, "no prompt was hit"
    raise AssertionError


def test_what_one_engine_computes_another_loads(start: Callable[..., Engine]) -> None:
    first, second = start(), start()
    assert until_hit(first, second, 1) >= 400 - CHUNK
    loaded = second.metric("external_prefix_cache_hits_total")
    assert loaded >= 400 - CHUNK
    assert second.metric("prefix_cache_hits_total") == 0
    assert second.metric("external_prefix_cache_queries_total") >= loaded


def test_kv_that_an_engine_has_forgotten_is_loaded_again(start: Callable[..., Engine]) -> None:
    engine, other = start(), start()
    until_hit(engine, other, 1)
    before = engine.metric("external_prefix_cache_hits_total")
    ends_s = time.monotonic() + PATIENCE_S
    while not engine.ask(prompt(1)):
        assert time.monotonic() < ends_s
    while not engine.client.post("/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < ends_s, "blocks are held though no request runs"
    assert engine.ask(prompt(1)) >= 400 - CHUNK
    assert engine.metric("external_prefix_cache_hits_total") > before


@pytest.mark.parametrize("differs", [{"cache_salt": "other"}, {"model": "lora"}], ids=["salt", "adapter"])
def test_other_kv_is_no_hit(start: Callable[..., Engine], differs: dict[str, str]) -> None:
    first, second = start("--adapter", "lora"), start("--adapter", "lora")
    until_hit(first, second, 1)
    ends_s = time.monotonic() + PATIENCE_S
    for seed in range(2000, 3000):
        first.ask(prompt(seed))
        assert second.ask(prompt(seed), **differs) == 0
        if second.ask(prompt(seed)):
            break
        assert time.monotonic() < ends_s
    while not second.ask([*prompt(3000), *range(7)], **differs):
        first.ask([*prompt(3000), *range(7)], **differs)
        assert time.monotonic() < ends_s


def test_engines_go_on_when_the_server_is_killed(server: ServerProcess, start: Callable[..., Engine]) -> None:
    first, second = start(), start()
    until_hit(first, second, 1)
    server.kill()
    assert first.ask(prompt(5000)) == 0
    assert second.ask(prompt(5000)) == 0
    ends_s = time.monotonic() + PATIENCE_S
    while first.ask(prompt(5000)) != 400 - 4:  # its own blocks, but the last: that token is computed
        assert time.monotonic() < ends_s
    while not first.client.post("/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < ends_s, "blocks are held for copies to a server that is gone"
    server.start()
    until_hit(first, second, 6000)


def test_stored_chunks_are_told_as_kv_events(start: Callable[..., Engine]) -> None:
    engine = start("--kv-events-endpoint", "tcp://127.0.0.1:0")
    endpoint = engine.client.get("/kv_event_sources").json()["0"]["endpoint"]
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        ends_s = time.monotonic() + PATIENCE_S
        seed = 0
        while time.monotonic() < ends_s:
            seed += 1
            engine.ask(prompt(seed))
            while socket.poll(200):
                batch = msgspec.msgpack.decode(socket.recv_multipart()[2], type=KVEventBatch)
                for event in batch.events:
                    if isinstance(event, BlockStored) and event.medium == MEDIUM_HOST:
                        assert event.block_size == CHUNK
                        assert len(event.token_ids) == CHUNK * len(event.block_hashes)
                        assert re.fullmatch(r"[0-9]+", str(event.token_ids[0]))
                        assert all(isinstance(key, bytes) and len(key) == 32 for key in event.block_hashes)
                        return
    raise AssertionError("no chunk was told as stored")
