"""Real servers with one instance id and a real controller: by the key in their state folder they are one instance."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.controller_process import ControllerProcess
from tests.harness.rpc_client import CHUNK_TOKENS
from tests.harness.server_process import ServerProcess
from tests.integration.server.test_cluster_member import QUICK, cluster_of, ours, until

pytestmark = pytest.mark.integration


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path / "controller", flags=QUICK) as process:
        yield process


def server(folder: Path, controller: ControllerProcess) -> ServerProcess:
    """A server with the id `ours`, whose key lies in `folder`."""
    url = f"tcp://127.0.0.1:{controller.ports['reply']}"
    flags = ("--controller-url", url, "--instance-id", "ours")
    return ServerProcess(folder, l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=flags)


def live(controller: ControllerProcess) -> dict[str, Any]:
    """The controller's row of the id; empty unless it lives."""
    row = ours(controller)
    return row if row.get("state") == "live" else {}


def test_a_server_comes_back_by_itself_when_the_one_that_superseded_it_is_killed(tmp_path, controller):
    with server(tmp_path / "one", controller) as first, server(tmp_path / "one", controller) as second:
        first.start()
        until(lambda: live(controller).get("pid") == first.pid)
        second.start()
        until(lambda: live(controller).get("pid") == second.pid)
        until(lambda: not cluster_of(first)["member"])
        second.kill()
        until(lambda: live(controller).get("pid") == first.pid)
        until(lambda: live(controller).get("confirmed"))
        assert cluster_of(first)["member"]


@pytest.mark.long
def test_a_server_without_the_key_of_its_id_is_refused_until_an_admin_lets_the_id_be_forgotten(
    tmp_path, controller
):
    with (
        server(tmp_path / "rightful", controller) as rightful,
        server(tmp_path / "other", controller) as other,
    ):
        rightful.start()
        until(lambda: live(controller))
        key = tmp_path / "rightful" / "state" / "kvstrata" / "members" / "ours.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        other.start()
        other.expect("controller_refuses", "code=wrong_key")
        rightful.kill()
        rightful.start()
        until(lambda: live(controller).get("pid") == rightful.pid)
        rightful.kill()
        until(lambda: ours(controller)["state"] == "dead")
        assert not cluster_of(other)["member"]
        controller.ask("/v1/instances/ours", method="DELETE")
        until(lambda: live(controller).get("pid") == other.pid)
