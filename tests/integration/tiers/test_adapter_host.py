"""A real server whose adapter runs in a process of its own: the server serves whatever happens to that process."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.memory import linux
from kvstrata.memory.segment_files import HOSTS_BYTE
from tests.harness.bad_adapter import entry_of
from tests.harness.cache_engine import eventually
from tests.harness.l2_load import clear_l1, served
from tests.harness.open_files import open_files
from tests.harness.own_process import ServerFailed
from tests.harness.rpc_client import RpcClient, chain_of, until
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
NAME = "plugin-0"


class HostedServer(ServerProcess):
    """A server with a BadAdapter in a host, and the folder where that finds its orders."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self._orders = folder / "orders"
        self._orders.mkdir(parents=True)
        # On tmpfs: the tests' deadlines are shorter than a busy disk's fsync.
        self._records = Path(tempfile.mkdtemp(prefix="kvstrata-test-", dir="/dev/shm"))
        entry = {**entry_of(self._records / "kv", self._orders), **fields}
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        flags = ("--l2-adapter", json.dumps(entry))
        super().__init__(folder / "server", l1_mb=16, l2="embedded", flags=flags, environment=environment)

    def close(self) -> None:
        """As the base class; the records go too."""
        super().close()
        shutil.rmtree(self._records, ignore_errors=True)

    def order(self, operation: str, how: str) -> None:
        """From now on each such operation of the adapter behaves so."""
        (self._orders / f"{operation}.{how}").touch()

    def no_orders(self) -> None:
        """From now on the adapter behaves well."""
        for order in self._orders.iterdir():
            order.unlink()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostedServer]]:
    started: list[HostedServer] = []

    def starter(**fields: Any) -> HostedServer:
        server = HostedServer(tmp_path / str(len(started)), **fields)
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


def host_of(status: dict[str, Any]) -> dict[str, Any]:
    return status["l2_adapters"][NAME]["host"]


def outcomes_of(status: dict[str, Any]) -> dict[str, int]:
    return status["l2_store"]["adapters"][NAME]["outcomes"]


