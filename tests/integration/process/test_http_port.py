"""The HTTP ports of a real server and a real controller: clients that fill them keep nobody out and end no process."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.controller_process import ControllerProcess
from tests.harness.http_read import read
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

DESCRIPTORS = 256
PROBES = ("/healthz", "/readyz", "/metrics")


@contextlib.contextmanager
def silent_connections(port: int, count: int) -> Iterator[None]:
    """`count` open connections that send nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


def test_connections_up_to_the_descriptor_limit_end_no_server(tmp_path: Path) -> None:
    """libzmq's ipc listener aborts the process when accept finds no descriptor."""
    with ServerProcess(tmp_path, l1_mb=16) as server:
        server.start()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        with silent_connections(server.ready["http_port"], 2 * DESCRIPTORS):
            for path in PROBES:
                assert read(server.url + path)
            with RpcClient(server.socket_dir) as client:
                assert client.ping().epoch == server.ready["epoch"]
                assert client.status()["http"]["closed_idle"] >= DESCRIPTORS
        assert server.stop() == 0


def test_silent_connections_do_not_switch_off_a_controllers_probes(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller, silent_connections(controller.http_port, 100):
        for path in PROBES:
            assert controller.text(path)
        assert "kvstrata_controller_http_connections " in controller.text("/metrics")
