"""Two real servers, a controller, and tenants with pools of their own on both: chunks go from a tenant's pool at one
instance to the same tenant's pool at the other, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import ctl
from kvstrata.native.hashing import storage_keys
from kvstrata.rpc.cluster_wire import PeerLease, PeerLeased, Where, WhereReply, tags_of
from kvstrata.rpc.shared_key import SharedKey
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.rpc.zmq_link import Links
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.cache_engine import eventually
from tests.harness.cluster import Cluster
from tests.harness.http_read import read
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, RpcClient, chain_of, keys_of, part, payload
from tests.harness.tenants import BLUE, GREEN, Tenant, tenant_settings

pytestmark = pytest.mark.integration

MIB = 1 << 20
CHUNKS = 12
SIZES = (
    "quotas_gb: {green: 0.015625, blue: 0.015625}\n"
    "tenants: [{name: green, pool: own, max_gb: 0.0390625}, {name: blue, pool: own}]\n"
)
"""16 MiB for each of the two, of which green's may become 40; the shared pool has 32."""
SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "5000", "KVSTRATA_P2P_ENGINE": "ucx"}
"""Long enough for a busy machine."""


def sizes_of(*names: str) -> str:
    """Settings that give 16 MiB to each of these tenants as its own pool, in this order."""
    quotas = ", ".join(f"{name}: 0.015625" for name in names)
    own = ", ".join(f"{{name: {name}, pool: own}}" for name in names)
    return f"quotas_gb: {{{quotas}}}\ntenants: [{own}]\n"


@contextlib.contextmanager
def cluster_of(folder: Path, *texts: str, **settings: str) -> Iterator[Cluster]:
    """`texts`: what each instance's settings say of the tenants; `settings`: environment variables of both."""
    flags = []
    for number, text in enumerate(texts or (SIZES, SIZES)):
        (folder / f"{number}").mkdir()
        flags.append(tenant_settings(folder / f"{number}", text))
    with Cluster(folder, l1_mb=64, flags_of=flags, settings={**SETTINGS, **settings}) as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(tmp_path) as made:
        yield made


@contextlib.contextmanager
def tenants(cluster: Cluster, name: str) -> Iterator[list[Tenant]]:
    """A client of the tenant at each server."""
    token = {"green": GREEN, "blue": BLUE}[name]
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Tenant(server, name, token, "s")) for server in cluster.servers]
        for client in made:
            client.begin()
        yield made


def row_of(cluster: Cluster, number: int, tenant: str = "green") -> dict[str, Any]:
    """The row of a tenant's pool in an instance's status."""
    rows = cluster.servers[number].get("/v1/status")["own_pools"]
    return next(dict(row) for row in rows if row["tenant"] == tenant)


def lent_bytes(cluster: Cluster, tenant: str = "green") -> int:
    """What the first instance keeps of a tenant's pool for peers and pins."""
    rows = cluster.servers[0].get("/v1/status")["peers_served"]["own_pools"]
    return next(int(row["leased_bytes"]) for row in rows if row["tenant"] == tenant)


def store(cluster: Cluster, client: Tenant, chain: bytes, number: int = 0) -> None:
    """Store a prompt, and wait until the controller knows all of the instance."""
    client.store(client.identity, chain)
    status = cluster.servers[number].get("/v1/status")
    ready = sum(row["entries"]["ready"] for row in (status["pool"], *status["own_pools"]))
    eventually("the controller knows the chunks", lambda: cluster.known(number) == ready)


