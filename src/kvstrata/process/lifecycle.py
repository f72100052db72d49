"""How our long-running processes start, serve and end.

1. A fault in settings, ports or files stops the start with one line that says what to change.
2. SIGTERM and SIGINT stop the process in order; a second signal ends it at once.  Signals within SAME_STOP_S of the
   first count as the same one, since a signal to a whole process group arrives twice: directly, and from the keeper,
   which forwards it.
3. A background task that crashes ends the process with the reason and exit status 70.  Disk and shared memory are left
   as they are, exactly as after SIGKILL.  The keeper starts the process again (process/keeper.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

import uvloop

from kvstrata import failpoints
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog, flush_log
from kvstrata.process.supervisor import Supervisor

EXIT_CRASHED = 70
SAME_STOP_S = 0.2


def set_up() -> None:
    """Arm the environment's failpoints and raise the limit of descriptors; once, before anything is opened."""
    failpoints.arm(os.environ)
    _raise_file_limit()


def run(process: Process) -> int:
    """Run a process on a loop of its own; returns the exit status. Raises KvstrataError if the start fails."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(process.run())
    finally:
        flush_log()


class Process(ABC):
    """A process that serves until it is told to stop."""

    def __init__(self, name: str) -> None:
        self.log = EventLog(name)
        self._name = name
        self._stopping_s = 0.0
        self.closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Functions that each close one thing that was opened; called in reverse order at the end."""

    @abstractmethod
    async def start(self) -> None:
        """Open everything and serve. Raises KvstrataError; `closers` then close everything that was opened."""

    @abstractmethod
    async def drain(self) -> None:
        """Finish the work under way, within bounds, because the process is told to stop."""

    async def run(self) -> int:
        """Start, serve, stop. If the start fails, closes everything that was opened and raises KvstrataError."""
        self.loop = loop = asyncio.get_running_loop()
        self.supervisor = Supervisor(loop)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number, stop)
        try:
            await self.start()
            stopping = loop.create_task(stop.wait(), name="stop-signal")
            ends: set[asyncio.Future[Any]] = {stopping, self.supervisor.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if self.supervisor.failure.done():
                self.log.error(f"{self._name}_failed", reason=self.supervisor.failure.result())
                end_now(EXIT_CRASHED)
            await self.drain()
        finally:
            await self._close()
        self.log.info("stopped")
        return 0

    def _signalled(self, number: signal.Signals, stop: asyncio.Event) -> None:
        if stop.is_set():
            if self.loop.time() < self._stopping_s + SAME_STOP_S:
                return
            self.log.warning("stopped_at_once", signal=signal.Signals(number).name)
            end_now(128 + number)
        self.log.info("stopping", signal=signal.Signals(number).name)
        self._stopping_s = self.loop.time()
        stop.set()

    async def _close(self) -> None:
        await self.supervisor.stop()
        while self.closers:
            await self.closers.pop()()


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
    """Raise the soft limit of descriptors, which is too low for the sockets, pidfds and files of many clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
