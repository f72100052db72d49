"""Requests to a real server, with nothing between them and the wire: what they do, and what a wrong one gets."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvstrata.errors import LayoutRefused
from kvstrata.rpc import wire
from kvstrata.server.listener import MAX_REFUSED
from kvstrata.types import FORMAT_VERSION, KEY_BYTES, Role, unpack_extents
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    RpcClient,
    RpcError,
    assert_held,
    assert_nothing_held,
    chain_of,
    keys_of,
    layout,
    new_prompt,
    part,
    payload,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


COMMITTED, NOT_RESERVED, BAD_RECORD = (bytes([outcome]) for outcome in wire.CommitOutcome)


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


def test_a_malformed_message_gets_an_error_that_names_the_field(client: RpcClient) -> None:
    for frame, seq, field in (
        (b"", 0, "message"),
        (b"\xc1", 0, "message"),
        (b"\x00", 0, "message"),
        (b"GET / HTTP/1.1", 0, "message"),
        (b"\x80", 0, "message"),
        (b"\x92\xa4ping", 0, "message"),
        (b"\x90", 0, "message"),
        (b"\x93\xa7no_such\x09\xc0", 9, "op"),
        (b"\x92\xa4ping\xa1x", 0, "seq"),
        (b"\x92\xa4ping\xff", 0, "seq"),
        (b"\x93\xa6resume\x06\xa3abc", 6, "live"),
        (b"\x93\xa6resume\x06\x91\xff", 6, "live[0]"),
        (b"\xdd\xff\xff\xff\xff", 0, "message"),
        (b"\x91" * 10_000, 0, "message"),
    ):
        client.send_bytes(frame)
        reply = client.receive()
        assert isinstance(reply, wire.Error)
        assert (reply.code, reply.seq, reply.field) == ("bad_request", seq, field), reply
        client.ping()


def test_a_connection_that_sends_no_requests_is_closed_and_its_process_may_attach_again(client):
    for _ in range(MAX_REFUSED):
        client.send_bytes(b"x")
    with pytest.raises(ConnectionError):
        for _ in range(MAX_REFUSED + 1):
            client.receive_bytes()
    client.attach()
    client.ping()


def bad_requests(identity: int) -> list[tuple[str, wire.Request]]:
    """The wrong field of each request, and the request."""

    def lookup(keys: bytes, **more: Any) -> wire.Lookup:
        return wire.Lookup(1000, 100, identity, "", keys, **more)

    def reserve(**fields: Any) -> wire.Reserve:
        known = {"parent": b"", "keys": bytes(KEY_BYTES), "record_bytes": RECORD_BYTES, "probe": b""}
        return wire.Reserve(1000, 100, identity, **{**known, **fields})

    return [
        ("keys", lookup(b"")),
        ("keys", lookup(bytes(33))),
        ("probe", lookup(bytes(KEY_BYTES), probe=b"1234")),
        ("keys", reserve(keys=bytes(31))),
        ("keys", reserve(keys=b"")),
        ("parent", reserve(parent=bytes(31))),
        ("probe", reserve(probe=b"1")),
        ("record_bytes", reserve(record_bytes=4096)),
        ("record_bytes", reserve(record_bytes=1 << 40)),
        ("keys", wire.Corrupt(1000, identity, bytes(5))),
    ]


def test_a_wrong_field_is_named(client: RpcClient) -> None:
    identity, _ = new_prompt(client)
    wrong = bad_requests(identity.identity_id)
    wrong.append(("target", wire.Cancel(0, target=1000 + len(wrong))))  # itself
    for number, (field, request) in enumerate(wrong, start=1000):
        client.send(msgspec.structs.replace(request, seq=number))
        reply = client.receive()
        assert isinstance(reply, wire.Error)
        assert (reply.code, reply.field, reply.seq) == ("bad_request", field, number), reply


def test_layouts_with_other_chunk_sizes_share_one_server(server: ServerProcess) -> None:
    other = layout("tiny").__class__(model="tiny", kv_dtype="bf16", chunk_tokens=2 * CHUNK_TOKENS)
    with RpcClient(server.socket_dir) as small, RpcClient(server.socket_dir, identity=other) as large:
        a, b = small.identify(), large.identify()
        assert a.root != b.root
        small.store(a, chain_of(a.root, 2))
        found = large.lookup(b.identity_id, chain_of(b.root, 2))
        assert found.n_chunks == 0


def test_an_attach_with_another_format_version_is_refused(server: ServerProcess) -> None:
    newer = layout("tiny", format_version=FORMAT_VERSION + 1)
    with pytest.raises(LayoutRefused, match="format_version"):
        RpcClient(server.socket_dir, identity=newer).attach()


class Dealer:
    """It knows docs/internals/protocol.md and nothing of our code."""

    def __init__(self, socket_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.connect(f"ipc://{socket_dir / 'rpc.sock'}")

    def ask(self, *request: Any) -> list[Any]:
        self._socket.send(msgspec.msgpack.encode(request))
        reply: list[Any] = msgspec.msgpack.decode(self._socket.recv())
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def dealer(server: ServerProcess) -> Iterator[Dealer]:
    dealer = Dealer(server.socket_dir)
    yield dealer
    dealer.close()


def test_a_dealer_counts_and_reads_what_another_process_stored(server: ServerProcess, dealer: Dealer) -> None:
    with RpcClient(server.socket_dir) as client:
        identity = client.identify(salt="of a dealer")
        chain = chain_of(identity.root, 3)
        client.store(identity, chain)
        assert dealer.ask("ping", 1)[:2] == ["ping", 1]
        digest = part().digest()
        request = {"salt": "of a dealer"}
        name, seq, _, number, root, *_ = dealer.ask(
            "identify", 2, request, msgspec.to_builtins(layout()), [digest]
        )
        assert (name, seq, root) == ("identify", 2, identity.root)
        found = dealer.ask("lookup", 3, 1000, number, "", chain + bytes(KEY_BYTES))
        assert found[:2] == ["lookup", 3] and found[3:5] == [3, b""]
        _, _, _, is_found, length, body = dealer.ask(
            "retrieve", 4, number, chain[:KEY_BYTES], digest, 0, RECORD_BYTES
        )
        assert is_found and length >= RECORD_BYTES and len(body) == RECORD_BYTES
