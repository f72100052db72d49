"""The `resp` adapter on real Redis servers, and before a server that means harm."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstrata.errors import ConfigError, KvstrataError, StorageError
from kvstrata.testing.adapter_contract import EXISTS, LOADED, SIZE, STORED
from kvstrata.testing.adapter_contract import load_numbers as load
from kvstrata.testing.adapter_contract import put_numbers as put
from kvstrata.testing.strategies import (
    Settled,
    ask_for,
    key_of,
    lent_context,
    load_item,
    put_item,
    record_length,
    settled,
    watched,
)
from kvstrata.tiers.base import Outcome, Presence, StorageAdapter, Usage
from kvstrata.tiers.config import make_adapter
from kvstrata.tiers.media.resp.servers import slot_of
from tests.harness.hostile_resp import INFO, Hostile, bulk
from tests.harness.redis_server import RedisServer, certificates, cluster
from tests.harness.waiting import HANG_S, eventually_async

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def shared_redis(redis_folder: Path) -> Iterator[RedisServer]:
    with RedisServer(redis_folder / "shared") as server:
        yield server


@pytest.fixture
def server(shared_redis: RedisServer) -> Iterator[RedisServer]:
    with shared_redis.client() as client:
        client.flushall()
    yield shared_redis


SECRET = "hunter2-hunter2"


@contextlib.asynccontextmanager
async def opened(entry: dict[str, Any]) -> AsyncIterator[StorageAdapter]:
    adapter = make_adapter(entry, 0)
    try:
        await adapter.open(lent_context(lambda key: None))
        yield adapter
    finally:
        await adapter.close()


def name_of(number: int) -> str:
    return f"kvstrata:{key_of(number).hex()}"


@pytest.mark.parametrize(
    "value",
    [
        bytes(record_length(SIZE)),
        *(pytest.param(rare, marks=pytest.mark.long) for rare in (b"", b"x", b"not a record" * 1_000)),
        pytest.param([b"a", b"list"], marks=pytest.mark.long),
    ],
)
async def test_a_foreign_value_is_a_miss_and_replaced_by_the_next_put_in_redis(server, value):
    def plant(client: redis.Redis) -> None:
        client.delete(name_of(1))
        if isinstance(value, list):
            client.rpush(name_of(1), *value)
        else:
            client.set(name_of(1), value)

    with server.client() as client:
        async with opened(server.entry()) as adapter:
            plant(client)
            [found] = await ask_for(adapter, [key_of(1)])
            assert found.presence is (
                Presence.PRESENT if value and isinstance(value, bytes) else Presence.ABSENT
            )
            [outcome] = await load(adapter, 1)
            assert outcome.outcome is Outcome.CORRUPT
            assert adapter.numbers()["bad_values"] == 1
            assert not client.exists(name_of(1))
            assert await put(adapter, 1) == [STORED]
            if value != bytes(record_length(SIZE)):  # which looks like the record from outside
                plant(client)
                assert await put(adapter, 1) == [STORED]
            assert await load(adapter, 1) == [LOADED]


@pytest.mark.parametrize("foreign", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_put_that_another_instance_overtook_stores_only_missing_records(server, foreign):
    async with opened(server.entry(ttl_seconds=1000)) as adapter, opened(server.entry()) as other:
        gate = threading.Event()
        item = put_item(key_of(1), SIZE, gate=gate)
        wait = asyncio.create_task(settled(adapter.put, [item]))
        await watched(item).until_asked()  # it was told that nothing is there
        with server.client() as client:
            if foreign:
                client.set(name_of(1), b"somebody else's")
            else:
                assert await put(other, 1) == [STORED]
            gate.set()
            assert await wait == [STORED if foreign else EXISTS]
            assert (client.ttl(name_of(1)) == -1) is not foreign
        assert await load(other, 1) == [LOADED]


async def test_keys_of_others_are_never_touched(server: RedisServer) -> None:
    others = {
        "other": b"1",
        "kvstrata:": b"2",
        "kvstrata:short": b"3",
        f"kvstrata:{'g' * 64}": b"4",
        f"{name_of(1)}0": b"5",
        f"another{name_of(1)}": b"6",
        key_of(1): b"7",
    }
    with server.client() as client:
        client.mset(others)
        async with opened(server.entry()) as adapter:
            assert await put(adapter, 1, 2) == [STORED] * 2
            assert await adapter.delete(key_of(1)) == 1
            assert await put(adapter, 1) == [STORED]
            assert await adapter.clear() == 2
        assert client.dbsize() == len(others)
        assert client.mget(list(others)) == list(others.values())


@pytest.mark.long
async def test_records_expire_after_their_time(server: RedisServer) -> None:
    async with opened(server.entry(ttl_seconds=100)) as adapter:
        await put(adapter, 1)
        with server.client() as client:
            assert 99_000 < client.pttl(name_of(1)) <= 100_000
            client.pexpire(name_of(1), 1)
            await eventually_async(
                "the condition holds", lambda: asyncio.to_thread(lambda: not client.exists(name_of(1)))
            )
        assert await load(adapter, 1) == [Settled(Outcome.ABSENT)]


@pytest.mark.long
async def test_prefixes_and_databases_keep_records_apart(server: RedisServer) -> None:
    entries = [server.entry(), server.entry(key_prefix="b:"), server.entry(database_id=1)]
    async with contextlib.AsyncExitStack() as stack:
        adapters = [await stack.enter_async_context(opened(entry)) for entry in entries]
        for adapter in adapters:
            assert await load(adapter, 1) == [Settled(Outcome.ABSENT)]
            assert await put(adapter, 1) == [STORED]
            assert await put(adapter, 1) == [EXISTS]
        assert await adapters[0].clear() == 1
        assert await load(adapters[1], 1) == await load(adapters[2], 1) == [LOADED]


@pytest.mark.long
async def test_nothing_is_put_above_the_configured_capacity(server: RedisServer) -> None:
    async with opened(server.entry(max_capacity_gb=1e-6)) as adapter:
        assert await put(adapter, 1, 2) == [Settled(Outcome.THROTTLED, "full")] * 2
        assert adapter.numbers()["full"] == 2
        assert (await adapter.usage()).capacity_bytes == 1073


async def test_the_documented_rights_of_the_redis_user_are_enough(server: RedisServer) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tiers.md").read_text()
    begin = page.index("ACL SETUSER kvstrata")
    words = page[begin : page.index("\n\n", begin)].replace(">PASSWORD", f">{SECRET}").split()
    with server.client() as client:
        client.execute_command(*words)
        try:
            async with opened(server.entry(username="kvstrata", password=SECRET, database_id=1)) as adapter:
                await put(adapter, 1, 2)
                client.select(1)
                client.set(name_of(1), b"x")
                assert [o.outcome for o in await load(adapter, 1, 2)] == [
                    Outcome.CORRUPT,
                    Outcome.LOADED,
                ]
                assert await adapter.delete(key_of(2)) == 1
                await put(adapter, 3)
                assert (await adapter.usage()).records == 1
                assert await adapter.clear() == 1
            client.execute_command("ACL", "SETUSER", "kvstrata", "-set")
            async with opened(server.entry(username="kvstrata", password=SECRET)) as adapter:
                assert await put(adapter, 1) == [Settled(Outcome.FAILED, "denied")]
        finally:
            client.acl_deluser("kvstrata")


class Cutter:
    """A server in front of the real one that passes on so many bytes of its answers, then holds back or hangs up."""

    def __init__(self, port: int) -> None:
        self.limit_bytes: int | None = None
        """None: all."""
        self.hangs_up = True
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._passed_bytes = 0

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_after(self, count: int, *, hang_up: bool = True) -> None:
        self.limit_bytes, self.hangs_up, self._passed_bytes = count, hang_up, 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._pass(reader, forth, False), self._pass(back, writer, True))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            forth.close()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool) -> None:
        while data := await reader.read(65_536):
            if counted and self.limit_bytes is not None:
                data = data[: max(0, self.limit_bytes - self._passed_bytes)]
                self._passed_bytes += len(data)
                writer.write(data)
                await writer.drain()
                if self._passed_bytes >= self.limit_bytes:
                    if self.hangs_up:
                        raise ConnectionError
                    await asyncio.Event().wait()
            else:
                writer.write(data)
                await writer.drain()
        raise ConnectionError


@pytest.mark.parametrize(
    "hang_up", [True, pytest.param(False, marks=[pytest.mark.long, pytest.mark.silence])]
)
async def test_answers_from_before_a_broken_connection_count(server: RedisServer, hang_up: bool) -> None:
    async with Cutter(server.port) as cutter:
        entry = server.entry(port=cutter.port, request_timeout=1.0, connection_timeout=1.0)
        async with opened(entry) as adapter:
            await put(adapter, *range(8), size=300_000)
            whole = record_length(300_000)
            cutter.cut_after(3 * whole + whole // 2, hang_up=hang_up)
            outcomes = await load(adapter, *range(8), size=300_000)
            answered = outcomes.count(LOADED)
            # A request on a closed connection may fail before the last answers were read.
            assert answered in ((1, 2, 3) if hang_up else (3,))
            failed = Settled(Outcome.FAILED, "lost" if hang_up else "timeout")
            assert outcomes == [LOADED] * answered + [failed] * (8 - answered)
            cutter.limit_bytes = None

            async def all_loaded() -> bool:
                return await load(adapter, *range(8), size=300_000) == [LOADED] * 8

            await eventually_async("the condition holds", all_loaded)
            assert adapter.numbers()["connections_lost"] >= 1


@pytest.mark.long
@pytest.mark.silence
async def test_a_server_behind_tls_that_is_stopped_costs_the_time_limit_and_comes_back(
    redis_folder: Path, tmp_path: Path
) -> None:
    tls = certificates(tmp_path / "certificates")
    with RedisServer(tmp_path / "redis", tls=tls) as server:
        async with opened(server.entry(request_timeout=1.0, connection_timeout=1.0)) as adapter:
            await put(adapter, 1)
            with server.frozen():
                assert await load(adapter, 1) == [Settled(Outcome.FAILED, "timeout")]
                # More than the sockets' buffers hold.
                [outcome] = await put(adapter, 2, size=32 << 20)
                assert outcome.outcome is Outcome.FAILED and outcome.reason in ("timeout", "unreachable")

            async def is_back() -> bool:
                return await load(adapter, 1) == [LOADED]

            await eventually_async("the condition holds", is_back)


async def test_a_connection_that_the_server_closed_while_idle_is_not_used(server: RedisServer) -> None:
    async with opened(server.entry()) as adapter:
        await put(adapter, 1)
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await load(adapter, 1) == [LOADED]
        assert adapter.numbers()["connections_lost"] == 0


async def test_a_server_that_is_gone_is_told_once_in_the_log_and_tried_with_pauses(
    redis_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path) as server, caplog.at_level(logging.WARNING, "kvstrata"):
        async with opened(server.entry()) as adapter:
            await put(adapter, 1)
            server.kill()
            for _ in range(50):
                [found] = await ask_for(adapter, [key_of(1)])
                assert found.presence is Presence.UNKNOWN and found.reason in ("lost", "unreachable")
            assert adapter.numbers()["connections_lost"] < 10
            server.start()

            async def is_back() -> bool:
                return (await ask_for(adapter, [key_of(1)]))[0].presence is Presence.ABSENT

            await eventually_async("the condition holds", is_back)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert "can be reached again" in messages[1]


async def test_records_are_found_while_their_slot_moves_and_after(redis_folder: Path, tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for node in nodes]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        entry = {"type": "resp", "startup_nodes": nodes[0].address, "cluster_mode": True}
        async with opened(entry) as adapter:
            numbers = list(range(30))
            assert await put(adapter, *numbers) == [STORED] * 30
            number = next(n for n in numbers if clients[0].dbsize() and _holds(clients[0], n))
            slot = slot_of(name_of(number).encode())
            clients[1].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            clients[0].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            clients[0].execute_command("MIGRATE", "127.0.0.1", nodes[1].port, name_of(number), 0, 5_000)
            assert await load(adapter, *numbers) == [LOADED] * 30  # ASK
            asked = adapter.numbers()["redirections"]
            assert asked == 1
            for client in clients:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
            assert await load(adapter, *numbers) == [LOADED] * 30  # MOVED
            assert adapter.numbers()["redirections"] == asked + 1
            assert await put(adapter, number) == [EXISTS]
            assert await adapter.delete(b"".join([key_of(n) for n in numbers])) == 30
            assert adapter.numbers()["redirections"] == asked + 1, "the table of slots was asked for again"


def _holds(client: redis.Redis, number: int) -> bool:
    try:
        return bool(client.exists(name_of(number)))
    except redis.ResponseError:  # MOVED
        return False


@pytest.fixture
async def hostile() -> AsyncIterator[Hostile]:
    async with Hostile() as server:
        yield server


async def drip(value: bytes) -> AsyncIterator[bytes]:
    """One byte every 50 ms."""
    for byte in value:
        yield bytes([byte])
        await asyncio.sleep(0.05)


async def without_end(value: bytes) -> AsyncIterator[bytes]:
    """The same bytes again and again."""
    while True:
        yield value


RECORD = record_length(SIZE)
GATE = ("an absurd length", "arrays in arrays", "a line without end", "byte by byte", "nothing")
"""What `make test` lets the server say."""
SAID: dict[str, Any] = {
    "an absurd length": b"$%d\r\n" % (1 << 60),
    "a length beyond 64 bits": b"$" + b"9" * 4000 + b"\r\n",
    "a negative length": b"$-7\r\n",
    "an integer": b":%d\r\n" % RECORD,
    "an integer beyond 64 bits": b":1" + b"0" * 400 + b"\r\n",
    "a simple string": b"+OK\r\n",
    "an array": b"*3\r\n:1\r\n:2\r\n:3\r\n",
    "arrays in arrays": b"*1\r\n" * 100_000,
    "a longer array than it sends": b"*%d\r\n" % (1 << 40),
    "an array of much": lambda words: without_end(b"*1000000\r\n" + b":1\r\n" * 1_000_000),
    "a line without end": lambda words: without_end(b"+" + b"x" * 65536),
    "a value without end": lambda words: without_end(b"$%d\r\n" % RECORD + b"x" * 65536),
    "byte by byte": lambda words: drip(bulk(b"x" * RECORD)),
    "an unknown type": b"!21\r\nSYNTAX invalid syntax\r\n",
    "a null of RESP3": b"_\r\n",
    "an error of 60 kB": b"-" + b"E" * 60_000 + b"\r\n",
    "a redirection nowhere": b"-MOVED 1 \x00evil:99999999999999999999\r\n",
    "nothing": b"",
    "bytes without meaning": bytes(range(256)) * 16,
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in GATE else pytest.mark.long) for what in SAID]
)
async def test_every_operation_ends_whatever_the_server_says(hostile: Hostile, what: str) -> None:
    for verb in (b"STRLEN", b"GET", b"SET", b"SCAN", b"DBSIZE"):
        hostile.answers[verb] = SAID[what]
    async with asyncio.timeout(HANG_S), opened(hostile.entry(max_capacity_gb=1)) as adapter:
        [found] = await ask_for(adapter, [key_of(1)])
        assert (found.presence is Presence.PRESENT) == (what == "an integer")
        items = load_item(key_of(1), SIZE), put_item(key_of(1), SIZE)
        [loaded] = await settled(adapter.load, [items[0]])
        assert loaded.outcome is not Outcome.LOADED
        [put] = await settled(adapter.put, [items[1]])
        assert put.outcome is not Outcome.STORED or what == "a simple string"
        for item in items:
            watched(item).check()
        assert isinstance(await adapter.usage(), Usage)
        with pytest.raises(StorageError, match="not cleared"):
            await adapter.clear()


async def test_numbers_that_a_server_makes_up_stay_within_64_bits(hostile: Hostile) -> None:
    hostile.answers[b"INFO"] = bulk(
        INFO.replace(b"used_memory:1", b"used_memory:" + b"9" * 5000).replace(
            b"maxmemory:0", "maxmemory:²".encode()
        )
    )
    hostile.answers[b"DBSIZE"] = b":%d\r\n" % ((1 << 63) - 1)
    async with asyncio.timeout(HANG_S), opened(hostile.entry(max_capacity_gb=1)) as adapter:
        usage = await adapter.usage()
        assert all(0 <= number < 1 << 63 for number in usage)


async def test_a_cluster_of_impossible_nodes_is_refused(hostile: Hostile) -> None:
    for row in (b":99999999", b":-1", b":0"):
        hostile.answers[b"CLUSTER"] = (
            b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n" + bulk(b"127.0.0.1") + row + b"\r\n"
        )
        with pytest.raises(ConfigError, match="CLUSTER SLOTS has a row"):
            async with asyncio.timeout(HANG_S), opened(hostile.entry(cluster_mode=True)):
                pass
    hostile.answers[b"CLUSTER"] = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n" + bulk(b"a\x00b") + b":6379\r\n"
    with pytest.raises(StorageError, match="cannot be reached"):
        async with asyncio.timeout(HANG_S), opened(hostile.entry(cluster_mode=True)):
            pass


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
