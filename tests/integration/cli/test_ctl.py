"""`kvstrata ctl`: its pages of a real server, the live screens, and where its output ends."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.cli.boundary import Exit
from kvstrata.observability.load_line import prompt_work
from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, eventually
from tests.harness.child import Child
from tests.harness.daemon import free_port
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


CHUNKS = 2
TOKENS_S = 100.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose engine has computed one prompt after a miss, and has then found it."""
    folder = tmp_path_factory.mktemp("pages")
    with (
        ServerProcess(folder, l1_mb=256, l2="fs").started() as server,
        Child("tests.harness.cache_engine", log=folder / "engine.log") as engine,
    ):
        engine.ask("start", socket_dir=str(server.socket_dir), model="llama-8b-shape")
        engine.ask("connect")
        assert engine.ask("hit", n_chunks=CHUNKS) == 0
        engine.ask("store", n_chunks=CHUNKS)
        engine.ask("computes", tokens_s=TOKENS_S)
        eventually("a ping tells it", lambda: server.get("/v1/status")["engines"][0]["prompt_tokens_s"])
        assert engine.ask("hit", n_chunks=CHUNKS) == CHUNKS
        yield server


def command(server: ServerProcess, *words: str) -> list[str]:
    # A shell without job control starts background processes with SIGINT ignored; children of the tests inherit that.
    python = ["env", "--default-signal=INT", sys.executable]
    return [*python, "-m", "kvstrata", "ctl", *words, "--url", server.url]


def ctl(server: ServerProcess, *words: str) -> str:
    done = own_commands.run("kvstrata", "ctl", *words, "--url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_page_tells_what_the_server_measured(server: ServerProcess) -> None:
    page = ctl(server, "status")
    assert "ready" in page and "\x1b" not in page
    assert len(page.splitlines()) <= 40 and max(map(len, page.splitlines())) <= 80
    [start] = [line for line in page.splitlines() if line.startswith("since start")]
    assert start.split()[2:5] == ["2", str(2 * CHUNKS), "50"] and "≈" in start
    assert "llama-8b-shape" in page and "fs-0" in page and "first misses of the last hour: " in page
    status = json.loads(ctl(server, "status", "--json"))
    trend = status["trend"]
    [engine] = status["engines"]
    saved_s = prompt_work(0, CHUNKS * CHUNK_TOKENS) / TOKENS_S
    assert trend["start"]["avoided_s"] == engine["avoided_s"] == pytest.approx(saved_s, abs=0.001)
    assert (engine["lookups"], engine["hit_chunks"], engine["stored_records"]) == (2, CHUNKS, CHUNKS)
    everything = ctl(server, "status", "--all")
    assert everything.splitlines()[0].startswith("needs_attention") and "pool" in everything
    assert (len(engine["pids"]), engine["leases"]) == (1, 0) and engine["pinged_ago_s"] is not None
    [row] = [line for line in page.splitlines() if "llama-8b-shape" in line]
    assert row.split()[:2] == [engine["engine"][:8], str(engine["pids"][0])]
    recent = ctl(server, "explain").splitlines()
    assert recent[0].split()[:2] == ["request_id", "at"] and len(recent) == 3


@pytest.mark.silence
def test_a_stopped_server_costs_a_command_some_seconds(server: ServerProcess) -> None:
    os.kill(server.ready["pid"], signal.SIGSTOP)
    try:
        done = own_commands.run("kvstrata", "ctl", "status", "--url", server.url)
    finally:
        os.kill(server.ready["pid"], signal.SIGCONT)
    assert (
        done.returncode == 1 and "has not answered for 3 s: its process is stopped or hangs;" in done.stderr
    )


FEW_FILES = 20


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))


def started(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    # A shell without job control starts background processes with SIGINT ignored; children of the tests inherit that.
    command = [*("env", "--default-signal=INT"), sys.executable, "-m", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **more)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, error = process.communicate(timeout=120)
    return process.returncode, error.decode()


@contextlib.contextmanager
def output(kind: str) -> Iterator[int]:
    """A descriptor for standard output that takes nothing."""
    if kind == "gone":
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.open(kind, os.O_WRONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["", "unbuffered"])
@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [
        ("gone", Exit.READER_GONE, ""),
        ("/dev/full", Exit.OUTPUT, "cannot write to standard output: No space left on device"),
    ],
)
def test_output_that_is_lost_has_a_status(kind: str, status: int, says: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with output(kind) as fd:
        found, error = ended(started(["kvstrata", "--help"], stdout=fd, env=environment))
    assert found == status and says in error and "Traceback" not in error, error
    assert len(error.splitlines()) == bool(says)


def test_a_closed_output_is_lost_output() -> None:
    found, error = ended(started(["kvstrata", "--help"], preexec_fn=lambda: os.close(1)))
    assert found == Exit.OUTPUT and "Traceback" not in error, error


def test_an_output_without_our_characters_gets_them_escaped() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = started(["kvstrata", "ctl", "pool", "free", "/nonexistent/pö→l"], env=environment)
    found, error = ended(process)
    assert found in (Exit.FAILED, Exit.CONFIG) and error.isascii() and "Traceback" not in error, error


@pytest.mark.parametrize(
    ("module", "supervised"), [("kvstrata.cli.server", True), ("kvstrata.cli.controller", False)]
)
def test_a_server_that_may_open_too_few_files_does_not_start_and_says_so(module, supervised):
    words = [module, "--port", str(free_port()), *([] if supervised else ["--no-supervise"])]
    status, error = ended(started(words, stdout=subprocess.DEVNULL, preexec_fn=limit_files))
    assert status == Exit.CONFIG
    assert f"open files: this process may have {FEW_FILES} open at a time" in error and "ulimit -Hn" in error
    assert len(error.splitlines()) == 1


def test_ctrl_c_while_a_command_waits_is_one_line_and_status_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = started(["kvstrata", "ctl", "--url", url, "status"], stdout=subprocess.DEVNULL)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            assert ended(process) == (Exit.INTERRUPTED, "kvstrata ctl: interrupted\n")
