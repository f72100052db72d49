"""A real `lmcache-controller` as a child process that can be killed, stopped and started again on the same ports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from kvstrata.cli.ctl import reachable
from kvstrata.process.http_local import find_token
from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.network import Host
from tests.harness.own_process import OwnProcess, ServerFailed

PORTS = ("reply",)


class ControllerProcess(OwnProcess):
    """A controller to `start`, `kill`, `freeze`, `thaw` and `stop` any number of times.

    `folder` receives the log and the snapshot.
    """

    def __init__(
        self,
        folder: Path,
        *,
        flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        host: Host | None = None,
        supervised: bool = False,
    ) -> None:
        """The controller runs on `host` (None: this machine), without its keeper unless `supervised`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "controller.log"
        self.snapshot = folder / "state" / "directory.snapshot"
        self._environment = dict(os.environ if environment is None else environment)
        self._supervised = supervised
        self._flags = (*(() if supervised else ("--no-supervise",)), *flags)
        self.within = () if host is None else host.under
        self._host = host
        self.http_port = 0
        self.ports = dict.fromkeys(PORTS, 0)

    def start(self) -> dict[str, Any]:
        """Start the controller (again), wait until it is ready, and return its ready line. Raises ServerFailed."""
        for attempt in range(5):
            if not self.ready:
                self.http_port = free_port()
                self.ports = {name: free_port() for name in PORTS}
            try:
                return self._start()
            except ServerFailed:
                if self.ready or attempt == 4:
                    raise
        raise AssertionError

    def _start(self) -> dict[str, Any]:
        flags = [
            *("--port", str(self.http_port), "--monitor-ports", json.dumps(self.ports)),
            *("--snapshot-dir", str(self.snapshot.parent)),
            *self._flags,
        ]
        return self.launch("controller", flags, self._environment, forked=not self._supervised)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def ask(self, path: str, body: Any = None, *, method: str = "", token: str | None = None) -> Any:
        """Request a JSON document. Raises urllib.error.HTTPError."""
        return json.loads(self._read(path, body, method, token))

    def text(self, path: str) -> str:
        """Request a page of text. Raises urllib.error.HTTPError."""
        return self._read(path, None, "", None).decode()

    def _read(self, path: str, body: Any, method: str, token: str | None) -> bytes:
        send = read if self._host is None else self._host.http
        return send(self.url + path, body=body, method=method, token=token)

    def bearer(self) -> dict[str, str]:
        """Return the header with the token that this start has made."""
        return {"Authorization": f"Bearer {find_token(self.url)}"}

    def dashboard_link(self) -> str:
        """Return a link below `url` that logs a browser in."""
        return str(reachable(self.ask("/v1/dashboard-link", {}), self.url)["url"])

    def __enter__(self) -> Self:
        self.start()
        return self
