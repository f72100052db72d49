"""The Linux calls behind segment and attach.  Standard library only.

Descriptors that these functions return belong to the caller.  A refusal by the kernel raises OSError, unless a function
says otherwise.

Constants are written out because Python builds against old C libraries (conda) lack some of them; the kernel has had
all of them since 5.4.

Record locks.  *POSIX* locks (`lock_byte`) belong to a process and end with it, whatever descriptors its children
inherited; they also end when the process closes **any** descriptor of the same file.  *OFD* locks
(`lock_whole_file`) belong to an open file description, so the locked descriptor must never be handed to another
process.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from typing import NamedTuple

OFD_GETLK = 36
OFD_SETLK = 37
ADD_SEALS = 1033
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1, 2, 4
MEMFD_CLOEXEC, MEMFD_ALLOW_SEALING, MEMFD_HUGETLB, MEMFD_NOEXEC_SEAL = 1, 2, 4, 8
MEMFD_HUGE_2MB = 21 << 26
HUGE_PAGE_BYTES = 2 << 20
SO_PEERPIDFD = 77
PIDFD_THREAD = os.O_EXCL
MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3
MAX_NODES = 1024

_FLOCK = struct.Struct("@hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid
_TIMEVAL = struct.Struct("@ll")
_UCRED = struct.Struct("@iII")
_SYSCALL_PIDFD_OPEN = 434
_SYSCALL_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_SYSCALL_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def _syscall(number: int, *arguments: int | bytes) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    result = int(
        libc.syscall(
            ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
        )
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# --- locks ------------------------------------------------------------------------------------------------


def lock_whole_file(fd: int) -> bool:
    """Take an exclusive OFD lock on the whole file without waiting; False when another file description has a lock."""
    return _set_lock(fd, OFD_SETLK, fcntl.F_WRLCK, 0, 0)


def lock_byte(fd: int, byte: int) -> bool:
    """Take this process's POSIX write lock on one byte without waiting; False when another has it."""
    return _set_lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, byte, 1)


def share_byte(fd: int, byte: int) -> bool:
    """Take this process's POSIX read lock on one byte without waiting; False when another has it for writing."""
    return _set_lock(fd, fcntl.F_SETLK, fcntl.F_RDLCK, byte, 1)


def unlock_byte(fd: int, byte: int) -> None:
    """Release this process's POSIX lock on one byte, if it has one."""
    _set_lock(fd, fcntl.F_SETLK, fcntl.F_UNLCK, byte, 1)


def _set_lock(fd: int, command: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def byte_locker(fd: int, byte: int, length: int = 1) -> int | None:
    """The pid of a process with a POSIX lock on one of `length` bytes from `byte` on.

    None: no process has one; 0: the process is not visible in this PID namespace, or the lock is an OFD lock.

    The question is asked for an OFD lock, so that the answer includes locks of the calling process itself.
    """
    answer = fcntl.fcntl(fd, OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, length, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


# --- descriptors ------------------------------------------------------------------------------------------


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other process has closed its end of a connection, even while messages from it are unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def open_again(fd: int, flags: int) -> int:
    """A new open file description of the file behind `fd`, with locks and an access mode of its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def close_all(fds: list[int]) -> None:
    """Close descriptors, ignoring those that are closed already."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def file_id(fd: int) -> tuple[int, int]:
    """(device, inode): the same numbers in every process of this host."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def create_memfd(name: str, *, huge_pages: bool = False) -> int:
    """An empty, sealable memfd; with `huge_pages` in pages of 2 MiB."""
    flags = MEMFD_CLOEXEC | MEMFD_ALLOW_SEALING
    if huge_pages:
        flags |= MEMFD_HUGETLB | MEMFD_HUGE_2MB
    try:
        return _memfd_create(name, flags | MEMFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3
            raise
    return _memfd_create(name, flags)


def has_huge_pages(fd: int) -> bool:
    """Whether the file consists of pages of 2 MiB (tmpfs reports the base page here, whatever it uses)."""
    return os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES


def _memfd_create(name: str, flags: int) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _syscall(_SYSCALL_MEMFD_CREATE[platform.machine()], name.encode(), flags)


def seal_size(fd: int) -> None:
    """Seal the size of a memfd for all processes, so that no access to a mapping can fall past its end."""
    fcntl.fcntl(fd, ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_SEAL)


# --- NUMA -------------------------------------------------------------------------------------------------


def set_memory_policy(policy: int, nodes: list[int]) -> None:
    """set_mempolicy: choose the memory nodes for future allocations of this thread and the threads that it starts."""
    mask = array.array("Q", bytes(MAX_NODES // 8))
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    number = _SYSCALL_SET_MEMPOLICY.get(platform.machine(), -1)
    _syscall(number, policy, mask.buffer_info()[0], MAX_NODES + 1)


# --- processes --------------------------------------------------------------------------------------------


class SocketCredentials(NamedTuple):
    """The process at the other end of a unix socket, as seen in our namespaces; pid 0: not visible there."""

    pid: int
    uid: int


def credentials_of(sock: socket.socket) -> SocketCredentials:
    """SO_PEERCRED of a connected unix socket."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return SocketCredentials(pid, uid)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` has died."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid, 0)
    return _syscall(_SYSCALL_PIDFD_OPEN, pid, 0)


class PidfdSubject(NamedTuple):
    """The process that a pidfd stands for. `pid`: 0 for a process not visible from here, -1 for a dead one."""

    pid: int
    thread: bool
    """Whether it was made with PIDFD_THREAD: it becomes readable when one thread ends, not the process."""


def pidfd_subject(fd: int) -> PidfdSubject | None:
    """The process that `fd` stands for; None if it is not a pidfd. Needs /proc."""
    pid, flags = None, 0
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "Pid":
                pid = int(value)
            elif name == "flags":
                flags = int(value, 8)
    return None if pid is None else PidfdSubject(pid, bool(flags & PIDFD_THREAD))


def same_process(one: int, other: int) -> bool | None:
    """Whether two pidfds stand for one process; None where the kernel cannot tell (before Linux 6.9).

    Since 6.9 every process has an inode of its own on pidfs.  Before, pidfds shared one inode with all anonymous
    files; an eventfd shows whether this kernel does so.
    """
    event = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        if file_id(event) == file_id(one):
            return None
    finally:
        os.close(event)
    return file_id(one) == file_id(other)


def socket_pidfd(sock: socket.socket) -> int | None:
    """The kernel's pidfd of the process at the other end; None before Linux 6.5, or if that process is dead."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None


# --- connections ----------------------------------------------------------------------------


def connect(sock: socket.socket, path: str, timeout_s: float) -> None:
    """Connect a unix socket, waiting while the other side's queue of connections is full. Raises TimeoutError.

    A socket with a Python timeout would not wait: to the kernel it is non-blocking, and a full queue is an error.
    """
    sock.settimeout(None)
    whole, rest = divmod(max(timeout_s, 0.001), 1.0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole), int(rest * 1e6)))
    try:
        sock.connect(path)
    except BlockingIOError as error:
        raise TimeoutError(errno.ETIMEDOUT, "the server takes no connections now") from error
