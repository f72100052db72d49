"""One child process of an adapter host, as the server sees it: spawned, perhaps killed, reaped; and its channel.

    start() ─▶ spawned ─▶ (ended by itself, or kill()) ─▶ a zombie ─▶ reaped ─▶ `ended` is called on the loop

Invariants
1. Each child has a thread, which spawns the child and lives until the child was reaped, since the kernel sends the
   child its death signal (PR_SET_PDEATHSIG) when the spawning thread ends.  So the loop never waits for a fork.
2. `kill` never hits another process: the kernel reuses a process number only after the child was reaped, and killing
   and reaping take the same lock.
3. `ended` is called exactly once, after the child was reaped (its mappings are gone then) and its output was read.
4. The child's output to stdout and stderr costs the server a bounded amount of work and of log lines.
5. Sending to the child never blocks, and each frame that it sends is handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.config.load import without_settings
from kvstrata.config.secrets import scrubbed
from kvstrata.naming import name_thread
from kvstrata.process.keeper import oom_kills
from kvstrata.tiers.host.frames import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

_BOOT = "import sys; sys.path.append(sys.argv[1]); from kvstrata.tiers.host.child import main; main()"
LOG_BYTES = 16 << 10
"""Bytes of the child's output that are read at a time, and its longest line."""
LAST_LINES = 3
"""Lines that an error quotes."""
LINES_PER_WINDOW = 200
WINDOW_S = 10.0
QUEUE_BYTES = 1 << 20
"""Bytes that may wait to be sent before `is_full`."""
FRAMES_AT_A_TIME = 16
"""Frames of one child that are read before the loop turns to other work."""
LAST_FRAMES = 10_000
"""Most frames that `read_last` reads; a socket buffers fewer."""
LEVEL_MARK = "\x1e"
"""A line of the child's logging is LEVEL_MARK, the level's number, LEVEL_MARK, text; other lines are plain output."""


