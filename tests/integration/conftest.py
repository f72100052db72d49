"""Real servers and controllers: one that the tests of a file share, and those that a test starts for itself."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server for all tests of a file, with the settings that the file has in SERVER."""
    settings = {"l1_mb": 64, **getattr(request.module, "SERVER", {})}
    with ServerProcess(tmp_path_factory.mktemp("server"), **settings).started() as process:
        yield process
        assert process.stop() == 0, process.log_tail()


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path_factory.mktemp("controller")) as process:
        yield process


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers for this test alone. `entry`: the JSON of their only L2 adapter."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def starter(
            entry: dict[str, Any] | None = None, *, flags: tuple[str, ...] = (), **more: Any
        ) -> ServerProcess:
            if entry is not None:
                flags = ("--l2-adapter", json.dumps(entry), *flags)
                more["l2"] = "embedded"
            folder = tmp_path / f"server{next(numbers)}"
            server = stack.enter_context(ServerProcess(folder, flags=flags, **{"l1_mb": 16, **more}))
            server.start()
            return server

        yield starter
