"""The `resp` adapter in front of a server that means harm: each operation ends, and keeps few bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstrata.errors import ConfigError, StorageError
from kvstrata.storage.base import LoadStatus, Presence, PutStatus, StorageAdapter, Usage
from kvstrata.storage.entry import make_adapter
from kvstrata.storage.media.resp import adapter as module
from kvstrata.testing.adapter_contract import SIZE
from kvstrata.testing.strategies import key_of, lent_context, load_item, put_item, record_length, watched
from tests.harness.hostile_resp import INFO, Hostile, bulk, cursors

pytestmark = pytest.mark.integration


@pytest.fixture
async def hostile() -> AsyncIterator[Hostile]:
    """A running server."""
    async with Hostile() as server:
        yield server


@contextlib.asynccontextmanager
async def opened(entry: dict[str, Any]) -> AsyncIterator[StorageAdapter]:
    """An open adapter."""
    adapter = make_adapter(entry, 0)
    await adapter.open(lent_context(lambda key: None))
    try:
        yield adapter
    finally:
        await adapter.close()


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
HANG_S = 120.0
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
    for verb in (b"STRLEN", b"GET", b"GETRANGE", b"SET", b"SCAN", b"DBSIZE"):
        hostile.answers[verb] = SAID[what]
    async with asyncio.timeout(HANG_S), opened(hostile.entry(max_capacity_gb=1)) as adapter:
        [found] = await adapter.exists([key_of(1)])
        assert found.presence is Presence.PRESENT if what == "an integer" else found.record_bytes == 0
        heads = await adapter.heads([key_of(1)])
        assert len(heads) == 1 and len(heads[0]) <= 512
        items = load_item(key_of(1), SIZE), put_item(key_of(1), SIZE)
        [loaded] = await adapter.load([items[0]])
        assert loaded.status is not LoadStatus.LOADED
        [put] = await adapter.put([items[1]])
        assert put.status is not PutStatus.STORED or what == "a simple string"
        for item in items:
            watched(item).check()
        assert isinstance(await adapter.usage(), Usage)
        with pytest.raises(StorageError, match="not cleared"):
            await adapter.clear()


@pytest.mark.parametrize(
    ("numbers", "why"),
    [((1, 2), "repeated a cursor"), pytest.param((), "did not end within", marks=pytest.mark.long)],
)
async def test_a_scan_that_never_ends_ends_the_clear_as_incomplete(hostile, monkeypatch, numbers, why):
    monkeypatch.setattr(module, "CLEAR_S", 0.5)
    hostile.answers[b"SCAN"] = cursors(*numbers)
    hostile.answers[b"UNLINK"] = b":%d\r\n" % ((1 << 63) - 1)
    async with asyncio.timeout(HANG_S), opened(hostile.entry()) as adapter:
        with pytest.raises(StorageError, match=f"incomplete: SCAN of .* {why}"):
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
