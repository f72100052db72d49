"""The server's side of the single connection of each process on this host: attach, then requests.

A unix stream socket that speaks ZMTP (session/zmtp.py), non-blocking, on the server's event loop.  The first message of
a connection decides what it is:

    process  ── request + pidfd ──▶          ── "locked" ──▶          ── requests ──▶   ── "bye" ──▶
    server   ◀── reply + fds ──              ◀── "ok" ──              ◀── replies ──    ◀── "ok" ──  (the row is free)

    any other client  ── requests ──▶  ◀── replies ──      (without a row: see requests/plain.py)

The states of a connection, each of which may end with CLOSED:

    CONNECTED ─┬─ the row is granted ─▶ CLAIMED ── "locked" ─▶ ATTACHED ── "bye" ─▶ LEAVING
               └─ the first message is a request ─▶ PLAIN

A message that is invalid in the connection's state gets an error reply, and the connection is closed.  processes.py
decides what a closed connection means for the session.  The kernel authenticates the sender (SO_PEERCRED), so messages
carry no proof of identity.

Invariants:

1. A bad process harms only itself.  At most `pending` handshakes are unfinished (beyond that the oldest is closed),
   each for at most `handshake_s`; at most `plain` connections without a row are open (beyond that the one silent
   longest is closed).  Every descriptor but the pidfd is closed at once.
2. A frame has at most MAX_UNATTACHED_BYTES, or MAX_MESSAGE_BYTES once its process is attached.  Incomplete frames have
   at most MAX_PARTIAL_BYTES together; beyond that the connection with the longest one is closed.
3. A connection that leaves MAX_UNSENT_BYTES of replies unread is closed, as is the one that makes all of them together
   exceed MAX_ALL_UNSENT_BYTES, and one that sent MAX_REFUSED invalid messages in a row.
4. A turn of the loop handles at most MESSAGES_PER_TURN messages in about SECONDS_PER_TURN; connections take turns, and
   one whose messages wait is not read.

Not here: the pool, the segment and the socket directory's lock (see `segment`) belong to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import logging
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata import failpoints
from kvstrata.config.private_dir import path_id
from kvstrata.errors import BadRequest, DeadlineExceeded, InternalError, KvstrataError, NotPermitted, Refused
from kvstrata.memory import linux
from kvstrata.memory.segment import Descriptors
from kvstrata.native.core import Pool
from kvstrata.observability.logging import Thinning
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.patience import patience
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES, AttachReply
from kvstrata.server.attach_checks import MAX_ATTACH_BYTES, GaveUp, parse_request, take_pidfd
from kvstrata.server.processes import Process, Processes, RowState
from kvstrata.session.zmtp import Connection, NotZmtp, WithFds

if TYPE_CHECKING:
    from kvstrata.server.requests.requests import Requests

_log = logging.getLogger(__name__)

LOCKED, BYE, OK = b"locked", b"bye", b"ok"

_MAX_FDS = 8
"""Maximum number of descriptors received with one message, to close them; the kernel drops any further ones."""
_BACKLOG = 128
MAX_UNATTACHED_BYTES = MAX_ATTACH_BYTES
"""Maximum length of a frame whose sender is not attached."""
MAX_PARTIAL_BYTES = 256 << 20
MAX_UNSENT_BYTES = 32 << 20
MAX_ALL_UNSENT_BYTES = 256 << 20
MAX_REFUSED = 16
MESSAGES_PER_TURN = 32
SECONDS_PER_TURN = 0.002
_ACCEPTS_PER_TURN = 16
_ACCEPT_PAUSE_S = 0.2
HANDSHAKE_S = 5.0
MAX_PENDING = 64
MAX_PLAIN = 64


class ConnectionState(enum.Enum):
    """The progress of a process on one connection."""

    CONNECTED = enum.auto()
    """No message has arrived."""
    CLAIMED = enum.auto()
    """The process has got a row and the descriptors, and must now lock its byte."""
    ATTACHED = enum.auto()
    """Its byte is locked, and the server knows its session: requests are answered."""
    PLAIN = enum.auto()
    """Its first message was a request, so it has no row; only requests that need none are answered."""
    LEAVING = enum.auto()
    """The process has said goodbye and waits until its row has ended."""
    CLOSED = enum.auto()
    """Either side has closed the connection."""


class Line(msgspec.Struct, eq=False):
    """One connection. Hashed by identity. To the rest of the server it is the address of a reply."""

    link: Connection
    server: AttachServer
    credentials: linux.SocketCredentials
    state: ConnectionState = ConnectionState.CONNECTED
    process: Process | None = None
    """The process at its other end, while it is CLAIMED or ATTACHED."""
    fds: list[int] = []
    """Descriptors that came with an incomplete message."""
    plain: dict[int, Any] = {}
    """Identities of a client without a row, by number (requests/plain.py)."""
    messages: deque[bytes] = msgspec.field(default_factory=deque)
    """Messages that wait to be handled; until all are handled, the connection is not read."""
    refused_count: int = 0
    """Number of its latest messages in a row that were not valid requests."""
    partial_bytes: int = 0
    unsent_bytes: int = 0
    """Its unread replies as last added to the server's totals."""

    def send(self, message: bytes) -> None:
        """Send a message; a connection that leaves too much unread is closed. No effect on a closed connection."""
        if self.state is not ConnectionState.CLOSED:
            self.server.send(self, message)

    def let_go(self, *, ok: bool) -> None:
        """Close the connection, which the row does not need any more. `ok`: first confirm the process's goodbye."""
        if self.state is ConnectionState.CLOSED:
            return
        if ok:
            with contextlib.suppress(OSError):
                self.link.send(OK)
        self.server.drop(self)