def until_gone(pid: int) -> None:
    """Wait until the process has ended; a zombie counts as ended."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    eventually(f"process {pid} has ended", ended)


def stored_in_l2(client: RpcClient, n_chunks: int) -> tuple[Any, bytes]:
    """Store a prompt in L1 and L2; stores another one if a slow machine missed the deadline of a put."""
    identity = client.identify()
    for number in itertools.count():
        before = outcomes_of(client.status())
        chain = chain_of(identity.root, n_chunks, first_token=number * 10_000)
        client.store(identity, chain)
        ended = sum(before.values()) + n_chunks
        until(client, lambda status, ended=ended: sum(outcomes_of(status).values()) >= ended)
        if outcomes_of(client.status()).get("stored", 0) == before.get("stored", 0) + n_chunks:
            return identity, chain
    raise AssertionError


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        ("put", "kill"),
        ("load", "null"),
        ("put", "garbage"),
        pytest.param("load", "exit", marks=pytest.mark.long),
        pytest.param("load", "hang", marks=pytest.mark.silence),
        pytest.param("put", "stop", marks=[pytest.mark.long, pytest.mark.silence]),
    ],
)
def test_the_server_serves_whatever_happens_to_a_host_and_the_host_comes_back(start, operation, how):
    server = start(deadline_ms=500, host_kill_ms=1_000)
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored_in_l2(client, 3)
        first = host_of(client.status())
        server.order(operation, how)
        if operation == "load":
            clear_l1(client)
            reply = client.lookup(identity.identity_id, chain, deadline_ms=5_000)
            assert reply.n_chunks == 0
        other = chain_of(identity.root, 2, first_token=1_000_000)
        client.store(identity, other)
        for _ in range(20):
            assert served(client, identity, other, deadline_ms=5_000) == (2, 0), "what L1 has is served"
            missing = chain_of(identity.root, 1, first_token=2_000_000)
            assert client.lookup(identity.identity_id, missing, deadline_ms=5_000).n_chunks == 0
        until(client, lambda status: host_of(status)["restarts"] > first["restarts"])
        server.no_orders()
        until(client, lambda status: host_of(status)["state"] == "up" and status["pool"]["holds"] == 0)
        assert host_of(client.status())["pid"] != first["pid"]
        until_gone(first["pid"])
        clear_l1(client)

        def is_back(status: dict[str, Any]) -> bool:
            return client.lookup(identity.identity_id, chain, deadline_ms=5_000).n_chunks == 3

        until(client, is_back)


def test_bytes_that_a_stopped_host_may_touch_are_free_when_it_is_reaped_and_not_before(start):
    server = start(deadline_ms=100, host_kill_ms=3_600_000)
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        pid = host_of(client.status())["pid"]
        send(pid, signal.SIGSTOP)
        chain = chain_of(identity.root, 2)
        client.store(identity, chain)
        until(client, lambda status: sum(outcomes_of(status).values()) == 2)
        status = client.status()
        assert (status["pool"]["holds"], host_of(status)["requests"] > 0) == (2, True)
        assert status["l2_adapters"][NAME]["stuck_bytes"] > 0
        clear_l1(client)
        assert client.status()["pool"]["blocked_bytes"] > 0
        os.kill(pid, signal.SIGKILL)
        until(client, lambda status: status["pool"]["holds"] == 0)
        assert client.status()["pool"]["blocked_bytes"] == 0
        until(client, lambda status: host_of(status)["state"] == "up")
        assert client.status()["l2_adapters"][NAME]["stuck_bytes"] == 0


def test_a_host_that_was_stopped_for_a_while_goes_on(start: Callable[..., HostedServer]) -> None:
    server = start(host_kill_ms=3_600_000)
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        pid = host_of(client.status())["pid"]
        send(pid, signal.SIGSTOP)
        client.store(identity, chain_of(identity.root, 4))
        until(client, lambda status: host_of(status)["requests"] > 0)
        assert client.lookup(identity.identity_id, chain_of(identity.root, 4)).l1_chunks == 4
        os.kill(pid, signal.SIGCONT)
        until(client, lambda status: outcomes_of(status).get("stored") == 4)
        assert host_of(client.status()) == {"pid": pid, "state": "up", "restarts": 0, "requests": 0}


@pytest.mark.long
@pytest.mark.silence
def test_a_server_with_a_stopped_host_stops(start: Callable[..., HostedServer]) -> None:
    server = start(host_kill_ms=3_600_000)
    with RpcClient(server.socket_dir) as client:
        pid = host_of(client.status())["pid"]
    send(pid, signal.SIGSTOP)
    assert server.stop() == 0, server.log_tail()
    until_gone(pid)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGCONT, marks=pytest.mark.long), signal.SIGSTOP])
def test_a_killed_server_leaves_no_host_behind(start, number):
    server = start()
    with RpcClient(server.socket_dir) as client:
        pid = host_of(client.status())["pid"]
        send(pid, number)
        server.kill()
    until_gone(pid)


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "how", "says"),
    [
        ("open", "refuse", "bad medium: mend it"),
        ("make", "null", "plugin-0: its host process ended with SIGSEGV before the adapter was open"),
        ("open", "exit", "plugin-0: its host process ended with exit status 3 before the adapter was open"),
    ],
)
def test_an_adapter_that_cannot_be_opened_in_its_host_is_told_and_tried_again_while_l1_serves(
    tmp_path: Path, operation: str, how: str, says: str
) -> None:
    with HostedServer(tmp_path) as server:
        server.order(operation, how)
        server.start()
        said = "tier_unreachable adapter=plugin-0"
        eventually("it is told", lambda: said in server.log.read_text() and says in server.log.read_text())
        assert "Task exception" not in server.log.read_text()


@pytest.mark.long
def test_an_adapter_that_cannot_be_made_in_its_host_stops_the_start(tmp_path: Path) -> None:
    says = r"l2_adapters\[0\]: tests.harness.bad_adapter.BadAdapter cannot be made: RuntimeError: ordered to raise"
    with HostedServer(tmp_path) as server:
        server.order("make", "raise")
        with pytest.raises(ServerFailed, match=says) as failed:
            server.start()
        assert "Task exception" not in str(failed.value)


def test_a_host_has_nothing_of_the_servers_but_the_extents_and_a_shared_lock(start):
    server = start()
    with RpcClient(server.socket_dir) as client:
        pid = host_of(client.status())["pid"]
    descriptors, servers = open_files(pid), open_files(server.pid)
    of_the_pool = [name for name in descriptors if str(server.segment_dir) in name]
    assert of_the_pool == [str(server.segment_dir / "sessions.lock")]
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert mapped.count(str(server.segment_dir / "extents")) == 1
    assert str(server.segment_dir / "index") not in mapped
    assert not {name for name in set(descriptors) & set(servers) if name.startswith("socket:")}
    fd = os.open(server.segment_dir / "sessions.lock", os.O_RDWR)
    try:
        assert linux.byte_locker(fd, HOSTS_BYTE) == pid
    finally:
        os.close(fd)
