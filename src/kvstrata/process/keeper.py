"""The parent of a server or controller: when the process that serves dies, the keeper starts it again.

    keep ──fork──▶ child: imports everything and serves
      │ exit 0, or told to end, or a first start that fails ──▶ the keeper ends with the same status
      └ anything else (a signal, exit 70) ──▶ one log line, a pause, fork again

Rules:

1. The keeper forks before anything heavy is imported and listens nowhere: about 10 MB.  Only small modules of the
   standard library are used here.
2. Every signal of FORWARDED is forwarded to the child, except a signal from the terminal, which the child gets itself,
   and SIGHUP where it is ignored (nohup).  A child that ends after a request to end is not started again; SIGHUP is
   such a request only when the terminal sends it, because the terminal is gone.
3. When the keeper ends, by SIGKILL too, the kernel kills the child (PR_SET_PDEATHSIG), so no process is left behind
   that owns the ports and the pool.
4. The exit statuses of a failed start, 2 (a setting is wrong) and 75 (a resource is missing now), are final for the
   first start only: after a crash the same settings may fail for a while, since a port or the pool is not free yet.
5. As process 1 of a container it reaps every orphan.
6. A log reader that stops reading does not delay it: a line that does not fit into stderr's pipe is dropped.
7. The first restart comes after FIRST_PAUSE_S, each further one after twice the pause before, at most LONGEST_PAUSE_S.
   A child that lived for STEADY_S begins the series anew.
8. The child names the files of its pool to the keeper (`hold_pool`), which shares a lock on the pool as long as it
   lives: while no child runs, the pool is not mistaken for an unused one (memory/pools.py).  If the files have no name
   in a folder (memfds, or removed files), the keeper keeps them open, and the next child gets them
   (`Restarts.pool_fds`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from kvstrata.naming import name_process

NO_SUPERVISE = "--no-supervise"
KEEPER = "kv-keeper"
"""Its name in ps and top; the child has that of the command."""
_ENDS_BY_ITSELF = frozenset({"--check", "--help", "--print-envoy", "--version", "-h"})
"""Arguments with which the command only prints and ends; it is not supervised."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
STEADY_S = 60.0
ANSWER_S = 1.0
EXIT_CONFIG, EXIT_LATER = 2, 75
"""Exit statuses of a failed start: it would fail again with the same settings; it may succeed later."""
ENDING: frozenset[int] = frozenset({signal.SIGTERM, signal.SIGINT})
"""Signals that tell a process to end."""
FORWARDED = ENDING | {signal.SIGHUP}
POOL_BYTE = (1 << 20) + 1
"""Byte of a pool's sessions.lock on which the keeper of its server shares a lock."""
_POOL_NAMED = signal.SIGRTMIN
"""Tells the keeper that its child has named a pool."""
_FROM_KERNEL = 0x80
"""`si_code` of a signal that the terminal sent to its whole foreground group."""


class Restarts(NamedTuple):
    """The number of restarts of the process, and why it ended the last time."""

    times: int = 0
    cause: str = ""
    keeper_fd: int = -1
    """Descriptor on which the child names its pool to the keeper; -1: it has no keeper."""
    answers_fd: int = -1
    """Descriptor on which the keeper answers when it has opened the named files."""
    pool_fds: tuple[int, ...] = ()
    """sessions.lock, index and extents of a pool that the keeper keeps open, for the child to close; or none."""


NOT_RESTARTED = Restarts()

Serve = Callable[[Sequence[str], Restarts], int]
"""Runs the command with its arguments; returns the exit status."""


def keep(name: str, arguments: Sequence[str], serve: Serve) -> int:
    """Run `serve` in a child and start it again when it dies; returns the exit status.

    With --no-supervise, or if the command only prints something, `serve` runs in this process.
    In a child this function never returns.
    """
    open_standard_descriptors()
    if not _ENDS_BY_ITSELF.isdisjoint(arguments):
        return serve(arguments, NOT_RESTARTED)
    name_process(name if NO_SUPERVISE in arguments else KEEPER)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # it waits until the process serves (lifecycle.py)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # by default they would end the process
        signal.signal(number, signal.SIG_IGN)
    if NO_SUPERVISE in arguments:
        return serve(arguments, NOT_RESTARTED)
    return _Keeper(name, arguments, serve).run()


