"""Opening the `resp` adapter: each refusal says what answered and which field to change."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError, KvstrataError, StorageError
from kvstrata.testing.adapter_contract import STORED
from tests.harness.redis_server import RedisServer, Sentinel, certificates
from tests.integration.storage.resp_records import SECRET, opened, put

pytestmark = pytest.mark.integration


async def refusal(entry: dict[str, Any], kind: type[KvstrataError] = ConfigError) -> str:
    """The error with which opening fails. StorageError: the server cannot be reached, which stops no start."""
    with pytest.raises(KvstrataError) as raised:
        async with opened({"connection_timeout": 1.0, **entry}):
            pass
    assert type(raised.value) is kind, raised.value.message
    assert SECRET not in raised.value.message
    return raised.value.message


class TestOpening:
    async def test_nobody_listens(self) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            message = await refusal({"type": "resp", "host": "127.0.0.1", "port": port}, StorageError)
        assert f"127.0.0.1:{port}: cannot be reached: Connection refused" in message

    @pytest.mark.long
    async def test_an_unknown_host(self) -> None:
        assert "host.invalid:6379: cannot be reached" in await refusal(
            {"type": "resp", "host": "host.invalid"}, StorageError
        )

    @pytest.mark.long
    @pytest.mark.silence
    async def test_a_server_that_says_nothing(self, tmp_path: Path, redis_folder: Path) -> None:
        with RedisServer(tmp_path) as frozen:
            frozen.freeze()
            assert "did not answer in time" in await refusal(
                frozen.entry(connection_timeout=0.2), StorageError
            )

    async def test_a_web_server_is_told_as_such_and_not_told_the_password(self) -> None:
        seen: list[bytes] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle(self) -> None:
                seen.append(self.rfile.readline())
                self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                seen.append(self.rfile.read())

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
            thread = threading.Thread(target=web.serve_forever)
            thread.start()
            try:
                entry = {"type": "resp", "host": "127.0.0.1", "port": web.server_port, "password": SECRET}
                assert "not Redis or Valkey but a web server: b'HTTP/1.1 400" in await refusal(entry)
            finally:
                web.shutdown()
                thread.join()
        assert seen and SECRET.encode() not in b"".join(seen)

    async def test_passwords(self, tmp_path: Path, redis_folder: Path) -> None:
        with RedisServer(tmp_path, password=SECRET) as server:
            assert "set password_file" in await refusal(server.entry(password=None))
            assert "password: refused by the server (WRONGPASS)" in await refusal(server.entry(password="no"))
            named = server.entry(username="nobody")
            assert "username 'nobody', password: refused" in await refusal(named)
            async with opened(server.entry()) as adapter:
                assert await put(adapter, 1) == [STORED]

    @pytest.mark.long
    async def test_a_password_where_none_is_needed(self, server: RedisServer) -> None:
        assert "password: refused by the server" in await refusal(server.entry(password=SECRET))

    @pytest.mark.long
    async def test_a_replica_names_its_master(self, server: RedisServer, tmp_path: Path) -> None:
        with RedisServer(tmp_path, "--replicaof", "127.0.0.1", str(server.port)) as replica:
            message = await refusal(replica.entry(), StorageError)
        assert f"is a replica, which is read-only: give its master 127.0.0.1:{server.port}" in message

    @pytest.mark.long
    async def test_a_sentinel_given_as_a_server_and_the_other_way_round(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        with Sentinel(tmp_path, server) as sentinel:
            assert "is a sentinel: give its address in sentinels" in await refusal(sentinel.entry())
            entry = {"type": "resp", "sentinels": sentinel.address, "sentinel_master": "other"}
            assert "knows no master 'other'" in await refusal(entry)
        entry = {"type": "resp", "sentinels": server.address, "sentinel_master": "mymaster"}
        assert "is not a sentinel" in await refusal(entry)

    @pytest.mark.long
    async def test_clusters_and_none(self, server: RedisServer, tmp_path: Path) -> None:
        assert "belongs to no cluster: set cluster_mode to false" in await refusal(
            server.entry(cluster_mode=True)
        )
        with RedisServer(tmp_path, "--cluster-enabled", "yes") as node:
            assert "set cluster_mode to true" in await refusal(node.entry())
            assert "slots of the cluster belong to no node" in await refusal(
                node.entry(cluster_mode=True), StorageError
            )

    @pytest.mark.long
    async def test_a_database_that_is_not_there(self, server: RedisServer) -> None:
        assert "database_id: 99" in await refusal(server.entry(database_id=99))

    @pytest.mark.long
    async def test_tls_where_there_is_none_and_the_other_way_round(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        folder = certificates(tmp_path / "certificates")
        assert "set tls_enable to false" in await refusal(
            server.entry(tls_enable=True, connection_timeout=0.3)
        )
        with RedisServer(tmp_path / "tls", tls=folder) as behind_tls:
            plain = {"type": "resp", "host": "127.0.0.1", "port": behind_tls.port}
            assert "tls_enable" in await refusal(plain)
            assert "certificate is not accepted" in await refusal({**plain, "tls_enable": True})
            other = {**behind_tls.entry(), "tls_server_name": "redis.example"}
            assert "tls_server_name" in await refusal(other)

    @pytest.mark.long
    async def test_a_server_of_an_old_version(self) -> None:
        """Such old servers cannot be had, so a stand-in names the version."""

        async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.readuntil(b"PING\r\n"):
                text = b"redis_version:3.2.12\r\nredis_mode:standalone\r\nrole:master\r\n"
                writer.write(b"+PONG\r\n")
                await reader.readuntil(b"INFO\r\n")
                writer.write(b"$%d\r\n%b\r\n" % (len(text), text))
                writer.close()
                return

        listening = await asyncio.start_server(old, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        message = await refusal({"type": "resp", "host": "127.0.0.1", "port": port})
        assert "has server version 3.2.12, but at least 4.0 is needed" in message
        listening.close()


@pytest.mark.long
@pytest.mark.silence
async def test_an_answer_that_arrives_too_slowly_ends_at_the_time_limit(server: RedisServer) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"+" if first.is_set() else b"x")
                first.clear()
                await writer.drain()
                await asyncio.sleep(0.01)

    first = asyncio.Event()
    first.set()
    dripping = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = dripping.sockets[0].getsockname()[1]
    message = await refusal({"type": "resp", "host": "127.0.0.1", "port": port, "connection_timeout": 0.2})
    assert "did not answer in time" in message
    dripping.close()
