"""The `resp` adapter: what an entry makes, and what it says of servers that do not do what Redis does.

No message ever shows a password.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.strategies import (
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
from kvstrata.tiers.media.resp import connection as connection_module
from kvstrata.tiers.media.resp.adapter import RespAdapter
from kvstrata.tiers.media.resp.connection import MAX_BULK_BYTES, Link, LinkLost, ServerError
from kvstrata.tiers.media.resp.pipeline import _directed
from kvstrata.tiers.media.resp.servers import Address

SECRET = "hunter2"


def made(**fields: Any) -> RespAdapter:
    entry = {"type": "resp", **fields}
    adapter = configure_tier(entry, 0).make()
    assert isinstance(adapter, RespAdapter)
    return adapter


@pytest.mark.usefixtures("patience_of_production")
def test_every_field_that_users_know_is_read() -> None:
    adapter = made(
        host="10.0.0.1",
        port=7000,
        username="u",
        password=SECRET,
        key_prefix="team-a/kv:",
        num_workers=3,
        per_op_workers={"lookup": 1},
        database_id=4,
        request_timeout=0.5,
        connection_timeout=1.5,
        ttl_seconds=90,
        max_capacity_gb=0.5,
        tls_enable=True,
        tls_server_name="redis",
    )
    servers, config = adapter.servers, adapter.config
    assert (servers.username, servers.password, servers.database) == ("u", SECRET, 4)
    assert (servers.connection_timeout_s, servers.tls_server_name) == (1.5, "redis")
    assert isinstance(servers.tls, ssl.SSLContext) and servers.tls.verify_mode is ssl.CERT_REQUIRED
    assert (config.key_prefix, config.ttl_seconds, adapter.timeout_s) == ("team-a/kv:", 90, 0.5)
    assert (config.num_workers, config.per_op_workers) == (3, {Lane.LOOKUP: 1})
    assert config.max_capacity_gb == 0.5


def test_the_deadline_is_the_time_limit_where_no_other_is_given() -> None:
    assert made(host="h", deadline_ms=250).timeout_s == 0.25


@pytest.mark.parametrize("nodes", ["a:1,b:2 , [::1]:3", ["a:1", "b:2", "[::1]:3"]])
def test_nodes_of_a_cluster(nodes: Any) -> None:
    servers = made(startup_nodes=nodes, cluster_mode=True).servers
    assert servers.addresses == (Address("a", 1), Address("b", 2), Address("::1", 3)) and servers.cluster


def test_sentinels() -> None:
    servers = made(sentinels="a,b:7", sentinel_master="mymaster").servers
    assert servers.addresses == (Address("a", 26379), Address("b", 7)) and servers.master_name == "mymaster"


def test_a_password_comes_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    assert made(host="h", password_file=str(file)).servers.password == SECRET
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        made(host="h", password_file=str(file))


def test_an_entry_that_cannot_be_read_is_not_shown() -> None:
    for entry in (f'{{"type": "resp", "password": "{SECRET}"', f'[{{"password": "{SECRET}"}}]'):
        with pytest.raises(ConfigError) as raised:
            configure_tier(entry, 0)
        assert SECRET not in raised.value.message


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Peer:
    """Greets as Redis does, and answers every other command with what `answer` makes of its words."""

    def __init__(self, answer: Callable[[list[bytes]], bytes]) -> None:
        self.answer = answer
        self.pong = b"+PONG\r\n"
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            try:
                while line := stream.readline():
                    words = []
                    for _ in range(int(line[1:])):
                        length = int(stream.readline()[1:])
                        words.append(stream.read(length + 2)[:-2])
                    stream.write(self.pong if words[0] == b"PING" else self.answer(words))
                    stream.flush()
            except OSError:
                return

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)


async def adapter_of(peer: Peer) -> StorageAdapter:
    adapter = make_adapter({"type": "resp", "host": "127.0.0.1", "port": peer.port}, 0)
    await adapter.open(lent_context(lambda key: None))
    return adapter


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
async def test_redirections_of_a_server_without_a_cluster_are_not_followed(word: bytes) -> None:
    with (
        Peer(lambda words: b"+OK\r\n") as other,
        Peer(lambda words: b"-%b 1 127.0.0.1:%d\r\n" % (word, other.port)) as peer,
    ):
        adapter = await adapter_of(peer)
        assert await ask_for(adapter, [key_of(1)]) == [Found(Presence.UNKNOWN, "cluster_down")]
        item, hole = put_item(key_of(1), 1000), load_item(key_of(1), 1000)
        assert await settled(adapter.put, [item]) == [Settled(Outcome.FAILED, "cluster_down")]
        assert await settled(adapter.load, [hole]) == [Settled(Outcome.FAILED, "cluster_down")]
        for one in (item, hole):
            watched(one).check()
        assert other.accepted == 0
        await adapter.close()


@pytest.mark.parametrize("length", [-5, 1 << 30, 1 << 40])
async def test_a_value_of_an_impossible_length_is_absent(length: int) -> None:
    with Peer(lambda words: b":%d\r\n" % length) as peer:
        adapter = await adapter_of(peer)
        assert await ask_for(adapter, [key_of(1)]) == [Found(Presence.ABSENT)]
        await adapter.close()


def stores(words: list[bytes]) -> bytes:
    """Nothing is stored yet, and everything is stored when it comes."""
    return b"+OK\r\n" if words[0] == b"SET" else b":0\r\n"


async def test_a_clear_that_a_server_refuses_raises_in_its_words() -> None:
    names = [b"kvstrata:" + key_of(number).hex().encode() for number in range(3)]

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"SCAN":
            return b"*2\r\n" + bulk(b"0") + b"*3\r\n" + b"".join(map(bulk, names))
        return b":1\r\n" if words[1] == names[0] else b"-NOPERM this user may not run 'unlink'\r\n"

    with Peer(answer) as peer:
        adapter = await adapter_of(peer)
        with pytest.raises(StorageError, match=r"1 records were removed, then: .*UNLINK.*NOPERM this user"):
            await adapter.clear()
        assert await adapter.delete(key_of(1)) == 0
        assert "NOPERM" in adapter.remarks()["refusal"]
        await adapter.close()


@pytest.mark.parametrize(("username", "own"), [("", ""), ("of-the-servers", ""), ("of-the-servers", "own")])
async def test_a_sentinel_that_wants_a_password_gets_its_own_or_that_of_the_servers(username, own, tmp_path):
    file = tmp_path / "password"
    file.write_text(own)
    file.chmod(0o600)
    asked: list[list[bytes]] = []
    with Peer(lambda words: b"+OK\r\n" if words[0] == b"AUTH" else b":0\r\n") as master:

        def sentinel(words: list[bytes]) -> bytes:
            asked.append(words)
            if words[0] != b"AUTH":
                return b"*2\r\n" + bulk(b"127.0.0.1") + bulk(b"%d" % master.port)
            return b"+OK\r\n" if words[1:] in ([b"secret"], [b"own"]) else b"-WRONGPASS no such user\r\n"

        def role(words: list[bytes]) -> bytes:
            return b"*1\r\n" + bulk(b"master") if words[0] == b"ROLE" else b"+OK\r\n"

        master.answer = role
        with Peer(sentinel) as peer:
            peer.pong = b"-NOAUTH Authentication required.\r\n"
            named = {"username": username} if username else {}
            named |= {"sentinel_password_file": str(file)} if own else {}
            entry = {"sentinels": f"127.0.0.1:{peer.port}", "sentinel_master": "m", "password": "secret"}
            adapter = make_adapter({"type": "resp", **entry, **named}, 0)
            await adapter.open(lent_context(lambda key: None))
            await adapter.close()
    with_user = [[b"AUTH", username.encode(), b"secret"]] if username and not own else []
    assert asked[:-1] == [*with_user, [b"AUTH", own.encode() or b"secret"]]


def test_a_node_that_does_not_know_its_own_name_redirects_to_where_it_was_asked() -> None:
    by = Address("10.0.0.7", 7000)
    for host in ("?", ""):
        assert _directed(ServerError(f"MOVED 3999 {host}:7001"), by) == (Address("10.0.0.7", 7001), False)
    assert _directed(ServerError("ASK 3999 10.0.0.8:7001"), by) == (Address("10.0.0.8", 7001), True)


# -- what one connection reads


def array(count: int, items: bytes) -> Iterator[bytes]:
    yield b"*%d\r\n" % count
    while True:
        yield items


@pytest.mark.parametrize(
    ("count", "items"),
    [
        (1 << 20, bulk(bytes(MAX_BULK_BYTES))),
        (1 << 20, b":1\r\n" * 1000),
        (1 << 20, b"*1000\r\n" + b"$-1\r\n" * 1000),
        (1, b"$%d\r\n" % (MAX_BULK_BYTES + 1)),
    ],
)
def test_the_memory_that_a_reply_takes_is_bounded(count, items, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_ARRAY_BYTES", 1 << 23)
    ours, theirs = socket.socketpair()
    sent = 0

    def send() -> None:
        nonlocal sent
        try:
            for part in array(count, items):
                theirs.sendall(part)
                sent += len(part)
        except OSError:
            return

    sending = threading.Thread(target=send)
    sending.start()
    link = Link(ours, time.monotonic() + WAIT_S)
    with pytest.raises(LinkLost, match="not Redis"):
        link.reply()
    link.close()
    sending.join(WAIT_S)
    theirs.close()
    assert sent < 1 << 24


def test_the_longest_replies_of_real_servers_are_read() -> None:
    ours, theirs = socket.socketpair()
    node = b"*4\r\n" + bulk(b"127.100.100.100") + b":6379\r\n" + bulk(b"a" * 40) + b"*0\r\n"
    slots = b"*4096\r\n" + (b"*4\r\n:0\r\n:0\r\n" + node * 2) * 4096
    values = b"*40\r\n" + bulk(bytes(MAX_BULK_BYTES)) * 40  # twice: the bound is that of one reply
    sending = threading.Thread(target=theirs.sendall, args=(slots + values + values,))
    sending.start()
    link = Link(ours, time.monotonic() + WAIT_S)
    for count in (4096, 40, 40):
        reply = link.reply()
        assert isinstance(reply, list) and len(reply) == count
    sending.join(WAIT_S)
    link.close()
    theirs.close()


def test_what_the_server_said_before_it_broke_the_connection_is_in_the_error() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, time.monotonic() + WAIT_S)
    theirs.sendall(b"+OK\r\n-ERR Protocol error: invalid bulk length\r\n")
    theirs.close()
    with pytest.raises(LinkLost, match="the connection broke: ERR Protocol error: invalid bulk length"):
        link.send([b"*3\r\n"])
    link.close()
