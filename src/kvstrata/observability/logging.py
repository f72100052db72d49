"""One line per event on stderr: time, level, component, event and its fields as name=value, or one JSON object.

A separate thread writes the lines, so that no caller waits for the reader of the log:

1. Lines keep their order.
2. A line is dropped and counted if MAX_LINES wait already, or if it cannot be written because the reader has closed its
   end or the disk is full.  The next line that is written is preceded by the number of dropped ones.
3. `flush_within` waits for the reader for a bounded time only.

Repeated events are thinned: in each `WINDOW_S` the first event of a kind is written and later ones are counted; the
next line of that kind has the number of those left out.  Callers log names, sizes and reasons, never secrets; if
another library's error quotes a credential, that is left out too (text.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from logging.handlers import QueueHandler
from typing import Any

from kvstrata.failpoints import is_testing
from kvstrata.naming import name_thread
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.patience import patience
from kvstrata.text import one_line, printable

WINDOW_S = 10.0
MAX_KINDS = 1024
MAX_VALUE_CHARS = 300
MAX_MESSAGE_CHARS = 4_000
FLUSH_S = 1.0
"""Maximum wait for the reader of the log at the end of a process."""
MAX_LINES = 4_096
"""Maximum number of lines that wait for the reader of the log."""
TEST_EVENTS = "KVSTRATA_TEST_EVENTS"
"""A test's datagram socket, which gets an empty message after each line that was written."""

STDERR = 2


class LogWriter(QueueHandler):
    """Writes lines to a descriptor, see the module. The descriptor `fd` must stay open for as long as the process runs.

    Its thread is a daemon, since it may wait for the reader forever.
    """

    def __init__(self, fd: int, written: Callable[[], None] | None = None) -> None:
        """The thread calls `written` after each line. If it is given, for tests, `emit` waits for the thread."""
        # A SimpleQueue: a finalizer that runs while a line is queued may log, too.
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        super().__init__(self._lines)
        self._fd = fd
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
        if self._lines.qsize() >= MAX_LINES:
            self.dropped_lines += 1
            return
        self._lines.put(line)
        if self._thread is None:  # the caller holds the handler's lock
            self._thread = threading.Thread(target=self._write_all, name="kv-log", daemon=True)
            self._thread.start()
        if self._written is not None:
            self.flush_within(patience(FLUSH_S))

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


def _waker(environment: Mapping[str, str]) -> Callable[[], None] | None:
    """Wakes the test that waits for a line; None: no test does.

    A message that finds the socket's queue full is dropped: the messages in it already tell the test to look.
    """
    path = environment.get(TEST_EVENTS)
    if not path or not is_testing(environment):
        return None
    wakes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    wakes.setblocking(False)

    def wake() -> None:
        with contextlib.suppress(OSError):
            wakes.sendto(b"", path)

    return wake


_ROOT = "kvstrata"
_EVENT = "kvstrata_event"
"""Attribute of the records of an EventLog: the event and its fields."""
_writer: LogWriter | None = None


def set_up(level: str, form: str = "text") -> None:
    """Send the package's log to stderr, from `level` (debug, info, warning, error) upwards, and others' warnings.

    `form` is `text` or `json`.
    """
    global _writer
    _writer = handler = LogWriter(STDERR, written=_waker(os.environ))
    kind = _JsonFormatter if form == "json" else _Formatter
    formatter = kind("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    ours = logging.getLogger(_ROOT)
    for logger in (ours, logging.getLogger()):
        logger.handlers[:] = [handler]
    logging.captureWarnings(True)
    ours.propagate = False
    set_level(level)


def set_level(level: str) -> None:
    """Log from `level` (debug, info, warning, error) upwards."""
    logging.getLogger(_ROOT).setLevel(level.upper())


def current_level() -> str:
    """The least severe level that is logged."""
    return logging.getLevelName(logging.getLogger(_ROOT).getEffectiveLevel()).lower()


def flush_log() -> None:
    """Wait until the lines logged so far are written, for FLUSH_S at most. To be called before a process ends."""
    if _writer is not None:
        _writer.flush_within(FLUSH_S)


class LogNumbers(Numbers):
    """The numbers of this process's log."""

    dropped_lines = counter(
        "Log lines dropped because the log's reader had stopped reading or was gone.",
        read=lambda _: 0 if _writer is None else _writer.dropped_lines,
    )


class _Formatter(logging.Formatter):
    """Every message on one line, without credentials; only a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        # The record belongs to all handlers, so it is not changed.
        plain = logging.makeLogRecord(record.__dict__)
        plain.msg, plain.args = one_line(record.getMessage(), MAX_MESSAGE_CHARS), None
        return super().format(plain)

    def formatException(self, ei: Any) -> str:
        return "\n".join(one_line(line) for line in super().formatException(ei).splitlines())


class _JsonFormatter(_Formatter):
    """Every record as one JSON object with time, level, component, message and fields, without credentials.

    A traceback is the field `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        event, values = record.__dict__.get(_EVENT) or (record.getMessage(), {})
        fields = {name: _plain(value) for name, value in values.items()}
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(
            {
                "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
                "level": record.levelname.lower(),
                "component": record.name,
                "message": one_line(event, MAX_MESSAGE_CHARS),
                "fields": fields,
            },
            ensure_ascii=False,
        )


class Thinning:
    """Passes one line of each kind per `window_s`, and counts the others. Keeps MAX_KINDS kinds; thread-safe."""

    def __init__(self, window_s: float = WINDOW_S, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def left_out(self, kind: str) -> int | None:
        """Lines of this kind left out since the last written one; None: leave this line out too."""
        now_s = self._clock_s()
        with self._lock:
            last_s, left_out = self._kinds.get(kind, (-math.inf, 0))
            if now_s - last_s < self._window_s:
                self._kinds[kind] = (last_s, left_out + 1)
                return None
            if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            self._kinds[kind] = (now_s, 0)
        return left_out

    def log(self, logger: logging.Logger, level: int, kind: str, text: str, *values: object) -> None:
        """Like `logger.log`, thinned."""
        if not logger.isEnabledFor(level):
            return
        left_out = self.left_out(kind)
        if left_out:
            text, values = f"{text} (%d more like this were left out)", (*values, left_out)
        if left_out is not None:
            logger.log(level, text, *values)


class EventLog:
    """The log of one component."""

    def __init__(self, component: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{component}")
        self._thinning = Thinning(clock_s=clock_s)

    def debug(self, event: str, **fields: object) -> None:
        """Log a detail for debugging."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event of interest to operators."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a problem after which the server continues."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log that a part of the server ends, or that a guarantee to users may be broken."""
        self._write(logging.ERROR, event, fields)

    def repeated(self, level: int, kind: str, event: str, **fields: object) -> None:
        """Write an event of level `level`, but at most one line per `kind` in each `WINDOW_S`."""
        left_out = self._thinning.left_out(kind)
        if left_out:
            fields["left_out"] = left_out
        if left_out is not None:
            self._write(level, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            words = [event, *(f"{name}={_shown(value)}" for name, value in fields.items())]
            self._logger.log(level, "%s", " ".join(words), extra={_EVENT: (event, fields)})


def _plain(value: object) -> object:
    """The value of a field for JSON."""
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, bytes):
        return value[:8].hex()
    return one_line(str(value), MAX_VALUE_CHARS)


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value[:8].hex()
    text = str(value)
    if len(text) > MAX_VALUE_CHARS:
        text = text[:MAX_VALUE_CHARS] + "…"
    if text and text.isprintable() and not _QUOTED.intersection(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(text)}"'


_QUOTED = frozenset(' "=')
