"""Commands that run a child in namespaces of its own, as in a container."""

from __future__ import annotations

import subprocess

CONTAINER = ("unshare", "-Urmnip", "--fork", "--kill-child", "--mount-proc")
"""The child has its own user, mount, network, IPC and PID namespaces and /proc; it is root inside, our user outside."""


def hidden_shm(size: str = "64k") -> tuple[str, ...]:
    """Return a command that replaces /dev/shm with an empty one of `size`; it needs a mount namespace of its own."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ("sh", "-c", script, "sh")


def why_not() -> str:
    """Return why this machine permits no namespaces; empty when it does."""
    done = subprocess.run(
        [*CONTAINER, *hidden_shm(), "true"], capture_output=True, text=True, check=False, timeout=60
    )
    return "" if done.returncode == 0 else f"user namespaces are not permitted here: {done.stderr.strip()}"
