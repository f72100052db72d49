"""One child process of an adapter host, as the server sees it.

    start() ─▶ spawned ─▶ (ended by itself, or kill()) ─▶ a zombie ─▶ reaped ─▶ `ended` is called on the loop

Invariants
1. Each child has a thread, which spawns the child, logs its output and lives until the child was reaped, since the
   kernel sends the child its death signal (PR_SET_PDEATHSIG) when the spawning thread ends.  So the loop never waits
   for a fork.
2. `kill` never hits another process: the kernel reuses a process number only after the child was reaped, and killing
   and reaping take the same lock.
3. `ended` is called exactly once, after the child was reaped (its mappings are gone then) and its output was read.
4. The child's output to stdout and stderr costs the server a bounded number of log lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.config.load import without_settings
from kvstrata.config.secrets import scrubbed
from kvstrata.naming import name_thread
from kvstrata.process.keeper import cause_of, oom_kills

log = logging.getLogger(__name__)

_BOOT = "import sys; sys.path.append(sys.argv[1]); from kvstrata.tiers.host.child import main; main()"
LOG_BYTES = 16 << 10
"""Maximum number of bytes of the child's output that are read at a time, and maximum length of a line."""
LAST_LINES = 3
"""Number of lines that an error quotes."""
LAST_READS = 64
"""Maximum number of reads of the output of a child that has ended."""
LINES_PER_WINDOW = 200
WINDOW_S = 10.0
LEVEL_MARK = "\x1e"
"""A line of the child's logging is LEVEL_MARK, the level's number, LEVEL_MARK, text; other lines are plain output."""


class HostProcess:
    """One child process of an adapter host.

    The child inherits `channel_fd`, which this object closes once the child has it, and `pool_fds`, which the caller
    keeps open until `ended`.  `ended(how)` gets a text for operators: `exit status 3`, `SIGKILL`.
    """

    def __init__(
        self, name: str, channel_fd: int, pool_fds: Sequence[int], ended: Callable[[str], None]
    ) -> None:
        self.pid = 0
        """0 before the child is spawned and after it was reaped."""
        self._name = name
        self._channel_fd = channel_fd
        self._pool_fds = pool_fds
        self._ended = ended
        self._lock = threading.Lock()
        self._doomed = False
        self._loop = asyncio.get_running_loop()
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._window_s = 0.0
        self._lines = 0
        """Number of the child's lines in this window."""

    def start(self) -> None:
        """Spawn the child, in the thread that will wait for its end."""
        threading.Thread(target=self._live, name=f"host-{self._name}", daemon=True).start()

    def last_lines(self) -> str:
        """The child's last lines, without anything that may be a credential; for an error of its SDK."""
        return scrubbed(" | ".join(self._last))

    def kill(self) -> None:
        """Send SIGKILL to the child and its process group, now or once it is spawned. Idempotent; does not wait."""
        with self._lock:
            self._doomed = True
            self._kill()

    def _kill(self) -> None:
        if self.pid:
            for number in (
                self.pid,
                -self.pid,
            ):  # the group exists only once the child has made its own session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def _live(self) -> None:
        name_thread()
        how = self._spawn_and_wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiter
            self._loop.call_soon_threadsafe(self._ended, how)

    def _spawn_and_wait(self) -> str:
        root = Path(__file__).resolve().parents[2]
        command = [
            *(sys.executable, "-P", "-c", _BOOT, str(root), str(os.getpid())),
            *map(str, (self._channel_fd, *self._pool_fds)),
        ]
        killed = oom_kills()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self._channel_fd, *self._pool_fds),
                env=without_settings(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            return f"{sys.executable} cannot be started: {error.strerror}"
        finally:
            os.close(
                self._channel_fd
            )  # only the child has this descriptor now, so its end closes the channel
        with self._lock:
            self.pid = process.pid
            if self._doomed:
                self._kill()
        assert process.stdout is not None
        with process.stdout as output:
            self._log_until_end(process.pid, output.fileno())
        with self._lock:
            self.pid = 0
            status = process.wait()
        how = cause_of(status << 8 if status >= 0 else -status)
        if how == "SIGKILL" and oom_kills() > killed:
            return "SIGKILL of the kernel's OOM killer; give this control group more memory, or L1 less"
        return how

    def _log_until_end(self, pid: int, output: int) -> None:
        """Log what the child prints until it is a zombie, and kill the processes that it left in its group."""
        os.set_blocking(output, False)
        pidfd, poll = os.pidfd_open(pid), select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(output, select.POLLIN)
        part, is_over = b"", False
        while not is_over:
            is_over = pidfd in [fd for fd, _ in poll.poll()]
            if is_over:
                with self._lock:
                    self._kill()
            for _ in range(LAST_READS if is_over else 1):
                try:
                    data = os.read(output, LOG_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    with contextlib.suppress(KeyError):
                        poll.unregister(output)
                    break
                *lines, part = (part + data).split(b"\n")
                for line in lines:
                    self._log_line(line)
                if len(part) > LOG_BYTES:
                    self._log_line(part)
                    part = b""
        os.close(pidfd)
        if part:
            self._log_line(part)
        self._log_left_out()

    def _log_line(self, line: bytes) -> None:
        level, text = _level_of(line[:LOG_BYTES].decode(errors="replace").rstrip("\r"))
        self._last.append(text)
        now_s = time.monotonic()
        if now_s >= self._window_s + WINDOW_S:
            self._log_left_out()
            self._window_s, self._lines = now_s, 0
        self._lines += 1
        if self._lines <= LINES_PER_WINDOW:
            log.log(level, "%s: host: %s", self._name, text)

    def _log_left_out(self) -> None:
        if (left_out := self._lines - LINES_PER_WINDOW) > 0:
            log.warning("%s: host: %d lines of its output were not logged", self._name, left_out)


def _level_of(text: str) -> tuple[int, str]:
    if text.startswith(LEVEL_MARK):
        number, mark, rest = text[1:].partition(LEVEL_MARK)
        if mark and number in ("10", "20", "30", "40", "50"):
            return int(number), rest
    return logging.INFO, text
