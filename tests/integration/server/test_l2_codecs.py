"""A real server whose L2 encodes records: they come back byte for byte."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.l2_load import check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess
from tests.integration.server.l2_servers import l2_servers

pytestmark = pytest.mark.integration


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with an `fs` adapter, or with the entry `adapter`."""
    with l2_servers(tmp_path) as starter:
        yield starter


def test_encoded_records_come_back_byte_for_byte(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text(secrets.token_hex(32))
    base = tmp_path / "encoded"
    codec = ["zstd", {"name": "aes-gcm", "key_file": str(key_file)}]
    server = start({"type": "fs", "base_path": str(base), "codec": codec})
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 6)
        until_stored(client)
        assert client.status()["l2_adapters"]["fs-0"]["codec"]["encoded"] == 6
        server.kill()
        server.wipe_segment()
        server.start()
    files = list(base.glob("??/??/*.kvc"))
    assert len(files) == 6
    assert all(any(file.read_bytes()[80:88]) for file in files)
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        assert clear_l1(client) == 0
        reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (6, 0, 6, "")
        check_and_release(client, reply, chain)


def test_a_wrong_key_file_is_a_miss_with_its_reason(start, tmp_path):
    base, key_file = tmp_path / "encoded", tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text(secrets.token_hex(32))
    adapter = {
        "type": "fs",
        "base_path": str(base),
        "codec": [{"name": "aes-gcm", "key_file": str(key_file)}],
    }
    server = start(adapter)
    with RpcClient(server.socket_dir) as client:
        _, chain = stored(client, 3)
        until_stored(client)
        clear_l1(client)
        server.kill()
        server.wipe_segment()
    key_file.write_text(secrets.token_hex(32))
    server.start()
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        for _ in range(2):
            reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l2_chunks) == (0, 0)
        assert client.status()["l2_adapters"]["fs-0"]["codec"]["wrong_key"] >= 1
    assert len(list(base.glob("??/??/*.kvc"))) == 3
