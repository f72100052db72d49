"""A real server and a client with nothing between it and the wire: what each operation promises."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import LayoutRefused, NotPermitted
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, Role, unpack_extents
from tests.harness.cache_engine import eventually
from tests.harness.child import Child
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    RpcClient,
    RpcError,
    chain_of,
    keys_of,
    layout,
    open_descriptors,
    part,
    payload,
)
from tests.harness.server_process import ServerFailed, ServerProcess

pytestmark = pytest.mark.integration

COMMITTED, NOT_RESERVED, BAD_RECORD = (bytes([outcome]) for outcome in wire.CommitOutcome)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64, flags=("--no-http",)) as process:
        process.start()
        yield process
        assert process.stop() == 0, process.log_tail()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[RpcClient]:
    """A client of its own engine; after the test nothing of it is left in the server."""
    with RpcClient(server.socket_dir) as made:
        yield made
    assert_nothing_held(server)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers that belong to the test alone."""
    started: list[ServerProcess] = []

    def starter(**arguments: Any) -> ServerProcess:
        arguments.setdefault("l1_mb", 16)
        flags = ("--no-http", *arguments.pop("flags", ()))
        process = ServerProcess(tmp_path / f"server{len(started)}", flags=flags, **arguments)
        started.append(process)
        process.start()
        return process

    yield starter
    for process in started:
        process.close()


def assert_nothing_held(server: ServerProcess) -> None:
    with RpcClient(server.socket_dir) as observer:
        status = observer.status()
    held = {
        name: status["pool"][name] for name in ("leases", "reservations", "leased_bytes", "reserved_bytes")
    }
    assert not any(held.values()), held
    assert status["sessions"]["leases"] == status["sessions"]["extents_being_written"] == 0


def fresh(client: RpcClient, n_chunks: int = 4) -> tuple[wire.IdentifyReply, bytes]:
    """An identity nobody used before, and chain keys of a prompt under it."""
    identity = client.identify(salt=secrets.token_hex(8))
    return identity, chain_of(identity.root, n_chunks)


# --- hello, sessions, who may ask -----------------------------------------------------------------------------


def test_hello_needs_no_session_and_tells_what_a_client_needs(server: ServerProcess) -> None:
    for endpoint in (None, f"tcp://127.0.0.1:{server.ready['port']}"):
        client = RpcClient(server.socket_dir)
        client.connect(endpoint)
        reply = client.ask(wire.Hello(wire.NO_SESSION, 7, wire.PROTOCOL_VERSION, "test"), wire.HelloReply)
        assert reply.seq == 7
        assert reply.epoch == server.ready["epoch"]
        assert reply.socket_dir == str(server.socket_dir)
        assert reply.max_reserved_bytes == server.ready["l1_bytes"] // 8
        assert reply.has_l2 is False
        client.close()


def test_another_protocol_version_is_refused_by_name(client: RpcClient) -> None:
    with pytest.raises(RpcError, match="upgrade") as caught:
        client.ask(wire.Hello(client.session, client.next_seq(), 99), wire.HelloReply)
    assert (caught.value.code, caught.value.field) == ("wrong_version", "protocol")


def test_over_tcp_nothing_but_hello_and_ping_works_without_a_session(server: ServerProcess) -> None:
    client = RpcClient(server.socket_dir)
    client.connect(f"tcp://127.0.0.1:{server.ready['port']}")
    client.session = wire.NO_SESSION
    assert client.ping().epoch == server.ready["epoch"]
    for request in (wire.Status(wire.NO_SESSION, 1), wire.Explain(wire.NO_SESSION, 2, "x")):
        with pytest.raises(RpcError) as caught:
            client.ask(request, wire.Document)
        assert caught.value.code == "not_permitted"
    with pytest.raises(RpcError) as caught:
        client.ask(wire.Clear(wire.NO_SESSION, 3, wire.Tier.ALL), wire.Cleared)
    assert caught.value.code == "unknown_session"
    client.close()


def test_over_the_local_socket_status_works_without_a_session(server: ServerProcess) -> None:
    client = RpcClient(server.socket_dir)
    client.connect()
    client.session = wire.NO_SESSION
    assert client.status()["instance"]["epoch"] == server.ready["epoch"]
    client.close()


def requests_of(session: bytes) -> list[wire.Request]:
    groups = [wire.Group(wire.Rule.PREFIX, bytes(KEY_BYTES))]
    return [
        wire.Identify(session, 1, wire.RequestIdentity()),
        wire.Ping(session, 2),
        wire.Lookup(session, 3, 100, 1, "", groups),
        wire.Release(session, 4, []),
        wire.Reserve(session, 5, 100, 1, b"", bytes(KEY_BYTES), RECORD_BYTES),
        wire.Commit(session, 6, 1, [0]),
        wire.Abort(session, 7, 1),
        wire.Cancel(session, 8, 1),
        wire.Retrieve(session, 9, 1, bytes(KEY_BYTES), bytes(KEY_BYTES), 0, 10),
        wire.Prefetch(session, 10, 1, bytes(KEY_BYTES), 0, 1000),
        wire.Status(session, 11),
        wire.Clear(session, 12, wire.Tier.L1),
        wire.Explain(session, 13, "x"),
        wire.Quiesced(session, 14),
        wire.Corrupt(session, 15, bytes(KEY_BYTES)),
    ]


