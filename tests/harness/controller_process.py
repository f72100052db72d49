"""A real `lmcache-controller` as a child process that can be killed, stopped and started again on the same ports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from kvstrata.cli.ctl import reachable
from kvstrata.process.http_local import find_token
from tests.harness import own_commands
from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.logged import Logged
from tests.harness.network import Host
from tests.harness.server_process import ServerFailed, ready_line

PORTS = ("pull", "reply", "heartbeat")


class ControllerProcess(Logged):
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
        self._host = host
        self.ready: dict[str, Any] = {}
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
        assert self._process is None or self._process.poll() is not None
        flags = [
            *("--port", str(self.http_port), "--monitor-ports", json.dumps(self.ports)),
            *("--snapshot-dir", str(self.snapshot.parent)),
            *self._flags,
        ]
        self._process, reader = own_commands.start(
            "kvstrata.cli.controller",
            flags,
            log=self.log,
            stderr=self.stderr,
            environment=self._environment | self.wakes(),
            within=() if self._host is None else self._host.under,
            forked=not self._supervised,
        )
        self.ready = json.loads(ready_line(reader, self._process, self.log))
        return self.ready

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
        """Return a link below `url` that logs a browser in once."""
        return str(reachable(self.ask("/v1/dashboard-link", {}), self.url)["url"])

    def stop(self) -> int:
        """Send SIGTERM and wait for the end; return the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self.kill()
