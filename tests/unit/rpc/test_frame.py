"""Frames: the proof before the message, and what is never decoded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import BadRequest
from kvstrata.rpc import wire
from kvstrata.rpc.frame import MAX_VALUES, PROOF_BYTES, SCAN, check_limits, prove, proves, read_head
from kvstrata.rpc.ping_wire import DeviceCopies, LoadRate
from kvstrata.types import KEY_BYTES, RequestIdentity

SESSION = b"one session.....".ljust(16, b".")
SECRET, OTHER = bytes(range(32)), bytes(32)
PING = wire.encode(wire.Ping(SESSION, 5))
MISS = wire.Miss(1, "r" * 256, wire.MAX_CHUNKS, bytes(KEY_BYTES), bytes(KEY_BYTES), bytes(8))


def test_only_the_secret_itself_proves_a_frame() -> None:
    frame = prove(SECRET, PING)
    head = read_head(frame)
    assert head == (SECRET, b"ping", SESSION, 5, "") and head.start == PROOF_BYTES
    assert wire.decode_request(memoryview(frame)[head.start :]) == wire.Ping(SESSION, 5)
    assert proves(head.proof, SECRET)
    assert not proves(head.proof, OTHER)
    assert not proves(read_head(PING).proof, SECRET)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_frame_without_a_proof_or_with_half_of_one_proves_nothing(secret: bytes) -> None:
    for frame in (PING, b"", b"\xc4\x20", prove(SECRET, b"")[:-1], b"\xc4\x1f" + SECRET[1:] + PING):
        assert not proves(read_head(frame).proof, secret)


def longest_requests() -> list[wire.Request]:
    keys = bytes(wire.MAX_CHUNKS * KEY_BYTES)
    name = "😀" * 4096
    copies = DeviceCopies("kernel", 1, "p" * 512)
    return [
        wire.Ping(
            SESSION,
            wire.MAX_SEQ,
            [wire.MAX_SEQ] * wire.MAX_LIVE,
            copies,
            LoadRate(1, 1),
            [MISS] * wire.MAX_MISSES,
        ),
        wire.Lookup(SESSION, 1, 1, 1, "r" * 256, [wire.KeyGroup(wire.Rule.PREFIX, keys)], bytes(8)),
        wire.Release(SESSION, 1, [(SESSION, wire.MAX_SEQ)] * wire.MAX_RELEASES),
        wire.Commit(SESSION, 1, 1, list(range(wire.MAX_RESERVE_CHUNKS))),
        wire.Identify(SESSION, 1, RequestIdentity(adapter=name, tenant=name, salt=name)),
        wire.Reserve(SESSION, 1, 1, 1, bytes(KEY_BYTES), bytes(wire.MAX_RESERVE_CHUNKS * KEY_BYTES), 1),
    ]


@given(latency_s=st.floats(0, 1e9), bytes_s=st.floats(1e-9, 1e18))
def test_any_rate_is_within_the_limits_of_a_ping(latency_s: float, bytes_s: float) -> None:
    rate = LoadRate.of(latency_s, bytes_s)
    ping = wire.Ping(SESSION, 1, [], None, rate)
    assert wire.decode_request(wire.encode(ping)) == ping
    # A few bytes a second are rounded by more than a tenth.
    assert rate.bytes_s < 1_000 or not rate.differs(LoadRate.of(latency_s * 1.04, bytes_s * 1.04))
    assert rate.bytes_s < 1_000 or rate.differs(LoadRate(rate.latency_us, rate.bytes_s // 2))
    assert rate.differs(LoadRate(2 * rate.latency_us + 200, rate.bytes_s))


@pytest.mark.parametrize("request_", longest_requests(), ids=lambda request: type(request).__name__)
def test_the_longest_requests_are_within_the_limits(request_: wire.AnyRequest) -> None:
    frame = prove(SECRET, wire.encode(request_))
    assert len(frame) <= wire.MAX_MESSAGE_BYTES
    head = read_head(frame)
    check_limits(head)
    assert wire.decode_request(frame[head.start :]) == request_


def head_of(op: bytes = b"ping") -> bytes:
    return b"\xdd\x00\x00\x00\x04" + msgspec.msgpack.encode(op.decode()) + b"\xc4\x10" + SESSION + b"\x09"


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        (b"\x91" * (8 << 20), "nests values deeper than 8"),
        (b"\x81\xa1k" * (1 << 20), "nests values deeper than 8"),
        (b"\xdd\x00\x80\x00\x00" + b"\x01" * (8 << 20), f"more than {MAX_VALUES} values"),
        (b"\xdb\x00\x80\x00\x00" + b"\xf0" * (8 << 20), "a text of more than 16384 bytes"),
        (b"\xc6\x00\x80\x00\x00" + bytes(8 << 20), "a byte string of more than 2097152 bytes"),
    ],
)
def test_the_head_of_a_frame_that_exceeds_the_limits_is_read_and_its_rest_is_not(
    rest: bytes, says: str
) -> None:
    head = read_head(head_of() + rest)
    assert (head.op, head.session, head.seq) == (b"ping", SESSION, 9)
    with pytest.raises(BadRequest, match=says):
        check_limits(head)
    # A scan ends at its first fault: without the megabytes behind it, the outcome is the same.
    assert SCAN(head_of() + rest[:200]) == head