def hold_pool(restarts: Restarts, paths: Sequence[str]) -> bool:
    """Have the keeper share a lock on POOL_BYTE of a pool, in place of the pool that it was told before.

    `paths`: of sessions.lock; or of sessions.lock, index and extents, for the keeper to keep open; or none, and the
    keeper keeps nothing.  Called by the child.  A path below /proc/self does not mean the same file in the keeper.
    Returns False without a keeper, or if it has not done so within ANSWER_S.
    """
    if restarts.keeper_fd < 0:
        return False
    from kvstrata.patience import patience  # by the child only (rule 1)

    answers = select.poll()
    answers.register(restarts.answers_fd, select.POLLIN)
    while answers.poll(0):  # to earlier calls
        os.read(restarts.answers_fd, 1)
    os.write(restarts.keeper_fd, b"\0".join(map(os.fsencode, paths)) + b"\0\0")
    os.kill(os.getppid(), _POOL_NAMED)
    return bool(answers.poll(1_000 * patience(ANSWER_S)))


def open_standard_descriptors() -> None:
    """Let no file that is opened later become stdin, stdout or stderr, where the log would be written into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is `fd`


def pause_s(pause_before_s: float, lived_s: float) -> float:
    """Pause before the next start, after a pause of `pause_before_s` and a child that lived `lived_s`."""
    if pause_before_s == 0 or lived_s >= STEADY_S:
        return FIRST_PAUSE_S
    return min(2 * pause_before_s, LONGEST_PAUSE_S)


def cause_of(wait_status: int) -> str:
    """Why a process ended: the name of its signal, or its exit status."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit status {os.WEXITSTATUS(wait_status)}"


def exit_status(wait_status: int) -> int:
    """The exit status as a shell reports it: 128 + n for a process that signal n ended."""
    if os.WIFSIGNALED(wait_status):
        return 128 + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


