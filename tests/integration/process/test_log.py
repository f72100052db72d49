"""Logs of servers and controllers: their format and level, and readers that stop reading or go away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvstrata.observability.logging import MAX_LINES
from tests.harness import own_commands
from tests.harness.bad_adapter import entry_of
from tests.harness.cache_engine import eventually
from tests.harness.controller_process import ControllerProcess
from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration


class FullPipe:
    """A pipe for a log in which no byte has room until `read_all`."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self._filler = 0
        try:
            while True:
                self._filler += os.write(self.writer, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(self.writer, True)

    def read_all(self) -> list[str]:
        """Everything that was logged, once all processes that could log have ended; closes the pipe."""
        os.close(self.writer)
        with open(self.reader, "rb") as file:
            return file.read()[self._filler :].decode().splitlines()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, l1_mb=16) as made:
        yield made


def test_a_process_whose_log_nobody_reads_serves_and_stops(begin):
    pipe = FullPipe()
    process = begin(stderr=pipe.writer)
    assert read(f"{process.url}/readyz")
    assert process.stop() == 0
    assert not any("dropped" in line for line in pipe.read_all())


def test_a_keeper_whose_log_nobody_reads_starts_its_server_again(tmp_path: Path) -> None:
    pipe = FullPipe()
    flags = ("--http-port", str(free_port()))  # the same after the restart
    with ServerProcess(tmp_path, l1_mb=16, supervised=True, flags=flags) as server:
        server.stderr = pipe.writer
        server.start()
        send(server.ready["pid"], signal.SIGKILL)

        def restarts() -> int:
            try:
                return server.get("/v1/status")["process"]["restarts"]
            except OSError:
                return 0

        eventually("it serves again", restarts)
        assert server.stop() == 0
    pipe.read_all()


def test_a_reader_that_comes_back_gets_the_lines_in_order_and_the_end(server: ServerProcess) -> None:
    """The last lines of a stop are written, since the reader reads again before the end."""
    pipe = FullPipe()
    server.stderr = pipe.writer
    server.start()
    process = server._process
    assert process is not None
    found = bytearray()
    process.terminate()
    os.close(pipe.writer)
    while part := os.read(pipe.reader, 65_536):
        found += part
    os.close(pipe.reader)
    assert process.wait() == 0
    events = [text.split()[3] for text in found[pipe._filler :].decode().splitlines()]
    assert events.index("ready") < events.index("stopping") < events.index("stopped") == len(events) - 2
    assert events[-1] == "pool_kept"


CRASH = """
import asyncio
from kvstrata.observability.logging import EventLog, set_up
from kvstrata.process.lifecycle import Process, run

class Failing(Process):
    async def start(self):
        for number in range(2000):
            self.log.info("line", number=number)
        async def fail():
            raise ValueError("the reason")
        self.supervisor.spawn(fail(), "failing")
    drain_s = 0.0
    drain = under_way = given_up = reload = None

set_up("info")
run(Failing("test"))
"""


def test_the_last_lines_before_a_crash_are_written() -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 70
    logged = [line for line in ended.stderr.splitlines() if " INFO kvstrata.test line " in line]
    assert [int(line.rpartition("=")[2]) for line in logged] == [*range(2000)]
    assert "test_failed reason=\"task failing crashed: ValueError('the reason')\"" in ended.stderr


def test_a_crash_waits_for_nobody_who_reads_the_log() -> None:
    pipe = FullPipe()
    process = subprocess.Popen([sys.executable, "-c", CRASH], stderr=pipe.writer)
    assert process.wait() == 70
    pipe.read_all()


FLOOD = """
import os
from kvstrata.observability.logging import EventLog, LogNumbers, flush_log, set_up
set_up("info")
log = EventLog("test")
for number in range(100_000):
    log.info("line", number=number, text="y" * 200)
os.write(1, str(LogNumbers().dropped_lines).encode() + b"\\n")
os.read(0, 1)
flush_log()
"""


def test_lines_beyond_the_bound_are_dropped_and_said_so_when_the_reader_reads_again() -> None:
    pipe = FullPipe()
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=pipe.writer
    )
    assert process.stdout is not None and process.stdin is not None
    dropped = int(process.stdout.readline())
    assert dropped > 100_000 - 2 * MAX_LINES
    os.close(pipe.writer)
    process.stdin.close()
    found = bytearray()
    while part := os.read(pipe.reader, 65_536):
        found += part
    os.close(pipe.reader)
    process.stdout.close()
    assert process.wait() == 0
    lines = found[pipe._filler :].decode().splitlines()
    [notice] = [line for line in lines if line.endswith("log lines were dropped")]
    assert notice.endswith(f"WARNING kvstrata.log {dropped} log lines were dropped")
    assert len(lines) - 1 == 100_000 - dropped


