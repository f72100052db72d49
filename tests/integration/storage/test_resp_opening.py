"""Opening the `resp` adapter: each refusal says what answered and which field to change."""

from __future__ import annotations

import http.server
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError, KvstrataError, StorageError
from kvstrata.testing.adapter_contract import STORED
from tests.harness.redis_server import RedisServer, certificates
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
    async def test_tls_where_there_is_none_and_the_other_way_round(self, server, tmp_path):
        folder = certificates(tmp_path / "certificates")
        entry = server.entry(tls_enable=True, connection_timeout=0.3)
        assert "set tls_enable to false" in await refusal(entry, StorageError)
        with RedisServer(tmp_path / "tls", tls=folder) as behind_tls:
            plain = {"type": "resp", "host": "127.0.0.1", "port": behind_tls.port}
            assert "tls_enable" in await refusal(plain, StorageError)
            assert "certificate is not accepted" in await refusal({**plain, "tls_enable": True})
            other = {**behind_tls.entry(), "tls_server_name": "redis.example"}
            assert "tls_server_name" in await refusal(other)
