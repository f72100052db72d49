"""A stand-in for S3 on a free port of the loopback: moto's server, a real process that can be killed and frozen.

It keeps objects in its memory, enforces conditional puts, and checks no credentials.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.harness.mooncake import free_port

READY_S = 60.0
BUCKET = "kv-test"
ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTESTTEST", "a-secret-that-nobody-may-see"


class S3Server:
    """`start`, `kill`, `freeze`, `thaw`, any number of times, on one port; killed, it forgets everything."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "s3_server.log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def entry(self, prefix: str = "kv", **more: Any) -> dict[str, Any]:
        """An entry of `l2_adapters`."""
        return {
            "type": "object_store",
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "allow_http": True,
            **more,
        }

    def start(self) -> None:
        """Start it, make the bucket, and wait until it answers."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=READY_S).read()
                return
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, self._log.read_text()[-2000:]
                assert time.monotonic() < deadline_s, self._log.read_text()[-2000:]
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
