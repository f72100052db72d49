"""A real server whose tier lies in a directory to which somebody else writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kvstrata.native.hashing import storage_keys
from tests.harness.l2_load import check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient, keys_of, new_prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_pipes_in_place_of_records_hold_no_load(tmp_path: Path, shared: bool) -> None:
    """As many pipes as the tier has threads; each would hold one until somebody writes into it."""
    base = tmp_path / "kv"
    entry = {"type": "fs", "base_path": str(base), "capacity_gb": 1, "num_workers": 2, "shared": shared}
    flags = ("--no-http", "--l2-adapter", json.dumps(entry))
    with ServerProcess(tmp_path / "server", l1_mb=16, l2="embedded", flags=flags) as server:
        server.start()
        with RpcClient(server.socket_dir) as client:
            spoilt, first = new_prompt(client)
            client.store(spoilt, first)
            identity, chain = stored(client, 4)
            until_stored(client)
            assert client.slice is not None
            for key in keys_of(storage_keys(spoilt.root, first, client.slice.digest())):
                name = key.hex()
                path = base / name[:2] / name[2:4] / f"{name}.kvc"
                path.unlink()
                os.mknod(path, 0o600 | stat.S_IFIFO)
            clear_l1(client)
            reply = client.lookup(spoilt.identity_id, first, deadline_ms=20_000)
            assert reply.n_chunks == 0
            reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l2_chunks) == (4, 4)
            check_and_release(client, reply, chain)
        assert server.stop() == 0
