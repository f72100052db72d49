"""A real server and a client with nothing between it and the wire: who may ask, and what a wrong message gets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstrata.errors import LayoutRefused
from kvstrata.rpc import wire
from kvstrata.types import FORMAT_VERSION, KEY_BYTES
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    RECORD_BYTES,
    RpcClient,
    chain_of,
    layout,
    new_prompt,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def test_hello_needs_no_session_and_returns_epoch_limits_and_l2(server: ServerProcess) -> None:
    client = RpcClient(server.socket_dir)
    client.connect()
    reply = client.ask(wire.Hello(wire.NO_SESSION, 7, wire.PROTOCOL_VERSION, "test"), wire.HelloReply)
    assert reply.seq == 7
    assert reply.epoch == server.ready["epoch"]
    assert reply.socket_dir == str(server.socket_dir)
    assert reply.max_reserved_bytes == server.ready["l1_bytes"] // 8
    assert reply.has_l2 is False
    client.close()


def requests_of(session: bytes) -> list[wire.Request]:
    groups = [wire.KeyGroup(wire.Rule.PREFIX, bytes(KEY_BYTES))]
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
        wire.Quiesced(session, 14),
        wire.Corrupt(session, 15, 1, bytes(KEY_BYTES)),
    ]


def test_a_session_that_is_not_attached_gets_unknown_session(server: ServerProcess) -> None:
    client = RpcClient(server.socket_dir)
    client.connect()
    for request in requests_of(client.session):
        client.send(request)
        reply = client.receive()
        assert isinstance(reply, wire.Error)
        assert (reply.code, reply.seq, reply.retryable) == ("unknown_session", request.seq, True)
        assert reply.epoch == server.ready["epoch"]
    client.close()


def test_a_malformed_message_gets_an_error_that_names_the_field(client: RpcClient) -> None:
    for frame, seq, field in (
        (b"", 0, "message"),
        (b"\xc1", 0, "message"),
        (b"\x00", 0, "message"),
        (b"GET / HTTP/1.1", 0, "message"),
        (b"\x80", 0, "message"),
        (b"\x93\xa4ping", 0, "message"),
        (wire.encode(wire.Ping(bytes(16), 5))[:-1], 5, "message"),
        (b"\x90", 0, "message"),
        (b"\x94\xa7no_such\xc4\x10" + bytes(16) + b"\x09\xc0", 9, "op"),
        (b"\x93\xa4ping\xc4\x10" + bytes(16) + b"\xa1x", 0, "seq"),
        (b"\x93\xa4ping\xc4\x03abc\x05", 5, "session"),
        (b"\x93\xa4ping\xc4\x10" + bytes(16) + b"\xff", 0, "seq"),
        (b"\x94\xa4ping\xc4\x10" + bytes(16) + b"\x06\xa3abc", 6, "live"),
        (b"\x94\xa4ping\xc4\x10" + bytes(16) + b"\x06\x91\xff", 6, "live[0]"),
        (b"\xdd\xff\xff\xff\xff", 0, "message"),
        (b"\x91" * 10_000, 0, "message"),
    ):
        client.send_frames(frame)
        reply = client.receive()
        assert isinstance(reply, wire.Error)
        assert (reply.code, reply.seq, reply.field) == ("bad_request", seq, field), reply
    client.ping()


def bad_requests(session: bytes, identity: int) -> list[tuple[str, wire.Request]]:
    """The wrong field of each request, and the request."""

    def lookup(keys: bytes, **more: Any) -> wire.Lookup:
        return wire.Lookup(session, 1000, 100, identity, "", [wire.KeyGroup(wire.Rule.PREFIX, keys)], **more)

    def reserve(**fields: Any) -> wire.Reserve:
        known = {"parent": b"", "keys": bytes(KEY_BYTES), "record_bytes": RECORD_BYTES, "probe": b""}
        return wire.Reserve(session, 1000, 100, identity, **{**known, **fields})

    return [
        ("groups[0].keys", lookup(b"")),
        ("groups[0].keys", lookup(bytes(33))),
        ("probe", lookup(bytes(KEY_BYTES), probe=b"1234")),
        ("keys", reserve(keys=bytes(31))),
        ("keys", reserve(keys=b"")),
        ("parent", reserve(parent=bytes(31))),
        ("probe", reserve(probe=b"1")),
        ("record_bytes", reserve(record_bytes=4096)),
        ("record_bytes", reserve(record_bytes=1 << 40)),
        ("keys", wire.Corrupt(session, 1000, identity, bytes(5))),
    ]


def test_a_wrong_field_is_named(client: RpcClient) -> None:
    identity, _ = new_prompt(client)
    wrong = bad_requests(client.session, identity.identity_id)
    wrong.append(("target", wire.Cancel(client.session, 0, target=1000 + len(wrong))))  # itself
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
