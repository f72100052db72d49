"""The input of one listening ZMQ socket: its connections, and their messages that are not handled yet.

libzmq 4.3.5 aborts the process if the receive high-water mark has stopped a connection's input, a PING is among the
bytes already read, and the connection then dies (`stream_engine_base.cpp`, `!_io_error`).  So our sockets have no such
mark: libzmq never stops reading, its messages are taken at once, and this module bounds them.

1. If more than MAX_WAITING_MESSAGES or `max_waiting_bytes` of a connection wait to be handled, the connection is cut
   and its messages are dropped.  If all connections together exceed `max_total_bytes`, the one with the most bytes is
   cut.
2. Connections take turns: one message of each is handled at a time.
3. At most `max_connections()` are open.  When one more opens, the connection that has been silent longest is cut, first
   among those that never sent a message.
4. The messages of a cut connection are freed over several wakes: giving 64 MiB back to the system takes milliseconds.
   A wake frees a sixteenth, at least FREED_BYTES.
5. A connection is cut if MAX_REFUSED of its messages in a row were refused unread, or if one has more than MAX_FRAMES
   frames: no client of ours does either, and reading such a flood takes the CPU time of both of our threads.
6. Cutting means `shutdown` of the descriptor, which libzmq takes for a hang-up of the other side.  The descriptor
   belongs to libzmq and may have been reused meanwhile, so it is shut down only if it is a connection of this listener.
7. Messages of a connection that has ended may still arrive, while another connection has its descriptor already.  They
   are told apart by the sender's routing id, until libzmq has no message left: they count for the connection
   `~descriptor`, to which the rules above apply, and which nothing shuts down.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_WAITING_MESSAGES = 4_096
MAX_WAITING_LARGEST = 8
"""Messages of the largest size that may wait for one connection."""
MAX_TOTAL_LARGEST = 32
"""Messages of the largest size that may wait for all connections together."""
MAX_REFUSED = 256
MAX_FRAMES = 8
MAX_CONNECTIONS = 4_096
CONNECTIONS_SHARE = 8
"""A port uses at most this share of the descriptors that the process may open: one in eight."""
MAX_ENDED = 65_536
"""Connections that ended since libzmq had no message left; beyond these, their last messages are not told apart."""
FREED_BYTES = 1 << 20
"""Bytes of cut connections' messages that are freed at a time, at least."""
MESSAGE_COST_BYTES = 200
"""Each waiting message counts as its length plus this many bytes."""


class Message(NamedTuple):
    """One message: its connection (a descriptor, or see rule 7), the sender's routing id (empty on PULL), its frames.

    `key` and `host`: as in Address (zmq_server.py).
    """

    connection: int
    routing_id: bytes
    frames: Sequence[bytes]
    key: str = ""
    host: str = ""


