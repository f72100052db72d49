"""Forged records, as somebody who can write to a storage could make them: sound in all but their origin."""

from __future__ import annotations

import mmap

from kvstrata.native.copying import buffer_address, crc32c
from kvstrata.native.hashing import storage_keys
from kvstrata.native.record import RecordSpec, record_bytes, seal_record
from tests.harness.rpc_client import CHUNK_TOKENS, SECTIONS, RpcClient


def forged_record(
    client: RpcClient, root: bytes, chain_key: bytes, fill: bytes, sections: list[int] = SECTIONS
) -> bytes:
    """Make a sound plain record of this client's slice whose payload repeats `fill`."""
    assert client.slice is not None
    digest = client.slice.digest()
    length = record_bytes(len(sections), sum(sections))
    place = mmap.mmap(-1, length)
    start = length - sum(sections)
    place[start:] = (fill * (sum(sections) // len(fill) + 1))[: sum(sections)]
    spec = RecordSpec(storage_keys(root, chain_key, digest), root, digest, bytes(32), CHUNK_TOKENS)
    seal_record(buffer_address(place, writable=True), length, spec, list(sections))
    return place[:]


def resealed(record: bytes) -> bytes:
    """Make the checksums of the stored payload and of the outer header right again."""
    sealed = bytearray(record)
    start = int.from_bytes(sealed[12:16], "little")
    sealed[88:96] = (len(sealed) - start).to_bytes(8, "little")
    sealed[96:100] = crc32c(bytes(sealed[start:])).to_bytes(4, "little")
    sealed[252:256] = crc32c(bytes(sealed[:252])).to_bytes(4, "little")
    return bytes(sealed)


def renamed(record: bytes, key: bytes) -> bytes:
    """Give a record another key in both headers, with checksums that are right."""
    moved = bytearray(record)
    moved[16:48] = moved[288:320] = key
    count = int.from_bytes(moved[268:272], "little")
    inner = crc32c(bytes(moved[512 : 512 + 16 * count]), crc32c(bytes(moved[256:508])))
    moved[508:512] = inner.to_bytes(4, "little")
    return resealed(bytes(moved))