def store_long(cluster: Cluster, client: Tenant) -> bytes:
    """Store a prompt of 4 × CHUNKS, which is more than 2 MiB and nearly what an own pool lends; returns its chain."""
    chain = chain_of(client.root, 4 * CHUNKS)
    for at in range(0, len(chain), len(chain) // 4):
        part_of_it = chain[at:][: len(chain) // 4]
        assert client.store(client.identity, part_of_it, parent=chain[at - KEY_BYTES : at])
    store(cluster, client, chain_of(client.root, CHUNKS, first_token=100_000))
    return chain


def hit(client: Tenant, chain: bytes) -> int:
    """How many leading chunks are found; asserts that their bytes are right."""
    reply = client.lookup(client.identity.identity_id, chain, deadline_ms=20_000)
    try:
        for key, extent in zip(keys_of(chain), unpack_extents(reply.extents), strict=False):
            assert client.read(extent) == payload(key)
    finally:
        client.release([(client.session, reply.seq)], group=True)
    return reply.n_chunks


def reads(client: Tenant, chain: bytes) -> None:
    """Wait until the whole prompt is a hit with right bytes; a busy machine may need more than one try."""
    eventually("the prompt is a hit", lambda: hit(client, chain) == len(chain) // KEY_BYTES)


def settled(cluster: Cluster, number: int) -> None:
    """Wait until nothing is under way in any pool of an instance."""

    def idle() -> bool:
        status = cluster.servers[number].get("/v1/status")
        return all(
            row["holds"] == row["reservations"] == row["bytes"]["quarantined"] == 0
            for row in (status["pool"], *status["own_pools"])
        )

    eventually("nothing is under way", idle)


def clear(cluster: Cluster, number: int, tenant: str = "green") -> None:
    """Drop a tenant's chunks from an instance's L1."""
    ctl.ask(cluster.servers[number].url, ctl.Ask("/v1/clear", {"tier": "l1", "tenant": tenant}))


def act(cluster: Cluster, how: str, n_chunks: int, **more: Any) -> list[dict[str, Any]]:
    """Let the controller act on green's prompt, and wait for the end; returns its commands."""
    tokens = list(range(n_chunks * CHUNK_TOKENS))
    asked = {"tokens": tokens, "tenant": "green", "salt": "s", "wait_s": 60, **more}
    told = cluster.controller.ask(f"/v1/{how}", asked)
    assert told["done"], told
    commands: list[dict[str, Any]] = told["commands"]
    return commands


def quota(cluster: Cluster, megabytes: float, number: int = 0) -> int:
    """Change green's quota at an instance; returns the bytes that it may have now."""
    asked = ctl.Ask("/v1/tenants/green/quota", {"quota_gb": megabytes / 1024}, method="PUT")
    return int(ctl.ask(cluster.servers[number].url, asked)["now_bytes"])


def test_a_tenants_chunks_are_read_into_its_own_pool_and_found_by_nobody_else(cluster: Cluster) -> None:
    with tenants(cluster, "green") as (one, other), tenants(cluster, "blue") as (_, blue):
        chain = chain_of(one.root, CHUNKS)
        store(cluster, one, chain)
        assert blue.looks_up(chain).n_chunks == blue.looks_up(chain_of(blue.root, CHUNKS)).n_chunks == 0
        reads(other, chain)
        records = cluster.peer_records(1)
        assert records >= CHUNKS
        reads(other, chain)  # the second time from its own L1
        assert cluster.peer_records(1) == records
        assert row_of(cluster, 1)["used_bytes"] >= CHUNKS * RECORD_BYTES
        status = cluster.servers[1].get("/v1/status")
        assert row_of(cluster, 1, "blue")["used_bytes"] == status["pool"]["used_bytes"] == 0
        with RpcClient(cluster.servers[1].socket_dir) as nobody:
            unnamed = nobody.identify(salt="s")
            assert nobody.lookup(unnamed.identity_id, chain).n_chunks == 0
        assert cluster.servers[0].get("/v1/status")["peers_served"]["read_bytes"] >= CHUNKS * RECORD_BYTES
        settled(cluster, 0)
        settled(cluster, 1)
        eventually("all leases are back", lambda: lent_bytes(cluster) == 0)
        assert b'kvstrata_own_pool_lent_bytes{tenant="green"} 0' in read(f"{cluster.servers[0].url}/metrics")


async def test_a_member_gets_a_tenants_chunks_in_no_other_tenants_name(cluster: Cluster) -> None:
    with (
        tenants(cluster, "green") as (one, _),
        contextlib.closing(Links(asyncio.get_running_loop())) as links,
    ):
        chain = chain_of(one.root, CHUNKS)
        store(cluster, one, chain)
        names = storage_keys(one.root, chain, part().digest())
        shared = SharedKey("").keys
        directory = links.ask(f"tcp://127.0.0.1:{cluster.controller.ports['reply']}", keys=shared)
        [owner] = (await directory.ask(Where(0, "member", tags_of(names), 1), WhereReply, 20)).owners
        peer = links.ask(owner.peer_endpoint, keys=shared.to(owner.peer_key))

        async def lease(tenant: str) -> PeerLeased:
            return await peer.ask(PeerLease(0, "member", names, 1, 60_000, tenant), PeerLeased, 20)

        for tenant in ("", "blue", "nobody", "Green"):
            leased = await lease(tenant)
            assert (leased.lease, leased.extents, leased.reason) == (0, b"", "absent"), tenant
        assert lent_bytes(cluster) == 0
        assert len(unpack_extents((await lease("green")).extents)) == CHUNKS


def test_a_tenant_with_an_own_pool_at_one_instance_only_reads_nothing_from_the_other(tmp_path: Path) -> None:
    only = (sizes_of("green"), sizes_of("blue"))
    with cluster_of(tmp_path, *only) as cluster, tenants(cluster, "green") as (here, there):
        stored = {0: chain_of(here.root, CHUNKS), 1: chain_of(there.root, CHUNKS, first_token=10_000)}
        store(cluster, here, stored[0])
        store(cluster, there, stored[1], 1)
        eventually("its kind of KV is known", lambda: cluster.controller.ask("/v1/models")["models"])
        for client, elsewhere in ((there, stored[0]), (here, stored[1])):
            assert hit(client, elsewhere) == 0
        [pull] = act(cluster, "move", CHUNKS, to="instance-1", source="instance-0")
        assert pull["result"]["count"] == 0, "nothing has moved, so nothing is dropped"
        for client, chain in ((here, stored[0]), (there, stored[1])):
            assert hit(client, chain) == CHUNKS
        for number in (0, 1):
            served = cluster.servers[number].get("/v1/status")["peers_served"]
            assert served["absent"] > 0 == served["granted"], "the directory named it, and it lent nothing"
            settled(cluster, number)


@pytest.mark.long
def test_pools_that_instances_list_in_different_orders_are_read_tenant_by_tenant(tmp_path: Path) -> None:
    orders = (sizes_of("green", "blue"), sizes_of("blue", "green"))
    with (
        cluster_of(tmp_path, *orders) as cluster,
        tenants(cluster, "green") as (green, green_reader),
        tenants(cluster, "blue") as (blue, blue_reader),
    ):
        chains = {client: chain_of(client.root, CHUNKS) for client in (green, blue)}
        for client, chain in chains.items():
            store(cluster, client, chain)
        for _ in ("in another order", "after a restart in the same order"):
            reads(green_reader, chains[green])
            reads(blue_reader, chains[blue])
            for tenant in ("green", "blue"):
                clear(cluster, 1, tenant)
            eventually("nothing is left", lambda: cluster.known(1) == 0)
            owner = cluster.servers[0]
            owner.kill()
            tenant_settings(tmp_path / "0", orders[1])
            owner.start()
            eventually("the controller knows the adopted chunks", lambda: cluster.known(0) == 2 * CHUNKS)
        for client in (green, blue):
            client.attach()
            client.connect()


def test_shared_chunks_are_read_beside_own_ones(cluster: Cluster) -> None:
    with tenants(cluster, "green") as (one, other), contextlib.ExitStack() as stack:
        chain = chain_of(one.root, CHUNKS)
        store(cluster, one, chain)
        first, second = (stack.enter_context(RpcClient(server.socket_dir)) for server in cluster.servers)
        identity = first.identify(salt="of nobody")
        shared = chain_of(identity.root, CHUNKS)
        first.store(identity, shared)
        eventually("the controller knows them", lambda: cluster.known(0) == 2 * CHUNKS)
        number = second.identify(salt="of nobody").identity_id

        def found() -> bool:
            reply = second.lookup(number, shared, deadline_ms=20_000)
            for key, extent in zip(keys_of(shared), unpack_extents(reply.extents), strict=False):
                assert second.read(extent) == payload(key)
            second.release([(second.session, reply.seq)])
            return reply.n_chunks == CHUNKS

        eventually("the shared chunks are a hit", found)
        reads(other, chain)


def test_the_controllers_operations_know_own_pools(cluster: Cluster) -> None:
    with tenants(cluster, "green") as (one, other):
        chain = chain_of(one.root, CHUNKS)
        store(cluster, one, chain)
        eventually("its kind of KV is known", lambda: cluster.controller.ask("/v1/models")["models"])
        [pull] = act(cluster, "replicate", CHUNKS, to="instance-1")
        assert pull["result"] == {"count": CHUNKS, "loaded": CHUNKS, "reason": ""}
        assert row_of(cluster, 1)["entries"]["ready"] == CHUNKS

        [pin] = act(cluster, "pin", CHUNKS, instance="instance-0")
        assert pin["result"] == {"count": CHUNKS} and lent_bytes(cluster) >= CHUNKS * RECORD_BYTES
        [drop] = act(cluster, "evict", CHUNKS, instances=["instance-0"])
        assert drop["result"] == {"count": 0}, "it is pinned"
        claims = [row["claim"] for row in cluster.controller.ask("/v1/pins")["pins"]]
        assert cluster.controller.ask("/v1/unpin", {"claim": claims[0], "wait_s": 60})["done"]
        assert lent_bytes(cluster) == 0

        keys = [key.hex() for key in keys_of(storage_keys(one.root, chain, part().digest()))]
        by_keys = cluster.controller.ask(
            "/v1/pin", {"keys": keys, "tenant": "green", "instance": "instance-0", "wait_s": 60}
        )
        assert by_keys["commands"][0]["result"] == {"count": CHUNKS}
        cluster.controller.ask("/v1/unpin", {"claim": by_keys["claim"], "wait_s": 60})

        [drop] = act(cluster, "evict", CHUNKS, instances=["instance-1"])
        assert drop["result"] == {"count": CHUNKS}
        pull, drop = act(cluster, "move", CHUNKS, to="instance-1", source="instance-0")
        assert (pull["result"]["count"], drop["result"]) == (CHUNKS, {"count": CHUNKS})
        assert (row_of(cluster, 0)["entries"]["ready"], row_of(cluster, 1)["entries"]["ready"]) == (0, CHUNKS)
        assert hit(other, chain) == CHUNKS

        told = cluster.controller.ask("/v1/clear", {"tier": "l1", "tenant": "green", "wait_s": 60})
        assert sum(command["result"]["count"] for command in told["commands"]) == CHUNKS
        eventually("the controller knows it", lambda: cluster.known(0) == cluster.known(1) == 0)


def test_what_the_cluster_shows_of_l1_counts_own_pools(cluster: Cluster) -> None:
    with tenants(cluster, "green") as (one, _):
        store(cluster, one, chain_of(one.root, CHUNKS))
        shared = cluster.servers[0].get("/v1/status")["pool"]["limit_bytes"]

        def shown() -> bool:
            row = cluster.member(0)
            assert row is not None
            return row["keys"]["l1"] == CHUNKS and row["used_bytes"]["l1"] >= CHUNKS * RECORD_BYTES

        eventually("the heartbeat has told it", shown)
        row = cluster.member(0)
        assert row is not None
        assert row["l1_bytes"] == row["capacity_bytes"]["l1"] == shared + 2 * 16 * MIB
        cluster.controller.stop()
        cluster.controller.start()
        eventually("a full sync tells own pools too", lambda: cluster.known(0) == CHUNKS)


def test_memory_moves_between_pools_while_they_are_read_and_no_byte_is_wrong(cluster: Cluster) -> None:
    with tenants(cluster, "green") as (one, other):
        chains = [chain_of(one.root, CHUNKS, first_token=10_000 * n) for n in range(12)]
        over = threading.Event()
        moved: list[int] = []

        def move() -> None:
            while not over.is_set():
                for megabytes, number in itertools.product((4, 40), (0, 1)):
                    moved.append(quota(cluster, megabytes, number))

        found: list[int] = []

        def enough() -> bool:
            for chain in chains:
                one.store(one.identity, chain)
            for chain in chains:
                found.append(hit(other, chain))  # compares every byte
                clear(cluster, 1)
            return sum(found) >= 10 * CHUNKS and len(moved) >= 20

        moving = threading.Thread(target=move)
        moving.start()
        try:
            eventually("chunks are read while memory moves", enough)
        finally:
            over.set()
            moving.join()
        assert min(moved) < 8 * MIB < max(moved)
        settled(cluster, 0)
        settled(cluster, 1)


def test_memory_that_is_lent_does_not_move_until_it_is_given_back(cluster: Cluster) -> None:
    with tenants(cluster, "green") as (one, _):
        chain = store_long(cluster, one)
        eventually("its kind of KV is known", lambda: cluster.controller.ask("/v1/models")["models"])
        extents = unpack_extents(one.looks_up(chain).extents)
        [pin] = act(cluster, "pin", 4 * CHUNKS, instance="instance-0", ttl_s=3600)
        assert pin["result"] == {"count": 4 * CHUNKS}
        assert quota(cluster, 1) == MIB
        assert row_of(cluster, 0)["used_bytes"] >= 4 * CHUNKS * RECORD_BYTES > 2 * MIB
        assert [one.read(extent) for extent in extents] == [payload(key) for key in keys_of(chain)]
        claim = cluster.controller.ask("/v1/pins")["pins"][0]["claim"]
        cluster.controller.ask("/v1/unpin", {"claim": claim, "wait_s": 60})
        eventually("the memory has moved", lambda: row_of(cluster, 0)["used_bytes"] <= MIB)


@pytest.mark.long
@pytest.mark.silence
def test_memory_lent_to_a_reader_that_is_stopped_moves_once_its_lease_has_expired(tmp_path: Path) -> None:
    with (
        cluster_of(tmp_path, KVSTRATA_FAILPOINTS="load.reserved=stop") as cluster,
        tenants(cluster, "green") as (one, other),
        ThreadPoolExecutor(1) as threads,
    ):
        chain = store_long(cluster, one)
        reader = cluster.servers[1]
        asked = threads.submit(hit, other, chain)
        eventually("the reader is about to read", reader.halted)
        lent = lent_bytes(cluster)
        assert lent >= 4 * CHUNKS * RECORD_BYTES
        assert quota(cluster, 1) == MIB
        assert row_of(cluster, 0)["used_bytes"] >= lent > 2 * MIB, "what is lent has not moved"
        eventually("the lease has expired", lambda: lent_bytes(cluster) == 0)
        eventually("the memory has moved", lambda: row_of(cluster, 0)["used_bytes"] <= MIB)
        reader.thaw()
        assert asked.result() < 4 * CHUNKS  # `hit` has compared every byte that it found
        settled(cluster, 1)
        fresh = chain_of(one.root, 4, first_token=50_000)
        assert quota(cluster, 16) == 16 * MIB
        assert one.store(one.identity, fresh) == bytes([ReserveOutcome.RESERVED] * 4)
        reads(other, fresh)
