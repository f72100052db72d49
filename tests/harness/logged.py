"""A process whose log a test can wait for, without looking at it again and again (kvstrata/observability/wakes.py)."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import select
import shutil
import socket
import tempfile
import time
import weakref
from functools import cache
from pathlib import Path

from kvstrata.observability.wakes import VARIABLE
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


class Logged(Spawned):
    """Has `expect`. A subclass starts its process with `wakes()` in the environment."""

    log: Path
    stderr: int | None = None
    """A descriptor that gets the log instead of the file `log`."""
    _wakes: socket.socket | None = None

    def wakes(self) -> dict[str, str]:
        """The variable by which the process wakes `expect`; none if its log is read by somebody else."""
        if self.stderr is not None:
            return {}
        if self._wakes is None:
            self._wakes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._wakes.setblocking(False)
            self._wakes.bind(str(_folder() / str(next(_numbers))))
            weakref.finalize(self, self._wakes.close)
        return {VARIABLE: self._wakes.getsockname()}

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
