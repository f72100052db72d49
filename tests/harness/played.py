"""What the played processes of a world (tests/world.py) get in the place of what the operating system gives.

`playing` is the world that is told now.  `played` puts everything in place.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvstrata.client.client
import kvstrata.clock
import kvstrata.process.supervisor
from kvstrata.client.link import ATTACH_RETRY_FIRST_S, Link
from kvstrata.memory import linux
from kvstrata.native.core import CopyEngine, CopyOutcome
from kvstrata.patience import VARIABLE as PATIENCE

FIRST_PID = 1_000_000

playing: Any = None
"""The present World."""


class Kernel:
    """Process numbers, pidfds and lock bytes of the played processes. A pidfd is a pipe, whose end tells of death."""

    def __init__(self) -> None:
        self._pids = itertools.count(FIRST_PID)
        self._pipes: dict[int, tuple[int, int]] = {}
        self._subjects: dict[tuple[int, int], int] = {}
        self._locks: dict[tuple[tuple[int, int], int], int] = {}
        self.running = os.getpid()
        """The process whose code runs now."""

    def born(self) -> int:
        pid = next(self._pids)
        self._pipes[pid] = os.pipe2(os.O_CLOEXEC)
        self._subjects[linux.file_id(self._pipes[pid][0])] = pid
        return pid

    def died(self, pid: int) -> None:
        self._locks = {byte: locker for byte, locker in self._locks.items() if locker != pid}
        os.close(self._pipes[pid][1])
        self._pipes[pid] = self._pipes[pid][0], -1

    def open_pidfd(self, pid: int) -> int:
        return self.pidfd_of(self.running)

    def pidfd_of(self, pid: int) -> int:
        return os.dup(self._pipes[pid][0])

    def other_files(self) -> int:
        """Descriptors that this process has beside those of the played processes."""
        own = sum(fd >= 0 for pipe in self._pipes.values() for fd in pipe)
        return len(os.listdir("/proc/self/fd")) - own

    def pidfd_subject(self, fd: int) -> linux.PidfdSubject | None:
        if (pid := self._subjects.get(linux.file_id(fd))) is None:
            return None
        return linux.PidfdSubject(-1 if self._pipes[pid][1] < 0 else pid, False)

    def credentials_of(self, sock: socket.socket) -> linux.SocketCredentials:
        name = sock.getpeername()  # of a Wire: \0 our pid . its pid . number
        pid = int(name.split(b".")[1]) if isinstance(name, bytes) and name else os.getpid()
        return linux.SocketCredentials(pid, os.geteuid())

    def lock_byte(self, fd: int, byte: int) -> bool:
        return self._locks.setdefault((linux.file_id(fd), byte), self.running) == self.running

    def unlock_byte(self, fd: int, byte: int) -> None:
        self._locks.pop((linux.file_id(fd), byte), None)

    def byte_locker(self, fd: int, byte: int, length: int = 1) -> int | None:
        file = linux.file_id(fd)
        return next((pid for at in range(byte, byte + length) if (pid := self._locks.get((file, at)))), None)

    def close(self) -> None:
        linux.close_all([fd for pipe in self._pipes.values() for fd in pipe if fd >= 0])


class Wire(socket.socket):
    """A process's end of its connection. It is cut after `may_send` or `may_receive` further bytes.

    A call that would block lets the world go on meanwhile.
    """

    def __init__(self, *kind: int) -> None:
        super().__init__(*kind)
        self.setblocking(False)
        self.engine = playing.attaching
        self.waits_s = 0.0
        self.may_send, self.may_receive = self.engine.cut_next
        self.engine.cut_next = math.inf, math.inf
        self.engine.wire = self
        self.bind(b"\0%d.%d.%d" % (os.getpid(), self.engine.pid, next(playing.numbers)))

    def settimeout(self, value: float | None) -> None:
        self.waits_s = math.inf if value is None else value

    def setblocking(self, flag: bool) -> None:
        super().setblocking(False)
        self.waits_s = math.inf if flag else 0.0

    def send(self, data: Any, flags: int = 0) -> int:
        return self._sent(len(data), lambda n: socket.socket.send(self, memoryview(data)[:n], flags))

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        [data] = buffers
        return self._sent(len(data), lambda n: socket.socket.sendmsg(self, [data[:n]], *more) if n else 0)

    def _sent(self, length: int, send: Callable[[int], int]) -> int:
        whole = self.may_send >= length
        n = send(length if whole else int(self.may_send))
        self.may_send -= n
        if whole:
            return n
        self.cut("sent")
        return length

    def recv(self, size: int, flags: int = 0) -> bytes:
        return self._received(size, lambda n: (socket.socket.recv(self, n, flags),))[0]

    def recvmsg(self, size: int, *more: int) -> Any:
        return self._received(size, lambda n: socket.socket.recvmsg(self, n, *more))

    def _received(self, size: int, receive: Callable[[int], tuple[Any, ...]]) -> tuple[Any, ...]:
        ends_s = playing.now_s + self.waits_s
        while True:
            if self.may_receive <= 0:
                self.cut("received")
                return b"", [], 0, None
            try:
                got = receive(int(min(size, self.may_receive, playing.piece())))
            except BlockingIOError:
                if not self.waits_s:
                    raise
            else:
                self.may_receive -= len(got[0])
                return got
            if playing.now_s >= ends_s or self.engine.is_dead:
                raise TimeoutError("the server did not answer in time")
            playing.step(ends_s)

    def cut(self, why: str) -> None:
        playing.note(f"{self.engine.name}: its connection is cut ({why})")
        self.may_send = self.may_receive = 0
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class _Time:
    """Stands for the module `time` in kvstrata's modules."""

    def monotonic(self) -> float:
        return playing.now_s

    def sleep(self, seconds: float) -> None:
        playing.clock.now_s += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _AtOnce:
    """Stands for the module `threading` where a thread may as well run at its start."""

    class Thread:
        def __init__(self, target: Callable[[], None], **more: Any) -> None:
            self.start = target


