"""Encoded payloads in plain Python, written from `docs/formats.md` alone: what a stored record decodes to."""

from __future__ import annotations

import struct

import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tests.oracles.crc32c import crc32c_fast as crc32c
from tests.oracles.record import INNER, OUTER, SECTION

SLAB = 1 << 20


def split_planes(data: bytes) -> bytes:
    """Bytes 0, 2, 4, … and then bytes 1, 3, 5, …"""
    return data[0::2] + data[1::2]


def join_planes(planes: bytes) -> bytes:
    """The inverse."""
    half = (len(planes) + 1) // 2
    data = bytearray(len(planes))
    data[0::2], data[1::2] = planes[:half], planes[half:]
    return bytes(data)


def decode(stored: bytes, key_text: bytes = b"") -> bytes:
    """The record as it was before its codecs. Asserts all the way."""
    (
        magic,
        version,
        flags,
        start,
        key,
        identity,
        codecs,
        stored_bytes,
        stored_crc,
        zero,
        created,
        zeros,
        crc,
    ) = OUTER.unpack(stored[:256])
    assert (magic, version, flags, zero, zeros) == (b"KVSTRATA", 1, 0, 0, bytes(140))
    assert crc == crc32c(stored[:252])
    body = stored[start:]
    assert len(body) == stored_bytes and crc32c(body) == stored_crc
    _, _, _, count, _, payload_bytes, *_ = INNER.unpack(stored[256:512])
    table_end = 512 + SECTION.size * count
    for number in reversed(codecs.rstrip(b"\0")):
        if number == 4:
            derived = HKDF(SHA256(), 32, salt=None, info=b"kvstrata aes-gcm 1" + identity).derive(key_text)
            headers = stored[:96] + bytes(4) + stored[100:252] + stored[256:table_end]
            body = AESGCM(derived).decrypt(body[:12], body[12:], headers)
        elif number == 3:
            body = unpack_slabs(body, join=2 in codecs)
        else:
            assert number == 2  # undone slab by slab
    assert len(body) == payload_bytes
    outer = OUTER.pack(
        magic,
        version,
        flags,
        start,
        key,
        identity,
        bytes(8),
        payload_bytes,
        crc32c(body),
        0,
        created,
        zeros,
        0,
    )
    outer = outer[:-4] + struct.pack("<I", crc32c(outer[:-4]))
    return outer + stored[256:start] + body


def unpack_slabs(body: bytes, *, join: bool) -> bytes:
    """The zstd codec."""
    (n,) = struct.unpack_from("<Q", body)
    slabs = -(-n // SLAB)
    sizes = struct.unpack_from(f"<{slabs}I", body, 8)
    at, out = 8 + 4 * slabs, b""
    for i, size in enumerate(sizes):
        length = min(SLAB, n - i * SLAB)
        packed = body[at : at + (size & 0x7FFFFFFF)]
        at += len(packed)
        slab = (
            packed if size >> 31 else zstandard.ZstdDecompressor().decompress(packed, max_output_size=length)
        )
        assert len(slab) == length
        out += join_planes(slab) if join else slab
    assert at == len(body)
    return out
