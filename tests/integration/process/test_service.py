"""A server as systemd and pods run it: readiness, signals, reloads and stops."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.controller_process import ControllerProcess
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess
from tests.harness.shelf import Fault, entry
from tests.harness.signals import of_threads

pytestmark = pytest.mark.integration


WATCHDOG_S = 0.2
PATIENCE_S = 60.0


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE_S)
        yield listener


def environment_for(systemd: socket.socket) -> dict[str, str]:
    return {**os.environ, "NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}


def heard(systemd: socket.socket, word: str) -> list[str]:
    """The first message from now on with this line."""
    while True:
        lines = systemd.recv(4096).decode().splitlines()
        if word in lines:
            return lines


def test_systemd_hears_of_every_state_of_a_server(tmp_path: Path, systemd: socket.socket) -> None:
    with ServerProcess(
        tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, environment=environment_for(systemd)
    ).started() as server:
        heard(systemd, "STATUS=starting")
        serving = f"STATUS=serving at {server.socket_dir}, L1 of 0.1 GB"
        assert heard(systemd, "READY=1") == ["READY=1", serving]
        for _ in range(3):
            heard(systemd, "WATCHDOG=1")
        server.signal(signal.SIGHUP)
        heard(systemd, "RELOADING=1")
        assert heard(systemd, "READY=1") == ["READY=1", serving]
        server.stop()
        assert "STATUS=stopping" in heard(systemd, "STOPPING=1")


def test_a_frozen_loop_starves_the_watchdog(tmp_path: Path, systemd: socket.socket) -> None:
    with ServerProcess(
        tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, environment=environment_for(systemd)
    ).started() as server:
        heard(systemd, "WATCHDOG=1")
        with server.frozen():
            systemd.settimeout(5 * WATCHDOG_S)
            with pytest.raises(TimeoutError):
                while True:
                    systemd.recv(4096)
        systemd.settimeout(PATIENCE_S)
        heard(systemd, "WATCHDOG=1")


def name(pid: int | str) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def names_of_threads(pid: int) -> set[str]:
    return {comm.strip() for comm in of_threads(pid, "comm")}


def children(pid: int) -> list[int]:
    """The processes that any thread of this process has started."""
    return [int(child) for told in of_threads(pid, "children") for child in told.split()]


def test_processes_and_threads_have_names(tmp_path: Path) -> None:
    isolated = {"type": "fs", "base_path": str(tmp_path / "l2"), "capacity_gb": 1, "isolation": "process"}
    flags = ("--l2-adapter", json.dumps(isolated))
    with ServerProcess(
        tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, l2="embedded", flags=flags, supervised=True
    ) as server:
        server._environment["KVSTRATA_L1_SEGMENT_DIR"] = (
            "/dev/shm/no/such/place"  # so the keeper keeps the pool
        )
        serving = server.start()["pid"]
        assert name(server.pid) == "kv-keeper"
        assert name(serving) == "lmcache-server"
        assert [name(child) for child in children(serving)] == ["kv-host-fs-0"]
        eventually("the log's thread", lambda: "kv-log" in names_of_threads(serving))
        assert "host-fs-0" in names_of_threads(serving)
        named = {
            name(pid) for pid in os.listdir("/proc") if pid.isdigit() and _speaks_of(pid, server.socket_dir)
        }
        assert named == {"kv-keeper", "lmcache-server"}


def _speaks_of(pid: str, folder: Path) -> bool:
    """Whether the command line of a process names something in this folder."""
    try:
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


PATHS = "from kvstrata.native import core; print(core.crc32c_path(), core.sha256_path())"
ORDER = ["table", "sse42", "vpclmul256", "vpclmul512"]


def paths(simd: str) -> tuple[str, str]:
    """The paths that a process with this value chooses: of CRC32C, and of SHA-256."""
    environment = os.environ | {"KVSTRATA_SIMD": simd}
    done = subprocess.run(
        [sys.executable, "-c", PATHS], env=environment, capture_output=True, text=True, check=True
    )
    crc32c, sha256 = done.stdout.split()
    return crc32c, sha256


@pytest.mark.parametrize(("simd", "best"), [("avx2", "vpclmul256"), ("none", "table"), ("", "vpclmul512")])
def test_no_kernel_uses_more_than_the_variable_allows(simd: str, best: str) -> None:
    here, sha256 = paths("")
    crc32c, sha256_now = paths(simd)
    assert crc32c == min(here, best, key=ORDER.index)
    assert sha256_now == ("scalar" if simd == "none" else sha256)


READY = re.compile(r" kvstrata\.(?:server|controller) ready ")
IMPORTED = re.compile(r"import time: *\d+ \| *\d+ \| +(\w+)")
HTTP_STACK = {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "httptools", "anyio"}


def imported(lines: list[str]) -> set[str]:
    """Packages of which these lines of an import profile import something."""
    return {found[1] for line in lines if (found := IMPORTED.search(line))}


def test_probes_and_metrics_import_nothing_after_the_start_and_no_fastapi(begin):
    """A later import holds the interpreter, so only an admin's first request may cost one."""
    process = begin(environment=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    for path in ("/readyz", "/metrics"):
        assert read(process.url + path)
    process.kill()
    lines = process.log.read_text().splitlines()
    ready = next(number for number, line in enumerate(lines) if READY.search(line))
    assert "uvicorn" in imported(lines[:ready]) and "fastapi" not in imported(lines)
    assert not imported(lines[ready:]) & HTTP_STACK, sorted(imported(lines[ready:]))


OLD, NEW = "an-old-token-0123456789", "a-new-token-0123456789"


def lines(log: Path, event: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if event in line.split()]


class Config:
    """A server's configuration file and token files, which a test changes while the server runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "server.yaml"
        self.settings: dict[str, Any] = {
            "http": {"token_file": self.secret("http", OLD)},
            "security": {"tenants_file": self.secret("tenants", f"{OLD} blue")},
        }
        self.write()

    def secret(self, name: str, text: str) -> str:
        path = self.folder / f"{name}.secret"
        path.touch(mode=0o600)
        path.write_text(text + "\n")
        return str(path)

    def write(self, **more: Any) -> None:
        self.settings |= more
        self.path.write_text(yaml.safe_dump(self.settings))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path)


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path, config: Config) -> Iterator[ServerProcess]:
    flags, kept = ("--config", str(config.path)), getattr(request, "param", False)
    with ServerProcess(
        tmp_path, l1_mb=64, l2="fs", chunk_tokens=CHUNK_TOKENS, flags=flags, supervised=kept
    ).started() as made:
        yield made


@pytest.mark.parametrize("server", [False, True], ids=["alone", "kept"], indirect=True)
def test_sighup_does_not_end_a_server(server: ServerProcess) -> None:
    server.signal(signal.SIGHUP)
    assert server.expect("reloaded").endswith("reloaded changed=nothing needs_restart=nothing")
    assert read(f"{server.url}/healthz")
    assert server.stop() == 0
    assert all(len(line) < 5_000 for line in server.log.read_text().splitlines())


def status(server: ServerProcess, token: str) -> dict[str, Any]:
    return json.loads(read(f"{server.url}/v1/status", token=token))


def test_a_reload_changes_what_can_change_and_names_the_rest(server: ServerProcess, config: Config) -> None:
    assert status(server, OLD)["tenants"] == []
    config.secret("http", NEW)
    config.secret("tenants", f"{NEW} green")
    config.write(log_level="debug", p2p={"zone": "a"}, quotas_gb={"green": 0.001}, l2={"drain_s": 1})
    server.signal(signal.SIGHUP)
    assert server.expect("reloaded").partition("reloaded ")[2] == (
        "changed=http.token_file,l2.drain_s,log_level,quotas_gb,security.tenants_file needs_restart=p2p.zone"
    )
    with pytest.raises(urllib.error.HTTPError):
        status(server, OLD)
    assert status(server, NEW)["instance"]["ready"]
    asked = own_commands.run("kvstrata", "ctl", "--url", server.url, "status")
    assert asked.returncode == 0, asked.stderr  # it finds the new token
    token = config.secret("engine", NEW)
    with CacheEngine(server.socket_dir, tenant="green", settings={"token_file": token}) as engine:
        engine.connect()
        engine.stored(prompt(64))
        [row] = [row for row in status(server, NEW)["tenants"] if row["tenant"] == "green"]
        assert row["quota_bytes"] == int(0.001 * 2**30)
    assert lines(server.log, "DEBUG"), "the new log level"
    config.write(log_level="warning")
    server.signal(signal.SIGHUP)
    eventually(
        "the log is quiet", lambda: status(server, NEW) and server.log.read_text().count("reloaded") == 1
    )
    assert server.stop() == 0


def test_a_bad_file_changes_nothing_and_is_said(server: ServerProcess, config: Config) -> None:
    config.secret("http", NEW)
    for count, wrong in enumerate(("not: [yaml", "l1: {size_gb: none}\n", "log_levle: debug\n"), 1):
        config.path.write_text(wrong)
        server.signal(signal.SIGHUP)
        assert str(config.path) in server.expect("reload_failed", count=count)
        assert status(server, OLD)["instance"]["ready"], "the token did not change either"
    config.write(log_level="debug")
    server.signal(signal.SIGHUP)
    assert "changed=http.token_file,log_level" in server.expect("reloaded")


def test_a_controller_reloads_its_token(tmp_path: Path, config: Config) -> None:
    config.settings = {"http": config.settings["http"]}
    config.write()
    with ControllerProcess(tmp_path / "controller", flags=("--config", str(config.path))) as controller:
        assert controller.ask("/v1/cluster", token=OLD)
        config.secret("http", NEW)
        config.write(dead_after_s=70)
        controller.signal(signal.SIGHUP)
        line = controller.expect("reloaded")
        assert line.endswith("changed=http.token_file needs_restart=dead_after_s")
        with pytest.raises(urllib.error.HTTPError):
            controller.ask("/v1/cluster", token=OLD)
        assert controller.ask("/v1/cluster", token=NEW)
        assert controller.stop() == 0


def test_a_stop_says_what_it_waits_for_and_what_it_gave_up(tmp_path: Path) -> None:
    """The adapter never answers its puts; the whole stop takes no longer than the budget of its drain."""
    flags = ("--l2-adapter", json.dumps(entry("bad", Fault.HANG, deadline_ms=60_000)))
    environment = {**os.environ, "KVSTRATA_L2_DRAIN_S": "1.5", "KVSTRATA_PATIENCE": "1"}
    with ServerProcess(
        tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, l2="embedded", flags=flags, environment=environment
    ) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(4))
            lookup = engine.lookup(prompt(4))
            assert lookup.wait(60)
            assert server.stop() == 0
        [waits] = lines(server.log, "stop_waits")
        assert "puts=4 fetches=0 budget_s=6.5" in waits
        assert lines(server.log, "stopped")[0].endswith("stopped puts_given_up=4 engines=1 leases=1")


PROCESS = """
import asyncio, os, sys, threading
from kvstrata.observability.logging import set_up
from kvstrata.process import keeper, lifecycle

class Small(lifecycle.Process):
    drain_s = 0.0
    async def start(self):
        if sys.argv[1] == "stuck":
            self.closers.append(self.never)
        if sys.argv[1] == "blocked":
            self.closers.append(self.block)
        if sys.argv[1] == "thread":
            threading.Thread(target=threading.Event().wait).start()
        os.write(1, b"ready\\n")
    async def block(self):
        threading.Event().wait()
    async def never(self):
        await self.loop.create_future()
    async def drain(self, drain_s):
        pass
    def under_way(self):
        return {"things": 1}
    def given_up(self):
        return {"things": 2}
    async def reload(self):
        os.write(1, b"reloaded\\n")
        return {}

lifecycle.CLOSING_S = 1.5
os.environ["KVSTRATA_PATIENCE"] = "1"  # each of its parts ends at once or never

def serve(arguments, restarts):
    set_up("info")
    if sys.argv[1] == "asked":
        os.kill(os.getpid(), 1)
    return lifecycle.run(Small("small"))

sys.exit(keeper.keep("small", ["--no-supervise"], serve))
"""


def test_a_hangup_before_a_process_serves_waits_until_it_does() -> None:
    command = [sys.executable, "-c", PROCESS, "asked"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "reloaded\n"]
        process.terminate()


def test_a_part_that_cannot_be_closed_does_not_hold_up_the_stop() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "stuck"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [line.partition("small ")[2] for line in log.splitlines()] == [
        "stopping signal=SIGTERM",
        "stop_waits things=1 budget_s=1.5",
        "stop_cut_short budget_s=1.5 things=2",
    ]


@pytest.mark.parametrize("what", ["blocked", "thread"])
def test_a_thread_that_does_not_end_does_not_hold_up_the_stop(what: str) -> None:
    """The loop itself, or a thread that the interpreter waits for at its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert log.splitlines()[-1].endswith('stop_cut_short note="a thread did not end"')


def test_a_process_ends_with_its_terminal() -> None:
    """SIGHUP asks for a reload only as long as the terminal, if there was one, is there."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, ""],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.close(master)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopping signal=SIGHUP" in log


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
