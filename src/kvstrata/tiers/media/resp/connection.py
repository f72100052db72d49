"""One connection to a server that speaks RESP2 (Redis, Valkey): framing, time limits, bytes straight from and into L1.

    replies    +text  -error text  :integer  $length CRLF bytes  *count replies; $-1 and *-1 are None

Invariants
1. Every wait ends at `deadline_s`, even if bytes keep arriving slowly.
2. After LinkLost the next bytes may belong to an old reply, so the connection must be closed.  A ServerError is an
   ordinary reply.
3. The server can make this process buffer only a bounded number of bytes; a value's bytes go into the caller's memory.

One thread at a time uses a link.  servers.py decides which server to connect to and when; this module does not
interpret commands.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from kvstrata.text import one_line

BUFFER_BYTES = 1 << 16
"""Maximum length of a line that the server may send."""
MAX_BULK_BYTES = 1 << 20
"""Maximum length of a value that `reply` accepts; records are read by `read_into`."""
MAX_ARRAY_BYTES, ITEM_BYTES, MAX_DEPTH = 1 << 26, 64, 8
"""Maximum bytes of an array with all its items, the overhead counted for each item, and the maximum nesting."""
MAX_VALUE_BYTES = 512 << 20
"""Maximum length of a value that servers accept with their default settings (proto-max-bulk-len)."""
LARGEST_NUMBER = (1 << 63) - 1
SOME_BUFFERS = 512
"""Maximum number of buffers in one system call, below the kernel's limit of 1024."""
SHOWN_BYTES = 60

Buffer = bytes | bytearray | memoryview


class LinkLost(Exception):
    """The connection cannot be used any more. `reason` is a reason code for outcomes, `str()` a sentence."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class ServerError:
    """An error reply. `code` is its first word (OOM, MOVED, WRONGTYPE, ERR, ...)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.code, _, self.rest = text.partition(" ")

    def __repr__(self) -> str:
        return f"ServerError({self.text!r})"


Reply = int | bytes | None | ServerError | list["Reply"]


