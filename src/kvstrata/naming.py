"""Names of processes and threads, as ps and top show them. Imports only os: the keeper and the holder stay small."""

from __future__ import annotations

import os

MAX_BYTES = 15
"""The kernel cuts longer names."""


def name_process(name: str) -> None:
    """Name the calling thread, which is also the process's name if it is the main thread. Without /proc, do nothing."""
    try:
        fd = os.open("/proc/thread-self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, os.fsencode(name)[:MAX_BYTES])
    finally:
        os.close(fd)


def name_thread() -> None:
    """Give the calling thread, for the kernel, the name that it has in Python; otherwise it has the process's name."""
    import threading

    name_process(threading.current_thread().name)
