"""Ports that others send to: ZMQ ROUTER or PULL sockets on one asyncio loop. They know nothing of what they carry.

Two sockets: `local` (ipc, 0600) for processes of this host and `remote` (tcp).  With `receive_only` they are PULL:
there is no answer, and no address.  A message is one frame; the handler gets (address, frame) and answers through
`send`, now or later.  Rules:

1. Nothing here blocks: reads and sends are NOBLOCK; a reply to a peer that does not read is dropped when its
   queue is full or its bytes are too many (zmq_outbox.py); the peer asks again and gets the same outcome.
2. One wake handles at most `MESSAGES_PER_WAKE` messages and `SECONDS_PER_WAKE`, then lets the loop do other
   work; connections are served in turn.
3. A message with another number of frames gets the handler's error reply; a message above the size limit
   costs its sender the connection (libzmq closes it) and nobody else anything.
4. What arrives is taken from libzmq at once, also while handling is paused, and waits in the inbox (zmq_inbox.py):
   a connection that makes more wait than its bound is cut.
5. No ZMTP heartbeats: who is alive is the business of the protocols above.  TCP's own keepalive ends connections
   whose other end is gone without a word.
6. Only ZMTP 3 is spoken: older peers' messages do not tell which connection they came on.

Off loopback the tcp socket needs CURVE (RFC 26): the server's secret key and the public keys of the clients
that may connect, or an explicit permission to go without.  Who comes without the right keys is refused by libzmq
before it can send anything; that is counted, and said.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError, Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.process.ports import port_holder
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES
from kvstrata.rpc.zmq_inbox import Inbox, Message
from kvstrata.rpc.zmq_outbox import TRACKED_BYTES, Outbox

MESSAGES_PER_WAKE = 32
SECONDS_PER_WAKE = 0.002
SEND_QUEUE = 2_048
"""Replies waiting for one peer: more than it can have asked for at a time (rpc/session.py)."""
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
"""A tcp connection whose other end answers nothing for 30 s is closed."""
CONNECTIONS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
REFUSED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "kvstrata"
KEYLESS_DOMAIN = "kvstrata-keyless"
"""Of sockets without keys.  A socket that has a domain refuses ZMTP 1 and 2."""
Z85_CHARS = 40


class Address(NamedTuple):
    """Where a reply goes: which socket, and the peer's routing id on it. Says nothing about who asked."""

    local: bool
    routing_id: bytes


class CurveKeys(NamedTuple):
    """The server's secret key and the clients that may connect, all in Z85."""

    secret: bytes
    clients: frozenset[bytes]


Handler = Callable[[Address, bytes], None]
"""Gets one frame; answers through `ZmqServer.send`, now or later."""
FrameErrorHandler = Callable[[Address, int], bytes]
"""Gets the number of frames of a message that has not exactly one; returns the error reply."""


