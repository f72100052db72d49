"""The shared-memory segment of one instance: adopts an existing one or makes a new one.

A segment consists of `index`, `extents` and `sessions.lock`.  They are files in the segment directory on /dev/shm.  If
that is too small or missing, or if huge pages are asked for, they are memfds, which the keeper keeps open for the next
server of the same command (process/keeper.py).

Invariants
1. One server per segment: it takes an OFD lock on the index before it reads anything else, and holds it for life on a
   descriptor that no other process ever gets.  One server per socket directory: likewise with its server.pid.
2. An index is locked before it gets its path; only the process with that lock touches the other files
   (`segment_files`).
3. An existing file is never truncated, resized or overwritten: a file that does not fit is unlinked and made anew, so
   that processes which still map it see their old bytes until they attach again.
4. A segment is not adopted while an adapter host of the previous server maps it: each host holds a shared lock on
   HOSTS_BYTE of sessions.lock while any of its threads can touch the extents.
5. The memory of a file is allocated before any process touches it: all of the index when it is made or adopted, the
   extents step by step (Pool).  So a full file system is an error here and never kills a process.
6. The three files are made together: a new index always comes with new extents and a new sessions.lock, so that a lock
   held by a process of the old segment is never taken for a lock in the new one.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstrata.config.private_dir import make_private_dir, path_id
from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import linux
from kvstrata.memory.paths import LESSONS, PID_FILE
from kvstrata.memory.segment_files import (
    EXTENTS,
    HOSTS_BYTE,
    INDEX,
    SESSIONS_LOCK,
    free_bytes,
    lock_instance,
    lock_soon,
    make_segment_dir,
    open_locked_index,
    remove_own,
    remove_replaced,
    write_pid,
)
from kvstrata.memory.segment_settings import SegmentSettings, check_huge_pages, check_size, place_memory
from kvstrata.native.core import Pool, PoolError, PoolFormatError
from kvstrata.patience import patience
from kvstrata.process.keeper import NOT_RESTARTED, Restarts, hold_pool

_log = logging.getLogger(__name__)

_HOSTS_END_S = 2.0
"""Maximum wait for adapter hosts that the kernel kills together with their server."""


class Descriptors(NamedTuple):
    """Descriptors that attached processes get; those named `readonly` cannot be mapped for writing."""

    index_readonly: int
    extents: int
    extents_readonly: int
    """For a process without a slice, which stores nothing."""
    sessions_lock: int


class _Parts(NamedTuple):
    """The server's descriptors of one segment. The lock is on `index_fd`."""

    index_fd: int
    extents_fd: int
    sessions_lock_fd: int

    def close(self) -> None:
        linux.close_all(list(self))


