"""Replicate and move between real servers under a real controller: which chunks are where afterwards, who was read,
and that nothing is dropped at its source unless all of it has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster

pytestmark = pytest.mark.integration

CHUNKS = 12
SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "2000"}
"""So long a busy machine may take, and so long a silent owner costs."""

Scene = tuple[Cluster, list[CacheEngine]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three servers under a controller, with an engine at each. Each test has a prompt of its own."""
    folder = tmp_path_factory.mktemp("scene")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(folder, l1_mb=64, n_servers=3, chunk_tokens=CHUNK_TOKENS, settings=SETTINGS)
        )
        engines = [
            stack.enter_context(CacheEngine(server.socket_dir, block_bytes=32_768))
            for server in cluster.servers
        ]
        yield cluster, [engine.connect() for engine in engines]


def store(cluster: Cluster, engine: CacheEngine, tokens: list[int], number: int) -> None:
    """Store a prompt at an instance, and wait until the controller knows it and its kind of KV."""
    eventually("the prompt is stored", lambda: set(engine.stored(tokens)) <= {"stored", "present"})
    cluster.until_known(number)
    eventually("its kind of KV is known", lambda: cluster.controller.ask("/v1/models")["models"])


def copy(cluster: Cluster, how: str, tokens: list[int], **more: Any) -> list[dict[str, Any]]:
    """Replicate or move a prompt and wait for the end; returns the commands."""
    told = cluster.controller.ask(f"/v1/{how}", {"tokens": tokens, "wait_s": 60, **more})
    assert told["done"], told
    commands: list[dict[str, Any]] = told["commands"]
    return commands


def ready(cluster: Cluster, number: int) -> int:
    """Chunks in an instance's L1."""
    status = cluster.servers[number].get("/v1/status")
    return int(status["pool"]["entries"]["ready"])


def sent_bytes(cluster: Cluster, number: int) -> int:
    """Bytes that peers have read from an instance."""
    return int(cluster.servers[number].get("/v1/status")["peers_served"]["sent_bytes"])


def reader_numbers(cluster: Cluster, number: int) -> dict[str, int]:
    """Counters of an instance's reader of peers."""
    adapters = cluster.servers[number].get("/v1/status")["l2_adapters"]
    [numbers] = [adapter["numbers"] for name, adapter in adapters.items() if name.startswith("peer")]
    return dict(numbers)


def test_moved_chunks_are_at_their_target_and_no_longer_at_their_source(scene: Scene) -> None:
    cluster, (one, other, _) = scene
    tokens, stays = prompt(CHUNKS, seed=1), prompt(3, seed=2)
    store(cluster, one, tokens, 0)
    store(cluster, one, stays, 0)
    before = [ready(cluster, number) for number in (0, 1)]
    pull, drop = copy(cluster, "move", tokens, to="instance-1")
    assert (pull["kind"], pull["result"]["count"]) == ("pull", CHUNKS)
    assert (drop["kind"], drop["instance"], drop["result"]) == ("evict", "instance-0", {"count": CHUNKS})
    assert [ready(cluster, number) for number in (0, 1)] == [before[0] - CHUNKS, before[1] + CHUNKS]
    records = cluster.peer_records(1)
    assert other.hit(tokens) == CHUNKS
    assert cluster.peer_records(1) == records and one.hit(stays) == 3


def test_an_incomplete_move_drops_nothing_and_is_announced(scene: Scene) -> None:
    cluster, (one, other, _) = scene
    tokens = prompt(CHUNKS, seed=3)
    store(cluster, one, tokens[: 8 * CHUNK_TOKENS], 0)
    before = ready(cluster, 0)
    [pull] = copy(cluster, "move", tokens, to="instance-1", source="instance-0")
    assert pull["result"]["count"] == 8
    kinds = [row["kind"] for row in cluster.controller.ask("/v1/events")["events"]]
    assert "move_incomplete" in kinds
    assert ready(cluster, 0) == before
    assert one.hit(tokens) == other.hit(tokens) == 8


@pytest.mark.parametrize("source", [0, 1])
def test_the_named_owner_is_read_when_there_are_several(scene: Scene, source: int) -> None:
    cluster, engines = scene
    tokens = prompt(CHUNKS, seed=10 + source)
    for number in (0, 1):
        store(cluster, engines[number], tokens, number)
    before = [sent_bytes(cluster, number) for number in (0, 1)]
    named = reader_numbers(cluster, 2)["named_reads"]
    [pull] = copy(cluster, "replicate", tokens, to="instance-2", source=f"instance-{source}")
    assert pull["result"]["loaded"] == CHUNKS
    grown = [sent_bytes(cluster, number) > before[number] for number in (0, 1)]
    assert grown == [source == 0, source == 1]
    assert reader_numbers(cluster, 2)["named_reads"] > named
    assert engines[2].hit(tokens) == CHUNKS


def test_a_move_from_an_instance_that_does_not_answer_drops_nothing(scene: Scene) -> None:
    cluster, (one, other, _) = scene
    tokens = prompt(CHUNKS, seed=30)
    store(cluster, one, tokens, 0)
    before = ready(cluster, 0)
    with cluster.servers[0].frozen():
        [pull] = copy(cluster, "move", tokens, to="instance-1", source="instance-0")
        assert pull["result"]["count"] == 0
    assert ready(cluster, 0) == before
    assert one.hit(tokens) == CHUNKS
    eventually("it is read again", lambda: other.hit(tokens) == CHUNKS)


def test_a_replica_is_served_from_its_own_l1_with_the_source_killed(scene: Scene) -> None:
    cluster, (one, _, other) = scene
    tokens = prompt(CHUNKS, seed=40)
    store(cluster, one, tokens, 0)
    before, records = ready(cluster, 2), cluster.peer_records(2)
    [pull] = copy(cluster, "replicate", tokens, to="instance-2")
    assert (pull["kind"], pull["state"]) == ("pull", "done"), pull
    assert pull["result"] == {"count": CHUNKS, "loaded": CHUNKS, "reason": ""}
    assert (ready(cluster, 2), cluster.peer_records(2)) == (before + CHUNKS, records + CHUNKS)
    cluster.servers[0].kill()
    assert other.hit(tokens) == CHUNKS  # every byte is compared
    assert cluster.peer_records(2) == records + CHUNKS
