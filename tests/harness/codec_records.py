"""Records whose payloads look like KV: 16-bit numbers of similar size, which a codec can compress."""

from __future__ import annotations

import random

from kvstrata.storage.base import LoadItem
from kvstrata.testing.strategies import watched

_EXPONENTS = bytes((0x3E, 0x3F, 0xBE, 0xBF)[i % 4] for i in range(256))


def soft_payload(seed: bytes, length: int) -> bytes:
    """Return bytes like bf16 numbers with random mantissas and few exponents."""
    noise = random.Random(seed)
    payload = bytearray(noise.randbytes(length))
    payload[1::2] = noise.randbytes(length // 2).translate(_EXPONENTS)
    return bytes(payload)


def loaded_record(item: LoadItem) -> bytes:
    """Return the whole record that a load left in the item's extent."""
    return watched(item).bytes()
