"""Leases of an engine of a scheduler and two ranks, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstrata.types import Role
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def server(start) -> ServerProcess:
    return start(l1_mb=64, chunk_tokens=CHUNK_TOKENS)


def leased_bytes(server: ServerProcess) -> int:
    return server.get("/v1/status")["pool"]["leased_bytes"]


@pytest.fixture
def ranks(server: ServerProcess, tmp_path: Path) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        children = []
        for rank in range(2):
            child = stack.enter_context(Child("tests.harness.cache_engine", log=tmp_path / f"rank{rank}.log"))
            child.ask("start", socket_dir=str(server.socket_dir), rank=rank, ranks=2)
            children.append(child)
        for child in children:
            child.ask("connect")
        yield children


def test_a_scheduler_looks_up_and_both_ranks_load(server, ranks):
    for rank in ranks:
        rank.ask("store", n_chunks=5)
    with CacheEngine(server.socket_dir, ranks=2, role=Role.SCHEDULER) as scheduler:
        scheduler.connect()
        found = scheduler.looked_up(prompt(5))
        assert found.n_chunks == 5
        assert found.lease is not None
        result = {**found._asdict(), "extents": found.extents.hex()}
        result["lease"] = [found.lease.session.hex(), found.lease.seq, found.lease.epoch]
        scheduler.client.release([found.lease])
        for rank in ranks:
            assert rank.ask("load", result=result, n_chunks=5, sync=False) == []
        eventually("the lease ends", lambda: leased_bytes(server) == 0)


def test_a_rank_that_dies_ends_its_own_share_of_a_lease_alone(server, ranks):
    for rank in ranks:
        rank.ask("store", n_chunks=5)
    result = ranks[0].ask("lookup", n_chunks=5)
    ranks[1].kill()
    assert ranks[0].ask("load", result=result, n_chunks=5) == []
    eventually("the lease ends", lambda: leased_bytes(server) == 0)


def test_both_ranks_come_back_after_a_restart(server, ranks):
    for rank in ranks:
        rank.ask("store", n_chunks=5)
    server.kill()
    server.start()
    for rank in ranks:
        rank.ask("connect")
    found = eventually("a hit", lambda: (r := ranks[1].ask("lookup", n_chunks=5))["n_chunks"] == 5 and r)
    for rank in ranks:
        assert rank.ask("load", result=found, n_chunks=5) == []
    eventually("the lease ends", lambda: leased_bytes(server) == 0)
