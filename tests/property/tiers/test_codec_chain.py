"""Chains of codecs against the oracle, and against hostile bytes."""

from __future__ import annotations

import math
import mmap
import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.native import core
from kvstrata.native.core import CopyOutcome
from kvstrata.testing.strategies import key_of, record_hold, record_length
from kvstrata.tiers.base import two_bytes
from kvstrata.tiers.codec import BadRecord, CannotDecode, Chain, ChainSettings, ZstdOptions
from tests.harness.amount import amount
from tests.harness.records import resealed, soft_payload
from tests.oracles import codec as oracle

MASTER = b"master key of at least 32 letters"
CHAINS = {
    "zstd": Chain(ChainSettings(zstd=ZstdOptions())),
    "zstd-bytes": Chain(ChainSettings(zstd=ZstdOptions(level=3, planes=1))),
    "both": Chain(ChainSettings(zstd=ZstdOptions(), master_key=MASTER)),
    "mac": Chain(ChainSettings(mac_key=MASTER)),
}
KEY = key_of(1)


def encoded(chain: Chain, payload: bytes) -> tuple[bytes, bytes]:
    """Make a record with this payload and encode it; return (record, encoded), where b"" means: stored as it is."""
    hold = record_hold(KEY, payload)
    target = mmap.mmap(-1, chain.staging_bytes(hold.length))
    length = chain.encode(hold.view(), memoryview(target), two_bytes)
    return hold.bytes(), target[:length]


