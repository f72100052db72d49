"""Records whose payloads look like KV: 16-bit numbers of similar size, which a codec makes shorter."""

from __future__ import annotations

import random
from typing import cast

from kvstrata.storage.base import LoadItem, PutItem
from kvstrata.testing.strategies import record_hold, watched

_EXPONENTS = bytes((0x3E, 0x3F, 0xBE, 0xBF)[i % 4] for i in range(256))


def soft_payload(seed: bytes, length: int) -> bytes:
    """bf16-like: any mantissa, few exponents."""
    noise = random.Random(seed)
    payload = bytearray(noise.randbytes(length))
    payload[1::2] = noise.randbytes(length // 2).translate(_EXPONENTS)
    return bytes(payload)


def soft_put_item(key: bytes, length: int) -> PutItem:
    """An item that puts such a payload under this key."""
    return PutItem(key, cast("object", record_hold(key, soft_payload(key, length))))  # type: ignore[arg-type]


def loaded_record(item: LoadItem) -> bytes:
    """The whole record that a load left in the item's extent."""
    return watched(item).bytes()
