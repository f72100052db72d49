"""Commands under which a child lives in namespaces of its own, as in a container that shares one directory."""

from __future__ import annotations

import subprocess

CONTAINER = ("unshare", "-Urmnip", "--fork", "--kill-child", "--mount-proc")
"""Own user, mount, network, IPC and PID namespaces, its own /proc; root inside, ourselves outside."""


def hidden_shm(size: str = "64k") -> tuple[str, ...]:
    """Replaces /dev/shm by an empty one of `size`; goes after a command that makes a mount namespace."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ("sh", "-c", script, "sh")


def why_not() -> str:
    """Why namespaces cannot be had here; empty when they can."""
    done = subprocess.run(
        [*CONTAINER, *hidden_shm(), "true"], capture_output=True, text=True, check=False, timeout=60
    )
    return "" if done.returncode == 0 else f"user namespaces are not permitted here: {done.stderr.strip()}"
