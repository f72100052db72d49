"""The files of a segment and of its socket directory: names, locks, removal.

1. The server that uses a segment has an OFD lock on its index.  It takes the lock before the index gets its name, and
   only that server touches the other files.  An OFD lock on server.pid does the same for a socket directory.
2. The index is removed last, since its lock guards the other files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path

from kvstrata.config.private_dir import check_private_dir, make_private_dir
from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import linux
from kvstrata.memory.paths import PID_FILE

_log = logging.getLogger(__name__)

INDEX, EXTENTS, SESSIONS_LOCK = "index", "extents", "sessions.lock"
HOSTS_BYTE = 1 << 20
"""Byte of sessions.lock on which adapter hosts share a lock; it lies after the bytes of all rows. The next byte is
POOL_BYTE of process/keeper.py."""
MOST_TRIES = 100
LOCK_WAIT_S = 0.5
"""Maximum wait for the lock of an index: `kvstrata ctl pool free` holds it for some milliseconds."""


def lock_instance(socket_dir: Path) -> int:
    """Lock server.pid of the socket directory. The caller owns the returned descriptor, and the lock ends with it.

    Raises SegmentError naming the process that has the lock.
    """
    path = socket_dir / PID_FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SegmentError(f"{str(path)!r}: {error.strerror}", field="socket_dir") from error
    if not linux.lock_whole_file(fd):
        holder = read_pid(path)
        os.close(fd)
        raise SegmentError(
            f"socket directory {str(socket_dir)!r} is in use by server process {holder}; stop that server or "
            "choose another --port or --socket-dir",
            field="socket_dir",
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def read_pid(path: Path) -> str:
    """The pid in a server.pid, for people."""
    try:
        return path.read_text().strip() or "(unknown)"
    except OSError:
        return "(unknown)"


def open_locked_index(directory: Path) -> tuple[int, bool]:
    """Open and lock the index at its path: an existing one, or an empty new one (then True).

    Raises SegmentError when another server has it, and ConfigError for a directory that others may write to.
    """
    path = directory / INDEX
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            make_segment_dir(directory)
            try:
                made = make_locked_index(path)
            except FileNotFoundError:
                continue
            if made is None:
                continue  # another starting server was faster; try its index
            return made, True
        if not lock_soon(fd):
            os.close(fd)
            raise SegmentError(
                f"segment {str(directory)!r} is in use by server process {read_pid(directory / PID_FILE)}; "
                "stop that server or choose another --port or --instance-id",
                field="segment",
            )
        if _is_at(path, fd):
            return fd, False
        os.close(fd)  # the file was replaced between open and lock


def make_segment_dir(directory: Path) -> None:
    """Make the directory of a segment, even while `kvstrata ctl pool free` removes it. Raises ConfigError."""
    for left in reversed(range(MOST_TRIES)):
        try:
            make_private_dir(directory, "segment")
            return
        except ConfigError as error:
            # A variable that keeps the error beyond this block would keep the callers' frames alive, and with them the
            # lock of a closed pool, until the next garbage collection.
            if not left or not isinstance(error.__cause__, FileNotFoundError):
                raise


def lock_soon(index_fd: int) -> bool:
    """Lock an index within LOCK_WAIT_S; False when another server has it."""
    ends_s = time.monotonic() + LOCK_WAIT_S
    while not linux.lock_whole_file(index_fd):
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.005)
    return True


def make_locked_index(path: Path) -> int | None:
    """Make a new index and lock it before it gets its name; None if another server took the name meanwhile."""
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if not linux.lock_whole_file(fd):
            raise SegmentError("a file that no other process can see is locked")
        # With a directory descriptor os.link follows the symbolic link in /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)
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


def remove_replaced(directory: Path) -> None:
    """Remove the files of an earlier segment; a segment of memfds has replaced it."""
    if not (directory / INDEX).exists():
        return
    check_private_dir(directory, "segment")
    index, _ = open_locked_index(directory)
    try:
        remove_own(directory)
    finally:
        os.close(index)


def remove_own(directory: Path) -> None:
    """Remove the segment whose index the caller has locked."""
    for name in (EXTENTS, SESSIONS_LOCK, PID_FILE, INDEX):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def free_bytes(directory: Path) -> int:
    """Free bytes on the file system of this directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def write_pid(directory: Path) -> None:
    """Write our pid into the segment directory, for people and for error messages."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / PID_FILE, flags, 0o600)
    try:
        os.write(fd, f"{os.getpid()}\n".encode())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # No code needs the file.
        _log.warning("segment: %s stays empty: %s", directory / PID_FILE, error.strerror)
    finally:
        os.close(fd)
