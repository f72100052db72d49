"""An HTTP port on a unix socket, named as `unix:PATH` in place of an address.

1. The socket has mode 0600 and lies in a folder of ours that no other user may write to.  A connection of another user
   than ours and root is closed unread (`is_ours`).  So requests need no token.
2. A socket on which a process listens is never replaced.  The folder is locked while a socket is looked at and
   replaced, so that of two processes that start at the same time one fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from kvstrata.config.private_dir import make_private_dir
from kvstrata.errors import ConfigError, MachineLacks

SCHEME = "unix:"
FIELD = "http.host"
MAX_PATH_BYTES = 107
"""The kernel has room for no longer path."""
_UCRED = struct.Struct("iII")


def socket_path(host: str, field: str = FIELD) -> Path | None:
    """The path in `unix:PATH`, `~` expanded; None for the address of a tcp port. Raises ConfigError naming `field`."""
    if not host.startswith(SCHEME):
        return None
    path = os.path.expanduser(host.removeprefix(SCHEME))
    if not path.startswith("/") or path.endswith("/"):
        raise ConfigError(
            f"{field}: {host!a:.200} must be {SCHEME} and the absolute path of a socket, such as "
            f"{SCHEME}/run/user/{os.geteuid()}/kvstrata.sock",
            field=field,
        )
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES or "\0" in path:
        raise ConfigError(
            f"{field}: {path!a:.200} has {length} bytes; the path of a unix socket has at most {MAX_PATH_BYTES} and no "
            "zero byte, choose another one",
            field=field,
        )
    return Path(path)


def listen_at(path: Path) -> socket.socket:
    """A listening socket at a path of `socket_path`. Raises ConfigError."""
    make_private_dir(path.parent, FIELD)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_stale(path)
            os.fchmod(listener.fileno(), 0o600)  # Linux takes over the mode at the bind, so it is never wider
            listener.bind(str(path))
            listener.listen(128)
            listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{FIELD}: cannot listen on {str(path)!r}: {error.strerror}; choose another path", field=FIELD
        ) from None
    except ConfigError:
        listener.close()
        raise
    return listener


def is_ours(connection: socket.socket) -> bool:
    """Whether the process that connected, or the one that listens, runs as our user or as root (SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return _UCRED.unpack(credentials)[1] in (os.geteuid(), 0)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended. Raises OSError, and ConfigError for anything else at `path`."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"{FIELD}: {str(path)!r} is no socket; remove it or choose another path", field=FIELD
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its queue is full, so a process listens
    raise MachineLacks(
        f"{FIELD}: another process listens on {str(path)!r}; stop it or choose another path", field=FIELD
    )
