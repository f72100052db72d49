"""Our own commands as child processes; a test waits for lines of their logs without looking at them again and again.

(`kvstrata/observability/logging.py`)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvstrata.observability.logging import TEST_EVENTS
from tests.harness import own_commands
from tests.harness.daemon import Spawned
from tests.harness.waiting import HANG_S

LOOK_S = 1.0
"""Time between two looks at whether the process still runs."""
_numbers = itertools.count()


@cache
def _folder() -> Path:
    """The folder of this process's sockets, whose paths must be short."""
    made = tempfile.mkdtemp(prefix="kvstrata-wakes-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


READY_S = 120.0


class ServerFailed(Exception):
    """The process did not become ready; the message holds the end of its log."""


class OwnProcess(Spawned):
    """A process that `launch` starts, any number of times; `expect` waits for a line of its log."""

    log: Path
    ready: Mapping[str, Any] = {}
    """The process's ready line; empty before its first start."""
    within: tuple[str, ...] = ()
    """A command that starts it, as one with a mount of its own."""
    stderr: int | None = None
    """A descriptor that gets the log instead of the file `log`."""
    _wakes: socket.socket | None = None

    def launch(
        self, name: str, flags: Sequence[str], environment: Mapping[str, str], **how: Any
    ) -> Mapping[str, Any]:
        """Start the command of this name, wait until it is ready, and return its ready line. Raises ServerFailed."""
        assert self._process is None or self._process.poll() is not None
        self._process, reader = own_commands.start(
            f"kvstrata.cli.{name}",
            flags,
            log=self.log,
            stderr=self.stderr,
            environment={**environment, **self.wakes()},
            within=self.within,
            **how,
        )
        try:
            line = b""
            deadline_s = time.monotonic() + READY_S
            while not line.endswith(b"\n"):
                if not select.select([reader], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                    raise ServerFailed(f"not ready within {READY_S:.0f} s\n{self.log_tail()}")
                part = os.read(reader, 65_536)
                if not part:
                    raise ServerFailed(f"exit status {self._process.wait()}\n{self.log_tail()}")
                line += part
        finally:
            os.close(reader)
        self.ready = json.loads(line)
        return self.ready

    def stop(self) -> int:
        """Send SIGTERM and wait for the end; return the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def wakes(self) -> dict[str, str]:
        """The variable by which the process wakes `expect`; none if its log is read by somebody else."""
        if self.stderr is not None:
            return {}
        if self._wakes is None:
            self._wakes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._wakes.setblocking(False)
            self._wakes.bind(str(_folder() / str(next(_numbers))))
            weakref.finalize(self, self._wakes.close)
        return {TEST_EVENTS: self._wakes.getsockname()}

    def expect(self, event: str, *parts: str, count: int = 1) -> str:
        """Wait until `count` lines of the log, over all starts, have the word `event` and all `parts`; return the last.

        Raises AssertionError with the end of the log after HANG_S, or when the process has ended without the line.
        """
        assert self._wakes is not None and self._process is not None
        ends_s = time.monotonic() + HANG_S
        while True:
            ended = self._process.poll() is not None
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._wakes.recv(1)
            text = self.log.read_text(errors="replace")
            lines = [
                line
                for line in text.splitlines()
                if event in line.split() and all(part in line for part in parts)
            ]
            if len(lines) >= count:
                return lines[-1]
            if ended or time.monotonic() > ends_s:
                why = "it has ended" if ended else f"not within {HANG_S:.0f} s"
                raise AssertionError(
                    f"{len(lines)} of {count} lines with {event} {parts}: {why}\n{text[-4000:]}"
                )
            select.select([self._wakes], [], [], LOOK_S)
