"""Fields and errors of the `object_store` adapter, against a server that answers what it is told to."""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import obstore
import pytest
from obstore.store import MemoryStore

from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.strategies import (
    POISON,
    WAIT_S,
    Found,
    Settled,
    ask_for,
    key_of,
    lent_context,
    load_item,
    put_item,
    settled,
    watched,
)
from kvstrata.tiers.base import Outcome, Presence, StorageAdapter
from kvstrata.tiers.config import configure_tier, make_adapter
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.object_store import adapter as module
from kvstrata.tiers.media.object_store.adapter import (
    MARKER,
    MARKER_TEXT,
    ObjectStoreAdapter,
    ObjectStoreSettings,
    path_of,
)
from kvstrata.tiers.reasons import blames_medium

SECRET = "a-secret-that-nobody-may-see"
S3 = {"type": "object_store", "url": "s3://bucket/kv", "region": "us-east-1"}


def test_a_missing_package_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[object_store\]'"):
        configure_tier(S3, 0)


class Answers(http.server.BaseHTTPRequestHandler):
    """Serves the marker; answers everything else with `status` and `body`."""

    status: ClassVar[int] = 200
    body: ClassVar[bytes] = b""
    tries: ClassVar[int] = 0

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, body = self.status, self.body
        if self.path.endswith(MARKER) and self.command in ("GET", "HEAD"):
            status, body = 200, MARKER_TEXT
        else:
            type(self).tries += 1
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", "Sat, 01 Jan 2000 00:00:00 GMT")
        self.send_header("etag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def adapter_at(endpoint: str, **more: Any) -> StorageAdapter:
    entry = {
        **S3, "endpoint": endpoint, "allow_http": True, "access_key_id": "AKIAX", "secret_access_key": SECRET,
        "max_retries": 1, **more,
    }  # fmt: skip
    return make_adapter(entry, 0)


@pytest.mark.parametrize(
    ("status", "body", "outcome", "tries"),
    [
        (503, b"<Error><Code>SlowDown</Code></Error>", Settled(Outcome.THROTTLED, "slow_down"), 2),
        (429, b"", Settled(Outcome.THROTTLED, "slow_down"), 2),
        (507, b"", Settled(Outcome.THROTTLED, "full"), 2),
        (403, b"<Error><Code>QuotaExceeded</Code></Error>", Settled(Outcome.THROTTLED, "full"), 1),
        (401, b"", Settled(Outcome.FAILED, "denied"), 1),
        (403, b"<Error><Code>AccessDenied</Code></Error>", Settled(Outcome.FAILED, "denied"), 1),
        (403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>", Settled(Outcome.FAILED, "clock"), 1),
        (400, b"<Error><Code>ExpiredToken</Code></Error>", Settled(Outcome.FAILED, "token"), 1),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", Settled(Outcome.FAILED, "no_bucket"), 1),
        (500, b"", Settled(Outcome.FAILED, "io"), 2),
    ],
)
async def test_refused_puts_say_why_and_are_tried_again_where_it_helps(
    endpoint: str, caplog: pytest.LogCaptureFixture, status: int, body: bytes, outcome: Settled, tries: int
) -> None:
    adapter = adapter_at(endpoint)
    await adapter.open(lent_context(lambda key: None))
    Answers.status, Answers.tries = status, 0
    Answers.body = body.replace(b"</Error>", f"<AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>".encode())
    item = put_item(key_of(1), 100_000)
    assert await settled(adapter.put, [item]) == [outcome]
    watched(item).check()
    assert Answers.tries == tries
    load = load_item(key_of(1), 1000)
    [loaded] = await settled(adapter.load, [load])
    watched(load).check()
    assert loaded == Settled(Outcome.FAILED, outcome.reason)
    if status != 404:  # a HEAD of a missing bucket says no more than one of a missing object
        [found] = await ask_for(adapter, [key_of(1)])
        assert found.presence is Presence.UNKNOWN
        assert blames_medium(found.reason), "it counts for the breaker"
    assert blames_medium(loaded.reason), "it counts for the breaker"
    await adapter.close()
    assert SECRET not in caplog.text


async def test_a_put_that_is_refused_before_it_was_read_keeps_its_bytes_until_the_library_lets_go() -> None:
    size = 32 << 20
    with EarlyRefusal() as server:
        adapter = adapter_at(server.endpoint, max_retries=0)
        await adapter.open(lent_context(lambda key: None))
        item = put_item(key_of(1), size)
        assert await settled(adapter.put, [item]) == [Settled(Outcome.FAILED, "denied")]
        assert not watched(item).dropped.is_set(), "it is still being sent"
        server.reads.set()
        await watched(item).until_dropped()
        watched(item).check()
        sent = await asyncio.to_thread(server.received)
        await adapter.close()
    assert len(sent) > size
    assert bytes([POISON]) * 1000 not in sent, "bytes were sent after their hold was dropped"


class EarlyRefusal:
    """Serves the marker; refuses the first PUT as soon as it has its headers, and reads the rest when it is told."""

    def __init__(self) -> None:
        self.reads = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sent = bytearray()
        self._threads = [threading.Thread(target=self._accept)]
        self._done = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def received(self) -> bytes:
        """All that was sent of the refused PUT."""
        assert self._done.wait(WAIT_S)
        return bytes(self._sent)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            head = bytearray()
            while b"\r\n\r\n" not in head:
                part = connection.recv(4096)
                if not part:
                    return
                head += part
            if MARKER.encode() in head:
                about = b'etag: "1"\r\nlast-modified: Sat, 01 Jan 2000 00:00:00 GMT\r\nconnection: close'
                length = b"content-length: %d" % len(MARKER_TEXT)
                connection.sendall(b"HTTP/1.1 200 OK\r\n%s\r\n%s\r\n\r\n%s" % (about, length, MARKER_TEXT))
                return
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            assert self.reads.wait(WAIT_S)
            self._sent += head
            expected = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            while len(self._sent) < expected and (part := connection.recv(1 << 20)):
                self._sent += part
            self._done.set()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.reads.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)


async def test_credentials_in_an_address_are_not_told() -> None:
    with pytest.raises(StorageError, match=r"cannot be reached.* http://127\.0\.0\.1:9/bucket") as wrong:
        await adapter_at(f"http://me:{SECRET}@127.0.0.1:9").open(lent_context(lambda key: None))
    assert SECRET not in str(wrong.value)


async def test_wrong_credentials_stop_the_start(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.tiers.media.object_store.adapter.MARKER", "not-there")
    Answers.status, Answers.body = 403, b"<Error><Code>InvalidAccessKeyId</Code></Error>"
    with pytest.raises(
        ConfigError, match=r"must allow getting, putting, deleting and listing.*InvalidAccessKeyId"
    ):
        await adapter_at(endpoint).open(lent_context(lambda key: None))


MB = 1 << 20


def in_memory(store: MemoryStore, **more: Any) -> ObjectStoreAdapter:
    """An adapter on a store in this process, not open."""
    return ObjectStoreAdapter(ObjectStoreSettings(url="memory://kv", connect=lambda: store, **more))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def test_a_prefix_of_another_version_stops_the_start(store: MemoryStore) -> None:
    obstore.put(store, MARKER, b"kvstrata records, format 7\n")
    with pytest.raises(ConfigError, match=r"records of another version.*choose another prefix"):
        await in_memory(store).open(lent_context(lambda key: None))


async def test_large_records_go_in_parts_and_come_back_whole(store: MemoryStore) -> None:
    adapter = in_memory(store, multipart_bytes=5 * MB, part_bytes=5 * MB)
    await adapter.open(lent_context(lambda key: None))
    size = 17 * MB
    assert await settled(adapter.put, [put_item(key_of(1), size)]) == [Settled(Outcome.STORED)]
    assert await settled(adapter.put, [put_item(key_of(1), size)]) == [Settled(Outcome.EXISTS)]
    [loaded] = await settled(adapter.load, [load_item(key_of(1), size)])
    assert loaded.outcome is Outcome.LOADED
    path = path_of(key_of(1))
    damaged = bytearray(obstore.get(store, path).bytes())
    damaged[12 * MB : 12 * MB + 4] = b"else"
    obstore.put(store, path, bytes(damaged))
    [loaded] = await settled(adapter.load, [load_item(key_of(1), size)])
    assert loaded.outcome is Outcome.CORRUPT
    with pytest.raises(FileNotFoundError):
        obstore.head(store, path)
    await adapter.close()


@pytest.mark.parametrize("size", [1000, 17 * MB])
async def test_an_unexpected_exception_ends_the_hold_too(store, monkeypatch, size):
    adapter = in_memory(store, part_bytes=5 * MB)
    await adapter.open(lent_context(lambda key: None))
    await settled(adapter.put, [put_item(key_of(1), size)])
    monkeypatch.setattr("obstore.get", lambda *given, **options: 1 // 0)
    item = load_item(key_of(1), size)
    with pytest.raises(ZeroDivisionError):
        await settled(adapter.load, [item])
    watched(item).check()
    await adapter.close()


@pytest.mark.parametrize("length", [0, 511])
async def test_an_object_of_an_impossible_length_is_absent_and_replaced(store, length):
    adapter = in_memory(store)
    await adapter.open(lent_context(lambda key: None))
    obstore.put(store, path_of(key_of(1)), bytes(length))
    assert await ask_for(adapter, [key_of(1)]) == [Found(Presence.ABSENT)]
    assert await settled(adapter.put, [put_item(key_of(1), 1000)]) == [Settled(Outcome.STORED)]
    assert await settled(adapter.load, [load_item(key_of(1), 1000)]) == [Settled(Outcome.LOADED)]
    await adapter.close()


async def test_foreign_objects_below_the_prefix_are_left_alone(store: MemoryStore) -> None:
    obstore.put(store, "ab/somebody-elses.kvc", b"precious")
    adapter = in_memory(store)
    await adapter.open(lent_context(lambda key: None))
    await settled(adapter.put, [put_item(key_of(1), 1000)])
    assert (await adapter.usage()).records == 1
    assert await adapter.clear() == 1
    assert bytes(obstore.get(store, "ab/somebody-elses.kvc").bytes()) == b"precious"
    await adapter.close()


async def test_a_listing_that_never_ends_ends_the_clear_as_incomplete(store, monkeypatch):
    """The time of a listing is over after its first page."""
    monkeypatch.setattr(module, "LIST_S", -1.0)
    adapter = in_memory(store)
    await adapter.open(lent_context(lambda key: None))
    await settled(adapter.put, [put_item(key_of(1), 1000)])
    with pytest.raises(StorageError, match="cannot be cleared: incomplete: the listing did not end"):
        await adapter.clear()
    await adapter.close()


async def test_operations_refused_by_a_full_lane_fail_with_the_reason_and_drop_their_holds(store):
    adapter = in_memory(
        store, part_bytes=5 * MB, multipart_bytes=5 * MB,
        per_op_workers={Lane.LOOKUP: 1, Lane.LOAD: 1, Lane.PUT: 1},
    )  # fmt: skip
    await adapter.open(lent_context(lambda key: None))
    large = 17 << 20
    for number, size in enumerate((1000, large)):
        assert await settled(adapter.put, [put_item(key_of(number), size)]) == [Settled(Outcome.STORED)]
    go_on = threading.Event()
    filled = []
    for lane in (Lane.LOOKUP, Lane.LOAD, Lane.PUT):
        begun = threading.Event()
        filled.append(adapter._lanes.submit(lane, lambda begun=begun: (begun.set(), go_on.wait(WAIT_S))))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        while (waiting := adapter._lanes.submit(lane, lambda: None)) is not None:
            filled.append(waiting)
    try:
        keys = [key_of(number) for number in range(3)]
        assert await ask_for(adapter, keys) == [Found(Presence.UNKNOWN, "throttled")] * 3
        puts = [put_item(key_of(number), 1000) for number in (2, 3)]
        assert await settled(adapter.put, puts) == [Settled(Outcome.THROTTLED, "queue_full")] * 2
        loads = [load_item(key_of(0), 1000), load_item(key_of(1), large)]
        assert await settled(adapter.load, loads) == [Settled(Outcome.FAILED, "throttled")] * 2
        for item in (*puts, *loads):
            watched(item).check()
    finally:
        go_on.set()
    await asyncio.gather(*filled)
    assert [each.presence for each in await ask_for(adapter, keys)] == [
        Presence.PRESENT, Presence.PRESENT, Presence.ABSENT,
    ]  # fmt: skip
    for number, size in enumerate((1000, large)):
        assert await settled(adapter.load, [load_item(key_of(number), size)]) == [Settled(Outcome.LOADED)]
    await adapter.close()