@pytest.mark.parametrize("number", range(15))
def test_a_session_that_is_not_attached_gets_unknown_session(server: ServerProcess, number: int) -> None:
    client = RpcClient(server.socket_dir)
    client.connect()
    request = requests_of(client.session)[number]
    client.send(request)
    reply = client.receive()
    assert isinstance(reply, wire.Error)
    assert (reply.code, reply.seq, reply.retryable) == ("unknown_session", request.seq, True)
    assert reply.epoch == server.ready["epoch"]
    client.close()


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "seq", "field"),
    [
        (b"", 0, "message"),
        (b"\xc1", 0, "message"),
        (b"\x00", 0, "message"),
        (b"GET / HTTP/1.1", 0, "message"),
        (b"\x80", 0, "message"),
        (b"\x93\xa4ping", 0, "message"),
        (wire.encode(wire.Ping(bytes(16), 5))[:-1], 0, "message"),
        (b"\x90", 0, "message"),
        (b"\x94\xa7no_such\xc4\x10" + bytes(16) + b"\x09\xc0", 9, "op"),
        (b"\x93\xa4ping\xc4\x10" + bytes(16) + b"\xa1x", 0, "seq"),
        (b"\x93\xa4ping\xc4\x03abc\x05", 5, "session"),
        (b"\x93\xa4ping\xc4\x10" + bytes(16) + b"\xff", 0, "seq"),
        (b"\x94\xa4ping\xc4\x10" + bytes(16) + b"\x06\xa3abc", 6, "live"),
        (b"\x94\xa4ping\xc4\x10" + bytes(16) + b"\x06\x91\xff", 6, "live[0]"),
        (b"\xdd\xff\xff\xff\xff", 0, "message"),
        (b"\x91" * 10_000, 0, "message"),
    ],
)
def test_a_malformed_message_gets_an_error_that_names_what_is_wrong(
    client: RpcClient, frame: bytes, seq: int, field: str
) -> None:
    client.send_frames(frame)
    reply = client.receive()
    assert isinstance(reply, wire.Error)
    assert (reply.code, reply.seq, reply.field) == ("bad_request", seq, field), reply
    client.ping()


def test_a_message_of_several_frames_gets_an_error(client: RpcClient) -> None:
    client.send_frames(b"", wire.encode(wire.Ping(client.session, 1)))
    frames = client.receive_frames()
    assert frames[0] == b""
    reply = wire.decode_reply(frames[1])
    assert isinstance(reply, wire.Error) and reply.field == "message"
    client.ping()


def bad_requests(session: bytes, identity: int) -> dict[str, wire.Request]:
    def lookup(keys: bytes, **more: Any) -> wire.Lookup:
        return wire.Lookup(session, 1000, 100, identity, "", [wire.Group(wire.Rule.PREFIX, keys)], **more)

    def reserve(**fields: Any) -> wire.Reserve:
        known = {"parent": b"", "keys": bytes(KEY_BYTES), "record_bytes": RECORD_BYTES, "probe": b""}
        return wire.Reserve(session, 1000, 100, identity, **{**known, **fields})

    return {
        "groups[0].keys": lookup(b""),
        "groups[0].keys ": lookup(bytes(33)),
        "probe": lookup(bytes(KEY_BYTES), probe=b"1234"),
        "keys": reserve(keys=bytes(31)),
        "keys ": reserve(keys=b""),
        "parent": reserve(parent=bytes(31)),
        "probe ": reserve(probe=b"1"),
        "record_bytes": reserve(record_bytes=4096),
        "record_bytes ": reserve(record_bytes=1 << 40),
        "target": wire.Cancel(session, 1000, 1000),
        "job": wire.Status(session, 1000, 999_999),
        "keys  ": wire.Corrupt(session, 1000, bytes(5)),
        "keys   ": wire.Prefetch(session, 1000, identity, bytes(5), 0, 10),
        "tenant": wire.Clear(session, 1000, wire.Tier.L2, "one tenant"),
    }


@pytest.mark.parametrize("field", bad_requests(b"", 0))
def test_a_wrong_field_is_named(client: RpcClient, field: str) -> None:
    identity, _ = fresh(client)
    client.send(bad_requests(client.session, identity.identity_id)[field])
    reply = client.receive()
    assert isinstance(reply, wire.Error)
    assert (reply.code, reply.field, reply.seq) == ("bad_request", field.strip(), 1000), reply


def test_an_identity_never_declared_is_unknown(client: RpcClient) -> None:
    with pytest.raises(RpcError) as caught:
        client.lookup(12345, bytes(KEY_BYTES))
    assert (caught.value.code, caught.value.retryable) == ("unknown_identity", True)


# --- store, lookup, release -----------------------------------------------------------------------------------


def test_what_was_stored_is_found_and_its_bytes_are_those_written(client: RpcClient) -> None:
    identity, chain = fresh(client, 5)
    assert client.lookup(identity.identity_id, chain).n_chunks == 0
    assert set(client.store(identity, chain)) == {wire.ReserveOutcome.RESERVED}
    reply = client.lookup(identity.identity_id, chain)
    assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (5, 5, 0, "")
    for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
        assert client.read(extent) == payload(key)
    assert client.release([(client.session, reply.seq)]) == 1


