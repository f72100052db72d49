"""Signals to other processes whose effect is there when the call returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOP_S = 30.0
"""A process that goes on running for so long after SIGSTOP will not stop."""


def send(pid: int, number: int) -> None:
    """Send a signal.  After SIGSTOP no thread of the process runs any more.

    The kernel gives SIGSTOP to one thread, which tells the others once it gets a processor: on a busy machine they
    run on for a while.
    """
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return
    end_s = time.monotonic() + STOP_S
    while not has_stopped(pid):
        assert time.monotonic() < end_s, f"process {pid} runs on after SIGSTOP"
        os.sched_yield()


def has_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped, or gone."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "TtZX":
            return False
    return True
