"""The file in which clients of the same user find the token of an HTTP port of this machine.

    <run dir>/http/<port>-<network namespace>.bearer         mode 0600, below a folder of mode 0700

A client sends a token that it found only to a port of this machine that a process of its own user listens on. Otherwise
another user could take the port of a server that has ended and receive the token.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvstrata.config.private_dir import check_private_dir, make_private_dir, run_dir, run_dirs
from kvstrata.config.private_file import read_private_file, write_private_file
from kvstrata.errors import ConfigError
from kvstrata.process.ports import port_uids

TOKEN_FIELD = "http.token_file"
FOLDER, TOKEN = "http", ".bearer"


def fresh_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


def publish(token: str, port: int, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Write the file with the token of a port, in place of one that a killed process left; returns its path.

    An open port, with an empty token, has no file. Raises ConfigError.
    """
    folder = run_dir(environ) / FOLDER
    make_private_dir(folder, TOKEN_FIELD)
    path = folder / _name(port)
    try:
        if not token:
            path.unlink(missing_ok=True)
            return None
        write_private_file(path, f"{token}\n".encode(), overwrite=True)
    except OSError as error:
        raise ConfigError(
            f"{TOKEN_FIELD}: cannot write {path.name} into {str(folder)!r}: {error.strerror}; free space there, or "
            "set a file with a token",
            field=TOKEN_FIELD,
        ) from None
    return path


def find_token(url: str, environ: Mapping[str, str] = os.environ) -> str:
    """The token of the HTTP port at `url`, if a process of our user serves it on this machine; else empty."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
        here = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return ""
    if here and port_uids(port) == {os.geteuid()}:
        for folder in _folders(environ):
            with contextlib.suppress(ConfigError):
                return read_private_file(str(folder / _name(port)), TOKEN_FIELD).strip()
    return ""


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Folders of the files: processes of systemd or cron often have no XDG_RUNTIME_DIR, unlike a login shell."""
    try:
        places = run_dirs(environ)
    except ConfigError:
        places = run_dirs({})
    for place in places:
        with contextlib.suppress(ConfigError):
            check_private_dir(place / FOLDER, TOKEN_FIELD)
            yield place / FOLDER


def _name(port: int) -> str:
    """Processes in different network namespaces may serve the same port."""
    try:
        return f"{port}-{os.stat('/proc/self/ns/net').st_ino}{TOKEN}"
    except OSError:
        return f"{port}{TOKEN}"
