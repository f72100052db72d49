"""A server that is absent, stopped, killed or forgetful: nothing waits, nothing wrong is served, and it comes back."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstrata import failpoints
from kvstrata.client import StoreOutcome
from kvstrata.client.link import Link
from kvstrata.client.silence import PING_PATIENCE_S
from kvstrata.client.stores import BATCHES_IN_FLIGHT
from kvstrata.rpc import wire
from kvstrata.session.zmtp import Connection, header
from tests.harness.amount import amount
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


def test_without_a_server_everything_is_answered_at_once(server):
    with CacheEngine(server.socket_dir) as engine:
        assert not engine.client.connected
        call = engine.lookup(prompt(2))
        assert call.done
        assert call.result.reason == "breaker_open"
        job = engine.store(prompt(2))
        assert job.gathered.is_set()
        assert job.outcomes == [StoreOutcome.UNAVAILABLE] * 2
        assert engine.client.peek(engine.identity(), engine.hasher(prompt(2))) == 0
        eventually("a reason for the log", lambda: "no server" in engine.client.error)
        server.start()
        engine.connect()
        use_until_it_works(engine, seed=1)


@pytest.mark.silence
def test_a_frozen_server_ends_waiting_calls_and_is_used_again_when_it_goes_on(server):
    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(4))
        server.freeze()
        lookup, store = engine.lookup(prompt(4), deadline_ms=60_000), engine.store(prompt(4, seed=1))
        assert lookup.wait(PATIENCE_S), "the lookup ends long before its deadline"
        assert lookup.result.reason == "breaker_open"
        assert store.done.wait(PATIENCE_S)
        assert not engine.client.connected
        assert engine.lookup(prompt(4)).done, "the next lookup ends at once"
        server.thaw()
        eventually("connected again", lambda: engine.client.connected)
        assert engine.hit(prompt(4)) == 4
        eventually("the lookup nobody waited for left no lease", lambda: nothing_leased(server))


@pytest.mark.long
@pytest.mark.silence
def test_the_engine_of_the_tests_repeats_stores_that_a_silent_server_did_not_take(server):
    server.start()
    with CacheEngine(server.socket_dir) as engine, ThreadPoolExecutor(1) as thread:
        engine.connect()
        for ask, expected in ((engine.stored, ["stored"] * 4), (engine.hit, 4)):
            server.freeze()
            asked = thread.submit(ask, prompt(4))
            eventually("the server is given up", lambda: not engine.client.connected)
            server.thaw()
            assert asked.result(PATIENCE_S) == expected


@pytest.mark.long
@pytest.mark.silence
def test_a_client_that_seldom_runs_does_not_count_the_server_as_silent(server, monkeypatch):
    """The client looks late each time, as when an engine's threads take the cores or hold the interpreter lock."""
    pass_once = Link._pass

    def oversleep(link: Link, timeout_s: float) -> None:
        time.sleep(1.5 * PING_PATIENCE_S)
        pass_once(link, timeout_s)

    def nothing_lost() -> bool:
        before = engine.client.stats()["breaker_trips"]
        found = [engine.hit(prompt(4)) for _ in range(3)]
        return found == [4] * 3 and engine.client.stats()["breaker_trips"] == before

    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(4))
        with monkeypatch.context() as patch:
            patch.setattr(Link, "_pass", oversleep)
            eventually("some lookups without a false alarm", nothing_lost)


@pytest.mark.long
@pytest.mark.silence
def test_a_server_that_is_frozen_repeatedly_keeps_no_lease(server):
    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        for seed in range(5):
            server.freeze()
            calls = [engine.lookup(prompt(4, seed)) for _ in range(20)]
            assert all(call.wait(PATIENCE_S) for call in calls)
            server.thaw()
            use_until_it_works(engine, seed)
        eventually("no lease is left", lambda: nothing_leased(server))


def test_stored_chunks_are_hits_after_the_server_was_killed(server):
    server.start()
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        epoch = engine.client.epoch
        engine.stored(prompt(8))
        server.kill()
        eventually("the loss is seen", lambda: not engine.client.connected)
        assert engine.lookup(prompt(8)).done
        server.start()
        engine.connect()
        assert engine.client.epoch != epoch
        assert engine.hit(prompt(8)) == 8


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


def test_a_server_killed_during_stores_frees_the_engines_blocks_and_serves_no_wrong_byte(server):
    server.start()
    with CacheEngine(server.socket_dir, block_bytes=64 << 10) as engine:
        engine.connect()
        rng = random.Random(3)
        for seed in range(6):
            jobs = [engine.store(prompt(12, seed * 10 + part), compute=False) for part in range(3)]
            if rng.random() < 0.5:
                eventually("some way into it", lambda jobs=jobs: jobs[0].bytes or jobs[0].done.is_set())
            server.kill()
            for job in jobs:
                assert job.wait_gathered(PATIENCE_S)
                assert job.done.wait(PATIENCE_S)
            server.start()
            engine.connect()
        use_until_it_works(engine, seed=999)
        eventually("nothing reserved is left", lambda: pool_has_no(server, "reserved"))
        eventually("no quarantine is left", lambda: pool_has_no(server, "quarantined"))


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


