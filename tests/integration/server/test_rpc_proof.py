"""A real server and processes that know the name of somebody's session: nobody acts in it without its secret."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import NotPermitted, Refused, WrongVersion
from kvstrata.memory.attach.client import attach, process_locks
from kvstrata.rpc import attach_wire, wire
from kvstrata.rpc.frame import prove
from kvstrata.types import KEY_BYTES, Role, shown_name
from tests.harness.rpc_client import (
    RECORD_BYTES,
    RpcClient,
    RpcError,
    layout,
    new_prompt,
    part,
    until,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

OTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.fixture
def victim(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.socket_dir) as made:
        yield made


class Held:
    """What a session holds: a stored chunk under a lease, and a reservation. `requests` would end or use it."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.identity, self.chain = new_prompt(client, 2)
        self.chunk = self.chain[:KEY_BYTES]
        client.store(self.identity, self.chunk)
        lookup = client.lookup_request(self.identity.identity_id, self.chunk)
        assert client.ask(lookup, wire.LookupReply).n_chunks == 1
        self.lease = (client.session, lookup.seq)
        self.reservation, _ = client.reserve(
            self.identity.identity_id, self.chain[KEY_BYTES:], parent=self.chunk
        )

    def requests(self) -> list[wire.AnyRequest]:
        session, seq, number = self.client.session, self.client.seq + 1, self.identity.identity_id
        groups = [wire.KeyGroup(wire.Rule.PREFIX, self.chunk)]
        return [
            wire.Hello(session, seq, wire.PROTOCOL_VERSION),
            wire.Identify(session, seq, wire.RequestIdentity()),
            wire.Ping(session, seq, []),
            wire.Lookup(session, seq, 1000, number, "", groups),
            wire.Release(session, seq, [self.lease], True),
            wire.Reserve(session, seq, 1000, number, b"", secrets.token_bytes(32), RECORD_BYTES),
            wire.Commit(session, seq, self.reservation, [0]),
            wire.Abort(session, seq, self.reservation),
            wire.Cancel(session, seq, self.reservation),
            wire.Cancel(session, seq, (1 << 62) + 1),
            wire.Retrieve(session, seq, number, self.chunk, part().digest(), 0, RECORD_BYTES),
            wire.Quiesced(session, seq),
            wire.Corrupt(session, seq, number, self.chunk),
        ]

    def assert_untouched(self) -> None:
        """The lease and the reservation are there, no number was used, and the session goes on."""
        status = self.client.status()
        assert (status["pool"]["leases"], status["pool"]["reservations"]) == (1, 1)
        assert self.client.lookup(self.identity.identity_id, self.chunk).n_chunks == 1
        assert self.client.release([(self.client.session, self.client.seq)], group=True) == 1

    def end(self) -> None:
        """Give everything back."""
        assert self.client.abort(self.reservation) == 1
        assert self.client.release([self.lease], group=True) == 1


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["none", "zeros"])
def test_a_process_that_knows_only_the_session_does_nothing_in_its_name(
    server: ServerProcess, victim: RpcClient, secret: bytes | None
) -> None:
    held = Held(victim)
    before = victim.status()["counters"]["wrong_proofs"]
    attacker = RpcClient(server.socket_dir)
    attacker.connect()
    requests = held.requests()
    for request in requests:
        message = wire.encode(request)
        attacker.send_frames(message if secret is None else prove(secret, message))
        reply = attacker.receive()
        assert isinstance(reply, wire.Error), (request, reply)
        assert (reply.code, reply.field, reply.seq) == ("not_permitted", "session", request.seq)
    assert victim.status()["counters"]["wrong_proofs"] == before + len(requests)
    assert server.log_tail().count("wrong_proof") <= 1, "the log is thinned"
    held.assert_untouched()
    held.end()
    attacker.close()


def test_the_secret_of_one_session_proves_nothing_for_another(
    server: ServerProcess, victim: RpcClient
) -> None:
    held = Held(victim)
    with RpcClient(server.socket_dir) as attacker:
        attacker.send_frames(
            prove(attacker.secret, wire.encode(wire.Abort(victim.session, 999, held.reservation)))
        )
        reply = attacker.receive()
        assert isinstance(reply, wire.Error) and reply.code == "not_permitted"
    held.assert_untouched()
    held.end()


def test_attaching_again_gives_a_new_secret_and_ends_the_old_one(victim: RpcClient) -> None:
    old = victim.secret
    victim.attach()
    assert victim.secret != old
    victim.ping()
    victim.send_frames(prove(old, wire.encode(wire.Ping(victim.session, victim.next_seq()))))
    reply = victim.receive()
    assert isinstance(reply, wire.Error) and reply.code == "not_permitted"


