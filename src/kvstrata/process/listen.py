"""The socket of an HTTP port, and the token that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.config.common_model import ListenSettings
from kvstrata.config.private_file import read_bearer_token
from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.observability.logging import EventLog
from kvstrata.process.http_gate import is_loopback
from kvstrata.process.http_local import (
    SCHEME,
    TOKEN_FIELD,
    RunFile,
    fresh_token,
    listen_at,
    socket_file,
    socket_path,
    token_file,
)
from kvstrata.process.ports import port_holder

if TYPE_CHECKING:
    import uvicorn

LOOK_S = 5.0
"""Interval at which a unix socket, and the file with a port's token, are looked at."""


@dataclass
class Listener:
    """A listening socket of an HTTP port."""

    socket: socket.socket
    port: int
    """0 for a unix socket."""
    path: Path | None = None
    """Where a unix socket lies."""
    inode: int = 0
    """The unix socket's own."""

    def url(self, settings: ListenSettings) -> str:
        """The URL at which users reach the port; empty for a unix socket."""
        if self.path is not None:
            return ""
        host = platform.node() if settings.host in ("*", "0.0.0.0", "::") else settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def is_there(self) -> bool:
        """Whether a unix socket's file is ours, and not removed or replaced."""
        try:
            return self.path is not None and os.stat(self.path).st_ino == self.inode
        except OSError:
            return False

    async def serve(self, server: uvicorn.Server) -> None:
        """Serve until cancelled; a unix socket whose file somebody has removed is made anew."""
        await asyncio.gather(server.serve(sockets=[self.socket]), self._keep(server))

    async def _keep(self, server: uvicorn.Server) -> None:
        log = EventLog("http")
        while self.path is not None:
            await asyncio.sleep(LOOK_S)
            if self.is_there():
                continue
            try:
                self.socket = listen_at(self.path)
                self.inode = os.stat(self.path).st_ino
            except (OSError, ConfigError) as error:
                log.repeated(logging.ERROR, "socket", "http_socket_lost", reason=error)
                continue
            for before in server.servers:
                before.close()
            await server.startup(sockets=[self.socket])
            log.warning("socket_made_anew", path=self.path, note="it was removed")

    def close(self) -> None:
        """Close the socket, and remove a unix socket's file unless another process has replaced it. Idempotent."""
        if self.path is not None and self.is_there():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.socket.close()


def read_token(settings: ListenSettings, *, insecure: bool) -> str:
    """The bearer token of the settings' file, else a new one; empty for an open port and for a unix socket.

    Raises ConfigError if a port that can be reached from elsewhere would be open without `insecure`.
    """
    if socket_path(settings.host) is not None:
        if settings.token_file:
            raise ConfigError(
                f"{TOKEN_FIELD}: {settings.token_file!a:.200} has no effect, since http.host is a unix socket, which "
                "needs no token; leave one of them out",
                field=TOKEN_FIELD,
            )
        return ""
    if settings.token_file:
        return read_bearer_token(settings.token_file, TOKEN_FIELD)
    if not is_loopback(settings.host) and not insecure:
        raise ConfigError(
            f"http.host: {settings.host!r} is not loopback: set http.token_file, or --insecure to go without",
            field="http.host",
        )
    return "" if insecure else fresh_token()


class ServedToken:
    """The token of a port that is served: the port asks for it, and clients of the same user find it in a file.

    Of a unix socket, which needs no token, clients find the path.
    """

    def __init__(
        self,
        set_token: Callable[[str], None],
        settings: ListenSettings,
        listener: Listener,
        token: str,
        kind: str,
        log: EventLog,
    ) -> None:
        """Publish the token. Raises ConfigError. `set_token` makes the port ask for another one; for `kind` see
        `socket_file`."""
        self._set_token = set_token
        self._settings = settings
        self._listener = listener
        self._token = token
        self._kind = kind
        self._log = log
        self._file = self._publish(token)

    def _publish(self, token: str) -> RunFile | None:
        """The file; None for an open port. Raises ConfigError, unless clients can be given the socket's path, or the
        settings' own token file."""
        listener = self._listener
        try:
            if listener.path is not None:
                return socket_file(self._kind, listener.path)
            return token_file(token, listener.port) if token else None
        except ConfigError as error:
            if listener.path is None and not self._settings.token_file:
                raise
            flag = "--token-file" if listener.path is None else f"--url {SCHEME}{listener.path}"
            self._log.warning("http_port_not_found", note=f"clients need {flag}: {error.message}")
            return None

    @property
    def path(self) -> str:
        """The file in which clients find the token; empty without one."""
        return str(self._file.path) if self._file is not None and self._token else ""

    def replace(self, token: str) -> bool:
        """Ask for this token from now on; returns whether it differs. Raises ConfigError; then the old one stays."""
        if token == self._token:
            return False
        before, self._file = self._file, self._publish(token)
        self._token = token
        self._set_token(token)
        if before is not None:
            before.close()
        return True

    async def keep(self) -> None:
        """Put the file back whenever somebody has removed it, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Put the file back if somebody has removed it."""
        before = self._file
        if before is None or before.is_there():
            return
        try:
            self._file = self._publish(self._token)
        except ConfigError as error:
            self._log.repeated(logging.ERROR, "token", "http_token_file_lost", reason=error.message)
            return
        before.close()
        self._log.warning("http_token_file_made_anew", path=self.path, was=before.path)

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()


def warn_if_open(settings: ListenSettings, token: str, port: int, log: EventLog, *, insecure: bool) -> None:
    """Log that `--insecure` opens a port to everybody, and that other machines reach it without TLS."""
    warn_if_plain(settings.host, port, log)
    if insecure and not token and port:
        log.warning(
            "http_port_open",
            host=settings.host,
            port=port,
            note="--insecure: everybody who reaches this port may read and change everything; set http.token_file",
        )


def warn_if_plain(host: str, port: int, log: EventLog) -> None:
    """Log that other machines reach a port that speaks no TLS; `port`: 0 for a unix socket."""
    if port and not is_loopback(host):
        log.warning(
            "port_without_tls",
            host=host,
            port=port,
            note="whoever can listen on the network reads tokens, prompts and answers: put a proxy or a mesh with TLS "
            "before this port (docs/deploy.md#tls)",
        )


def listen(settings: ListenSettings, *, flag: str = "--http-port") -> Listener:
    """A listening socket. Raises ConfigError that names the process that has the port, and the flag to change."""
    path = socket_path(settings.host)
    if path is not None:
        return Listener(listen_at(path), 0, path, os.stat(path).st_ino)
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
