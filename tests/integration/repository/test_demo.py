"""`make demo` without vLLM: two at once do not meet, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.harness.cache_engine import eventually
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "tests.tools.demo", "--act", "1"]


def begin() -> subprocess.Popen[str]:
    return subprocess.Popen(
        COMMAND, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def left_by(pid: int) -> list[str]:
    """Files and folders that carry the demo's number, and processes of its session."""
    files = [
        *(ROOT / "build").glob(f"demo-{pid}-*"),
        *Path("/tmp").glob(f"kvstrata-run-{pid}-*"),
        *Path("/dev/shm").glob(f"kvstrata-run-{pid}-*"),
    ]
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(pid):
            try:
                if f"kvstrata-run-{pid}-".encode() in (entry / "cmdline").read_bytes():
                    processes.append(entry.name)
            except OSError:
                continue
    return [*map(str, files), *processes]


def cases(output: str) -> list[str]:
    """The rows of the demo's table, without their figures."""
    return [line.split("  ")[1] for line in output.splitlines() if line.startswith(("  store", "  retrieve"))]


def test_two_demos_at_once_give_the_same_table_and_leave_nothing() -> None:
    demos = [begin(), begin()]
    outputs = [demo.communicate(timeout=300)[0] for demo in demos]
    for demo, output in zip(demos, outputs, strict=True):
        assert demo.returncode == 0, output
        assert "NOT all right" not in output
        assert left_by(demo.pid) == []
    assert len(cases(outputs[0])) == 3
    assert cases(outputs[0]) == cases(outputs[1])


def test_an_interrupted_demo_leaves_nothing() -> None:
    demo = begin()
    try:
        eventually("its server runs", lambda: list(Path("/dev/shm").glob(f"kvstrata-run-{demo.pid}-*")))
        os.kill(demo.pid, signal.SIGINT)
        output, _ = demo.communicate(timeout=120)
    finally:
        demo.kill()
    assert demo.returncode == 130, output
    assert "interrupted" in output
    assert left_by(demo.pid) == []


def test_a_server_that_was_silent_for_a_while_gets_a_store_again(tmp_path: Path) -> None:
    """On a crowded machine a server may be silent for a while; stores are refused then, and the demo repeats them."""
    with ServerProcess(tmp_path, l1_mb=96) as server:
        server.start()
        with Child(
            "tests.harness.load_client", str(server.socket_dir), "1", "1", log=tmp_path / "log"
        ) as client:
            eventually("it attached", lambda: client.ask("connected"))
            send(server.pid, signal.SIGSTOP)
            with ThreadPoolExecutor(1) as thread:
                stored = thread.submit(client.ask, "store", seed=1, chunks=1)
                assert not wait([stored], timeout=1.5).done
                send(server.pid, signal.SIGCONT)
                assert stored.result(60)["outcomes"] == ["stored"]
            send(server.pid, signal.SIGSTOP)
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(client.ask, "retrieve", seed=1, chunks=1)
                assert not wait([found], timeout=1.5).done
                send(server.pid, signal.SIGCONT)
                assert found.result(60)["equal"]
