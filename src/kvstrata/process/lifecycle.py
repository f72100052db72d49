"""How our long-running processes start, serve and end.

1. A fault in settings, ports or files stops the start with one line that says what to change.
2. SIGTERM and SIGINT stop the process in order; a second signal ends it at once.  Signals within SAME_STOP_S of the
   first count as the same one, since a signal to a whole process group arrives twice: directly, and from the keeper,
   which forwards it.
3. A stop takes at most `drain_s` plus CLOSING_S.  After WAIT_SAID_S a log line says what it waits for, and the last
   line says what was given up.  If something cannot be closed in time, the process ends without closing the rest, which
   is left as after SIGKILL.
4. systemd is notified of readiness, reloads and the stop (`Systemd`), and the event loop feeds its watchdog.
5. SIGHUP reads settings and token files again (SIGHUP of a terminal that is gone stops the process).  One that comes
   before the process serves waits until it does.
6. A background task that crashes ends the process with the reason and exit status 70.  Disk and shared memory are left
   as they are, exactly as after SIGKILL.  The keeper starts the process again (process/keeper.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from typing import Any, NoReturn

import uvloop

from kvstrata import failpoints
from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.observability.logging import EventLog, flush_log
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.patience import patience
from kvstrata.process.keeper import NOT_RESTARTED, Restarts
from kvstrata.process.supervisor import Supervisor

EXIT_CRASHED = 70
SAME_STOP_S = 0.2
CLOSING_S = 5.0
"""Time limit for closing everything, after the time for finishing work."""
GUARD_S = 1.0
"""Time beyond the budget of a stop after which a thread ends the process, since the loop or a thread hangs."""
WAIT_SAID_S = 1.0
FEWEST_FILES = 128
"""Number of descriptors that a process needs before its first client connects."""
SOCKET, WATCHDOG, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
M_TRIM_THRESHOLD, TRIM_BYTES = -1, 1 << 20


def set_up() -> None:
    """Set the process up: failpoints, the limit of descriptors, memory; once, before anything is opened.

    Raises ConfigError.
    """
    failpoints.arm(os.environ)
    _raise_file_limit()
    _give_memory_back()


def _give_memory_back() -> None:
    """Make glibc return freed memory at the top of the heap if it is more than TRIM_BYTES.

    By default glibc raises this limit with the largest block that was ever freed, and a server keeps a burst's memory.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if set_option is not None:
        set_option(M_TRIM_THRESHOLD, TRIM_BYTES)


def run(process: Process) -> int:
    """Run a process on a loop of its own; returns the exit status. Raises KvstrataError if the start fails.

    From its stop on, the whole interpreter has a limited time to end.
    """
    process.guarded = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(process.run())
    finally:
        flush_log()


