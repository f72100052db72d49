"""The listening side of the ZMQ ports of peers, controllers and gateways: a ROUTER socket on one asyncio loop.

It does not parse frames.  A message is one frame; the handler gets (address, frame) and answers through `send`, now or
later.  Rules:

1. Nothing here blocks: reads and sends are NOBLOCK.  If a client does not read, so that its queue is full or has too
   many bytes (`Outbox`), a reply is dropped; the client asks again and gets the same outcome.
2. One wake-up handles at most `MESSAGES_PER_WAKE` messages in at most `SECONDS_PER_WAKE`, then yields to the loop;
   connections take turns.
3. A message that does not have exactly one frame gets the handler's error reply.  If a message is above the size limit,
   libzmq closes its sender's connection; other connections are not affected.
4. Messages are taken from libzmq as they arrive, also before `start`, and wait in the inbox, which closes a connection
   that exceeds its bounds.
5. No ZMTP heartbeats are sent: the protocols above decide which process is alive.  TCP's own keepalive ends connections
   whose other end has vanished.
6. Only ZMTP 3 is accepted, because messages of older versions do not identify the connection on which they arrived.

On addresses other than loopback the socket needs CURVE (RFC 26), with the server's secret key and the public keys of
the clients that may connect, or an explicit permission to do without.  libzmq refuses a client without the right keys
before it can send anything; the refusal is counted and logged.

A client may leave CLIENT_BYTES of replies unread, all clients together TOTAL_BYTES.  Beyond TOTAL_BYTES a client still
gets one reply at a time, so that clients that do not read cannot keep replies from those that do.  libzmq bounds only
the number of messages that wait for a client.  A reply of TRACKED_BYTES or more is therefore handed over without a
copy, and libzmq tells when it no longer needs the bytes: they are in the kernel's buffer, or the connection has ended.

libzmq 4.3.5 aborts the process if the receive high-water mark has stopped a connection's input, a PING is among the
bytes already read, and the connection then dies (`stream_engine_base.cpp`, `!_io_error`).  So our sockets have no such
mark: libzmq never stops reading, its messages are taken at once, and `Inbox` bounds them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import zmq
from zmq.backend import Socket as BareSocket
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvstrata.errors import MachineLacks
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.patience import patience
from kvstrata.process.ports import port_holder, refuse_open, resolve
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES
from kvstrata.rpc.zmq_curve import OPEN, Keys

TRACKED_BYTES = 16 << 10
CLIENT_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20


FEW = 4
MAX_WAITING_MESSAGES = 4_096
MAX_WAITING_LARGEST = 8
"""Maximum number of waiting messages of the largest size for one connection."""
MAX_TOTAL_LARGEST = 32
"""Maximum number of waiting messages of the largest size for all connections together."""
MAX_REFUSED = 256
MAX_FRAMES = 8
MAX_CONNECTIONS = 4_096
CONNECTIONS_SHARE = 8
"""A port uses at most one in CONNECTIONS_SHARE of the descriptors that the process may open."""
MAX_ENDED = 65_536
"""Maximum number of connections ended since libzmq was last empty; beyond it their last messages are confused."""
FREED_BYTES = 1 << 20
"""Minimum bytes of cut connections' messages that are freed at a time."""
MESSAGE_COST_BYTES = 200
"""Each waiting message counts as its length plus this many bytes."""


