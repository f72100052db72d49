"""What has arrived on one listening ZMQ socket: its connections, and their messages that nobody has handled yet.

libzmq 4.3.5 aborts the process when a connection dies after the receive high-water mark has stopped its input and a
PING lies in what it had already read (`stream_engine_base.cpp`, `!_io_error`).  So our sockets have no mark: libzmq
never stops reading, messages are taken from it at once, and the bounds are here.

1. A connection with more than MAX_WAITING_MESSAGES or `max_waiting_bytes` that wait to be handled is cut, and what it
   sent is dropped.  When all connections together hold more than `max_total_bytes`, the one that holds most is cut.
2. Messages are handled one of each connection in turn.
3. At most `max_connections()` are open.  One more costs the connection that has been silent longest, first among those
   that never sent a message.
4. Cutting means `shutdown` of the descriptor, which libzmq takes for the peer's end.  The descriptor belongs to libzmq
   and may have been used anew meanwhile, so only a connection of this very listener is ever cut.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from collections import deque
from typing import NamedTuple

MAX_WAITING_MESSAGES = 4_096
MAX_WAITING_LARGEST = 8
"""Messages of the largest size that may wait for one connection."""
MAX_TOTAL_LARGEST = 32
"""The same for all connections together."""
MAX_CONNECTIONS = 4_096
CONNECTIONS_SHARE = 8
"""A port takes at most an eighth of the descriptors that the process may open."""
MESSAGE_COST_BYTES = 200
"""Added to the length of each waiting message."""


class Message(NamedTuple):
    """One message: the descriptor of its connection, the sender's routing id (empty on PULL), and its frames."""

    connection: int
    routing_id: bytes
    frames: list[bytes]


def max_connections() -> int:
    """What one port may have open, of the descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, soft // CONNECTIONS_SHARE))


class Inbox:
    """Connections and waiting messages of one socket. `name` is the port, or the path of the unix socket."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_waiting_bytes = MAX_WAITING_LARGEST * max_message_bytes
        self._max_total_bytes = MAX_TOTAL_LARGEST * max_message_bytes
        self._name: int | str = ""
        self._waiting: dict[int, deque[Message]] = {}
        """By connection; in the order of their turns."""
        self._waiting_bytes: dict[int, int] = {}
        self._total_bytes = 0
        self._silent: dict[int, None] = {}
        """Connections without a message so far, oldest first."""
        self._heard: dict[int, None] = {}
        """The others; the one heard last is at the end."""
        self._cut: set[int] = set()
        """Connections that were cut and whose last messages may still come."""
        self.cut_count = 0

    def __len__(self) -> int:
        """Connections with messages that wait."""
        return len(self._waiting)

    @property
    def connections_count(self) -> int:
        """Those that are open, as far as libzmq has told."""
        return len(self._silent) + len(self._heard)

    @property
    def has_cut(self) -> bool:
        """Whether messages of connections that were cut may still come."""
        return bool(self._cut)

    def listen(self, name: int | str) -> None:
        """Its socket listens on this port or path."""
        self._name = name

    def opened(self, connection: int) -> None:
        """A connection was accepted; the longest silent one is cut when it is one too many."""
        self._cut.discard(connection)
        self._heard.pop(connection, None)
        self._silent[connection] = None
        if self.connections_count > max_connections():
            self._cut_off(next(iter(self._silent if len(self._silent) > 1 else self._heard)))

    def closed(self, connection: int) -> None:
        """A connection has ended; its messages that wait are still handled."""
        self._silent.pop(connection, None)
        self._heard.pop(connection, None)

    def hears(self, connection: int) -> bool:
        """A message of it has come; False where it was cut, and the message is to be dropped."""
        if connection in self._cut:
            return False
        self._silent.pop(connection, None)
        self._heard.pop(connection, None)
        self._heard[connection] = None
        return True

    def add(self, message: Message) -> int | None:
        """Keep a message until its turn; the connection that was cut for it, if any was."""
        connection = message.connection
        if not self.hears(connection):
            return None
        size = _size(message)
        waiting = self._waiting.get(connection)
        if waiting is None:
            waiting = self._waiting[connection] = deque()
        waiting.append(message)
        held = self._waiting_bytes[connection] = self._waiting_bytes.get(connection, 0) + size
        self._total_bytes += size
        if len(waiting) > MAX_WAITING_MESSAGES or held > self._max_waiting_bytes:
            self._cut_off(connection)
            return connection
        if self._total_bytes > self._max_total_bytes:
            most = max(self._waiting_bytes, key=self._waiting_bytes.__getitem__)
            self._cut_off(most)
            return most
        return None

    def next(self) -> Message | None:
        """The message whose turn it is; None when none waits."""
        if not self._waiting:
            return None
        connection = next(iter(self._waiting))
        waiting = self._waiting.pop(connection)
        message = waiting.popleft()
        size = _size(message)
        self._total_bytes -= size
        if waiting:
            self._waiting[connection] = waiting
            self._waiting_bytes[connection] -= size
        else:
            del self._waiting_bytes[connection]
        return message

    def _cut_off(self, connection: int) -> None:
        """Forget what it sent, and end it."""
        self._waiting.pop(connection, None)
        self._total_bytes -= self._waiting_bytes.pop(connection, 0)
        self._silent.pop(connection, None)
        self._heard.pop(connection, None)
        self._cut.add(connection)
        self.cut_count += 1
        with contextlib.suppress(OSError):  # it has ended by itself
            borrowed = socket.socket(fileno=connection)
            try:
                if self._is_ours(borrowed):
                    borrowed.shutdown(socket.SHUT_RDWR)
            finally:
                borrowed.detach()

    def _is_ours(self, connection: socket.socket) -> bool:
        name = connection.getsockname()
        return bool(name == self._name or (isinstance(name, tuple) and name[1] == self._name))


def _size(message: Message) -> int:
    return MESSAGE_COST_BYTES + sum(map(len, message.frames))
