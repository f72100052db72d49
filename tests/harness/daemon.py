"""Servers as child processes that can be killed, frozen and started again, and free ports for them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.harness.forks import Command
from tests.harness.signals import send
from tests.tools.provision import Unavailable

PORT_ATTEMPTS = 5
FIRST_PORT, MOST_PROBES = 10_000, 1_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()


class DidNotStart(Unavailable):
    """The server ended or never answered; the message holds the end of its log."""


def free_port() -> int:
    """Return a free port of the loopback; see `free_ports`."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of `count` free ports of the loopback in a row, below the ephemeral ports.

    No outgoing connection gets such a port, so a server that was killed finds its port free again.  They belong to this
    process until it ends, so no other test binds them before the server does, nor another run of tests.
    """
    lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    end = max(lowest_ephemeral, 2 * FIRST_PORT) - count
    for _ in range(MOST_PROBES):
        first = random.SystemRandom().randrange(FIRST_PORT, end)
        if all(map(_claim, range(first, first + count))):
            return first
    raise Unavailable(f"no {count} ports in a row from {FIRST_PORT} to {end} are free on the loopback")


def _claim(port: int) -> bool:
    """Claim a port, which somebody else may have or listen at: False."""
    if port in _given:
        return False
    try:
        fcntl.lockf(_owned(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    _given.add(port)
    return True


@functools.cache
def _owned() -> int:
    """A file whose byte N is locked by the process that has port N."""
    return os.open(f"{tempfile.gettempdir()}/kvstrata-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)


class Spawned:
    """Sends signals to the process that was started last."""

    _process: subprocess.Popen[bytes] | Command | None = None

    @property
    def pid(self) -> int:
        """The process id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        send(self.pid, number)

    def freeze(self) -> None:
        """Send SIGSTOP; when this returns, no thread of the process runs."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still within the block, and never after it."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Daemon(Spawned, ABC):
    """A third party's server, which runs once this object is made, on `ports` that stay the same over restarts.

    When another process takes one of the ports before the first start, other ports are chosen.  The server's output is
    appended to `log`.
    """

    ready_s = 120.0
    """Longest wait for the first answer."""

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
        """The first port, to which clients connect."""
        return self.ports[0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @abstractmethod
    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """Return the command to run and its environment (None: this process's). Raises Unavailable."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether the server answers now."""

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str] | None, log: int
    ) -> subprocess.Popen[bytes] | Command:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )

    def start(self) -> None:
        """Start the server (again) and wait until it answers. Raises DidNotStart, and whatever `_command` raises."""
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

    def __exit__(self, *exception: object) -> None:
        self.kill()
