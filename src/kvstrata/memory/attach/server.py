"""Server side of the attach handshake: who may map the pool, and when such a process has ended.

One connection on a seqpacket unix socket per session, non-blocking, on the server's event loop:

    CONNECTED  ── request + pidfd ──▶  CLAIMED  ── "locked" ──▶  ATTACHED  ── "bye" ──▶  LEAVING
               ◀── reply + fds ──                ◀── "ok" ──               ◀── "ok" ──  (row is free)

Whatever else arrives is answered with an error reply and closes the connection.

Invariants
1. A row belongs to a process, not to a connection or a clock.  A closed connection only *detaches* the
   session. The row ends (`Pool.row_gone`) when the process is dead: its pidfd is readable, or, for rows
   from before a server restart, nobody locks the row's byte of sessions.lock.  Other than that only its
   owner's "bye" ends it.  A free byte does not say that a device has stopped: the kernel drops the locks of a
   dying process before its driver tears its contexts down.  So a row from before the restart whose session
   registered memory is then *stranded*: what is quarantined because of it stays so until `clear_stranded`.
2. A row that was claimed but never locked was never announced to the rest of the server, so nothing can be
   reserved by it; it ends with its connection.
3. `on_gone` has returned before `row_gone` is called: no operation of that session runs any more.
4. A bad peer costs only itself: at most `pending` unfinished handshakes (the oldest gives way), each at most
   `handshake_s` long, messages of at most 64 KiB, every descriptor that is not the pidfd closed at once.

What this is not: it does not own the pool, the segment or the socket directory's lock (see `segment`), and it
knows nothing of leases and reservations.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from kvstrata import failpoints
from kvstrata.errors import BadRequest, DeadlineExceeded, InternalError, KvstrataError, NotPermitted, Refused
from kvstrata.memory import linux
from kvstrata.memory.attach.checks import (
    MAX_ATTACH_BYTES,
    GaveUp,
    check_company,
    check_resumed,
    parse_request,
    take_pidfd,
)
from kvstrata.memory.segment import Descriptors
from kvstrata.native.pool import Pool, PoolError
from kvstrata.rpc.wire import AttachReply, AttachRequest

if TYPE_CHECKING:
    from kvstrata.native.pool import Row

_log = logging.getLogger(__name__)

LOCKED, BYE, OK = b"locked", b"bye", b"ok"

_MAX_FDS = 8
"""Descriptors taken from one message in order to close them; the kernel drops what is above."""
_BACKLOG = 128
_ACCEPTS_PER_TURN = 16
_ACCEPT_PAUSE_S = 0.2


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attached process, as the rest of the server knows it."""

    row: int
    session: bytes
    group: bytes
    pid: int
    """As seen from the server's PID namespace, 0 = not visible."""
    request: AttachRequest | None
    """None for a process attached before the last restart that did not come back."""
    tenants: frozenset[str] | None = None
    """Tenants it may use, None = all."""
    resumed: bool = False
    """It was attached before: to this server, or to one whose pool was adopted."""
    registers_memory: bool = False
    """A device may access the extents on its behalf."""


class Stranded(NamedTuple):
    """A row that keeps extents in quarantine although its process has ended."""

    seen: SessionRow
    kept_bytes: int


class AttachHooks(Protocol):
    """What the server does about attached processes. All are called on the event loop."""

    def admit(self, request: AttachRequest) -> None:
        """Raises a KvstrataError to refuse a process (other chunk size, stopping, …)."""
        ...

    def tenants_of(self, peer: linux.Peer, request: AttachRequest) -> frozenset[str] | None:
        """Tenants this peer may use, None = all. Raises NotPermitted for a bad token."""
        ...

    def on_attached(self, session: SessionRow) -> None:
        """From now on requests of this session are valid; called before the process is told."""
        ...

    def on_detached(self, session: SessionRow) -> None:
        """Its connection closed while it lives; everything it owns stays."""
        ...

    async def on_gone(self, session: SessionRow) -> None:
        """Its process is dead, or said goodbye. Returns when nothing runs for it any more."""
        ...


class AttachLimits(NamedTuple):
    """Bounds of the handshake."""

    pending: int = 64
    handshake_s: float = 5.0
    old_row_interval_s: float = 1.0
    """How often the locks of rows from before a restart are looked at."""


