"""The shared-memory segment of one instance: found and adopted, or made.

A segment is three descriptors: `index`, `extents`, `sessions.lock`.  They are files in the segment
directory on /dev/shm, or, where that is too small or missing or huge pages are asked for, memfds that a holder
process keeps over a restart.

Invariants
1. One server per segment: an OFD lock on the index, taken before anything else is looked at, held for life
   on a descriptor that no other process ever gets.  One server per socket directory: the same on its
   server.pid.
2. The index at its path is locked before it is visible there; only who holds that lock touches the other
   files.
3. An existing file is never truncated, resized or written over: what does not fit is unlinked and made
   anew, so that processes which still map it see their old bytes until they attach again.
4. A segment that an adapter host of the server before still maps is not adopted: each holds a shared lock on
   HOSTS_BYTE of sessions.lock as long as any of its threads can touch the extents.
5. A file of the segment takes its memory before anybody touches it: the index as a whole when it is made or
   adopted, the extents bit by bit (Pool).  So a full file system is an error here, and never a process's death.
6. The three belong together: a new index always comes with new extents and a new sessions.lock, so that a
   lock held by a process of the old segment can never be taken for one of the new.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import holder_client, linux, numa
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.memory.memory_limit import available_bytes, huge_pages, memory_limit
from kvstrata.memory.paths import HOLDER_SOCKET, PID_FILE, check_private_dir, make_private_dir
from kvstrata.native.pool import Pool, PoolError, PoolFormatError

_log = logging.getLogger(__name__)

INDEX, EXTENTS, SESSIONS_LOCK = "index", "extents", "sessions.lock"
MIN_EXTENTS_BYTES = 1 << 20
HOSTS_BYTE = 1 << 20
"""Of sessions.lock, beyond every row's byte."""
_HOSTS_END_S = 2.0
"""Wait for adapter hosts that the kernel killed together with their server."""
_ENTRY_PER_BYTES = 64 << 10
_MIN_ENTRIES, _MAX_ENTRIES = 16 << 10, 4 << 20
_INDEX_BYTES, _INDEX_BYTES_PER_ENTRY = 96 << 10, 144  # upper bounds
_GB = 1 << 30


class SegmentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment shall be."""

    socket_dir: Path
    directory: Path
    """Segment directory, see `paths.segment_dir`."""
    extents_bytes: int
    """Size of L1, a multiple of 4096."""
    entry_capacity: int | None = None
    """Chunks that the index can name; None = one per 64 KiB of L1, between 16 Ki and 4 Mi."""
    policy: str = "LRU"
    watermark: tuple[float, float] | None = None
    max_session_share: int = 8
    huge_pages: bool = False
    """Extents in pages of 2 MiB, of which `extents_bytes` is then a multiple."""
    placement: numa.Placement = numa.Placement()
    """Where pages of the extents go that do not exist yet."""

    def entries(self) -> int:
        """Entry capacity of a new segment."""
        derived = min(max(self.extents_bytes // _ENTRY_PER_BYTES, _MIN_ENTRIES), _MAX_ENTRIES)
        return self.entry_capacity or derived

    def needed_bytes(self) -> int:
        """Memory that L1 and index take once all of it is touched."""
        return self.extents_bytes + _INDEX_BYTES + self.entries() * _INDEX_BYTES_PER_ENTRY


class Descriptors(NamedTuple):
    """What an attached process gets; `index_readonly` cannot be mapped for writing."""

    index_readonly: int
    extents: int
    sessions_lock: int


class _Parts(NamedTuple):
    """One segment's descriptors as the server uses them. `index_fd` carries the lock."""

    index_fd: int
    extents_fd: int
    sessions_lock_fd: int

    def close(self) -> None:
        linux.close_all(list(self))


