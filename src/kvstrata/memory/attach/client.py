"""Engine side of the attach handshake.  Blocking sockets with a deadline; for the client's I/O thread.

What keeps a process's claim on the pool alive is the process itself: its pidfd, which the server holds, and a
POSIX record lock on its row's byte of sessions.lock.  Such locks vanish as soon as the process closes *any*
descriptor of that file, so `LockHolder` keeps exactly one descriptor per file, for life, for all sessions
of the process.  A forked child has neither: its pid is its own, record locks are not inherited, mappings
are MADV_DONTFORK, and what descriptors it inherited it closes at once (`os.register_at_fork`).

No asyncio here, and nothing that would pull numba, llvmlite or torch into an engine.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstrata.errors import WIRE_ERRORS, InternalError, KvstrataError, NotPermitted, Unavailable
from kvstrata.memory import linux
from kvstrata.memory.paths import ATTACH_SOCKET, check_private_dir, check_socket_path
from kvstrata.rpc.wire import AttachReply, AttachRequest

_MAX_BYTES = 64 << 10
_MAX_FDS = 3
_LOCKED, _BYE, _OK = b"locked", b"bye", b"ok"
_REPLY = msgspec.msgpack.Decoder(AttachReply)

FileId = tuple[int, int]
"""(device, inode) of a sessions.lock."""


class LockHolder:
    """The descriptors of sessions.lock files in this process, one per file, never closed; and who locks what.

    Use `process_locks()`; a second holder in one process would bring a second descriptor.  Thread-safe.
    Attaches of one process go one after another (`mutex`), because the server must know which files are
    already open before it sends one.
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self._files: dict[FileId, int] = {}
        self._surplus: list[int] = []
        self._owners: dict[tuple[FileId, int], bytes] = {}

    def held(self) -> list[FileId]:
        """Files that are open here."""
        return list(self._files)

    def adopt(self, fd: int) -> FileId:
        """Keeps `fd` for life. A second descriptor of one file is kept too: closing it would drop the
        locks.
        """
        file = linux.file_id(fd)
        if file in self._files:
            self._surplus.append(fd)
        else:
            self._files[file] = fd
        return file

    def lock(self, file: FileId, row: int, session: bytes) -> bool:
        """Locks the byte of `row` for `session`; False when another process has it. Repeating it is
        harmless.
        """
        if not linux.lock_byte(self._files[file], row):
            return False
        self._owners[file, row] = session
        return True

    def unlock(self, file: FileId, row: int, session: bytes) -> None:
        """Gives the byte back if it is still `session`'s: another of this process may have got the row."""
        if self._owners.get((file, row)) == session:
            del self._owners[file, row]
            linux.unlock_byte(self._files[file], row)

    def is_owner(self, file: FileId, row: int, session: bytes) -> bool:
        """Whether `session` locked that byte."""
        return self._owners.get((file, row)) == session

    def forget_in_child(self) -> None:
        """After a fork the child has no locks: it closes the descriptors and starts empty."""
        self.mutex = threading.Lock()
        linux.close_all([*self._files.values(), *self._surplus])
        self._files, self._surplus, self._owners = {}, [], {}


class Attachment:
    """One attached session. Owns the connection and the descriptors of the pool.

    `index_fd` (read-only) and `extents_fd` may be closed once mapped (`close_pool_fds`).  The connection
    has one meaning for the client: when it becomes readable the server has closed it (`server_closed`), and
    the session should attach again with the same session id.  Not thread-safe.
    """

    def __init__(
        self,
        sock: socket.socket,
        reply: AttachReply,
        session: bytes,
        locks: LockHolder,
        index_fd: int,
        extents_fd: int,
    ) -> None:
        self.row = reply.row
        self.epoch = reply.epoch
        self.pool_id = reply.pool_id
        self.extents_bytes = reply.extents_bytes
        self.instance_id = reply.instance_id
        self.lock_file: FileId = reply.lock_file
        self.session = session
        self.index_fd = index_fd
        self.extents_fd = extents_fd
        self._sock = sock
        self._locks = locks
        _open_attachments.add(self)

    def fileno(self) -> int:
        """The connection's descriptor, for poll: readable = the server closed it. -1 after `close`."""
        return self._sock.fileno()

    def server_closed(self) -> bool:
        """Whether the server closed the connection (it stopped, died, or refuses this session now)."""
        try:
            self._sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True  # end of file, or an error reply before it

    def close_pool_fds(self) -> None:
        """Closes index and extents; mappings made of them stay."""
        linux.close_all([fd for fd in (self.index_fd, self.extents_fd) if fd >= 0])
        self.index_fd = self.extents_fd = -1

    def close(self) -> None:
        """Detaches: the connection and our descriptors close, the row and everything it owns stay.
        Idempotent.
        """
        _open_attachments.discard(self)
        self._sock.close()
        self.close_pool_fds()

    def goodbye(self, timeout_s: float) -> bool:
        """Gives the row back while the process lives on, then closes; True when the server confirmed it.

        The caller promises that nothing of this session touches the pool any more: its copies have ended
        and its mappings are gone.  Without confirmation the row ends with the process, or, as its byte is
        unlocked, with the server's next start.
        """
        try:
            self._locks.unlock(self.lock_file, self.row, self.session)
            self._sock.settimeout(timeout_s)
            linux.send(self._sock, _BYE)
            return self._sock.recv(64) == _OK
        except OSError:
            return False
        finally:
            self.close()


