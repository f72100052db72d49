"""Real servers and a real controller with the files of `kvstrata cluster init`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.rpc.key_folder import KeyFolder
from tests.harness.controller_process import ControllerProcess
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient
from tests.harness.server_process import ServerProcess
from tests.integration.server.test_cluster_member import QUICK, Prompt, cluster_of, until

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a controller and of the members `a` and `b`."""
    keys = KeyFolder(str(tmp_path / "keys"))
    keys.make(["a", "b"], overwrite=False)
    return keys.folder


@pytest.fixture
def controller(tmp_path: Path, folder: Path) -> Iterator[ControllerProcess]:
    flags = (*QUICK, "--curve-secret-file", str(folder / "controller.keys"))
    with ControllerProcess(tmp_path / "controller", flags=flags) as process:
        yield process


def server(controller: ControllerProcess, keys: Path, instance: str) -> ServerProcess:
    """A server with this id and the keys of this file."""
    flags = (
        *("--controller-url", f"tcp://127.0.0.1:{controller.ports['reply']}"),
        *("--cluster-curve-file", str(keys), "--instance-id", instance),
    )
    folder = keys.parent.parent / f"{keys.stem} {instance}"
    return ServerProcess(folder, l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=flags)


def members(controller: ControllerProcess) -> set[str]:
    """Ids of confirmed members."""
    rows = controller.ask("/v1/instances")["instances"]
    return {row["id"] for row in rows if row["state"] == "live" and row["confirmed"]}


def test_members_with_keys_of_their_own_read_from_each_other(controller, folder):
    pytest.importorskip(
        "kvstrata.native.ucx", reason="this build has no UCX; install libucx-dev and build again"
    )
    with contextlib.ExitStack() as stack:
        prompts = []
        for keys, instance in (("a", "a"), ("b", "b-5555")):
            one = stack.enter_context(server(controller, folder / f"{keys}.keys", instance))
            one.start()
            client = stack.enter_context(RpcClient(one.socket_dir))
            prompts.append(Prompt(client, 1, 20))
        until(lambda: members(controller) == {"a", "b-5555"})
        prompts[0].store()
        until(lambda: prompts[1].hits() == 20)
        assert controller.ask("/v1/cluster")["sockets"]["reply"]["refused_handshakes"] == 0


@pytest.mark.long
def test_members_come_and_go_by_changed_files_without_a_restart(controller, folder):
    pytest.importorskip(
        "kvstrata.native.ucx", reason="this build has no UCX; install libucx-dev and build again"
    )
    with server(controller, folder / "a.keys", "a") as first, contextlib.ExitStack() as stack:
        first.start()
        owner = Prompt(stack.enter_context(RpcClient(first.socket_dir)), 1, 20)
        until(lambda: members(controller) == {"a"})
        owner.store()
        KeyFolder(str(folder)).add(["c"], overwrite=False)
        fresh = stack.enter_context(server(controller, folder / "c.keys", "c"))
        fresh.start()
        until(lambda: members(controller) == {"a", "c"})
        reader = Prompt(stack.enter_context(RpcClient(fresh.socket_dir)), 1, 20)
        until(lambda: reader.hits() == 20)
        KeyFolder(str(folder)).remove(["c"])
        until(lambda: members(controller) == {"a"})
        assert not cluster_of(fresh)["member"] and cluster_of(first)["member"]


@pytest.mark.long
def test_a_member_may_use_its_own_ids_only(controller, folder):
    with (
        server(controller, folder / "a.keys", "a") as rightful,
        server(controller, folder / "b.keys", "a") as forged,
    ):
        forged.start()
        forged.expect("controller_refuses", "code=not_permitted")
        rightful.start()
        until(lambda: members(controller) == {"a"})
        assert not cluster_of(forged)["member"]
        controller.expect("registration_refused", 'why="the key file lists other ids for its key"')
