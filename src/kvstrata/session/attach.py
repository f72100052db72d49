"""The process's side of the attach handshake.  It blocks, up to a deadline, on the client's attaching thread.

A process's right to the pool lives as long as the process: the server holds its pidfd, and the process holds a
POSIX record lock on its row's byte of sessions.lock.  Such locks vanish as soon as the process closes *any*
descriptor of that file, so `LockHolder` keeps exactly one descriptor per file, for the process's life and for all of
its sessions.  A forked child has no such right: its pid is another one, record locks are not inherited, mappings are
MADV_DONTFORK, and it closes the inherited descriptors at once (`os.register_at_fork`).

This module imports no asyncio, and nothing that would pull numba, llvmlite or torch into an engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvstrata.config.private_dir import check_private_dir
from kvstrata.errors import ConfigError, InternalError, NotPermitted, Unavailable, from_wire
from kvstrata.memory import linux
from kvstrata.memory.paths import RPC_SOCKET, check_socket_path
from kvstrata.rpc.wire import AttachReply, AttachRequest
from kvstrata.session.zmtp import Connection

_MAX_FDS = 3
MAX_REPLY_BYTES = 16 << 20
"""Maximum length of a message from the server."""
MAX_UNSENT_BYTES = 16 << 20
"""Maximum bytes of requests that wait for a server that does not read."""
_LOCKED, _BYE, _OK = b"locked", b"bye", b"ok"
_REPLY = msgspec.msgpack.Decoder(AttachReply)

FileId = tuple[int, int]
"""(device, inode) of a sessions.lock."""


class LockHolder:
    """Holds this process's descriptors of sessions.lock files, one per file, and the session that locked each byte.

    The descriptors are never closed.

    Use `process_locks()`: a second LockHolder in one process would open a second descriptor.  Thread-safe. Attaches of
    one process are serialized (`mutex`), because the server must know which files are already open before it sends
    another one.
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
        """Keep `fd` for the process's life, even a second descriptor of a file: closing it would drop the locks."""
        file = linux.file_id(fd)
        if file in self._files:
            self._surplus.append(fd)
        else:
            self._files[file] = fd
        return file

    def lock(self, file: FileId, row: int, session: bytes) -> bool:
        """Lock the byte of `row` for `session`; False when another process has it. Idempotent."""
        if not linux.lock_byte(self._files[file], row):
            return False
        self._owners[file, row] = session
        return True

    def unlock(self, file: FileId, row: int, session: bytes) -> None:
        """Unlock the byte if `session` has it; another session of this process may have the row by now."""
        if self._owners.get((file, row)) == session:
            del self._owners[file, row]
            linux.unlock_byte(self._files[file], row)

    def is_owner(self, file: FileId, row: int, session: bytes) -> bool:
        """Whether `session` locked that byte."""
        return self._owners.get((file, row)) == session

    def forget_in_child(self) -> None:
        """Called in a forked child, which has no locks: close the descriptors and start empty."""
        self.mutex = threading.Lock()
        linux.close_all([*self._files.values(), *self._surplus])
        self._files, self._surplus, self._owners = {}, [], {}


class Attachment:
    """One attached session. Owns the connection and the descriptors of the pool.

    `link` is the connection, which does not block once the attach is complete; when the server closes it, the process
    should attach again with the same session id.  `index_fd` (read-only) and `extents_fd` may be closed once mapped
    (`close_pool_fds`).  Not thread-safe.
    """

    def __init__(
        self,
        link: Connection,
        reply: AttachReply,
        session: bytes,
        locks: LockHolder,
        index_fd: int,
        extents_fd: int,
        early: Sequence[bytes] = (),
    ) -> None:
        self.row = reply.row
        self.epoch = reply.epoch
        self.pool_id = reply.pool_id
        self.extents_bytes = reply.extents_bytes
        self.max_reserved_bytes = reply.max_reserved_bytes
        self.instance_id = reply.instance_id
        self.lock_file: FileId = reply.lock_file
        self.session = session
        self.index_fd = index_fd
        self.extents_fd = extents_fd
        self.link = link
        self.early = list(early)
        """Messages that arrived with the end of the handshake."""
        self._locks = locks
        _open_attachments.add(self)

    def fileno(self) -> int:
        """The connection's descriptor. -1 after `close`."""
        return self.link.fileno()

    def close_pool_fds(self) -> None:
        """Close index and extents; their mappings stay."""
        linux.close_all([fd for fd in (self.index_fd, self.extents_fd) if fd >= 0])
        self.index_fd = self.extents_fd = -1

    def close(self) -> None:
        """Detach: close the connection and our descriptors; the row and everything it owns stay. Idempotent."""
        _open_attachments.discard(self)
        self.link.close()
        self.close_pool_fds()

    def goodbye(self, timeout_s: float) -> bool:
        """Free the row while the process continues to live, then close; True when the server confirmed it.

        The caller guarantees that this session does not touch the pool any more: its copies have ended and its mappings
        are gone.  Without the server's confirmation the row ends with the process, or when the next server starts and
        finds its byte unlocked.
        """
        ends_s = time.monotonic() + timeout_s
        try:
            self._locks.unlock(self.lock_file, self.row, self.session)
            self.link.socket.settimeout(timeout_s)
            self.link.send(_BYE)
            while (left_s := ends_s - time.monotonic()) > 0:
                self.link.socket.settimeout(left_s)
                self.link.flush()
                if _OK in self.link.receive():
                    return True
            return False
        except OSError:
            return False
        finally:
            self.close()


