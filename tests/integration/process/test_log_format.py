"""With `--log-format json`, every line that a server or a controller logs is one JSON object."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.harness.cache_engine import eventually
from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", ["server", "controller"])
def test_each_line_is_an_object(tmp_path: Path, kind: str) -> None:
    flags = ("--log-format", "json", "--log-level", "debug")
    process: ServerProcess | ControllerProcess
    if kind == "server":
        process = ServerProcess(tmp_path, l1_mb=16, l2="fs", flags=flags)
        process.start()
    else:
        process = ControllerProcess(tmp_path, flags=flags)
    with process:
        process.signal(signal.SIGHUP)
        eventually("the reload in the log", lambda: '"message": "reloaded' in process.log.read_text())
        assert process.stop() == 0
        lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert all(set(line) == {"time", "level", "component", "message", "fields"} for line in lines)
    [ready] = [line for line in lines if line["message"] == "ready"]
    assert ready["fields"]["pid"] == process.ready["pid"]
    assert [line["message"] for line in lines[-2:] if line["message"] != "pool_kept"][-1] == "stopped"