class Traffic(Numbers):
    """The connections and messages of all processes."""

    received = counter("Messages received.", name="received_frames")
    unread_reply_bytes = gauge("Bytes of replies that do not fit the clients' sockets.")
    connections = gauge("Open connections.", lambda self: len(self._connections))
    cut_connections = counter(
        "Connections closed: over the limit, with too many unread bytes, invalid ZMTP, or no requests."
    )

    def __init__(self, connections: set[Line]) -> None:
        self._connections = connections


class AttachServer(Numbers):
    """Listens on `path`, and owns the connections of attached processes and their rows.

    `pool` and `descriptors` must outlive this object.  The caller holds the lock of the socket directory, so an
    existing socket at `path` is a leftover.  All methods belong to the event loop.
    """

    pending = gauge("Handshakes in progress.", lambda self: len(self._pending))
    old_rows = gauge(
        "Rows of the previous server whose process has neither ended nor re-attached.",
        lambda self: self._processes.count(RowState.OLD, RowState.RECLAIMED),
    )
    stranded_sessions = gauge(
        "Sessions that ended while no server was watching and whose device may still write into L1.",
        lambda self: self._processes.count(RowState.STRANDED),
        name="stranded",
        key="stranded",
    )
    stranded_bytes = gauge(
        "Bytes of L1 kept in quarantine for stranded sessions until an admin clears them.",
        lambda self: sum(one.kept_bytes for one in self._processes.stranded()),
    )
    refused = counter("Attaches refused, by code; `gave_up`: the process ended or hung up first.", "code")

    def __init__(
        self,
        path: Path,
        pool: Pool,
        descriptors: Descriptors,
        processes: Processes,
        *,
        instance_id: str = "",
        max_reserved_bytes: int = 0,
    ) -> None:
        self._path = path
        self._max_reserved_bytes = max_reserved_bytes
        self._processes = processes
        self._instance_id = instance_id
        self._handshake_s = patience(HANDSHAKE_S)
        self._pool = pool
        self._fds = descriptors
        self._lock_file = linux.file_id(descriptors.sessions_lock)
        self._listener: socket.socket | None = None
        self._path_id: tuple[int, int] | None = None
        """Identity of our socket's file at `path`; None if that file is not ours."""
        self._connections: set[Line] = set()
        self._pending: dict[Line, asyncio.TimerHandle] = {}
        """Unfinished handshakes in order of arrival, each with its timeout."""
        self._plain: dict[Line, None] = {}
        """Connections without a row, ordered by their latest message."""
        self._requests: Requests
        self._waiting: deque[Line] = deque()
        """Connections whose messages wait for a turn."""
        self._turn_is_due = False
        self._handled_count = 0
        """Messages handled since the loop's last turn."""
        self._partial_bytes = 0
        self.traffic = Traffic(self._connections)
        self._thinning = Thinning()

    # --- life --------------------------------------------------------------------------------------------

    async def start(self, requests: Requests) -> None:
        """End the rows of processes that died before this server started, then listen; `requests` answers."""
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        await self._processes.start(requests, self._fds.sessions_lock)
        self.listen(self._path)

    def listens(self) -> bool:
        """Whether the socket at the path is ours, and not removed or replaced."""
        return self._listener is not None and path_id(self._path) == self._path_id

    def listen(self, path: Path) -> None:
        """Listen at this path from now on; existing connections stay open. Raises OSError."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before bind, so that the path never has another mode
            listener.bind(os.fspath(path))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        self._listener, self._path, self._path_id = listener, path, path_id(path)
        self._loop.add_reader(listener.fileno(), self._accept)

    async def stop(self) -> None:
        """Close all connections, which the processes detect. Their rows stay in the pool for the next server."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None
        await self._processes.stop()
        for connection in list(self._connections):
            self.drop(connection)
        await self._processes.ended()

    # --- connections -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause_accepting(error)
                    return
                continue  # this process has disconnected already
            sock.setblocking(False)
            try:
                link = Connection(
                    sock, b"ROUTER", max_frame_bytes=MAX_UNATTACHED_BYTES, max_unsent_bytes=MAX_UNSENT_BYTES
                )
                connection = Line(link, self, linux.credentials_of(sock))
            except OSError:
                sock.close()
                continue
            self._connections.add(connection)
            self._pending[connection] = self._loop.call_later(self._handshake_s, self._time_out, connection)
            self._loop.add_reader(sock.fileno(), self._readable, connection)
            uid = connection.credentials.uid
            if uid != os.geteuid():
                self._refuse(
                    connection,
                    NotPermitted(
                        f"uid {uid} may not attach to a server of uid {os.geteuid()}; run both as one user",
                        field="uid",
                    ),
                )
            elif len(self._pending) > MAX_PENDING:
                self._refuse(next(iter(self._pending)), Refused("too many unfinished attaches; try again"))

    def _pause_accepting(self, error: OSError) -> None:
        assert self._listener is not None
        _log.error("attach: cannot accept connections: %s; trying again in %.1f s", error, _ACCEPT_PAUSE_S)
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _time_out(self, connection: Line) -> None:
        self._refuse(
            connection,
            DeadlineExceeded(f"the attach was not completed within {self._handshake_s:g} s"),
        )

    def _handshake_over(self, connection: Line) -> None:
        timer = self._pending.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _readable(self, connection: Line) -> None:
        fds: list[int] = []
        try:
            if connection.state is ConnectionState.ATTACHED:
                messages = connection.link.receive()
                self._count_partial(connection)
                self.traffic.received += len(messages)
                connection.messages += messages
                self._work(connection)
                return
            received = connection.link.receive_with_fds(_MAX_FDS)
            fds, connection.fds = [*connection.fds, *received.fds], []
            self._count_partial(connection)
            if not received.messages and len(fds) <= _MAX_FDS:
                connection.fds, fds = fds, []  # the message that they came with is incomplete
            received = received._replace(fds=fds)
            self.traffic.received += len(received.messages)
            if connection.state is ConnectionState.PLAIN:
                connection.messages += received.messages
                self._work(connection)
            else:
                self._shake_hands(connection, received)
        except (BlockingIOError, InterruptedError):
            return
        except NotZmtp as error:
            self._cut(connection, str(error))
        except GaveUp as error:
            self._count_refused(connection, "gave_up", f"the process gave up: {error}")
            self.drop(connection)
        except KvstrataError as error:
            self._refuse(connection, error)
        except ConnectionError:
            self.drop(connection)
        except OSError as error:  # no descriptors or no memory, perhaps only for a moment
            self._refuse(connection, Refused(f"the server cannot serve an attach now: {error.strerror}"))
        except Exception:
            _log.exception("attach: a bug in kvstrata while serving process %d", connection.credentials.pid)
            self._refuse(connection, InternalError("internal error; the server's log has details"))
        finally:
            linux.close_all(fds)

    def _work(self, connection: Line) -> None:
        """Handle the messages of a connection, as many as this turn of the loop allows; the others wait."""
        if connection not in self._connections:
            return
        is_later = connection.messages and (self._waiting or self._handled_count >= MESSAGES_PER_TURN)
        if is_later or not self._take_turn(connection):
            self._wait(connection)

    def _take_turn(self, connection: Line) -> bool:
        """Handle messages of a connection. Returns whether all are handled."""
        messages = connection.messages
        started_s = time.monotonic()
        while messages:
            if self._handled_count >= MESSAGES_PER_TURN or time.monotonic() - started_s > SECONDS_PER_TURN:
                return False
            self._handled_count += 1
            if self._handled_count >= MESSAGES_PER_TURN // 2:
                self._look_soon()
            self._handle(connection, messages.popleft())
        return True

    def _wait(self, connection: Line) -> None:
        """Queue a connection's messages for the next turn; until then it is not read."""
        self._loop.remove_reader(connection.link.fileno())
        self._waiting.append(connection)
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Begin a new turn of the loop: handle waiting messages, one connection after the other."""
        self._handled_count, self._turn_is_due = 0, False
        ends_s = time.monotonic() + SECONDS_PER_TURN
        while self._waiting and self._handled_count < MESSAGES_PER_TURN and time.monotonic() < ends_s:
            connection = self._waiting.popleft()
            if connection not in self._connections:
                continue
            self._handled_count += 1
            self._handle(connection, connection.messages.popleft())
            if connection.messages:
                self._waiting.append(connection)
            elif connection in self._connections:
                self._loop.add_reader(connection.link.fileno(), self._readable, connection)
        if self._waiting:
            self._look_soon()

    def _handle(self, connection: Line, message: bytes) -> None:
        """Answer one message of a connection that is ATTACHED or PLAIN, or has just left these states."""
        match connection.state:
            case ConnectionState.ATTACHED if message == BYE:
                try:
                    self._bye(connection)
                except KvstrataError as error:
                    self._refuse(connection, error)
            case ConnectionState.ATTACHED | ConnectionState.PLAIN:
                if connection.state is ConnectionState.PLAIN and len(self._plain) > 1:
                    self._plain.pop(connection, None)
                    self._plain[connection] = None
                if self._requests.on_frame(connection, message):
                    connection.refused_count = 0
                else:
                    connection.refused_count += 1
                    if connection.refused_count >= MAX_REFUSED:
                        self._cut(connection, f"{MAX_REFUSED} of its messages in a row were no requests")
            case ConnectionState.LEAVING:
                self._refuse(connection, BadRequest("message: the process has said goodbye", field="message"))

    def _shake_hands(self, connection: Line, received: WithFds) -> None:
        """Handle the messages of a connection that is neither ATTACHED nor PLAIN."""
        for number, message in enumerate(received.messages):
            match connection.state:
                case ConnectionState.CONNECTED if is_request(message):
                    self._handshake_over(connection)
                    connection.state = ConnectionState.PLAIN
                    self._plain[connection] = None
                    if len(self._plain) > MAX_PLAIN:
                        self._cut(next(iter(self._plain)), "too many clients without a row are connected")
                case ConnectionState.CONNECTED:
                    self._request(connection, message, received)
                    continue
                case ConnectionState.CLAIMED if message == LOCKED:
                    self._locked(connection)
                    continue
                case ConnectionState.CLAIMED:
                    raise BadRequest(
                        f"message: expected {LOCKED.decode()!r} now, got {len(message)} bytes",
                        field="message",
                    )
                case ConnectionState.CLOSED:
                    return
            connection.messages += received.messages[number:]
            self._work(connection)
            return

    # --- sending -----------------------------------------------------------------------------------------

    def send(self, connection: Line, message: bytes) -> None:
        """Send a message over an open connection, which is closed if it leaves too much unread or has ended."""
        try:
            if not connection.link.send(message):
                self._cut(connection, "it leaves too many bytes of replies unread")
                return
        except OSError:
            self.drop(connection)
            return
        if connection.link.unsent_bytes:
            self._count_unsent(connection)

    def _writable(self, connection: Line) -> None:
        try:
            connection.link.flush()
        except OSError:
            self.drop(connection)
            return
        self._count_unsent(connection)

    def _count_unsent(self, connection: Line) -> None:
        before, connection.unsent_bytes = connection.unsent_bytes, connection.link.unsent_bytes
        self.traffic.unread_reply_bytes += connection.unsent_bytes - before
        if not before:
            self._loop.add_writer(connection.link.fileno(), self._writable, connection)
        elif not connection.unsent_bytes:
            self._loop.remove_writer(connection.link.fileno())
        if self.traffic.unread_reply_bytes > MAX_ALL_UNSENT_BYTES:
            self._cut(connection, "all clients leave too many bytes of replies unread")

    def _count_partial(self, connection: Line) -> None:
        before, connection.partial_bytes = connection.partial_bytes, connection.link.partial_bytes
        self._partial_bytes += connection.partial_bytes - before
        if self._partial_bytes > MAX_PARTIAL_BYTES:
            most = max(self._connections, key=lambda one: one.partial_bytes)
            self._cut(most, "frames that have arrived in part take too many bytes")

    def _cut(self, connection: Line, why: str) -> None:
        """Close a connection that broke a limit or the protocol."""
        if connection.state is ConnectionState.CLOSED:
            return
        self.traffic.cut_connections += 1
        line = "attach: cut the connection of process %d: %s"
        self._thinning.log(_log, logging.WARNING, why, line, connection.credentials.pid, why)
        self.drop(connection)

    def _refuse(self, connection: Line, error: KvstrataError) -> None:
        """Send the error to the process, if it still reads, and close the connection."""
        self._count_refused(connection, error.code, error.message)
        reply = AttachReply(code=error.code, message=error.message[:4096], field=error.field[:256])
        if connection.state is not ConnectionState.CLOSED:
            with contextlib.suppress(OSError):
                connection.link.send(msgspec.msgpack.encode(reply))
        self.drop(connection)

    def _count_refused(self, connection: Line, word: str, why: str) -> None:
        self.refused[word] += 1
        # A process that keeps trying must not fill the log.
        line = "attach: refused process %d: %s (%s)"
        self._thinning.log(_log, logging.WARNING, word, line, connection.credentials.pid, why[:500], word)

    def drop(self, connection: Line) -> None:
        """Close a connection, and notify the table of processes if it belonged to one. Idempotent."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        connection.state = ConnectionState.CLOSED
        connection.messages.clear()
        self._plain.pop(connection, None)
        self._handshake_over(connection)
        self._partial_bytes -= connection.partial_bytes
        self.traffic.unread_reply_bytes -= connection.unsent_bytes
        self._loop.remove_reader(connection.link.fileno())
        if connection.unsent_bytes:
            self._loop.remove_writer(connection.link.fileno())
        connection.link.close()
        linux.close_all(connection.fds)
        process, connection.process = connection.process, None
        if process is not None:
            self._processes.lost(process, connection)

    # --- the handshake -----------------------------------------------------------------------------------

    def _request(self, connection: Line, message: bytes, received: WithFds) -> None:
        request = parse_request(message)
        failpoints.hit("attach.received")
        pidfd = take_pidfd(received, connection.link.socket, connection.credentials)
        try:
            process = connection.process = self._processes.claim(request, pidfd, connection)
        except BaseException:
            linux.close_all([pidfd])
            raise
        reply = AttachReply(
            row=process.row,
            epoch=self._pool.epoch,
            pool_id=self._pool.pool_id,
            extents_bytes=self._pool.extents_bytes,
            max_reserved_bytes=self._max_reserved_bytes,
            instance_id=self._instance_id,
            lock_file=self._lock_file,
        )
        extents = self._fds.extents_readonly if request.slice is None else self._fds.extents
        fds = [self._fds.index_readonly, extents]
        if self._lock_file not in request.held_locks:
            fds.append(self._fds.sessions_lock)
        connection.state = ConnectionState.CLAIMED
        try:
            connection.link.send(msgspec.msgpack.encode(reply), fds)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                raise GaveUp("it has closed its connection") from None
            raise Refused(f"the reply could not be sent: {error.strerror}") from error
        failpoints.hit("attach.accepted")

    def _locked(self, connection: Line) -> None:
        assert connection.process is not None
        if linux.has_hung_up(connection.link.socket):  # the process has unlocked the byte, or is about to
            raise GaveUp("it has ended its wait for an answer")
        self._processes.locked(connection.process)
        connection.state = ConnectionState.ATTACHED
        connection.link.allow_frames(MAX_MESSAGE_BYTES)
        self._handshake_over(connection)
        try:
            connection.link.send(OK)
        except OSError:
            self.drop(connection)  # the process will attach again, or its pidfd shows that it died
            return
        failpoints.hit("attach.locked")

    def _bye(self, connection: Line) -> None:
        assert connection.process is not None
        self._processes.bye(connection.process)
        connection.state, connection.process = ConnectionState.LEAVING, None


def is_request(message: bytes) -> bool:
    """Whether a message is an array, as requests are; an attach request is a map."""
    return bool(message) and (message[0] >> 4 == 0x9 or message[0] in (0xDC, 0xDD))