class Segment:
    """An open segment with its pool.  Owns the descriptors, both locks and the pool until `close`."""

    def __init__(self, settings: SegmentSettings, instance_lock: int, found: _Found) -> None:
        self.pool = found.pool
        self.backing = found.backing
        """"files" or "memfd"."""
        self.adopted = found.adopted
        self.reason = found.reason
        """Why the segment was made anew, or that it was adopted; one line for the log and `doctor`."""
        self.descriptors = Descriptors(
            linux.open_again(found.parts.index_fd, os.O_RDONLY),
            found.parts.extents_fd,
            found.parts.sessions_lock_fd,
        )
        self._settings = settings
        self._parts = found.parts
        self._instance_lock = instance_lock
        self._gpu_nodes = sorted(set(numa.nodes_of_gpus()))
        self._closed = False

    @classmethod
    def open(cls, settings: SegmentSettings) -> Segment:
        """Adopts the segment that an earlier server left, if it fits, else makes one.  Blocks for
        milliseconds.

        Raises ConfigError for a size or directory that cannot be, SegmentError when another server has the
        segment or the socket directory (naming its pid), or when the kernel refuses memory or files.
        """
        check_size(settings)
        make_private_dir(settings.socket_dir, "socket_dir")
        instance_lock = _lock_instance(settings.socket_dir)
        try:
            found = _find(settings)
            try:
                segment = cls(settings, instance_lock, found)
            except BaseException:
                found.pool.close()
                found.parts.close()
                raise
        except BaseException:
            os.close(instance_lock)
            raise
        try:
            numa.place(settings.placement, segment.pool.extents_address, settings.extents_bytes)
        except SegmentError:
            if not found.adopted:
                segment.destroy()
            segment.close()
            raise
        _log.info(
            "segment: %s (%s), %d bytes, epoch %d", found.reason, found.backing, settings.extents_bytes,
            segment.pool.epoch,
        )  # fmt: skip
        return segment

    def numa_status(self) -> dict[str, object]:
        """Where the extents shall lie, where some of their pages do, and the nodes next to GPUs."""
        wanted = self._settings.placement
        return {
            "setting": wanted.setting,
            "nodes": list(wanted.nodes),
            "gpu_nodes": self._gpu_nodes,
            "sampled_pages": numa.sampled_nodes(self.pool.extents_address, self._settings.extents_bytes),
        }

    def close(self) -> None:
        """Lets go of the segment; its bytes stay for the next server.  Idempotent.

        The locks end with the pool's mapping of the index, so only when nobody else refers to the pool and the
        last hold is dropped: until then bytes may still be written, and no other server may adopt them.
        """
        if self._closed:
            return
        self._closed = True
        self.pool.close()
        del self.pool
        os.close(self.descriptors.index_readonly)
        self._parts.close()
        os.close(self._instance_lock)

    def destroy(self) -> None:
        """Removes files or holder, then closes: the memory is free when the last process unmaps it."""
        if self._closed:
            return
        if self.backing == "memfd":
            _dismiss_holder(self._settings.socket_dir)
        else:
            _remove_own_files(self._settings.directory)
        self.close()


class _NoRoom(SegmentError):
    """The file system is full."""


class _Found(NamedTuple):
    pool: Pool
    parts: _Parts
    backing: str
    adopted: bool
    reason: str


def check_size(settings: SegmentSettings) -> None:
    """Raises ConfigError for a size of L1 that no pool has or that memory or cgroup cannot hold."""
    size = settings.extents_bytes
    if size < MIN_EXTENTS_BYTES or size % 4096:
        raise ConfigError(
            f"l1_size_gb: L1 of {size} bytes; it must be a multiple of 4096 and at least "
            f"{MIN_EXTENTS_BYTES} bytes",
            field="l1_size_gb",
        )
    if settings.huge_pages and size % HUGE_PAGE_BYTES:
        raise ConfigError(
            f"l1_size_gb: L1 of {size} bytes is not a multiple of a huge page of {HUGE_PAGE_BYTES} bytes",
            field="l1_size_gb",
        )
    limit = memory_limit()
    needed = settings.needed_bytes()
    if needed > limit.limit_bytes:
        raise ConfigError(
            f"l1_size_gb: L1 of {size / _GB:.2f} GB needs {needed} bytes with its index, {limit.source} is "
            f"{limit.limit_bytes} bytes; set --l1-size-gb to less than {limit.limit_bytes / _GB:.2f}",
            field="l1_size_gb",
        )
    _check_nodes(settings)
    if not settings.huge_pages and needed > (free := available_bytes()):
        _log.warning("segment: L1 needs %d bytes, but only %d are available now", needed, free)


