"""How a process of ours starts, waits for its end and ends.

1. Whatever is wrong with settings, ports or files stops the start with one line that says what to change.
2. SIGTERM and SIGINT stop in order; a second signal ends at once.  Signals within SAME_STOP_S of the first belong to
   it: who signals a whole process group reaches the keeper, which forwards it, and this process.
3. A background task that crashes ends the process with its reason and exit status 70; what is on disk and in
   shared memory is left as it is, exactly as after SIGKILL.  The keeper starts it again (process/keeper.py).
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
from typing import Any

import uvloop

from kvstrata import failpoints
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.process.supervisor import Supervisor

EXIT_CRASHED = 70
SAME_STOP_S = 0.2


def set_up() -> None:
    """Once in a process, before anything is opened: failpoints of the environment, and enough descriptors."""
    failpoints.arm(os.environ)
    _raise_file_limit()


def run(process: Process) -> int:
    """Run a process on a loop of its own; returns the exit status. Raises KvstrataError before it is ready."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run())


class Process(ABC):
    """A process that serves until it is told to stop."""

    def __init__(self, name: str) -> None:
        self.log = EventLog(name)
        self._name = name
        self._stopping_s = 0.0
        self.closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What closes what was opened; called last first."""

    @abstractmethod
    async def start(self) -> None:
        """Open everything and serve. Raises KvstrataError; what `closers` knows is closed then."""

    @abstractmethod
    async def drain(self) -> None:
        """A stop was asked for: finish what is under way, within bounds."""

    async def run(self) -> int:
        """Start, serve, stop. Raises KvstrataError when the start fails; what was opened is closed then."""
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
                os._exit(EXIT_CRASHED)
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
            os._exit(128 + number)
        self.log.info("stopping", signal=signal.Signals(number).name)
        self._stopping_s = self.loop.time()
        stop.set()

    async def _close(self) -> None:
        await self.supervisor.stop()
        while self.closers:
            await self.closers.pop()()


def soon(close: Callable[[], object]) -> Callable[[], Coroutine[Any, Any, None]]:
    """A plain function as a closer."""

    async def closer() -> None:
        close()

    return closer


def tell_ready(ready_fd: int, ready: Mapping[str, Any]) -> None:
    """One line of JSON to the descriptor of `--ready-fd`, unless that is negative. Raises ConfigError.

    A process that was started again after it was ready finds nobody who reads; that is no error.
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
    """Sockets, pidfds and files of many peers need more descriptors than the usual soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
