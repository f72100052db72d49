"""Who holds a TCP port, for messages that say what to stop."""

from __future__ import annotations

import os
from pathlib import Path


def port_holder(port: int) -> str:
    """Who listens on a TCP port here, as far as this user can see: `pid 12 (name)`; empty if nobody."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                for line in list(lines)[1:]:
                    fields = line.split()
                    if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                        inodes.add(f"socket:[{fields[9]}]")
        except OSError:
            continue
    for entry in os.scandir("/proc") if inodes else ():
        if not entry.name.isdigit():
            continue
        try:
            for descriptor in os.scandir(f"/proc/{entry.name}/fd"):
                if os.readlink(descriptor.path) in inodes:
                    name = Path(f"/proc/{entry.name}/comm").read_text().strip()
                    return f"pid {entry.name} ({name})"
        except OSError:
            continue
    return "a process of another user or network namespace" if inodes else ""