def _check_nodes(settings: SegmentSettings) -> None:
    """Raises ConfigError when the nodes that L1 is bound to do not hold it: the kernel would kill processes."""
    there = settings.placement.memory_bytes
    if there is not None and settings.extents_bytes > there:
        raise ConfigError(
            f"l1.numa: {settings.placement.setting!r}: L1 of {settings.extents_bytes} bytes is to lie on nodes of "
            f"{there} bytes; add nodes, choose interleave, or lower --l1-size-gb",
            field="l1.numa",
        )


# --- locks ------------------------------------------------------------------------------------------------


def _lock_instance(socket_dir: Path) -> int:
    """Takes server.pid of the socket directory for life. Raises SegmentError naming who has it."""
    path = socket_dir / PID_FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SegmentError(f"{str(path)!r}: {error.strerror}", field="socket_dir") from error
    if not linux.lock_whole_file(fd):
        holder = _read_pid(path)
        os.close(fd)
        raise SegmentError(
            f"socket directory {str(socket_dir)!r} is in use by server process {holder}; stop that server or "
            "choose another --port or --socket-dir",
            field="socket_dir",
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _read_pid(path: Path) -> str:
    try:
        return path.read_text().strip() or "(unknown)"
    except OSError:
        return "(unknown)"


def _open_locked_index(directory: Path) -> tuple[int, bool]:
    """The index at its path, locked: an existing one, or an empty new one (then True).

    Raises SegmentError when another server has it.
    """
    path = directory / INDEX
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            made = _make_locked_index(path)
            if made is None:
                continue  # another starting server was quicker; look at its index
            return made, True
        if not linux.lock_whole_file(fd):
            os.close(fd)
            raise SegmentError(
                f"segment {str(directory)!r} is in use by server process {_read_pid(directory / PID_FILE)}; "
                "stop that server or choose another --port or --instance-id",
                field="segment",
            )
        if _is_at(path, fd):
            return fd, False
        os.close(fd)  # it was replaced between open and lock


def _make_locked_index(path: Path) -> int | None:
    """A new index, locked before it gets its name; None when the name is taken meanwhile."""
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if not linux.lock_whole_file(fd):
            raise SegmentError("a file nobody else can see is locked")
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)  # a directory descriptor makes it follow the link
    except FileExistsError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_at(path: Path, fd: int) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == linux.file_id(fd)


# --- finding and making -----------------------------------------------------------------------------------


def _find(settings: SegmentSettings) -> _Found:
    held = _adopt_held(settings)
    if isinstance(held, _Found):
        _remove_files(settings.directory)
        return held
    if settings.huge_pages:
        _remove_files(settings.directory)
        if held:
            _log.warning("segment: what the holder kept was given up: %s", held)
            _dismiss_holder(settings.socket_dir)  # its huge pages are needed for the new one
        _check_huge_pages(settings)
        return _make_held(settings, "huge pages were asked for")
    try:
        filed = _adopt_or_make_files(settings)
    except OSError as error:
        raise SegmentError(f"segment {str(settings.directory)!r}: {error}", field="segment") from error
    if isinstance(filed, _Found):
        if held:
            _log.warning("segment: what the holder kept was given up: %s", held)
            _dismiss_holder(settings.socket_dir)
        return filed
    return _make_held(settings, "; ".join(filter(None, [held, filed])))


def _check_huge_pages(settings: SegmentSettings) -> None:
    """Raises SegmentError when the reserve of huge pages, the machine's or that of the nodes, does not hold L1."""
    reserve, needed = huge_pages(), settings.extents_bytes // HUGE_PAGE_BYTES
    if needed > reserve.free:
        raise SegmentError(
            f"l1.use_hugepages: L1 needs {needed} huge pages of 2 MiB, {reserve.free} of {reserve.total} are free; "
            f"reserve them with `sysctl -w vm.nr_hugepages={reserve.total - reserve.free + needed}`, lower "
            "--l1-size-gb or leave --l1-use-hugepages away",
            field="l1.use_hugepages",
        )
    wanted = settings.placement
    if wanted.policy == linux.MPOL_BIND and needed > (free := numa.free_huge_pages(wanted.nodes)):
        raise SegmentError(
            f"l1.numa: {wanted.setting!r}: L1 needs {needed} huge pages of 2 MiB, {free} are free on nodes "
            f"{', '.join(map(str, wanted.nodes))}; reserve them there (nr_hugepages below "
            "/sys/devices/system/node/nodeN/hugepages) or choose interleave",
            field="l1.numa",
        )