class Segment:
    """An open segment with its pool.  Owns the descriptors, the locks and the pool until `close`."""

    def __init__(
        self, settings: SegmentSettings, found: _Found, instance_lock: int, restarts: Restarts
    ) -> None:
        """`instance_lock`: descriptor with the lock of the socket directory, which the segment owns from now on."""
        self.pool = found.pool
        self.backing = found.backing
        """"files" or "memfd"."""
        self.adopted = found.adopted
        self.reason = found.reason
        """Whether the segment was adopted, or why it was made anew; one line for the log."""
        self.descriptors = Descriptors(
            linux.open_again(found.parts.index_fd, os.O_RDONLY),
            found.parts.extents_fd,
            linux.open_again(found.parts.extents_fd, os.O_RDONLY),
            found.parts.sessions_lock_fd,
        )
        self._settings = settings
        self._parts = found.parts
        self._instance_lock = instance_lock
        self._restarts = restarts
        self._closed = False

    @classmethod
    def open(cls, settings: SegmentSettings, restarts: Restarts = NOT_RESTARTED) -> Segment:
        """Adopt the segment that an earlier server left, if it fits, or make one.  Blocks for milliseconds.

        `restarts`: the connection to the keeper, which is told of the segment.  Raises ConfigError for an impossible
        size or directory, SegmentError when another server has the segment or the socket directory (naming its pid), or
        when the kernel refuses memory or files.
        """
        check_size(settings)
        make_private_dir(settings.socket_dir, "socket_dir")
        instance_lock = lock_instance(settings.socket_dir)
        try:
            place_memory(settings.numa)
            found = _find(settings, restarts)
        except BaseException:
            os.close(instance_lock)
            raise
        try:
            segment = cls(settings, found, instance_lock, restarts)
        except BaseException:
            found.pool.close()
            found.parts.close()
            os.close(instance_lock)
            raise
        if segment.backing == "files":
            hold_pool(restarts, [str(settings.directory / SESSIONS_LOCK)])
        elif not segment._keep():
            _log.warning(
                "segment: L1 is lost when this process ends, since it has no keeper (--no-supervise)"
            )
        _log.info(
            "segment: %s (%s), %d bytes, epoch %d", found.reason, found.backing, settings.extents_bytes,
            segment.pool.epoch,
        )  # fmt: skip
        return segment

    def _keep(self) -> bool:
        """Have the keeper keep the files open for the next server. Returns False if it cannot or does not exist."""
        fds = (self._parts.sessions_lock_fd, self._parts.index_fd, self._parts.extents_fd)
        return hold_pool(self._restarts, [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds])

    # --- files that others may remove -----------------------------------------------------------------------

    @property
    def has_lock(self) -> bool:
        """Whether the server.pid in the socket directory is the one that this segment has locked."""
        return path_id(self._settings.socket_dir / PID_FILE) == linux.file_id(self._instance_lock)

    def lock_again(self, socket_dir: Path) -> None:
        """Lock this socket directory instead. Raises SegmentError if another server has it."""
        before, self._instance_lock = self._instance_lock, lock_instance(socket_dir)
        self._settings = msgspec.structs.replace(self._settings, socket_dir=socket_dir)
        os.close(before)

    def paths(self) -> list[Path]:
        """The paths of its files; empty if they are memfds."""
        if self.backing == "memfd":
            return []
        return [self._settings.directory / name for name in (INDEX, EXTENTS, SESSIONS_LOCK)]

    def files_are_gone(self) -> bool:
        """Whether its files were removed or replaced."""
        return self.backing == "files" and [path_id(path) for path in self.paths()] != list(
            map(linux.file_id, self._parts)
        )

    def hold(self) -> None:
        """Have the keeper keep the segment, whose files were removed. Raises SegmentError if no keeper does."""
        if not self._keep():
            raise SegmentError(
                f"the files of L1 in {str(self._settings.directory)!r} were removed", field="l1.segment_dir"
            )
        self.backing = "memfd"

    @property
    def place(self) -> Path:
        """The folder of its files."""
        return self._settings.directory

    def close(self) -> None:
        """Close the segment; its bytes stay for the next server.  Idempotent.

        The locks end with the pool's mapping of the index, that is, when nothing refers to the pool any more and the
        last hold is dropped: until then bytes may still be written, and no other server may adopt them.
        """
        if self._closed:
            return
        self._closed = True
        self.pool.close()
        del self.pool
        os.close(self.descriptors.index_readonly)
        os.close(self.descriptors.extents_readonly)
        self._parts.close()
        os.close(self._instance_lock)

    def destroy(self) -> None:
        """Remove the files, then close: the memory is free when the last process unmaps it."""
        if self._closed:
            return
        if self.backing == "memfd":
            hold_pool(self._restarts, [])
        else:
            remove_own(self._settings.directory)
        self.close()


class _NoRoom(SegmentError):
    """The file system is full."""


class _Found(NamedTuple):
    pool: Pool
    parts: _Parts
    backing: str
    adopted: bool
    reason: str


# --- finding and making -----------------------------------------------------------------------------------


