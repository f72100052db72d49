"""Retrieve and corrupt of a real server over its wire; explain, quotas."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.rpc_client import (
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
        request = wire.Retrieve(client.next_seq(), identity.identity_id, key, digest, offset, length)
        return client.ask(request, wire.RetrieveReply)

    whole = piece(0, wire.MAX_RETRIEVE_BYTES)
    assert whole.found and whole.record_bytes >= RECORD_BYTES
    assert whole.body[RECORD_BYTES - PAYLOAD_BYTES : RECORD_BYTES] == payload(chain)
    assert piece(100, 50).body == whole.body[100:150]
    assert piece(whole.record_bytes, 10).body == b""
    assert piece(1 << 40, 10).body == b""
    assert not piece(0, 10, key=bytes(KEY_BYTES)).found


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
        return client.ask(wire.Corrupt(client.next_seq(), number, key), wire.Ok).count

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
