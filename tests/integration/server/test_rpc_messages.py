"""A real server and a client with nothing between it and the wire: who may ask, and what a wrong message gets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstrata.errors import LayoutRefused
from kvstrata.memory.attach.server import MAX_REFUSED
from kvstrata.rpc import wire
from kvstrata.types import FORMAT_VERSION, KEY_BYTES
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, RpcClient, chain_of, layout, new_prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


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
        return wire.Lookup(1000, 100, identity, "", [wire.KeyGroup(wire.Rule.PREFIX, keys)], **more)

    def reserve(**fields: Any) -> wire.Reserve:
        known = {"parent": b"", "keys": bytes(KEY_BYTES), "record_bytes": RECORD_BYTES, "probe": b""}
        return wire.Reserve(1000, 100, identity, **{**known, **fields})

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
