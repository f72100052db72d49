"""Whatever a peer sends on the attach socket, the server keeps serving others and retains nothing of it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import WIRE_ERRORS
from kvstrata.memory import linux
from kvstrata.rpc import wire
from kvstrata.rpc.wire import AttachReply
from kvstrata.server.listener import is_request
from tests.harness.attach_scene import attach, new_worker, session_name, until
from tests.harness.attach_server import AttachServerChild, Place
from tests.harness.attach_worker import make_request
from tests.harness.child import Child
from tests.harness.raw_line import RawLine

pytestmark = pytest.mark.integration

VALID: dict[str, Any] = msgspec.to_builtins(
    make_request(session=b"fuzz".ljust(16, b"."), group=b"fuzzing".ljust(16, b".")),
    builtin_types=(bytes,),
)
FD_KINDS = {
    "self": lambda: os.pidfd_open(os.getpid()),
    "parent": lambda: os.pidfd_open(os.getppid()),
    "init": lambda: os.pidfd_open(1),
    "null": lambda: os.open(os.devnull, os.O_RDWR),
    "directory": lambda: os.open("/", os.O_RDONLY),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "event": lambda: os.eventfd(0),
}


class Message(NamedTuple):
    data: bytes
    fds: list[str]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def changed_requests(draw: st.DrawFn) -> bytes:
    """Draw a request with some fields changed, dropped or added."""
    request = dict(VALID)
    for field in draw(st.lists(st.sampled_from(sorted(VALID)), max_size=3, unique=True)):
        if draw(st.booleans()):
            del request[field]
        else:
            request[field] = draw(values)
    request.update(draw(st.dictionaries(st.text(), values, max_size=2)))
    data = msgspec.msgpack.encode(request)
    if draw(st.booleans()):  # one more field, nested deeper than a parser's stack
        nested = draw(st.sampled_from([b"\x91", b"\x81\xa1k"])) * draw(st.integers(1, 30_000))
        name_bytes = msgspec.msgpack.encode(draw(st.sampled_from(["facts", "layout", "x"])))
        data = b"\xdf" + (len(request) + 1).to_bytes(4, "big") + data[1:] + name_bytes + nested + b"\xc0"
    return data


@st.composite
def cut_requests(draw: st.DrawFn) -> bytes:
    """Draw a valid request with bytes cut off or flipped."""
    data = bytearray(msgspec.msgpack.encode(VALID))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(1, len(data)))])


payloads = st.one_of(
    changed_requests(),
    cut_requests(),
    st.binary(max_size=200),
    st.sampled_from(
        [b"", b"locked", b"bye", b"ok", b"\x91" * 60_000, b"\xdf\xff\xff\xff\xff", b"y" * 70_000]
    ),
    st.just(msgspec.msgpack.encode(VALID)),
)
messages = st.builds(
    Message,
    payloads,
    st.one_of(
        st.just(["self"]),
        st.lists(st.sampled_from(sorted(FD_KINDS)), max_size=4),
        st.integers(1, 250).map(lambda count: ["null"] * count),
    ),
)


class Bench(NamedTuple):
    server: AttachServerChild
    worker: Child
    place: Place
    open_files: list[str]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A server and an honest worker, which serve all examples."""
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    place = Place(root, Path("/dev/shm") / root.name)
    log = root / "children.log"
    with AttachServerChild(place, log=log) as server, new_worker(log) as worker:
        serve_honest(worker, place)
        yield Bench(server, worker, place, server.ask("open_files"))
    shutil.rmtree(root)
    shutil.rmtree(place.segment_dir)


def serve_honest(worker: Child, place: Place) -> None:
    attach(worker, place, session_name("honest"))
    assert worker.ask("goodbye", session=session_name("honest"))


def play(place: Place, conversation: list[Message], wait: bool) -> None:
    """Make one connection of a bad peer; assert that every answer is a reply of the protocol."""
    plain = is_request(conversation[0].data)
    with RawLine(place.socket_dir) as line:
        for message in conversation:
            fds = [FD_KINDS[kind]() for kind in message.fds]
            try:
                line.send(message.data, fds)
            except ConnectionError:
                return  # refused already, as it should be
            finally:
                linux.close_all(fds)
            if wait:
                try:
                    data, received = line.receive()
                except ConnectionError:
                    return
                linux.close_all(received)
                if plain:
                    assert isinstance(wire.decode_reply(data), wire.Error)
                    continue
                reply = msgspec.msgpack.decode(data, type=AttachReply)
                assert reply.code == "" or (reply.code in WIRE_ERRORS and reply.code != "internal"), reply
                assert reply.code or message.fds == ["self"]


@given(conversation=st.lists(messages, min_size=1, max_size=4), wait=st.booleans())
def test_a_bad_peer_harms_only_itself(bench: Bench, conversation: list[Message], wait: bool) -> None:
    play(bench.place, conversation, wait)
    serve_honest(bench.worker, bench.place)
    until(lambda: bench.server.ask("rows") == [])
    until(lambda: bench.server.ask("open_files") == bench.open_files)
    assert bench.server.ask("stats")["refused"].get("internal", 0) == 0