def command(*words: bytes) -> bytes:
    """A command in its wire format."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Link:
    """One connection. Owns the socket."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        """Monotonic time at which every wait ends; the caller sets it before it uses the link."""
        self._socket = connected
        self._tls = isinstance(connected, ssl.SSLSocket)
        if not self._tls:
            connected.settimeout(None)  # the kernel's own time limits: see _arm
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._array_bytes = 0
        """Bytes of the array that is being read."""

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def is_quiet(self) -> bool:
        """Whether nothing has arrived since the last reply: neither the end of the connection nor unexpected bytes."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._begin == self._end and not poll.poll(0)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send everything. The caller may change the buffers after the call has returned. Raises LinkLost."""
        if all(isinstance(buffer, bytes) for buffer in buffers):
            buffers = [b"".join(buffers)]
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            try:
                if self._tls:
                    self._arm()
                    sent = self._socket.send(left[0])
                else:
                    self._arm(sending=True)
                    sent = self._socket.sendmsg(left[:SOME_BUFFERS])
            except OSError as error:
                raise _lost(error, self._last_words()) from None
            first = 0
            while first < len(left) and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            del left[:first]
            if sent:
                left[0] = left[0][sent:]

    def _last_words(self) -> str:
        """The error reply with which the server ended the connection while we sent; empty without one."""
        if self._tls:
            return ""
        said = bytes(self._view[self._begin : self._end])
        with contextlib.suppress(OSError):
            said += self._socket.recv(BUFFER_BYTES, socket.MSG_DONTWAIT)
        last = said.rstrip().rpartition(b"\r\n")[2]
        return last[1:201].decode(errors="replace") if last.startswith(b"-") else ""

    def reply(self, depth: int = 0) -> Reply:
        """The next reply. Raises LinkLost."""
        line = self._line()
        if depth:
            self._count_item(line, len(line))
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return _number(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        if kind == b"$":
            length = _number(line)
            if length < 0:
                return None
            if length > MAX_BULK_BYTES:
                raise _strange(line)
            if depth:
                self._count_item(line, length)
            value = bytearray(length)
            self.read_into(memoryview(value))
            return bytes(value)
        if kind == b"*":
            count = _number(line)
            if count < 0:
                return None
            if depth >= MAX_DEPTH:
                raise _strange(line)
            if not depth:
                self._array_bytes = 0
            return [self.reply(depth + 1) for _ in range(count)]
        raise _strange(line)

    def _count_item(self, line: bytes, length: int) -> None:
        self._array_bytes += length + ITEM_BYTES
        if self._array_bytes > MAX_ARRAY_BYTES:
            raise _strange(line)

    def value_length(self) -> int | ServerError | None:
        """The length of the value that the reply announces; `read_into` or `skip` must follow. None: no value."""
        line = self._line()
        if line[:1] == b"$":
            length = _number(line)
            if length > MAX_VALUE_BYTES:
                raise _strange(line)
            return None if length < 0 else length
        if line[:1] == b"-":
            return ServerError(line[1:].decode(errors="replace"))
        raise _strange(line)

    def read_into(self, view: memoryview) -> None:
        """Read the announced value, which must have the view's length. Raises LinkLost."""
        length = len(view)
        done = min(self._end - self._begin, length)
        view[:done] = self._view[self._begin : self._begin + done]
        self._begin += done
        while done < length:
            done += self._receive(view[done:], whole=True)
        self._end_of_value()

    def skip(self, length: int) -> None:
        """Read the announced value and discard it. Raises LinkLost."""
        while length > 0:
            if self._begin == self._end:
                self._begin, self._end = 0, self._receive(self._view)
            step = min(length, self._end - self._begin)
            self._begin += step
            length -= step
        self._end_of_value()

    def _end_of_value(self) -> None:
        if (line := self._line()) != b"":
            raise _strange(line)

    def _line(self) -> bytes:
        searched = self._begin
        while True:
            # The search begins one byte early: the last piece may begin with the second byte of a line's end.
            at = self._buffer.find(b"\r\n", searched, self._end)
            if at >= 0:
                line = bytes(self._view[self._begin : at])
                self._begin = at + 2
                return line
            if self._begin:
                length = self._end - self._begin
                self._view[:length] = bytes(self._view[self._begin : self._end])
                self._begin, self._end = 0, length
            if self._end == BUFFER_BYTES:
                raise _strange(bytes(self._view[:SHOWN_BYTES]))
            searched = max(self._end - 1, 0)
            self._end += self._receive(self._view[self._end :])

    def _receive(self, view: memoryview, *, whole: bool = False) -> int:
        try:
            self._arm()
            if self._tls:
                count = self._socket.recv_into(view)
            else:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
        except OSError as error:
            raise _lost(error) from None
        if count == 0:
            why = "; its log says why (such as client-output-buffer-limit)" if whole else ""
            raise LinkLost("lost", f"the server closed the connection{why}")
        return count

    def _arm(self, *, sending: bool = False) -> None:
        """Set the timeout of the next system call to the time left. Raises LinkLost after the deadline."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkLost("timeout", "the server did not answer in time")
        if self._tls:
            self._socket.settimeout(left_s)
            return
        # Python's own timeout would make the socket non-blocking, and values would arrive in small pieces.
        time_limit = struct.pack("@ll", *divmod(int(left_s * 1e6) + 1, 1_000_000))
        option = socket.SO_SNDTIMEO if sending else socket.SO_RCVTIMEO
        self._socket.setsockopt(socket.SOL_SOCKET, option, time_limit)


def _lost(error: OSError, said: str = "") -> LinkLost:
    if isinstance(error, TimeoutError | BlockingIOError):
        return LinkLost("timeout", "the server did not answer in time")
    return LinkLost("lost", f"the connection broke: {one_line(said) or error.strerror or error}")


def _strange(line: bytes) -> LinkLost:
    hint = ""
    if line.startswith(b"HTTP/"):
        hint = " but a web server"
    elif line[:1] in (b"\x15", b"\x16"):
        hint = ", or it wants TLS: set tls_enable"
    return LinkLost("protocol", f"the server is not Redis or Valkey{hint}: {line[:SHOWN_BYTES]!r}")


def _number(line: bytes) -> int:
    try:
        number = int(line[1:])
    except ValueError:
        raise _strange(line) from None
    if not -LARGEST_NUMBER <= number <= LARGEST_NUMBER:
        raise _strange(line)
    return number
