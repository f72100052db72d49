"""Any frame at the RPC boundary gets one reply, breaks no invariant, and leaks nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import WIRE_ERRORS
from kvstrata.rpc import wire
from kvstrata.server.listener import is_request
from kvstrata.server.requests.requests import OPERATIONS
from kvstrata.types import KEY_BYTES, Role
from tests.harness.amount import amount
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import RECORD_BYTES, RpcClient
from tests.harness.server_process import ServerProcess

SESSIONS = [b"worker one".ljust(16, b"."), b"another one".ljust(16, b"."), b"scheduler".ljust(16, b".")]
GROUP, OTHER_GROUP = b"engine".ljust(16, b"."), b"other engine".ljust(16, b".")
NEW, REPEATED, OLD = -1, -2, 5
"""How a request is numbered: by the next number, by the last one again, or by an earlier one."""
KEYS = [bytes([number]) * KEY_BYTES for number in range(1, 9)]

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
sessions = st.sampled_from([*SESSIONS * 3, b"nobody we know.."])
seqs = st.sampled_from([NEW] * 6 + [REPEATED, OLD])
recent = st.sampled_from([0, 0, 0, 1, 2])
"""Placeholder for one of the last requests of the right kind; see `World.real`."""
keys = st.integers(1, len(KEYS)).map(lambda n: b"".join(KEYS[:n])) | st.lists(
    st.sampled_from(KEYS), min_size=1, max_size=8, unique=True
).map(b"".join)
identities = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 77])
"""Identity ids; 0 stands for the session's own, see `World.real`."""
indices = st.lists(st.integers(0, 9), max_size=6)
probes = st.sampled_from([b"", b"8 bytes!"])


def plausible(op: str) -> st.SearchStrategy[list[Any]]:
    """Draw a meaningful request, whose numbers are small so that requests name each other."""
    fields: dict[str, list[st.SearchStrategy[Any]]] = {
        "identify": [
            st.fixed_dictionaries({"salt": st.sampled_from(["", "a"]), "tenant": st.sampled_from(["", "t"])})
        ],
        "ping": [],
        "resume": [st.lists(recent, max_size=4)],
        "lookup": [
            st.sampled_from([0, 50]),
            identities,
            st.text(max_size=4),
            keys,
            probes,
            *(st.just(no) for no in ([], "", 0, False)),
            st.sampled_from([0, 20]),
        ],
        "promise": [identities, keys],
        "release": [st.lists(st.tuples(sessions, recent), max_size=4), st.booleans()],
        "reserve": [
            st.just(1000),
            identities,
            st.sampled_from([b"", *KEYS]),
            keys,
            st.sampled_from([RECORD_BYTES, RECORD_BYTES, RECORD_BYTES, 8192, 1 << 19, 5 << 20]),
            probes,
        ],
        "commit": [recent, indices],
        "abort": [recent, st.none() | indices],
        "cancel": [recent],
        "retrieve": [
            identities,
            st.sampled_from(KEYS),
            st.just(bytes(32)),
            st.integers(0, 100),
            st.integers(0, 100),
        ],
        "quiesced": [],
        "corrupt": [keys],
    }
    return st.tuples(st.just(op), sessions, seqs, *fields[op]).map(list)


def damaged(request: list[Any], number: int, value: Any, drop: bool) -> list[Any]:
    """Return the request with one field replaced, or cut off from there."""
    at = number % len(request)
    return request[:at] if drop else [*request[:at], value, *request[at + 1 :]]


requests = st.sampled_from(sorted(OPERATIONS)).flatmap(plausible)
"""Requests as lists, of which `World.real` makes frames."""


def one_after_another(first: str, second: str) -> st.SearchStrategy[list[list[Any]]]:
    """Draw two requests of one session; the second one usually names the first."""
    return st.builds(
        lambda one, other, session: [[one[0], session, *one[2:]], [other[0], session, *other[2:]]],
        plausible(first),
        plausible(second),
        st.sampled_from(SESSIONS[:2]),
    )


pairs = st.sampled_from(
    [
        (one, other)
        for one in ("lookup", "reserve", "promise")
        for other in ("release", "abort", "cancel", "resume", "commit", one)
    ]
).flatmap(lambda names: one_after_another(*names))
stories = st.lists(pairs | requests.map(lambda request: [request]), max_size=25).map(
    lambda parts: [message for part in parts for message in part]
)
frames = st.one_of(
    st.builds(damaged, requests, st.integers(0, 8), anything, st.booleans()).map(msgspec.msgpack.encode),
    st.lists(anything, max_size=6).map(msgspec.msgpack.encode),
    st.binary(max_size=200),
    st.builds(lambda m, cut: msgspec.msgpack.encode(m)[:-cut], requests, st.integers(1, 20)),
    st.builds(
        lambda depth, head: head * depth, st.integers(1, 20_000), st.sampled_from([b"\x91", b"\x81\xa1k"])
    ),
)


