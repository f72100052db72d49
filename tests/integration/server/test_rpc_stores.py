"""Stores, lookups and leases of a real server over its wire, and what cancels and cuts do to them."""

from __future__ import annotations

import pytest

from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.rpc_client import (
    RpcClient,
    RpcError,
    assert_held,
    keys_of,
    new_prompt,
    payload,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration
COMMITTED, NOT_RESERVED, BAD_RECORD = (bytes([outcome]) for outcome in wire.CommitOutcome)


def test_stored_chunks_are_found_with_the_bytes_that_were_written(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 5)
    assert client.lookup(identity.identity_id, chain).n_chunks == 0
    assert set(client.store(identity, chain)) == {wire.ReserveOutcome.RESERVED}
    reply = client.lookup(identity.identity_id, chain)
    assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (5, 5, 0, "")
    for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
        assert client.read(extent) == payload(key)
    assert client.release([(client.session, reply.seq)]) == 1


def test_a_lookup_counts_only_leading_chunks(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 6)
    client.store(identity, chain[: 3 * KEY_BYTES])
    client.store(identity, chain[5 * KEY_BYTES :], parent=chain[4 * KEY_BYTES : 5 * KEY_BYTES])
    reply = client.lookup(identity.identity_id, chain)
    assert reply.n_chunks == 3
    assert len(unpack_extents(reply.extents)) == 3
    client.release([(client.session, reply.seq)])


def test_a_chunk_is_invisible_before_its_commit(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 1)
    seq, reply = client.reserve(identity.identity_id, chain)
    client.write(unpack_extents(reply.extents)[0], identity.root, chain, b"", b"x")
    found = client.lookup(identity.identity_id, chain)
    assert (found.n_chunks, found.reason) == (0, "in_flight")
    assert client.commit(seq, [0]) == COMMITTED
    found = client.lookup(identity.identity_id, chain)
    assert found.n_chunks == 1
    client.release([(client.session, found.seq)])


def test_reserving_a_chunk_that_is_present_or_in_flight_gives_no_extent(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain[:KEY_BYTES])
    first, _ = client.reserve(identity.identity_id, chain)
    _, again = client.reserve(identity.identity_id, chain)
    assert list(again.outcomes) == [wire.ReserveOutcome.PRESENT, wire.ReserveOutcome.IN_FLIGHT]
    assert again.extents == bytes(len(again.extents))
    assert client.abort(first) == 1


def test_a_commit_of_an_unknown_reservation_is_not_reserved(client: RpcClient) -> None:
    assert client.commit(4711, [0, 1]) == NOT_RESERVED * 2
    identity, chain = new_prompt(client, 1)
    lookup = client.lookup(identity.identity_id, chain)
    assert client.commit(lookup.seq, [0]) == NOT_RESERVED


def test_a_second_commit_and_indices_out_of_range_are_not_reserved(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    seq, reply = client.reserve(identity.identity_id, chain)
    before = b""
    for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
        client.write(extent, identity.root, key, before, key)
        before = key
    assert client.commit(seq, [0, 0, 7]) == COMMITTED + NOT_RESERVED * 2
    assert client.commit(seq, [0]) == NOT_RESERVED
    assert client.commit(seq, [1]) == COMMITTED
    assert client.commit(seq, [1]) == NOT_RESERVED


def test_a_record_that_was_not_written_or_names_another_key_is_not_committed(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    keys = list(keys_of(chain))
    seq, reply = client.reserve(identity.identity_id, chain)
    extents = unpack_extents(reply.extents)
    client.write(extents[1], identity.root, keys[0], b"", b"x")
    assert client.commit(seq, [0, 1]) == BAD_RECORD * 2
    assert client.lookup(identity.identity_id, chain).n_chunks == 0
    assert set(client.store(identity, chain)) == {wire.ReserveOutcome.RESERVED}, "the extents are free again"


def test_an_aborted_reservation_leaves_nothing(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 3)
    seq, _ = client.reserve(identity.identity_id, chain)
    assert client.abort(seq, [0, 0, 9]) == 1
    assert client.abort(seq) == 2
    assert client.abort(seq) == 0
    assert client.lookup(identity.identity_id, chain).reason in ("unknown_key", "never_stored")


def test_a_release_is_counted_once_per_share(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain)
    name = (client.session, reply.seq)
    assert client.release([name, name]) == 1
    assert client.release([name]) == 0
    assert client.release([(bytes(16), 77)]) == 0


def test_a_lease_of_another_group_cannot_be_released(server: ServerProcess, client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain)
    own, other = (client.lookup(identity.identity_id, chain) for _ in range(2))
    with RpcClient(server.socket_dir) as stranger:
        theirs = new_prompt(stranger, 1)
        stranger.store(*theirs)
        lease = stranger.lookup(theirs[0].identity_id, theirs[1])
        with pytest.raises(RpcError) as caught:
            stranger.release([(stranger.session, lease.seq), (client.session, own.seq)], group=True)
        assert (caught.value.code, caught.value.field) == ("not_permitted", "leases")
        assert stranger.release([(stranger.session, lease.seq)]) == 1, "the refused message released nothing"
    assert client.release([(client.session, own.seq), (client.session, other.seq)]) == 2


def test_a_lookup_with_no_time_left_still_gets_what_l1_has(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain, deadline_ms=0)
    assert reply.n_chunks == 2
    client.release([(client.session, reply.seq)])


def test_long_prompts_are_looked_up_off_the_loop_with_the_same_answer(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 5_000)
    client.store(identity, chain[: 20 * KEY_BYTES])
    reply = client.lookup(identity.identity_id, chain)
    assert (reply.n_chunks, reply.reason) == (20, "unknown_key")
    assert client.release([(client.session, reply.seq)]) == 1


def test_cancel_undoes_a_lookup_and_a_reserve(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 4)
    client.store(identity, chain[: 2 * KEY_BYTES])
    found = client.lookup(identity.identity_id, chain)
    seq, _ = client.reserve(identity.identity_id, chain)
    assert_held(client, leases=1, reservations=1)
    assert client.cancel(found.seq) == 1
    assert client.cancel(seq) == 1
    assert_held(client, leases=0, reservations=0)
    assert client.cancel(found.seq) == 0
    assert client.commit(seq, [2, 3]) == NOT_RESERVED * 2


def test_a_ping_releases_the_lookups_it_does_not_name(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain)
    wanted, unwanted = (client.lookup(identity.identity_id, chain) for _ in range(2))
    client.ping()
    assert_held(client, leases=2, reservations=0)
    client.resume([wanted.seq])
    assert_held(client, leases=1, reservations=0)
    assert client.release([(client.session, wanted.seq)]) == 1
    assert client.release([(client.session, unwanted.seq)]) == 0
