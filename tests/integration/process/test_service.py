"""Servers and controllers as services: what systemd hears of them, and under which names ps and top show them."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata import __version__
from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, eventually
from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerProcess
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
    ) as server:
        server.start()
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
    ) as server:
        server.start()
        heard(systemd, "WATCHDOG=1")
        server.freeze()
        systemd.settimeout(5 * WATCHDOG_S)
        with pytest.raises(TimeoutError):
            while True:
                systemd.recv(4096)
        server.thaw()
        systemd.settimeout(PATIENCE_S)
        heard(systemd, "WATCHDOG=1")


def test_systemd_hears_of_a_controller(tmp_path: Path, systemd: socket.socket, monkeypatch) -> None:
    for name, value in environment_for(systemd).items():
        monkeypatch.setenv(name, value)
    with ControllerProcess(tmp_path / "controller") as controller:
        assert heard(systemd, "READY=1") == ["READY=1", "STATUS=serving"]
        assert controller.stop() == 0
        heard(systemd, "STOPPING=1")


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


def test_the_commands_tell_their_version() -> None:
    for module in ("kvstrata", "kvstrata.cli.server", "kvstrata.cli.controller"):
        done = own_commands.run(module, "--version")
        assert (done.stdout.split()[-1], done.stderr) == (__version__, ""), module
