"""Runs a command and leaves no process behind: `python contain.py make lint test`.

This process is a child subreaper: it inherits processes that lose their parent, so every descendant stays known, also
one that made a session of its own. Descendants that are still alive when the command has ended get a few seconds. Then
they are killed by their id and named, and the run is a failure. Linux only; standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0


def children() -> dict[int, str]:
    """The living direct children of this process: their command lines by id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for word in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{word}/cmdline").read_bytes().replace(b"\0", b" ")
                found[int(word)] = command.decode(errors="replace").strip() or "(unnamed)"
    return found


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def wait_for(command: int) -> int:
    """Waits for one child and returns its exit status (negative: a signal); also collects all others that end."""
    while True:
        process, status = os.waitpid(-1, 0)
        if process == command:
            return os.waitstatus_to_exitcode(status)


def end_descendants(grace_s: float) -> list[str]:
    """Waits for inherited processes, then kills those that are left and their descendants; returns the killed ones."""
    killed = []
    deadline_s = time.monotonic() + grace_s
    while True:
        reap()
        left = children()
        if not left:
            return killed
        if time.monotonic() >= deadline_s:
            for process, command in left.items():
                killed.append(f"{process}: {command}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print(f"contain: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 1
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(command.pid, number)  # not by Popen, which would collect it

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = wait_for(command.pid)
    killed = end_descendants(GRACE_S)
    for line in killed:
        print(f"contain: left behind and killed: {line}", file=sys.stderr)
    if status == 0 and killed:
        return 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
