"""Tenants of one server: their tokens, one engine that speaks for two, and what none gets of another."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstrata.cli.asking import Ask, ask
from kvstrata.errors import BadRequest, KvstrataError, LayoutRefused, NotPermitted
from kvstrata.native.core import RecordSpec, seal_record, storage_keys
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, Role, unpack_extents
from tests.harness.cache_engine import PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.http_read import read
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    RECORD_BYTES,
    SECTIONS,
    RpcClient,
    RpcError,
    chain_of,
    keys_of,
    until,
)
from tests.harness.server_process import ServerProcess
from tests.harness.tenants import BLUE, BOTH, GREEN, Tenant, tenant_settings

pytestmark = pytest.mark.integration

QUOTAS = "quotas_gb: {green: 0.01953125, blue: 0.015625}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    adapter = f'{{"type": "fs", "base_path": "{folder / "l2"}", "capacity_gb": 1}}'
    flags = (*tenant_settings(folder, QUOTAS), "--l2-adapter", adapter)
    with ServerProcess(
        folder, l1_mb=64, l2="embedded", chunk_tokens=CHUNK_TOKENS, flags=flags
    ).started() as server:
        yield server


@pytest.fixture
def blue(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    with Tenant(server, "blue", BLUE, request.node.name) as blue:
        blue.begin()
        yield blue


@pytest.fixture
def green(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    with Tenant(server, "green", GREEN, request.node.name) as green:
        green.begin()
        yield green


def in_l2(server: ServerProcess, tenant: Tenant, chain: bytes) -> bool:
    """Whether L2 has all records that the tenant stored under these chain keys."""
    assert tenant.slice is not None
    keys = storage_keys(tenant.root, chain, tenant.slice.digest())
    return {f"{key.hex()}.kvc" for key in keys_of(keys)} <= {
        path.name for path in (server.folder / "l2").rglob("*.kvc")
    }


def test_blue_finds_nothing_by_green_s_keys_and_hears_what_any_unknown_key_gives(blue, green):
    chain, unknown = chain_of(green.root, 4), chain_of(bytes(32), 4)
    green.store(green.identity, chain)
    for keys in (chain, unknown):
        found = blue.looks_up(keys, "spies")
        assert (found.n_chunks, found.extents, found.reason) == (0, b"", "unknown_key")
        assert blue.retrieves(keys[:KEY_BYTES]) == wire.RetrieveReply(blue.seq, blue.epoch, False, 0, b"")
    assert green.retrieves(chain[:KEY_BYTES]).found
    green.reads_its_own(chain)


def test_green_s_chunks_and_absent_ones_are_reserved_alike(blue, green):
    chain = chain_of(green.root, 4)
    green.store(green.identity, chain)
    in_flight, _ = green.reserve(green.identity.identity_id, chain_of(green.root, 1, first_token=10**6))
    for keys in (chain, chain_of(green.root, 1, first_token=10**6), chain_of(bytes(32), 4)):
        seq, reply = blue.reserve(blue.identity.identity_id, keys)
        assert set(reply.outcomes) == {wire.ReserveOutcome.RESERVED}, (
            "PRESENT or IN_FLIGHT would tell of green"
        )
        assert blue.abort(seq) == len(keys) // KEY_BYTES
    green.abort(in_flight)
    green.reads_its_own(chain)


@pytest.mark.parametrize("first", ["green", pytest.param("blue", marks=pytest.mark.long)])
def test_what_blue_stores_under_green_s_keys_is_never_green_s(blue, green, first):
    chain = chain_of(green.root, 4)
    if first == "green":
        green.store(green.identity, chain)
    blue.store(blue.identity, chain)
    if first == "blue":
        assert green.looks_up(chain).n_chunks == 0
        assert set(green.store(green.identity, chain)) == {wire.ReserveOutcome.RESERVED}
    green.reads_its_own(chain)
    assert blue.cleared() >= 4
    green.reads_its_own(chain)


def test_a_record_in_green_s_name_is_not_committed(blue, green):
    key = chain_of(green.root, 1)
    assert blue.slice is not None and blue.extents is not None
    digest = blue.slice.digest()
    own, foreign = (storage_keys(root, key, digest) for root in (blue.root, green.root))
    for record_key, root in ((foreign, green.root), (own, green.root), (foreign, blue.root)):
        seq, reply = blue.reserve(blue.identity.identity_id, key)
        [extent] = unpack_extents(reply.extents)
        spec = RecordSpec(record_key, root, digest, bytes(KEY_BYTES), CHUNK_TOKENS)
        seal_record(blue.extents.address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)
        assert blue.commit(seq, [0]) == bytes([wire.CommitOutcome.BAD_RECORD])
    assert green.looks_up(key).n_chunks == blue.looks_up(key).n_chunks == 0


def test_blue_cannot_have_green_s_chunks_checked_or_dropped(blue, green):
    chain = chain_of(green.root, 2)
    green.store(green.identity, chain)
    assert green.extents is not None
    extent = green.extent_of(chain[:KEY_BYTES])
    view = green.extents.view(extent.offset_bytes, extent.length_bytes)
    view[RECORD_BYTES - 100] ^= 1
    assert blue.reports_corrupt(chain) == 0
    assert green.looks_up(chain).n_chunks == 2
    assert green.reports_corrupt(chain) == 1


def test_green_s_chunks_in_l2_are_neither_found_nor_loaded_nor_deleted_by_blue(server, blue, green):
    chain = chain_of(green.root, 4)
    green.store(green.identity, chain)
    until(green, lambda _: in_l2(server, green, chain))
    assert green.cleared() >= 4
    assert blue.looks_up(chain).n_chunks == blue.looks_up(chain_of(bytes(32), 4)).n_chunks == 0
    blue.store(blue.identity, chain)
    until(blue, lambda _: in_l2(server, blue, chain))
    assert blue.cleared() >= 4
    assert in_l2(server, green, chain)
    green.reads_its_own(chain)
    assert blue.looks_up(chain).n_chunks == 4, "blue's own records under these keys"


def test_green_s_leases_are_unknown_to_blue(blue, green):
    chain = chain_of(green.root, 3)
    green.store(green.identity, chain)
    lease = green.lookup(green.identity.identity_id, chain)
    for seq in (lease.seq, lease.seq + 1000):
        assert blue.release([(green.session, seq)], group=True) == 0
    assert green.release([(green.session, lease.seq)], group=True) == 1


@pytest.mark.parametrize("token", [BLUE, ""])
def test_blue_cannot_join_green_s_engine(server, green, token):
    """A member of a group would get its leases, end them, and decide which slices a chunk needs."""
    joining = RpcClient(server.socket_dir, token=token, group=green.group, role=Role.SCHEDULER)
    with pytest.raises(NotPermitted, match="group: its processes may use other tenants"):
        joining.attach()
    joining.close()
    taking = RpcClient(server.socket_dir, token=token)
    taking.session = green.session
    with pytest.raises((NotPermitted, BadRequest)):
        taking.attach()
    taking.close()
    second = RpcClient(server.socket_dir, token=GREEN, group=green.group, role=Role.SCHEDULER)
    second.attach()
    second.goodbye()


def test_facts_that_blue_declares_do_not_keep_green_out(server, blue):
    """Under one layout identity the facts of all engines of a tenant must agree; those of two tenants need not."""
    facts = {"payload_bytes": 100, "sections": [100]}
    with RpcClient(server.socket_dir, token=GREEN, facts=facts) as other:
        assert other.identify(tenant="green").complete
        with pytest.raises(LayoutRefused, match="facts"):
            RpcClient(server.socket_dir, token=GREEN).attach()


CHUNKS = 5


@pytest.fixture
def both(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.socket_dir, token=BOTH) as both:
        yield both


def stored(both: RpcClient, salt: str, n_chunks: int = CHUNKS) -> dict[str, tuple[wire.IdentifyReply, bytes]]:
    """Store one prompt for blue and the same one for green, in L1 and in all tiers."""
    before = outcomes(both.status())
    prompts = {}
    for tenant in ("blue", "green"):
        identity = both.identify(tenant=tenant, salt=salt)
        prompts[tenant] = identity, chain_of(identity.root, n_chunks)
        both.store(*prompts[tenant])
    until(both, lambda status: all(n - before[name] >= 2 * n_chunks for name, n in outcomes(status).items()))
    return prompts


def outcomes(status: dict[str, Any]) -> dict[str, int]:
    """How many puts of each tier have ended; those that were throttled are tried again."""
    return {
        name: sum(row["outcomes"].values()) - row["outcomes"].get("throttled", 0)
        for name, row in status["l2_store"]["adapters"].items()
    }


def hits(both: RpcClient, identity: wire.IdentifyReply, chain: bytes, request_id: str = "") -> int:
    reply = both.lookup(identity.identity_id, chain, request_id=request_id, deadline_ms=20_000)
    both.release([(both.session, reply.seq)], group=True)
    return reply.n_chunks


def clear(server: ServerProcess, tier: str, tenant: str | None) -> dict[str, Any]:
    return ask(server.url, Ask("/v1/clear", {"tier": tier, "tenant": tenant}, timeout_s=120))


def test_equal_prompts_of_two_tenants_on_one_engine_hit_apart(server, both):
    blue = both.identify(tenant="blue", salt="apart")
    green = both.identify(tenant="green", salt="apart")
    assert blue.root != green.root
    chain = chain_of(blue.root, CHUNKS)
    both.store(blue, chain)
    for keys in (chain, chain_of(green.root, CHUNKS)):
        assert hits(both, green, keys, "green asks") == 0
        assert hits(both, both.identify(tenant="green", salt="new"), keys, "nobody knows") == 0
        told = [both.explain(name)["lookups"][-1]["first_miss"] for name in ("green asks", "nobody knows")]
        assert {one["reason"] for one in told} == {"unknown_key"}
        assert told[0]["detail"] == told[1]["detail"]
    assert hits(both, blue, chain) == CHUNKS


@pytest.mark.long
@pytest.mark.parametrize("tenant", ["", "red", "Green", "green\0", "x" * 4097])
def test_the_token_decides_which_tenants_an_engine_speaks_for(both, tenant):
    with pytest.raises((NotPermitted, RpcError)) as refused:
        both.identify(tenant=tenant)
    assert getattr(refused.value, "code", "") in ("not_permitted", "bad_request")
    assert len(str(refused.value)) < 400


def test_explain_and_status_go_by_the_tenant_of_the_request(server, both):
    for tenant, (identity, chain) in stored(both, "explained").items():
        assert hits(both, identity, chain, f"of {tenant}") == CHUNKS
        assert both.explain(f"of {tenant}")["lookups"][0]["tenant"] == tenant
    assert {row["tenant"] for row in both.status()["tenants"]} >= {"blue", "green"}
    pattern = r'kvstrata_tenant_(\w+)_total\{tenant="(\w+)"(,tier="l1")?\} (\d+)'
    counted = re.findall(pattern, read(f"{server.url}/metrics").decode())
    found = {tenant: float(count) for name, tenant, in_l1, count in counted if name == "hit_chunks" and in_l1}
    asked = {tenant: float(count) for name, tenant, _, count in counted if name == "lookup_chunks"}
    assert asked.keys() >= found.keys() >= {"blue", "green"}
    assert all(CHUNKS <= found[tenant] <= asked[tenant] for tenant in ("blue", "green")), counted


def test_status_and_metrics_tell_what_other_shares_of_l1_would_save_each_tenant(server, both):
    chains = {}
    for tenant in ("blue", "green"):
        identity = both.identify(tenant=tenant, salt="shares")
        chain = chain_of(identity.root, 160)
        both.store(identity, chain)
        chains[tenant] = identity, chain

    def rows(status: dict[str, Any]) -> dict[str, Any]:
        for identity, chain in chains.values():
            hits(both, identity, chain)
        return {
            row["tenant"]: row for row in status["tenants"] if row.get("seconds") and row["hits"]["1"] > 0.5
        }

    until(both, lambda status: rows(status).keys() >= chains.keys())
    found = rows(both.status())
    for row in found.values():
        assert 0.1 < row["part"] < 0.9
        assert row["hits"].keys() == row["seconds"].keys() == {"0.5", "1", "2", "4"}
        assert 0.0 < row["hits"]["0.5"] < row["hits"]["1"] <= row["hits"]["4"] <= 1.0
    pattern = r'kvstrata_pool_tenant_forecast\{of="(\w+)",size="2",tenant="(\w+)"\} '
    told = re.findall(pattern, read(f"{server.url}/metrics").decode())
    assert sorted(told) == sorted((of, tenant) for tenant in found for of in ("hits", "seconds"))


def test_l2_is_cleared_as_a_whole_only_and_another_salt_hides_a_tenants_records(server, both):
    chain = stored(both, "cleared")["blue"][1]
    with pytest.raises(KvstrataError, match="tenant: L2 can only be cleared as a whole"):
        clear(server, "all", "blue")
    clear(server, "l1", "blue")
    blue = both.identify(tenant="blue", salt="cleared")
    assert hits(both, blue, chain) == CHUNKS, "its records in L2 stay"
    other = both.identify(tenant="blue", salt="another")
    assert hits(both, other, chain_of(other.root, CHUNKS)) == 0


@pytest.fixture
def engine(server, request, tmp_path) -> Callable[[str, str], CacheEngine]:
    """Makes engines of a tenant with a token, not connected yet; they end with the test."""

    def make(tenant: str, token: str) -> CacheEngine:
        settings = {}
        if token:
            path = tmp_path / f"token of {tenant}"
            path.touch(mode=0o600)
            path.write_text(token + "\n")
            settings["token_file"] = str(path)
        group = f"engine of {tenant}".encode().ljust(16)[:16]
        made = CacheEngine(
            server.socket_dir, model=request.node.name, tenant=tenant, group=group, settings=settings
        )
        request.addfinalizer(made.__exit__)
        return made.__enter__()

    return make


@pytest.mark.parametrize("tenant", ["azure", pytest.param("blue", marks=pytest.mark.long)])
def test_the_right_token_opens_its_tenants(engine, tenant):
    with_token = engine(tenant, BLUE).connect()
    assert with_token.stored(prompt(4)) == ["stored"] * 4
    assert with_token.hit(prompt(4)) == 4


def computes_without_the_cache(engine: CacheEngine) -> None:
    """Assert that a lookup is a miss and that a store ends without a chunk in the pool."""
    assert engine.looked_up(prompt(4)).n_chunks == 0
    job = engine.store(prompt(4))
    assert job.done.wait(PATIENCE_S)
    assert set(job.outcomes) <= {"unavailable", "refused", "failed"}


def test_a_wrong_token_is_refused_and_the_engine_goes_on_without_the_cache(engine, caplog):
    caplog.set_level(logging.ERROR)
    wrong = engine("blue", "not-a-token-of-anybody")
    eventually("it is refused", lambda: "not_permitted" in wrong.client.error)
    assert "token: not in this server's tenants file" in wrong.client.error
    computes_without_the_cache(wrong)
    assert not wrong.client.connected
    assert "token: not in this server's tenants file" in caplog.text
    assert "not-a-token-of-anybody" not in caplog.text + wrong.client.error


@pytest.mark.parametrize("token", [GREEN, pytest.param("", marks=pytest.mark.long)])
def test_a_tenant_without_its_token_is_refused_and_the_engine_goes_on_without_the_cache(
    engine, token, caplog
):
    caplog.set_level(logging.ERROR)
    without = engine("blue", token)
    eventually("it attaches", lambda: without.client.connected)
    identity = without.identity()
    eventually("the identity is refused", lambda: identity.error)
    assert "may not use tenant 'blue'" in identity.error and "may not use tenant 'blue'" in caplog.text
    computes_without_the_cache(without)


def test_a_corrected_token_file_takes_effect_without_a_restart_of_the_engine(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("kvstrata.client.link.ATTACH_REFUSED_RETRY_S", 0.02)
    mended = engine("blue", "not-a-token-of-anybody")
    eventually("it is refused", lambda: "not_permitted" in mended.client.error)
    path = tmp_path / "token of blue"
    path.chmod(0o644)
    eventually("the file is named", lambda: "bad_config" in mended.client.error)
    assert "token_file" in mended.client.error and "chmod 600" in mended.client.error
    path.chmod(0o600)
    path.write_text(BLUE)
    mended.connect()
    assert mended.stored(prompt(4)) == ["stored"] * 4
