"""Memory moves between pools while a real server runs, and never is more than L1."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.memory.own_segments import segment_name
from tests.harness.cache_engine import eventually
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, chain_of
from tests.harness.server_process import ServerProcess
from tests.harness.tenants import BLUE, GREEN, Tenant, tenant_settings

pytestmark = [pytest.mark.integration, pytest.mark.long]

MIB = 1 << 20
L1_MB = 64
SIZES = (
    "quotas_gb: {green: 0.015625, blue: 0.015625}\n"
    "tenants: [{name: green, pool: own, max_gb: 0.0390625}, {name: blue, pool: own}]\n"
)
"""16 MiB for each of the two, of which green's may become 40; the shared pool has 32."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = tenant_settings(tmp_path, SIZES)
    with ServerProcess(tmp_path, l1_mb=L1_MB, flags=flags) as server:
        server.start()
        yield server


def memory_bytes(server: ServerProcess) -> dict[str, int]:
    """Bytes that the file system has given to the extents of each pool."""
    return {file.parent.name: file.stat().st_blocks * 512 for file in server.segment_dir.rglob("extents")}


def total_bytes(server: ServerProcess) -> int:
    return sum(memory_bytes(server).values())


def row_of(server: ServerProcess, tenant: str) -> dict[str, Any]:
    [row] = [row for row in server.get("/v1/status")["own_pools"] if row["tenant"] == tenant]
    return row


def ctl(server: ServerProcess, *arguments: str) -> Any:
    command = [sys.executable, "-m", "kvstrata", "ctl", "--url", server.url, "--json", *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    return json.loads(found.stdout) if found.returncode == 0 else found.stderr


def fill(client: RpcClient, name: str, chunks: int) -> Callable[[], int]:
    """Store prompts of 10 chunks one after the other; returns a function that counts those that are found."""
    identity = client.identify(tenant=name, salt="s")
    chains = [chain_of(identity.root, 10, first_token=100_000 * number) for number in range(chunks // 10)]
    for chain in chains:
        client.store(identity, chain)

    def found() -> int:
        count = 0
        for chain in chains:
            reply = client.lookup(identity.identity_id, chain)
            client.release([(client.session, reply.seq)])
            count += reply.n_chunks
        return count

    return found


def test_a_quota_moves_memory_between_pools_within_l1(server: ServerProcess) -> None:
    with (
        Tenant(server, "green", GREEN, "s") as green,
        Tenant(server, "blue", BLUE, "s") as blue,
        RpcClient(server.socket_dir) as nobody,
    ):
        fill(nobody, "", 800)
        of_blue = fill(blue, "blue", 200)
        fill(green, "green", 800)
        assert row_of(server, "green")["used_bytes"] <= 16 * MIB
        assert total_bytes(server) <= L1_MB * MIB
        blues = of_blue()

        assert ctl(server, "quota", "green", "0.0390625")["now_bytes"] == 40 * MIB
        assert total_bytes(server) <= L1_MB * MIB
        of_green = fill(green, "green", 800)
        assert row_of(server, "green")["used_bytes"] > 24 * MIB
        assert of_green() * RECORD_BYTES > 24 * MIB
        assert total_bytes(server) <= L1_MB * MIB
        assert server.get("/v1/status")["pool"]["limit_bytes"] == 8 * MIB
        assert of_blue() == blues, "blue loses nothing"

        assert ctl(server, "quota", "green", "0.0078125")["now_bytes"] == 8 * MIB
        assert memory_bytes(server)[f"own-{segment_name('green')}"] <= 8 * MIB
        assert 0 < of_green() * RECORD_BYTES <= 8 * MIB
        assert server.get("/v1/status")["pool"]["limit_bytes"] == 32 * MIB, "no more than at the start"
        again = fill(nobody, "", 800)
        assert again() * RECORD_BYTES > 16 * MIB
        assert of_blue() == blues
        [quota] = [
            row["quota_bytes"] for row in server.get("/v1/status")["tenants"] if row["tenant"] == "green"
        ]
        assert quota == 8 * MIB


def test_memory_that_is_in_use_moves_once_it_is_not(server: ServerProcess) -> None:
    with Tenant(server, "green", GREEN, "s") as green, RpcClient(server.socket_dir) as nobody:
        fill(nobody, "", 480)
        identity = nobody.identify(tenant="", salt="s")
        leases = []
        for number in range(48):
            chain = chain_of(identity.root, 10, first_token=100_000 * number)
            leases.append((nobody.session, nobody.lookup(identity.identity_id, chain).seq))
        leased_bytes = server.get("/v1/status")["pool"]["leased_bytes"]
        assert leased_bytes > 12 * MIB
        now = ctl(server, "quota", "green", "0.0390625")
        assert (now["quota_bytes"], now["now_bytes"] < 40 * MIB) == (40 * MIB, True)
        assert total_bytes(server) <= L1_MB * MIB
        assert server.get("/v1/status")["pool"]["leased_bytes"] == leased_bytes
        nobody.release(leases)
        eventually("green has all", lambda: row_of(server, "green")["limit_bytes"] == 40 * MIB)
        fill(green, "green", 800)
        assert total_bytes(server) <= L1_MB * MIB


@pytest.mark.parametrize(
    ("tenant", "gigabytes", "says"),
    [
        ("green", "0.05", "the most is set by tenants[].max_gb"),
        ("blue", "0.02", "the most is set by tenants[].max_gb"),
        ("green", "0.0001", "may have 1048576 to"),
        ("green", "-1", "greater than 0"),
    ],
)
def test_a_quota_that_a_pool_cannot_have_is_refused(
    server: ServerProcess, tenant: str, gigabytes: str, says: str
) -> None:
    before = server.get("/v1/status")["pool"]["limit_bytes"]
    assert says in ctl(server, "quota", "--", tenant, gigabytes)
    assert server.get("/v1/status")["pool"]["limit_bytes"] == before


def test_memory_that_a_gpu_has_registered_does_not_move(server: ServerProcess) -> None:
    with RpcClient(server.socket_dir, registers_memory=True):
        assert "give them gpu_pin: false" in ctl(server, "quota", "green", "0.02")
    assert ctl(server, "quota", "green", "0.02")["now_bytes"] == 20 * MIB


def test_a_moved_quota_ends_with_the_server(server: ServerProcess) -> None:
    with Tenant(server, "green", GREEN, "s") as green:
        ctl(server, "quota", "green", "0.0390625")
        fill(green, "green", 800)
        server.kill()
        server.start()
        row = row_of(server, "green")
        assert row["limit_bytes"] == 16 * MIB and row["adopted_entries"] > 0
        assert total_bytes(server) <= L1_MB * MIB
        green.attach()
        green.connect()
        assert 0 < fill(green, "green", 10)() == 10


def test_a_reload_resizes_own_pools(server: ServerProcess, tmp_path: Path) -> None:
    [settings] = [path for path in tmp_path.rglob("*.y*ml") if SIZES in path.read_text()]
    settings.write_text(settings.read_text().replace("{green: 0.015625", "{green: 0.0390625"))
    server.signal(signal.SIGHUP)
    eventually("green's pool grows", lambda: row_of(server, "green")["limit_bytes"] == 40 * MIB)
    assert total_bytes(server) <= L1_MB * MIB
