"""Where clients of the same user find the token of an HTTP port of this machine: a file.

    <run dir>/http/<port>-<network namespace>.token              mode 0600, below a folder of mode 0700

1. The process that serves the port holds a lock (flock) on its file; a file without a lock is left over from a process
   that has ended.  Each start removes such files.
2. A client sends a token that it found only to a port of this machine that a process of its own user listens on.
   Otherwise another user could take the port of a server that has ended and receive the token.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvstrata.config.private_dir import check_private_dir, make_private_dir, path_id, run_dir, run_dirs
from kvstrata.errors import ConfigError
from kvstrata.process.ports import port_uids

TOKEN_FIELD = "http.token_file"
FOLDER, TOKEN = "http", ".token"
MAX_BYTES = 4_096


def fresh_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


class TokenFile:
    """The file with the token of one served port, from its making until `close`."""

    def __init__(self, token: str, port: int, environ: Mapping[str, str] = os.environ) -> None:
        """Write the file. Raises ConfigError."""
        folder = run_dir(environ) / FOLDER
        make_private_dir(folder, TOKEN_FIELD)
        _sweep(folder)
        self.path = folder / _name(port)
        part = folder / f"{secrets.token_hex(8)}.part"
        try:
            with contextlib.ExitStack() as undo:
                self._fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._fd)
                undo.callback(part.unlink)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                os.write(self._fd, f"{token}\n".encode())
                os.rename(part, self.path)
                undo.pop_all()
        except OSError as error:
            raise ConfigError(
                f"{TOKEN_FIELD}: cannot write {self.path.name} into {str(folder)!r}: {error.strerror}; make room "
                "there, or name a file with a token",
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
    for path in folder.glob(f"*{TOKEN}"):
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