class Message(NamedTuple):
    """One message: its connection (a descriptor, or see rule 7), the sender's routing id, its frames.

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
    """The connections of one socket, and their messages that are not handled yet.

    1. If more than MAX_WAITING_MESSAGES or `max_waiting_bytes` of a connection wait to be handled, the connection is
       cut and its messages are dropped.  If all connections together exceed `max_total_bytes`, the one with the most
       bytes is cut.
    2. Connections take turns: one message of each is handled at a time.
    3. At most `max_connections()` are open.  When one more opens, the connection that has been silent longest is
       cut, first among those that never sent a message.
    4. The messages of a cut connection are freed over several wakes: returning 64 MiB to the system takes milliseconds.
       A wake frees a sixteenth, at least FREED_BYTES.
    5. A connection is cut if MAX_REFUSED of its messages in a row were refused unread, or if one has more than
       MAX_FRAMES frames: no client of ours does either, and reading such a flood takes the CPU time of both of our
       threads.
    6. Cutting means `shutdown` of the descriptor, which libzmq takes for a hang-up of the other side.  The
       descriptor belongs to libzmq and may have been reused meanwhile, so it is shut down only if it is a connection
       of this listener.
    7. Messages of a connection that has ended may still arrive, while another connection has its descriptor already.
       They are distinguished by the sender's routing id, until libzmq has no message left: they count for the
       connection `~descriptor`, to which the rules above apply, and which is never shut down.
    """

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
        """Number of a connection's latest messages that were refused in a row."""
        self._routing_ids: dict[int, bytes] = {}
        """The routing id of a connection's messages."""
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
        """A connection was accepted; if it exceeds the limit, the connection that has been silent longest is cut."""
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
                if descriptor not in self._silent and descriptor not in self._cut:
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
        """A wake has ended; `drained`: libzmq has no message left, so no message of an ended connection can come."""
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


class Tracker(Protocol):
    """Reports when libzmq no longer needs the bytes of one reply: zmq.MessageTracker."""

    @property
    def done(self) -> bool:
        """Whether libzmq no longer needs the bytes."""


class Outbox:
    """The unread bytes of one server's clients. Belongs to one thread."""

    def __init__(self) -> None:
        self._unread: dict[Hashable, collections.deque[tuple[Tracker, int]]] = {}
        self._client_bytes: collections.Counter[Hashable] = collections.Counter()
        self.unread_bytes = 0

    def look(self) -> int:
        """Forget replies that were sent; returns the bytes that are still unread."""
        for client in list(self._unread):
            self._look(client)
        return self.unread_bytes

    def has_room(self, client: Hashable, size_bytes: int) -> bool:
        """Whether this client may get a reply of this size now."""
        self._look(client)
        if not self._client_bytes[client]:
            return True
        if self._client_bytes[client] + size_bytes > CLIENT_BYTES:
            return False
        if self.unread_bytes + size_bytes > TOTAL_BYTES:
            self.look()
        return self.unread_bytes + size_bytes <= TOTAL_BYTES

    def sent(self, client: Hashable, size_bytes: int, tracker: Tracker) -> None:
        """A reply of this size was handed to libzmq."""
        self._unread.setdefault(client, collections.deque()).append((tracker, size_bytes))
        self._client_bytes[client] += size_bytes
        self.unread_bytes += size_bytes

    def _look(self, client: Hashable) -> None:
        """Forget the client's replies that were sent; libzmq sends them in order."""
        replies = self._unread.get(client)
        while replies and replies[0][0].done:
            _, size_bytes = replies.popleft()
            self._client_bytes[client] -= size_bytes
            self.unread_bytes -= size_bytes
        if not replies:
            self._unread.pop(client, None)
            del self._client_bytes[client]


MESSAGES_PER_WAKE = 32
SECONDS_PER_WAKE = 0.002
# Plain ints: pyzmq converts its own constants anew in each call.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _SRCFD = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.SRCFD)
SEND_QUEUE = 2_048
"""Maximum number of replies that wait for one client: more than it can request at a time."""
TAKEN_PER_WAKE = 512
"""Maximum number of messages taken from libzmq in one wake; taking one costs a few microseconds."""
HANDSHAKE_MS = 5_000
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 30_000,
}
"""A tcp connection whose other end does not respond for 30 s is closed."""
OPENED_OR_ENDED = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
REFUSED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "kvstrata"
KEY_BYTES = 32
"""Bytes of a CURVE key."""
KEYLESS_DOMAIN = "kvstrata-keyless"
"""ZAP domain of sockets without keys.  A socket that has a domain refuses ZMTP 1 and 2."""


class Address(NamedTuple):
    """Destination of a reply: the client's routing id. Only `key` proves the sender."""

    routing_id: bytes
    key: str = ""
    """Public key (Z85) of the connection on which the message arrived; empty without CURVE."""
    host: str = ""
    """IP address of that connection's other end; empty without CURVE."""


Handler = Callable[[Address, Any], bool | None]
"""Handles one frame; answers through `send`, now or later. Returns False if it has refused the frame."""
FrameErrorHandler = Callable[[Address, int], bytes]
"""Gets the number of frames of a message that has not exactly one; returns the error reply."""