def _find(settings: SegmentSettings, restarts: Restarts) -> _Found:
    why = ""
    if restarts.pool_fds:
        kept = _adopt_kept(settings, *restarts.pool_fds)
        if isinstance(kept, _Found):
            remove_replaced(settings.directory)
            return kept
        why = f"the segment that the keeper has was given up: {kept}"
        _log.warning("segment: %s", why)
        hold_pool(restarts, [])
    if settings.huge_pages:
        remove_replaced(settings.directory)
        check_huge_pages(settings, wait=bool(why))
        return _make_memfds(settings, "huge pages were asked for")
    try:
        filed = _adopt_or_make_files(settings)
    except OSError as error:
        raise SegmentError(f"segment {str(settings.directory)!r}: {error}", field="segment") from error
    if isinstance(filed, _Found):
        return filed
    return _make_memfds(settings, "; ".join(filter(None, [why, filed])))


def _adopt(parts: _Parts, settings: SegmentSettings) -> Pool | str:
    """The pool in existing descriptors, or the reason why it cannot be adopted."""
    host = _host_left(parts.sessions_lock_fd)
    if host is not None:
        return f"an adapter host of the previous server, process {host}, has not ended"
    try:
        return Pool.adopt(
            parts.index_fd,
            parts.extents_fd,
            policy=settings.policy,
            max_session_share=settings.max_session_share,
            extents_bytes=settings.extents_bytes,
            entry_capacity=settings.entry_capacity or 0,
            lessons=_lessons(settings),
        )
    except PoolFormatError as error:
        return f"its {error.field} is {error.found:#x} and should be {error.expected:#x}"
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return str(error)
    except ValueError as error:
        raise ConfigError(f"pool: {error}", field="pool") from error


def _lessons(settings: SegmentSettings) -> bytes:
    """The learnt state of an earlier server's policy; empty if it is missing or unusable."""
    path = settings.socket_dir / LESSONS
    try:
        lessons = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        _log.warning("segment: %s: %s; the eviction policy starts without its history", path, error)
        return b""
    if Pool.are_lessons(lessons):
        return lessons
    _log.warning("segment: %s is damaged or of another version; the eviction policy starts without it", path)
    return b""


def _host_left(sessions_lock_fd: int) -> int | None:
    """The pid of an adapter host that still maps the segment after `_HOSTS_END_S`; None if no host does."""
    deadline_s = time.monotonic() + patience(_HOSTS_END_S)
    while (host := linux.byte_locker(sessions_lock_fd, HOSTS_BYTE)) is not None:
        if time.monotonic() > deadline_s:
            return host
        time.sleep(0.005)
    return None


def _create(parts: _Parts, settings: SegmentSettings) -> Pool:
    """Make a pool in new files. Raises _NoRoom when their file system has no memory for the index."""
    try:
        return Pool.create(
            parts.index_fd,
            parts.extents_fd,
            extents_bytes=settings.extents_bytes,
            entry_capacity=settings.entries(),
            policy=settings.policy,
            max_session_share=settings.max_session_share,
            lessons=_lessons(settings),
        )
    except ValueError as error:
        raise ConfigError(f"pool: {error}", field="pool") from error
    except (PoolError, OSError) as error:
        kind = _NoRoom if isinstance(error, OSError) and error.errno == errno.ENOSPC else SegmentError
        raise kind(f"the pool cannot be made: {error}", field="segment") from error


