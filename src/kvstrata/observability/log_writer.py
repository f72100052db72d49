"""Writes log lines to a descriptor on a thread of its own, so that nobody who logs waits for the reader of the log.

1. Lines keep their order.
2. A line is dropped and counted if MAX_LINES wait already, or if it cannot be written because the reader has closed its
   end or the disk is full.  The next line that is written is preceded by the number of dropped ones.
3. `flush_within` waits for the reader for a bounded time only.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler

from kvstrata.naming import name_thread
from kvstrata.text import one_line

FLUSH_S = 1.0
"""Longest wait for the reader of the log, at the end of a process."""
MAX_LINES = 4_096
"""Maximum number of lines that wait for the reader of the log."""


class LogWriter(QueueHandler):
    """A handler for `logging`, see the module. The descriptor `fd` must stay open for as long as the process runs.

    Its thread is a daemon, since it may wait for the reader for ever.
    """

    def __init__(
        self, fd: int, max_lines: int = MAX_LINES, written: Callable[[], None] | None = None
    ) -> None:
        """The thread calls `written` after each line. If it is given, for tests, `emit` waits for the thread."""
        # A SimpleQueue: a finalizer that runs while a line is queued may log, too.
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        super().__init__(self._lines)
        self._fd = fd
        self._max_lines = max_lines
        self._written = written
        self._thread: threading.Thread | None = None
        self.dropped_lines = 0

    def prepare(self, record: logging.LogRecord) -> bytes:
        """The line of a record."""
        try:
            text = self.format(record)
        except Exception as error:  # the plugin boundary: an adapter that logs with wrong arguments goes on
            text = one_line(f"{record.name}: log line cannot be formatted: {error!r}: {record.msg!r}")
        return f"{text}\n".encode(errors="backslashreplace")

    def enqueue(self, line: bytes) -> None:  # type: ignore[override]
        """Queue a line, or drop it. Returns at once."""
        if self._lines.qsize() >= self._max_lines:
            self.dropped_lines += 1
            return
        self._lines.put(line)
        if self._thread is None:  # the caller holds the handler's lock
            self._thread = threading.Thread(target=self._write_all, name="kv-log", daemon=True)
            self._thread.start()
        if self._written is not None:
            self.flush_within(FLUSH_S)

    def flush_within(self, wait_s: float) -> bool:
        """Wait for up to `wait_s` until every line is written or dropped. Returns whether that is so."""
        if self._thread is None:
            return True
        ended = threading.Event()
        self._lines.put(ended)
        return ended.wait(wait_s)

    def _write_all(self) -> None:
        """Body of the thread."""
        name_thread()
        said = 0
        while True:
            item = self._lines.get()
            dropped = self.dropped_lines
            line = item if isinstance(item, bytes) else b""
            try:
                if dropped != said:
                    self._write(self._notice(dropped - said))
                    said = dropped
                self._write(line)
            except OSError:
                self.dropped_lines += bool(line)
            if isinstance(item, threading.Event):
                item.set()
            elif self._written is not None:
                self._written()

    def _notice(self, dropped: int) -> bytes:
        fields = {"name": "kvstrata.log", "levelno": logging.WARNING, "levelname": "WARNING"}
        record = logging.makeLogRecord({**fields, "msg": f"{dropped} log lines were dropped"})
        return f"{self.format(record)}\n".encode()

    def _write(self, data: bytes) -> None:
        """Write all of it, however long the reader takes. Raises OSError."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process made the descriptor non-blocking for all who share it
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
