"""Server side of the attach handshake: the connections over which processes get a row and the pool.

One connection on a seqpacket unix socket per session, non-blocking, on the server's event loop:

    process  ── request + pidfd ──▶          ── "locked" ──▶          ── "bye" ──▶
    server   ◀── reply + fds ──              ◀── "ok" ──              ◀── "ok" ──  (the row is free)

`MACHINE` has the states of one connection.  A message that does not belong to its state gets an error reply, and the
connection is closed.  `rows` decides what a closed connection means for the session.

Invariant: a bad process harms only itself.  At most `pending` handshakes are unfinished (the oldest gives way), each
for at most `handshake_s`; a message has at most 64 KiB; every descriptor but the pidfd is closed at once.

Not here: the pool, the segment and the socket directory's lock (see `segment`) belong to the caller.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import errno
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvstrata import failpoints
from kvstrata.config.private_dir import path_id
from kvstrata.errors import BadRequest, DeadlineExceeded, InternalError, KvstrataError, NotPermitted, Refused
from kvstrata.memory import linux
from kvstrata.memory.attach.checks import MAX_ATTACH_BYTES, GaveUp, parse_request, take_pidfd
from kvstrata.memory.attach.row import AttachHooks, Owner, Stranded
from kvstrata.memory.attach.rows import Rows
from kvstrata.memory.segment import Descriptors
from kvstrata.naming import name_thread
from kvstrata.native.pool import Pool
from kvstrata.observability.logging import Thinning
from kvstrata.patience import patience
from kvstrata.rpc.attach_wire import AttachReply
from kvstrata.rpc.wire import SECRET_BYTES
from kvstrata.states import Machine

_log = logging.getLogger(__name__)

LOCKED, BYE, OK = b"locked", b"bye", b"ok"

_MAX_FDS = 8
"""Maximum number of descriptors taken from one message, if only to close them; the kernel drops any further ones."""
_BACKLOG = 128
_ACCEPTS_PER_TURN = 16
_ACCEPT_PAUSE_S = 0.2
HANDSHAKE_S = 5.0


class AttachLimits(NamedTuple):
    """Bounds of the handshake."""

    pending: int = 64
    handshake_s: float = HANDSHAKE_S
    old_row_interval_s: float = 1.0
    """Time between two looks at the locks of rows from before a restart."""


class ConnectionState(enum.Enum):
    """How far a process has come on one connection."""

    CONNECTED = enum.auto()
    """No message has come."""
    CLAIMED = enum.auto()
    """The process has a row and the descriptors, and must now lock its byte."""
    ATTACHED = enum.auto()
    """Its byte is locked, and the server knows its session."""
    LEAVING = enum.auto()
    """The process has said goodbye and waits until its row has ended."""
    CLOSED = enum.auto()
    """Either side has closed the connection."""


class ConnectionEvent(enum.Enum):
    """An event on a connection."""

    GRANTED = enum.auto()
    """A valid request came, and its sender may have the row."""
    LOCKED = enum.auto()
    """"locked" came, and the byte is locked."""
    BYE = enum.auto()
    """"bye" came, and the byte is free."""
    CLOSED = enum.auto()
    """The process closed it, died, took too long, sent an invalid message, or attached again elsewhere."""


MACHINE = Machine(
    "Attach connection",
    ConnectionState,
    ConnectionEvent,
    ConnectionState.CONNECTED,
    {
        ConnectionState.CONNECTED: {
            ConnectionEvent.GRANTED: ConnectionState.CLAIMED,
            ConnectionEvent.CLOSED: ConnectionState.CLOSED,
        },
        ConnectionState.CLAIMED: {
            ConnectionEvent.LOCKED: ConnectionState.ATTACHED,
            ConnectionEvent.CLOSED: ConnectionState.CLOSED,
        },
        ConnectionState.ATTACHED: {
            ConnectionEvent.BYE: ConnectionState.LEAVING,
            ConnectionEvent.CLOSED: ConnectionState.CLOSED,
        },
        ConnectionState.LEAVING: {ConnectionEvent.CLOSED: ConnectionState.CLOSED},
    },
)
EXPECTED = {ConnectionState.CLAIMED: LOCKED, ConnectionState.ATTACHED: BYE}
"""In each state but CONNECTED, the only message that may come."""


class _Connection:
    """One connection. Hashed by identity."""

    __slots__ = ("_drop", "credentials", "owner", "secret", "sock", "state")

    def __init__(self, sock: socket.socket, drop: Callable[[_Connection], None]) -> None:
        """`drop` closes the connection."""
        self.sock = sock
        self.credentials = linux.credentials_of(sock)
        self.state = MACHINE.first
        self.owner: Owner | None = None
        """The process's row, from GRANTED on."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        """Proves the session's requests once the connection is ATTACHED."""
        self._drop = drop

    def move(self, event: ConnectionEvent) -> None:
        """Enter the state that `MACHINE` gives."""
        self.state = MACHINE.after(self.state, event)

    def let_go(self, *, ok: bool) -> None:
        """See `row.Speaker`."""
        if self.state is ConnectionState.CLOSED:
            return
        if ok:
            with contextlib.suppress(OSError):
                linux.send(self.sock, OK)
        self._drop(self)


class AttachServer:
    """Listens on `path`, and owns the connections of attached processes and their rows.

    `pool` and `descriptors` must outlive this object.  The caller holds the lock of the socket directory, so an
    existing socket at `path` is a leftover.  All methods belong to the event loop.
    """

    def __init__(
        self,
        path: Path,
        pool: Pool,
        descriptors: Descriptors,
        hooks: AttachHooks,
        *,
        instance_id: str = "",
        limits: AttachLimits | None = None,
    ) -> None:
        self._path = path
        self._hooks = hooks
        self._instance_id = instance_id
        self._limits = limits or AttachLimits(handshake_s=patience(HANDSHAKE_S))
        self._lane = concurrent.futures.ThreadPoolExecutor(1, "kv-rows", name_thread)
        self._pool = pool
        self._fds = descriptors
        self._lock_file = linux.file_id(descriptors.sessions_lock)
        self._rows = Rows(pool, descriptors.sessions_lock, hooks, self._limits.old_row_interval_s, self._lane)
        self._listener: socket.socket | None = None
        self._path_id: tuple[int, int] | None = None
        """Identity of the file at `path` as long as it is our socket's."""
        self._connections: set[_Connection] = set()
        self._pending: dict[_Connection, asyncio.TimerHandle] = {}
        """Unfinished handshakes in order of arrival, each with its timeout."""
        self._refused: Counter[str] = Counter()
        self._thinning = Thinning()

    # --- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """End the rows of processes that died before this server started, then listen."""
        self._loop = asyncio.get_running_loop()
        await self._rows.start()
        self.listen(self._path)

    def listens(self) -> bool:
        """Whether the socket at the path is ours, and not removed or replaced."""
        return self._listener is not None and path_id(self._path) == self._path_id

    def listen(self, path: Path) -> None:
        """Listen at this path from now on; connections stay. Raises OSError."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before bind, so that the path never has another mode
            listener.bind(os.fspath(self._path))
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
        """Close all connections, which the processes notice. Their rows stay in the pool for the next server."""
        await self._rows.stop_sweeping()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None
        self._rows.forget_owners()
        for connection in list(self._connections):
            self._drop(connection)
        await self._rows.ended()
        self._lane.shutdown()

    def stranded(self) -> list[Stranded]:
        """See `Rows.stranded`."""
        return self._rows.stranded()

    async def clear_stranded(self, sessions: Sequence[bytes] | None = None) -> list[Stranded]:
        """See `Rows.clear_stranded`."""
        return await self._rows.clear_stranded(sessions)

    def stats(self) -> dict[str, Any]:
        """Counts of connections and rows by state, and of refusals by error code."""
        return {"pending": len(self._pending), **self._rows.stats(), "refused": dict(self._refused)}

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
            connection = _Connection(sock, self._drop)
            self._connections.add(connection)
            self._pending[connection] = self._loop.call_later(
                self._limits.handshake_s, self._time_out, connection
            )
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
            elif len(self._pending) > self._limits.pending:
                self._refuse(next(iter(self._pending)), Refused("too many unfinished attaches; try again"))

    def _pause_accepting(self, error: OSError) -> None:
        assert self._listener is not None
        _log.error("attach: cannot accept connections: %s; trying again in %.1f s", error, _ACCEPT_PAUSE_S)
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _time_out(self, connection: _Connection) -> None:
        self._refuse(
            connection,
            DeadlineExceeded(f"the attach was not completed within {self._limits.handshake_s:g} s"),
        )

    def _handshake_over(self, connection: _Connection) -> None:
        timer = self._pending.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _readable(self, connection: _Connection) -> None:
        try:
            received = linux.receive(connection.sock, MAX_ATTACH_BYTES, _MAX_FDS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(connection)
            return
        try:
            if not received.data and not received.fds:
                self._drop(connection)
            else:
                self._message(connection, received)
        except KvstrataError as error:
            self._refuse(connection, error)
        except GaveUp as error:
            self._count_refused(connection, "gave_up", f"the process gave up: {error}")
            self._drop(connection)
        except OSError as error:  # no descriptors or no memory, perhaps only for a moment
            self._refuse(connection, Refused(f"the server cannot serve an attach now: {error.strerror}"))
        except Exception:
            _log.exception("attach: a bug in kvstrata while serving process %d", connection.credentials.pid)
            self._refuse(connection, InternalError("internal error; the server's log has details"))
        finally:
            linux.close_all(received.fds)

    def _message(self, connection: _Connection, received: linux.Received) -> None:
        if received.cut:
            raise BadRequest(f"message: longer than {MAX_ATTACH_BYTES} bytes", field="message")
        if connection.state is ConnectionState.CONNECTED:
            self._request(connection, received)
            return
        expected = EXPECTED.get(connection.state, b"nothing")
        if received.data != expected:
            raise BadRequest(
                f"message: expected {expected.decode()!r} now, got {len(received.data)} bytes",
                field="message",
            )
        if expected == LOCKED:
            self._locked(connection)
        else:
            self._bye(connection)

    def _refuse(self, connection: _Connection, error: KvstrataError) -> None:
        """Send the process the reason, if it still reads, and close the connection."""
        self._count_refused(connection, error.code, error.message)
        reply = AttachReply(code=error.code, message=error.message[:4096], field=error.field[:256])
        with contextlib.suppress(OSError):
            linux.send(connection.sock, msgspec.msgpack.encode(reply))
        self._drop(connection)

    def _count_refused(self, connection: _Connection, word: str, why: str) -> None:
        self._refused[word] += 1
        # A process that keeps trying must not fill the log.
        line = "attach: refused process %d: %s (%s)"
        self._thinning.log(_log, logging.WARNING, word, line, connection.credentials.pid, why[:500], word)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection, and tell `rows` if it spoke for a row. Idempotent."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        connection.move(ConnectionEvent.CLOSED)
        self._handshake_over(connection)
        self._loop.remove_reader(connection.sock.fileno())
        connection.sock.close()
        owner, connection.owner = connection.owner, None
        if owner is not None:
            self._rows.lost(owner, connection)

    # --- the handshake -----------------------------------------------------------------------------------

    def _request(self, connection: _Connection, received: linux.Received) -> None:
        request = parse_request(received.data)
        failpoints.hit("attach.received")
        pidfd = take_pidfd(received, connection.sock, connection.credentials)
        try:
            self._hooks.admit(request)
            tenants = self._hooks.tenants_of(connection.credentials, request)
            owner = connection.owner = self._rows.claim(request, tenants, pidfd, connection)
        except BaseException:
            linux.close_all([pidfd])
            raise
        reply = AttachReply(
            row=owner.row.seen.row,
            epoch=self._pool.epoch,
            pool_id=self._pool.pool_id,
            extents_bytes=self._pool.extents_bytes,
            secret=connection.secret,
            instance_id=self._instance_id,
            lock_file=self._lock_file,
        )
        extents = self._fds.extents_readonly if request.slice is None else self._fds.extents
        fds = [self._fds.index_readonly, extents]
        if self._lock_file not in request.held_locks:
            fds.append(self._fds.sessions_lock)
        connection.move(ConnectionEvent.GRANTED)
        try:
            linux.send(connection.sock, msgspec.msgpack.encode(reply), fds)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                raise GaveUp("it has closed its connection") from None
            raise Refused(f"the reply could not be sent: {error.strerror}") from error
        failpoints.hit("attach.accepted")

    def _locked(self, connection: _Connection) -> None:
        assert connection.owner is not None
        if linux.has_hung_up(connection.sock):  # and has unlocked the byte, or is about to
            raise GaveUp("it has ended its wait for an answer")
        self._rows.locked(connection.owner, connection.secret)
        connection.move(ConnectionEvent.LOCKED)
        self._handshake_over(connection)
        try:
            linux.send(connection.sock, OK)
        except OSError:
            self._drop(connection)  # the process will attach again, or its pidfd shows that it died
            return
        failpoints.hit("attach.locked")

    def _bye(self, connection: _Connection) -> None:
        assert connection.owner is not None
        self._rows.bye(connection.owner)
        connection.move(ConnectionEvent.BYE)
        connection.owner = None