def _adopt(parts: _Parts, settings: SegmentSettings) -> Pool | str:
    """The pool in existing descriptors, or why it does not fit."""
    host = _host_left(parts.sessions_lock_fd)
    if host is not None:
        return f"an adapter host of the server before, process {host}, does not end"
    try:
        return Pool.adopt(
            parts.index_fd,
            parts.extents_fd,
            policy=settings.policy,
            watermark=settings.watermark,
            max_session_share=settings.max_session_share,
            extents_bytes=settings.extents_bytes,
            entry_capacity=settings.entry_capacity or 0,
        )
    except PoolFormatError as error:
        return f"its {error.field} is {error.found:#x}, it should be {error.expected:#x}"
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return str(error)
    except ValueError as error:
        raise ConfigError(f"pool: {error}", field="pool") from error


def _host_left(sessions_lock_fd: int) -> int | None:
    """An adapter host that still maps the segment, after it had some time to end; None: there is none (any more)."""
    deadline_s = time.monotonic() + _HOSTS_END_S
    while (host := linux.byte_locker(sessions_lock_fd, HOSTS_BYTE)) is not None:
        if time.monotonic() > deadline_s:
            return host
        time.sleep(0.005)
    return None


def _create(parts: _Parts, settings: SegmentSettings) -> Pool:
    """A pool in new files. Raises _NoRoom when their file system has no memory for the index."""
    try:
        return Pool.create(
            parts.index_fd,
            parts.extents_fd,
            extents_bytes=settings.extents_bytes,
            entry_capacity=settings.entries(),
            policy=settings.policy,
            watermark=settings.watermark,
            max_session_share=settings.max_session_share,
        )
    except ValueError as error:
        raise ConfigError(f"pool: {error}", field="pool") from error
    except (PoolError, OSError) as error:
        kind = _NoRoom if isinstance(error, OSError) and error.errno == errno.ENOSPC else SegmentError
        raise kind(f"the pool cannot be made: {error}", field="segment") from error


def _adopt_or_make_files(settings: SegmentSettings) -> _Found | str:
    """A segment of files, or why there can be none."""
    directory = settings.directory
    if not directory.parent.is_dir() or not os.access(directory.parent, os.W_OK | os.X_OK):
        return f"{str(directory.parent)!r} is missing or not writable"
    make_private_dir(directory, "segment")
    reason = "no segment was there"
    while True:
        index, fresh = _open_locked_index(directory)
        if fresh:
            break
        found = _adopt_files(index, settings)
        if isinstance(found, _Found):
            _write_pid(directory)
            return found
        reason = f"the segment there was given up: {found}"
        _log.warning("segment: %s", reason)
        (directory / INDEX).unlink()
        os.close(index)
    parts = None
    try:
        for name in (EXTENTS, SESSIONS_LOCK):
            (directory / name).unlink(missing_ok=True)
        free = _free_bytes(directory)
        if free < settings.needed_bytes():
            _remove_own_files(directory)
            os.close(index)
            return f"{str(directory.parent)!r} has {free} bytes free, {settings.needed_bytes()} are needed"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        parts = _Parts(index, os.open(directory / EXTENTS, flags, 0o600), -1)
        parts = parts._replace(sessions_lock_fd=os.open(directory / SESSIONS_LOCK, flags, 0o600))
        pool = _create(parts, settings)
    except _NoRoom as error:  # somebody took it since we looked
        _remove_own_files(directory)
        linux.close_all(list(parts or [index]))
        return str(error)
    except BaseException:
        linux.close_all([fd for fd in parts or [index] if fd >= 0])
        raise
    _write_pid(directory)
    return _Found(pool, parts, "files", False, f"made, {reason}")


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
    if missing > (free := _free_bytes(directory)):
        found: Pool | str = f"{missing} bytes of its L1 are not there yet and only {free} are free"
    else:
        found = _adopt(parts, settings)
    if isinstance(found, str):
        linux.close_all([extents, sessions_lock])
        return found
    return _Found(found, parts, "files", True, "adopted")