class HostProcess:
    """See the module. Belongs to the event loop.

    The child inherits `channel_fd`, which this object closes once the child has it, and `pool_fds`, which the caller
    keeps open until `ended`.  `ended(how)` gets a text for operators: `exit status 3`, `signal SIGKILL`.

    Raises OSError.
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
        self._output, self._output_writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        self._part = b""
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._window_s = 0.0
        self._lines = 0
        self._left_out = 0

    def start(self) -> None:
        """Spawn the child, in the thread that will wait for its end."""
        self._loop.add_reader(self._output, self._read_output)
        threading.Thread(target=self._live, name=f"host-{self._name}", daemon=True).start()

    def last_lines(self) -> str:
        """What the child printed last, without anything that may be a credential; for an error of its SDK."""
        while self._output >= 0 and self._read_output():
            pass
        return scrubbed(" | ".join(self._last))

    def kill(self) -> None:
        """Send SIGKILL to the child and its process group, now or once it is spawned. Idempotent; does not wait."""
        with self._lock:
            self._doomed = True
            if self.pid:
                self._kill()

    def _kill(self) -> None:
        for number in (self.pid, -self.pid):  # the group exists only once the child has made its own session
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def _live(self) -> None:
        name_thread()
        try:
            how = self._spawn_and_wait()
        finally:
            self._close_channel()
            os.close(self._output_writer)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for it
            self._loop.call_soon_threadsafe(self._tell, how)

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
                stdout=self._output_writer,
                stderr=self._output_writer,
                pass_fds=(self._channel_fd, *self._pool_fds),
                env=without_settings(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            return f"{sys.executable} cannot be started: {error.strerror}"
        self._close_channel()  # only the child has this descriptor now, so the child's end closes the channel
        with self._lock:
            self.pid = process.pid
            if self._doomed:
                self._kill()
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here: the kernel has reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._kill()  # also kills processes that the child left in its group
            self.pid = 0
            status = process.wait()
        if status == -signal.SIGKILL and oom_kills() > killed:
            return (
                "signal SIGKILL of the kernel's OOM killer; give this control group more memory, or L1 less"
            )
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"

    def _close_channel(self) -> None:
        if self._channel_fd >= 0:
            os.close(self._channel_fd)
            self._channel_fd = -1

    def _tell(self, how: str) -> None:
        self._loop.remove_reader(self._output)
        while self._read_output():
            pass
        if self._part:
            self._log_line(self._part)
        self._tell_left_out()
        os.close(self._output)
        self._output = -1
        self._ended(how)

    def _read_output(self) -> bool:
        """Log a piece of the output; returns whether there was any."""
        try:
            data = os.read(self._output, LOG_BYTES)
        except BlockingIOError:
            return False
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            self._log_line(line)
        if len(self._part) > LOG_BYTES:
            self._log_line(self._part)
            self._part = b""
        return bool(data)

    def _log_line(self, line: bytes) -> None:
        level, text = _level_of(line[:LOG_BYTES].decode(errors="replace"))
        text = _printable(text)
        self._last.append(text)
        now_s = self._loop.time()
        if now_s >= self._window_s + WINDOW_S:
            self._tell_left_out()
            self._window_s, self._lines = now_s, 0
        if self._lines >= LINES_PER_WINDOW:
            self._left_out += 1
            return
        self._lines += 1
        log.log(level, "%s: host: %s", self._name, text)

    def _tell_left_out(self) -> None:
        if self._left_out:
            log.warning("%s: host: %d lines of its output were not logged", self._name, self._left_out)
            self._left_out = 0


def _level_of(text: str) -> tuple[int, str]:
    if text.startswith(LEVEL_MARK):
        number, mark, rest = text[1:].partition(LEVEL_MARK)
        if mark and number in ("10", "20", "30", "40", "50"):
            return int(number), rest
    return logging.INFO, text


def _printable(text: str) -> str:
    return "".join(
        character if character.isprintable() or character == "\t" else "?" for character in text.rstrip("\r")
    )


class Pipe:
    """The pipe to one child. Belongs to the event loop."""

    def __init__(self, sock: socket.socket, take: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        """`take(frame)` gets each frame; `ended()` is called when no more frames can come. Either may close the pipe.

        The pipe owns `sock`, and closes it in `close`.
        """
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = sock
        self._take = take
        self._ended = ended
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._writes_later = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self.read)

    @property
    def is_full(self) -> bool:
        """Whether more than QUEUE_BYTES wait to be sent, because the child does not read."""
        return self._queued_bytes > QUEUE_BYTES

    def close(self) -> None:
        """Read and send nothing more. Idempotent."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None

    def send(self, frame: bytes) -> None:
        """Send a frame now, or once the socket has room; frames keep their order. `close` discards unsent frames."""
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if len(self._queue) == 1:
            self._write()

    def _write(self) -> None:
        if self._socket is None:
            return
        try:
            while self._queue:
                self._socket.send(self._queue[0])
                self._queued_bytes -= len(self._queue.popleft())
        except BlockingIOError:
            self._writes_later = True
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self.read_last()
            return
        if self._writes_later:
            self._writes_later = False
            self._loop.remove_writer(self._socket)

    def read(self) -> None:
        """Read some frames; the loop calls again while there are more."""
        for _ in range(FRAMES_AT_A_TIME):
            if not self._read_one():
                return

    def read_last(self) -> None:
        """Read the frames that the child sent before it closed the channel."""
        for _ in range(LAST_FRAMES):
            if not self._read_one():
                break
        if self._socket is not None:
            self._ended()

    def _read_one(self) -> bool:
        if self._socket is None:
            return False
        try:
            frame = self._socket.recv(MAX_FRAME_BYTES + 1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # Raised once if the child ended without reading all requests; the frames that it sent can still be read.
            return True
        except OSError:
            frame = b""
        if not frame:
            self._ended()
            return False
        self._take(frame)
        return self._socket is not None
