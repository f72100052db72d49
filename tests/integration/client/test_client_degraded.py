"""A server that is absent, stopped, killed or forgetful: nothing waits, nothing wrong is served, and it comes back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata import failpoints
from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server", l1_mb=64, chunk_tokens=CHUNK_TOKENS) as server:
        yield server


def use_until_it_works(engine: CacheEngine, seed: int, chunks: int = 4) -> None:
    """Store, look up and load a prompt until it is a whole hit; asserts that each load is right."""
    tokens = prompt(chunks, seed)

    def works() -> bool:
        engine.stored(tokens)
        return engine.hit(tokens) == chunks

    eventually("the cache is in use again", works)


def pool_has_no(server: ServerProcess, what: str) -> bool:
    """Whether the pool's count of leased, reserved or quarantined bytes is 0; no answer is no proof."""
    try:
        return server.get("/v1/status")["pool"][f"{what}_bytes"] == 0
    except OSError:
        return False


def nothing_leased(server: ServerProcess) -> bool:
    return pool_has_no(server, "leased")


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_lease_of_a_dead_server_still_loads_right_bytes(server, sync):
    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        tokens = prompt(8)
        engine.stored(tokens)
        result = engine.looked_up(tokens)
        server.kill()
        eventually("the loss is seen", lambda: not engine.client.connected)
        assert engine.check_load(tokens, result, sync=sync) == set()
        server.start()
        engine.connect()
        assert engine.hit(tokens) == 8
        eventually("old and new leases are ended", lambda: nothing_leased(server))


def test_a_lease_from_before_the_restart_loads_nothing_once_the_client_has_quiesced(server):
    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        tokens = prompt(8)
        engine.stored(tokens)
        result = engine.looked_up(tokens)
        server.kill()
        server.start()
        engine.connect()
        eventually("quiesced was answered", lambda: engine.client.stats()["requests_under_way"] == 0)
        assert engine.check_load(tokens, result, sync=True) == set(range(8))
        eventually("the old lease is ended", lambda: nothing_leased(server))
        assert engine.hit(tokens) == 8


def test_after_the_segment_was_wiped_the_client_maps_the_new_pool(server):
    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(4))
        result = engine.looked_up(prompt(4))
        server.kill()
        server.wipe_segment()
        assert engine.check_load(prompt(4), result, sync=True) == set(), "the old pool is still mapped"
        assert old_mappings(server)
        server.start()
        engine.connect()
        assert engine.client.peek(engine.identity(), engine.hasher(prompt(4))) == 0
        assert engine.hit(prompt(4)) == 0
        use_until_it_works(engine, seed=0)
        eventually("the old pool is unmapped", lambda: old_mappings(server) == [])


def old_mappings(server) -> list[str]:
    """This process's mappings of the server's deleted pools."""
    gone = f"{server.segment_dir}/extents (deleted)"
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(gone)]


def work(engine: CacheEngine) -> None:
    """Take each step once, with any outcome; asserts that no wrong byte is loaded and that each call ends."""
    tokens = prompt(4, seed=5)
    store = engine.store(tokens)
    assert store.done.wait(PATIENCE_S)
    call = engine.lookup(tokens)
    assert call.wait(PATIENCE_S)
    call.cancel()
    for damage in (False, True):
        result = engine.looked_up(tokens, again_s=0.0)
        if result.n_chunks:
            items = engine.items(tokens, result)
            if (
                damage
            ):  # the key of another chunk: the client reports damage, and the server finds the chunk sound
                items[0] = items[0]._replace(key=bytes(32))
                job = engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan)
                assert job.wait(PATIENCE_S)
                assert 0 in job.failed
            else:
                engine.check_load(tokens, result, sync=True)


OPERATIONS = (
    *("identify", "ping", "lookup", "release", "reserve", "commit", "cancel", "quiesced", "corrupt"),
    "attach",
)
GATE = (
    *("identify.received", "lookup.done", "release.done", "reserve.done", "commit.done", "quiesced.done"),
    "attach.accepted",
)
"""The points at which `make test` kills a server."""


def points_and_actions() -> list[Any]:
    """Each point with `kill`; `stop`, which differs less between points, at one point of each operation."""
    points = [point for point in failpoints.POINTS if point.split(".")[0] in OPERATIONS]
    kills = [pytest.param(p, "kill", marks=() if p in GATE else pytest.mark.long) for p in points]
    frozen = (pytest.mark.long, pytest.mark.silence)
    stops = [p for p in points if not p.endswith((".received", ".replied"))]
    return [*kills, *(pytest.param(p, "stop", marks=frozen) for p in stops)]


@pytest.mark.parametrize(("point", "action"), points_and_actions())
def test_a_server_killed_or_frozen_at_any_step_stops_no_engine_and_the_cache_comes_back(
    server, point, action
):
    if point.startswith("quiesced"):
        server.start()  # only a client that has seen an earlier epoch sends this
    else:
        arm(server, f"{point}={action}")
    with CacheEngine(server.socket_dir) as engine:
        if point.startswith("quiesced"):
            engine.connect()
            server.kill()
            arm(server, f"{point}={action}")

        def reached() -> bool:
            if engine.client.connected:
                work(engine)
            return server.halted()

        eventually(f"the server halts at {point}", reached)
        work(engine)
        if action == "kill":
            server.kill()  # already dead; waits for its last thread
            arm(server, "")
        else:
            server.thaw()
        engine.connect()
        use_until_it_works(engine, seed=6)
        eventually("no lease is left", lambda: nothing_leased(server))
        eventually("nothing reserved is left", lambda: pool_has_no(server, "reserved"))


def arm(server: ServerProcess, points: str) -> None:
    server._environment[failpoints.VARIABLE] = points
    server.start()


def test_a_client_frozen_for_long_keeps_its_leases_and_goes_on(server, tmp_path):
    """A frozen client sends no pings, but keeps what it owns: no clock takes bytes away."""
    server.start()
    with Child("tests.harness.cache_engine", log=tmp_path / "child.log") as child:
        child.ask("start", socket_dir=str(server.socket_dir))
        child.ask("connect")
        assert child.ask("store", n_chunks=4) == ["stored"] * 4
        result = child.ask("lookup", n_chunks=4)
        child.signal(signal.SIGSTOP)
        with CacheEngine(
            server.socket_dir, group=b"another engine..", model="other", block_bytes=64 << 10
        ) as engine:
            engine.connect()
            for seed in range(4):  # three times the pool
                engine.stored(prompt(192, seed))
        child.signal(signal.SIGCONT)
        assert child.ask("load", result=result, n_chunks=4) == []
        # Without the lease, the oldest chunks may be evicted at any time.
        assert child.ask("store", n_chunks=4, seed=9) == ["stored"] * 4
        assert child.ask("hit", n_chunks=4, seed=9) == 4
