"""What a process has open, while it opens and closes files meanwhile."""

from __future__ import annotations

import contextlib
import os


def open_files(pid: int | str = "self") -> list[str]:
    """The targets of its descriptors, in no order, e.g. a path or `socket:[1234]`."""
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, as the listing's own descriptor is
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return targets