def test_a_restarted_server_gives_a_new_secret(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=16) as server:
        server.start()
        client = RpcClient(server.socket_dir)
        client.attach()
        old = client.secret
        server.kill()
        server.start()
        client.connect()
        client.send_frames(prove(old, wire.encode(wire.Ping(client.session, 1))))
        reply = client.receive()
        assert isinstance(reply, wire.Error) and reply.code == "unknown_session"
        client.attach()
        assert client.secret != old
        client.ping()
        client.goodbye()


def test_what_the_server_shows_of_a_session_is_not_its_name(server: ServerProcess, victim: RpcClient) -> None:
    until(victim, lambda status: len(status["peers"]) == 1)
    text = json.dumps(victim.status()) + server.log_tail()
    for name in (victim.session, victim.group):
        assert name.hex() not in text and name.hex()[:16] not in text
    assert shown_name(victim.session) in text


def test_the_version_without_proofs_is_refused_by_name(server: ServerProcess) -> None:
    made = attach_wire.AttachRequest(
        protocol=4,
        session=secrets.token_bytes(16),
        group=secrets.token_bytes(16),
        role=Role.SCHEDULER,
        layout=layout(),
        engine_slices=1,
    )
    with pytest.raises(WrongVersion, match="speaks version 4, this server 5; use the same kvstrata release"):
        attach(server.socket_dir, made, process_locks())
    client = RpcClient(server.socket_dir)
    client.connect()
    with pytest.raises(RpcError, match="the client speaks 4, this server 5; upgrade"):
        client.ask(wire.Hello(wire.NO_SESSION, 1, 4), wire.HelloReply)
    client.close()


def test_another_user_cannot_reach_the_unix_sockets(server: ServerProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    connect = "import socket, sys; socket.socket(socket.AF_UNIX, int(sys.argv[2])).connect(sys.argv[1])"
    sockets = {"rpc.sock": socket.SOCK_STREAM, "attach.sock": socket.SOCK_SEQPACKET}
    assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
    for mode in (0o700, 0o711):  # also if somebody has opened the folder
        server.socket_dir.chmod(mode)
        for name, kind in sockets.items():
            ran = subprocess.run(
                [*OTHER_USER, sys.executable, "-c", connect, str(server.socket_dir / name), str(int(kind))],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert "PermissionError" in ran.stderr, (oct(mode), name, ran.stderr)
    attach = server.socket_dir / "attach.sock"
    attach.chmod(0o666)  # also if somebody has opened the socket itself
    ask = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])"
    )
    ask += "; s.settimeout(60); print(s.recv(65_536), len(s.recv(1)))"
    ran = subprocess.run(
        [*OTHER_USER, sys.executable, "-c", ask, str(attach)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    server.socket_dir.chmod(0o700)
    attach.chmod(0o600)
    assert "uid 65534 may not attach to a server of uid 0" in ran.stdout and ran.stdout.endswith(" 0\n"), ran


def test_another_process_cannot_attach_as_a_session_that_it_knows(
    server: ServerProcess, victim: RpcClient
) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.harness.rpc_client import RpcClient\n"
        "client = RpcClient(Path(sys.argv[1]), group=bytes.fromhex(sys.argv[3]))\n"
        "client.session = bytes.fromhex(sys.argv[2])\n"
        "client.attach()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(server.socket_dir), victim.session.hex(), victim.group.hex()],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert NotPermitted.__name__ in ran.stderr and "belongs to another living process" in ran.stderr
    victim.ping()


@pytest.mark.long
def test_one_process_cannot_take_all_rows(tmp_path: Path) -> None:
    environment = {**os.environ, "KVSTRATA_SECURITY_SESSIONS_PER_PROCESS": "3"}
    with ServerProcess(tmp_path, l1_mb=16, environment=environment) as server:
        server.start()
        taken = [RpcClient(server.socket_dir) for _ in range(3)]
        for client in taken:
            client.attach()
        with pytest.raises(Refused, match="has 3 sessions attached, and one process may have 3; close some"):
            RpcClient(server.socket_dir).attach()
        taken[0].attach()
        attach_elsewhere = (
            "import sys; from pathlib import Path; from tests.harness.rpc_client import RpcClient\n"
            "with RpcClient(Path(sys.argv[1])) as client: client.ping()\n"
        )
        subprocess.run(
            [sys.executable, "-c", attach_elsewhere, str(server.socket_dir)],
            timeout=300,
            cwd=Path(__file__).parents[3],
            check=True,
        )
        for client in taken:
            client.close()