class _Sockets:
    """Stands for the module `socket` in the process's half of the attach."""

    socket = Wire

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class Copies:
    """A copy engine whose copies end late: only then are the bytes moved. Real native copies, in this thread."""

    def __init__(self, threads: int = 0) -> None:
        self._native = CopyEngine(threads=0)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: dict[int, tuple[float, Any, Any, Any]] = {}
        self._ended: list[tuple[int, list[int]]] = []
        self.takes_s: Callable[[], float] = lambda: 0.0
        self.room = 256
        """Jobs that it takes before one has ended."""

    def submit(self, job_id: int, direction: Any, plan: Any, items: Any) -> bool:
        if len(self._queue) >= self.room:
            return False
        self._queue[job_id] = playing.now_s + self.takes_s(), direction, plan, items
        return True

    def due_s(self) -> float:
        return min((job[0] for job in self._queue.values()), default=math.inf)

    def turn(self) -> bool:
        """End the copies that are due."""
        due = [job for job, (due_s, *_) in self._queue.items() if due_s <= playing.now_s]
        for job in due:
            _, direction, plan, items = self._queue.pop(job)
            self._ended.append((job, self._native.run(direction, plan, items)))
            os.eventfd_write(self.event_fd, 1)
        return bool(due)

    def completions(self) -> list[tuple[int, list[int]]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        ended, self._ended = self._ended, []
        return ended

    def run(self, direction: Any, plan: Any, items: Any) -> list[int]:
        return self._native.run(direction, plan, items)

    def cancel(self, job_id: int) -> bool:
        if job_id not in self._queue or playing.random.random() < 0.5:
            return False  # it has ended, or all its items have begun
        job = self._queue.pop(job_id)
        self._ended.append((job_id, [CopyOutcome.CANCELLED] * len(job[3])))
        os.eventfd_write(self.event_fd, 1)
        return True

    def close(self) -> None:
        self._queue.clear()
        self._native.close()
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1


class NoPages:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: {} if name == "stats" else None


class PlayedLink(Link):
    """A link without threads: its engine calls its passes and its tries to attach."""

    attach_due_s = math.inf

    def _start_thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        self._start_attaching()
        return threading.current_thread()  # lives

    def _start_attaching(self, wait_s: float = 0.0) -> None:
        self.attach_due_s = playing.now_s + wait_s
        self._retry_s = ATTACH_RETRY_FIRST_S

    def join(self, timeout_s: float) -> bool:
        return playing.wait(lambda: self._dead, timeout_s)


class Drained(threading.Event):
    """The world goes on while a closing client waits."""

    def wait(self, timeout: float | None = None) -> bool:
        return playing.wait(self.is_set, timeout or 0.0)


@contextlib.contextmanager
def played() -> Iterator[None]:
    """Put what is played in the place of what the operating system gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATIENCE, "1")
        for name in (
            "open_pidfd",
            "pidfd_subject",
            "credentials_of",
            "lock_byte",
            "unlock_byte",
            "byte_locker",
        ):
            patch.setattr(linux, name, lambda *args, _name=name: getattr(playing.kernel, _name)(*args))
        patch.setattr(os, "sched_yield", lambda: None)
        for name, module in list(sys.modules.items()):
            if name.startswith("kvstrata.") and getattr(module, "time", None) is time:
                patch.setattr(module, "time", _Time())
        patch.setattr(kvstrata.clock.SystemClock, "monotonic_s", staticmethod(lambda: playing.now_s))
        patch.setattr(kvstrata.process.supervisor, "threading", _AtOnce)
        patch.setattr(kvstrata.session.attach, "socket", _Sockets())
        patch.setattr(kvstrata.client.link, "process_locks", lambda: playing.attaching.locks)
        patch.setattr(kvstrata.client.client, "Link", PlayedLink)
        patch.setattr(kvstrata.client.client, "CopyEngine", Copies)
        patch.setattr(kvstrata.client.client, "PageWarmer", NoPages)
        yield
