"""A real server and processes that know the name of somebody's session: nobody acts in it without its secret."""

from __future__ import annotations

import contextlib
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
import zmq

from kvstrata.errors import NotPermitted, Refused, WrongVersion
from kvstrata.memory.attach.client import attach, process_locks
from kvstrata.rpc import attach_wire, wire
from kvstrata.rpc.frame import MAX_UNPROVEN_BYTES, prove
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
            wire.Prefetch(session, seq, number, self.chunk, 0, 1000),
            wire.Status(session, seq),
            wire.Clear(session, seq, wire.ClearScope.ALL),
            wire.Explain(session, seq, "x"),
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
    with ServerProcess(tmp_path, l1_mb=16, flags=("--no-http",)) as server:
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


ASK_AS_ANOTHER_USER = """
import sys, zmq
endpoint, *frames = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(endpoint)
for frame in frames:
    socket.send(bytes.fromhex(frame))
    if not socket.poll(30_000):
        sys.exit(f"no answer to {frame}")
    print(socket.recv().hex(), flush=True)
"""


def ask_as_another_user(endpoint: str, frames: list[bytes]) -> list[wire.AnyReply]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    ran = subprocess.run(
        [*OTHER_USER, sys.executable, "-c", ASK_AS_ANOTHER_USER, endpoint, *map(bytes.hex, frames)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [wire.decode_reply(bytes.fromhex(line)) for line in ran.stdout.split()]


def test_another_user_gets_nothing_but_hello_over_tcp_without_keys(
    server: ServerProcess, victim: RpcClient
) -> None:
    """Not even with the secret: what travels over such a port could be read by others."""
    held = Held(victim)
    requests = held.requests()[1:]
    unattached = [
        wire.Ping(wire.NO_SESSION, 1),
        wire.Status(wire.NO_SESSION, 2),
        wire.Explain(wire.NO_SESSION, 3, ""),
    ]
    clear = wire.Clear(wire.NO_SESSION, 4, wire.ClearScope.ALL)
    frames = [
        *(wire.encode(request) for request in requests),
        *(prove(victim.secret, wire.encode(request)) for request in requests),
        *(wire.encode(request) for request in (*unattached, clear)),
        b"",
        b"\x91" * 1000,
    ]
    hello = wire.encode(wire.Hello(wire.NO_SESSION, 5, wire.PROTOCOL_VERSION))
    *refusals, greeting = ask_as_another_user(f"tcp://127.0.0.1:{server.ready['port']}", [*frames, hello])
    assert isinstance(greeting, wire.HelloReply) and greeting.seq == 5
    assert len(refusals) == len(frames)
    for refusal in refusals:
        assert isinstance(refusal, wire.Error) and refusal.code == "not_permitted"
        assert "--curve-secret-file" in refusal.message and "unix socket" in refusal.message
    held.assert_untouched()
    held.end()


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


@pytest.mark.long
def test_a_long_frame_over_tcp_without_keys_closes_its_connection_and_no_other(server: ServerProcess) -> None:
    endpoint = f"tcp://127.0.0.1:{server.ready['port']}"
    sender, observer, status = (RpcClient(server.socket_dir) for _ in range(3))
    status.connect()
    status.session = wire.NO_SESSION
    before = status.status()["counters"]["errors"]
    sender.connect(endpoint)
    observer.connect(endpoint)
    hello = wire.Hello(wire.NO_SESSION, 1, wire.PROTOCOL_VERSION)
    observer.ask(hello, wire.HelloReply)
    sender.send_frames(bytes(MAX_UNPROVEN_BYTES + 1))
    for _ in range(240):  # libzmq connects again, after it has dropped what waited for the old connection
        sender.send(hello)
        with contextlib.suppress(TimeoutError):
            assert isinstance(sender.receive(timeout_s=0.5), wire.HelloReply)
            break
    else:
        pytest.fail("the sender of a long frame was not let in again")
    observer.ask(hello, wire.HelloReply)
    assert status.status()["counters"]["errors"] == before, "the frame never reached the boundary"
    status.close()
    sender.close()
    observer.close()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[ServerProcess, bytes, tuple[bytes, bytes]]]:
    """A server whose tcp port asks for keys, its public key, and the keys of a client that it knows."""
    public, secret = zmq.curve_keypair()
    known = zmq.curve_keypair()
    keys = tmp_path / "keys"
    keys.write_text(f"secret {secret.decode()}\nclient {known[0].decode()}\n")
    keys.chmod(0o600)
    flags = ("--no-http", "--curve-secret-file", str(keys))
    with ServerProcess(tmp_path / "server", l1_mb=16, flags=flags) as server:
        server.start()
        yield server, public, known
        assert server.stop() == 0, server.log_tail()


@pytest.mark.long
def test_over_tcp_with_keys_a_session_works_by_its_proof(
    keyed: tuple[ServerProcess, bytes, tuple[bytes, bytes]],
) -> None:
    server, public, known = keyed
    with RpcClient(server.socket_dir) as client:
        held = Held(client)
        unproven = held.requests()
        client.connect(f"tcp://127.0.0.1:{server.ready['port']}", keys=(public, *known))
        for request in unproven:
            client.send_frames(wire.encode(request))
            reply = client.receive()
            assert isinstance(reply, wire.Error) and reply.code == "not_permitted", reply
        retrieve = wire.Retrieve(
            client.session, client.next_seq(), held.identity.identity_id, held.chunk, part().digest(), 0, 9
        )
        assert client.ask(retrieve, wire.RetrieveReply).found
        held.assert_untouched()
        held.end()


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
    with ServerProcess(tmp_path, l1_mb=16, flags=("--no-http",), environment=environment) as server:
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
