"""The native record code against the oracle, and against hostile bytes."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import random
import struct

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native import core
from kvstrata.native.core import CopyOutcome, RecordSpec
from tests.oracles import record as oracle
from tests.oracles.crc32c import crc32c_fast as crc32c

_libc = ctypes.CDLL(None, use_errno=True)
digests = st.binary(min_size=32, max_size=32)


@st.composite
def records(draw: st.DrawFn) -> oracle.Record:
    noise = random.Random(draw(st.integers(0, 1 << 30)))
    lengths = draw(
        st.one_of(
            st.lists(st.integers(1, 300), min_size=1, max_size=40),
            st.sampled_from([[1] * 224, [1] * 225, [3] * 600]),  # around the end of a header page
        )
    )
    return oracle.Record(
        draw(digests), draw(digests), draw(digests), draw(digests), draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(1, 2**63 - 1)), [noise.randbytes(length) for length in lengths],
    )  # fmt: skip


def spec_of(record: oracle.Record) -> RecordSpec:
    return RecordSpec(
        record.key, record.identity, record.slice_digest, record.parent_key, record.chunk_tokens,
        record.created_unix_ms,
    )  # fmt: skip


class Placed:
    """Bytes before a page that cannot be read: a read beyond them ends the process."""

    def __init__(self, data: bytes) -> None:
        page = mmap.PAGESIZE
        room = -(-len(data) // page) * page
        self._map = mmap.mmap(-1, room + page)
        self._map.seek(room - len(data))
        self._map.write(data)
        start = core.buffer_address(self._map, writable=True)
        _libc.mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), 0)
        self.address = start + room - len(data)
        self.length = len(data)


@given(record=records())
def test_a_sealed_record_is_byte_for_byte_what_the_format_says(record: oracle.Record) -> None:
    expected = oracle.build(record)
    extent = mmap.mmap(-1, len(expected))
    extent[oracle.header_bytes(len(record.sections)) :] = b"".join(record.sections)
    address = core.buffer_address(extent, writable=True)
    core.seal_record(address, len(extent), spec_of(record), [len(s) for s in record.sections])
    assert bytes(extent) == expected
    assert core.record_bytes(len(record.sections), sum(map(len, record.sections))) == len(expected)


@given(record=records(), behind=st.integers(0, 100))
def test_a_record_of_another_writer_is_read_and_verified(record: oracle.Record, behind: int) -> None:
    placed = Placed(oracle.build(record) + b"\xee" * behind)
    header = core.record_header(placed.address, placed.length)
    assert (header.key, header.identity) == (record.key, record.identity)
    assert (header.slice_digest, header.parent_key) == (record.slice_digest, record.parent_key)
    assert (header.chunk_tokens, header.created_unix_ms) == (record.chunk_tokens, record.created_unix_ms)
    assert [length for _, length, _ in header.sections] == [len(s) for s in record.sections]
    assert [crc for _, _, crc in header.sections] == [crc32c(s) for s in record.sections]
    assert header.header_bytes + header.payload_bytes + behind == placed.length
    assert header.codecs == b""
    assert core.verify_record(placed.address, placed.length, None) == CopyOutcome.OK
    assert core.verify_record(placed.address, placed.length, record.key) == CopyOutcome.OK
    why = core.explain_record(placed.address, placed.length, record.key)
    assert why is None if not behind else "more bytes are stored" in str(why)
    other = bytes([record.key[0] ^ 1]) + record.key[1:]
    assert core.verify_record(placed.address, placed.length, other) == CopyOutcome.STALE


FIELDS = [
    8, 10, 12, 16, 48, 80, 88, 96, 100, 104, 112, 248, 256,
    264, 266, 268, 272, 280, 288, 320, 416, 420, 504, 512, 520,
]  # fmt: skip


@given(
    record=records(),
    changes=st.lists(st.tuples(st.sampled_from(FIELDS), st.binary(min_size=1, max_size=8)), max_size=3),
    cut=st.one_of(st.none(), st.integers(0, 12_000)),
    reseal=st.booleans(),
)
def test_hostile_headers_are_judged_as_the_oracle_judges_them(record, changes, cut, reseal):
    data = bytearray(oracle.build(record))
    for at, value in changes:
        data[at : at + len(value)] = value
    if reseal:  # so that the header's CRC does not hide the other checks
        count = struct.unpack_from("<I", data, 268)[0]
        struct.pack_into("<I", data, 508, crc32c(data[256:508] + data[512 : 512 + 16 * min(count, 65536)]))
        struct.pack_into("<I", data, 252, crc32c(data[:252]))
    placed = Placed(bytes(data[:cut]))
    sound = oracle.parse(bytes(data[:cut])) is not None
    code = core.verify_record(placed.address, placed.length, None)
    assert (code == CopyOutcome.OK) == sound
    if sound:
        core.record_header(placed.address, placed.length)


def test_version_1_is_frozen() -> None:
    """Disks hold such bytes. Another form is another version, and this test stays as it is."""
    sections = [bytes(range(256)), b"kv" * 500, b"\0"]
    digests = [bytes([i]) * 32 for i in range(4)]
    record = oracle.Record(*digests, chunk_tokens=256, created_unix_ms=1_700_000_000_000, sections=sections)
    expected = "8945d8a9df91865bf3907c86c8e8b5a0aebceb72688673ec132059f41e3dc4ce"
    data = oracle.build(record)
    assert hashlib.sha256(data).hexdigest() == expected
    placed = Placed(data)
    assert core.verify_record(placed.address, placed.length, digests[0]) == CopyOutcome.OK
    extent = mmap.mmap(-1, len(data))
    extent[4096:] = data[4096:]
    address = core.buffer_address(extent, writable=True)
    core.seal_record(address, len(extent), spec_of(record), [len(s) for s in sections])
    assert hashlib.sha256(extent[:]).hexdigest() == expected


@given(st.lists(st.tuples(records(), st.integers(0, 2), st.randoms(use_true_random=False)), max_size=12))
def test_records_checked_together_are_judged_as_each_alone(given_records):
    kept, asked = [], []
    for record, damage, dice in given_records:
        data = bytearray(oracle.build(record))
        if damage == 1:
            data[dice.randrange(len(data))] ^= 1 + dice.randrange(255)
        placed = Placed(bytes(data))
        kept.append(placed)
        asked.append((placed.address, placed.length, bytes(32) if damage == 2 else record.key))
    alone = [core.verify_stored_record(*one) for one in asked]
    assert core.Verifier(3).verify_stored(asked) == alone
