"""Writes log lines to a descriptor on a thread of its own, so that nobody who logs waits for the reader of the log.

    emit (any thread) ─▶ waiting lines, at most MAX_BYTES ─▶ thread ─▶ descriptor

1. Lines keep their order.
2. A line for which there is no room is dropped and counted, and so is a line that cannot be written because the reader
   has closed its end or the disk is full.  The next line that is written is preceded by the number of dropped ones.
3. `flush_within` waits for the reader for a bounded time only.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvstrata.naming import name_thread
from kvstrata.text import one_line

FLUSH_S = 1.0
"""Longest wait for the reader of the log, at the end of a process."""
MAX_BYTES = 4 << 20
"""Most bytes of lines that wait for the reader of the log."""


class _Waiting(NamedTuple):
    dropped_before: int
    line: bytes


class LogWriter(logging.Handler):
    """A handler for `logging`, see the module. The descriptor `fd` must stay open for as long as the process runs.

    Its thread is a daemon, since it may wait for the reader for ever.
    """

    def __init__(
        self, fd: int, max_bytes: int = MAX_BYTES, written: Callable[[], None] | None = None
    ) -> None:
        """The thread calls `written` after each line. If it is given, for tests, `emit` waits for the thread."""
        super().__init__()
        self._fd = fd
        self._written = written
        self._max_bytes = max_bytes
        # Reentrant, as a Condition's lock is by default: a finalizer that runs under the lock may log, too.
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._untold = 0
        """Lines that were dropped after the last waiting line."""
        self._dropped = 0
        self._writing = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, or drop it. Returns at once."""
        try:
            text = self.format(record)
        except Exception as error:  # the plugin boundary: an adapter that logs with wrong arguments goes on
            text = one_line(f"{record.name}: log line cannot be formatted: {error!r}: {record.msg!r}")
        line = f"{text}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(line) > self._max_bytes:
                self._untold += 1
                self._dropped += 1
                return
            self._waiting.append(_Waiting(self._untold, line))
            self._waiting_bytes += len(line)
            self._untold = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="kv-log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if self._written is not None:
            self.flush_within(FLUSH_S)

    def stats(self) -> dict[str, int]:
        """Numbers for status and metrics."""
        return {"dropped_lines": self._dropped, "waiting_bytes": self._waiting_bytes}

    def flush_within(self, wait_s: float) -> bool:
        """Wait for up to `wait_s` until every line is written or dropped. Returns whether that is so."""
        ends_s = time.monotonic() + wait_s
        with self._changed:
            while self._waiting or self._untold or self._writing:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def _write_all(self) -> None:
        """Body of the thread."""
        name_thread()
        untold = 0
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._waiting and not self._untold:
                    self._changed.wait()
                self._writing = True
                if self._waiting:
                    dropped_before, line = self._waiting.popleft()
                    self._waiting_bytes -= len(line)
                else:
                    dropped_before, line, self._untold = self._untold, b"", 0
            untold += dropped_before
            try:
                self._write(self._notice(untold) + line if untold else line)
                untold = 0
                if self._written is not None:
                    self._written()
            except OSError:
                if line:
                    untold += 1
                    with self._changed:
                        self._dropped += 1

    def _notice(self, dropped: int) -> bytes:
        fields = {"name": "kvstrata.log", "levelno": logging.WARNING, "levelname": "WARNING"}
        record = logging.makeLogRecord({**fields, "msg": f"{dropped} log lines were dropped"})
        return f"{self.format(record)}\n".encode()

    def _write(self, data: bytes) -> None:
        """Write all of it, however long the reader takes. Raises OSError."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except (
                BlockingIOError
            ):  # another process has made the descriptor non-blocking for all who share it
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