class _State(enum.Enum):
    CONNECTED = enum.auto()
    CLAIMED = enum.auto()
    ATTACHED = enum.auto()
    LEAVING = enum.auto()


class _Session:
    """A row whose process lives, and the pidfd that tells when it does not."""

    __slots__ = ("announced", "attached", "from_old_row", "link", "pidfd", "request", "seen")

    def __init__(self, seen: SessionRow, request: AttachRequest, pidfd: int, *, from_old_row: bool) -> None:
        self.seen = seen
        self.request = request
        self.pidfd = pidfd
        self.from_old_row = from_old_row
        self.link: _Link | None = None
        self.announced = False  # on_attached was called at least once
        self.attached = False  # on_attached was called, on_detached not yet


class _Link:
    """One connection. Hashed by identity."""

    __slots__ = ("peer", "session", "sock", "state", "timer")

    def __init__(self, sock: socket.socket, peer: linux.Peer) -> None:
        self.sock = sock
        self.peer = peer
        self.state = _State.CONNECTED
        self.session: _Session | None = None
        self.timer: asyncio.TimerHandle | None = None  # ends the handshake; None once attached


class AttachServer:
    """Listens on `path` and keeps the sessions of attached processes.

    `pool` and `descriptors` belong to one segment and must outlive this object; the caller holds the lock
    of the socket directory, so whatever is found at `path` is left over.  All methods are for the event
    loop's thread.
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
        self._pool = pool
        self._fds = descriptors
        self._hooks = hooks
        self._instance_id = instance_id
        self._limits = limits or AttachLimits()
        self._lock_file = linux.file_id(descriptors.sessions_lock)
        self._listener: socket.socket | None = None
        self._links: set[_Link] = set()
        self._pending: dict[_Link, None] = {}  # in order of arrival
        self._sessions: dict[bytes, _Session] = {}
        self._retiring: set[int] = set()  # rows whose row_gone is under way
        self._old_rows: dict[int, SessionRow] = {}  # from before the restart, owner not yet known
        self._stranded: dict[int, Stranded] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._lane = concurrent.futures.ThreadPoolExecutor(1, "kv-rows")
        self._refused: Counter[str] = Counter()
        self._quiet_until = 0.0

    # --- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ends the rows of processes that died before this server came, then listens."""
        self._loop = asyncio.get_running_loop()
        for row in self._pool.rows():
            if row["old"]:
                self._old_rows[row["row"]] = SessionRow(
                    row=row["row"],
                    session=row["session"],
                    group=row["group"],
                    pid=row["pid"],
                    request=None,
                    registers_memory=row["registers_memory"],
                )
        await self.sweep_old_rows()
        if self._old_rows:
            self._sweeper = asyncio.create_task(self._sweep(), name="attach-sweep-old-rows")
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before bind, so that the path never has another mode
            listener.bind(os.fspath(self._path))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    async def stop(self) -> None:
        """Closes all connections, which tells the processes. Their rows stay in the pool, for the next
        server.
        """
        self._stopping.set()
        if self._sweeper is not None:
            await self._sweeper
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None
        for session in self._sessions.values():
            session.link = None
            self._unwatch(session)
        self._sessions.clear()
        for link in list(self._links):
            link.session = None
            self._drop(link)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lane.shutdown()

    def sessions(self) -> list[SessionRow]:
        """Sessions whose handshake was completed and whose processes live, attached or detached."""
        return [session.seen for session in self._sessions.values() if session.announced]

    def stranded(self) -> list[Stranded]:
        """Sessions that ended unseen and whose device may still write, as far as anybody knows."""
        return list(self._stranded.values())

    async def clear_stranded(self, sessions: Sequence[bytes] | None = None) -> list[Stranded]:
        """Somebody knows that no device writes for these (None: all) any more; their extents are free.

        Returns those that were stranded. Raises KeyError, and clears none, for a session that is not.
        """
        by_name = {one.seen.session: one for one in self._stranded.values()}
        chosen = (
            list(by_name.values())
            if sessions is None
            else [by_name[name] for name in dict.fromkeys(sessions)]
        )
        for one in chosen:
            del self._stranded[one.seen.row]
        await asyncio.shield(asyncio.gather(*(self._retire(one.seen) for one in chosen)))
        return chosen

    def stats(self) -> dict[str, Any]:
        """Counts of connections and sessions by state, and of refusals by error code."""
        announced = [session for session in self._sessions.values() if session.announced]
        return {
            "pending": len(self._pending),
            "attached": sum(session.attached for session in announced),
            "detached": sum(not session.attached for session in announced),
            "old_rows": len(self._old_rows),
            "stranded": len(self._stranded),
            "stranded_bytes": sum(one.kept_bytes for one in self._stranded.values()),
            "refused": dict(self._refused),
        }

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
                continue  # this one peer broke off
            sock.setblocking(False)
            link = _Link(sock, linux.peer_of(sock))
            link.timer = self._loop.call_later(self._limits.handshake_s, self._time_out, link)
            self._links.add(link)
            self._pending[link] = None
            self._loop.add_reader(sock.fileno(), self._readable, link)
            if link.peer.uid != os.geteuid():
                self._refuse(
                    link,
                    NotPermitted(
                        f"uid {link.peer.uid} may not attach to a server of uid {os.geteuid()}; run both as "
                        "one user",
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

    def _time_out(self, link: _Link) -> None:
        self._refuse(
            link, DeadlineExceeded(f"the attach was not completed within {self._limits.handshake_s:g} s")
        )

    def _handshake_over(self, link: _Link) -> None:
        self._pending.pop(link, None)
        if link.timer is not None:
            link.timer.cancel()
            link.timer = None

    def _readable(self, link: _Link) -> None:
        try:
            received = linux.receive(link.sock, MAX_ATTACH_BYTES, _MAX_FDS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(link)
            return
        try:
            if not received.data and not received.fds:
                self._drop(link)
            else:
                self._message(link, received)
        except KvstrataError as error:
            self._refuse(link, error)
        except GaveUp as error:
            self._count_refused(link, "gave_up", f"the process gave up: {error}")
            self._drop(link)
        except OSError as error:  # no descriptors, no memory: that may be over in a moment
            self._refuse(link, Refused(f"the server cannot serve an attach now: {error.strerror}"))
        except Exception:
            _log.exception("attach: our own mistake while serving process %d", link.peer.pid)
            self._refuse(link, InternalError("internal error; the server's log has details"))
        finally:
            linux.close_all(received.fds)

    def _message(self, link: _Link, received: linux.Received) -> None:
        if received.cut:
            raise BadRequest(f"message: longer than {MAX_ATTACH_BYTES} bytes", field="message")
        if link.state is _State.CONNECTED:
            self._request(link, received)
        elif link.state is _State.CLAIMED and received.data == LOCKED:
            self._locked(link)
        elif link.state is _State.ATTACHED and received.data == BYE:
            self._bye(link)
        else:
            expected = {_State.CLAIMED: LOCKED, _State.ATTACHED: BYE}.get(link.state, b"nothing")
            raise BadRequest(
                f"message: expected {expected.decode()!r} now, got {len(received.data)} bytes",
                field="message",
            )

    def _refuse(self, link: _Link, error: KvstrataError) -> None:
        """Tells the peer why, as far as it listens, and closes the connection."""
        self._count_refused(link, error.code, error.message)
        reply = AttachReply(code=error.code, message=error.message[:4096], field=error.field[:256])
        with contextlib.suppress(OSError):
            linux.send(link.sock, msgspec.msgpack.encode(reply))
        self._drop(link)

    def _count_refused(self, link: _Link, word: str, why: str) -> None:
        self._refused[word] += 1
        now = self._loop.time()
        if now >= self._quiet_until:  # a peer that tries all the time must not fill the log
            self._quiet_until = now + 1.0
            _log.warning("attach: refused process %d: %s (%s)", link.peer.pid, why[:500], word)

    def _drop(self, link: _Link) -> None:
        """Closes a connection; what that means for its session depends on how far it came."""
        if link not in self._links:
            return
        self._links.discard(link)
        self._handshake_over(link)
        self._loop.remove_reader(link.sock.fileno())
        link.sock.close()
        session, link.session = link.session, None
        if session is None or session.link is not link:
            return
        session.link = None
        if session.announced:
            self._detach(session)
        elif session.from_old_row:
            # The row keeps what it owned before the restart; its lock still tells whether somebody lives.
            self._forget(session)
        else:
            self._forget(session)
            self._pool.row_gone(session.seen.row)  # at once: it owns nothing

    # --- the handshake -----------------------------------------------------------------------------------

    def _request(self, link: _Link, received: linux.Received) -> None:
        request = parse_request(received.data)
        failpoints.hit("attach.received")
        pidfd = take_pidfd(received, link.sock, link.peer)
        try:
            self._hooks.admit(request)
            tenants = self._hooks.tenants_of(link.peer, request)
            others = [s.request for s in self._sessions.values() if s.seen.session != request.session]
            check_company(request, others)
            session = self._sessions.get(request.session)
            if session is not None and not session.announced and self._same_process(session, link, pidfd):
                assert session.link is not None
                self._drop(session.link)  # it gave its first try up; we only have not read that yet
                session = None
            if session is None:
                session = self._claim(link.peer, request, tenants, pidfd)
            else:
                self._resume(session, link, request, pidfd)
                linux.close_all([pidfd])
        except BaseException:
            linux.close_all([pidfd])
            raise
        self._take_over(session, link)
        reply = AttachReply(
            row=session.seen.row,
            epoch=self._pool.epoch,
            pool_id=self._pool.pool_id,
            extents_bytes=self._pool.extents_bytes,
            instance_id=self._instance_id,
            lock_file=self._lock_file,
        )
        fds = [self._fds.index_readonly, self._fds.extents]
        if self._lock_file not in request.held_locks:
            fds.append(self._fds.sessions_lock)
        link.state = _State.CLAIMED
        try:
            linux.send(link.sock, msgspec.msgpack.encode(reply), fds)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                raise GaveUp("it has closed its connection") from None
            raise Refused(f"the reply could not be sent: {error.strerror}") from error
        failpoints.hit("attach.accepted")

    def _claim(
        self, peer: linux.Peer, request: AttachRequest, tenants: frozenset[str] | None, pidfd: int
    ) -> _Session:
        """A row for a session that this server does not know; takes `pidfd` when it returns."""
        known = next((row for row in self._pool.rows() if row["session"] == request.session), None)
        if known is not None:
            self._check_old_row(known, peer, request)
        try:
            row = self._pool.claim_row(request.session, request.group, peer.pid, request.registers_memory)
        except PoolError as error:
            raise Refused(f"no row for this session: {error}; end other engines", field="session") from error
        seen = SessionRow(
            row=row,
            session=request.session,
            group=request.group,
            pid=peer.pid,
            request=request,
            tenants=tenants,
            resumed=known is not None,
            registers_memory=request.registers_memory,
        )
        session = _Session(seen, request, pidfd, from_old_row=known is not None)
        self._sessions[request.session] = session
        self._loop.add_reader(pidfd, self._died, session)
        return session

    def _check_old_row(self, known: Row, peer: linux.Peer, request: AttachRequest) -> None:
        row = known["row"]
        if row in self._stranded:
            raise Refused("session: its earlier process has ended; choose another", field="session")
        if row in self._retiring:
            raise Refused("session: its earlier process is being cleaned up; try again", field="session")
        locker = linux.byte_locker(self._fds.sessions_lock, row)
        if locker is None:
            raise Refused(
                "session: its earlier process has ended and is being cleaned up; try again", field="session"
            )
        if locker != peer.pid or known["group"] != request.group:
            raise NotPermitted("session: it belongs to another process that lives", field="session")

    def _resume(self, session: _Session, link: _Link, request: AttachRequest, pidfd: int) -> None:
        """Checks that a known session comes back from the process that owns it, as what it was."""
        if not self._same_process(session, link, pidfd):
            raise NotPermitted("session: it belongs to another process that lives", field="session")
        check_resumed(request, session.request)

    def _same_process(self, session: _Session, link: _Link, pidfd: int) -> bool:
        if session.seen.pid != link.peer.pid:
            return False
        return linux.same_process(session.pidfd, pidfd) is not False

    def _take_over(self, session: _Session, link: _Link) -> None:
        """`link` is the session's connection from now on; an earlier one is closed without a word."""
        earlier, session.link = session.link, link
        link.session = session
        if earlier is not None:
            self._drop(earlier)

    def _locked(self, link: _Link) -> None:
        session = link.session
        assert session is not None
        locker = linux.byte_locker(self._fds.sessions_lock, session.seen.row)
        if locker is None:
            raise BadRequest(
                f"locked: byte {session.seen.row} of sessions.lock is not locked; take it with F_SETLK",
                field="row",
            )
        if locker != link.peer.pid:
            raise NotPermitted(
                f"locked: byte {session.seen.row} of sessions.lock is locked by process {locker}, not by "
                f"{link.peer.pid}",
                field="row",
            )
        if session.announced:
            session.seen = msgspec.structs.replace(session.seen, resumed=True)
        self._hooks.on_attached(session.seen)
        session.announced = session.attached = True
        self._old_rows.pop(session.seen.row, None)
        link.state = _State.ATTACHED
        self._handshake_over(link)
        try:
            linux.send(link.sock, OK)
        except OSError:
            self._drop(link)  # the process will attach again, or its pidfd tells that it died
            return
        failpoints.hit("attach.locked")

    # --- ends --------------------------------------------------------------------------------------------

    def _detach(self, session: _Session) -> None:
        if session.attached:
            session.attached = False
            self._hooks.on_detached(session.seen)

    def _died(self, session: _Session) -> None:
        """The session's pidfd is readable."""
        link, session.link = session.link, None
        self._forget(session)
        if link is not None:
            self._drop(link)
        if session.announced:
            self._retire(session.seen)
        elif not session.from_old_row:
            self._pool.row_gone(session.seen.row)

    def _bye(self, link: _Link) -> None:
        session = link.session
        assert session is not None
        if linux.byte_locker(self._fds.sessions_lock, session.seen.row) is not None:
            raise BadRequest(
                f"bye: byte {session.seen.row} of sessions.lock is still locked; unlock it first", field="row"
            )
        link.state = _State.LEAVING
        link.session = None
        self._forget(session)
        self._retire(session.seen, link)

    def _forget(self, session: _Session) -> None:
        self._unwatch(session)
        del self._sessions[session.seen.session]

    def _unwatch(self, session: _Session) -> None:
        self._loop.remove_reader(session.pidfd)
        os.close(session.pidfd)

    def _retire(
        self, seen: SessionRow, link: _Link | None = None, *, unseen: bool = False
    ) -> asyncio.Task[None]:
        """Starts the end of a row nobody owns any more; `link` gets an "ok" when it is over.

        `unseen`: only its lock tells that the process has ended.
        """
        self._retiring.add(seen.row)
        task = asyncio.create_task(self._end_row(seen, link, unseen), name=f"attach-end-row-{seen.row}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _end_row(self, seen: SessionRow, link: _Link | None, unseen: bool) -> None:
        await self._hooks.on_gone(seen)
        if unseen and seen.registers_memory:
            kept_bytes = await self._loop.run_in_executor(self._lane, self._pool.row_stranded, seen.row)
            if kept_bytes:
                self._stranded[seen.row] = Stranded(seen, kept_bytes)
                _log.warning(
                    "attach: process %d of session %s ended while no server watched, and its device may still write "
                    "into %d bytes of L1; when you know that it does not, free them: kvstrata ctl stranded clear %s",
                    seen.pid,
                    seen.session.hex(),
                    kept_bytes,
                    seen.session.hex(),
                )
        else:
            await self._loop.run_in_executor(self._lane, self._pool.row_gone, seen.row)
        self._retiring.discard(seen.row)
        if link is not None and link in self._links:
            with contextlib.suppress(OSError):
                linux.send(link.sock, OK)
            self._drop(link)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Supervises the tasks above: a row whose end failed stays occupied, and the log says so."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("attach: %s failed; the row stays occupied", task.get_name(), exc_info=error)

    # --- rows from before a restart ----------------------------------------------------------------------

    async def sweep_old_rows(self) -> int:
        """Ends the rows from before the restart whose byte nobody locks; returns how many remain open."""
        claimed = {session.seen.row for session in self._sessions.values()}
        ending: list[asyncio.Task[None]] = []
        for row, seen in list(self._old_rows.items()):
            if row not in claimed and linux.byte_locker(self._fds.sessions_lock, row) is None:
                del self._old_rows[row]
                ending.append(self._retire(seen, unseen=True))
        await asyncio.gather(*ending, return_exceptions=True)
        return len(self._old_rows)

    async def _sweep(self) -> None:
        while await self.sweep_old_rows():
            try:
                await asyncio.wait_for(self._stopping.wait(), self._limits.old_row_interval_s)
            except TimeoutError:
                continue  # there is no event to wait for: a record lock does not tell when it ends
            return