def process_locks() -> LockHolder:
    """The one LockHolder of this process."""
    return _process_locks


def attach_in(
    places: Sequence[Path], request: AttachRequest, locks: LockHolder, timeout_s: float = 5.0
) -> tuple[Attachment, Path]:
    """`attach` in the first of these socket directories where a server answers, `timeout_s` for each; and which one.

    A directory that `attach` does not trust is skipped.  If no server answers in any of them, raises the error for the
    first one, with what is wrong in the others.
    """
    problems: list[Unavailable | ConfigError] = []
    for place in places:
        try:
            return attach(place, request, locks, timeout_s), place
        except (Unavailable, ConfigError) as error:
            problems.append(error)
    text = "; ".join(problem.message for problem in problems)
    raise type(problems[0])(text, field=problems[0].field)


def attach(socket_dir: Path, request: AttachRequest, locks: LockHolder, timeout_s: float = 5.0) -> Attachment:
    """Attach this process, or attach it again (same `request.session`), within `timeout_s`.

    Raises Unavailable (no server runs, or it is starting, busy or stopped; try again), the error that the server
    named, or ConfigError / NotPermitted when the socket directory or server is another user's.  After an error this
    process holds the same descriptors and locks as before.
    """
    deadline = time.monotonic() + timeout_s
    path = socket_dir / RPC_SOCKET
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
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    pool_fds: list[int] = []
    undo_lock: tuple[FileId, int] | None = None
    try:
        linux.connect(sock, os.fspath(path), remaining_s())
        _limit(sock, remaining_s)
        if (uid := linux.credentials_of(sock).uid) != os.geteuid():
            raise NotPermitted(f"{str(path)!r} is served by uid {uid}, not by us (uid {os.geteuid()})")
        link = Connection(sock, b"DEALER", max_frame_bytes=MAX_REPLY_BYTES, max_unsent_bytes=MAX_UNSENT_BYTES)
        pidfd = linux.open_pidfd(os.getpid())
        try:
            message = msgspec.structs.replace(request, held_locks=locks.held())
            with contextlib.suppress(BrokenPipeError):  # a refusal that arrived before can still be read
                link.send(msgspec.msgpack.encode(message), [pidfd])
        finally:
            os.close(pidfd)
        reply = _receive_reply(link, remaining_s, locks, pool_fds)
        known = locks.is_owner(reply.lock_file, reply.row, request.session)
        if not locks.lock(reply.lock_file, reply.row, request.session):
            raise Unavailable(f"byte {reply.row} of sessions.lock is locked by another process; try again")
        if not known:
            undo_lock = (reply.lock_file, reply.row)
        with contextlib.suppress(BrokenPipeError):
            link.send(_LOCKED)
        while not (messages := _receive(link, remaining_s)):
            pass
        if messages[0] != _OK:
            _raise_refusal(messages[0])
        sock.setblocking(False)
        return Attachment(link, reply, request.session, locks, pool_fds[0], pool_fds[1], early=messages[1:])
    except BaseException:
        sock.close()  # first, so that a server that finds the byte unlocked also finds the connection closed
        if undo_lock is not None:
            locks.unlock(*undo_lock, request.session)
        linux.close_all(pool_fds)
        raise


def _limit(sock: socket.socket, remaining_s: Callable[[], float]) -> None:
    left = remaining_s()
    if left <= 0:
        raise TimeoutError("the server did not answer in time")
    sock.settimeout(left)


def _receive(link: Connection, remaining_s: Callable[[], float]) -> list[bytes]:
    """What has arrived after one read, within the time that remains; unsent bytes are sent first."""
    _limit(link.socket, remaining_s)
    link.flush()
    return link.receive()


def _receive_reply(
    link: Connection, remaining_s: Callable[[], float], locks: LockHolder, pool_fds: list[int]
) -> AttachReply:
    """The reply of an accepted attach. `pool_fds` gets index and extents, `locks` the lock file if it is new here."""
    fds: list[int] = []
    fds_lost = False
    messages: list[bytes] = []
    while not messages:
        _limit(link.socket, remaining_s)
        link.flush()
        received = link.receive_with_fds(_MAX_FDS)
        messages = received.messages
        fds += received.fds
        fds_lost |= received.fds_lost
    pool_fds += fds[:2]
    if len(fds) >= _MAX_FDS:
        locks.adopt(fds[2])
    reply = _decode(messages[0])
    if reply.code:
        _raise_refusal(messages[0])
    if fds_lost:
        raise Unavailable("the server's descriptors did not arrive: this process has too many open files")
    if len(pool_fds) != 2 or reply.lock_file not in locks.held():
        raise InternalError(f"attach reply came with {len(fds)} descriptors")
    return reply


def _decode(data: bytes) -> AttachReply:
    try:
        return _REPLY.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InternalError(f"attach reply cannot be read: {error}") from error


def _raise_refusal(data: bytes) -> None:
    reply = _decode(data)
    raise from_wire(reply.code, reply.message, field=reply.field)


_process_locks = LockHolder()
_open_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for attachment in list(_open_attachments):
        attachment.close()
    _process_locks.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
