"""Tenants with pools of their own: what their processes reach, and whether all works there as in the shared pool."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.native.hashing import storage_keys
from kvstrata.policy.reserved import GRANULE_BYTES
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.child import Child
from tests.harness.refusals import refusal
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, chain_of, keys_of, part
from tests.harness.server_process import ServerFailed, ServerProcess
from tests.harness.tenants import BLUE, GREEN, Tenant, tenant_settings
from tests.integration.server.pool_spy import INVERSE

pytestmark = pytest.mark.integration

QUOTAS = "quotas_gb: {green: 0.015625, blue: 0.015625}\n"
OWN = f"{QUOTAS}tenants: [{{name: green, pool: own}}, {{name: blue, pool: own}}]\n"
POOL_BYTES = 16 << 20
RED = "quotas_gb: {red: 0.01}\ntenants: [{name: red, pool: own}]"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server with these settings in YAML."""
    started: list[ServerProcess] = []

    def starter(text: str = OWN, *, flags: tuple[str, ...] = (), **arguments: Any) -> ServerProcess:
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        server = ServerProcess(folder, l1_mb=64, flags=(*tenant_settings(folder, text), *flags), **arguments)
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


def of(server: ServerProcess, name: str) -> Tenant:
    """A client of a tenant."""
    return Tenant(server, name, {"blue": BLUE, "green": GREEN}[name], salt="s")


def row_of(server: ServerProcess, tenant: str) -> dict[str, Any]:
    """The row of a tenant's pool in the status."""
    [row] = [row for row in server.get("/v1/status")["own_pools"] if row["tenant"] == tenant]
    return row


def where(spy: Child, *patterns: bytes) -> list[list[str]]:
    """For each pattern where the process finds it in what it maps and has open."""
    found: list[list[str]] = spy.ask("scan", inverted=[one.translate(INVERSE).hex() for one in patterns])
    return found


@pytest.mark.parametrize("pools", ["own", pytest.param("shared", marks=pytest.mark.long)])
def test_a_process_finds_bytes_of_another_tenant_in_nothing_that_it_got(
    start: Callable[..., ServerProcess], tmp_path: Path, pools: str
) -> None:
    server = start(OWN if pools == "own" else QUOTAS)
    with (
        of(server, "green") as green,
        Child("tests.integration.server.pool_spy", log=tmp_path / "spy") as spy,
    ):
        green.begin()
        chain = chain_of(green.root, 4)
        green.store(green.identity, chain)
        of_blue = bytes.fromhex(
            spy.ask("store", socket_dir=str(server.socket_dir), token=BLUE, tenant="blue")
        )
        blue_payload, green_payload, green_index = where(
            spy,
            of_blue[:KEY_BYTES] * 2,
            chain[:KEY_BYTES] * 2,
            storage_keys(green.root, chain[:KEY_BYTES], part().digest()),
        )
        assert any("mapping" in place for place in blue_payload), "the spy finds what is there"
        assert any("descriptor" in place for place in blue_payload)
        if pools == "own":
            assert green_payload == green_index == []
        else:
            assert green_payload and green_index, "in a shared pool it finds them"


