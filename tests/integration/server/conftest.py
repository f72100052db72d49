"""The servers of tests that speak the wire: one for a module, or as many as a test starts for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.rpc_client import RpcClient, assert_nothing_held
from tests.harness.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests of a file, each of which leaves it as it found it."""
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64) as process:
        process.start()
        yield process
        assert process.stop() == 0, process.log_tail()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[RpcClient]:
    """A client that is an engine of its own; after the test the server holds nothing of it."""
    with RpcClient(server.socket_dir) as made:
        yield made
    assert_nothing_held(server.socket_dir)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers for this test alone."""
    started: list[ServerProcess] = []

    def starter(**arguments: Any) -> ServerProcess:
        arguments.setdefault("l1_mb", 16)
        flags = arguments.pop("flags", ())
        process = ServerProcess(tmp_path / f"server{len(started)}", flags=flags, **arguments)
        started.append(process)
        process.start()
        return process

    yield starter
    for process in started:
        process.close()
