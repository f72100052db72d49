"""How many processes the kernel has killed in our control group for lack of memory.

The keeper imports this, so it uses nothing but builtins.
"""

from __future__ import annotations


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
