"""A server's keeper: it restarts the server, adopts or removes its pool, and bounds its memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.process.keeper import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, keep, pause_s
from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.controller_process import ControllerProcess
from tests.harness.daemon import free_port
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration


V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """The beginning of a command that runs in a new group with this limit. Skips where no group can be made."""
    mount, limit = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    group = mount / f"kvstrata-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        with contextlib.suppress(OSError):  # without swap
            (group / ("memory.memsw.limit_in_bytes" if mount is V1 else "memory.swap.max")).write_text(
                str(limit_bytes if mount is V1 else 0)
            )
        yield "/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    finally:
        group.rmdir()


CHILD = """
import os, signal, sys, time
from kvstrata.errors import Unavailable
from kvstrata.process.keeper import keep

def serve(arguments, restarts):
    told = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    print("serving", os.getpid(), restarts.times, restarts.cause or "none", flush=True)
    if arguments[0] == "crash" and restarts.times < 2:
        os._exit(int(arguments[1 + restarts.times]))
    if arguments[0] == "hoard":
        if restarts.times == 0:
            hoard = b"x" * int(arguments[2])
    if arguments[0] == "orphan":
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.05)
                os._exit(0)
            os._exit(0)
        os.wait()
    if arguments[0] == "exit":
        return int(arguments[1])
    while True:
        number = signal.sigwait(told)
        print("told", signal.Signals(number).name, flush=True)
        if number in (signal.SIGTERM, signal.SIGINT):
            return int(arguments[1])

