"""The `resp` adapter on real Redis servers: foreign values, broken connections, and slots of a cluster that move."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis

from kvstrata.storage.base import LoadOutcome, LoadStatus, Presence, PutOutcome, PutStatus
from kvstrata.storage.media.resp.servers import slot_of
from kvstrata.testing.adapter_contract import EXISTS, LOADED, SIZE, STORED
from kvstrata.testing.strategies import key_of, load_item, put_item, record_length, watched
from tests.harness.redis_server import RedisServer, certificates, cluster
from tests.integration.storage.resp_records import SECRET, load, opened, put

pytestmark = pytest.mark.integration
HANG_S = 120.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it holds."""
    async with asyncio.timeout(HANG_S):
        while not await condition():  # noqa: ASYNC110 (a server has no event for this)
            await asyncio.sleep(0.005)


def name_of(number: int) -> str:
    return f"kvstrata:{key_of(number).hex()}"


# --- what is there -----------------------------------------------------------------------------------------


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
            [found] = await adapter.exists([key_of(1)])
            assert found.presence is (
                Presence.PRESENT if value and isinstance(value, bytes) else Presence.ABSENT
            )
            [outcome] = await load(adapter, 1)
            assert outcome.status is LoadStatus.CORRUPT
            assert adapter.numbers()["bad_values"] == 1
            assert not client.exists(name_of(1))
            assert await put(adapter, 1) == [STORED]
            if value != bytes(record_length(SIZE)):  # which looks like the record from outside
                plant(client)
                assert await put(adapter, 1) == [STORED]
            assert await load(adapter, 1) == [LOADED]


async def test_a_bad_value_that_another_put_has_replaced_is_loaded_and_stays(server: RedisServer) -> None:
    async with opened(server.entry()) as adapter:
        await put(adapter, 1)
        with server.client() as client:
            good = client.get(name_of(1))
            assert isinstance(good, bytes)
            client.set(name_of(1), good[:-1] + b"?")
            gate = threading.Event()
            item = load_item(key_of(1), SIZE, gate=gate)
            wait = asyncio.create_task(adapter.load([item]))
            await watched(item).until_asked()  # the bad value is on its way
            client.set(name_of(1), good)
            gate.set()
            assert await wait == [LOADED]
            assert client.get(name_of(1)) == good


@pytest.mark.parametrize("foreign", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_put_that_another_instance_overtook_stores_only_missing_records(server, foreign):
    async with opened(server.entry(ttl_seconds=1000)) as adapter, opened(server.entry()) as other:
        gate = threading.Event()
        item = put_item(key_of(1), SIZE, gate=gate)
        wait = asyncio.create_task(adapter.put([item]))
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
            assert await adapter.delete([key_of(1)]) == 1
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
            await until(lambda: asyncio.to_thread(lambda: not client.exists(name_of(1))))
        assert await load(adapter, 1) == [LoadOutcome(LoadStatus.ABSENT)]


@pytest.mark.long
async def test_prefixes_and_databases_keep_records_apart(server: RedisServer) -> None:
    entries = [server.entry(), server.entry(key_prefix="b:"), server.entry(database_id=1)]
    async with contextlib.AsyncExitStack() as stack:
        adapters = [await stack.enter_async_context(opened(entry)) for entry in entries]
        for adapter in adapters:
            assert await load(adapter, 1) == [LoadOutcome(LoadStatus.ABSENT)]
            assert await put(adapter, 1) == [STORED]
            assert await put(adapter, 1) == [EXISTS]
        assert await adapters[0].clear() == 1
        assert await load(adapters[1], 1) == await load(adapters[2], 1) == [LOADED]


@pytest.mark.long
async def test_nothing_is_put_above_the_configured_capacity(server: RedisServer) -> None:
    async with opened(server.entry(max_capacity_gb=1e-6)) as adapter:
        assert await put(adapter, 1, 2) == [PutOutcome(PutStatus.THROTTLED, "full")] * 2
        assert adapter.numbers()["full"] == 2
        assert (await adapter.usage()).capacity_bytes == 1073


async def test_the_documented_rights_of_the_redis_user_are_enough(server: RedisServer) -> None:
    page = (Path(__file__).parents[3] / "docs" / "remote-tiers.md").read_text()
    begin = page.index("ACL SETUSER kvstrata")
    words = page[begin : page.index("\n\n", begin)].replace(">PASSWORD", f">{SECRET}").split()
    with server.client() as client:
        client.execute_command(*words)
        try:
            async with opened(server.entry(username="kvstrata", password=SECRET, database_id=1)) as adapter:
                await put(adapter, 1, 2)
                client.select(1)
                client.set(name_of(1), b"x")
                assert [o.status for o in await load(adapter, 1, 2)] == [
                    LoadStatus.CORRUPT,
                    LoadStatus.LOADED,
                ]
                assert len((await adapter.heads([key_of(2)]))[0]) == 512
                assert await adapter.delete([key_of(2)]) == 1
                await put(adapter, 3)
                assert (await adapter.usage()).records == 1
                assert await adapter.clear() == 1
            client.execute_command("ACL", "SETUSER", "kvstrata", "-set")
            async with opened(server.entry(username="kvstrata", password=SECRET)) as adapter:
                assert await put(adapter, 1) == [PutOutcome(PutStatus.FAILED, "denied")]
        finally:
            client.acl_deluser("kvstrata")


# --- connections -------------------------------------------------------------------------------------------


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
            failed = LoadOutcome(LoadStatus.FAILED, "lost" if hang_up else "timeout")
            assert outcomes == [LOADED] * answered + [failed] * (8 - answered)
            cutter.limit_bytes = None

            async def all_loaded() -> bool:
                return await load(adapter, *range(8), size=300_000) == [LOADED] * 8

            await until(all_loaded)
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
            server.freeze()
            try:
                assert await load(adapter, 1) == [LoadOutcome(LoadStatus.FAILED, "timeout")]
                # More than the sockets' buffers hold.
                [outcome] = await put(adapter, 2, size=32 << 20)
                assert outcome.status is PutStatus.FAILED and outcome.reason in ("timeout", "unreachable")
            finally:
                server.thaw()

            async def is_back() -> bool:
                return await load(adapter, 1) == [LOADED]

            await until(is_back)


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
                [found] = await adapter.exists([key_of(1)])
                assert found.presence is Presence.UNKNOWN and found.reason in ("lost", "unreachable")
            assert adapter.numbers()["connections_lost"] < 10
            server.start()

            async def is_back() -> bool:
                return (await adapter.exists([key_of(1)]))[0].presence is Presence.ABSENT

            await until(is_back)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert "can be reached again" in messages[1]


# --- clusters ----------------------------------------------------------------------------------------------


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
            assert await adapter.delete([key_of(n) for n in numbers]) == 30
            assert adapter.numbers()["redirections"] == asked + 1, "the table of slots was asked for again"


def _holds(client: redis.Redis, number: int) -> bool:
    try:
        return bool(client.exists(name_of(number)))
    except redis.ResponseError:  # MOVED
        return False
