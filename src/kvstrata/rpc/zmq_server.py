"""The listening side of all ZMQ ports: ROUTER or PULL sockets on one asyncio loop, which pass frames on unread.

A server has up to two sockets: `local` (ipc, 0600) for processes of this host, and `remote` (tcp).  With `receive_only`
they are PULL sockets, which give no addresses and answer nothing.  A message is one frame; the handler gets (address,
frame) and answers through `send`, now or later.  Rules:

1. Nothing here blocks: reads and sends are NOBLOCK.  If a client does not read, so that its queue is full or has too
   many bytes (zmq_outbox.py), a reply is dropped; the client asks again and gets the same outcome.
2. One wake handles at most `MESSAGES_PER_WAKE` messages in at most `SECONDS_PER_WAKE`, then lets the loop do other
   work; connections take turns.
3. A message that does not have exactly one frame gets the handler's error reply.  If a message is above the size limit,
   libzmq closes its sender's connection; other connections are not affected.
4. Messages are taken from libzmq as they arrive, even while handling is paused, and wait in the inbox (zmq_inbox.py),
   which cuts a connection that exceeds its bounds.
5. No ZMTP heartbeats are sent: the protocols above decide which process is alive.  TCP's own keepalive ends connections
   whose other end has vanished.
6. Only ZMTP 3 is accepted, because messages of older versions do not tell on which connection they arrived.

Off loopback the tcp socket needs CURVE (RFC 26), with the server's secret key and the public keys of the clients that
may connect, or an explicit permission to do without.  libzmq refuses a client without the right keys before it can send
anything; the refusal is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.backend import Socket as BareSocket
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvstrata.config.private_dir import path_id
from kvstrata.errors import MachineLacks, Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.process.ports import port_holder, refuse_open, resolve
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES
from kvstrata.rpc.zmq_curve import CurveKeys
from kvstrata.rpc.zmq_inbox import Inbox, Message
from kvstrata.rpc.zmq_outbox import TRACKED_BYTES, Outbox

MESSAGES_PER_WAKE = 32
SECONDS_PER_WAKE = 0.002
# Plain ints: pyzmq converts its own constants anew in each call.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _SRCFD = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.SRCFD)
SEND_QUEUE = 2_048
"""Maximum number of replies that wait for one client: more than it can ask for at a time (rpc/session.py)."""
TAKEN_PER_WAKE = 512
"""Messages taken from libzmq in one wake; taking one costs a few microseconds."""
HANDSHAKE_MS = 5_000
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 30_000,
}
"""A tcp connection whose other end does not respond for 30 s is closed."""
CONNECTIONS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
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
    """Destination of a reply: the socket, and the client's routing id on it. Only `key` proves who asked."""

    local: bool
    routing_id: bytes
    key: str = ""
    """Public key (Z85) of the connection on which the message arrived; empty on sockets without CURVE."""
    host: str = ""
    """IP address of that connection's other end; empty on sockets without CURVE."""


Handler = Callable[[Address, Any], bool | None]
"""Gets one frame (see `lent_from_bytes`); answers through `send`, now or later. False: it has refused the frame."""
FrameErrorHandler = Callable[[Address, int], bytes]
"""Gets the number of frames of a message that does not have exactly one; returns the error reply."""


