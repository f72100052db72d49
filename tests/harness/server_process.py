"""A real `lmcache-server` as a child process that can be killed and started again with its state.

Its sockets and its segment lie in folders of their own below /tmp and /dev/shm, whose names contain this process's id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.network import Host
from tests.harness.own_process import OwnProcess

L2_GB = 4
NAME = "kvstrata-run-"
ROOTS = (Path("/tmp"), Path("/dev/shm"))


def sweep() -> None:
    """Remove the folders below /tmp and /dev/shm that ended processes left behind."""
    for root in ROOTS:
        for left in root.glob(f"{NAME}*"):
            owner = re.fullmatch(rf"{NAME}(\d+)-[0-9a-f]+", left.name)
            if owner is None or Path(f"/proc/{owner[1]}").exists():
                continue
            with contextlib.suppress(FileNotFoundError):  # another process may sweep at the same time
                if left.stat().st_uid == os.getuid():
                    shutil.rmtree(left, ignore_errors=True)


class ServerProcess(OwnProcess):
    """A server to `start`, `kill`, `freeze`, `thaw` and `stop` any number of times; `close` leaves nothing behind.

    `folder` receives the log and the L2 directory; the caller owns and removes it.  The socket directory lies below
    /tmp, since the path of a unix socket may have 100 bytes.  `l2` is `none`, `fs`, or `embedded`, a server's default.
    Adapters may be added below `cache` while the server runs.  The server runs on `host` (None: this one), or is
    started by the command `within`.  With `supervised` it has a keeper, as for users: signals then go to the keeper,
    and `ready["pid"]` is the server.
    """

    of: ClassVar[dict[Path, ServerProcess]] = {}
    """The servers that were started, by the directory of their sockets."""

    def __init__(
        self,
        folder: Path,
        *,
        l1_mb: int,
        l2: str = "none",
        chunk_tokens: int = 256,
        flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        python: Path = Path(sys.executable),
        host: Host | None = None,
        within: tuple[str, ...] = (),
        supervised: bool = False,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{NAME}{os.getpid()}-{secrets.token_hex(4)}"
        self.socket_dir = ROOTS[0] / name
        self.segment_dir = ROOTS[1] / name
        self.log = folder / "server.log"
        self.port = free_port()
        self._python = python
        self.within = within if host is None else host.under
        self._host = host
        self._supervised = supervised
        self._environment = dict(os.environ if environment is None else environment)
        self._environment["KVSTRATA_L1_SEGMENT_DIR"] = str(self.segment_dir)
        self._environment["XDG_CACHE_HOME"] = str(folder / "cache")
        self._environment["XDG_STATE_HOME"] = str(folder / "state")
        self.cache = folder / "cache" / "kvstrata"
        self._flags = [
            *("--l1-size-gb", str(l1_mb / 1024)),
            *("--chunk-size", str(chunk_tokens)),
            *("--socket-dir", str(self.socket_dir)),
            *("--http-port", "0"),
            *(() if supervised else ("--no-supervise",)),
            *flags,
        ]
        if l2 == "none":
            self._flags += ["--l2-adapter", "none"]
        elif l2 == "fs":
            adapter = {"type": "fs", "base_path": str(folder / "l2"), "capacity_gb": L2_GB}
            self._flags += ["--l2-adapter", json.dumps(adapter)]
        elif l2 != "embedded":
            raise ValueError(f"l2 is {l2!r}, must be none, fs or embedded")

    def start(self) -> dict[str, Any]:
        """Start the server (again), wait until it is ready, and return its ready line. Raises ServerFailed."""
        flags = ("--port", str(self.port), *self._flags)
        self.launch("server", flags, self._environment, python=self._python, forked=not self._supervised)
        ServerProcess.of[self.socket_dir] = self
        self.port = self.ready["port"]
        return self.ready

    def started(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def halted(self) -> bool:
        """Return whether the server does not run: it has ended, or a signal has stopped it."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        return state in "TZ"

    def wipe_segment(self) -> None:
        """Remove the pool from shared memory; only while the server is down."""
        shutil.rmtree(self.segment_dir, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ready['http_port']}"

    def get(self, path: str) -> Any:
        send = read if self._host is None else self._host.http
        return json.loads(send(f"{self.url}{path}"))

    def post(self, path: str, body: Any) -> Any:
        """Send a JSON document to the admin port; return the answer."""
        send = read if self._host is None else self._host.http
        return json.loads(send(f"{self.url}{path}", body=body))

    def connector_config(self, **more: Any) -> dict[str, Any]:
        """Return the `kv_connector_extra_config` of an engine that uses this server."""
        return {"lmcache.mp.port": self.port, "kvstrata.socket_dir": str(self.socket_dir), **more}

    def close(self) -> None:
        """Kill the server and remove its sockets and its segment. Idempotent."""
        ServerProcess.of.pop(self.socket_dir, None)
        super().close()
        self.wipe_segment()
        shutil.rmtree(self.socket_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self