def test_only_the_leading_chunks_count(client: RpcClient) -> None:
    identity, chain = fresh(client, 6)
    client.store(identity, chain[: 3 * KEY_BYTES])
    client.store(identity, chain[5 * KEY_BYTES :], parent=chain[4 * KEY_BYTES : 5 * KEY_BYTES])
    reply = client.lookup(identity.identity_id, chain)
    assert reply.n_chunks == 3
    assert len(unpack_extents(reply.extents)) == 3
    client.release([(client.session, reply.seq)])


def test_nothing_is_seen_before_its_commit(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
    seq, reply = client.reserve(identity.identity_id, chain)
    client.write(unpack_extents(reply.extents)[0], identity.root, chain, b"", b"x")
    found = client.lookup(identity.identity_id, chain)
    assert (found.n_chunks, found.reason) == (0, "in_flight")
    assert client.commit(seq, [0]) == COMMITTED
    found = client.lookup(identity.identity_id, chain)
    assert found.n_chunks == 1
    client.release([(client.session, found.seq)])


def test_reserving_what_is_there_or_being_written_gives_no_extent(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    client.store(identity, chain[:KEY_BYTES])
    first, _ = client.reserve(identity.identity_id, chain)
    _, again = client.reserve(identity.identity_id, chain)
    assert list(again.outcomes) == [wire.ReserveOutcome.PRESENT, wire.ReserveOutcome.IN_FLIGHT]
    assert again.extents == bytes(len(again.extents))
    assert client.abort(first) == 1


def test_a_commit_of_what_was_never_reserved_says_so(client: RpcClient) -> None:
    assert client.commit(4711, [0, 1]) == NOT_RESERVED * 2
    identity, chain = fresh(client, 1)
    lookup = client.lookup(identity.identity_id, chain)
    assert client.commit(lookup.seq, [0]) == NOT_RESERVED


def test_a_second_commit_and_indices_out_of_range_are_not_reserved(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    seq, reply = client.reserve(identity.identity_id, chain)
    before = b""
    for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
        client.write(extent, identity.root, key, before, key)
        before = key
    assert client.commit(seq, [0, 0, 7]) == COMMITTED + NOT_RESERVED * 2
    assert client.commit(seq, [0]) == NOT_RESERVED
    assert client.commit(seq, [1]) == COMMITTED
    assert client.commit(seq, [1]) == NOT_RESERVED


def test_a_record_that_was_not_written_or_names_another_key_is_not_taken(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    keys = list(keys_of(chain))
    seq, reply = client.reserve(identity.identity_id, chain)
    extents = unpack_extents(reply.extents)
    client.write(extents[1], identity.root, keys[0], b"", b"x")
    assert client.commit(seq, [0, 1]) == BAD_RECORD * 2
    assert client.lookup(identity.identity_id, chain).n_chunks == 0
    assert set(client.store(identity, chain)) == {wire.ReserveOutcome.RESERVED}, "the extents are free again"


def test_an_aborted_reservation_leaves_nothing(client: RpcClient) -> None:
    identity, chain = fresh(client, 3)
    seq, _ = client.reserve(identity.identity_id, chain)
    assert client.abort(seq, [0, 0, 9]) == 1
    assert client.abort(seq) == 2
    assert client.abort(seq) == 0
    assert client.lookup(identity.identity_id, chain).reason in ("unknown_key", "never_stored")


def test_a_release_is_counted_once_per_share(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain)
    name = (client.session, reply.seq)
    assert client.release([name, name]) == 1
    assert client.release([name]) == 0
    assert client.release([(bytes(16), 77)]) == 0


def test_a_foreign_lease_cannot_be_released(server: ServerProcess, client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    client.store(identity, chain)
    own, other = (client.lookup(identity.identity_id, chain) for _ in range(2))
    with RpcClient(server.socket_dir) as stranger:
        theirs = fresh(stranger, 1)
        stranger.store(*theirs)
        lease = stranger.lookup(theirs[0].identity_id, theirs[1])
        with pytest.raises(RpcError) as caught:
            stranger.release([(stranger.session, lease.seq), (client.session, own.seq)], group=True)
        assert (caught.value.code, caught.value.field) == ("not_permitted", "leases")
        assert stranger.release([(stranger.session, lease.seq)]) == 1, "the refused message released nothing"
    assert client.release([(client.session, own.seq), (client.session, other.seq)]) == 2


def test_a_lookup_with_no_time_left_still_gets_what_is_there(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain, deadline_ms=0)
    assert reply.n_chunks == 2
    client.release([(client.session, reply.seq)])


def test_long_prompts_are_looked_up_off_the_loop_with_the_same_answer(client: RpcClient) -> None:
    identity, chain = fresh(client, 5_000)
    client.store(identity, chain[: 20 * KEY_BYTES])
    reply = client.lookup(identity.identity_id, chain)
    assert (reply.n_chunks, reply.reason) == (20, "unknown_key")
    assert client.release([(client.session, reply.seq)]) == 1


# --- repeats, cancel, ping ------------------------------------------------------------------------------------


def test_a_repeated_request_gets_the_same_bytes_and_is_not_done_twice(client: RpcClient) -> None:
    identity, chain = fresh(client, 3)
    client.store(identity, chain[:KEY_BYTES])
    reserve = wire.Reserve(
        client.session, client.next_seq(), 5_000, identity.identity_id, b"", chain, RECORD_BYTES
    )
    lookup = client.lookup_request(identity.identity_id, chain)
    identify = wire.Identify(client.session, client.next_seq(), wire.RequestIdentity(salt="again"))
    prefetch = wire.Prefetch(client.session, client.next_seq(), identity.identity_id, chain, 0, 1000)
    for request in (reserve, lookup, identify, prefetch):
        replies = []
        for connection in range(2):
            for _ in range(2):
                client.send_frames(wire.encode(request))
                replies.append(client.receive_frames())
            if connection == 0:
                client.connect()
        assert len({frames[0] for frames in replies}) == 1, request
    status = client.status()
    assert status["pool"]["reservations"] == 1
    assert status["sessions"]["leases"] == 1
    for request in (
        wire.Abort(client.session, client.next_seq(), reserve.seq),
        wire.Release(client.session, client.next_seq(), [(client.session, lookup.seq)]),
    ):
        assert [client.ask(request, wire.Ok).count for _ in range(3)] == [
            client.ask(request, wire.Ok).count
        ] * 3
    assert_status(client, leases=0, reservations=0)


def assert_status(client: RpcClient, *, leases: int, reservations: int) -> None:
    status = client.status()
    assert (status["sessions"]["leases"], status["pool"]["leases"]) == (leases, leases)
    assert status["pool"]["reservations"] == reservations


def test_a_seq_may_not_name_two_operations(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
    client.lookup(identity.identity_id, chain)
    with pytest.raises(RpcError, match="used before for lookup") as caught:
        client.ask(wire.Identify(client.session, client.seq, wire.RequestIdentity()), wire.IdentifyReply)
    assert caught.value.field == "seq"


def test_requests_older_than_what_is_remembered_are_refused_and_not_done(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
    client.store(identity, chain)
    late = client.lookup_request(identity.identity_id, chain)
    for _ in range(11):
        for _ in range(100):
            client.send(wire.Release(client.session, client.next_seq(), []))
        for _ in range(100):
            client.receive()
    with pytest.raises(RpcError, match="older") as caught:
        client.ask(late, wire.LookupReply)
    assert (caught.value.code, caught.value.field) == ("bad_request", "seq")
    assert_status(client, leases=0, reservations=0)


def test_cancel_undoes_a_lookup_and_a_reserve(client: RpcClient) -> None:
    identity, chain = fresh(client, 4)
    client.store(identity, chain[: 2 * KEY_BYTES])
    found = client.lookup(identity.identity_id, chain)
    seq, _ = client.reserve(identity.identity_id, chain)
    assert_status(client, leases=1, reservations=1)
    assert client.cancel(found.seq) == 1
    assert client.cancel(seq) == 1
    assert_status(client, leases=0, reservations=0)
    assert client.cancel(found.seq) == 0
    assert client.commit(seq, [2, 3]) == NOT_RESERVED * 2


def test_cancel_works_before_its_target_arrives_and_without_it(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
    client.store(identity, chain)
    late = client.lookup_request(identity.identity_id, chain)
    assert client.cancel(late.seq) == 0
    with pytest.raises(RpcError) as caught:
        client.ask(late, wire.LookupReply)
    assert caught.value.code == "cancelled"
    assert client.cancel(999_999) == 0
    assert_status(client, leases=0, reservations=0)


def test_a_ping_releases_the_lookups_it_does_not_name(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    client.store(identity, chain)
    wanted, unwanted = (client.lookup(identity.identity_id, chain) for _ in range(2))
    client.ping()
    assert_status(client, leases=2, reservations=0)
    client.ping([wanted.seq])
    assert_status(client, leases=1, reservations=0)
    assert client.release([(client.session, wanted.seq)]) == 1
    assert client.release([(client.session, unwanted.seq)]) == 0


def test_a_late_ping_does_not_speak_of_newer_lookups(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
    client.store(identity, chain)
    late = wire.Ping(client.session, client.next_seq(), [])
    found = client.lookup(identity.identity_id, chain)
    client.ask(late, wire.Pong)
    assert client.release([(client.session, found.seq)]) == 1


def test_pings_do_not_end_reservations(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
    seq, _ = client.reserve(identity.identity_id, chain)
    client.ping([])
    assert client.abort(seq) == 1


# --- groups ---------------------------------------------------------------------------------------------------


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
    assert_nothing_held(server)


def test_a_chunk_counts_when_all_slices_of_the_engine_have_it(
    engine: tuple[RpcClient, RpcClient, RpcClient],
) -> None:
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
    assert scheduler.cancel(reply.seq) == 0, "nothing of it is left to undo"


def test_a_lease_lasts_until_every_member_has_ended_its_share(
    engine: tuple[RpcClient, RpcClient, RpcClient],
) -> None:
    scheduler, first, second = engine
    identity, chain = stored_by_all(engine)
    reply = scheduler.lookup(identity.identity_id, chain)
    name = (scheduler.session, reply.seq)
    assert first.release([name]) == 1
    assert scheduler.release([name]) == 1
    assert_status(scheduler, leases=1, reservations=0)
    scheduler.ping([])
    assert_status(scheduler, leases=1, reservations=0)
    assert first.release([name]) == 0
    assert second.release([name]) == 1
    assert_status(scheduler, leases=0, reservations=0)
    assert scheduler.cancel(reply.seq) == 0, "nothing of it is left to undo"


def stored_by_all(engine: tuple[RpcClient, RpcClient, RpcClient]) -> tuple[wire.IdentifyReply, bytes]:
    scheduler, *workers = engine
    salt = secrets.token_hex(8)
    identity = scheduler.identify(salt=salt)
    chain = chain_of(identity.root, 2)
    for worker in workers:
        worker.store(worker.identify(salt=salt), chain)
    return identity, chain


def test_while_workers_are_missing_every_lookup_answers_nothing(server: ServerProcess) -> None:
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


def test_workers_are_told_of_leases_whose_scheduler_is_gone(
    engine: tuple[RpcClient, RpcClient, RpcClient],
) -> None:
    scheduler, first, second = engine
    identity, chain = stored_by_all(engine)
    reply = scheduler.lookup(identity.identity_id, chain)
    name = (scheduler.session, reply.seq)
    scheduler.goodbye()
    assert first.ping().orphaned == second.ping().orphaned == [name]
    assert first.release([name]) == 1
    assert first.ping().orphaned == []
    assert_status(second, leases=1, reservations=0)
    assert second.release([name]) == 1
    assert_status(second, leases=0, reservations=0)
    scheduler.replace()


def test_a_worker_that_is_gone_holds_no_lease_back(engine: tuple[RpcClient, RpcClient, RpcClient]) -> None:
    scheduler, first, second = engine
    identity, chain = stored_by_all(engine)
    reply = scheduler.lookup(identity.identity_id, chain)
    second.goodbye()
    name = (scheduler.session, reply.seq)
    assert [scheduler.release([name]), first.release([name])] == [1, 1]
    assert_status(scheduler, leases=0, reservations=0)
    assert scheduler.lookup(identity.identity_id, chain).reason == "refused", (
        "its slice is not there any more"
    )
    second.replace()
    again = scheduler.lookup(identity.identity_id, chain)
    assert again.n_chunks == 2
    scheduler.release([(scheduler.session, again.seq)], group=True)


def test_what_a_process_reserved_is_free_when_it_is_gone(server: ServerProcess) -> None:
    with RpcClient(server.socket_dir) as first:
        salt = secrets.token_hex(8)
        identity = first.identify(salt=salt)
        chain = chain_of(identity.root, 3)
        first.reserve(identity.identity_id, chain)
    with RpcClient(server.socket_dir) as second:
        assert set(second.store(second.identify(salt=salt), chain)) == {wire.ReserveOutcome.RESERVED}
    assert_nothing_held(server)


def test_detached_sessions_go_on(client: RpcClient) -> None:
    identity, chain = fresh(client, 2)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain)
    row = client.attachment.row if client.attachment else -1
    client.detach()
    assert client.lookup(identity.identity_id, chain).n_chunks == 2
    client.attach()
    assert client.attachment is not None and client.attachment.row == row
    assert client.release([(client.session, reply.seq), (client.session, client.seq)]) >= 1
    client.ping([])


# --- retrieve, corrupt, clear, prefetch, explain, status ------------------------------------------------------


def test_retrieve_gives_the_record_in_pieces(client: RpcClient) -> None:
    identity, chain = fresh(client, 1)
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


def test_large_pieces_are_copied_off_the_loop(start: Callable[..., ServerProcess]) -> None:
    server = start(l1_mb=64)
    with RpcClient(server.socket_dir) as client:
        identity, chain = fresh(client, 1)
        seq, reply = client.reserve(identity.identity_id, chain, record=3 << 20)
        extent = unpack_extents(reply.extents)[0]
        assert extent.length_bytes >= 3 << 20
        client.abort(seq)
        client.store(identity, chain)
        assert client.slice is not None
        request = wire.Retrieve(
            client.session, client.next_seq(), identity.identity_id, chain, client.slice.digest(), 0, 1 << 20
        )
        assert client.ask(request, wire.RetrieveReply).found


def test_long_stores_are_reserved_off_the_loop_and_committed(start: Callable[..., ServerProcess]) -> None:
    server = start(l1_mb=256)
    with RpcClient(server.socket_dir) as client:
        identity, chain = fresh(client, 400)
        assert set(client.store(identity, chain)) == {wire.ReserveOutcome.RESERVED}
        reply = client.lookup(identity.identity_id, chain)
        assert reply.n_chunks == 400
        client.release([(client.session, reply.seq)])
        seq, _ = client.reserve(identity.identity_id, chain_of(identity.root, 300, first_token=10**6))
        assert client.cancel(seq) == 1
        assert_status(client, leases=0, reservations=0)


def test_a_corrupt_chunk_is_dropped_when_the_server_sees_it_too(client: RpcClient) -> None:
    identity, chain = fresh(client, 3)
    client.store(identity, chain)
    reply = client.lookup(identity.identity_id, chain, request_id="c1")
    keys = list(keys_of(chain))
    assert client.ask(wire.Corrupt(client.session, client.next_seq(), keys[1]), wire.Ok).count == 0, (
        "it is sound"
    )
    extent = unpack_extents(reply.extents)[1]
    assert client.extents is not None
    view = client.extents.view(extent.offset_bytes, extent.length_bytes)
    view[RECORD_BYTES - 100] ^= 1
    assert client.ask(wire.Corrupt(client.session, client.next_seq(), keys[1]), wire.Ok).count == 1
    del view
    client.release([(client.session, reply.seq)])
    again = until_reason(client, identity, chain, "corrupt")
    assert again.n_chunks == 1


def until_reason(
    client: RpcClient, identity: wire.IdentifyReply, chain: bytes, reason: str
) -> wire.LookupReply:
    """Look up until explain has heard of what happened (it hears a tenth of a second later)."""
    while True:
        reply = client.lookup(identity.identity_id, chain, request_id="until")
        client.ping([])
        if reply.reason == reason:
            return reply
        assert reply.reason in ("unknown_key", "never_stored"), reply.reason


def test_clear_drops_the_chunks_of_the_tenant_named_and_says_whose_bytes_are_still_read(
    client: RpcClient,
) -> None:
    tenant = secrets.token_hex(4)
    ours, others = client.identify(tenant=tenant), client.identify(tenant=tenant + "x")
    chains = [chain_of(identity.root, 3) for identity in (ours, others)]
    client.store(ours, chains[0])
    client.store(others, chains[1])
    leased = client.lookup(ours.identity_id, chains[0][:KEY_BYTES])
    clear = wire.Clear(client.session, client.next_seq(), wire.Tier.L1, tenant)
    done = client.ask(clear, wire.Cleared)
    assert (done.count, done.held, done.leased, done.kept) == (3, 0, 1, 0)
    assert client.lookup(ours.identity_id, chains[0]).n_chunks == 0
    wait = client.send(wire.Clear(client.session, client.next_seq(), wire.Tier.L1, tenant, wait=True))
    client.release([(client.session, leased.seq)])
    freed = client.expect(wait, wire.Cleared)
    assert (freed.count, freed.held, freed.leased) == (0, 0, 0)
    kept = client.lookup(others.identity_id, chains[1])
    assert kept.n_chunks == 3
    client.release([(client.session, kept.seq)])


def test_prefetch_without_l2_reports_what_is_there(client: RpcClient) -> None:
    identity, chain = fresh(client, 4)
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


def test_explain_tells_hits_and_the_first_miss(client: RpcClient) -> None:
    identity, chain = fresh(client, 3)
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


def test_the_same_prompt_under_another_identity_is_explained(client: RpcClient) -> None:
    probe = secrets.token_bytes(8)
    stored = client.identify(adapter=probe.hex())
    client.store(stored, chain_of(stored.root, 2), probe=probe)
    asked = client.identify()
    reply = client.lookup(asked.identity_id, chain_of(asked.root, 2), request_id=probe.hex(), probe=probe)
    assert reply.reason == "identity_differs"
    assert client.explain(probe.hex())["lookups"][0]["first_miss"]["detail"].startswith("adapter")


def test_status_tells_who_is_attached(client: RpcClient) -> None:
    status = client.status()
    [peer] = [peer for peer in status["peers"] if peer["session"] == client.session.hex()]
    assert (peer["role"], peer["model"], peer["complete"]) == ("client", "tiny", True)
    assert peer["copies"] is None, "its blocks are in host memory"
    assert status["instance"]["ready"] is True


# --- pressure -------------------------------------------------------------------------------------------------


def test_under_pressure_the_newest_stay_and_explain_says_who_was_evicted(
    start: Callable[..., ServerProcess],
) -> None:
    server = start(l1_mb=4)
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        old = chain_of(identity.root, 4, first_token=0)
        client.store(identity, old)
        for number in range(1, 60):
            outcomes = client.store(identity, chain_of(identity.root, 4, first_token=number * 1_000_000))
            assert set(outcomes) == {wire.ReserveOutcome.RESERVED}
        newest = client.lookup(identity.identity_id, chain_of(identity.root, 4, first_token=59 * 1_000_000))
        assert newest.n_chunks == 4
        reply = until_reason(client, identity, old, "evicted")
        assert reply.n_chunks == 0
        assert "LRU" in client.explain("until")["lookups"][-1]["first_miss"]["detail"]


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


def test_tenants_belong_to_tokens(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    tokens = tmp_path / "tenants"
    tokens.write_text("# who may use what\nsecret-of-a-0123456 a\nsecret-of-b-0123456 b other\n")
    tokens.chmod(0o600)
    config = tmp_path / "tenants.yaml"
    config.write_text(f"security:\n  tenants_file: {tokens}\n")
    server = start(flags=("--config", str(config)))
    with (
        RpcClient(server.socket_dir, token="secret-of-b-0123456") as b,
        RpcClient(server.socket_dir, token="secret-of-a-0123456") as a,
    ):
        b.store(b.identify(tenant="b"), chain_of(b.identify(tenant="b").root, 3))
        a.store(a.identify(tenant="a"), chain_of(a.identify(tenant="a").root, 2))
        with pytest.raises(RpcError) as caught:
            a.identify(tenant="b")
        assert (caught.value.code, caught.value.field) == ("not_permitted", "request.tenant")
        with pytest.raises(RpcError) as caught:
            a.ask(wire.Clear(a.session, a.next_seq(), wire.Tier.L1, "b"), wire.Cleared)
        assert caught.value.field == "tenant"
        assert [row["tenant"] for row in a.status()["tenants"]] == ["a"], "b's bytes are not a's business"
        assert [peer["session"] for peer in a.status()["peers"]] == [a.session.hex()]
        assert a.ask(wire.Clear(a.session, a.next_seq(), wire.Tier.L1), wire.Cleared).count == 2
    with RpcClient(server.socket_dir) as nobody:
        nobody.identify()
        with pytest.raises(RpcError):
            nobody.identify(tenant="a")
    with pytest.raises(NotPermitted):
        RpcClient(server.socket_dir, token="wrong").attach()


# --- restart, stop, start -------------------------------------------------------------------------------------


def test_after_sigkill_the_next_server_serves_what_was_there(start: Callable[..., ServerProcess]) -> None:
    server = start()
    with RpcClient(server.socket_dir) as client:
        identity = client.identify(salt="s")
        chain = chain_of(identity.root, 6)
        client.store(identity, chain)
        lease = client.lookup(identity.identity_id, chain)
        old_epoch = client.epoch
        server.kill()
        server.start()
        assert server.ready["adopted"]
        client.attach()
        assert client.epoch != old_epoch
        client.connect()
        assert client.release([(client.session, lease.seq)]) == 0, "leases of the old epoch have no name now"
        with pytest.raises(RpcError) as caught:
            client.lookup(identity.identity_id, chain)
        assert caught.value.code == "unknown_identity"
        client.ask(wire.Quiesced(client.session, client.next_seq()), wire.Ok)
        again = client.identify(salt="s")
        assert (again.root, again.complete) == (identity.root, True)
        reply = client.lookup(again.identity_id, chain)
        assert reply.n_chunks == 6
        for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
            assert client.read(extent) == payload(key)
        assert client.release([(client.session, reply.seq)]) == 1


def test_an_admin_sees_and_frees_what_a_device_may_still_write(tmp_path: Path) -> None:
    def ctl(server: ServerProcess, *arguments: str) -> Any:
        command = [sys.executable, "-m", "kvstrata", "ctl", "--url", server.url, "--json"]
        found = subprocess.run([*command, "stranded", *arguments], capture_output=True, text=True)
        return json.loads(found.stdout) if found.returncode == 0 else found.stderr

    with (
        ServerProcess(tmp_path / "server", l1_mb=16) as server,
        Child("tests.harness.rpc_holder", log=tmp_path / "holder.log") as holder,
    ):
        server.start()
        session = holder.ask("reserve", socket_dir=str(server.socket_dir), n_chunks=3)
        server.kill()
        holder.kill()
        server.start()
        eventually("the session is stranded", lambda: ctl(server, "list")["stranded"])
        [row] = ctl(server, "list")["stranded"]
        pool = server.get("/v1/status")["pool"]
        assert (row["session"], row["kept_bytes"]) == (session, pool["quarantined_bytes"])
        assert pool["quarantined_bytes"] >= 3 * RECORD_BYTES
        with urllib.request.urlopen(f"{server.url}/metrics") as page:
            assert f"kvstrata_attach_stranded_bytes {float(row['kept_bytes'])}" in page.read().decode()
        assert session in server.log_tail()
        for wrong in ("ab" * 16, "x", "ab"):
            assert f"session: '{wrong}' is not stranded" in ctl(server, "clear", wrong)
        assert ctl(server, "clear", "all") == {"cleared": [row]}
        assert ctl(server, "list") == {"stranded": []}
        assert server.get("/v1/status")["pool"]["quarantined_bytes"] == 0


def test_a_chunk_damaged_while_no_server_ran_is_a_miss(start: Callable[..., ServerProcess]) -> None:
    server = start()
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        chain = chain_of(identity.root, 4)
        client.store(identity, chain)
        reply = client.lookup(identity.identity_id, chain)
        extent = unpack_extents(reply.extents)[2]
        server.kill()
        assert client.extents is not None
        client.extents.view(extent.offset_bytes, extent.length_bytes)[RECORD_BYTES - 1] ^= 0xFF
        server.start()
        client.attach()
        client.connect()
        found = client.lookup(client.identify().identity_id, chain)
        assert found.n_chunks == 2
        client.release([(client.session, found.seq)])


def test_sigterm_ends_it_cleanly_and_the_pool_stays(start: Callable[..., ServerProcess]) -> None:
    server = start()
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        chain = chain_of(identity.root, 3)
        client.store(identity, chain)
    assert server.stop() == 0
    assert not {path.name for path in server.socket_dir.iterdir()} & {"rpc.sock", "attach.sock"}
    server.start()
    assert server.ready["adopted"]
    with RpcClient(server.socket_dir) as client:
        assert client.lookup(client.identify().identity_id, chain).n_chunks == 3


def test_a_second_server_on_the_same_pool_is_refused_and_told_who_has_it(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start()
    second = ServerProcess(tmp_path / "second", l1_mb=16, flags=("--no-http",))
    second.segment_dir = server.segment_dir
    second._environment["KVSTRATA_L1_SEGMENT_DIR"] = str(server.segment_dir)
    with pytest.raises(ServerFailed, match=f"process {server.pid}"):
        second.start()
    second.segment_dir = tmp_path
    second.close()
    with RpcClient(server.socket_dir) as client:
        client.ping()


def run_server(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvstrata.cli.server", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_a_taken_port_stops_the_start_and_says_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run_server(
            "--port", str(port), "--no-http", "--l2-adapter", "none", "--socket-dir", str(tmp_path)
        )
    assert ran.returncode == 2
    assert f"port: {port} is taken by pid" in ran.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--host", "0.0.0.0", "--port", "0"), "--insecure"),
        (("--port", "70000"), "port"),
        (("--l1-size-gb", "100000"), "l1"),
        (("--socket-dir", "/tmp/" + "x" * 120), "socket_dir"),
        (("--chunk-sise", "256"), "--chunk-size"),
        (("--l2-adapter", '{"type": "moncake_store"}'), "mooncake_store"),
        (("--curve-secret-file", "/nonexistent/keys", "--port", "0"), "curve_secret_file"),
    ],
)
def test_wrong_settings_stop_the_start_with_what_to_change(flags: tuple[str, ...], says: str) -> None:
    ran = run_server(*flags, "--no-http")
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_check_validates_and_starts_nothing(tmp_path: Path) -> None:
    ran = run_server("--check", "--l1-size-gb", "0.1", "--socket-dir", str(tmp_path / "none"))
    assert ran.returncode == 0, ran.stderr
    assert '"size_gb": 0.1' in ran.stdout
    assert not (tmp_path / "none").exists()


def test_importing_the_server_brings_neither_torch_nor_fastapi() -> None:
    script = (
        "import sys, kvstrata.server.process\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'numpy', 'numba', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_server_leaves_no_sockets_segment_or_descriptors_behind(tmp_path: Path) -> None:
    before = open_descriptors()
    process = ServerProcess(tmp_path / "server", l1_mb=16, flags=("--no-http",))
    with process:
        process.start()
        process.stop()
    assert not process.socket_dir.exists()
    assert not process.segment_dir.exists()
    assert open_descriptors() == before


def test_layouts_with_other_chunk_sizes_share_one_server(server: ServerProcess) -> None:
    other = layout("tiny").__class__(model="tiny", kv_dtype="bf16", chunk_tokens=2 * CHUNK_TOKENS)
    with RpcClient(server.socket_dir) as small, RpcClient(server.socket_dir, identity=other) as large:
        a, b = small.identify(), large.identify()
        assert a.root != b.root
        small.store(a, chain_of(a.root, 2))
        found = large.lookup(b.identity_id, chain_of(b.root, 2))
        assert found.n_chunks == 0


def test_an_attach_with_another_format_version_is_refused(server: ServerProcess) -> None:
    newer = layout("tiny", format_version=2)
    with pytest.raises(LayoutRefused, match="format_version"):
        RpcClient(server.socket_dir, identity=newer).attach()


def test_a_background_task_that_crashes_ends_the_process_with_its_reason_and_keeps_the_pool(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start()
    with RpcClient(server.socket_dir) as client:
        chain = chain_of(client.identify().root, 3)
        client.store(client.identify(), chain)
    assert server.stop() == 0
    script = (
        "import sys\n"
        "from kvstrata.server import process as server\n"
        "async def crash(self):\n"
        "    raise ZeroDivisionError('planted')\n"
        "server.Server._beat = crash\n"
        "from kvstrata.cli.server import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = ["--no-http", "--port", "0", "--l1-size-gb", str(16 / 1024), "--l2-adapter", "none"]
    flags.append("--no-supervise")
    ran = subprocess.run(
        [sys.executable, "-c", script, *flags, "--socket-dir", str(server.socket_dir)],
        env={**os.environ, "KVSTRATA_L1_SEGMENT_DIR": str(server.segment_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 70
    assert "server_failed" in ran.stderr and "planted" in ran.stderr
    server.start()
    assert server.ready["adopted"]
    with RpcClient(server.socket_dir) as client:
        assert client.lookup(client.identify().identity_id, chain).n_chunks == 3


def test_the_segment_of_a_port_taken_at_random_goes_with_its_server(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    flags = (
        "--port",
        "0",
        "--no-http",
        "--l1-size-gb",
        "0.01",
        "--l2-adapter",
        "none",
        "--log-level",
        "error",
    )
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as sockets:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvstrata.cli.server",
                *flags,
                "--socket-dir",
                sockets,
                "--ready-fd",
                str(writer),
            ],
            pass_fds=(writer,),
        )
        os.close(writer)
        with open(reader, "rb") as ready:
            port = json.loads(ready.readline())["port"]
        segment = Path(f"/dev/shm/kvstrata-{os.geteuid()}-{port}")
        was_there = segment.exists()
        process.terminate()
        assert process.wait() == 0
    assert was_there and not segment.exists()
