"""Tiers on a directory that is deleted, hidden by a mount, or read-only: noticed, said, and used again after it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.harness.cache_engine import eventually
from tests.harness.http_read import read
from tests.harness.l2_load import clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient, chain_of, until
from tests.harness.server_process import ServerProcess
from tests.integration.server.l2_servers import l2_servers

pytestmark = pytest.mark.integration


def entry(kind: str, folder: Path) -> dict[str, Any]:
    return {"type": kind, "base_path": str(folder), "capacity_gb": 0.125 if kind == "disk" else 1}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    with l2_servers(tmp_path) as starter:
        yield starter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "medium"


def said(server: ServerProcess, event: str) -> str:
    """The only line of an event, once it is there."""
    line = server.expect(event)
    assert server.log.read_text().count(f" {event} ") == 1
    return line


def more(client: RpcClient, n_chunks: int) -> None:
    """Store another prompt."""
    identity = client.identify()
    client.store(identity, chain_of(identity.root, n_chunks, first_token=n_chunks * 10_000))


def tier(server: ServerProcess, name: str) -> dict[str, Any]:
    return json.loads(read(f"{server.url}/v1/status"))["l2_adapters"][name]


@pytest.mark.parametrize("kind", ["disk", pytest.param("fs", marks=pytest.mark.long)])
def test_a_deleted_directory_is_said_once_and_its_tier_is_not_used_any_more(start, folder, kind):
    server, name = start(entry(kind, folder)), f"{kind}-0"
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 4)
        until_stored(client)
        assert tier(server, name)["medium_well"]
        shutil.rmtree(folder)
        assert f"adapter={name} path={folder} what=" in said(server, "medium_gone")
        assert (tier(server, name)["medium"], tier(server, name)["medium_well"]) == ("gone", False)
        assert tier(server, name)["state"] == "gone"
        gauge = f'kvstrata_l2_medium_well{{adapter="{kind}-0"}} 0.0'
        assert gauge in read(f"{server.url}/metrics").decode()
        clear_l1(client)
        reply = client.lookup(identity.identity_id, chain)
        assert (reply.n_chunks, reply.reason) == (0, "breaker_open")
        more(client, 2)
        until(client, lambda status: status["counters"]["put_skipped"].get("medium_gone") == 2)
        folder.mkdir()
        assert "restart the server" in said(server, "medium_replaced")


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None,
    reason="only root can mount, with util-linux's nsenter",
)
@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_a_directory_that_is_read_only_or_hidden_comes_back_by_itself(
    start: Callable[..., ServerProcess], folder: Path, kind: str
) -> None:
    own_mounts = cast(
        Any, SimpleNamespace(under=("unshare", "--mount", "--propagation", "private"), http=read)
    )
    server, name = start(entry(kind, folder), host=own_mounts), f"{kind}-0"

    def inside(*command: str) -> None:
        entered = ["nsenter", "--target", str(server.pid), "--mount", *command, str(folder)]
        subprocess.run(entered, check=True, capture_output=True, timeout=300)

    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 4)
        until_stored(client)
        clear_l1(client)
        inside("mount", "--bind", str(folder))
        inside("mount", "-o", "remount,bind,ro")
        said(server, "medium_read_only")
        reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
        assert reply.l2_chunks == 4, "records of a medium that cannot be written to are served"
        more(client, 2)
        until(client, lambda status: status["counters"]["put_skipped"].get("read_only") == 2)
        inside("umount")
        said(server, "medium_back")
        more(client, 3)
        until(client, lambda status: status["l2_store"]["adapters"][name]["outcomes"]["stored"] == 7)
        inside("mount", "-t", "tmpfs", "tmpfs")
        said(server, "medium_replaced")
        assert tier(server, name)["medium"] == "replaced"
        inside("umount")
        eventually("the tier is back", lambda: tier(server, name)["medium_well"])
