"""Makes a process end with its parent."""

from __future__ import annotations

import os
import signal

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
