"""A real server, and processes of other users or with the name of another's session: nobody acts in its place."""

from __future__ import annotations

import json
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import NotPermitted, Refused, WrongVersion
from kvstrata.memory.attach.client import attach, process_locks
from kvstrata.rpc import attach_wire
from kvstrata.server.processes import LIMITS
from kvstrata.types import Role, shown_name
from tests.harness.rpc_client import RpcClient, layout, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

OTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


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
    made = attach_wire.AttachRequest(
        protocol=4,
        session=secrets.token_bytes(16),
        group=secrets.token_bytes(16),
        role=Role.SCHEDULER,
        layout=layout(),
        engine_slices=1,
    )
    with pytest.raises(WrongVersion, match="speaks version 4, this server 6; use the same kvstrata release"):
        attach(server.socket_dir, made, process_locks())


def test_another_user_cannot_reach_the_unix_sockets(server: ServerProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    path = server.socket_dir / "rpc.sock"

    made = "import socket, sys; s = socket.socket(socket.AF_UNIX)"

    def ask(code: str) -> str:
        ran = subprocess.run(
            [*OTHER_USER, sys.executable, "-c", f"{made}; {code}", str(path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return ran.stderr + ran.stdout

    assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
    for mode in (0o700, 0o711):  # also if somebody has opened the folder
        server.socket_dir.chmod(mode)
        assert "PermissionError" in ask("s.connect(sys.argv[1])")
    path.chmod(0o666)  # also if somebody has opened the socket itself
    told = ask("s.connect(sys.argv[1]); s.settimeout(60); f = s.makefile('rb'); print(f.read())")
    server.socket_dir.chmod(0o700)
    path.chmod(0o600)
    assert "uid 65534 may not attach to a server of uid 0" in told, told


def test_another_process_cannot_attach_as_a_session_that_it_knows(server, victim):
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
    with ServerProcess(tmp_path, l1_mb=16) as server:
        server.start()
        taken = [RpcClient(server.socket_dir) for _ in range(LIMITS.per_process)]
        for client in taken:
            client.attach()
        with pytest.raises(
            Refused, match="has 64 sessions attached, and one process may have 64; close some"
        ):
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