def decoded(chain: Chain, stored: bytes, length: int) -> bytes:
    """Decode a stored record into a target of `length` bytes."""
    source, target = mmap.mmap(-1, len(stored) or 1), mmap.mmap(-1, length)
    source[: len(stored)] = stored
    chain.decode(memoryview(source)[: len(stored)], memoryview(target), KEY)
    return target[:]


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Draw a payload of KV-like bytes, noise or zeros; its length is small, or near a boundary of slabs (1 MiB)."""
    length = draw(
        st.one_of(
            st.integers(1, 5000),
            st.sampled_from(amount([(1 << 20) + 1], [1 << 20, (1 << 20) + 1, (2 << 20) - 3])),
        )
    )
    kind = draw(st.sampled_from(["soft", "noise", "zeros"]))
    seed = draw(st.integers(0, 99))
    if kind == "soft":
        return soft_payload(seed.to_bytes(), length)
    return random.Random(seed).randbytes(length) if kind == "noise" else bytes(length)


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=amount(10, 30))
@given(payload=payloads())
def test_the_chain_and_the_oracle_decode_an_encoded_record_to_the_same_bytes(name, payload):
    chain = CHAINS[name]
    record, stored = encoded(chain, payload)
    if not stored:
        assert name in ("zstd", "zstd-bytes")
        return
    assert name not in ("zstd", "zstd-bytes") or len(stored) < len(record)
    assert oracle.decode(stored, MASTER) == record
    assert decoded(chain, stored, len(record)) == record


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=amount(33, 100))
@given(data=st.data())
def test_altered_bytes_never_decode_to_other_bytes(name: str, data: st.DataObject) -> None:
    """This holds even if the checksums are made to match the altered bytes, as an attacker would do."""
    chain = CHAINS[name]
    record, stored = SAMPLES.setdefault(name, encoded(chain, soft_payload(b"x", 3000)))
    spoilt = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(stored) - 1))
        spoilt[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))]
    if len(spoilt) > 4096 and data.draw(st.booleans()):
        spoilt[96:100] = core.crc32c(bytes(spoilt[4096:])).to_bytes(4, "little")
        spoilt[252:256] = core.crc32c(bytes(spoilt[:252])).to_bytes(4, "little")
    try:
        found = decoded(chain, bytes(spoilt), len(record))
    except (BadRecord, CannotDecode):
        return
    # Only the time of writing may differ, which no checksum of the payload covers.
    assert found[4096:] == record[4096:]
    assert found[256:4096] == record[256:4096]


SAMPLES: dict[str, tuple[bytes, bytes]] = {}


@pytest.mark.parametrize("name", ["both", "mac"])
def test_another_key_and_another_identitys_key_decode_nothing(name: str) -> None:
    record, stored = encoded(CHAINS[name], soft_payload(b"x", 3000))
    key = "mac_key" if "mac" in name else "master_key"
    other = Chain(CHAINS[name].settings._replace(**{key: b"o" * 32}))
    with pytest.raises(CannotDecode, match="another key") as raised:
        decoded(other, stored, len(record))
    assert raised.value.reason == "wrong_key"
    moved = bytearray(stored)
    for at in (48, 320):  # the identity, in both headers
        moved[at] ^= 1
    moved[252:256] = core.crc32c(bytes(moved[:252])).to_bytes(4, "little")
    count = int.from_bytes(moved[268:272], "little")
    inner_crc = core.crc32c(bytes(moved[512 : 512 + 16 * count]), core.crc32c(bytes(moved[256:508])))
    moved[508:512] = inner_crc.to_bytes(4, "little")
    with pytest.raises(CannotDecode) as raised:
        decoded(CHAINS[name], bytes(moved), len(record))
    assert raised.value.reason == "unauthenticated"


@pytest.mark.parametrize("name", ["both", "mac"])
@given(data=st.data())
def test_no_byte_of_an_authenticated_record_can_be_altered(name: str, data: st.DataObject) -> None:
    """Whatever is altered, with checksums that are made right again: headers, chain of codecs, key id, payload, tag."""
    chain = CHAINS[name]
    record, stored = SAMPLES.setdefault(name, encoded(chain, soft_payload(b"x", 3000)))
    spoilt = bytearray(stored)
    at = data.draw(st.one_of(st.integers(16, 95), st.integers(104, 251), st.integers(4096, len(stored) - 1)))
    spoilt[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((BadRecord, CannotDecode)):
        decoded(chain, resealed(bytes(spoilt)) if at not in range(88, 96) else bytes(spoilt), len(record))


@pytest.mark.parametrize("field", ["master_key", "mac_key"])
def test_after_a_change_of_keys_old_records_are_read_and_new_ones_name_the_new_key(field: str) -> None:
    before = Chain(ChainSettings(**{field: MASTER}))
    after = Chain(ChainSettings(**{field: b"n" * 32}, old_keys=(MASTER,)))
    record, stored = encoded(before, soft_payload(b"x", 3000))
    assert decoded(after, stored, len(record)) == record
    _, again = encoded(after, soft_payload(b"x", 3000))
    assert stored[4096:4104] != again[4096:4104], "the ids of the keys"
    with pytest.raises(CannotDecode) as raised:
        decoded(before, again, len(record))
    assert raised.value.reason == "wrong_key"


def test_a_record_that_claims_a_huge_payload_is_refused_before_decoding() -> None:
    """A decompression bomb is refused before anything is decompressed: the target bounds what may be written."""
    chain = CHAINS["zstd"]
    record, stored = encoded(chain, bytes(1 << 22))
    assert len(stored) < 10_000
    with pytest.raises(CannotDecode) as raised:
        decoded(chain, stored, record_length(1000))
    assert raised.value.reason == "length"
    # A slab whose zstd frame declares more bytes than a slab may have.
    bomb = bytearray(stored)
    frame = memoryview(__import__("zstandard").ZstdCompressor().compress(bytes(64 << 20)))
    at = 4096 + 8 + 4 * 4
    bomb[at:] = bytes(frame)
    bomb[4096 + 8 : 4096 + 12] = len(frame).to_bytes(4, "little")
    bomb[88:96] = (len(bomb) - 4096).to_bytes(8, "little")
    bomb[96:100] = core.crc32c(bytes(bomb[4096:])).to_bytes(4, "little")
    bomb[252:256] = core.crc32c(bytes(bomb[:252])).to_bytes(4, "little")
    with pytest.raises(BadRecord, match="zstd"):
        decoded(chain, bytes(bomb), len(record))


def test_a_record_that_decodes_to_wrong_bytes_leaves_no_magic() -> None:
    chain = CHAINS["zstd"]
    record, stored = encoded(chain, soft_payload(b"x", 3000))
    wrong = bytearray(stored)
    wrong[4096 + 12 + 40] ^= 1  # within the compressed bytes, which may still decompress
    wrong[96:100] = core.crc32c(bytes(wrong[4096:])).to_bytes(4, "little")
    wrong[252:256] = core.crc32c(bytes(wrong[:252])).to_bytes(4, "little")
    source, target = mmap.mmap(-1, len(wrong)), mmap.mmap(-1, len(record))
    source[:] = bytes(wrong)
    with pytest.raises(BadRecord):
        chain.decode(memoryview(source), memoryview(target), KEY)
    address = core.buffer_address(target, writable=True)
    assert core.verify_record(address, len(target), KEY) != CopyOutcome.OK
    assert target[:8] == bytes(8)


# -- fp8 ---------------------------------------------------------------------------------------------------


@st.composite
def fp8_numbers(draw: st.DrawFn) -> tuple[int, tuple[int, ...], list[int]]:
    """Draw a dtype, a shape and the bits of finite numbers: of any magnitude, or normal with a scale of 1e-3 to 1e3."""
    dtype = draw(st.sampled_from([1, 2]))
    shape = draw(st.sampled_from([(1, 2, 4, 3, 9), (2, 2, 16, 1, 5), (1, 1, 1, 1, 16), (2, 1, 8, 2, 33)]))
    n = math.prod(shape)
    noise = random.Random(draw(st.integers(0, 1 << 30)))
    if draw(st.booleans()):
        top = 0x7F80 if dtype == 1 else 0x7C00
        return dtype, shape, [noise.randrange(top) | noise.choice((0, 0x8000)) for _ in range(n)]
    size = 10.0 ** draw(st.integers(-3, 3))
    return dtype, shape, [oracle.bits_of(oracle.single(noise.gauss(0, size)), dtype) for _ in range(n)]


@given(case=fp8_numbers())
def test_rounding_to_fp8_keeps_its_error_bound(case: Any) -> None:
    dtype, shape, numbers = case
    scales, codes = oracle.fp8_encode(struct.pack(f"<{len(numbers)}H", *numbers), dtype, shape)
    back = struct.unpack(f"<{len(numbers)}H", oracle.fp8_decode(scales, codes, dtype, shape))
    for at, (number, bits) in enumerate(zip(numbers, back, strict=True)):
        value, found = oracle.float_of(number, dtype), oracle.float_of(bits, dtype)
        rounding = abs(found) / (256 if dtype == 1 else 2048) + (2.0**-134 if dtype == 1 else 2.0**-25)
        scale = scales[oracle.scale_index(at, shape)]
        assert abs(found - value) <= max(abs(value) / 16, scale / 1024) * (1 + 2**-20) + rounding
