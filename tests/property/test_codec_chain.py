"""Chains of codecs against a plain twin of the format page, and against hostile bytes."""

from __future__ import annotations

import mmap
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native import codec, copying
from kvstrata.native.copying import CopyOutcome
from kvstrata.storage.wrap import codec_chain
from kvstrata.storage.wrap.codec_chain import BadRecord, CannotDecode, Chain, ChainSettings, ZstdOptions
from kvstrata.testing.strategies import key_of, record_hold, record_length
from tests.harness.codec_records import soft_payload
from tests.oracles import codec as oracle

MASTER = b"master key of at least 32 letters"
CHAINS = {
    "zstd": Chain(ChainSettings(zstd=ZstdOptions())),
    "zstd-bytes": Chain(ChainSettings(zstd=ZstdOptions(level=3, planes=1))),
    "aes": Chain(ChainSettings(master_key=MASTER)),
    "both": Chain(ChainSettings(zstd=ZstdOptions(), master_key=MASTER)),
}
KEY = key_of(1)


def encoded(chain: Chain, payload: bytes) -> tuple[bytes, bytes]:
    """A record with this payload, and what the chain makes of it (empty: stored as it is)."""
    hold = record_hold(KEY, payload)
    target = mmap.mmap(-1, chain.staging_bytes(hold.length))
    length = chain.encode(hold.view(), memoryview(target))
    return hold.bytes(), target[:length]


def decoded(chain: Chain, stored: bytes, length: int) -> bytes:
    """What it decodes to, in a target of so many bytes and not one more."""
    source, target = mmap.mmap(-1, len(stored) or 1), mmap.mmap(-1, length)
    source[: len(stored)] = stored
    chain.decode(memoryview(source)[: len(stored)], memoryview(target), KEY)
    return target[:]


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """KV-like, noise and zeros, around the borders of slabs."""
    length = draw(st.one_of(st.integers(1, 5000), st.sampled_from([1 << 20, (1 << 20) + 1, (2 << 20) - 3])))
    kind = draw(st.sampled_from(["soft", "noise", "zeros"]))
    seed = draw(st.integers(0, 99))
    if kind == "soft":
        return soft_payload(seed.to_bytes(), length)
    return random.Random(seed).randbytes(length) if kind == "noise" else bytes(length)


@pytest.mark.parametrize("name", CHAINS)
@given(payload=payloads())
def test_what_was_encoded_decodes_to_the_same_bytes_here_and_by_the_page(name: str, payload: bytes) -> None:
    chain = CHAINS[name]
    record, stored = encoded(chain, payload)
    if not stored:
        assert name.startswith("zstd")
        return
    assert name not in ("zstd", "zstd-bytes") or len(stored) < len(record)
    assert oracle.decode(stored, MASTER) == record
    assert decoded(chain, stored, len(record)) == record


@given(payload=st.binary(max_size=300))
@pytest.mark.parametrize("path", codec.planes_paths())
def test_planes_are_those_of_the_page_on_every_path(path: str, payload: bytes) -> None:
    codec.set_planes_path(path)
    try:
        out, back = bytearray(len(payload)), bytearray(len(payload))
        codec.split_planes(out, payload)
        assert bytes(out) == oracle.split_planes(payload)
        codec.join_planes(back, out)
        assert bytes(back) == payload == oracle.join_planes(bytes(out))
    finally:
        codec.set_planes_path(None)


@pytest.mark.parametrize("name", CHAINS)
@given(data=st.data())
def test_altered_bytes_never_decode_to_other_bytes(name: str, data: st.DataObject) -> None:
    """Also where the checksums are made right again, as whoever means harm would do."""
    chain = CHAINS[name]
    record, stored = SAMPLES.setdefault(name, encoded(chain, soft_payload(b"x", 3000)))
    spoilt = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(stored) - 1))
        spoilt[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))]
    if len(spoilt) > 4096 and data.draw(st.booleans()):
        spoilt[96:100] = copying.crc32c(bytes(spoilt[4096:])).to_bytes(4, "little")
        spoilt[252:256] = copying.crc32c(bytes(spoilt[:252])).to_bytes(4, "little")
    try:
        found = decoded(chain, bytes(spoilt), len(record))
    except (BadRecord, CannotDecode):
        return
    # What may differ is the time of writing, which no checksum of the payload covers.
    assert found[4096:] == record[4096:]
    assert found[256:4096] == record[256:4096]