class ZmqServer(Numbers):
    """One listening socket. Everything runs on the thread of `loop`."""

    received = counter("Frames received.", name="received_frames")
    dropped_replies = counter("Replies dropped because the receiver was gone or left too much unread.")
    unread_reply_bytes = gauge(
        "Bytes of large replies that clients have not read yet.", lambda self: self._outbox.look()
    )
    refused_handshakes = counter("Connections that ended before they had proved the right keys.")
    connections = gauge("Open connections.", lambda self: self._inbox.connections_count)
    cut_connections = counter(
        "Connections cut: over the limit, or with more unprocessed bytes than allowed.",
        read=lambda self: self._inbox.cut_count,
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._loop = loop
        self._max_message_bytes = max_message_bytes
        self._handler: Handler | None = None
        self._frame_error: FrameErrorHandler | None = None
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        """None before `bind_tcp` and after `close`."""
        self._inbox = Inbox(max_message_bytes, self._see_connections)
        self._outbox = Outbox()
        self._watch: zmq.Socket[bytes] | None = None
        """The socket on which libzmq reports connections."""
        self._zap: zmq.Socket[bytes] | None = None
        self._keys: Keys = OPEN
        self._again = False
        self._looks = False
        """Whether `_look_again` is called in the next turn of the loop, after all replies of this one."""
        self._reading = False
        self._draining = False
        """Connections that ended before they showed the right keys."""
        self._keys_asked_on = ""
        """Setting of the port, if it requires keys."""
        self._refused_note = ""
        self._log = EventLog("zmq")

    def bind_tcp(
        self,
        host: str,
        port: int,
        *,
        keys: Keys | None,
        anywhere: bool,
        host_setting: str = "host",
        port_setting: str = "port",
        flag: str = "--port",
        keys_setting: str = "security.curve_secret_file (--curve-secret-file)",
        refused_note: str = "",
    ) -> int:
        """Listen on host:port (0 takes a free port); returns the port.  Names of settings and flag are for errors.
        `keys`: its own, and those that may connect, which are read at each connection; None: no CURVE. `anywhere`:
        other hosts may reach it, since clients prove a key, or the settings permit to do without. `refused_note`: the
        log's advice when a connection shows wrong keys. Raises ConfigError if the host is not an address of this
        machine, if it is off loopback and has no key, or if the port is taken; the error then names the process that
        holds the port.
        """
        address, family = resolve(host, host_setting)
        if not anywhere:
            refuse_open(host, host_setting, keys_setting)
        server = self._open()
        if family == socket.AF_INET6:
            server.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            self._start_zap(keys)
            server.setsockopt(zmq.CURVE_SERVER, 1)
            server.setsockopt(zmq.CURVE_SECRETKEY, keys.now().secret)
            server.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self._keys_asked_on, self._refused_note = port_setting, refused_note
        shown = f"[{address}]" if family == socket.AF_INET6 else address
        try:
            server.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise MachineLacks(
                    f"{port_setting}: {port} is taken by {port_holder(port) or 'another process'}; stop it or "
                    f"choose another {flag}",
                    field=port_setting,
                ) from None
            raise MachineLacks(
                f"{host_setting}: cannot listen on {host}:{port}: {error.strerror}; give an address of this machine "
                "and a port that this user may open",
                field=host_setting,
            ) from None
        bound = int(server.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        self._inbox.listen(bound)
        return bound

    def start(self, handler: Handler, frame_error: FrameErrorHandler) -> None:
        """Begin to handle messages."""
        self._handler = handler
        self._frame_error = frame_error
        self._reading = True
        self._wake_soon()

    def send(self, address: Address, reply: bytes) -> bool:
        """Queue a reply; it is dropped if the client has disconnected or does not read.

        Returns True if it was dropped because this client leaves too many bytes unread.
        """
        server = self._socket
        if server is None:
            return False
        tracked = len(reply) >= TRACKED_BYTES
        if tracked and not self._outbox.has_room(address, len(reply)):
            self.dropped_replies += 1
            return True
        if tracked:
            self._send_tracked(server, address, reply)
        else:
            self._send(server, address.routing_id, reply)
        if not (self._draining or self._looks):
            # Sending may consume the signal of an arrival, after which the descriptor would stay silent.
            self._looks = True
            self._loop.call_soon(self._look_again)
        return False

    def close(self) -> None:
        """Stop reading, give queued replies a moment to leave, free everything. Idempotent."""
        self._reading = False
        server, self._socket = self._socket, None
        if server is not None:
            self._loop.remove_reader(server.fileno())
            if self._watch is not None:
                self._loop.remove_reader(self._watch.fileno())
                server.monitor(None, 0)
                self._watch.close(linger=0)
                self._watch = None
            server.close(linger=200)
        if self._zap is not None:
            self._loop.remove_reader(self._zap.fileno())
            self._zap.close(linger=0)
            self._zap = None
        self._context.term()

    def _open(self) -> zmq.Socket[bytes]:
        server = self._context.socket(zmq.ROUTER)
        server.setsockopt(zmq.LINGER, 0)
        server.setsockopt(zmq.RCVHWM, 0)  # or libzmq would stop its input, see the module
        server.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        server.setsockopt(zmq.HANDSHAKE_IVL, round(patience(HANDSHAKE_MS)))
        server.setsockopt_string(zmq.ZAP_DOMAIN, KEYLESS_DOMAIN)
        server.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        server.copy_threshold = TRACKED_BYTES
        # A client that reconnects under the routing id of its dead connection takes it over.
        server.setsockopt(zmq.ROUTER_HANDOVER, 1)
        for option, value in KEEPALIVE.items():
            server.setsockopt(option, value)
        self._socket = server
        self._watch_connections(server)
        self._loop.add_reader(server.fileno(), self._drain)
        return server

    def _look_again(self) -> None:
        self._looks = False
        if self._socket is not None and int(self._socket.get(_EVENTS)) & _POLLIN:
            self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Receive messages that have arrived and handle some, within the limits of one wake."""
        self._again = False
        server, inbox = self._socket, self._inbox
        if server is None:
            return
        self._draining = True
        try:
            empty = self._take_in(server)
        finally:
            self._draining = False
        if self._socket is None:
            return  # a handler has closed this server
        inbox.woke(drained=empty)
        if not empty or inbox.has_dropped or (self._reading and inbox):
            self._wake_soon()

    def _take_in(self, server: zmq.Socket[bytes]) -> bool:
        """Handle waiting messages, then take messages from libzmq; returns True if libzmq has no more.

        A message that arrives while none waits is handled at once; others go to the inbox.  libzmq is asked last,
        because a reply may consume the signal of an arrival.
        """
        inbox = self._inbox
        if inbox.has_cut:
            self._see_connections()  # a new connection may have the descriptor of a cut one
        started_s = time.monotonic()
        n_handled = 0
        while self._reading and n_handled < MESSAGES_PER_WAKE and (message := inbox.next()) is not None:
            self._handle(server, message)
            n_handled += 1
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                n_handled = MESSAGES_PER_WAKE
        started_s = time.monotonic()
        for n_taken in range(TAKEN_PER_WAKE):
            # Most wakes bring few messages, after which asking costs a third of the exception.
            if server.closed or (0 < n_taken <= FEW and not int(server.get(_EVENTS)) & _POLLIN):
                return True  # a handler has closed this server, or no message is left
            try:
                first = server.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self.received += 1
            connection = int(first.get(_SRCFD))
            key = host = ""
            if self._zap is not None:
                key, host = str(first.get("User-Id")), str(first.get("Peer-Address"))
            frames = [first.bytes]
            more = first.more
            while more:
                part = server.recv(_NOBLOCK, copy=False)
                frames.append(part.bytes)
                more = part.more
            routing_id = frames.pop(0)
            if self._reading and n_handled < MESSAGES_PER_WAKE and not inbox:
                n_handled += 1
                if (heard := inbox.hears(connection, routing_id)) is not None:
                    self._handle(server, Message(heard, routing_id, frames, key, host))
            elif inbox.add(Message(connection, routing_id, frames, key, host)) is not None:
                self._say_cut("more of its messages waited than the bounds allow")
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                break
        return False

    def _handle(self, server: zmq.Socket[bytes], message: Message) -> None:
        handler, frame_error = self._handler, self._frame_error
        assert handler is not None and frame_error is not None, "reading before start"
        address, frames = Address(message.routing_id, message.key, message.host), message.frames
        refused = True
        if len(frames) == 1:
            refused = handler(address, frames[0]) is False
        else:
            delimiter = [b""] if len(frames) > 1 and not frames[0] else []
            reply = frame_error(address, len(frames))
            self._send(server, address.routing_id, *delimiter, reply)
        if self._inbox.handled(message, refused=refused):
            self._say_cut("its messages were invalid")

    def _say_cut(self, why: str) -> None:
        name = "" if self._socket is None else self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._log.repeated(logging.WARNING, f"cut {name} {why}", "connection_cut", port=name, why=why)

    def _send(self, server: zmq.Socket[bytes], *frames: bytes) -> None:
        # Not `send_multipart`, whose checks and conversions take as long as the sending itself.
        try:
            for frame in frames[:-1]:
                BareSocket.send(server, frame, _NOBLOCK_MORE)
            BareSocket.send(server, frames[-1], _NOBLOCK)
        except zmq.ZMQError:
            self.dropped_replies += 1

    def _send_tracked(self, server: zmq.Socket[bytes], address: Address, reply: bytes) -> None:
        try:
            tracker = server.send_multipart([address.routing_id, reply], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:
            self.dropped_replies += 1
        else:
            assert tracker is not None, "track=True gives a tracker"
            self._outbox.sent(address, len(reply), tracker)

    def _watch_connections(self, server: zmq.Socket[bytes]) -> None:
        """Have libzmq report connections that open, end or fail; failures are reported nowhere else."""
        endpoint = "inproc://connections"
        server.monitor(endpoint, OPENED_OR_ENDED | REFUSED_HANDSHAKES)
        watch = self._watch = self._context.socket(zmq.PAIR)
        watch.setsockopt(zmq.LINGER, 0)
        watch.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop libzmq's thread
        watch.connect(endpoint)
        self._loop.add_reader(watch.fileno(), self._see_connections)
        self._loop.call_soon(self._see_connections)

    def _see_connections(self) -> None:
        watch, inbox = self._watch, self._inbox
        if watch is None:
            return  # the server was closed before this turn of the loop
        while not watch.closed:
            try:
                told = parse_monitor_message(watch.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            match told["event"]:
                case zmq.Event.ACCEPTED:
                    inbox.opened(int(told["value"]))
                case zmq.Event.DISCONNECTED:
                    inbox.closed(int(told["value"]))
                case event if self._keys_asked_on:
                    self._handshake_refused(unknown=event == zmq.Event.HANDSHAKE_FAILED_AUTH)

    def _handshake_refused(self, *, unknown: bool) -> None:
        self.refused_handshakes += 1
        setting = self._keys_asked_on
        why = "unknown client key" if unknown else "no key, or a key of another cluster"
        note = {"note": self._refused_note} if self._refused_note else {}
        self._log.repeated(
            logging.WARNING, f"refused {setting} {why}", "connection_refused", port=setting, why=why, **note
        )

    def _start_zap(self, keys: Keys) -> None:
        """Answer libzmq's questions whether a client may connect (ZAP, RFC 27) by the list of client keys.

        The answer makes the client's key the user id of its connection, which libzmq attaches to each message.
        """
        self._keys = keys
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.bind(ZAP_ENDPOINT)
        self._loop.add_reader(self._zap.fileno(), self._answer_zap)
        self._loop.call_soon(self._answer_zap)

    def _answer_zap(self) -> None:
        while self._zap is not None and not self._zap.closed:
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # routing id, empty, version, request id, domain, address, identity, mechanism, credentials
            keyless = len(frames) > 4 and frames[4] == KEYLESS_DOMAIN.encode()
            curve = len(frames) == 9 and frames[7] == b"CURVE" and len(frames[8]) == KEY_BYTES
            user = z85.encode(frames[8]) if curve else b""
            known = curve and bool(self._keys.now().kinds_of(user.decode()))
            status = [b"200", b"OK"] if keyless or known else [b"400", b"unknown client key"]
            self._zap.send_multipart(
                [
                    *frames[:2],
                    b"1.0",
                    frames[3] if len(frames) > 3 else b"",
                    *status,
                    user if known else b"",
                    b"",
                ],
                zmq.NOBLOCK,
            )
