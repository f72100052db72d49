"""The pools of this user on this machine: where they lie, which processes own them, and how their memory is freed.

A pool is owned while a process lives that uses it or will use it again:

    server         has locked its index
    keeper         shares a lock on POOL_BYTE of its sessions.lock, also while the keeper runs no server
    adapter host   shares a lock on HOSTS_BYTE
    engine         has locked the byte of its row

`free` locks the index as a server does, then looks for owners, then removes the files.  Meanwhile no engine can attach,
since attaching needs a server, and a server that starts waits for the lock and makes a new pool (`open_locked_index`).
Pools in memfds end with their keeper.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstrata.config.private_dir import check_private_dir
from kvstrata.errors import SegmentError
from kvstrata.memory import linux
from kvstrata.memory.paths import PID_FILE, SHM_ROOT
from kvstrata.memory.segment_files import (
    EXTENTS,
    HOSTS_BYTE,
    INDEX,
    SESSIONS_LOCK,
    open_locked_index,
    read_pid,
    remove_own,
)
from kvstrata.native.core import MAX_SESSIONS, IndexReader
from kvstrata.process.keeper import POOL_BYTE

_FILES = (INDEX, EXTENTS, SESSIONS_LOCK)
_DEPTH = 2
"""Depth below a root at which pools are searched: a server's folder, and one above it."""
_MOST_PIDS = 4
_NEVER_S = 1e9
"""A heartbeat age from which on no server has ever written a heartbeat."""


class FoundPool(NamedTuple):
    """One pool and its state when it was found."""

    place: Path
    """The folder of its files."""
    memory_bytes: int
    """Memory that its files use."""
    age_s: float
    """Time since it was made."""
    idle_s: float | None
    """Time since the last heartbeat of a server; None: unknown."""
    owners: list[str]
    """Descriptions of the processes that own it; empty: it may be freed."""


class _Descriptors(NamedTuple):
    index_fd: int
    extents_fd: int
    sessions_fd: int


def find_pools(roots: Sequence[Path] = (SHM_ROOT,)) -> list[FoundPool]:
    """The pools of this user in folders below `roots`."""
    return [pool for root in roots for folder in _folders(root, _DEPTH) if (pool := pool_at(folder))]


def pool_at(folder: Path) -> FoundPool | None:
    """The pool whose files are in this folder; None if there is none or it is removed meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            fds = _open_files(folder, stack)
            server = linux.byte_locker(fds.index_fd, 0) is not None
            owners = [f"server {read_pid(folder / PID_FILE)}"] if server else []
            return _found(folder, fds, owners + _sharers(fds.sessions_fd))
        except OSError:
            return None


def free(folder: Path) -> FoundPool:
    """Free the pool whose files are in `folder`; returns what was freed.

    Raises SegmentError if it is owned or the folder has no pool, ConfigError if other users may write to the folder;
    then nothing was freed.
    """
    check_private_dir(folder, "POOL")
    # The lock ends before the files are closed, since closing them frees the memory, which may take a second.
    with contextlib.ExitStack() as files, contextlib.ExitStack() as locks:
        fds = _lock(folder, files, locks)
        _refuse_owned(folder, _sharers(fds.sessions_fd))
        doomed = _found(folder, fds, [])
        remove_own(folder)
    return doomed


def _lock(folder: Path, files: contextlib.ExitStack, locks: contextlib.ExitStack) -> _Descriptors:
    """Lock the index of a pool and open its files, each until its stack ends.

    Raises SegmentError if a server has the pool, or if the folder has no pool.
    """
    with contextlib.ExitStack() as looked:
        _open_pool(folder, looked)  # raises if there is no pool, where the next line would make an index
    try:
        index, fresh = open_locked_index(folder)
    except SegmentError:
        _refuse_owned(folder, [f"server {read_pid(folder / PID_FILE)}"])
        raise
    locks.callback(os.close, index)
    if fresh:  # the pool was freed meanwhile
        remove_own(folder)
    return _open_pool(folder, files)


def _open_pool(folder: Path, stack: contextlib.ExitStack) -> _Descriptors:
    try:
        return _open_files(folder, stack)
    except OSError as error:
        raise SegmentError(
            f"{folder}: no pool is there: {error.filename}: {error.strerror}; see `kvstrata ctl pool list`",
            field="POOL",
        ) from None


def _refuse_owned(place: Path, owners: list[str]) -> None:
    if owners:
        raise SegmentError(
            f"{place}: in use by {', '.join(owners)}; stop that first; nothing was freed", field="POOL"
        )


def _folders(root: Path, depth: int) -> Iterator[Path]:
    """The folders of our user below `root`; links are not followed."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid():
                yield Path(entry.path)
                if depth > 1:
                    yield from _folders(Path(entry.path), depth - 1)


def _open_files(folder: Path, stack: contextlib.ExitStack) -> _Descriptors:
    """The files of a pool, open for reading until the stack ends. Raises OSError."""
    opened = []
    for name in _FILES:
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        stack.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file", str(folder / name))
        opened.append(fd)
    return _Descriptors(*opened)


def _sharers(sessions_fd: int) -> list[str]:
    """The keeper, adapter host and engines of a pool."""
    if linux.byte_locker(sessions_fd, 0, POOL_BYTE + 1) is None:
        return []
    found = [
        f"{name} {_named(pid)}"
        for name, byte in (("keeper", POOL_BYTE), ("adapter host", HOSTS_BYTE))
        if (pid := linux.byte_locker(sessions_fd, byte)) is not None
    ]
    engines = [
        _named(pid)
        for row in range(1, MAX_SESSIONS + 1)
        if (pid := linux.byte_locker(sessions_fd, row)) is not None
    ]
    if engines:
        shown = ", ".join(engines[:_MOST_PIDS]) + (", …" if len(engines) > _MOST_PIDS else "")
        found.append(f"{len(engines)} engine process{'es' if len(engines) > 1 else ''} ({shown})")
    return found


def _named(pid: int) -> str:
    return str(pid) if pid else "in another PID namespace"


def _found(place: Path, fds: _Descriptors, owners: list[str]) -> FoundPool:
    idle_s = None
    with contextlib.suppress(SegmentError, OSError):  # of another version, or damaged
        age_s = IndexReader(fds.index_fd).heartbeat_age_s
        idle_s = age_s if age_s < _NEVER_S else None
    return FoundPool(
        place,
        sum(os.fstat(fd).st_blocks * 512 for fd in (fds.index_fd, fds.extents_fd)),
        # This file is never written to.
        max(0.0, time.time() - os.fstat(fds.sessions_fd).st_mtime),
        idle_s,
        owners,
    )
