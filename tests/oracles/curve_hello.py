"""The HELLO of CurveZMQ (RFC 26), the first message of a client: 64 zero bytes sealed for the server's public key."""

from __future__ import annotations

import struct

from cryptography.hazmat.primitives.poly1305 import Poly1305

_MASK = (1 << 32) - 1
_CONSTANTS = struct.unpack("<4I", b"expand 32-byte k")
_QUARTERS = (
    (0, 4, 8, 12), (5, 9, 13, 1), (10, 14, 2, 6), (15, 3, 7, 11),
    (0, 1, 2, 3), (5, 6, 7, 4), (10, 11, 8, 9), (15, 12, 13, 14),
)  # fmt: skip


def hello(short_key: bytes, shared: bytes, nonce: bytes = bytes(7) + b"\1") -> bytes:
    """The body of a HELLO from the client's short-term public key and the secret that it shares with the server."""
    return (
        bytes((1, 0)) + bytes(72) + short_key + nonce + _box(bytes(64), b"CurveZMQHELLO---" + nonce, shared)
    )


def _box(message: bytes, nonce: bytes, shared: bytes) -> bytes:
    """crypto_box of NaCl, from the point that both sides have computed."""
    key = _hsalsa20(_hsalsa20(shared, bytes(16)), nonce[:16])
    length = 32 + len(message)
    stream = b"".join(
        _salsa20(key, nonce[16:] + struct.pack("<Q", number)) for number in range((length + 63) // 64)
    )
    sealed = bytes(a ^ b for a, b in zip(message, stream[32:length], strict=True))
    return Poly1305.generate_tag(stream[:32], sealed) + sealed


def _hsalsa20(key: bytes, nonce: bytes) -> bytes:
    words = _rounds(_state(key, nonce))
    return struct.pack("<8I", *(words[place] for place in (0, 5, 10, 15, 6, 7, 8, 9)))


def _salsa20(key: bytes, nonce: bytes) -> bytes:
    state = _state(key, nonce)
    return struct.pack("<16I", *((a + b) & _MASK for a, b in zip(state, _rounds(state), strict=True)))


def _state(key: bytes, nonce: bytes) -> list[int]:
    k, n, c = struct.unpack("<8I", key), struct.unpack("<4I", nonce), _CONSTANTS
    return [c[0], *k[:4], c[1], *n, c[2], *k[4:], c[3]]


def _rounds(state: list[int]) -> list[int]:
    """Salsa20's ten double rounds."""
    x = list(state)
    for _ in range(10):
        for a, b, c, d in _QUARTERS:
            for to, one, two, turn in ((b, a, d, 7), (c, b, a, 9), (d, c, b, 13), (a, d, c, 18)):
                total = (x[one] + x[two]) & _MASK
                x[to] ^= (total << turn | total >> (32 - turn)) & _MASK
    return x
