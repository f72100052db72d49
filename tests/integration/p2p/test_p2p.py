"""Two real servers and a real controller: what one instance stored the other one reads out of its memory, and whatever
happens to the owner, the controller or the directory, nobody gets wrong bytes and everybody goes on.  With each engine:
frames of ours in the server's process, NIXL in an adapter host.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster
from tests.harness.own_process import ServerFailed
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

CHUNKS = 12
SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "2000"}
"""Long enough for a busy machine; tests of silent owners wait so long."""
BRIEF: dict[str, Any] = {"deadline_ms": 2_000, "again_s": 0.0}
"""Of lookups that may miss."""

LONG = pytest.mark.long


@pytest.fixture(params=["tcp", pytest.param("sealed", marks=LONG), pytest.param("nixl", marks=LONG)])
def engine(request: pytest.FixtureRequest) -> dict[str, str]:
    """Settings with which servers use a transfer engine."""
    more = {}
    if request.param == "nixl":
        more = {**request.getfixturevalue("nixl_environment"), "KVSTRATA_P2P_TCP": "true"}
    if request.param == "sealed":
        return {**SETTINGS, "KVSTRATA_P2P_SEAL": "true"}
    return {**SETTINGS, **more, "KVSTRATA_P2P_ENGINE": request.param}


@pytest.fixture
def cluster(tmp_path: Path, engine: dict[str, str]) -> Iterator[Cluster]:
    with Cluster(tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, settings=engine) as made:
        yield made


@contextlib.contextmanager
def engines(cluster: Cluster) -> Iterator[list[CacheEngine]]:
    """An engine at each server."""
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(CacheEngine(server.socket_dir, block_bytes=32_768))
            for server in cluster.servers
        ]
        yield [engine.connect() for engine in made]


def stored_and_known(cluster: Cluster, engine: CacheEngine, seed: int = 0, number: int = 0) -> list[int]:
    """Store a prompt at an instance and wait until the controller knows it; returns the prompt."""
    tokens = prompt(CHUNKS, seed)
    store(engine, tokens)
    cluster.until_known(number)
    return tokens


def store(engine: CacheEngine, tokens: list[int]) -> None:
    """Store a prompt, again if need be: on a busy machine the client may give the server up for a moment."""
    eventually("the prompt is stored", lambda: set(engine.stored(tokens)) <= {"stored", "present"})


def read(engine: CacheEngine, tokens: list[int]) -> None:
    """Wait until the whole prompt is a hit with right bytes; a busy machine may need more than one try."""
    n_chunks = len(tokens) // CHUNK_TOKENS
    eventually("the prompt is a hit", lambda: engine.hit(tokens) == n_chunks)


def settled(cluster: Cluster, number: int) -> None:
    """Wait until the instance holds nothing for anybody; asserts that its pool is sound."""

    def idle() -> bool:
        pool: dict[str, Any] = cluster.servers[number].get("/v1/status")["pool"]
        return pool["holds"] == 0 and pool["reservations"] == 0 and pool["bytes"]["quarantined"] == 0

    eventually("nothing is under way", idle)


@pytest.mark.parametrize("engine", ["tcp", "sealed", "nixl"], indirect=True)
def test_chunks_that_one_instance_stored_are_read_and_kept_by_the_other(cluster: Cluster) -> None:
    with engines(cluster) as (one, other):
        tokens = stored_and_known(cluster, one)
        read(other, tokens)
        records = cluster.peer_records(1)
        assert records >= CHUNKS
        read(other, tokens)  # the second time from its own L1
        assert cluster.peer_records(1) == records
        settled(cluster, 0)
        settled(cluster, 1)


def test_nixl_refuses_to_start_where_it_would_need_tcp_unasked(
    tmp_path: Path, nixl_environment: dict[str, str]
) -> None:
    process = ServerProcess(
        tmp_path,
        l1_mb=64,
        chunk_tokens=CHUNK_TOKENS,
        flags=("--controller-url", "tcp://127.0.0.1:1", "--p2p-engine", "nixl"),
        environment={**os.environ, **nixl_environment},
    )
    with process, pytest.raises(ServerFailed, match=r"p2p\.engine: nixl .*--p2p-tcp"):
        process.start()


def test_an_owner_that_is_stopped_costs_a_deadline_and_is_read_again_when_it_goes_on(
    cluster: Cluster,
) -> None:
    with engines(cluster) as (one, other):
        tokens = stored_and_known(cluster, one)
        with cluster.servers[0].frozen():
            assert other.hit(tokens, **BRIEF) == 0
            store(other, prompt(2, seed=9))
        read(other, tokens)
        settled(cluster, 1)


def test_without_the_controller_everything_local_goes_on_and_peers_are_read_again_afterwards(
    cluster: Cluster,
) -> None:
    with engines(cluster) as (one, other):
        stored_and_known(cluster, one)
        cluster.controller.kill()
        fresh = prompt(CHUNKS, seed=5)
        store(one, fresh)
        read(one, fresh)
        assert other.hit(fresh, **BRIEF) == 0
        cluster.controller.start()
        eventually("both are registered again", lambda: cluster.member(0) and cluster.member(1))
        read(other, fresh)


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.long)])
def test_an_owner_that_goes_while_it_is_read_costs_misses_and_frees_every_byte(
    tmp_path: Path, engine: dict[str, str], how: str
) -> None:
    settings = {**engine, "KVSTRATA_P2P_LOAD_TIMEOUT_MS": "1000"}
    with (
        Cluster(tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, settings=settings) as cluster,
        engines(cluster) as (one, other),
    ):
        prompts = [stored_and_known(cluster, one, seed) for seed in range(8)]
        first = stored_and_known(cluster, one, seed=50)
        hits: list[int] = []

        def read_all() -> None:
            for tokens in prompts:
                hits.append(other.hit(tokens, **BRIEF))  # compares every byte

        read(other, first)
        reading = threading.Thread(target=read_all)
        reading.start()
        before = cluster.peer_records(1)
        eventually("it reads", lambda: cluster.peer_records(1) > before or not reading.is_alive())
        owner = cluster.servers[0]
        owner.kill() if how == "killed" else owner.freeze()
        reading.join()
        assert len(hits) == 8
        settled(cluster, 1)
        store(other, prompt(CHUNKS, seed=99))
        read(other, prompt(CHUNKS, seed=99))
        if how == "stopped":
            owner.thaw()
            late = stored_and_known(cluster, one, seed=100)
            read(other, late)
