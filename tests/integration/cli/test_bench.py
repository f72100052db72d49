"""`kvstrata bench` against a real server: it verifies the bytes that it measures with, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli.bench.running import RunningServer
from kvstrata.errors import InternalError, Refused
from kvstrata.measure.engine import Plan, Shape, Silent, SimulatedEngine
from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

SMALL = ("--layers", "4", "--kv-heads", "2", "--rounds", "2")
"""Chunks of 1 MiB."""
TOKEN = "secret-of-blue-0123456"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64, chunk_tokens=CHUNK_TOKENS) as server:
        server.start()
        yield server


def words(server: ServerProcess, *arguments: str) -> tuple[str, ...]:
    where = ("--port", str(server.port), "--socket-dir", str(server.socket_dir), "--url", server.url)
    return ("bench", *where, *SMALL, *arguments)


def command(server: ServerProcess, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstrata", *words(server, *arguments)]


def bench(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return own_commands.run("kvstrata", *words(server, *arguments))


def measured(server: ServerProcess, *arguments: str) -> dict[str, Any]:
    done = bench(server, "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def nothing_is_left(server: ServerProcess) -> bool:
    """The server has no session, lease, reservation or hold, and no tenant has a chunk."""
    status = server.get("/v1/status")
    pool = status["pool"]
    counts = [pool[name] for name in ("leases", "reservations", "holds", "rows_claimed")]
    tenants = [row for row in status["tenants"] if row["tenant"] != "#00000000"]
    return not any(counts) and not tenants and not status["peers"]


def test_a_run_gives_every_figure_verified_and_leaves_nothing(server):
    report = measured(server, "--chunks", "3")
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert list(figures) == [
        "store", "retrieve", "memcpy", "store / memcpy", "retrieve / memcpy", "lookup p50", "lookup p99", "ping p50",
    ]  # fmt: skip
    assert all(0 < figure["least"] <= figure["value"] <= figure["greatest"] for figure in figures.values())
    assert report["verified_bytes"] == 3 * 2 * (1 << 20)
    assert [note for note in report["notes"] if "measured again" not in note] == []
    eventually("all is cleared", lambda: nothing_is_left(server))


def test_a_run_leaves_the_chunks_of_others(server, request):
    with CacheEngine(server.socket_dir, model=request.node.name) as engine:
        engine.connect()
        engine.stored(prompt(8))
        measured(server, "--chunks", "4")
        assert engine.hit(prompt(8)) == 8


def test_a_run_is_bounded_by_the_free_room_in_l1_and_notes_it(server):
    report = measured(server, "--chunks", "1000")
    assert 20 <= report["chunks"] <= 30
    assert f"{report['chunks']} chunks a round instead of 1000" in report["notes"][0]
    assert not any("evicted" in note for note in report["notes"])


def test_without_room_for_a_chunk_the_error_says_what_to_change(server):
    done = bench(server, "--layers", "512")
    assert (done.returncode, done.stdout) == (1, "")
    assert "MiB of L1 without evicting" in done.stderr and "--l1-size-gb" in done.stderr
    assert done.stderr.count("\n") == 1


def test_wrong_arguments_are_named(server) -> None:
    for arguments, says in (
        (("--socket-dir", "/tmp/no such server"), "not in /tmp/no such server"),
        (("--url", "http://127.0.0.1:1"), "Start one with `lmcache-server`"),
        (("--chunk-tokens", "100"), "--chunk-tokens: 100 is not a multiple of --block-tokens 16"),
        (("--chunks", "0"), "--chunks: must be a whole number from 1 to 4096, found '0'"),
        (("--token-file", "/nowhere"), "token_file: /nowhere: cannot be read"),
        (("--layers", "60000", "--kv-heads", "60000"), "a record has less than 4096"),
    ):
        done = bench(server, *arguments)
        assert done.returncode in (1, 2) and done.stdout == ""
        assert says in done.stderr and "Traceback" not in done.stderr
        assert nothing_is_left(server)


def group_is_gone(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_run_leaves_nothing(server, number):
    # A shell without job control starts background processes with SIGINT ignored; children of the tests inherit that.
    as_in_a_terminal = ("env", "--default-signal=INT")
    running = subprocess.Popen(
        [*as_in_a_terminal, *command(server, "--rounds", "1000", "--chunks", "10")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    eventually("chunks are stored", lambda: server.get("/v1/status")["pool"]["leased_bytes"])
    server.freeze()  # the run cannot end by itself from here on
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # a terminal signals every process of the group, too
    else:
        running.send_signal(number)
    server.thaw()
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "kvstrata bench: interrupted\n")
    assert nothing_is_left(server)
    eventually("every process of it has ended", lambda: group_is_gone(running.pid))


def plan(server: ServerProcess) -> Plan:
    return Plan(str(server.socket_dir), server.port, Shape(2, 1, 8, 2, 32, 16), 3, 1, "tenant", "salt", "")


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[SimulatedEngine]:
    made = SimulatedEngine(plan(server))
    made.connect(0)
    yield made
    made.close()


def test_wrong_bytes_are_an_error(engine):
    engine.store(1)
    engine.retrieve()
    engine._source.fill([2], "another")
    with pytest.raises(InternalError, match="came back with other bytes"):
        engine.retrieve()


def test_missing_chunks_are_an_error(engine, server):
    engine.store(2)
    eventually("its chunks are cleared", lambda: [server_clear(server), nothing_of(server, "tenant")][1])
    with pytest.raises(Refused, match="only 0 of the 3 stored chunks are found"):
        engine.retrieve()


@pytest.mark.silence
@pytest.mark.parametrize(
    "step",
    [pytest.param(("store", 4), marks=pytest.mark.long), ("retrieve",),
     pytest.param(("lookups", 2), marks=pytest.mark.long)],
)  # fmt: skip
def test_a_frozen_server_does_not_count_as_missing_chunks(engine, server, step):
    engine.store(3)
    server.freeze()
    try:
        with pytest.raises(Silent):
            getattr(engine, step[0])(*step[1:])
    finally:
        server.thaw()
    engine.reconnect()
    engine.store(5)
    assert engine.retrieve().moved_bytes == 3 * (2 * 2 * 8 * 2 * 32)
    server_clear(server)


def server_clear(server: ServerProcess) -> None:
    RunningServer(server.url, "", [server.socket_dir]).clear("tenant")


def nothing_of(server: ServerProcess, tenant: str) -> bool:
    return not any(row["tenant"] == tenant and row["bytes"] for row in server.get("/v1/status")["tenants"])


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    tenants, token, config = (tmp_path / name for name in ("tenants", "token", "server.yaml"))
    for path, text in ((tenants, f"{TOKEN} blue\n"), (token, TOKEN)):
        path.touch(mode=0o600)
        path.write_text(text)
    config.write_text(f"security: {{tenants_file: {tenants}}}\n")
    with ServerProcess(tmp_path, l1_mb=64, flags=("--config", str(config))) as server:
        server.start()
        yield lambda *arguments: bench(server, "--json", *(word.format(token=token) for word in arguments))


def test_a_server_with_tenants_is_measured_as_one_of_them(guarded):
    refused = guarded()
    assert refused.returncode == 1 and "give --tenant and --token-file" in refused.stderr
    done = guarded("--tenant", "blue", "--token-file", "{token}")
    assert done.returncode == 0, done.stderr
    assert "stay in L1 until they are evicted" in json.loads(done.stdout)["notes"][-1]


def test_the_benchmark_imports_neither_torch_nor_fastapi():
    program = (
        "import sys, kvstrata.cli.bench.engine; "
        "print([m for m in ('torch', 'fastapi', 'uvicorn') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
