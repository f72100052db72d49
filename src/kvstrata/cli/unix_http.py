"""HTTP requests to a unix socket, for `urllib`."""

from __future__ import annotations

import functools
import http.client
import os
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from kvstrata.process.http_gate import is_loopback
from kvstrata.process.http_unix import is_ours, socket_path


class _Connection(http.client.HTTPConnection):
    """A connection to the unix socket of our user; root may ask anybody's, and everybody root's."""

    def __init__(self, host: str, *, path: Path, **more: Any) -> None:
        super().__init__(host, **more)
        self._path = path

    def connect(self) -> None:
        """Connect. Raises OSError, also for the socket of another user."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
        if os.geteuid() != 0 and not is_ours(self.sock):
            raise PermissionError("a process of another user listens there")


class _Handler(urllib.request.HTTPHandler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connect: Any = functools.partial(_Connection, path=self._path)
        return self.do_open(connect, req)


def opener(url: str) -> urllib.request.OpenerDirector:
    """Opens requests to `url`: to its unix socket for `unix:PATH`, else as urllib does, but to this machine without a
    proxy. Raises ConfigError."""
    path = socket_path(url, "--url")
    if path is None:
        here = is_loopback(urllib.parse.urlsplit(url).hostname or "")
        return urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * here)
    return urllib.request.build_opener(_Handler(path), urllib.request.ProxyHandler({}))
