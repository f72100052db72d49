"""Real processes in the environment of a pod whose namespace has services with names like ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def links(prefix: str) -> dict[str, str]:
    return {
        f"{prefix}_SERVICE_HOST": "10.96.0.17",
        f"{prefix}_SERVICE_PORT": "8080",
        f"{prefix}_SERVICE_PORT_HTTP": "8080",
        f"{prefix}_PORT": "tcp://10.96.0.17:8080",
        f"{prefix}_PORT_8080_TCP": "tcp://10.96.0.17:8080",
        f"{prefix}_PORT_8080_TCP_PROTO": "tcp",
        f"{prefix}_PORT_8080_TCP_PORT": "8080",
        f"{prefix}_PORT_8080_TCP_ADDR": "10.96.0.17",
    }


POD = {
    **links("KVSTRATA"),
    **links("KVSTRATA_HTTP"),
    **links("KVSTRATA_CONTROLLER"),
    **links("LMCACHE_SERVER"),
}


def notes(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "enableServiceLinks" in line]


def test_a_server_starts_beside_services_of_its_name_and_says_so_once(tmp_path: Path) -> None:
    environment = {**os.environ, **POD, "KVSTRATA_CHUNK_SIZE": "32"}
    with ServerProcess(tmp_path, l1_mb=16, environment=environment) as server:
        server.start()
        assert server.stop() == 0
        [note] = notes(server.log)
    assert "setting_noted" in note and "KVSTRATA_CONTROLLER_PORT" in note


def test_a_controller_starts_beside_services_of_its_name_and_says_so_once(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path, environment={**os.environ, **POD}) as controller:
        assert controller.stop() == 0
        [note] = notes(controller.log)
    assert "setting_noted" in note
