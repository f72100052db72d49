"""A real server and engines of several processes: whose slices count, and whose deaths end which shares of a lease."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, Role, unpack_extents
from tests.harness.rpc_client import (
    RpcClient,
    RpcError,
    assert_held,
    assert_nothing_held,
    chain_of,
    keys_of,
    new_prompt,
    part,
    payload,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[tuple[RpcClient, RpcClient, RpcClient]]:
    """A scheduler and two workers that hold half of the heads each."""
    group = secrets.token_bytes(16)
    made = [RpcClient(server.socket_dir, role=Role.SCHEDULER, group=group, engine_slices=2)]
    made += [
        RpcClient(server.socket_dir, role=Role.WORKER, group=group, engine_slices=2, slice_held=held)
        for held in (part(0, 4), part(4, 8))
    ]
    with made[0], made[1], made[2]:
        yield made[0], made[1], made[2]
    assert_nothing_held(server.socket_dir)


def test_a_chunk_counts_only_when_every_slice_of_the_engine_has_it(engine):
    scheduler, *workers = engine
    salt = secrets.token_hex(8)
    identity = scheduler.identify(salt=salt)
    assert identity.complete
    assert identity.slices == sorted(worker.slice.digest() for worker in workers if worker.slice)
    chain = chain_of(identity.root, 3)
    own = [worker.identify(salt=salt) for worker in workers]
    assert {identity.root} == {reply.root for reply in own}
    workers[0].store(own[0], chain)
    assert scheduler.lookup(identity.identity_id, chain).n_chunks == 0
    workers[1].store(own[1], chain[: 2 * KEY_BYTES])
    reply = scheduler.lookup(identity.identity_id, chain)
    assert reply.n_chunks == 2
    extents = unpack_extents(reply.extents)
    assert len(extents) == 4
    by_digest = {worker.slice.digest(): worker for worker in workers if worker.slice}
    for number, extent in enumerate(extents):
        worker = by_digest[identity.slices[number % 2]]
        assert worker.read(extent) == payload(list(keys_of(chain))[number // 2])
    assert scheduler.release([(scheduler.session, reply.seq)], group=True) == 1
    assert scheduler.cancel(reply.seq) == 0, "the lookup has no lease to undo"


def test_a_lease_lasts_until_every_process_of_the_group_has_ended_its_share(engine):
    scheduler, first, second = engine
    identity, chain = stored_by_all(engine)
    reply = scheduler.lookup(identity.identity_id, chain)
    name = (scheduler.session, reply.seq)
    assert first.release([name]) == 1
    assert scheduler.release([name]) == 1
    assert_held(scheduler, leases=1, reservations=0)
    scheduler.resume([])
    assert_held(scheduler, leases=1, reservations=0)
    assert first.release([name]) == 0
    assert second.release([name]) == 1
    assert_held(scheduler, leases=0, reservations=0)
    assert scheduler.cancel(reply.seq) == 0, "the lookup has no lease to undo"


def stored_by_all(engine: tuple[RpcClient, RpcClient, RpcClient]) -> tuple[wire.IdentifyReply, bytes]:
    """A new identity and the chain keys of a prompt that both workers have stored."""
    scheduler, *workers = engine
    salt = secrets.token_hex(8)
    identity = scheduler.identify(salt=salt)
    chain = chain_of(identity.root, 2)
    for worker in workers:
        worker.store(worker.identify(salt=salt), chain)
    return identity, chain


def test_while_workers_are_missing_every_lookup_finds_nothing(server: ServerProcess) -> None:
    group = secrets.token_bytes(16)
    scheduler = RpcClient(server.socket_dir, role=Role.SCHEDULER, group=group, engine_slices=2)
    worker = RpcClient(
        server.socket_dir, role=Role.WORKER, group=group, engine_slices=2, slice_held=part(0, 4)
    )
    with scheduler, worker:
        identity = scheduler.identify()
        assert not identity.complete
        reply = scheduler.lookup(identity.identity_id, chain_of(identity.root, 2), request_id="early")
        assert (reply.n_chunks, reply.reason) == (0, "refused")
        assert "1 of 2 slices" in scheduler.explain("early")["lookups"][-1]["first_miss"]["detail"]


def test_a_scheduler_stores_nothing(engine: tuple[RpcClient, RpcClient, RpcClient]) -> None:
    scheduler = engine[0]
    identity = scheduler.identify()
    with pytest.raises(RpcError) as caught:
        scheduler.reserve(identity.identity_id, bytes(KEY_BYTES))
    assert caught.value.field == "slice"


def test_workers_are_told_of_leases_whose_scheduler_is_gone(engine):
    scheduler, first, second = engine
    identity, chain = stored_by_all(engine)
    reply = scheduler.lookup(identity.identity_id, chain)
    name = (scheduler.session, reply.seq)
    scheduler.goodbye()
    assert first.ping().orphaned == second.ping().orphaned == [name]
    assert first.release([name]) == 1
    assert first.ping().orphaned == []
    assert_held(second, leases=1, reservations=0)
    assert second.release([name]) == 1
    assert_held(second, leases=0, reservations=0)
    scheduler.replace()


def test_a_lease_ends_without_the_share_of_a_worker_that_is_gone(engine):
    scheduler, first, second = engine
    identity, chain = stored_by_all(engine)
    reply = scheduler.lookup(identity.identity_id, chain)
    second.goodbye()
    name = (scheduler.session, reply.seq)
    assert [scheduler.release([name]), first.release([name])] == [1, 1]
    assert_held(scheduler, leases=0, reservations=0)
    assert scheduler.lookup(identity.identity_id, chain).reason == "refused", (
        "the slice of the second worker is missing"
    )
    second.replace()
    again = scheduler.lookup(identity.identity_id, chain)
    assert again.n_chunks == 2
    scheduler.release([(scheduler.session, again.seq)], group=True)


def test_extents_reserved_by_a_process_are_free_once_it_is_gone(server: ServerProcess) -> None:
    with RpcClient(server.socket_dir) as first:
        salt = secrets.token_hex(8)
        identity = first.identify(salt=salt)
        chain = chain_of(identity.root, 3)
        first.reserve(identity.identity_id, chain)
    with RpcClient(server.socket_dir) as second:
        assert set(second.store(second.identify(salt=salt), chain)) == {wire.ReserveOutcome.RESERVED}
    assert_nothing_held(server.socket_dir)


def test_a_detached_session_keeps_its_row_and_its_leases(client: RpcClient) -> None:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain)
    row = client.attachment.row if client.attachment else -1
    client.detach()
    client.attach()
    assert client.attachment is not None and client.attachment.row == row
    assert client.release([(client.session, reply.seq)]) == 1
