"""What processes, sessions, tokens and users may do and take at one server, and what they cannot reach."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.errors import WrongVersion
from kvstrata.memory.segment_files import EXTENTS, INDEX, SESSIONS_LOCK
from kvstrata.rpc import wire
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.server.plan import MAX_SESSION_SHARE
from kvstrata.server.requests.reserve import GRANULE_BYTES
from kvstrata.session.attach import attach, process_locks
from kvstrata.types import Role, shown_name
from tests.harness.cache_engine import CHUNK_TOKENS
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, chain_of, layout, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


def run(uid: int, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    under = () if uid == os.geteuid() else as_user(uid)
    command = [*under, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)


def as_user(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


@pytest.fixture
def victim(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.socket_dir) as made:
        yield made


def test_what_the_server_shows_of_a_session_is_not_its_name(server: ServerProcess, victim: RpcClient) -> None:
    until(victim, lambda status: len(status["peers"]) == 1)
    text = json.dumps(victim.status()) + server.log_tail()
    for name in (victim.session, victim.group):
        assert name.hex() not in text and name.hex()[:16] not in text
    assert shown_name(victim.session) in text


def test_another_version_is_refused_by_name(server: ServerProcess) -> None:
    made = wire.AttachRequest(
        protocol=4,
        session=secrets.token_bytes(16),
        group=secrets.token_bytes(16),
        role=Role.SCHEDULER,
        layout=layout(),
        engine_slices=1,
    )
    with pytest.raises(
        WrongVersion,
        match=f"speaks version 4, this server {wire.PROTOCOL_VERSION}; use the same kvstrata release",
    ):
        attach(server.socket_dir, made, process_locks())


def test_another_user_cannot_reach_the_unix_sockets(server: ServerProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    path = server.socket_dir / "rpc.sock"
    made = "import socket, sys; s = socket.socket(socket.AF_UNIX)"

    def ask(code: str) -> str:
        done = run(65534, f"{made}; {code}", path)
        return done.stderr + done.stdout

    assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
    for mode in (0o700, 0o711):  # also if somebody has opened the folder
        server.socket_dir.chmod(mode)
        assert "PermissionError" in ask("s.connect(sys.argv[1])")
    path.chmod(0o666)  # also if somebody has opened the socket itself
    told = ask("s.connect(sys.argv[1]); s.settimeout(60); f = s.makefile('rb'); print(f.read())")
    server.socket_dir.chmod(0o700)
    path.chmod(0o600)
    assert "uid 65534 may not attach to a server of uid 0" in told, told


L1_MB = 16
EACH_BYTES = -(-RECORD_BYTES // GRANULE_BYTES) * GRANULE_BYTES
OF_PROCESS = (L1_MB << 20) // MAX_SESSION_SHARE // EACH_BYTES
"""Chunks that a process may have reserved."""
# Reserves as many chunks as it may, says how many, and lives until its stdin ends.
OTHER = """
import os, sys
from pathlib import Path
from tests.integration.server.test_processes import OF_PROCESS, reserve
from tests.harness.rpc_client import RpcClient
with RpcClient(Path(sys.argv[1])) as client:
    print(reserve(client, OF_PROCESS + 1, 1_000_000 + os.getpid() * 10_000)[1], flush=True)
    sys.stdin.read()
"""


def reserve(client: RpcClient, n_chunks: int, first_token: int) -> tuple[int, int]:
    """Reserve chunks of a new prompt; return the seq, and how many were reserved. The others hear of the limit."""
    identity = client.identify()
    seq, reply = client.reserve(identity.identity_id, chain_of(identity.root, n_chunks, first_token))
    n_reserved = reply.outcomes.count(ReserveOutcome.RESERVED)
    assert reply.outcomes.count(ReserveOutcome.SESSION_LIMIT) == n_chunks - n_reserved
    return seq, n_reserved


@contextmanager
def another_process(server: ServerProcess) -> Iterator[int]:
    """Run a process that reserves what it may; yield how many chunks it got."""
    command = [sys.executable, "-c", OTHER, str(server.socket_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_the_sessions_of_one_process_share_what_one_session_may_reserve(start):
    server = start(l1_mb=L1_MB)
    with RpcClient(server.socket_dir) as first, RpcClient(server.socket_dir) as second:
        half, n_first = reserve(first, OF_PROCESS // 2, 0)
        assert n_first == OF_PROCESS // 2, "one session alone is not refused"
        _, n_second = reserve(second, OF_PROCESS, 100_000)
        assert n_second == OF_PROCESS - OF_PROCESS // 2
        with RpcClient(server.socket_dir) as third:
            assert reserve(third, 2, 200_000)[1] == 0
            with another_process(server) as n_other:
                assert n_other == OF_PROCESS, "another process has a share of its own"
            assert first.abort(half, [0, 1]) == 2
            assert reserve(third, 3, 300_000)[1] == 2
        assert reserve(first, 3, 400_000)[1] == 2, "a session that ends gives its bytes back"
        assert first.status()["counters"]["reserve_outcomes"]["session_limit"] > 0


UIDS = {"blue": 64_001, "green": 64_002}
# An engine of one tenant uses its own server, then tries every way to the other one.
ENGINE = """
import os, socket, sys
from pathlib import Path
from tests.harness.cache_engine import CacheEngine, prompt
own, theirs, segment, server, *names = sys.argv[1:]
def attach(folder):
    with CacheEngine(Path(folder)) as engine:
        engine.connect()
        return engine.stored(prompt(2)), engine.hit(prompt(2))
def connect(name, kind):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect(f"{theirs}/{name}")
assert attach(own) == (["stored"] * 2, 2)
ways = {
    "rpc": lambda: connect("rpc.sock", socket.SOCK_STREAM),
    **{name: (lambda name=name: os.open(f"{segment}/{name}", os.O_RDONLY)) for name in names},
    "descriptors": lambda: os.listdir(f"/proc/{server}/fd"),
    "memory": lambda: os.open(f"/proc/{server}/mem", os.O_RDONLY),
    "signal": lambda: os.kill(int(server), 9),
}
for way, go in ways.items():
    try:
        go()
    except PermissionError:
        continue
    sys.exit(f"{way} is open to uid {os.getuid()}")
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become two other users"
)
def test_neither_engine_reaches_the_other_tenants_pool() -> None:
    servers: dict[str, ServerProcess] = {}
    try:
        for name, uid in UIDS.items():
            folder = Path(f"/tmp/kvstrata-run-{os.getpid()}-{name}")
            folder.mkdir(mode=0o700)  # not below tmp_path, which other users cannot enter
            os.chown(folder, uid, uid)
            server = ServerProcess(
                folder,
                l1_mb=64,
                chunk_tokens=CHUNK_TOKENS,
                within=as_user(uid),
            )
            servers[name] = server
            server.start()
        for name, other in (("blue", "green"), ("green", "blue")):
            own, theirs = servers[name], servers[other]
            places = (own.socket_dir, theirs.socket_dir, theirs.segment_dir, theirs.ready["pid"])
            done = run(UIDS[name], ENGINE, *places, INDEX, EXTENTS, SESSIONS_LOCK)
            assert done.returncode == 0, done.stderr
    finally:
        for server in servers.values():
            server.close()
            shutil.rmtree(server.folder)
