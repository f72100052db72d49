"""Decoding of stored records in plain Python, written from `docs/internals/formats.md` alone."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence

import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tests.oracles.crc32c import crc32c_fast as crc32c
from tests.oracles.record import INNER, OUTER, SECTION

SLAB = 1 << 20
E4M3 = [
    (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(0x7F)
]
"""Magnitudes of the codes 0 to 0x7E; the sign is bit 7."""


def split_planes(data: bytes) -> bytes:
    return data[0::2] + data[1::2]


def join_planes(planes: bytes) -> bytes:
    """The inverse."""
    half = (len(planes) + 1) // 2
    data = bytearray(len(planes))
    data[0::2], data[1::2] = planes[:half], planes[half:]
    return bytes(data)


def decode(stored: bytes, key_text: bytes = b"") -> bytes:
    """Return the record as it was before its codecs. Raises AssertionError for bytes against the format."""
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
        if number in (5, 6):
            info = b"kvstrata aes-gcm 2" if number == 5 else b"kvstrata mac 1"
            derived = HKDF(SHA256(), 32, salt=None, info=info + identity).derive(key_text)
            key_id = HKDF(SHA256(), 32, salt=None, info=b"kvstrata key id 1").derive(key_text)[:8]
            assert body[:8] == key_id
            headers = stored[:96] + bytes(4) + stored[100:252] + stored[256:table_end] + key_id
            nonce, body = body[8:20], body[20:]
            if number == 5:
                body = AESGCM(derived).decrypt(nonce, body, headers)
            else:
                plain, tag = body[:-16], body[-16:]
                assert AESGCM(derived).encrypt(nonce, b"", headers + plain) == tag
                body = plain
        elif number == 3:
            body = unpack_slabs(body, join=2 in codecs)
        else:
            assert number == 2  # the planes, which `unpack_slabs` undoes slab by slab
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
    """Decode the zstd codec."""
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


def float_of(bits: int, dtype: int) -> float:
    """Return the value of a 16-bit number; dtype 1 is bfloat16, 2 float16."""
    if dtype == 1:
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def bits_of(value: float, dtype: int) -> int:
    """Return the nearest 16-bit number, ties to even, of a 32-bit float that is not larger than the largest one."""
    if dtype == 2:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, rest = bits >> 16, bits & 0xFFFF
    return low + (rest > 0x8000 or (rest == 0x8000 and low & 1))


def single(value: float) -> float:
    """Round to a 32-bit float."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def scale_of(magnitudes: list[float]) -> float:
    return max(single(max(magnitudes) / 448), 2.0**-126)


def scale_index(at: int, shape: tuple[int, ...]) -> int:
    """Return the index of the scale of the number at this place of a section."""
    _, groups, tokens, heads, dim = shape
    return at // (dim * heads * tokens) % groups * heads + at // dim % heads


def to_e4m3(value: float, scale: float) -> int:
    """Return the code nearest to value × (1 / scale), each step rounded to a 32-bit float; ties to the even code."""
    scaled = single(value * single(1 / scale))
    magnitude = min(abs(scaled), 448.0)
    above = bisect.bisect(E4M3, magnitude)
    code = min(
        range(above - 1, min(above + 1, 0x7F)), key=lambda code: (abs(E4M3[code] - magnitude), code & 1)
    )
    return code | (0x80 if str(scaled).startswith("-") else 0)


def from_e4m3(code: int, scale: float, dtype: int) -> int:
    value = single(E4M3[code & 0x7F] * scale)
    return bits_of(-value if code & 0x80 else value, dtype)


def fp8_encode(section: bytes, dtype: int, shape: tuple[int, ...]) -> tuple[list[float], bytes]:
    """Return the scales of a section of 16-bit numbers, and its codes."""
    values = [float_of(bits, dtype) for (bits,) in struct.iter_unpack("<H", section)]
    index = [scale_index(at, shape) for at in range(len(values))]
    most = [0.0] * (shape[1] * shape[3])
    for value, i in zip(values, index, strict=True):
        most[i] = max(most[i], abs(value))
    scales = [scale_of([one]) for one in most]
    return scales, bytes(to_e4m3(value, scales[i]) for value, i in zip(values, index, strict=True))


def fp8_decode(scales: Sequence[float], codes: bytes, dtype: int, shape: tuple[int, ...]) -> bytes:
    """Return the 16-bit numbers of a section."""
    found = [from_e4m3(code, scales[scale_index(at, shape)], dtype) for at, code in enumerate(codes)]
    return struct.pack(f"<{len(found)}H", *found)