def process_locks() -> LockHolder:
    """The one LockHolder of this process."""
    return _process_locks


def attach(socket_dir: Path, request: AttachRequest, locks: LockHolder, timeout_s: float = 5.0) -> Attachment:
    """Attaches this process, or attaches it again (same `request.session`), within `timeout_s`.

    Raises Unavailable (no server there, it is starting, busy or stopped; try again), the error the server
    named, or ConfigError / NotPermitted when socket directory or server belong to somebody else.  After an
    error this process holds nothing that it did not hold before.
    """
    deadline = time.monotonic() + timeout_s
    path = socket_dir / ATTACH_SOCKET
    check_socket_path(path)
    if not _exists(socket_dir):
        raise Unavailable(f"no server: {str(socket_dir)!r} does not exist", field="socket_dir")
    check_private_dir(socket_dir, "socket_dir")
    if not locks.mutex.acquire(timeout=timeout_s):
        raise Unavailable("another session of this process is attaching; try again")
    try:
        return _attach(path, request, locks, lambda: deadline - time.monotonic())
    except OSError as error:
        raise Unavailable(f"attach to {str(path)!r}: {error}") from error
    finally:
        locks.mutex.release()


def _exists(socket_dir: Path) -> bool:
    try:
        return socket_dir.exists()
    except OSError as error:
        raise Unavailable(f"no server: {str(socket_dir)!r}: {error.strerror}", field="socket_dir") from error


def _attach(
    path: Path, request: AttachRequest, locks: LockHolder, remaining_s: Callable[[], float]
) -> Attachment:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool_fds: list[int] = []
    undo_lock: tuple[FileId, int] | None = None
    try:
        linux.connect(sock, os.fspath(path), remaining_s())
        _limit(sock, remaining_s)
        if (uid := linux.peer_of(sock).uid) != os.geteuid():
            raise NotPermitted(f"{str(path)!r} is served by uid {uid}, not by us (uid {os.geteuid()})")
        pidfd = linux.open_pidfd(os.getpid())
        try:
            message = msgspec.structs.replace(request, held_locks=locks.held())
            linux.send(sock, msgspec.msgpack.encode(message), [pidfd])
        finally:
            os.close(pidfd)
        _limit(sock, remaining_s)
        reply = _receive_reply(sock, locks, pool_fds)
        known = locks.is_owner(reply.lock_file, reply.row, request.session)
        if not locks.lock(reply.lock_file, reply.row, request.session):
            raise Unavailable(f"byte {reply.row} of sessions.lock is locked by another process; try again")
        if not known:
            undo_lock = (reply.lock_file, reply.row)
        linux.send(sock, _LOCKED)
        _limit(sock, remaining_s)
        if (answer := sock.recv(_MAX_BYTES)) != _OK:
            _raise_refusal(answer)
        sock.settimeout(None)
        return Attachment(sock, reply, request.session, locks, *pool_fds)
    except BaseException:
        if undo_lock is not None:
            locks.unlock(*undo_lock, request.session)
        linux.close_all(pool_fds)
        sock.close()
        raise


def _limit(sock: socket.socket, remaining_s: Callable[[], float]) -> None:
    left = remaining_s()
    if left <= 0:
        raise TimeoutError("the server did not answer in time")
    sock.settimeout(left)


def _receive_reply(sock: socket.socket, locks: LockHolder, pool_fds: list[int]) -> AttachReply:
    """The reply that accepts us. `pool_fds` gets index and extents, `locks` the lock file if it is new
    here.
    """
    received = linux.receive(sock, _MAX_BYTES, _MAX_FDS)
    pool_fds += received.fds[:2]
    if len(received.fds) == _MAX_FDS:
        locks.adopt(received.fds[2])
    reply = _decode(received.data)
    if reply.code:
        _raise_refusal(received.data)
    if received.fds_lost:
        raise Unavailable("the server's descriptors did not arrive: this process has too many open files")
    if len(pool_fds) != 2 or reply.lock_file not in locks.held():
        raise InternalError(f"attach reply came with {len(received.fds)} descriptors")
    return reply


def _decode(data: bytes) -> AttachReply:
    if not data:
        raise Unavailable("the server closed the connection during the attach; try again")
    try:
        return _REPLY.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InternalError(f"attach reply cannot be read: {error}") from error


def _raise_refusal(data: bytes) -> None:
    reply = _decode(data)
    kind: type[KvstrataError] = WIRE_ERRORS.get(reply.code, InternalError)
    raise kind(reply.message, field=reply.field)


_process_locks = LockHolder()
_open_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for attachment in list(_open_attachments):
        attachment.close()
    _process_locks.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
