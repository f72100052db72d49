"""A server whose remote tier is away at its start serves L1, says so, and uses the tier once it is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.cache_engine import eventually
from tests.harness.l2_load import clear_l1, stored, until_stored
from tests.harness.redis_server import RedisServer
from tests.harness.rpc_client import RpcClient, new_prompt
from tests.harness.server_process import ServerFailed, ServerProcess

pytestmark = pytest.mark.integration


def test_a_server_serves_l1_while_redis_is_away_and_uses_it_once_it_is_there(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis", password="right") as medium,
        ServerProcess(
            tmp_path / "server", l1_mb=16, l2="embedded", flags=("--l2-adapter", json.dumps(medium.entry()))
        ) as server,
    ):
        medium.kill()
        server.start()
        [row] = server.get("/v1/l2/adapters")["adapters"]
        assert (row["state"], row["medium_well"], row["takes_loads"]) == ("unreachable", False, False)
        assert "cannot be reached: Connection refused" in row["reason"]
        assert "tier_unreachable adapter=resp-0" in server.log_tail()
        with RpcClient(server.socket_dir) as client:
            identity, chain = stored(client, 2)
            held = client.lookup(identity.identity_id, chain)
            assert held.n_chunks == 2
            client.release([(client.session, held.seq)])
            medium.start()
            eventually("it is reached", lambda: "tier_reached adapter=resp-0" in server.log_tail())
            identity, chain = new_prompt(client, 3)
            client.store(identity, chain)
            until_stored(client)
            clear_l1(client)
            found = client.lookup(identity.identity_id, chain)
            assert found.l2_chunks == 3, "what was put since is found"
            client.release([(client.session, found.seq)])


def test_a_refused_password_stops_the_start(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", password="right") as medium:
        flags = ("--l2-adapter", json.dumps(medium.entry(password="wrong")))
        with (
            ServerProcess(tmp_path / "server", l1_mb=16, l2="embedded", flags=flags) as server,
            pytest.raises(ServerFailed, match="exit status 2"),
        ):
            server.start()
