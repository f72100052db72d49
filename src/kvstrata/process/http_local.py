"""Where clients of the same user find an HTTP port of this machine: files with its token, and unix sockets.

    <run dir>/http/<port>-<network namespace>.token              mode 0600, below a folder of mode 0700
    <run dir>/http/<server or controller>-<random>.socket        likewise, with the path of a unix socket

1. The process that serves the port holds a lock (flock) on its file; a file without a lock is left over from a process
   that has ended.  Each start removes such files.
2. A client sends a token that it found only to a port of this machine that a process of its own user listens on.
   Otherwise another user could take the port of a server that has ended and receive the token.
3. A unix socket, named as `unix:PATH` in place of an address, has mode 0600 and lies in a folder of ours that no other
   user may write to.  A connection of another user than ours and root is closed unread (`is_ours`).  So requests need
   no token.
4. A socket on which a process listens is never replaced.  The folder is locked while a socket is looked at and
   replaced, so that of two processes that start at the same time one fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvstrata.config.private_dir import check_private_dir, make_private_dir, path_id, run_dir, run_dirs
from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.process.ports import port_uids

SCHEME = "unix:"
HOST_FIELD, TOKEN_FIELD = "http.host", "http.token_file"
FOLDER = "http"
TOKEN, SOCKET = ".token", ".socket"
MAX_BYTES = 4_096
MAX_PATH_BYTES = 107
"""The kernel has room for no longer path."""
_UCRED = struct.Struct("iII")


# --- unix sockets -----------------------------------------------------------------------------------------------------


def socket_path(host: str, field: str = HOST_FIELD) -> Path | None:
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
    make_private_dir(path.parent, HOST_FIELD)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked_folder(path.parent):
            _remove_stale(path)
            os.fchmod(listener.fileno(), 0o600)  # Linux takes over the mode at the bind, so it is never wider
            listener.bind(str(path))
            listener.listen(128)
            listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{HOST_FIELD}: cannot listen on {str(path)!r}: {error.strerror}; choose another path",
            field=HOST_FIELD,
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
def _locked_folder(folder: Path) -> Iterator[None]:
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
            f"{HOST_FIELD}: {str(path)!r} is no socket; remove it or choose another path", field=HOST_FIELD
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
        f"{HOST_FIELD}: another process listens on {str(path)!r}; stop it or choose another path",
        field=HOST_FIELD,
    )


# --- files ------------------------------------------------------------------------------------------------------------


def fresh_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


class RunFile:
    """A file in the folder, from its making until `close`."""

    def __init__(self, name: str, text: str, environ: Mapping[str, str]) -> None:
        """Write the file. Raises ConfigError."""
        folder = run_dir(environ) / FOLDER
        make_private_dir(folder, TOKEN_FIELD)
        _sweep(folder)
        self.path = folder / name
        part = folder / f"{secrets.token_hex(8)}.part"
        try:
            with contextlib.ExitStack() as undo:
                self._fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._fd)
                undo.callback(part.unlink)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                os.write(self._fd, os.fsencode(f"{text}\n"))
                os.rename(part, self.path)
                undo.pop_all()
        except OSError as error:
            raise ConfigError(
                f"{TOKEN_FIELD}: cannot write {name} into {str(folder)!r}: {error.strerror}; make room there, or name "
                "a file with a token",
                field=TOKEN_FIELD,
            ) from None

    def is_there(self) -> bool:
        """Whether the file is the one that was written, and not removed or replaced."""
        written = os.fstat(self._fd)
        return path_id(self.path) == (written.st_dev, written.st_ino)

    def close(self) -> None:
        """Remove the file, unless a later process has replaced it."""
        if self.is_there():
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._fd)


def token_file(token: str, port: int, environ: Mapping[str, str] = os.environ) -> RunFile:
    """The file with the token of one served port. Raises ConfigError."""
    return RunFile(_name(port), token, environ)


def socket_file(kind: str, path: Path, environ: Mapping[str, str] = os.environ) -> RunFile:
    """The file with the path of one unix socket. `kind`: `server`, `controller` or `gateway`. Raises ConfigError."""
    return RunFile(f"{kind}-{secrets.token_hex(4)}{SOCKET}", str(path), environ)


def find_token(url: str, environ: Mapping[str, str] = os.environ) -> str:
    """The token of the HTTP port at `url`, if a process of our user serves it on this machine; else empty."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
        here = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return ""
    if not here or port_uids(port) != {os.geteuid()}:
        return ""
    for folder in _folders(environ):
        if token := _read(folder / _name(port)):
            return token
    return ""


def find_sockets(kind: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The paths of the unix sockets of our user's servers, or controllers, that run on this machine."""
    for folder in _folders(environ):
        if found := sorted(filter(None, map(_read, folder.glob(f"{kind}-*{SOCKET}")))):
            return found
    return []


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where the files may lie: what systemd or cron starts often has no XDG_RUNTIME_DIR, unlike a login shell."""
    try:
        places = run_dirs(environ)
    except ConfigError:
        places = run_dirs({})
    for place in places:
        with contextlib.suppress(ConfigError):
            check_private_dir(place / FOLDER, TOKEN_FIELD)
            yield place / FOLDER


def _read(path: Path) -> str:
    """The text in the file of a process that is alive; else empty."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not private or not stat.S_ISREG(status.st_mode) or not _locked(fd, fcntl.LOCK_SH):
            return ""
        return os.fsdecode(os.read(fd, MAX_BYTES)).strip()
    finally:
        os.close(fd)


def _sweep(folder: Path) -> None:
    """Remove the files of processes that have ended."""
    for path in [*folder.glob(f"*{TOKEN}"), *folder.glob(f"*{SOCKET}")]:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not _locked(fd, fcntl.LOCK_EX):
                    path.unlink()
            finally:
                os.close(fd)


def _locked(fd: int, kind: int) -> bool:
    """Whether another process holds a lock on this file that excludes `kind`."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _name(port: int) -> str:
    """Processes in different network namespaces may serve the same port."""
    try:
        space = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        space = 0
    return f"{port}-{space}{TOKEN}"