class Systemd:
    """Notifications to systemd, if it started this process: sd_notify(3), over the socket of NOTIFY_SOCKET.

    The variables are removed from `environment`, so that no child notifies in our name.  A message that cannot be sent
    is dropped: a fault of systemd is no reason to stop serving.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        path = environment.pop(SOCKET, "")
        watchdog, pid = environment.pop(WATCHDOG, ""), environment.pop(WATCHDOG_PID, "")
        # "@" stands for the zero byte that begins an abstract address.
        self._address = path.replace("@", "\0", 1) if path.startswith("@") else path
        self._socket: socket.socket | None = None
        if path.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self.watchdog_s: float | None = None
        """Time without a notification after which systemd ends this process; None: no watchdog."""
        if (
            self._socket is not None
            and pid in ("", str(os.getpid()))
            and watchdog.isascii()
            and watchdog.isdigit()
        ):
            self.watchdog_s = int(watchdog) / 1e6 or None

    def ready(self, status: str) -> None:
        """The start, or a reload, is complete. `status`: one line for `systemctl status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Settings are read again; `ready` follows."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def stopping(self, status: str, budget_s: float) -> None:
        """The process ends within `budget_s`, which may be longer than TimeoutStopSec of its unit."""
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(budget_s * 1e6)}", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._tell(f"STATUS={status}")

    def alive(self) -> None:
        """The event loop runs."""
        self._tell("WATCHDOG=1")

    def close(self) -> None:
        """Send nothing from now on. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)


class ProcessNumbers(Numbers):
    """The number of restarts of this process."""

    restarts = counter(
        "Restarts of this process by its keeper after it died.",
        read=lambda self: self._restarts.times,
    )

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts

    def document(self) -> dict[str, Any]:
        """The number, and why the process ended the last time."""
        return {**super().document(), "last_end": self._restarts.cause}


class Process(ABC):
    """A process that serves until it is told to stop."""

    def __init__(
        self,
        name: str,
        checked: Any = None,
        reread: Callable[[], Any] = lambda: None,
        ready_fd: int = -1,
        restarts: Restarts = NOT_RESTARTED,
    ) -> None:
        """`checked`: the plan of its settings. `reread` reads the settings again for SIGHUP."""
        self.log = EventLog(name)
        self._name = name
        self._plan = checked
        self._settings = getattr(checked, "settings", None)
        """The settings in force."""
        self._reread = reread
        self._ready_fd = ready_fd
        self._restarts = restarts
        self._started_s = time.monotonic()
        self._stopping_s = 0.0
        self._systemd = Systemd(os.environ)
        self.guarded = False
        """Whether a stop may end the interpreter."""
        self.closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Functions that each close one thing that was opened; called in reverse order at the end."""

    @abstractmethod
    async def start(self) -> None:
        """Open everything and serve. Raises KvstrataError; `closers` then close everything that was opened."""

    @abstractmethod
    async def drain(self, drain_s: float) -> None:
        """Finish the work under way within `drain_s`, because the process is told to stop."""

    @property
    @abstractmethod
    def drain_s(self) -> float:
        """Time for finishing work."""

    @abstractmethod
    def under_way(self) -> dict[str, object]:
        """The work that a stop waits for, for the log."""

    @abstractmethod
    def given_up(self) -> dict[str, object]:
        """The work that a stop has abandoned, for the log. Called after `drain`."""

    @abstractmethod
    async def reload(self) -> dict[str, object]:
        """Read settings and token files again and apply what can change now; returns what changed, for the log.

        Raises KvstrataError; then nothing has changed.
        """

    def standing(self) -> str:
        """One line for `systemctl status` while the process serves."""
        return "serving"

    def left_behind(self) -> tuple[str, dict[str, object]] | None:
        """The event and fields of the last line of the log, if this process leaves something behind.

        Called at the end of a stop, also of one that was cut short.
        """
        return None

    async def run(self) -> int:
        """Start, serve, stop. If the start fails, closes everything that was opened and raises KvstrataError."""
        self.loop = loop = asyncio.get_running_loop()
        self.supervisor = Supervisor(loop)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number, stop)
        self._had_terminal = _has_terminal()
        self._asked = asyncio.Event()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._asks, stop)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # keeper.py blocks it
        try:
            self._systemd.status("starting")
            await self.start()
            self._systemd.ready(self.standing())
            self.supervisor.spawn(self._reload_when_asked(), "reload")
            if self._systemd.watchdog_s is not None:
                self.supervisor.spawn(self._feed_watchdog(self._systemd.watchdog_s / 2), "watchdog")
            stopping = loop.create_task(stop.wait(), name="stop-signal")
            ends: set[asyncio.Future[Any]] = {stopping, self.supervisor.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if self.supervisor.failure.done():
                self.log.error(f"{self._name}_failed", reason=self.supervisor.failure.result())
                end_now(EXIT_CRASHED)
            given_up = await self._stop()
        except BaseException:
            await self._close()
            raise
        self.log.info("stopped", **given_up)
        self._tell_left()
        self._systemd.close()
        return 0

    async def _stop(self) -> dict[str, object]:
        """Drain and close within the budget; returns what was given up."""
        begun_s, drain_s = self.loop.time(), self.drain_s
        stopping = self.loop.create_task(self._drain_and_close(drain_s), name="stop")
        budget_s = drain_s + patience(CLOSING_S)
        self._systemd.stopping("stopping", budget_s + GUARD_S)
        if self.guarded:
            guard = threading.Timer(budget_s + GUARD_S, self._end_late)
            guard.daemon = True
            guard.start()
        await asyncio.wait({stopping}, timeout=WAIT_SAID_S)
        if not stopping.done():
            under_way = self.under_way()
            self.log.info("stop_waits", **under_way, budget_s=budget_s)
            waits = ", ".join(f"{count} {things}" for things, count in under_way.items())
            self._systemd.status(f"stopping, waiting for {waits}")
            await asyncio.wait({stopping}, timeout=begun_s + budget_s - self.loop.time())
        if not stopping.done():
            self.log.warning("stop_cut_short", budget_s=budget_s, **self.given_up())
            self._tell_left()
            end_now(0)
        return stopping.result()

    def _tell_left(self) -> None:
        if left := self.left_behind():
            self.log.info(left[0], **left[1])

    def _end_late(self) -> None:
        self.log.warning("stop_cut_short", note="a thread did not end")
        end_now(0)

    async def _drain_and_close(self, drain_s: float) -> dict[str, object]:
        await self.drain(drain_s)
        given_up = self.given_up()
        await self._close()
        return given_up

    def _signalled(self, number: signal.Signals, stop: asyncio.Event) -> None:
        if stop.is_set():
            if self.loop.time() < self._stopping_s + SAME_STOP_S:
                return
            self.log.warning("stopped_at_once", signal=signal.Signals(number).name)
            end_now(128 + number)
        self.log.info("stopping", signal=signal.Signals(number).name)
        self._stopping_s = self.loop.time()
        stop.set()

    def _asks(self, stop: asyncio.Event) -> None:
        if self._had_terminal and not _has_terminal():
            self._signalled(signal.SIGHUP, stop)
        else:
            self._asked.set()

    async def _reload_when_asked(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._systemd.reloading()
            try:
                self.log.info("reloaded", **await self.reload())
            except KvstrataError as error:
                self.log.error(
                    "reload_failed", reason=error.message, note="the previous settings stay in force"
                )
            self._systemd.ready(self.standing())

    async def _feed_watchdog(self, pause_s: float) -> None:
        while True:
            self._systemd.alive()
            await asyncio.sleep(pause_s)

    async def _close(self) -> None:
        await self.supervisor.stop()
        while self.closers:
            await self.closers.pop()()


def _has_terminal() -> bool:
    """Whether this process has a terminal that has not hung up."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def soon(close: Callable[[], object]) -> Callable[[], Coroutine[Any, Any, None]]:
    """A closer that calls a plain function."""

    async def closer() -> None:
        close()

    return closer


def end_now(status: int) -> NoReturn:
    """End the process without closing anything, once its last log lines are written, or have waited for FLUSH_S."""
    flush_log()
    os._exit(status)


def tell_ready(ready_fd: int, ready: Mapping[str, Any]) -> None:
    """Write one line of JSON to the descriptor of `--ready-fd`, unless that is negative. Raises ConfigError.

    A closed pipe is no error: a process that was restarted after it had been ready finds it closed.
    """
    if ready_fd < 0:
        return
    try:
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_fd, json.dumps(ready).encode() + b"\n")
        os.close(ready_fd)
    except OSError as error:
        raise ConfigError(
            f"--ready-fd: cannot write to descriptor {ready_fd}: {error.strerror}", field="ready_fd"
        ) from None


def _raise_file_limit() -> None:
    """Raise the soft limit of descriptors, which is too low for the sockets, pidfds and files of many clients.

    Raises ConfigError if the hard limit is too low for the process itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        raise ConfigError(
            f"open files: this process may have {hard} open at a time, and needs {FEWEST_FILES} without clients; raise "
            "the hard limit: ulimit -Hn 65536, or LimitNOFILE=65536 in the systemd unit",
            field="open files",
        )
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
