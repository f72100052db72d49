"""What a process has done by the time at which it reports that it is ready."""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path

import pytest

from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerProcess

READY = re.compile(r" kvstrata\.(?:server|controller) ready ")
IMPORTED = re.compile(r"import time: *\d+ \| *\d+ \| +(\w+)")
HTTP_STACK = {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "httptools", "anyio"}


def imported(lines: list[str]) -> set[str]:
    """Packages of which these lines of an import profile import something."""
    return {found[1] for line in lines if (found := IMPORTED.search(line))}


@pytest.mark.parametrize("kind", ["server", "controller"])
def test_the_http_stack_is_imported_before_a_process_is_ready(tmp_path: Path, kind: str) -> None:
    """A later import would hold the interpreter, and delay answers to engines, for half a second."""
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    process: ServerProcess | ControllerProcess
    if kind == "server":
        process = ServerProcess(tmp_path, l1_mb=16, environment=environment)
        process.start()
    else:
        process = ControllerProcess(tmp_path, environment=environment)
    with process:
        for path in ("/readyz", "/metrics"):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{process.ready['http_port']}{path}", timeout=30
            ) as reply:
                assert reply.status == 200
    lines = process.log.read_text().splitlines()
    ready = next(number for number, line in enumerate(lines) if READY.search(line))
    assert imported(lines[:ready]) >= {"fastapi", "uvicorn"}
    assert not imported(lines[ready:]) & HTTP_STACK, sorted(imported(lines[ready:]))