class Cuts:
    """Cuts the connections of this process's clients, before a message, within it or behind it, reproducibly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.rate = 0.0
        self.count = 0
        self._random = random.Random(seed)
        send, receive = Connection.send, Connection.receive

        def cut(link: Connection) -> None:
            self.count += 1
            link.socket.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("cut by the test")

        def sends(link: Connection, message: bytes, fds: Sequence[int] = ()) -> bool:
            if fds or self._random.random() >= self.rate:
                return send(link, message, fds)
            match self._random.randrange(3):
                case 0:
                    send(link, message)
                case 1:
                    whole = header(len(message)) + message
                    link.socket.send(whole[: self._random.randrange(len(whole))])
            cut(link)
            return False

        def receives(link: Connection) -> list[bytes]:
            messages = receive(link)
            if self._random.random() < self.rate:
                cut(link)
            return messages

        monkeypatch.setattr(Connection, "send", sends)
        monkeypatch.setattr(Connection, "receive", receives)


@pytest.mark.parametrize("seed", range(amount(1, 6)))
def test_connections_that_are_cut_anywhere_leave_no_lease_and_no_reservation(server, monkeypatch, seed):
    server.start()
    cuts = Cuts(monkeypatch, seed)
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        rng = random.Random(seed)
        cuts.rate = 0.05
        for number in range(40):
            tokens = prompt(rng.randrange(1, 5), seed=rng.randrange(6))
            if rng.random() < 0.5:
                job = engine.store(tokens)
                assert job.wait_gathered(PATIENCE_S)
                assert job.done.wait(PATIENCE_S)
            else:
                call = engine.lookup(tokens, deadline_ms=rng.choice([50, 5000]))
                if rng.random() < 0.3:
                    call.cancel()
                assert call.wait(PATIENCE_S), number
                if call.result.n_chunks:
                    engine.check_load(tokens, call.result, sync=rng.random() < 0.5)
            if rng.random() < 0.5:
                engine.connect()
        cuts.rate = 0.0
        assert cuts.count > 0
        engine.connect()
        use_until_it_works(engine, seed=100 + seed)
        eventually("no lease is left", lambda: nothing_leased(server))
        eventually("nothing reserved is left", lambda: pool_has_no(server, "reserved"))


def lose_replies(monkeypatch: pytest.MonkeyPatch, kind: type[wire.Reply]) -> None:
    """Drop all replies of this kind on their way to the clients of this process."""
    receive = Connection.receive

    def without(link: Connection) -> list[bytes]:
        return [
            message
            for message in receive(link)
            if not (message[0] >> 4 == 9 and isinstance(wire.decode_reply(message), kind))
        ]

    monkeypatch.setattr(Connection, "receive", without)


def test_a_lookup_whose_answer_never_comes_ends_at_its_deadline_and_leaves_no_lease(server, monkeypatch):
    server.start()
    lose_replies(monkeypatch, wire.LookupReply)
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(4))
        call = engine.lookup(prompt(4), deadline_ms=300)
        assert call.wait(PATIENCE_S)
        assert call.result.reason == "deadline"
        assert engine.client.connected, "pings are answered, so the server is in use"
        eventually("no lease is left", lambda: nothing_leased(server))


@pytest.mark.long
def test_a_closing_client_reserves_nothing_more(server, monkeypatch):
    server.start()
    lose_replies(monkeypatch, wire.ReserveReply)
    reserves: dict[int, None] = {}
    send = Connection.send

    def note(link: Connection, message: bytes, fds: Sequence[int] = ()) -> bool:
        if (
            not fds
            and message not in (b"locked", b"bye")
            and isinstance(request := wire.decode_request(message), wire.Reserve)
        ):
            reserves[request.seq] = None
        return send(link, message, fds)

    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        monkeypatch.setattr(Connection, "send", note)
        jobs = [engine.store(prompt(4, seed)) for seed in range(3 * BATCHES_IN_FLIGHT)]
        eventually("some are reserved", lambda: len(reserves) == BATCHES_IN_FLIGHT)
        engine.client.close()
        assert len(reserves) == BATCHES_IN_FLIGHT
        assert {outcome for job in jobs for outcome in job.outcomes} == {StoreOutcome.UNAVAILABLE}
        assert all(job.gathered.is_set() and job.done.is_set() for job in jobs)
        eventually("nothing reserved is left", lambda: pool_has_no(server, "reserved"))


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