@pytest.mark.long
def test_what_a_process_overwrites_is_its_tenant_s_alone(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start()
    with of(server, "green") as green, RpcClient(server.socket_dir) as nobody:
        green.begin()
        chain = chain_of(green.root, 4)
        green.store(green.identity, chain)
        unnamed = nobody.identify()
        nobody.store(unnamed, chain_of(unnamed.root, 2))
        with Child("tests.integration.server.pool_spy", log=tmp_path / "spy") as spy:
            spy.ask("store", socket_dir=str(server.socket_dir), token=BLUE, tenant="blue")
            assert spy.ask("scribble") >= POOL_BYTES
            green.reads_its_own(chain)
            assert nobody.lookup(unnamed.identity_id, chain_of(unnamed.root, 2)).n_chunks == 2
            spy.kill()
        eventually("blue's row is free", lambda: row_of(server, "blue")["rows_claimed"] == 0)
        with of(server, "blue") as blue:
            blue.begin()
            mine = chain_of(blue.root, 2, first_token=1000)
            blue.store(blue.identity, mine)
            blue.reads_its_own(mine)
        green.reads_its_own(chain)


@pytest.mark.long
def test_lookup_retrieve_corrupt_clear_and_eviction_work_in_an_own_pool(
    start: Callable[..., ServerProcess],
) -> None:
    server = start()
    with of(server, "green") as green, of(server, "blue") as blue:
        green.begin()
        blue.begin()
        chain = chain_of(green.root, 8)
        green.store(green.identity, chain)
        green.reads_its_own(chain)
        assert green.retrieves(chain[:KEY_BYTES]).found
        extent = green.extent_of(chain[:KEY_BYTES])
        assert green.extents is not None
        green.extents.view(extent.offset_bytes, extent.length_bytes)[-1] ^= 0xFF
        assert green.reports_corrupt(chain[:KEY_BYTES]) == 1
        assert green.looks_up(chain).n_chunks == 0
        for first in range(40):  # twice as much as the pool has room for
            green.store(green.identity, chain_of(green.root, 10, first_token=10_000 * (first + 1)))
        row = row_of(server, "green")
        assert row["extents_bytes"] == POOL_BYTES and row["evicted_entries"] > 0
        assert row_of(server, "blue")["used_bytes"] == server.get("/v1/status")["pool"]["used_bytes"] == 0
        mine = chain_of(blue.root, 3)
        blue.store(blue.identity, mine)
        assert green.clears(wire.ClearScope.L1) > 0
        assert row_of(server, "green")["used_bytes"] == 0
        blue.reads_its_own(mine)


@pytest.mark.long
def test_the_status_shows_each_tenant_its_own_pool_alone(start: Callable[..., ServerProcess]) -> None:
    server = start()
    with of(server, "green") as green, RpcClient(server.socket_dir) as nobody:
        green.begin()
        green.store(green.identity, chain_of(green.root, 2))
        assert [row["tenant"] for row in green.status()["own_pools"]] == ["green"]
        assert nobody.status()["own_pools"] == []
        whole = server.get("/v1/status")
        assert [row["tenant"] for row in whole["own_pools"]] == ["green", "blue"]
        assert whole["pool"]["extents_bytes"] == (64 << 20) - 2 * POOL_BYTES
        [used] = [row["bytes"] for row in whole["tenants"] if row["tenant"] == "green"]
        assert used == row_of(server, "green")["used_bytes"] > 0
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            page = answer.read().decode()
        told = {
            sample.name: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.labels == {"tenant": "green"} and sample.name.startswith("kvstrata_own_pool")
        }
        assert told == {
            "kvstrata_own_pool_bytes": POOL_BYTES,
            "kvstrata_own_pool_used_bytes": used,
            "kvstrata_own_pool_evicted_entries_total": 0,
        }


@pytest.mark.long
def test_a_dead_process_leaves_nothing_in_its_tenant_s_pool(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start()
    with Child("tests.integration.server.pool_spy", log=tmp_path / "spy") as spy:
        spy.ask("hold", socket_dir=str(server.socket_dir), token=GREEN, tenant="green")
        row = row_of(server, "green")
        assert (row["leases"], row["reservations"], row["rows_claimed"]) == (1, 1, 1)
        spy.kill()
    eventually("its row is free", lambda: row_of(server, "green")["rows_claimed"] == 0)
    row = row_of(server, "green")
    assert (row["leases"], row["reservations"], row["reserved_bytes"]) == (0, 0, 0)
    sessions = server.get("/v1/status")["sessions"]
    assert (sessions["leases"], sessions["extents_being_written"], sessions["attached"]) == (0, 0, 0)


@pytest.mark.long
def test_what_a_process_may_reserve_follows_from_its_own_pool(start: Callable[..., ServerProcess]) -> None:
    server = start(OWN.replace("green: 0.015625", "green: 0.03125"))
    with of(server, "green") as green, of(server, "blue") as blue:
        reserved = []
        for tenant in (green, blue):
            tenant.begin()
            hello = wire.Hello(tenant.session, tenant.next_seq(), wire.PROTOCOL_VERSION, "test")
            limit_bytes = tenant.ask(hello, wire.HelloReply).max_reserved_bytes
            seq, reply = tenant.reserve(tenant.identity.identity_id, chain_of(tenant.root, 100))
            count = reply.outcomes.count(wire.ReserveOutcome.RESERVED)
            assert count == limit_bytes // (-(-RECORD_BYTES // GRANULE_BYTES) * GRANULE_BYTES)
            reserved.append(limit_bytes)
            tenant.abort(seq)  # both are sessions of this process, whose reservations count together
        assert reserved == [32 * (1 << 20) // 8, POOL_BYTES // 8], "the shared pool's share is 2 MiB"


@pytest.mark.long
@pytest.mark.parametrize("l2", ["fs", "disk"])
def test_chunks_go_to_l2_and_come_back_into_their_tenant_s_pool(
    start: Callable[..., ServerProcess], tmp_path: Path, l2: str
) -> None:
    adapter = json.dumps({"type": l2, "base_path": str(tmp_path / "l2"), "capacity_gb": 1})
    server = start(flags=("--l2-adapter", adapter), l2="embedded")
    with of(server, "green") as green, of(server, "blue") as blue:
        for tenant in (green, blue):
            tenant.begin()
            tenant.store(tenant.identity, chain_of(tenant.root, 6))
        eventually(
            "all are in L2",
            lambda: (
                sum(
                    row["outcomes"].get("stored", 0)
                    for row in server.get("/v1/status")["l2_store"]["adapters"].values()
                )
                == 12
            ),
        )
        for tenant in (green, blue):
            tenant.clears(wire.ClearScope.L1)
        assert row_of(server, "green")["used_bytes"] == row_of(server, "blue")["used_bytes"] == 0
        found = green.lookup(green.identity.identity_id, chain_of(green.root, 6))
        assert (found.n_chunks, found.l2_chunks) == (6, 6)
        green.release([(green.session, found.seq)], group=True)
        assert row_of(server, "green")["used_bytes"] > 0 == row_of(server, "blue")["used_bytes"]
        green.reads_its_own(chain_of(green.root, 6))
        assert blue.prewarms(chain_of(blue.root, 6))["l2_chunks"] == 6
        blue.reads_its_own(chain_of(blue.root, 6))
        assert server.get("/v1/status")["pool"]["used_bytes"] == 0
        assert len(list(keys_of(chain_of(blue.root, 6)))) == 6


def test_a_killed_server_s_successor_adopts_all_pools(start: Callable[..., ServerProcess]) -> None:
    server = start()
    with of(server, "green") as green, of(server, "blue") as blue:
        for tenant in (green, blue):
            tenant.begin()
            tenant.store(tenant.identity, chain_of(tenant.root, 5))
        green.lookup(green.identity.identity_id, chain_of(green.root, 5))  # leased when the server dies
        server.kill()
        server.start()
        for tenant in (green, blue):
            old = tenant.epoch
            tenant.attach()
            assert tenant.epoch == server.ready["epoch"] > old
            tenant.connect()
            tenant.ask(wire.Quiesced(tenant.session, tenant.next_seq()), wire.Ok)
            tenant.begin()
            tenant.reads_its_own(chain_of(tenant.root, 5))
        assert row_of(server, "green")["adopted_entries"] == 5
        assert row_of(server, "green")["leases"] == 0
    server.kill()
    server.start()
    eventually("rows of the dead are free", lambda: row_of(server, "green")["rows_claimed"] == 0)
    with of(server, "green") as green:
        green.begin()
        green.reads_its_own(chain_of(green.root, 5))


@pytest.mark.long
def test_a_tenant_that_loses_its_pool_leaves_no_memory(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start()
    assert len(list(server.segment_dir.glob("own-*"))) == 2
    server.stop()
    tenant_settings(tmp_path / "server0", f"{QUOTAS}tenants: [{{name: green, pool: own}}]\n")
    server.start()
    assert len(list(server.segment_dir.glob("own-*"))) == 1
    assert [row["tenant"] for row in server.get("/v1/status")["own_pools"]] == ["green"]


@pytest.mark.long
def test_engines_keep_working_when_their_tenant_gets_or_loses_a_pool(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start(chunk_tokens=CHUNK_TOKENS)
    engines = []
    with contextlib.ExitStack() as stack:
        for name, token in (("green", GREEN), ("blue", BLUE)):
            file = tmp_path / f"{name}.token"
            file.write_text(token)
            file.chmod(0o600)
            engine = CacheEngine(
                server.socket_dir,
                group=name.encode().ljust(16),
                tenant=name,
                settings={"token_file": str(file)},
            )
            engines.append(stack.enter_context(engine))
        tokens = prompt(4)
        for engine in engines:
            engine.connect()
            assert set(engine.stored(tokens)) == {"stored"}
            assert engine.hit(tokens) == 4
        pools = [OWN, f"{QUOTAS}tenants: [{{name: green, pool: own}}]\n", OWN]
        for number, (text, kept) in enumerate(zip(pools, ((4, 4), (4, 0), (4, 0)), strict=True)):
            server.kill()
            tenant_settings(server.folder, text)
            epoch = server.start()["epoch"]
            for engine, expected in zip(engines, kept, strict=True):
                eventually(
                    "the engine is attached again",
                    lambda engine=engine, epoch=epoch: engine.client.epoch == epoch,
                )
                engine.connect()
                assert engine.hit(tokens) == expected, number
                assert set(engine.stored(tokens)) <= {"stored", "present"}
                assert engine.hit(tokens) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("tenants: [{name: green, pool: own}]", (), "tenants[0].pool: own, but quotas_gb has no 'green'"),
        (RED, (), "no token of security.tenants_file opens 'red'"),
        (OWN.replace("blue, pool", "green, pool"), (), "tenants[1].name: 'green' is named twice"),
        (OWN + "controller: {url: 'tcp://127.0.0.1:9'}\np2p: {engine: nixl}", (), "p2p.engine: nixl, but tenants"),
        (OWN + "l1: {use_hugepages: true}", (), "l1.use_hugepages is set"),
        (OWN.replace("green: 0.015625", "green: 0.05"), (), "lower quotas, or raise --l1-size-gb"),
        (OWN.replace("green: 0.015625", "green: 0.0001"), (), "the least is 1048576; raise it"),
        (OWN.replace("pool: own", "pool: mine"), (), "must be one of shared, own, found 'mine'"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_stops_the_start_and_names_the_setting(
    tmp_path: Path, text: str, flags: tuple[str, ...], says: str
) -> None:
    assert says in refusal(*tenant_settings(tmp_path, text + "\n"), "--l1-size-gb", "0.0625", *flags)


@pytest.mark.long
def test_a_token_that_opens_another_tenant_too_stops_the_start(tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_text(f"{GREEN} green blue\n")
    both.chmod(0o600)
    flags = (*tenant_settings(tmp_path, OWN), "--l1-size-gb", "0.0625")
    says = refusal(*flags, KVSTRATA_SECURITY_TENANTS_FILE=str(both))
    assert "opens 'green' and blue; a process maps one pool" in says


@pytest.mark.long
def test_two_tenants_with_equal_rows_end_each_their_own_leases(start: Callable[..., ServerProcess]) -> None:
    server = start()
    with of(server, "green") as green:
        green.begin()
        chain = chain_of(green.root, 2)
        green.store(green.identity, chain)
        held = green.lookup(green.identity.identity_id, chain)
        with of(server, "blue") as blue:
            blue.begin()
            assert blue.attachment is not None and green.attachment is not None
            assert blue.attachment.row == green.attachment.row, "both have the first row of their pool"
        eventually("blue has gone", lambda: server.get("/v1/status")["sessions"]["attached"] == 1)
        assert row_of(server, "green")["leases"] == 1
        assert green.release([(green.session, held.seq)]) == 1


@pytest.mark.long
def test_an_adapter_that_cannot_reach_own_pools_neither_starts_nor_is_added_at_run_time(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    hosted = '{"type": "fs", "base_path": "/nowhere", "isolation": "process"}'
    with pytest.raises(ServerFailed, match="isolation: 'process' is not supported"):
        start(OWN, flags=("--l2-adapter", hosted), l2="embedded")
    server = start(f"{OWN}l2: {{runtime: {{roots: [{tmp_path}]}}}}\n")
    for isolation, expected in (("process", "'process' is not supported"), ("in_process", '"name"')):
        entry = {"type": "fs", "base_path": str(tmp_path / isolation), "isolation": isolation}
        command = ["ctl", "--url", server.url, "--json", "l2", "add", json.dumps(entry)]
        done = subprocess.run([sys.executable, "-m", "kvstrata", *command], capture_output=True, text=True)
        assert expected in done.stdout + done.stderr
    assert len(server.get("/v1/l2/adapters")["adapters"]) == 1
