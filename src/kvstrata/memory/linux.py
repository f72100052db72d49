"""The Linux calls behind segment and attach.  Standard library only: the holder process imports this.

Constants are written out because Python builds against old C libraries (conda) leave some of them away; the
kernel has had all of them since 5.4.

Record locks.  *POSIX* locks (`lock_byte`) belong to a process and end with it, whatever its children
inherited; they also end when the process closes **any** descriptor of the same file.  *OFD* locks
(`lock_whole_file`) belong to an open file description, so the locked descriptor must never be handed to
another process.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import platform
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
MSG_CMSG_CLOEXEC = 0x40000000
SO_PEERPIDFD = 77
PIDFD_THREAD = os.O_EXCL
MPOL_DEFAULT, MPOL_BIND, MPOL_INTERLEAVE, MPOL_LOCAL = 0, 2, 3, 4
MAX_NODES = 1024

_FLOCK = struct.Struct("@hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid
_TIMEVAL = struct.Struct("@ll")
_UCRED = struct.Struct("@iII")
_SYSCALL_PIDFD_OPEN = 434
_SYSCALL_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_SYSCALL_MBIND = {"x86_64": 237, "aarch64": 235}
_SYSCALL_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}


def _syscall(number: int, *arguments: int | bytes) -> int:
    import ctypes  # only where the interpreter lacks the call: it would double the holder's size

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
    """Takes an exclusive OFD lock on the whole file without waiting; False when somebody else has one."""
    return _set_lock(fd, OFD_SETLK, fcntl.F_WRLCK, 0, 0)


def lock_byte(fd: int, byte: int) -> bool:
    """Takes this process's POSIX write lock on one byte without waiting; False when another has it."""
    return _set_lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, byte, 1)


def share_byte(fd: int, byte: int) -> bool:
    """Takes this process's POSIX read lock on one byte without waiting; False when another has it for writing."""
    return _set_lock(fd, fcntl.F_SETLK, fcntl.F_RDLCK, byte, 1)


def unlock_byte(fd: int, byte: int) -> None:
    """Gives this process's POSIX lock on one byte back; nothing happens when it had none."""
    _set_lock(fd, fcntl.F_SETLK, fcntl.F_UNLCK, byte, 1)


def _set_lock(fd: int, command: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def byte_locker(fd: int, byte: int) -> int | None:
    """Who has a POSIX lock on `byte`: None = nobody, else its pid, 0 where this PID namespace does not see
    it.

    Asked as an OFD owner, so that a lock of the calling process itself is seen too.
    """
    answer = fcntl.fcntl(fd, OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


# --- descriptors ------------------------------------------------------------------------------------------


def open_again(fd: int, flags: int) -> int:
    """A new open file description of the file behind `fd` (locks and access mode are its own)."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def close_all(fds: list[int]) -> None:
    """Closes descriptors that belong to the caller."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def file_id(fd: int) -> tuple[int, int]:
    """(device, inode): the same numbers in every process of this host."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def create_memfd(name: str, *, huge_pages: bool = False) -> int:
    """An empty, sealable memfd, of pages of 2 MiB if asked."""
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
    """Whether the file is of pages of 2 MiB (tmpfs names the base page here, whatever it uses)."""
    return os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES


def _memfd_create(name: str, flags: int) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _syscall(_SYSCALL_MEMFD_CREATE[platform.machine()], name.encode(), flags)


def seal_size(fd: int) -> None:
    """Forbids everybody, us included, to resize a memfd: a mapping of it can never fault past the end."""
    fcntl.fcntl(fd, ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_SEAL)


# --- NUMA -------------------------------------------------------------------------------------------------


def place_memory(address: int, length: int, policy: int, nodes: tuple[int, ...]) -> None:
    """mbind: where the pages of a whole mapping go that do not exist yet; others stay where they are.

    For files on tmpfs and memfds the policy is the file's and holds for every process; for huge pages it is this
    mapping's (Linux 6.18 and before), so only pages that this mapping touches first follow it.
    """
    mask = array.array("Q", bytes(MAX_NODES // 8))
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    number = _SYSCALL_MBIND.get(platform.machine(), -1)
    _syscall(number, address, length, policy, mask.buffer_info()[0], MAX_NODES + 1, 0)


def nodes_of_pages(addresses: list[int]) -> list[int]:
    """The node of the page at each address; negative where this process has not touched it."""
    pages, nodes = array.array("Q", addresses), array.array("i", [-1] * len(addresses))
    number = _SYSCALL_MOVE_PAGES.get(platform.machine(), -1)
    _syscall(number, 0, len(pages), pages.buffer_info()[0], 0, nodes.buffer_info()[0], 0)
    return nodes.tolist()


# --- processes --------------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """Who connected, as this process's namespaces show it; pid 0 = not visible from here."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """SO_PEERCRED of a connected unix socket."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` has died."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid, 0)
    return _syscall(_SYSCALL_PIDFD_OPEN, pid, 0)


class PidfdSubject(NamedTuple):
    """What a pidfd stands for. `pid` is 0 for a process that is not visible from here, -1 for a dead one."""

    pid: int
    thread: bool
    """Made with PIDFD_THREAD: it tells of one thread's end, not of the process's."""


def pidfd_subject(fd: int) -> PidfdSubject | None:
    """What `fd` stands for, None when it is no pidfd. Needs /proc."""
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

    Since then every process has an inode of its own on pidfs; before, all pidfds shared the inode of all
    anonymous files, which an eventfd shows.
    """
    event = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        if file_id(event) == file_id(one):
            return None
    finally:
        os.close(event)
    return file_id(one) == file_id(other)


def peer_pidfd(sock: socket.socket) -> int | None:
    """The kernel's own pidfd of a peer; None before Linux 6.5, or when the peer is already dead."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None


# --- messages with descriptors ----------------------------------------------------------------------------


def connect(sock: socket.socket, path: str, timeout_s: float) -> None:
    """Connects a unix socket, waiting while the other side's queue of connections is full; raises TimeoutError.

    A socket with a Python timeout would not wait: for the kernel it is non-blocking, and a full queue an error.
    """
    sock.settimeout(None)
    whole, rest = divmod(max(timeout_s, 0.001), 1.0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole), int(rest * 1e6)))
    try:
        sock.connect(path)
    except BlockingIOError as error:
        raise TimeoutError(errno.ETIMEDOUT, "the server takes no connections now") from error


class Received(NamedTuple):
    """One message. The descriptors belong to the caller from now on."""

    data: bytes
    fds: list[int]
    cut: bool
    """The message was longer than allowed; the rest is lost."""
    fds_lost: bool
    """More descriptors came than allowed, or this process has no free numbers; the kernel dropped them."""


def receive(sock: socket.socket, max_bytes: int, max_fds: int) -> Received:
    """One message of a seqpacket socket with its descriptors, all CLOEXEC; no data = closed by the peer."""
    size = array.array("i").itemsize
    data, ancillary, flags, _ = sock.recvmsg(max_bytes, socket.CMSG_SPACE(max_fds * size), MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % size])
    return Received(data, list(fds), bool(flags & socket.MSG_TRUNC), bool(flags & socket.MSG_CTRUNC))


def send(sock: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
    """One message with copies of `fds`; they stay the caller's."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