def dropped_lines(server: ServerProcess) -> float:
    [line] = [
        line
        for line in read(f"{server.url}/metrics").decode().splitlines()
        if line.startswith("kvstrata_log_dropped_lines_total ")
    ]
    return float(line.split()[1])


def test_a_server_goes_on_when_the_reader_of_its_log_has_ended(server: ServerProcess) -> None:
    reader, server.stderr = os.pipe()
    os.close(reader)
    server.start()
    os.close(server.stderr)
    assert dropped_lines(server) > 0
    assert server.stop() == 0


def test_no_file_of_a_server_takes_the_place_of_a_closed_stderr(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" 2>&-\n')
    python.chmod(0o700)
    with ServerProcess(tmp_path, l1_mb=16, python=python).started() as server:
        assert os.readlink(f"/proc/{server.pid}/fd/2") == os.devnull
        assert server.stop() == 0


def test_each_line_of_a_json_log_is_an_object(begin):
    process = begin(flags=("--log-format", "json", "--log-level", "debug"))
    process.signal(signal.SIGHUP)
    eventually("the reload in the log", lambda: '"message": "reloaded' in process.log.read_text())
    assert process.stop() == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert all(set(line) == {"time", "level", "component", "message", "fields"} for line in lines)
    [ready] = [line for line in lines if line["message"] == "ready"]
    assert ready["fields"]["pid"] == process.ready["pid"]
    assert [line["message"] for line in lines[-2:] if line["message"] != "pool_kept"][-1] == "stopped"


ROOT = Path(__file__).resolve().parents[3]
DETAIL = "DEBUG kvstrata.tiers.host.process plugin-0: host: an_sdk: a detail"


def ctl(*arguments: str) -> str:
    done = own_commands.run("kvstrata", "ctl", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_host_follows_the_level_of_its_server(tmp_path: Path) -> None:
    orders, settings = tmp_path / "orders", tmp_path / "server.yaml"
    orders.mkdir()
    (orders / "numbers.detail").touch()  # the host asks its adapter for numbers every second
    entry = entry_of(tmp_path / "kv", orders)
    settings.write_text("log_level: info\n")
    with ServerProcess(
        tmp_path / "server",
        l1_mb=16,
        l2="embedded",
        flags=("--config", str(settings), "--l2-adapter", json.dumps(entry)),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
    ).started() as server:

        def details() -> int:
            ctl("--url", server.url, "l2", "list")  # asks the host, which learns of the level with each call
            return server.log.read_text().count(DETAIL)

        def change(level: str) -> str:
            return ctl("--url", server.url, "log-level", level).split()[-1]

        def host() -> dict[str, object]:
            status = json.loads(ctl("--url", server.url, "--json", "status"))
            return status["l2_adapters"]["plugin-0"]["host"]

        before = host()
        assert ctl("--url", server.url, "log-level").split() == ["level", "info"]
        assert change("DEBUG") == "debug"
        eventually("details of the adapter in the log", details)
        server.signal(signal.SIGHUP)
        assert "changed=log_level" in server.expect("reloaded")
        assert ctl("--url", server.url, "log-level").split() == ["level", "info"]
        assert change("warning") == "warning"
        server.expect("log_level_changed", "level=warning was=info")
        known = details()
        settings.write_text("log_level: debug\n")
        server.signal(signal.SIGHUP)
        eventually("more details", lambda: details() > known)
        assert host()["pid"] == before["pid"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(f"{server.url}/v1/log-level", token="wrong")
        assert refused.value.code == 401


def test_a_controller_changes_its_level(tmp_path: Path) -> None:
    settings = tmp_path / "controller.yaml"
    settings.write_text(yaml.safe_dump({"log_level": "warning"}))
    flags = ("--config", str(settings))
    with ControllerProcess(tmp_path / "controller", flags=flags) as controller:
        cluster = ("--url", controller.url, "cluster", "log-level")
        assert ctl(*cluster).split() == ["level", "warning"]
        assert ctl(*cluster, "info").split() == ["level", "info"]
        controller.expect("log_level_changed", "level=info was=warning")
        controller.signal(signal.SIGHUP)
        eventually("the level of the settings", lambda: ctl(*cluster).split() == ["level", "warning"])