def max_connections() -> int:
    """Maximum number of connections that one port may have open, a share of this process's limit of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, soft // CONNECTIONS_SHARE))


class Inbox:
    """Connections and waiting messages of one socket."""

    def __init__(self, max_message_bytes: int, see_connections: Callable[[], None] = lambda: None) -> None:
        """`see_connections()` calls `opened` and `closed` for all that has happened to connections until now."""
        self._see_connections = see_connections
        self._max_waiting_bytes = MAX_WAITING_LARGEST * max_message_bytes
        self._max_total_bytes = MAX_TOTAL_LARGEST * max_message_bytes
        self._port = 0
        self._waiting: dict[int, deque[Message]] = {}
        """Waiting messages by connection, in the order of the connections' turns."""
        self._waiting_bytes: dict[int, int] = {}
        self._total_bytes = 0
        self._silent: dict[int, None] = {}
        """Connections that have sent no message, oldest first."""
        self._heard: dict[int, None] = {}
        """The other connections; the connection of the newest message is last."""
        self._refused: dict[int, int] = {}
        """How many of a connection's latest messages were refused."""
        self._routing_ids: dict[int, bytes] = {}
        """The routing id with which a connection sends."""
        self._ended: set[tuple[int, bytes]] = set()
        """(Descriptor, routing id) of connections that have ended and whose last messages may still arrive."""
        self._cut: set[int] = set()
        """Connections that were cut, and whose last messages may still arrive."""
        self._dropped: deque[Message] = deque()
        """Messages of cut connections, to be freed."""
        self._dropped_bytes = 0
        self.cut_count = 0

    def __len__(self) -> int:
        """Number of connections with waiting messages."""
        return len(self._waiting)

    @property
    def connections_count(self) -> int:
        """Number of open connections, as far as libzmq has reported them."""
        return len(self._silent) + len(self._heard)

    @property
    def has_cut(self) -> bool:
        """Whether messages of cut connections may still arrive."""
        return bool(self._cut)

    def listen(self, port: int) -> None:
        """Set the port on which the socket listens."""
        self._port = port

    def opened(self, connection: int) -> None:
        """A connection was accepted; if it exceeds the bound, the connection that has been silent longest is cut."""
        self._cut.discard(connection)
        self._heard.pop(connection, None)
        self._silent[connection] = None
        if self.connections_count > max_connections():
            self._cut_off(next(iter(self._silent if len(self._silent) > 1 else self._heard)))

    def closed(self, connection: int) -> None:
        """A connection has ended; its waiting messages are still handled, unless it was cut."""
        self._silent.pop(connection, None)
        self._heard.pop(connection, None)
        refused = self._refused.pop(connection, 0)
        routing_id = self._routing_ids.pop(connection, b"")
        if not routing_id:
            return
        self._ended.add((connection, routing_id))
        ended = ~connection
        if refused:
            self._refused[ended] = refused
        if connection in self._cut:
            self._cut.add(ended)
        if waiting := self._waiting.pop(connection, None):
            later = self._waiting.setdefault(ended, deque())
            later.extend(message._replace(connection=ended) for message in waiting)
            held = self._waiting_bytes.pop(connection)
            self._waiting_bytes[ended] = self._waiting_bytes.get(ended, 0) + held

    def hears(self, descriptor: int, routing_id: bytes) -> int | None:
        """A message has arrived; returns its connection, or None if that was cut: then the caller drops the message."""
        sender = descriptor, routing_id
        if sender not in self._ended:
            known = descriptor in self._heard or descriptor in self._silent or descriptor in self._cut
            if routing_id != self._routing_ids.get(descriptor, b"") or not known:
                self._see_connections()  # it is new, has ended, or another connection has its descriptor by now
                if routing_id and descriptor not in self._silent and descriptor not in self._cut:
                    self._ended.add(sender)
        if sender in self._ended:
            return None if ~descriptor in self._cut else ~descriptor
        if descriptor in self._cut:
            return None
        self._silent.pop(descriptor, None)
        self._heard.pop(descriptor, None)
        self._heard[descriptor] = None
        self._routing_ids[descriptor] = routing_id
        return descriptor

    def add(self, message: Message) -> int | None:
        """Keep a message until its turn; returns the connection that was cut because of it, or None."""
        connection = self.hears(message.connection, message.routing_id)
        if connection is None:
            return None
        message = message._replace(connection=connection)
        size = _size(message)
        waiting = self._waiting.get(connection)
        if waiting is None:
            waiting = self._waiting[connection] = deque()
        waiting.append(message)
        held = self._waiting_bytes[connection] = self._waiting_bytes.get(connection, 0) + size
        self._total_bytes += size
        if len(waiting) > MAX_WAITING_MESSAGES or held > self._max_waiting_bytes:
            connection = self._now(message)
            self._cut_off(connection)
            return connection
        if self._total_bytes > self._max_total_bytes:
            self._see_connections()
            most = max(self._waiting_bytes, key=self._waiting_bytes.__getitem__)
            self._cut_off(most)
            return most
        return None

    def next(self) -> Message | None:
        """Take the next message; None if no message waits."""
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

    def handled(self, message: Message, *, refused: bool) -> bool:
        """A message was handled; returns whether its connection was cut because of it (rule 5)."""
        connection = message.connection
        if not refused:
            if self._refused:
                self._refused.pop(connection, None)
            return False
        if connection in self._cut or (
            connection >= 0 and connection not in self._silent and connection not in self._heard
        ):
            return False  # it is closed or cut already
        count = self._refused[connection] = self._refused.get(connection, 0) + 1
        if count < MAX_REFUSED and len(message.frames) <= MAX_FRAMES:
            return False
        self._cut_off(self._now(message))
        return True

    def woke(self, *, drained: bool) -> None:
        """A wake is over; `drained`: libzmq has no message left, so none of a connection that has ended."""
        if self._dropped:
            self._free_some()
        if self._ended and (drained or len(self._ended) > MAX_ENDED):
            self._ended.clear()
            self._cut = {connection for connection in self._cut if connection >= 0}

    @property
    def has_dropped(self) -> bool:
        """Whether messages of cut connections are still to be freed."""
        return bool(self._dropped)

    def _free_some(self) -> None:
        """Free some messages of cut connections: a sixteenth of their bytes, at least FREED_BYTES."""
        goal = self._dropped_bytes - max(FREED_BYTES, self._dropped_bytes // 16)
        while self._dropped and self._dropped_bytes > goal:
            self._dropped_bytes -= _size(self._dropped.popleft())

    def _now(self, message: Message) -> int:
        """The connection of a message, which may have ended meanwhile, so that another one has its descriptor."""
        self._see_connections()
        has_ended = (message.connection, message.routing_id) in self._ended
        return ~message.connection if has_ended else message.connection

    def _cut_off(self, connection: int) -> None:
        """Drop the messages of a connection, and shut it down unless it has ended."""
        self._dropped.extend(self._waiting.pop(connection, ()))
        held = self._waiting_bytes.pop(connection, 0)
        self._total_bytes -= held
        self._dropped_bytes += held
        self._silent.pop(connection, None)
        self._heard.pop(connection, None)
        self._refused.pop(connection, None)
        self._cut.add(connection)
        self.cut_count += 1
        if connection < 0:
            return
        with contextlib.suppress(OSError):  # the connection has ended by itself
            borrowed = socket.socket(fileno=connection)
            try:
                if self._is_ours(borrowed):
                    borrowed.shutdown(socket.SHUT_RDWR)
            finally:
                borrowed.detach()

    def _is_ours(self, connection: socket.socket) -> bool:
        name = connection.getsockname()
        return isinstance(name, tuple) and bool(name[1] == self._port)


def _size(message: Message) -> int:
    return MESSAGE_COST_BYTES + sum(map(len, message.frames))
