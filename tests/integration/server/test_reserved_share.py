"""How much of L1 processes and tokens may have reserved at a real server, whatever number of sessions they open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.server.plan import MAX_SESSION_SHARE
from kvstrata.server.requests.reserve import GRANULE_BYTES, TOKEN_SHARE
from tests.harness.cache_engine import eventually
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, chain_of
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

L1_MB = 16
EACH_BYTES = -(-RECORD_BYTES // GRANULE_BYTES) * GRANULE_BYTES
OF_PROCESS = (L1_MB << 20) // MAX_SESSION_SHARE // EACH_BYTES
"""Chunks that a process may have reserved."""
OF_TOKEN = (L1_MB << 20) // TOKEN_SHARE // EACH_BYTES
BLUE, GREEN = "secret-of-blue-0123456", "secret-of-green-012345"
# Reserves as many chunks as it may, says how many, and lives until its stdin ends.
OTHER = """
import os, sys
from pathlib import Path
from tests.integration.server.test_reserved_share import OF_PROCESS, reserve
from tests.harness.rpc_client import RpcClient
with RpcClient(Path(sys.argv[1]), token=sys.argv[2]) as client:
    print(reserve(client, OF_PROCESS + 1, 1_000_000 + os.getpid() * 10_000, tenant=sys.argv[3])[1], flush=True)
    sys.stdin.read()
"""


def reserve(client: RpcClient, n_chunks: int, first_token: int, *, tenant: str = "") -> tuple[int, int]:
    """Reserve chunks of a new prompt; return the seq, and how many were reserved. The others hear of the limit."""
    identity = client.identify(tenant=tenant)
    seq, reply = client.reserve(identity.identity_id, chain_of(identity.root, n_chunks, first_token))
    n_reserved = reply.outcomes.count(ReserveOutcome.RESERVED)
    assert reply.outcomes.count(ReserveOutcome.SESSION_LIMIT) == n_chunks - n_reserved
    return seq, n_reserved


@contextmanager
def another_process(
    server: ServerProcess, token: str = "", tenant: str = ""
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run a process that reserves what it may; yield how many chunks it got."""
    command = [sys.executable, "-c", OTHER, str(server.socket_dir), token, tenant]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


def test_the_sessions_of_one_process_share_what_one_session_may_reserve(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=L1_MB) as server:
        server.start()
        with RpcClient(server.socket_dir) as first, RpcClient(server.socket_dir) as second:
            half, n_first = reserve(first, OF_PROCESS // 2, 0)
            assert n_first == OF_PROCESS // 2, "one session alone is not refused"
            _, n_second = reserve(second, OF_PROCESS, 100_000)
            assert n_second == OF_PROCESS - OF_PROCESS // 2
            with RpcClient(server.socket_dir) as third:
                assert reserve(third, 2, 200_000)[1] == 0
                with another_process(server) as (n_other, _):
                    assert n_other == OF_PROCESS, "another process has a share of its own"
                assert first.abort(half, [0, 1]) == 2
                assert reserve(third, 3, 300_000)[1] == 2
            assert reserve(first, 3, 400_000)[1] == 2, "a session that ends gives its bytes back"
            assert first.status()["counters"]["reserve_outcomes"]["session_limit"] > 0


@pytest.mark.long
def test_the_processes_of_one_token_share_half_of_l1(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants"
    tenants.write_text(f"{BLUE} blue\n{GREEN} green\n")
    tenants.chmod(0o600)
    environment = {**os.environ, "KVSTRATA_SECURITY_TENANTS_FILE": str(tenants)}
    with ServerProcess(tmp_path / "server", l1_mb=L1_MB, environment=environment) as server:
        server.start()
        with (
            another_process(server, BLUE, "blue") as (n_first, killed),
            another_process(server, BLUE, "blue") as (n_second, _),
            another_process(server, BLUE, "blue") as (n_third, _),
            another_process(server, BLUE, "blue") as (n_fourth, _),
            RpcClient(server.socket_dir, token=BLUE) as blue,
            RpcClient(server.socket_dir, token=GREEN) as green,
        ):
            assert n_first == n_second == n_third == n_fourth == OF_PROCESS
            left = OF_TOKEN - 4 * OF_PROCESS
            assert reserve(blue, left + 1, 0, tenant="blue")[1] == left
            half = OF_PROCESS // 2  # `blue` is a session of this process, too
            assert reserve(green, half, 0, tenant="green")[1] == half, "green has its own half of L1"
            killed.kill()
            numbers = iter(range(100_000, 10_000_000, 1_000))
            eventually(
                "the bytes of a killed process come back",
                lambda: reserve(blue, 1, next(numbers), tenant="blue")[1] == 1,
            )
