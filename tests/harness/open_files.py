"""Lists the open files of a process, which may open and close files meanwhile."""

from __future__ import annotations

import contextlib
import os


def open_files(pid: int | str = "self") -> list[str]:
    """Return the targets of a process's descriptors, such as a path or `socket:[1234]`, in no order."""
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, as the listing's own descriptor is
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return targets