SAMPLES: dict[str, tuple[bytes, bytes]] = {}


@pytest.mark.parametrize("name", ["aes", "both"])
def test_another_key_and_another_identitys_key_decode_nothing(name: str) -> None:
    record, stored = encoded(CHAINS[name], soft_payload(b"x", 3000))
    other = Chain(CHAINS[name].settings._replace(master_key=b"o" * 32))
    with pytest.raises(CannotDecode, match="another key") as raised:
        decoded(other, stored, len(record))
    assert raised.value.reason == "wrong_key"
    moved = bytearray(stored)
    for at in (48, 320):  # the identity, in both headers
        moved[at] ^= 1
    moved[252:256] = copying.crc32c(bytes(moved[:252])).to_bytes(4, "little")
    count = int.from_bytes(moved[268:272], "little")
    inner_crc = copying.crc32c(bytes(moved[512 : 512 + 16 * count]), copying.crc32c(bytes(moved[256:508])))
    moved[508:512] = inner_crc.to_bytes(4, "little")
    with pytest.raises(CannotDecode, match="another key"):
        decoded(CHAINS[name], bytes(moved), len(record))


def test_nonces_are_never_the_same() -> None:
    chain = CHAINS["aes"]
    seen = {encoded(chain, b"the same payload")[1][4096 : 4096 + 12] for _ in range(200)}
    assert len(seen) == 200


def test_a_claim_of_a_huge_payload_costs_nothing() -> None:
    """The target decides how much is written: a bomb is refused before anything is decompressed."""
    chain = CHAINS["zstd"]
    record, stored = encoded(chain, bytes(1 << 22))
    assert len(stored) < 10_000
    with pytest.raises(CannotDecode) as raised:
        decoded(chain, stored, record_length(1000))
    assert raised.value.reason == "length"
    # A slab whose frame says that it is longer than a slab may be.
    bomb = bytearray(stored)
    frame = memoryview(__import__("zstandard").ZstdCompressor().compress(bytes(64 << 20)))
    at = 4096 + 8 + 4 * 4
    bomb[at:] = bytes(frame)
    bomb[4096 + 8 : 4096 + 12] = len(frame).to_bytes(4, "little")
    bomb[88:96] = (len(bomb) - 4096).to_bytes(8, "little")
    bomb[96:100] = copying.crc32c(bytes(bomb[4096:])).to_bytes(4, "little")
    bomb[252:256] = copying.crc32c(bytes(bomb[:252])).to_bytes(4, "little")
    with pytest.raises(BadRecord, match="zstd"):
        decoded(chain, bytes(bomb), len(record))


def test_a_record_decoded_to_something_else_leaves_no_magic() -> None:
    chain = CHAINS["zstd"]
    record, stored = encoded(chain, soft_payload(b"x", 3000))
    wrong = bytearray(stored)
    wrong[4096 + 12 + 40] ^= 1  # within the compressed bytes: may still decompress
    wrong[96:100] = copying.crc32c(bytes(wrong[4096:])).to_bytes(4, "little")
    wrong[252:256] = copying.crc32c(bytes(wrong[:252])).to_bytes(4, "little")
    source, target = mmap.mmap(-1, len(wrong)), mmap.mmap(-1, len(record))
    source[:] = bytes(wrong)
    with pytest.raises(BadRecord):
        chain.decode(memoryview(source), memoryview(target), KEY)
    address = copying.buffer_address(target, writable=True)
    assert copying.verify_record(address, len(target), KEY) != CopyOutcome.OK
    assert target[:8] == bytes(8)


def test_the_page_numbers_the_codecs() -> None:
    assert (codec_chain.PLANES2, codec_chain.ZSTD, codec_chain.AES_GCM) == (2, 3, 4)