def _adopt_or_make_files(settings: SegmentSettings) -> _Found | str:
    """Adopt or make a segment of files; or return why that is impossible."""
    directory = settings.directory
    if not directory.parent.is_dir() or not os.access(directory.parent, os.W_OK | os.X_OK):
        return f"{str(directory.parent)!r} is missing or not writable"
    make_segment_dir(directory)
    reason = "no segment was there"
    while True:
        index, fresh = open_locked_index(directory)
        if fresh:
            break
        found = _adopt_files(index, settings)
        if isinstance(found, _Found):
            write_pid(directory)
            return found
        reason = f"the segment there was given up: {found}"
        _log.warning("segment: %s", reason)
        (directory / INDEX).unlink()
        os.close(index)
    parts = None
    try:
        for name in (EXTENTS, SESSIONS_LOCK):
            (directory / name).unlink(missing_ok=True)
        free, needed = free_bytes(directory), settings.needed_bytes()
        if free < needed:
            remove_own(directory)
            os.close(index)
            return f"{str(directory.parent)!r} has {free} bytes free, but L1 needs {needed}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        parts = _Parts(index, os.open(directory / EXTENTS, flags, 0o600), -1)
        parts = parts._replace(sessions_lock_fd=os.open(directory / SESSIONS_LOCK, flags, 0o600))
        pool = _create(parts, settings)
    except _NoRoom as error:  # another process took the memory after the check
        remove_own(directory)
        linux.close_all(list(parts or [index]))
        return str(error)
    except BaseException:
        linux.close_all([fd for fd in parts or [index] if fd >= 0])
        raise
    write_pid(directory)
    return _Found(pool, parts, "files", False, f"made, because {reason}")


def _adopt_files(index: int, settings: SegmentSettings) -> _Found | str:
    directory = settings.directory
    try:
        extents = os.open(directory / EXTENTS, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return f"extents: {error.strerror}"
    try:
        sessions_lock = os.open(directory / SESSIONS_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        os.close(extents)
        return f"sessions.lock: {error.strerror}"
    parts = _Parts(index, extents, sessions_lock)
    missing = settings.extents_bytes - os.fstat(extents).st_blocks * 512
    if missing > (free := free_bytes(directory)):
        found: Pool | str = f"{missing} bytes of its L1 have no memory yet and only {free} are free"
    else:
        found = _adopt(parts, settings)
    if isinstance(found, str):
        linux.close_all([extents, sessions_lock])
        return found
    return _Found(found, parts, "files", True, "adopted")


def _adopt_kept(settings: SegmentSettings, sessions_lock: int, index: int, extents: int) -> _Found | str:
    """Adopt the segment that the keeper has kept open; or return why it does not fit. Takes the descriptors."""
    # A new file description for the index: a lock on the keeper's would outlive us.
    parts = _Parts(linux.open_again(index, os.O_RDWR), extents, sessions_lock)
    os.close(index)
    if not lock_soon(parts.index_fd):
        found: Pool | str = "another server has it"
    elif linux.has_huge_pages(extents) != settings.huge_pages:
        found = f"huge pages are {'on' if settings.huge_pages else 'off'} now"
    else:
        found = _adopt(parts, settings)
    if isinstance(found, str):
        parts.close()
        return found
    return _Found(found, parts, "memfd", True, "adopted")


def _make_memfds(settings: SegmentSettings, reason: str) -> _Found:
    """Make a segment of memfds. `reason`: why files are not used. Raises SegmentError."""
    fds: list[int] = []
    try:
        for name in (INDEX, EXTENTS, SESSIONS_LOCK):
            fds.append(
                linux.create_memfd(f"kvstrata-{name}", huge_pages=settings.huge_pages and name == EXTENTS)
            )
        if not linux.lock_whole_file(fds[0]):
            raise SegmentError("a memfd that no other process can see is locked")
        parts = _Parts(*fds)
        pool = _create(parts, settings)
        try:
            for fd in fds:
                linux.seal_size(fd)
        except BaseException:
            pool.close()
            raise
    except OSError as error:
        linux.close_all(fds)
        raise SegmentError(f"memfd segment ({reason}): {error}", field="segment") from error
    except BaseException:
        linux.close_all(fds)
        raise
    _log.warning("segment: L1 is in memfds: %s", reason)
    return _Found(pool, parts, "memfd", False, f"made, because {reason}")
