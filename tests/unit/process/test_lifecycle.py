"""What a process runs, what it tells systemd, and how often the kernel has killed it for lack of memory."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from kvstrata.errors import Refused
from kvstrata.process.keeper import oom_kills
from kvstrata.process.lifecycle import Systemd
from kvstrata.process.supervisor import PoolLane, Supervisor


async def test_a_job_that_crashes_ends_alone_and_the_log_has_its_trace(caplog):
    supervisor = Supervisor(asyncio.get_running_loop())

    async def crash() -> None:
        raise ZeroDivisionError("oh no")

    with pytest.raises(ZeroDivisionError):
        await supervisor.job(crash(), "prewarm-1")
    assert (supervisor.failure.done(), supervisor.failed_jobs, len(supervisor)) == (False, 1, 0)
    [record] = caplog.records
    assert record.getMessage() == "job prewarm-1 failed" and record.exc_info


async def test_a_full_lane_refuses_work_and_takes_it_once_it_has_room() -> None:
    lane = PoolLane(asyncio.get_running_loop(), threads=1, queue=1)
    gate = threading.Event()
    running = lane.run(gate.wait, 30)
    waiting = lane.run(int, "5")
    with pytest.raises(Refused):
        lane.run(int, "6")
    gate.set()
    assert await running
    assert await waiting == 5
    assert await lane.run(int, "7") == 7
    lane.close()


async def test_work_on_the_lane_goes_on_when_its_caller_is_cancelled() -> None:
    lane = PoolLane(asyncio.get_running_loop(), threads=1, queue=4)
    started, gate, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait(30)
        finished.set()

    async def wait() -> None:
        await asyncio.shield(lane.run(work))

    waiter = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert started.wait(30)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    gate.set()
    lane.close()
    assert finished.is_set()


@pytest.fixture
def systemd(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


@pytest.mark.parametrize("path", ["", "relative", "/no/such/socket"])
def test_without_systemd_nothing_happens(path: str) -> None:
    service = Systemd({"NOTIFY_SOCKET": path})
    service.ready("serving")
    service.close()


@pytest.mark.parametrize(
    ("usec", "pid", "expected_s"),
    [
        ("3000000", "ours", 3.0),
        ("3000000", "", 3.0),
        ("3000000", "1", None),
        ("0", "", None),
        ("", "", None),
        ("soon", "", None),
    ],
)
def test_the_watchdog_is_fed_only_if_it_watches_this_process(systemd, usec, pid, expected_s):
    environment = {
        "NOTIFY_SOCKET": systemd.getsockname(),
        "WATCHDOG_USEC": usec,
        "WATCHDOG_PID": str(os.getpid()) if pid == "ours" else pid,
        "PATH": "/bin",
    }
    service = Systemd(environment)
    assert service.watchdog_s == expected_s
    assert environment == {"PATH": "/bin"}, "children do not speak for us"
    service.close()


V1 = (
    "memory:/a/b",
    "sys/fs/cgroup/memory/a/b/memory.oom_control",
    "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
)
V2 = ":/a/b", "sys/fs/cgroup/a/b/memory.events", "low 0\noom 9\noom_kill 7\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("group", "path", "text", "count"),
    [
        (*V1, 7),
        (*V2, 7),
        ("cpu,memory:/", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 3\n", 3),
        ("memory:/of/the/host", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 2\n", 2),
        (":/", "sys/fs/cgroup/unified/memory.events", "oom_kill 1\n", 1),
        ("cpu:/a/b", *V1[1:], 0),
        (*V1[:2], "under_oom 0\n", 0),
        (*V1[:2], "oom_kill many\n", 0),
        ("memory:/a/b", "elsewhere", "oom_kill 7\n", 0),
    ],
)
def test_the_count_is_that_of_our_group(tmp_path: Path, group: str, path: str, text: str, count: int) -> None:
    for name, content in (("proc/self/cgroup", f"4:{group}\n"), (path, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert oom_kills(f"{tmp_path}/") == count


def test_without_control_groups_nothing_is_counted(tmp_path: Path) -> None:
    assert oom_kills(f"{tmp_path}/") == 0
