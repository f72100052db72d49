"""Signals to other processes; after a SIGSTOP the caller goes on only when the process has stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

STOP_S = 120.0
"""A process that still runs this long after SIGSTOP will not stop."""


def send(pid: int, number: int) -> None:
    """Send a signal; for SIGSTOP, return when no thread of the process runs.

    The kernel gives SIGSTOP to one thread, which stops the other threads once it gets a processor: on a busy machine
    the others run on for a while.
    """
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return
    end_s = time.monotonic() + STOP_S
    while not has_stopped(pid):
        assert time.monotonic() < end_s, f"process {pid} runs on after SIGSTOP"
        os.sched_yield()


def has_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped or has ended."""
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in of_threads(pid, "stat"))


def of_threads(pid: int, file: str) -> list[str]:
    """Return what `/proc` has in this file about each thread of a process that has not ended meanwhile."""
    texts = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            texts.append((task / file).read_text())
    return texts
