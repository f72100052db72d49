"""Engines of several ranks, and of two groups of layers, whose second needs only the last chunks of a hit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstrata.types import MissReason, Role
from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.child import Child
from tests.harness.engine_groups import SPAN, Groups, open_groups
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def server(start: Callable[..., ServerProcess], tmp_path: Path) -> ServerProcess:
    adapter = {"type": "disk", "base_path": str(tmp_path / "l2"), "capacity_gb": 1}
    return start(adapter, l1_mb=64, chunk_tokens=CHUNK_TOKENS)


@pytest.fixture
def groups(server: ServerProcess) -> Iterator[Groups]:
    with open_groups(server) as groups:
        yield groups


def until_put(server: ServerProcess) -> None:
    def quiet() -> bool:
        [adapter] = server.get("/v1/status")["l2_store"]["adapters"].values()
        return not (adapter["queued"] or adapter["in_flight"] or adapter["retrying"])

    eventually("all chunks are put", quiet)


def start_empty(server: ServerProcess, groups: Groups) -> None:
    """Kill the server when it has put all, and start it with an empty pool."""
    until_put(server)
    kill_and_start_empty(server, groups)


def kill_and_start_empty(server: ServerProcess, groups: Groups) -> None:
    server.kill()
    for engine in groups:
        eventually("the client notices", lambda engine=engine: not engine.client.connected)
    server.wipe_segment()
    server.start()
    groups.connect()


def test_with_any_windows_the_longest_hit_is_served_and_exactly_its_chunks_are_leased(groups: Groups) -> None:
    chance = random.Random(11)
    for seed in range(2, 10):
        n_chunks = chance.randint(1, 40)
        there = {chunk for chunk in range(n_chunks) if chance.random() < 0.6}
        groups.store(n_chunks, [(chunk, chunk + 1) for chunk in sorted(there)], seed)
        hits = (n for n in range(n_chunks, -1, -1) if {*range(n)[-SPAN:]} <= there)
        longest, asked = next(hits), n_chunks + chance.randint(0, 3)
        result = groups.whole.looked_up(prompt(asked, seed))
        assert result.n_chunks == longest, (n_chunks, there)
        if longest:
            assert groups.windows_of(result) == [*range(longest)[-SPAN:]]
            groups.load(asked, result, seed)


def test_after_a_restart_with_an_empty_pool_l2_gives_what_the_hit_needs(server, groups):
    groups.store(8, [(0, 8)])
    start_empty(server, groups)
    result = groups.whole.looked_up(prompt(8))
    assert (result.n_chunks, groups.windows_of(result)) == (8, [6, 7])
    groups.load(8, result)
    assert server.get("/v1/status")["pool"]["entries"]["ready"] == 8 + SPAN
    result = groups.whole.looked_up(prompt(5))
    assert (result.n_chunks, groups.windows_of(result)) == (5, [3, 4])
    groups.load(5, result)


def test_a_killed_server_serves_windows_from_the_pool_that_it_finds(server, groups):
    groups.store(6, [(4, 6)])
    server.kill()
    server.start()
    groups.connect()
    result = groups.whole.looked_up(prompt(6))
    assert (result.n_chunks, groups.windows_of(result)) == (6, [4, 5])
    groups.load(6, result)


def test_a_server_that_stops_in_the_middle_of_a_load_costs_the_deadline_and_its_windows_are_whole(
    server: ServerProcess, groups: Groups
) -> None:
    groups.store(8, [(6, 8)])
    server._environment |= {"KVSTRATA_TESTING": "1", "KVSTRATA_FAILPOINTS": "load.read=stop"}
    start_empty(server, groups)
    call = groups.whole.lookup(prompt(8), deadline_ms=1_000)
    assert call.wait(PATIENCE_S), "the lookup never ended"
    assert (call.result.n_chunks, call.result.lease) == (0, None)
    eventually("the server stops while it loads", server.halted)
    server.thaw()
    eventually("the prompt is a hit", lambda: groups.peek(8) == 8)
    groups.connect()
    result = groups.whole.looked_up(prompt(8))
    assert (result.n_chunks, groups.windows_of(result)) == (8, [6, 7])
    groups.load(8, result)


def test_a_lookup_waits_for_promised_windows_only_where_they_will_be(server, groups):
    """They are stored at the end of the prompt: a prompt that ends elsewhere would wait in vain."""
    engine, tokens = groups.whole, prompt(8)
    with open_groups(server, b"another engine o") as others:
        promised = engine.client.promise(engine.identity(), engine.hasher(tokens).chain)
        eventually("it is promised", lambda: others.whole.client.has_promises)
        parts = prompt(6) + prompt(2, seed=1)
        for elsewhere in (tokens[: 6 * CHUNK_TOKENS], parts):
            call = others.whole.lookup(elsewhere, deadline_ms=100, wait_ms=5_000)
            assert call.wait(PATIENCE_S)
            assert call.result.reason != MissReason.PROMISED
        same = [
            others.whole.lookup(tokens[: n * CHUNK_TOKENS], deadline_ms=100, wait_ms=60_000) for n in (8, 7)
        ]

        def all_wait() -> bool:
            return bool(server.get("/v1/status")["promises"]["waits_now"] == len(same))

        eventually("both wait", all_wait)
        groups.store(8, [(5, 7)])
        assert engine.stored(prompt(1, seed=3)) == ["stored"]
        assert all_wait()
        assert groups.windowed.stored(tokens, 7) == ["stored"]
        for n_chunks, call in zip((8, 7), same, strict=True):
            assert call.wait(PATIENCE_S)
            assert call.result.n_chunks == n_chunks
        promised.withdraw()


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
