"""A stand-in for S3 on a free port of the loopback: moto's server, a real process that can be killed and frozen.

The server keeps objects in its memory, enforces conditional puts, and checks no credentials.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.daemon import Daemon

BUCKET = "kv-test"
ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTESTTEST", "a-secret-that-nobody-may-see"

ONE_PUT_AT_A_TIME = """
import threading
from moto.s3.responses import S3Response
from moto.server import main

lock, put = threading.Lock(), S3Response.put_object


def put_object(self):
    with lock:
        return put(self)


S3Response.put_object = put_object
main()
"""
"""moto looks for an object and then stores one: two conditional puts at the same time would both succeed."""


class S3Server(Daemon):
    """One server; a restart leaves it with an empty bucket."""

    ready_s = 60.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "s3_server.log", 1)

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    def entry(self, prefix: str = "kv", **more: Any) -> dict[str, Any]:
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

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        return [sys.executable, "-c", ONE_PUT_AT_A_TIME, "-H", "127.0.0.1", "-p", str(self.port)], None

    def _answers(self) -> bool:
        try:
            request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=self.ready_s).read()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True