class ZmqServer:
    """The two sockets of one server. Everything runs on the thread of `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        receive_only: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        lent_from_bytes: int = sys.maxsize,
    ) -> None:
        """`lent_from_bytes`: a frame at least so long is handed over as libzmq's own memory (a read-only memoryview),
        because copying megabytes would hold up the loop for a frame that may be refused."""
        self._lent_from_bytes = lent_from_bytes
        self._loop = loop
        self._receive_only = receive_only
        self._max_message_bytes = max_message_bytes
        self._handler: Handler | None = None
        self._frame_error: FrameErrorHandler | None = None
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[bool, zmq.Socket[bytes]] = {}
        self._inboxes: dict[bool, Inbox] = {}
        self._outbox = Outbox()
        self._watches: dict[bool, zmq.Socket[bytes]] = {}
        """Sockets on which libzmq reports connections."""
        self._zap: zmq.Socket[bytes] | None = None
        self._clients: Callable[[], frozenset[bytes] | None] = frozenset
        """Public keys (Z85) of the clients that may connect; None: any may."""
        self._ipc_path: Path | None = None
        self._ipc_id: tuple[int, int] | None = None
        self._again: set[bool] = set()
        self._reading = False
        self._draining = False
        self._draining_local = False
        self._sent_to: set[bool] = set()
        """Sockets to which a handler sent while another socket was being read."""
        self.received_count = 0
        self.dropped_replies_count = 0
        self.refused_handshakes_count = 0
        """Connections that ended before they showed the right keys."""
        self._keys_asked_on = ""
        """Setting of the port that asks for keys; empty if no port does."""
        self._refused_note = ""
        self._log = EventLog("zmq")

    def bind_ipc(self, path: Path) -> None:
        """Listen on a unix socket that only this user can open, instead of the one before; connections stay.

        Replaces the file that a dead server left behind.  Raises Unavailable.
        """
        server = self._sockets.get(True) or self._router(local=True)
        if self._ipc_path is not None:
            server.unbind(f"ipc://{self._ipc_path}")
            self._ipc_path = None
        path.unlink(missing_ok=True)
        old_umask = os.umask(0o177)
        try:
            server.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise Unavailable(
                f"socket_dir: cannot listen on {path}: {error.strerror}", field="socket_dir"
            ) from None
        finally:
            os.umask(old_umask)
        path.chmod(0o600)
        self._ipc_path, self._ipc_id = path, path_id(path)
        self._inboxes[True].listen(str(path))

    def listens(self) -> bool:
        """Whether the unix socket at its path is ours, and not removed or replaced."""
        return self._ipc_path is not None and path_id(self._ipc_path) == self._ipc_id

    def bind_tcp(
        self,
        host: str,
        port: int,
        *,
        curve: CurveKeys | None,
        insecure: bool,
        clients: Callable[[], frozenset[bytes] | None] | None = None,
        max_keyless_bytes: int | None = None,
        host_setting: str = "host",
        port_setting: str = "port",
        flag: str = "--port",
        keys_setting: str = "security.curve_secret_file (--curve-secret-file)",
        refused_note: str = "",
    ) -> int:
        """Listen on host:port (0 takes a free port); returns the port.  Names of settings and flag are for errors.
        `clients()`, called for each new connection, returns the keys that may connect now; default: those of `curve`.
        `refused_note`: what the log advises when a connection shows wrong keys.
        A message longer than `max_keyless_bytes` closes its connection, if no keys are asked for.
        Raises ConfigError if the host is not an address of this machine, if it is off loopback and has no key, or if
        the port is taken; the error then names the process that holds the port.
        """
        address, family = resolve(host, host_setting)
        guarded = curve is not None and curve.clients is not None
        if not guarded and not insecure:
            refuse_open(host, host_setting, keys_setting)
        server = self._router(local=False)
        if family == socket.AF_INET6:
            server.setsockopt(zmq.IPV6, 1)
        if curve is None and max_keyless_bytes is not None:
            server.setsockopt(zmq.MAXMSGSIZE, max_keyless_bytes)
        if curve is not None:
            self._start_zap(clients or (lambda: curve.clients))
            server.setsockopt(zmq.CURVE_SERVER, 1)
            server.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
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
        self._inboxes[False].listen(bound)
        return bound

    def start(self, handler: Handler, frame_error: FrameErrorHandler) -> None:
        """Begin to handle messages."""
        self._handler = handler
        self._frame_error = frame_error
        self._reading = True
        for local in self._sockets:
            self._wake_soon(local)

    def pause(self) -> None:
        """Handle nothing until `resume`."""
        self._reading = False

    def resume(self) -> None:
        """Handle messages again."""
        if self._handler is not None and self._frame_error is not None:
            self.start(self._handler, self._frame_error)

    def send(self, address: Address, reply: bytes) -> bool:
        """Queue a reply; it is dropped if the client has disconnected or does not read.

        Returns True if it was dropped because this client leaves too many bytes unread.
        """
        server = self._sockets.get(address.local)
        if server is None or server.closed:
            return False
        tracked = len(reply) >= TRACKED_BYTES
        if tracked and not self._outbox.has_room(address, len(reply)):
            self.dropped_replies_count += 1
            return True
        if tracked:
            self._send_tracked(server, address, reply)
        else:
            self._send(server, address.routing_id, reply)
        if self._draining:
            if address.local is not self._draining_local:
                self._sent_to.add(address.local)
        else:
            # Sending may consume the signal of an arrival, after which the descriptor would stay silent.
            self._look_again(address.local)
        return False

    def stats(self) -> dict[str, int]:
        """Counts for status and metrics."""
        return {
            "received": self.received_count,
            "dropped_replies": self.dropped_replies_count,
            "unread_reply_bytes": self._outbox.look(),
            "refused_handshakes": self.refused_handshakes_count,
            "connections": sum(inbox.connections_count for inbox in self._inboxes.values()),
            "cut_connections": sum(inbox.cut_count for inbox in self._inboxes.values()),
        }

    def close(self) -> None:
        """Stop reading, give queued replies a moment to leave, free everything. Idempotent."""
        self._reading = False
        for local, watch in self._watches.items():
            self._loop.remove_reader(watch.fileno())
            self._sockets[local].monitor(None, 0)
            watch.close(linger=0)
        self._watches.clear()
        for server in self._sockets.values():
            self._loop.remove_reader(server.fileno())
            server.close(linger=200)
        if self._zap is not None:
            self._loop.remove_reader(self._zap.fileno())
            self._zap.close(linger=0)
            self._zap = None
        self._sockets.clear()
        self._context.term()
        if self._ipc_path is not None:
            self._ipc_path.unlink(missing_ok=True)

    def _router(self, *, local: bool) -> zmq.Socket[bytes]:
        server = self._context.socket(zmq.PULL if self._receive_only else zmq.ROUTER)
        server.setsockopt(zmq.LINGER, 0)
        server.setsockopt(zmq.RCVHWM, 0)  # or libzmq would stop its input, see zmq_inbox.py
        server.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        server.setsockopt(zmq.HANDSHAKE_IVL, round(patience(HANDSHAKE_MS)))
        server.setsockopt_string(zmq.ZAP_DOMAIN, KEYLESS_DOMAIN)
        if not self._receive_only:
            server.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            server.copy_threshold = TRACKED_BYTES
            # A client that reconnects under the routing id of its dead connection takes it over.
            server.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if not local:
            for option, value in KEEPALIVE.items():
                server.setsockopt(option, value)
        self._sockets[local] = server
        self._inboxes[local] = Inbox(self._max_message_bytes, lambda: self._see_connections(local))
        self._watch_connections(server, local)
        self._loop.add_reader(server.fileno(), self._drain, local)
        return server

    def _look_again(self, local: bool) -> None:
        if int(self._sockets[local].getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake_soon(local)

    def _wake_soon(self, local: bool) -> None:
        if local not in self._again:
            self._again.add(local)
            self._loop.call_soon(self._drain, local)

    def _drain(self, local: bool) -> None:
        """Take in what has arrived and handle some of it, within the bounds of one wake."""
        self._again.discard(local)
        server = self._sockets.get(local)
        if server is None:
            return
        self._draining, self._draining_local = True, local
        try:
            empty = self._take_in(server, local)
        finally:
            self._draining = False
        if not self._sockets:
            return  # a handler has closed this server
        inbox = self._inboxes[local]
        inbox.woke(drained=empty)
        if not empty or inbox.has_dropped or (self._reading and inbox):
            self._wake_soon(local)
        sent_to, self._sent_to = self._sent_to, set()
        for other in sent_to:
            self._look_again(other)

    def _take_in(self, server: zmq.Socket[bytes], local: bool) -> bool:
        """Handle waiting messages, then take messages from libzmq; returns True if libzmq has no more.

        A message that arrives while none waits is handled at once; others go to the inbox.  libzmq is asked last,
        because a reply may consume the signal of an arrival.
        """
        inbox = self._inboxes[local]
        if inbox.has_cut:
            self._see_connections(local)  # a new connection may have the descriptor of a cut one
        started_s = time.monotonic()
        n_handled = 0
        while self._reading and n_handled < MESSAGES_PER_WAKE and (message := inbox.next()) is not None:
            self._handle(server, local, message)
            n_handled += 1
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                n_handled = MESSAGES_PER_WAKE
        started_s = time.monotonic()
        for n_taken in range(TAKEN_PER_WAKE):
            # Most wakes bring one message, after which asking costs a third of the exception.
            if server.closed or (n_taken == 1 and not int(server.get(_EVENTS)) & _POLLIN):
                return True  # a handler has closed this server, or no message is left
            try:
                first = server.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self.received_count += 1
            connection = int(first.get(_SRCFD))
            key = host = ""
            if self._zap is not None and not local:
                key, host = str(first.get("User-Id")), str(first.get("Peer-Address"))
            frames: list[bytes | memoryview] = [first.bytes]
            more = first.more
            while more:
                part = server.recv(_NOBLOCK, copy=False)
                frames.append(part.bytes if len(part) < self._lent_from_bytes else part.buffer)
                more = part.more
            routing_id = b"" if self._receive_only else bytes(frames.pop(0))
            if self._reading and n_handled < MESSAGES_PER_WAKE and not inbox:
                n_handled += 1
                if (heard := inbox.hears(connection, routing_id)) is not None:
                    self._handle(server, local, Message(heard, routing_id, frames, key, host))
            elif inbox.add(Message(connection, routing_id, frames, key, host)) is not None:
                self._say_cut(local, "more of its messages waited than the bounds allow")
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                break
        return False

    def _handle(self, server: zmq.Socket[bytes], local: bool, message: Message) -> None:
        handler, frame_error = self._handler, self._frame_error
        assert handler is not None and frame_error is not None, "reading before start"
        address, frames = Address(local, message.routing_id, message.key, message.host), message.frames
        refused = True
        if len(frames) == 1:
            refused = handler(address, frames[0]) is False
        else:
            delimiter = [b""] if len(frames) > 1 and not frames[0] else []
            reply = frame_error(address, len(frames))
            if not self._receive_only:
                self._send(server, address.routing_id, *delimiter, reply)
        if self._inboxes[local].handled(message, refused=refused):
            self._say_cut(local, "its messages were none of the protocol")

    def _say_cut(self, local: bool, why: str) -> None:
        name = self._name(local)
        self._log.repeated(logging.WARNING, f"cut {name} {why}", "connection_cut", port=name, why=why)

    def _name(self, local: bool) -> str:
        return str(self._ipc_path) if local else self._sockets[local].getsockopt_string(zmq.LAST_ENDPOINT)

    def _send(self, server: zmq.Socket[bytes], *frames: bytes) -> None:
        # Not `send_multipart`, whose checks and conversions take as long as the sending itself.
        try:
            for frame in frames[:-1]:
                BareSocket.send(server, frame, _NOBLOCK_MORE)
            BareSocket.send(server, frames[-1], _NOBLOCK)
        except zmq.ZMQError:
            self.dropped_replies_count += 1

    def _send_tracked(self, server: zmq.Socket[bytes], address: Address, reply: bytes) -> None:
        try:
            tracker = server.send_multipart([address.routing_id, reply], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:
            self.dropped_replies_count += 1
        else:
            assert tracker is not None, "track=True gives a tracker"
            self._outbox.sent(address, len(reply), tracker)

    def _watch_connections(self, server: zmq.Socket[bytes], local: bool) -> None:
        """Have libzmq report connections that open, end or fail; failures are reported nowhere else."""
        endpoint = f"inproc://connections-{local}"
        server.monitor(endpoint, CONNECTIONS | REFUSED_HANDSHAKES)
        watch = self._watches[local] = self._context.socket(zmq.PAIR)
        watch.setsockopt(zmq.LINGER, 0)
        watch.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop libzmq's thread
        watch.connect(endpoint)
        self._loop.add_reader(watch.fileno(), self._see_connections, local)
        self._loop.call_soon(self._see_connections, local)

    def _see_connections(self, local: bool) -> None:
        watch, inbox = self._watches.get(local), self._inboxes.get(local)
        if watch is None or inbox is None:
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
                case event if self._keys_asked_on and not local:
                    self._handshake_refused(unknown=event == zmq.Event.HANDSHAKE_FAILED_AUTH)

    def _handshake_refused(self, *, unknown: bool) -> None:
        self.refused_handshakes_count += 1
        setting = self._keys_asked_on
        why = "unknown client key" if unknown else "no key, or a key of another cluster"
        note = {"note": self._refused_note} if self._refused_note else {}
        self._log.repeated(
            logging.WARNING, f"refused {setting} {why}", "connection_refused", port=setting, why=why, **note
        )

    def _start_zap(self, clients: Callable[[], frozenset[bytes] | None]) -> None:
        """Answer libzmq's questions whether a client may connect (ZAP, RFC 27) by the list of client keys.

        The answer makes the client's key the user id of its connection, which libzmq tells with each message.
        """
        self._clients = clients
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
            clients = self._clients() if curve else frozenset()
            known = curve and (clients is None or user in clients)
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