sys.exit(keep("test", sys.argv[1:], serve))
"""


class Kept:
    """A keeper and the small process that it keeps, which says what happens to it."""

    def __init__(self, *arguments: str, under: tuple[str, ...] = (), ignored: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*under, sys.executable, "-c", CHILD, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
        )

    def line(self) -> list[str]:
        """Words of the next line that the child writes."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def serving(self) -> tuple[int, int, str]:
        """(Pid, restarts before it, their cause) of the child that begins to serve."""
        word, pid, count, *cause = self.line()
        assert word == "serving"
        self.serving_pid = int(pid)
        return int(pid), int(count), " ".join(cause)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def kept() -> Iterator[list[Kept]]:
    started: list[Kept] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def start(kept: list[Kept], *arguments: str, **more: object) -> Kept:
    kept.append(Kept(*arguments, **more))  # type: ignore[arg-type]
    return kept[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_killed_by_a_signal_is_started_again_and_told_the_cause(kept, number):
    keeper = start(kept, "serve", "0")
    first, _, _ = keeper.serving()
    send(first, number)
    second, count, cause = keeper.serving()
    assert second != first
    assert (count, cause) == (1, number.name)
    keeper.process.terminate()
    status, errors = keeper.end()
    assert status == 0
    [line] = errors.splitlines()
    assert f"ERROR kvstrata.keeper test process_ended pid={first} cause={number.name} restart=1" in line


def test_a_crash_exit_is_started_again_after_growing_pauses(kept):
    keeper = start(kept, "crash", "70", "70")
    assert [keeper.serving()[1:] for _ in range(3)] == [
        (0, "none"),
        (1, "exit status 70"),
        (2, "exit status 70"),
    ]
    keeper.process.terminate()
    _, errors = keeper.end()
    assert [line.rpartition("pause_s=")[2] for line in errors.splitlines()] == ["0.1", "0.2"]


def test_a_process_that_the_kernel_kills_for_lack_of_memory_is_told_so(kept):
    with memory_group(64 << 20) as under:
        keeper = start(kept, "hoard", "0", str(256 << 20), under=under)
        assert keeper.serving()[1:] == (0, "none")
        assert keeper.serving()[1:] == (1, "SIGKILL of the kernel's OOM killer")
        send(keeper.serving_pid, signal.SIGKILL)
        assert keeper.serving()[1:] == (2, "SIGKILL")
        keeper.process.terminate()
        _, errors = keeper.end()
    assert 'cause="SIGKILL of the kernel\'s OOM killer" restart=1' in errors


def test_a_port_that_is_still_taken_after_a_crash_does_not_end_the_keeper(kept):
    """A start that fails is final only the first time: settings that worked once can work again."""
    keeper = start(kept, "crash", "70", "75")
    assert [keeper.serving()[2] for _ in range(3)] == ["none", "exit status 70", "exit status 75"]


@pytest.mark.parametrize("status", [0, 2, 75])
def test_a_clean_end_and_wrong_settings_are_final(kept, status):
    keeper = start(kept, "exit", str(status))
    keeper.serving()
    assert keeper.end() == (status, "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 70), (signal.SIGINT, 0)])
def test_a_process_told_to_end_ends_with_its_own_status(kept, number, status):
    keeper = start(kept, "serve", str(status))
    keeper.serving()
    keeper.process.send_signal(number)
    assert keeper.line() == ["told", number.name]
    assert keeper.end() == (status, "")


def test_sighup_is_passed_to_the_child_and_other_signals_end_nothing(kept):
    keeper = start(kept, "serve", "0")
    pid, _, _ = keeper.serving()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        keeper.process.send_signal(number)
        send(pid, number)
    keeper.process.send_signal(signal.SIGHUP)
    assert keeper.line() == ["told", "SIGHUP"]
    keeper.process.terminate()
    assert keeper.end()[0] == 0


def test_a_stray_signal_about_a_pool_does_not_hang_the_keeper(kept):
    keeper = start(kept, "serve", "0")
    first, _, _ = keeper.serving()
    keeper.process.send_signal(signal.SIGRTMIN)
    keeper.process.send_signal(signal.SIGHUP)
    assert keeper.line() == ["told", "SIGHUP"], "it goes on forwarding"
    send(first, signal.SIGKILL)
    assert keeper.serving()[1] == 1
    keeper.process.terminate()
    keeper.end()


def test_an_ignored_hangup_stays_ignored(kept):
    keeper = start(kept, "serve", "0", ignored=(signal.SIGHUP,))
    first, _, _ = keeper.serving()
    keeper.process.send_signal(signal.SIGHUP)
    send(first, signal.SIGKILL)
    assert keeper.serving()[1] == 1
    keeper.process.terminate()
    assert keeper.line() == ["told", "SIGTERM"]
    keeper.end()


def test_a_keeper_that_is_killed_takes_its_process_with_it(kept):
    keeper = start(kept, "serve", "0")
    child, _, _ = keeper.serving()
    pidfd = os.pidfd_open(child)
    send(child, signal.SIGSTOP)
    keeper.process.kill()
    keeper.process.wait()
    eventually("the child is gone", lambda: gone(pidfd))
    os.close(pidfd)


def gone(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def test_as_process_one_it_reaps_orphans_and_ends_when_told(kept):
    keeper = start(kept, "orphan", "0", under=("unshare", "-Urpf", "--kill-child", "--mount-proc"))
    keeper.serving()
    [unshare_child] = (
        Path(f"/proc/{keeper.process.pid}/task/{keeper.process.pid}/children").read_text().split()
    )
    children = Path(f"/proc/{unshare_child}/task/{unshare_child}/children")
    eventually("the orphan is reaped", lambda: len(children.read_text().split()) == 1)
    send(int(unshare_child), signal.SIGTERM)
    assert keeper.line() == ["told", "SIGTERM"]
    assert keeper.end()[0] == 0


def test_pauses_double_up_to_a_limit_and_start_small_again_after_a_steady_time() -> None:
    pauses = [0.0]
    for _ in range(12):
        pauses.append(pause_s(pauses[-1], lived_s=1.0))
    assert pauses[1:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert pause_s(LONGEST_PAUSE_S, lived_s=STEADY_S) == FIRST_PAUSE_S


def resident_mb(pid: int) -> float:
    return next(
        int(line.split()[1]) / 1024
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )


def test_a_killed_server_serves_again_by_itself_and_its_keeper_stays_small(tmp_path: Path) -> None:
    flags = ("--http-port", str(free_port()))  # the same after the restart
    with ServerProcess(tmp_path, l1_mb=16, supervised=True, flags=flags).started() as server:
        assert server.pid != server.ready["pid"]
        assert resident_mb(server.pid) < 15
        send(server.ready["pid"], signal.SIGKILL)

        def status() -> dict:
            try:
                return server.get("/v1/status")
            except OSError:
                return {}

        eventually("it serves again", lambda: "process" in status())
        assert status()["process"] == {"restarts": 1, "last_end": "SIGKILL"}
        eventually(
            "the log tells the cause",
            lambda: "process_ended" in server.log_tail() and "cause=SIGKILL" in server.log_tail(),
        )
        assert server.stop() == 0
    assert not server.socket_dir.exists()


def test_a_killed_controller_serves_again_by_itself(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path, supervised=True) as controller:
        epoch = controller.ready["epoch"]
        send(controller.ready["pid"], signal.SIGKILL)

        def cluster() -> dict:
            try:
                return controller.ask("/v1/cluster")
            except OSError:
                return {"epoch": epoch}

        eventually("it serves again", lambda: cluster()["epoch"] != epoch)
        assert (cluster()["restarts"], cluster()["last_end"]) == (1, "SIGKILL")
        assert "kvstrata_controller_restarts_total 1.0" in controller.text("/metrics")
        assert controller.stop() == 0


def test_commands_that_only_print_are_not_started_again() -> None:
    """Its reader may close the pipe, as `head` does; then it would fail after each restart."""
    for argument in ("--check", "--help", "-h"):
        assert keep("lmcache-server", [argument], lambda _, restarts: os.getpid()) == os.getpid()


def last_line(server: ServerProcess) -> str:
    return server.log.read_text().splitlines()[-1]


def rows(server: ServerProcess) -> list[dict[str, Any]]:
    """The rows of `pool list` for this server's pools."""
    found = json.loads(own_commands.run("kvstrata", "ctl", "pool", "list", "--json").stdout)
    return [row for row in found if row["place"] == str(server.segment_dir)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, supervised=True) as made:
        yield made


def start_whole(server: ServerProcess) -> None:
    """Start the server and wait until the kernel has given it all of L1."""
    server.start()
    eventually("L1 is faulted in", lambda: server.get("/v1/status")["pool"]["prefaulted_bytes"] >= 64 << 20)


def test_the_last_line_of_a_stop_names_the_pool_that_stays_and_frees_it(server: ServerProcess) -> None:
    start_whole(server)
    assert server.stop() == 0
    line = last_line(server)
    [row] = rows(server)
    assert f"pool_kept place={server.segment_dir} bytes={row['memory_bytes']}" in line
    assert row["memory_bytes"] >= 64 << 20  # and what the kernel has given to the index so far
    assert row["owners"] == []
    freeing = line.partition('to_free="')[2].removesuffix('"')
    assert own_commands.run(*shlex.split(freeing)).returncode == 0
    assert not server.segment_dir.exists()
    assert server.start()["adopted"] is False


def test_where_no_file_can_be_had_the_keeper_keeps_the_pool_for_the_next_server(server):
    server._environment["KVSTRATA_L1_SEGMENT_DIR"] = "/dev/shm/no/such/place"
    start_whole(server)

    def started() -> list[tuple[str, str]]:
        """(pid, whether it adopted L1) of each server so far."""
        return re.findall(r" ready .*?pid=(\d+) .*adopted=(\w+)", server.log.read_text())

    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        assert engine.stored(prompt(2)) == ["stored"] * 2
        for count in (2, 3):
            epoch = engine.client.epoch
            send(int(started()[-1][0]), 9)
            eventually(
                "the engine is attached to the next server",
                functools.partial(lambda before: engine.client.epoch > before, epoch),
            )
            engine.connect()
            assert engine.hit(prompt(2)) == 2
            assert [adopted for _, adopted in started()] == ["False", *["True"] * (count - 1)]
        kept = [name for name in os.listdir(f"/proc/{server.pid}/fd") if is_memfd(server.pid, name)]
        assert len(kept) == 3, "descriptors of earlier servers are closed"
        assert server.stop() == 0
    assert last_line(server).endswith("pool_removed place=memfd engines=1")


def is_memfd(pid: int, fd: str) -> bool:
    return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:kvstrata")


def test_a_pool_to_be_forgotten_goes_at_a_clean_exit_only(tmp_path: Path) -> None:
    with ServerProcess(
        tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=("--forget-on-exit",), supervised=True
    ) as server:
        first = server.start()["pid"]
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            assert engine.stored(prompt(2)) == ["stored"] * 2
            send(first, 9)
            eventually("the next server answers", lambda: engine.client.epoch > server.ready["epoch"])
            engine.connect()
            assert engine.hit(prompt(2)) == 2
            assert server.stop() == 0
        assert last_line(server).endswith(f"pool_removed place={server.segment_dir} engines=1")
        assert not server.segment_dir.exists()


def test_only_a_pool_without_server_keeper_and_engine_is_freed(server: ServerProcess) -> None:
    def refused(owner: str) -> bool:
        done = own_commands.run("kvstrata", "ctl", "pool", "free", str(server.segment_dir))
        assert done.returncode == 1 and server.segment_dir.exists()
        return f"in use by {owner}" in done.stderr

    def owners() -> list[str]:
        return rows(server)[0]["owners"]

    serving = server.start()["pid"]
    assert refused(f"server {serving}")
    eventually("the keeper has locked the pool", lambda: f"keeper {server.pid}" in owners())
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        with server.frozen():
            send(serving, 9)  # the keeper cannot start the next server now
            eventually("the server is gone", lambda: "server" not in owners()[0])
            assert owners()[0] == f"keeper {server.pid}" and owners()[1].startswith("1 engine process (")
            assert refused(f"keeper {server.pid}")
        eventually("the next server answers", lambda: engine.client.epoch > server.ready["epoch"])
        assert server.stop() == 0
        assert owners()[0].startswith("1 engine process (")
        assert refused("1 engine process")
