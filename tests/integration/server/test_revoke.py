"""Two engines that want more of L1 than leases may cover: waiting requests make room, claimed leases stay."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

L1_MB = 64
ENGINE: dict[str, Any] = {"model": "revoke", "block_bytes": 64 << 10}
PROMPTS = 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server", l1_mb=L1_MB, chunk_tokens=CHUNK_TOKENS) as server:
        server.start()
        yield server


@pytest.fixture
def new(server: ServerProcess) -> Iterator[CacheEngine]:
    with CacheEngine(server.socket_dir, group=b"the newer engine", **ENGINE) as engine:
        yield engine.connect()


@pytest.fixture
def n_chunks(new: CacheEngine) -> int:
    """Of a prompt that takes a little less than a quarter of what leases may cover. All six are stored."""
    n_chunks = (L1_MB << 20) // 2 // 4 // new.blocks.plan.record_bytes(2)
    for seed in range(PROMPTS):
        assert new.stored(prompt(n_chunks, seed)) == ["stored"] * n_chunks
    return n_chunks


@pytest.fixture
def old(server: ServerProcess, n_chunks: int, tmp_path: Path) -> Iterator[Child]:
    """An engine whose four requests wait with all that leases may cover; it has promised the second one's."""
    with Child("tests.harness.cache_engine", log=tmp_path / "old.log") as child:
        child.ask("start", socket_dir=str(server.socket_dir), group="the older engine", **ENGINE)
        child.ask("connect")
        for seed in range(4):
            assert child.ask("wait_in_queue", n_chunks=n_chunks, seed=seed, claim=seed == 1) == n_chunks
        yield child


def leased_bytes(server: ServerProcess) -> int:
    return server.get("/v1/status")["pool"]["leased_bytes"]


def test_the_oldest_waiting_lease_goes_and_a_claimed_one_stays(server, old, new, n_chunks):
    full = leased_bytes(server)
    refused = new.looked_up(prompt(n_chunks, 4))
    assert refused.n_chunks < n_chunks
    assert refused.reason == "refused"
    if refused.lease is not None:
        new.client.release([refused.lease], group=True)
    eventually("the oldest goes back", lambda: old.ask("revoked") == [0] and leased_bytes(server) < full)
    kept = new.lookup(prompt(n_chunks, 4))
    assert kept.wait(PATIENCE_S) and kept.claim()
    assert kept.result.n_chunks == n_chunks
    # The second lease is asked back next, in vain, since it is claimed; then the third.
    for _ in range(2):
        new.looked_up(prompt(n_chunks, 5))
    eventually("the third goes back", lambda: old.ask("revoked") == [0, 2])
    assert old.ask("load_queued", n_chunks=n_chunks, seed=1) == []
    assert new.check_load(prompt(n_chunks, 4), kept.result, sync=False) == set()
    counters = server.get("/v1/status")["counters"]
    assert counters["revoked_leases"] == 3
    assert old.ask("hit", n_chunks=n_chunks, seed=0) == n_chunks, "the request is looked up again"


@pytest.mark.long
def test_an_engine_that_is_frozen_keeps_its_bytes_until_it_can_answer(server, old, new, n_chunks):
    full = leased_bytes(server)
    old.signal(signal.SIGSTOP)
    refused = [new.looked_up(prompt(n_chunks, 4)).n_chunks for _ in range(3)]
    assert max(refused) < n_chunks
    assert leased_bytes(server) >= full, "no lease is freed before its holder answers"
    old.signal(signal.SIGCONT)
    assert eventually("it gives back what waits", lambda: old.ask("revoked"))[0] == 0
    assert old.ask("load_queued", n_chunks=n_chunks, seed=1) == []


@pytest.mark.long
def test_the_death_of_an_engine_ends_its_leases(server, old, new, n_chunks):
    old.signal(signal.SIGSTOP)
    new.looked_up(prompt(n_chunks, 4))
    old.kill()
    eventually("the room is there", lambda: new.hit(prompt(n_chunks, 4)) == n_chunks)
    assert server.get("/v1/status")["sessions"]["leases_revoked"] == 0
