"""One engine speaks for two tenants: hits, quotas, explain and clears go by the tenant of each request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.cli.asking import Ask, ask
from kvstrata.errors import KvstrataError, NotPermitted
from kvstrata.rpc import wire
from tests.harness.http_read import read
from tests.harness.rpc_client import RpcClient, RpcError, chain_of, until
from tests.harness.server_process import ServerProcess
from tests.harness.tenants import BLUE

pytestmark = pytest.mark.integration

BOTH = "secret-of-blue-and-green-01"
CHUNKS = 5
QUOTAS = "quotas_gb: {blue: 0.015625}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with tokens: one opens blue alone, the other blue and green."""
    folder = tmp_path_factory.mktemp("tenants")
    tokens, config = folder / "tokens", folder / "server.yaml"
    tokens.write_text(f"{BLUE} blue\n{BOTH} blue green\n")
    tokens.chmod(0o600)
    config.write_text(f"security: {{tenants_file: {tokens}}}\n{QUOTAS}")
    adapter = {"type": "fs", "base_path": str(folder / "l2"), "capacity_gb": 1}
    flags = ("--config", str(config), "--l2-adapter", json.dumps(adapter))
    with ServerProcess(folder / "server", l1_mb=64, l2="embedded", flags=flags) as server:
        server.start()
        yield server


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.socket_dir, token=BOTH) as engine:
        yield engine


def stored(
    engine: RpcClient, salt: str, n_chunks: int = CHUNKS
) -> dict[str, tuple[wire.IdentifyReply, bytes]]:
    """Store one prompt for blue and the same one for green, in L1 and in all tiers."""
    before = outcomes(engine.status())
    prompts = {}
    for tenant in ("blue", "green"):
        identity = engine.identify(tenant=tenant, salt=salt)
        prompts[tenant] = identity, chain_of(identity.root, n_chunks)
        engine.store(*prompts[tenant])
    until(
        engine, lambda status: all(n - before[name] >= 2 * n_chunks for name, n in outcomes(status).items())
    )
    return prompts


def outcomes(status: dict[str, Any]) -> dict[str, int]:
    """How many puts of each tier have ended; those that were throttled are tried again."""
    return {
        name: sum(row["outcomes"].values()) - row["outcomes"].get("throttled", 0)
        for name, row in status["l2_store"]["adapters"].items()
    }


def hits(engine: RpcClient, identity: wire.IdentifyReply, chain: bytes, request_id: str = "") -> int:
    reply = engine.lookup(identity.identity_id, chain, request_id=request_id, deadline_ms=20_000)
    engine.release([(engine.session, reply.seq)], group=True)
    return reply.n_chunks


def clear(server: ServerProcess, tier: str, tenant: str | None) -> dict[str, Any]:
    return ask(server.url, Ask("/v1/clear", {"tier": tier, "tenant": tenant}, timeout_s=120))


def test_equal_prompts_of_two_tenants_on_one_engine_hit_apart(server, engine):
    blue = engine.identify(tenant="blue", salt="apart")
    green = engine.identify(tenant="green", salt="apart")
    assert blue.root != green.root
    chain = chain_of(blue.root, CHUNKS)
    engine.store(blue, chain)
    for keys in (chain, chain_of(green.root, CHUNKS)):
        assert hits(engine, green, keys, "green asks") == 0
        assert hits(engine, engine.identify(tenant="green", salt="new"), keys, "nobody knows") == 0
        told = [engine.explain(name)["lookups"][-1]["first_miss"] for name in ("green asks", "nobody knows")]
        assert {one["reason"] for one in told} == {"unknown_key"}
        assert told[0]["detail"] == told[1]["detail"]
    assert hits(engine, blue, chain) == CHUNKS


@pytest.mark.long
@pytest.mark.parametrize("tenant", ["", "red", "Green", "green\0", "x" * 4097])
def test_the_token_decides_which_tenants_an_engine_speaks_for(engine, tenant):
    with pytest.raises((NotPermitted, RpcError)) as refused:
        engine.identify(tenant=tenant)
    assert getattr(refused.value, "code", "") in ("not_permitted", "bad_request")
    assert len(str(refused.value)) < 400


def test_explain_and_status_go_by_the_tenant_of_the_request(server, engine):
    for tenant, (identity, chain) in stored(engine, "explained").items():
        assert hits(engine, identity, chain, f"of {tenant}") == CHUNKS
        assert engine.explain(f"of {tenant}")["lookups"][0]["tenant"] == tenant
    assert {row["tenant"] for row in engine.status()["tenants"]} == {"blue", "green"}
    pattern = r'kvstrata_tenant_(\w+)_total\{tenant="(\w+)"(,tier="l1")?\} (\d+)'
    counted = re.findall(pattern, read(f"{server.url}/metrics").decode())
    found = {tenant: float(count) for name, tenant, in_l1, count in counted if name == "hit_chunks" and in_l1}
    asked = {tenant: float(count) for name, tenant, _, count in counted if name == "lookup_chunks"}
    assert found.keys() == asked.keys() == {"blue", "green"}
    assert all(CHUNKS <= found[tenant] <= asked[tenant] for tenant in found)


def test_l2_is_cleared_as_a_whole_only_and_another_salt_hides_a_tenants_records(server, engine):
    chain = stored(engine, "cleared")["blue"][1]
    with pytest.raises(KvstrataError, match="tenant: L2 can only be cleared as a whole"):
        clear(server, "all", "blue")
    clear(server, "l1", "blue")
    blue = engine.identify(tenant="blue", salt="cleared")
    assert hits(engine, blue, chain) == CHUNKS, "its records in L2 stay"
    other = engine.identify(tenant="blue", salt="another")
    assert hits(engine, other, chain_of(other.root, CHUNKS)) == 0
