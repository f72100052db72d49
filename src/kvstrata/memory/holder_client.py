"""The server's side of the holder (see `holder`): starts it, asks it and ends it.  Blocking, with time limits."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from kvstrata.memory import linux
from kvstrata.memory.holder import HELD_COUNT, MAX_CONNECTIONS, MAX_MESSAGE_BYTES
from kvstrata.patience import patience
from kvstrata.process.child_environment import plain

_REPLY_TIMEOUT_S = 3.0
_START_TIMEOUT_S = 10.0
_BOOT = "import sys; sys.path.append(sys.argv[1]); from kvstrata.memory.holder import main; main()"


class HolderUnreachable(Exception):
    """No holder answers on this socket: none was started, it ended, or it is stopped."""


def start(path: Path) -> None:
    """Start a holder that listens on `path`, in place of any earlier holder.

    When it returns, the socket takes connections.  Raises OSError when the process cannot be started.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        listener.listen(MAX_CONNECTIONS)
        root = Path(__file__).resolve().parents[2]
        command = [
            sys.executable,
            "-P",
            "-s",
            "-S",
            "-c",
            _BOOT,
            str(root),
            str(listener.fileno()),
            str(path),
        ]
        try:
            done = subprocess.run(
                command,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=plain(os.environ),
                cwd="/",
                start_new_session=True,
                timeout=patience(_START_TIMEOUT_S),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(
                errno.ETIMEDOUT, f"the holder process did not start within {_START_TIMEOUT_S:.0f} s"
            ) from error
        if done.returncode != 0:
            raise OSError(errno.ECHILD, f"the holder process did not start: {done.stderr.strip()[-500:]}")


def fetch(path: Path) -> list[int]:
    """Copies of the segment's descriptors (index, extents, sessions.lock), for the caller to close; empty if not held.

    Raises HolderUnreachable, and PermissionError when the socket is served by another uid.
    """
    received = _ask(path, b"get", [])
    if received.data == b"held" and len(received.fds) == HELD_COUNT:
        return received.fds
    linux.close_all(received.fds)
    if received.data == b"empty":
        return []
    raise HolderUnreachable(
        f"{path}: unexpected answer {received.data!r} with {len(received.fds)} descriptors"
    )


def keep(path: Path, fds: list[int]) -> None:
    """Hand copies of (index, extents, sessions.lock) to the holder in place of those that it has. Raises as `fetch`."""
    _order(path, b"put", fds)


def dismiss(path: Path) -> None:
    """Have the holder drop the segment and end. Raises as `fetch`."""
    _order(path, b"exit", [])


def _order(path: Path, request: bytes, fds: list[int]) -> None:
    received = _ask(path, request, fds)
    linux.close_all(received.fds)
    if received.data != b"ok":
        raise HolderUnreachable(f"{path}: unexpected answer {received.data!r} to {request!r}")


def _ask(path: Path, request: bytes, fds: list[int]) -> linux.Received:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            linux.connect(sock, os.fspath(path), patience(_REPLY_TIMEOUT_S))
            sock.settimeout(patience(_REPLY_TIMEOUT_S))
            if linux.credentials_of(sock).uid != os.geteuid():
                raise PermissionError(errno.EPERM, "holder socket is served by another uid", os.fspath(path))
            linux.send(sock, request, fds)
            return linux.receive(sock, MAX_MESSAGE_BYTES, HELD_COUNT)
        except PermissionError:
            raise
        except OSError as error:
            raise HolderUnreachable(f"{path}: {error}") from error