class World:
    """An instance with three sessions of two groups and five chunks in it."""

    def __init__(self) -> None:
        self.instance = InstanceInProcess()
        self.instance.attach(SESSIONS[0], GROUP)
        self.instance.attach(SESSIONS[1], OTHER_GROUP)
        self.instance.attach(SESSIONS[2], GROUP, Role.SCHEDULER)
        self.next_seq = 10
        self.asked: dict[str, list[tuple[bytes, int]]] = {}
        self.identities: dict[bytes, int] = {}
        for session in SESSIONS:
            [reply] = self.instance.feed(said(session, wire.Identify(1, wire.RequestIdentity())))
            assert isinstance(reply, wire.IdentifyReply)
            self.identities[session] = reply.identity_id
            if session == SESSIONS[0]:
                self.instance.store(session, 2, reply, b"".join(KEYS[:5]))

    def real(self, request: list[Any]) -> Said:
        """A request of its session, with its placeholders replaced by meaningful numbers."""
        request = list(request)
        op, session = request[0], request[1]
        if request[2] == NEW:
            request[2] = self.next_seq
            self.next_seq += 1
        elif request[2] == REPEATED:
            request[2] = self.next_seq - 1
        of_session = [seq for name, seq in self.asked.get("reserve", []) if name == session]
        granted = [
            seq
            for verb in ("lookup", "reserve", "promise")
            for name, seq in self.asked.get(verb, [])
            if name == session
        ]
        granted.sort()
        if op in ("commit", "abort"):
            request[3] = self.pick(of_session, request[3])
        elif op == "cancel":
            request[3] = self.pick(granted, request[3])
        elif op == "resume":
            request[3] = [self.pick(granted, number) for number in request[3]]
        elif op == "release":
            leases = self.asked.get("lookup", [])
            request[3] = [leases[-1 - n] if n < len(leases) else (name, n) for name, n in request[3]]
        at = {"lookup": 4, "reserve": 4, "retrieve": 3, "promise": 3}.get(op)
        if at is not None and request[at] == 0:
            request[at] = self.identities.get(session, 0)
        self.asked.setdefault(op, []).append((session, request[2]))
        return Said(session, msgspec.msgpack.encode([op, *request[2:]]))

    @staticmethod
    def pick(seqs: list[int], back: int) -> int:
        return seqs[-1 - back] if back < len(seqs) else 9_999


@settings(max_examples=amount(60, 150))
@given(stories, st.lists(frames, max_size=20), st.randoms(use_true_random=False))
def test_every_frame_gets_one_reply_and_nothing_leaks(story, garbage, random):
    world = World()
    arriving: list[list[Any] | bytes] = list(story)
    for frame in garbage:
        arriving.insert(random.randint(0, len(arriving)), frame)
    for message in arriving:
        said_now = (
            Said(random.choice(SESSIONS), message) if isinstance(message, bytes) else world.real(message)
        )
        replies = world.instance.feed(said_now)
        assert len(replies) == 1
        reply = replies[0]
        assert reply.epoch == world.instance.epoch
        if isinstance(reply, wire.Error):
            assert reply.code in WIRE_ERRORS
            assert reply.code != "internal", reply.message
            assert reply.message
        world.instance.check()
    [pong] = world.instance.feed(said(SESSIONS[0], wire.Ping(world.next_seq)))
    assert isinstance(pong, wire.Pong)
    world.instance.close()


@settings(max_examples=amount(30, 60))
@given(stories)
def test_requests_that_arrive_together_get_one_answer_each(arriving: list[list[Any]]) -> None:
    """One wake of the loop may read many requests."""
    world = World()
    replies = world.instance.feed(*map(world.real, arriving))
    assert len(replies) == len(arriving)
    assert not [reply for reply in replies if isinstance(reply, wire.Error) and reply.code == "internal"]
    world.instance.check()
    world.instance.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("fuzzed"), l1_mb=16, flags=("--no-http",)) as process:
        process.start()
        yield process
        assert process.stop() == 0, process.log_tail()


@pytest.mark.integration
@settings(max_examples=amount(40, 100))
@given(frame=frames)
def test_a_real_server_answers_any_message_and_keeps_serving(server: ServerProcess, frame: bytes) -> None:
    """The first message that is no request is taken for an attach, refused, and ends its connection."""
    sender = RpcClient(server.socket_dir)
    sender.connect()
    sender.send_bytes(frame)
    assert sender.receive_bytes()
    if is_request(frame):
        assert sender.ping().epoch == server.ready["epoch"]
    sender.close()


@pytest.mark.integration
@settings(max_examples=amount(30, 60))
@given(st.binary(min_size=1, max_size=70_000) | st.just(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48)))
def test_a_real_server_survives_any_bytes_on_its_ports(server: ServerProcess, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(server.socket_dir / "rpc.sock"))
        try:
            raw.sendall(data)
        except OSError:
            pass  # the server may hang up at the first byte
    observer = RpcClient(server.socket_dir)
    observer.connect()
    assert observer.ping().epoch == server.ready["epoch"]
    observer.close()
