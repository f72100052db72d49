"""Retrieve, corrupt, clear, prefetch, explain and status of a real server over its wire; eviction, quotas, tenants."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.native.hashing import storage_keys
from kvstrata.native.record import RecordSpec, record_bytes, seal_record
from kvstrata.rpc import wire
from kvstrata.server.requests.handlers import RETRIEVE_ON_LOOP_BYTES
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    RpcClient,
    assert_held,
    chain_of,
    keys_of,
    new_prompt,
    payload,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def test_retrieve_gives_the_record_in_pieces(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 1)
    client.store(identity, chain)
    assert client.slice is not None
    digest = client.slice.digest()

    def piece(offset: int, length: int, key: bytes = chain) -> wire.RetrieveReply:
        request = wire.Retrieve(
            client.session, client.next_seq(), identity.identity_id, key, digest, offset, length
        )
        return client.ask(request, wire.RetrieveReply)

    whole = piece(0, wire.MAX_RETRIEVE_BYTES)
    assert whole.found and whole.record_bytes >= RECORD_BYTES
    assert whole.body[RECORD_BYTES - PAYLOAD_BYTES : RECORD_BYTES] == payload(chain)
    assert piece(100, 50).body == whole.body[100:150]
    assert piece(whole.record_bytes, 10).body == b""
    assert piece(1 << 40, 10).body == b""
    assert not piece(0, 10, key=bytes(KEY_BYTES)).found


def test_a_large_piece_of_a_record_is_copied_off_the_loop(start: Callable[..., ServerProcess]) -> None:
    server = start(l1_mb=64)
    sections = [1 << 20, 1 << 20]
    facts = {"payload_bytes": sum(sections), "sections": sections}
    with RpcClient(server.socket_dir, facts=facts) as client:
        assert client.extents is not None and client.slice is not None
        identity, chain = new_prompt(client, 1)
        digest = client.slice.digest()
        length = record_bytes(len(sections), sum(sections))
        seq, reply = client.reserve(identity.identity_id, chain, record=length)
        [extent] = unpack_extents(reply.extents)
        payload_at = length - sum(sections)
        content = random.Random(1).randbytes(sum(sections))
        client.extents.view(extent.offset_bytes, extent.length_bytes)[payload_at:length] = content
        key = storage_keys(identity.root, chain, digest)
        spec = RecordSpec(key, identity.root, digest, bytes(KEY_BYTES), CHUNK_TOKENS)
        seal_record(client.extents.address + extent.offset_bytes, extent.length_bytes, spec, sections)
        assert set(client.commit(seq, [0])) == {wire.CommitOutcome.COMMITTED}
        n_bytes = 1 << 20
        assert n_bytes > RETRIEVE_ON_LOOP_BYTES
        request = wire.Retrieve(
            client.session, client.next_seq(), identity.identity_id, chain, digest, payload_at + 7, n_bytes
        )
        assert client.ask(request, wire.RetrieveReply).body == content[7 : 7 + n_bytes]


def test_long_stores_are_reserved_off_the_loop_and_committed(start: Callable[..., ServerProcess]) -> None:
    server = start(l1_mb=256)
    with RpcClient(server.socket_dir) as client:
        identity, chain = new_prompt(client, 400)
        assert set(client.store(identity, chain)) == {wire.ReserveOutcome.RESERVED}
        reply = client.lookup(identity.identity_id, chain)
        assert reply.n_chunks == 400
        client.release([(client.session, reply.seq)])
        seq, _ = client.reserve(identity.identity_id, chain_of(identity.root, 300, first_token=10**6))
        assert client.cancel(seq) == 1
        assert_held(client, leases=0, reservations=0)


def test_a_corrupt_chunk_is_dropped_when_the_server_sees_it_too(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 3)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain, request_id="c1")
    keys = list(keys_of(chain))
    number = identity.identity_id

    def report(key: bytes) -> int:
        return client.ask(wire.Corrupt(client.session, client.next_seq(), number, key), wire.Ok).count

    assert report(keys[1]) == 0, "the chunk is sound"
    extent = unpack_extents(reply.extents)[1]
    assert client.extents is not None
    view = client.extents.view(extent.offset_bytes, extent.length_bytes)
    view[RECORD_BYTES - 100] ^= 1
    assert report(keys[1]) == 1
    del view
    client.release([(client.session, reply.seq)])
    again = client.lookup(identity.identity_id, chain, request_id="c2")
    assert (again.n_chunks, again.reason) == (1, "corrupt"), "known at the first lookup"
    client.release([(client.session, again.seq)])


def test_clear_drops_the_named_tenants_chunks_and_counts_those_still_leased(
    client: RpcClient,
) -> None:
    tenant = secrets.token_hex(4)
    ours, others = client.identify(tenant=tenant), client.identify(tenant=tenant + "x")
    chains = [chain_of(identity.root, 3) for identity in (ours, others)]
    client.store(ours, chains[0])
    client.store(others, chains[1])
    leased = client.lookup(ours.identity_id, chains[0][:KEY_BYTES])
    clear = wire.Clear(client.session, client.next_seq(), wire.ClearScope.L1, tenant)
    done = client.ask(clear, wire.Cleared)
    assert (done.count, done.held, done.leased, done.kept) == (3, 0, 1, 0)
    assert client.lookup(ours.identity_id, chains[0]).n_chunks == 0
    wait = client.send(wire.Clear(client.session, client.next_seq(), wire.ClearScope.L1, tenant, wait=True))
    client.release([(client.session, leased.seq)])
    freed = client.expect(wait, wire.Cleared)
    assert (freed.count, freed.held, freed.leased) == (0, 0, 0)
    kept = client.lookup(others.identity_id, chains[1])
    assert kept.n_chunks == 3
    client.release([(client.session, kept.seq)])


def test_prefetch_without_l2_reports_what_l1_has(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 4)
    client.store(identity, chain[: 2 * KEY_BYTES])
    request = wire.Prefetch(client.session, client.next_seq(), identity.identity_id, chain, 0, 1000)
    job = client.ask(request, wire.PrefetchReply).job
    document: dict[str, Any] = {"state": "running"}
    while document["state"] == "running":
        document = client.ask(wire.Status(client.session, client.next_seq(), job), wire.Document).body
    assert (document["job"], document["chunks"], document["l1_chunks"], document["l2_chunks"]) == (
        job,
        4,
        2,
        0,
    )


def test_explain_returns_the_hits_and_the_first_miss(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 3)
    client.store(identity, chain[:KEY_BYTES])
    request_id = secrets.token_hex(8)
    reply = client.lookup(identity.identity_id, chain, request_id=request_id)
    client.release([(client.session, reply.seq)])
    document = client.explain(request_id)
    assert document["known"]
    told = document["lookups"][0]
    assert told["hits"] == {"l1": 1, "l2": 0, "served": 1}
    assert (told["first_miss"]["chunk"], told["first_miss"]["reason"]) == (1, "unknown_key")
    again = client.lookup(identity.identity_id, chain, request_id=request_id)
    client.release([(client.session, again.seq)])
    assert [entry["first_miss"]["reason"] for entry in client.explain(request_id)["lookups"]] == [
        "unknown_key",
        "never_stored",
    ]
    assert not client.explain("never heard of")["known"]


def test_a_tenant_stays_within_its_quota(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    config = tmp_path / "quota.yaml"
    config.write_text("quotas_gb:\n  small: 0.0005\n")
    server = start(flags=("--config", str(config)))
    with RpcClient(server.socket_dir) as client:
        identity = client.identify(tenant="small")
        for number in range(20):
            client.store(identity, chain_of(identity.root, 2, first_token=number * 1_000_000))
        [tenant] = [t for t in client.status()["tenants"] if t["tenant"] == "small"]
        assert 0 < tenant["bytes"] <= 0.0005 * (1 << 30)