def _adopt_held(settings: SegmentSettings) -> _Found | str:
    """The segment that a holder keeps; else why it cannot be used, empty when there is none."""
    path = settings.socket_dir / HOLDER_SOCKET
    if not path.exists():
        return ""
    try:
        fds = holder_client.fetch(path)
    except PermissionError as error:
        raise SegmentError(f"{str(path)!r}: {error.strerror}; remove it", field="socket_dir") from error
    except holder_client.HolderUnreachable as error:
        return f"no holder answers: {error}"
    if not fds:
        return ""
    # A description of our own: the holder's would keep the lock when we die.
    parts = _Parts(linux.open_again(fds[0], os.O_RDWR), fds[1], fds[2])
    os.close(fds[0])
    if not linux.lock_whole_file(parts.index_fd):
        parts.close()
        raise SegmentError(
            f"the segment kept by the holder of {str(path)!r} is in use by another server", field="segment"
        )
    if linux.has_huge_pages(parts.extents_fd) != settings.huge_pages:
        found: Pool | str = f"huge pages are {'on' if settings.huge_pages else 'off'} now"
    else:
        found = _adopt(parts, settings)
    if isinstance(found, str):
        parts.close()
        return found
    return _Found(found, parts, "memfd", True, "adopted")


def _make_held(settings: SegmentSettings, reason: str) -> _Found:
    """A segment of memfds, handed to a holder. `reason` says why it is needed."""
    path = settings.socket_dir / HOLDER_SOCKET
    fds: list[int] = []
    pool: Pool | None = None
    try:
        for name in (INDEX, EXTENTS, SESSIONS_LOCK):
            fds.append(
                linux.create_memfd(f"kvstrata-{name}", huge_pages=settings.huge_pages and name == EXTENTS)
            )
        parts = _Parts(linux.open_again(fds[0], os.O_RDWR), fds[1], fds[2])
        try:
            if not linux.lock_whole_file(parts.index_fd):
                raise SegmentError("a memfd that nobody else can see is locked")
            pool = _create(parts, settings)
            for fd in fds:
                linux.seal_size(fd)
            try:
                holder_client.keep(path, fds)
            except holder_client.HolderUnreachable:
                holder_client.start(path)
                holder_client.keep(path, fds)
        except BaseException:
            if pool is not None:
                pool.close()
            os.close(parts.index_fd)
            raise
    except (OSError, holder_client.HolderUnreachable) as error:
        linux.close_all(fds)
        raise SegmentError(f"memfd segment ({reason}): {error}", field="segment") from error
    except BaseException:
        linux.close_all(fds)
        raise
    os.close(fds[0])  # the holder has the description that stays unlocked
    _log.warning("segment: kept in memory of its own by a holder process: %s", reason)
    return _Found(pool, parts, "memfd", False, f"made, {reason}")


def _dismiss_holder(socket_dir: Path) -> None:
    try:
        holder_client.dismiss(socket_dir / HOLDER_SOCKET)
    except (OSError, holder_client.HolderUnreachable) as error:
        _log.warning("segment: the holder could not be told to end: %s", error)
    (socket_dir / HOLDER_SOCKET).unlink(missing_ok=True)  # then it ends by itself


def _remove_files(directory: Path) -> None:
    """Frees files of an earlier segment that the one kept by a holder replaced."""
    if not (directory / INDEX).exists():
        return
    check_private_dir(directory, "segment")
    index, _ = _open_locked_index(directory)
    try:
        _remove_own_files(directory)
    finally:
        os.close(index)


def _remove_own_files(directory: Path) -> None:
    """The caller has the index locked; it goes last, because its lock guards the others."""
    for name in (EXTENTS, SESSIONS_LOCK, PID_FILE, INDEX):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _write_pid(directory: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / PID_FILE, flags, 0o600)
    try:
        os.write(fd, f"{os.getpid()}\n".encode())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _log.warning("segment: %s stays empty: %s", directory / PID_FILE, error.strerror)  # it is for people
    finally:
        os.close(fd)
