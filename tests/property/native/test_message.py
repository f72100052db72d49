"""The scan of a message agrees with its plain twin, and with a decoder about what a message says."""

from __future__ import annotations

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.native.message import FAULTS, Scan
from tests.oracles.message import Scanned

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=70)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=70)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=18),
    max_leaves=30,
)
messages = st.one_of(
    values.map(msgspec.msgpack.encode),
    st.tuples(st.text(max_size=8), st.binary(min_size=16, max_size=16), st.integers(0, 1 << 63), values).map(
        msgspec.msgpack.encode
    ),
    st.binary(max_size=60),
    st.builds(lambda value, cut: msgspec.msgpack.encode(value)[:cut], values, st.integers(0, 60)),
)
limits = st.tuples(st.integers(0, 64), st.integers(1, 60), st.integers(0, 40), st.integers(0, 70))


@given(messages, limits)
@example(b"\xdd\xff\xff\xff\xff", (8, 100, 100, 100))
@example(b"\xdf\xff\xff\xff\xff", (8, 100, 100, 100))
@example(b"\x91" * 65, (64, 100, 100, 100))
@example(b"\xc6\xff\xff\xff\xff", (8, 100, 100, 0xFFFF_FFFF))
def test_a_scan_is_what_its_twin_says(message: bytes, given_limits: tuple[int, int, int, int]) -> None:
    depth, elements, text_bytes, binary_bytes = given_limits
    scan = Scan(depth=depth, elements=elements, text_bytes=text_bytes, binary_bytes=binary_bytes)
    found = scan(message)
    if found[0]:
        assert message[:34] == b"\xc4\x20" + found[0]
        message = message[34:]
    assert found[1:] == Scanned(message, depth, elements, text_bytes, binary_bytes).result()
    assert found[-1] in FAULTS
    secret = bytes(range(32))
    assert scan(b"\xc4\x20" + secret + message) == (secret, *found[1:])


@given(values)
@example(msgspec.msgpack.Ext(-1, b""))  # a timestamp: whether it is one that exists is not for a scan to say
def test_a_message_without_a_fault_can_be_decoded_and_begins_as_the_scan_says(value: object) -> None:
    message = msgspec.msgpack.encode(value)
    _, op, session, seq, fault = Scan(depth=64, elements=10_000, text_bytes=10_000, binary_bytes=10_000)(
        message
    )
    assert not fault
    try:
        found = msgspec.msgpack.decode(message)
    except msgspec.ValidationError as error:
        assert "timestamp" in str(error)
        return
    if isinstance(found, list) and len(found) > 2 and type(found[2]) is int and 0 <= found[2] < 1 << 63:
        assert seq == found[2]
    if isinstance(found, list) and found and isinstance(found[0], str):
        assert op == found[0].encode()
    if isinstance(found, list) and len(found) > 1 and isinstance(found[1], bytes) and len(found[1]) == 16:
        assert session == found[1]
