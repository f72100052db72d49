"""A client of the server that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.rpc_client import RpcClient, assert_nothing_held
from tests.harness.server_process import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> Iterator[RpcClient]:
    """A client that is an engine of its own; after the test the server holds nothing of it."""
    with RpcClient(server.socket_dir) as made:
        yield made
    assert_nothing_held(server.socket_dir)
