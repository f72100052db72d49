"""Tests that hold for a server and for a controller alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerProcess

Either = ServerProcess | ControllerProcess


@pytest.fixture(params=["server", "controller"])
def begin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Either]]:
    """Starts a server and, when the test runs again, a controller. `stderr` gets its log instead of a file."""
    with contextlib.ExitStack() as stack:

        def beginner(stderr: int | None = None, **more: Any) -> Either:
            folder = tmp_path / request.param
            is_server = request.param == "server"
            process = (
                ServerProcess(folder, l1_mb=16, **more) if is_server else ControllerProcess(folder, **more)
            )
            process.stderr = stderr
            stack.enter_context(process)
            if isinstance(process, ServerProcess):
                process.start()
            return process

        yield beginner
