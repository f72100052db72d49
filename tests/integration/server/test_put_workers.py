"""A put that crashes by a mistake of the server's own does not end the puts to its tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import ctl
from tests.harness.cache_engine import eventually
from tests.harness.l2_load import check_and_release, clear_l1
from tests.harness.rpc_client import RpcClient, chain_of, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def puts_of(status: dict[str, Any]) -> dict[str, Any]:
    return status["l2_store"]["adapters"]["fs-0"]


def test_puts_go_on_after_one_has_crashed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "KVSTRATA_FAILPOINTS": "put.started=crash"}
    with ServerProcess(tmp_path, l1_mb=16, l2="fs", environment=environment) as server:
        server.start()
        with RpcClient(server.socket_dir) as client:
            identity = client.identify()
            client.store(identity, chain_of(identity.root, 1))
            until(client, lambda status: puts_of(status)["outcomes"].get("worker_crashed") == 1)
            eventually("the log says so", lambda: "put-fs-0-0 crashed" in server.log.read_text())
            assert client.status()["pool"]["holds"] == 0
            until(client, lambda status: puts_of(status)["workers"] == "well")
            chain = chain_of(identity.root, 2, first_token=1_000)
            client.store(identity, chain)
            until(client, lambda status: puts_of(status)["outcomes"].get("stored") == 2)
            clear_l1(client)
            reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l2_chunks) == (2, 2)
            check_and_release(client, reply, chain)
        assert ctl.main(["--url", server.url, "l2", "list"]) == 0
        assert "fs-0" in capsys.readouterr().out
        assert server.stop() == 0
