"""Workers in containers: other user, PID, IPC, network and mount namespaces, and one shared socket directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory import linux
from kvstrata.types import unpack_extents
from tests.harness import namespaces
from tests.harness.cache_engine import eventually
from tests.harness.child import Child, ChildError
from tests.harness.rpc_client import RpcClient, chain_of, keys_of, payload
from tests.harness.server_process import ServerProcess
from tests.integration.memory.test_attach import attach, nobody, numbers, quarantined

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-"),
]

CONTAINER = (*namespaces.CONTAINER, *namespaces.hidden_shm())
OF_SERVER = (namespaces.CONTAINER[0], "-Urmip", *namespaces.CONTAINER[2:])
"""As a worker's, but with the network of this host, where its admin port is, and the host's /dev/shm."""


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[Child]:
    """A process in namespaces of its own; /dev/shm is another one there."""
    with Child("tests.harness.rpc_child", under=CONTAINER, log=tmp_path / "contained.log") as child:
        yield child


def pids(server: ServerProcess) -> list[int]:
    return [peer["pid"] for peer in server.get("/v1/status")["peers"]]


def kill_contained(server: ServerProcess) -> None:
    """Kill a server of a container, and wait until it has ended."""
    [pid] = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    assert server._process is not None
    server._process.wait()


def test_worker_in_other_namespaces_attaches_maps_and_is_seen_to_die(start, contained):
    server = start()
    assert contained.pid != contained.outer_pid()
    session, _ = attach(contained, server)
    assert pids(server) == [contained.outer_pid()]
    contained.ask("store", session=session, n_chunks=2)
    with RpcClient(server.socket_dir) as outside:
        identity = outside.identify()
        chain = chain_of(identity.root, 2)
        found = outside.lookup(identity.identity_id, chain)
        read = [outside.read(extent) for extent in unpack_extents(found.extents)]
        assert read == [payload(key) for key in keys_of(chain)]
    contained.ask("reserve", session=session, n_chunks=4)
    assert server.get("/v1/status")["pool"]["reserved_bytes"]
    contained.kill()
    eventually("the row ends", lambda: nobody(server))
    assert not server.get("/v1/status")["pool"]["reserved_bytes"]


@pytest.mark.long
def test_server_restart_finds_the_lock_of_a_worker_in_other_namespaces(start, contained):
    server = start()
    session, row = attach(contained, server)
    server.kill()
    server.start()
    assert numbers(server, old_rows=1)
    assert attach(contained, server, session) == (session, row)


def test_server_and_worker_in_sibling_containers(start, contained, tmp_path):
    """Neither sees the other's process number: pidfd and lock must do without."""
    server = start(within=OF_SERVER)
    session, row = attach(contained, server)
    assert pids(server) == [0]
    contained.ask("reserve", session=session, n_chunks=1)
    with Child("tests.harness.rpc_child", under=CONTAINER, log=tmp_path / "thief.log") as thief:
        with pytest.raises(ChildError, match="not_permitted"):
            attach(thief, server, session)
        attach(thief, server)
    eventually("the thief has ended", lambda: numbers(server, attached=1))
    kill_contained(server)
    server.start()
    assert numbers(server, old_rows=1)
    assert attach(contained, server, session) == (session, row)
    contained.kill()
    eventually("the row ends", lambda: nobody(server))
    assert not quarantined(server)


@pytest.mark.long
def test_pidfd_of_another_invisible_process_is_told_from_the_peers(start, contained):
    own = os.pidfd_open(os.getpid())
    parent = os.pidfd_open(os.getppid())
    try:
        if linux.same_process(own, parent) is None:
            pytest.skip("before Linux 6.9 pidfds of different processes cannot be told apart")
    finally:
        linux.close_all([own, parent])
    child = contained.ask("fork")
    server = start(within=OF_SERVER)

    def raw(kind: str) -> list[object]:
        found: list[object] = contained.ask("raw", socket_dir=str(server.socket_dir), session="", fds=[kind])
        return found

    assert raw(str(child))[:2] == ["not_permitted", "pidfd"]
    assert raw("self")[0] == ""
    eventually("the row is free", lambda: nobody(server))
