"""A server as a child process that is killed, stopped by a signal and started again, and ports for it."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tests.harness.signals import send

if TYPE_CHECKING:
    from tests.harness.vllm_fork import Forked

PORT_ATTEMPTS = 5
FIRST_PORT, MOST_PROBES = 10_000, 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Unavailable(Exception):
    """A server cannot be had here; the message says why and, where it is missing, which line installs it."""


class DidNotStart(Unavailable):
    """It ended, or never answered; the message holds the end of its log."""


def free_port() -> int:
    """A port of the loopback that nobody has now and that no outgoing connection gets: a server that was killed finds
    it free again.
    """
    lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    candidates = range(FIRST_PORT, lowest_ephemeral)
    for port in random.SystemRandom().sample(candidates, k=min(MOST_PROBES, len(candidates))):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable(f"no port from {FIRST_PORT} to {lowest_ephemeral} is free on the loopback")


def free_ports(count: int) -> int:
    """The first of so many such ports in a row."""
    for _ in range(MOST_PROBES):
        first = free_port()
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return first
    raise Unavailable(f"no {count} ports in a row are free on the loopback")


class Spawned:
    """Signals for the process that was started last."""

    _process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def pid(self) -> int:
        """Of the process started last."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send it a signal."""
        send(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP; it runs no more when this returns."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Idempotent."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Daemon(Spawned, ABC):
    """A server of somebody else, running once it is made, on `ports` that stay the same over restarts.

    Made on ports that somebody takes meanwhile, it takes others.  Its output is appended to `log`.
    """

    ready_s = 30.0
    """Longest wait for its first answer."""

    def __init__(self, log: Path, port_count: int) -> None:
        self.log = log
        for attempt in range(PORT_ATTEMPTS):
            self.ports = [free_port() for _ in range(port_count)]
            try:
                self.start()
                return
            except DidNotStart:
                if attempt == PORT_ATTEMPTS - 1:
                    raise

    @property
    def port(self) -> int:
        """The first one, which clients connect to."""
        return self.ports[0]

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    @abstractmethod
    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """What to run, and its environment (None: this process's own). Raises Unavailable."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it can be used."""

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str] | None, log: int
    ) -> subprocess.Popen[bytes] | Forked:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )

    def start(self) -> None:
        """Start it (again) and wait until it answers. Raises DidNotStart, and whatever `_command` raises."""
        command, environment = self._command()
        with open(self.log, "ab") as log:
            self._process = self._run(command, environment, log.fileno())
        deadline_s = time.monotonic() + self.ready_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise DidNotStart(
                    f"{command[0]} did not start:\n{self.log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
