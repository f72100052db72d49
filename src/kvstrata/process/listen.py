"""The socket of an HTTP port, and the token that the port requires."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.config.common_model import ListenSettings
from kvstrata.config.private_dir import path_id
from kvstrata.config.private_file import read_bearer_token
from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.observability.logging import EventLog
from kvstrata.process.http_gate import is_loopback
from kvstrata.process.http_local import TOKEN_FIELD, fresh_token, publish
from kvstrata.process.ports import port_holder

LOOK_S = 5.0
"""Interval of checks of the file with a port's token."""


@dataclass
class Listener:
    """A listening socket of an HTTP port."""

    socket: socket.socket
    port: int

    def url(self, settings: ListenSettings) -> str:
        """The URL at which users reach the port."""
        host = platform.node() if settings.host in ("*", "0.0.0.0", "::") else settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()


def read_token(settings: ListenSettings, *, insecure: bool) -> str:
    """The bearer token of the settings' file, else a new one; empty for an open port.

    Raises ConfigError if a port that can be reached from elsewhere would be open without `insecure`.
    """
    if settings.token_file:
        return read_bearer_token(settings.token_file, TOKEN_FIELD)
    if not is_loopback(settings.host) and not insecure:
        raise ConfigError(
            f"http.host: {settings.host!r} is not loopback: set http.token_file, or use --insecure to need no token",
            field="http.host",
        )
    return "" if insecure else fresh_token()


class ServedToken:
    """The token of a served port: the port requires it, and clients of the same user find it in a file."""

    def __init__(
        self, set_token: Callable[[str], None], settings: ListenSettings, port: int, token: str, log: EventLog
    ) -> None:
        """Publish the token. Raises ConfigError. `set_token` makes the port require another one."""
        self._set_token = set_token
        self._settings = settings
        self._port = port
        self._log = log
        self._path: Path | None = None
        """The file; None for an open port, and where it cannot be written though the settings name one."""
        self._publish(token)

    def _publish(self, token: str) -> None:
        """Write the file. Raises ConfigError, unless clients can be given the settings' own file."""
        path = None
        try:
            path = publish(token, self._port)
        except ConfigError as error:
            if not self._settings.token_file:
                raise
            self._log.warning("http_port_not_found", note=f"clients need --token-file: {error.message}")
        self._token, self._path = token, path
        self._id = path_id(path) if path is not None else None

    @property
    def path(self) -> str:
        """The file in which clients find the token; empty without one."""
        return str(self._path or "")

    def replace(self, token: str) -> bool:
        """Require this token from now on; returns whether it differs. Raises ConfigError; then the old one stays."""
        if token == self._token:
            return False
        self._publish(token)
        self._set_token(token)
        return True

    async def keep(self) -> None:
        """Restore the file whenever it was removed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Restore the file if it was removed."""
        was = self._path
        if was is None or path_id(was) == self._id:
            return
        try:
            self._publish(self._token)
        except ConfigError as error:
            self._log.repeated(logging.ERROR, "token", "http_token_file_lost", reason=error.message)
            return
        self._log.warning("http_token_file_made_anew", path=self.path, was=was)

    def close(self) -> None:
        """Remove the file, unless a later process has replaced it."""
        if self._path is not None and path_id(self._path) == self._id:
            with contextlib.suppress(OSError):
                self._path.unlink()


def warn_if_open(settings: ListenSettings, token: str, port: int, log: EventLog, *, insecure: bool) -> None:
    """Log that `--insecure` opens a port to all users, and that other machines reach it without TLS."""
    warn_if_plain(settings.host, port, log)
    if insecure and not token:
        log.warning(
            "http_port_open",
            host=settings.host,
            port=port,
            note="--insecure: anyone who can reach this port can read and change everything; set http.token_file",
        )


def warn_if_plain(host: str, port: int, log: EventLog) -> None:
    """Log that other machines can reach a port without TLS."""
    if not is_loopback(host):
        log.warning(
            "port_without_tls",
            host=host,
            port=port,
            note="anyone who reads the network's traffic sees tokens, prompts and answers: put a proxy or a mesh "
            "with TLS in front of this port (docs/deploy.md#tls)",
        )


def listen(settings: ListenSettings, *, flag: str = "--http-port") -> Listener:
    """A listening socket. Raises ConfigError that names the process that has the port, and the flag to change."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        holder = port_holder(settings.port)
        by = f", held by {holder}" if holder else ""
        raise MachineLacks(
            f"http.port: cannot listen on {settings.host}:{settings.port}: {error.strerror}{by};"
            f" choose another {flag}, or 0 for a free one",
            field="http.port",
        ) from None
    listener.listen(128)
    listener.setblocking(False)
    return Listener(listener, listener.getsockname()[1])
