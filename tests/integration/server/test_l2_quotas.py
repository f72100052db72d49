"""Tenants' quotas on the L2 of a real server: room is made of the tenant's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.types import GB
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long]

RECORD_BYTES = 20_480
"""Bytes of one chunk's record of `CacheEngine`."""
SMALL_RECORDS = 12


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    config = tmp_path / "server.yaml"
    small, tiny = (records * RECORD_BYTES / GB for records in (SMALL_RECORDS, 0.5))
    config.write_text(f"l2:\n  quotas_gb: {{small: {small:.12f}, tiny: {tiny:.12f}}}\n")
    flags = ("--config", str(config))
    with ServerProcess(
        tmp_path / "server", l1_mb=64, l2="fs", chunk_tokens=CHUNK_TOKENS, flags=flags
    ) as server:
        server.start()
        yield server


def outcomes(server: ServerProcess) -> dict[str, int]:
    return server.get("/v1/status")["l2_store"]["adapters"]["fs-0"]["outcomes"]


def l2_bytes(server: ServerProcess, tenant: str) -> int:
    rows = server.get("/v1/status")["l2_tenants"]
    [row] = [row for row in rows if (row["tenant"], row["adapter"]) == (tenant, "fs-0")]
    return row["bytes"]


def ended(server: ServerProcess) -> int:
    """Chunks whose put has ended, with whatever outcome."""
    counts = outcomes(server)
    return sum(count for word, count in counts.items() if word in ("stored", "exists", "skipped:quota"))


def test_a_quota_limits_its_tenant_and_no_other(server):
    with (
        CacheEngine(server.socket_dir, tenant="small") as small,
        CacheEngine(server.socket_dir, tenant="large", group=b"another engine 1") as large,
    ):
        small.connect()
        large.connect()
        for seed in range(10):
            assert small.stored(prompt(3, seed)) == ["stored"] * 3, "the quota does not limit L1"
            assert large.stored(prompt(3, seed)) == ["stored"] * 3
            eventually("all is decided", lambda seed=seed: ended(server) == 6 * (seed + 1))
        records = sum(1 for _ in (server.folder / "l2").glob("??/??/*.kvc"))
        assert l2_bytes(server, "small") == (records - 30) * RECORD_BYTES
        assert SMALL_RECORDS // 2 <= records - 30 <= SMALL_RECORDS
        assert outcomes(server)["trimmed"] == 60 - records
        server.kill()
        eventually("the loss is seen", lambda: not (small.client.connected or large.client.connected))
        server.wipe_segment()
        server.start()
        small.connect()
        large.connect()
        assert l2_bytes(server, "small") == 0, "nobody has used them since"
        assert small.hit(prompt(3, 9)) == 3, "the newest chunks are in L2"
        assert l2_bytes(server, "small") == 3 * RECORD_BYTES
        assert [large.hit(prompt(3, seed)) for seed in range(10)] == [3] * 10
