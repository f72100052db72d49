"""A process that ends with the one that made it."""

from __future__ import annotations

import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel send SIGKILL to this process when the thread that made it ends; ends it if that has happened.

    Also while it is stopped or computes without end. `parent_pid`: the process that this one was made by.
    """
    import ctypes  # here, because a parent that forks this process should stay small

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent_pid:
        os._exit(0)