class _Keeper:
    """The parent's loop. It owns the child."""

    def __init__(self, name: str, arguments: Sequence[str], serve: Serve) -> None:
        self._name = name
        self._arguments = arguments
        self._serve = serve
        self._restarts = NOT_RESTARTED
        self._child = 0
        self._told_to_end = False
        self._named_pools, self._pool_writer = os.pipe()
        os.set_blocking(self._named_pools, False)
        self._answers, self._answer_writer = os.pipe()
        self._pool_fds: list[int] = []
        """sessions.lock of the pool, or sessions.lock, index and extents."""

    def run(self) -> int:
        waited = FORWARDED | {signal.SIGCHLD, _POOL_NAMED}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            waited -= {signal.SIGHUP}
        # SIGCHLD may be inherited as ignored, and then the parent could not wait for a child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        own_pid, pause_before_s = os.getpid(), 0.0
        while True:
            started_s, killed = time.monotonic(), oom_kills()
            self._child = os.fork()
            if self._child == 0:
                self._run_child(own_pid, mask_before)
            ended = self._wait_for_child(waited)
            if self._is_over(ended):
                return exit_status(ended)
            pause_before_s = pause_s(pause_before_s, time.monotonic() - started_s)
            cause = cause_of(ended)
            if cause == "SIGKILL" and oom_kills() > killed:
                cause = "SIGKILL of the kernel's OOM killer"
            self._restarts = Restarts(self._restarts.times + 1, cause)
            self._log(
                f"process_ended pid={self._child} cause={_quoted(self._restarts.cause)} "
                f"restart={self._restarts.times} pause_s={pause_before_s:g}"
            )
            self._child = 0
            if self._told_in_pause(waited, pause_before_s):
                return exit_status(ended)

    def _run_child(self, keeper_pid: int, mask_before: set[int]) -> NoReturn:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        die_with_parent(keeper_pid)
        name_process(self._name)
        os.close(self._named_pools)
        os.close(self._answer_writer)
        if len(self._pool_fds) == 1:
            os.close(self._pool_fds.pop())
        kept = self._restarts._replace(
            keeper_fd=self._pool_writer, answers_fd=self._answers, pool_fds=tuple(self._pool_fds)
        )
        sys.exit(self._serve(self._arguments, kept))

    def _wait_for_child(self, waited: frozenset[int]) -> int:
        """Forward signals until the child has ended; returns its wait status."""
        while True:
            told = signal.sigwaitinfo(waited)
            if told.si_signo == signal.SIGCHLD:
                ended = self._reap()
                if ended is not None:
                    return ended
                continue
            if told.si_signo == _POOL_NAMED:
                self._hold_pool()
                continue
            self._told_to_end |= _ends(told)
            if told.si_code != _FROM_KERNEL:
                # The child is not reaped yet, so its process number names no other process.
                os.kill(self._child, told.si_signo)

    def _hold_pool(self) -> None:
        """Share a lock on the pool that the child has named, if it has: anybody of our user may send the signal."""
        opened: list[int] = []
        same, held = 0, True
        try:
            *_, named, _ = [b"", *os.read(self._named_pools, 1 << 16).split(b"\0\0")]
            paths = named.split(b"\0") if named else []
            if paths and self._pool_fds:
                # To close a second descriptor of the same sessions.lock would end the lock.
                same = os.path.samestat(os.fstat(self._pool_fds[0]), os.stat(paths[0]))
            for path in paths[same:]:
                opened.append(os.open(path, os.O_RDWR))
            if opened and not same:
                fcntl.lockf(opened[0], fcntl.LOCK_SH | fcntl.LOCK_NB, 1, POOL_BYTE)
        except OSError:  # the child and its pool are gone again
            self._pool_fds, opened, same, held = opened, self._pool_fds, 0, False
        for fd in self._pool_fds[same:]:
            os.close(fd)
        self._pool_fds = self._pool_fds[:same] + opened
        if held:
            os.write(self._answer_writer, b".")

    def _reap(self) -> int | None:
        """Reap all processes that have ended; returns the child's wait status if it is among them."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == self._child:
                found = status

    def _is_over(self, ended: int) -> bool:
        if os.WIFSIGNALED(ended):
            return self._told_to_end or os.WTERMSIG(ended) in ENDING
        final = (0, EXIT_CONFIG, EXIT_LATER) if self._restarts.times == 0 else (0,)
        return self._told_to_end or os.WEXITSTATUS(ended) in final

    def _told_in_pause(self, waited: frozenset[int], seconds: float) -> bool:
        """Wait for the pause; returns True if a signal tells the keeper to end meanwhile."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            told = signal.sigtimedwait(waited, left_s)
            if told is not None and told.si_signo == signal.SIGCHLD:
                self._reap()
            elif told is not None and told.si_signo == _POOL_NAMED:
                self._hold_pool()
            elif told is not None and _ends(told):
                return True
        return False

    def _log(self, line: str) -> None:
        """Log a line in the form of observability.logging, which is not imported here."""
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
        head = f"{stamp}.{int(now_s * 1000) % 1000:03d}Z ERROR kvstrata.keeper {self._name}"
        poller = select.poll()
        poller.register(2, select.POLLOUT)
        with contextlib.suppress(OSError):  # nobody reads the log, and serving is more important
            if poller.poll(0):  # then a pipe takes 4096 bytes at once
                os.write(2, f"{head} {line}\n".encode())


def _ends(told: signal.struct_siginfo) -> bool:
    return told.si_signo in ENDING or (told.si_signo == signal.SIGHUP and told.si_code == _FROM_KERNEL)


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text


def oom_kills(root: str = "/") -> int:
    """The kernel's count (cgroup v2: memory.events, v1: memory.oom_control); 0 where it cannot be read."""
    for line in _lines(f"{root}proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.events"
        elif "memory" in controllers.split(","):
            mounts, name = ["sys/fs/cgroup/memory"], "memory.oom_control"
        else:
            continue
        for mount in mounts:
            for group in (path, ""):  # a container may see its own group as the mount's root
                for row in _lines(f"{root}{mount}{group.rstrip('/')}/{name}"):
                    word, _, count = row.partition(" ")
                    if word == "oom_kill" and count.isdigit():
                        return int(count)
    return 0


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that made it ends.

    If the parent, process `parent_pid`, has ended already, this process ends at once.  The signal also reaches a
    process that is stopped or in an endless loop.  Raises OSError.
    """
    import ctypes  # here, because the keeper, which imports this module, should stay small

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent_pid:
        os._exit(0)