class ZmqServer:
    """Both sockets. Everything runs on `loop`'s thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        receive_only: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
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
        """Where libzmq tells of connections."""
        self._zap: zmq.Socket[bytes] | None = None
        self._clients: frozenset[bytes] = frozenset()
        self._ipc_path: Path | None = None
        self._again: set[bool] = set()
        self._reading = False
        self._draining = False
        self._draining_local = False
        self._sent_to: set[bool] = set()
        """Sockets other than the one being read to which a handler sent."""
        self.received_count = 0
        self.dropped_replies_count = 0
        self.refused_handshakes_count = 0
        """Connections that broke off before they had shown the right keys."""
        self._keys_asked_on = ""
        """The setting of the port that asks for keys; empty where none does."""
        self._log = EventLog("zmq")

    def bind_ipc(self, path: Path) -> None:
        """Listen on a unix socket that only this user can open. A dead server's leftover file is replaced."""
        server = self._router(local=True)
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
        self._ipc_path = path
        self._inboxes[True].listen(str(path))

    def bind_tcp(
        self,
        host: str,
        port: int,
        *,
        curve: CurveKeys | None,
        insecure: bool,
        host_setting: str = "host",
        port_setting: str = "port",
        flag: str = "--port",
        keys_setting: str = "security.curve_secret_file (--curve-secret-file)",
    ) -> int:
        """Listen on host:port (0 takes a free one); returns the port.  The settings and the flag are for messages.

        Raises ConfigError when the host is no address of this machine, is not loopback and has no key, or
        the port is taken (naming who holds it).
        """
        address, family = resolve(host, host_setting)
        if not ipaddress.ip_address(address).is_loopback and curve is None and not insecure:
            raise ConfigError(
                f"{host_setting}: {host} is reachable from other machines; give {keys_setting}, "
                "listen on localhost, or allow it with --insecure",
                field=host_setting,
            )
        server = self._router(local=False)
        if family == socket.AF_INET6:
            server.setsockopt(zmq.IPV6, 1)
        if curve is not None:
            self._start_zap(curve)
            server.setsockopt(zmq.CURVE_SERVER, 1)
            server.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
            server.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self._keys_asked_on = port_setting
        shown = f"[{address}]" if family == socket.AF_INET6 else address
        try:
            server.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"{port_setting}: {port} is taken by {port_holder(port) or 'another process'}; stop it or "
                    f"choose another {flag}",
                    field=port_setting,
                ) from None
            raise ConfigError(
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
        """Queue a reply; dropped when the peer is gone or does not read.

        True: it was dropped, because this peer leaves too many bytes unread.
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
            self._send(server, [address.routing_id, reply])
        if self._draining:
            if address.local is not self._draining_local:
                self._sent_to.add(address.local)
        else:
            # A send may take the signal that messages have arrived; the descriptor would then stay silent.
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
        server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        server.setsockopt_string(zmq.ZAP_DOMAIN, KEYLESS_DOMAIN)
        if not self._receive_only:
            server.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            server.copy_threshold = TRACKED_BYTES
            # A client that comes back under the routing id of its dead connection takes the place over.
            server.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if not local:
            for option, value in KEEPALIVE.items():
                server.setsockopt(option, value)
        self._sockets[local] = server
        self._inboxes[local] = Inbox(self._max_message_bytes)
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
            return  # a handler has closed this
        if not empty or (self._reading and self._inboxes[local]):
            self._wake_soon(local)
        sent_to, self._sent_to = self._sent_to, set()
        for other in sent_to:
            self._look_again(other)

    def _take_in(self, server: zmq.Socket[bytes], local: bool) -> bool:
        """Handle messages that wait, then take what libzmq has; True when it has nothing more.

        What comes while nothing waits is handled at once, the rest goes to the inbox.  libzmq is asked last, since a
        reply may take the signal that more has arrived.
        """
        inbox = self._inboxes[local]
        if inbox.has_cut:
            self._see_connections(local)  # a new one may have the descriptor of one that was cut
        started_s = time.monotonic()
        n_handled = 0
        while self._reading and n_handled < MESSAGES_PER_WAKE and (message := inbox.next()) is not None:
            self._handle(server, Address(local, message.routing_id), message.frames)
            n_handled += 1
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                n_handled = MESSAGES_PER_WAKE
        started_s = time.monotonic()
        for _ in range(TAKEN_PER_WAKE):
            if server.closed:
                return True  # by a handler
            try:
                first = server.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self.received_count += 1
            connection = int(first.get(zmq.SRCFD))
            frames = [first.bytes]
            more = first.more
            while more:
                frames.append(server.recv(zmq.NOBLOCK))
                more = bool(server.getsockopt(zmq.RCVMORE))
            routing_id = b"" if self._receive_only else frames.pop(0)
            if self._reading and n_handled < MESSAGES_PER_WAKE and not inbox:
                n_handled += 1
                if inbox.hears(connection):
                    self._handle(server, Address(local, routing_id), frames)
            elif inbox.add(Message(connection, routing_id, frames)) is not None:
                self._log.repeated(
                    logging.WARNING,
                    f"cut {self._name(local)}",
                    "connection_cut",
                    port=self._name(local),
                    why="it sent more than the bounds let wait",
                )
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                break
        return False

    def _handle(self, server: zmq.Socket[bytes], address: Address, frames: list[bytes]) -> None:
        handler, frame_error = self._handler, self._frame_error
        assert handler is not None and frame_error is not None, "reading before start"
        if len(frames) == 1:
            handler(address, frames[0])
            return
        delimiter = [b""] if len(frames) > 1 and not frames[0] else []
        reply = frame_error(address, len(frames))
        if not self._receive_only:
            self._send(server, [address.routing_id, *delimiter, reply])

    def _name(self, local: bool) -> str:
        return str(self._ipc_path) if local else self._sockets[local].getsockopt_string(zmq.LAST_ENDPOINT)

    def _send(self, server: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            server.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped_replies_count += 1

    def _send_tracked(self, server: zmq.Socket[bytes], address: Address, reply: bytes) -> None:
        try:
            tracker = server.send_multipart([address.routing_id, reply], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:
            self.dropped_replies_count += 1
        else:
            assert tracker is not None, "asked for with track"
            self._outbox.sent(address, len(reply), tracker)

    def _watch_connections(self, server: zmq.Socket[bytes], local: bool) -> None:
        """libzmq tells of connections that open, end, or never came to be; nobody else hears of the last."""
        endpoint = f"inproc://connections-{local}"
        server.monitor(endpoint, CONNECTIONS | REFUSED_HANDSHAKES)
        watch = self._watches[local] = self._context.socket(zmq.PAIR)
        watch.setsockopt(zmq.LINGER, 0)
        watch.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop libzmq's thread
        watch.connect(endpoint)
        self._loop.add_reader(watch.fileno(), self._see_connections, local)
        self._loop.call_soon(self._see_connections, local)

    def _see_connections(self, local: bool) -> None:
        watch, inbox = self._watches[local], self._inboxes[local]
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
        why = "unknown client key" if unknown else "no key, or one of another cluster"
        self._log.repeated(
            logging.WARNING, f"refused {setting} {why}", "connection_refused", port=setting, why=why
        )

    def _start_zap(self, curve: CurveKeys) -> None:
        """Answer libzmq's question who may connect (RFC 27) from the list of client keys."""
        self._clients = frozenset(z85.decode(key) for key in curve.clients)
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
            allowed = keyless or (len(frames) == 9 and frames[7] == b"CURVE" and frames[8] in self._clients)
            status = [b"200", b"OK"] if allowed else [b"400", b"unknown client key"]
            self._zap.send_multipart(
                [*frames[:2], b"1.0", frames[3] if len(frames) > 3 else b"", *status, b"", b""], zmq.NOBLOCK
            )


def resolve(host: str, setting: str = "host") -> tuple[str, socket.AddressFamily]:
    """The numeric address of a host name, IPv4 first. Raises ConfigError."""
    if host in ("*", ""):
        return "0.0.0.0", socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{setting}: {host!r} is no address: {error}", field=setting) from None
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(where[0]).partition("%")[0], family


class ClusterKeys(NamedTuple):
    """Keys of one member of a cluster, all in Z85: its own, whom it connects to, and who may connect to it."""

    secret: bytes
    server: bytes
    """Public key of the processes that it asks."""
    clients: frozenset[bytes]

    @property
    def curve(self) -> CurveKeys:
        """For the sockets that it is asked on."""
        return CurveKeys(self.secret, self.clients)


def read_curve_file(path: str) -> CurveKeys:
    """Keys from a file with one line `secret KEY` and a line `client KEY` per client.

    Lines that begin with `#` are comments.  Raises ConfigError, also when others can read the file.
    """
    field = "security.curve_secret_file"
    keys = _key_lines(path, field, ("secret", "client"))
    if not keys["client"]:
        raise ConfigError(
            f"{field}: {path}: has no line `client KEY`, so nobody could connect; add clients' public keys",
            field=field,
        )
    return CurveKeys(keys["secret"][-1], frozenset(keys["client"]))


def read_cluster_keys(path: str, field: str) -> ClusterKeys:
    """Keys of a cluster's member: `secret KEY`, and where others differ `server KEY` and `client KEY` lines.

    With the secret alone all members share it: each connects to, and is connected to by, whoever has it too.
    Raises ConfigError naming `field`.
    """
    keys = _key_lines(path, field, ("secret", "server", "client"))
    secret = keys["secret"][-1]
    try:
        own = zmq.curve_public(secret)
    except (zmq.ZMQError, ValueError):
        raise ConfigError(
            f"{field}: {path}: the secret is no CURVE key; make one with zmq.curve_keypair()", field=field
        ) from None
    return ClusterKeys(secret, (keys["server"] or [own])[-1], frozenset(keys["client"] or [own]))


def _key_lines(path: str, field: str, words: tuple[str, ...]) -> dict[str, list[bytes]]:
    """The keys after each word, in order; at least one `secret`. Raises ConfigError."""
    keys: dict[str, list[bytes]] = {word: [] for word in words}
    for number, line in enumerate(read_private_file(path, field).splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):  # within a line, # is a character of Z85
            continue
        if len(parts) != 2 or parts[0] not in keys or len(parts[1]) != Z85_CHARS:
            shapes = " or ".join(f"`{word} KEY`" for word in words)
            raise ConfigError(
                f"{field}: {path}: line {number}: write {shapes} with a Z85 key of {Z85_CHARS} characters",
                field=field,
            )
        keys[parts[0]].append(parts[1].encode())
    if not keys["secret"]:
        raise ConfigError(f"{field}: {path}: has no line `secret KEY`", field=field)
    return keys
