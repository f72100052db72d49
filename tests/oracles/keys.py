"""Key derivation in plain Python: the twin of `kvstrata.native.core`."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Pack tokens as unsigned 32-bit little-endian numbers."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def lookahead(tokens: Sequence[int]) -> bytes:
    """Return what the tokens behind a chunk without media add to its key."""
    return hashlib.sha256(token_bytes(tokens)).digest()


def chain_keys(
    start: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: dict[int, bytes] | None = None,
    first: int = 0,
) -> bytes:
    """Return the keys of the full chunks of tokens[first:], chained from `start`; `extras` by number of the chunk."""
    keys = []
    previous = start
    for number, begin in enumerate(range(first, len(tokens) - chunk_tokens + 1, chunk_tokens)):
        chunk = token_bytes(tokens[begin : begin + chunk_tokens])
        previous = hashlib.sha256(previous + chunk + (extras or {}).get(number, b"")).digest()
        keys.append(previous)
    return b"".join(keys)


def storage_keys(root: bytes, chain: bytes, slices: bytes) -> bytes:
    """Return SHA-256(chain key ‖ SHA-256(root ‖ slice digest)) of all pairs, chunk-major."""
    bound = [hashlib.sha256(root + slices[j : j + 32]).digest() for j in range(0, len(slices), 32)]
    return b"".join(
        hashlib.sha256(chain[i : i + 32] + of_slice).digest()
        for i in range(0, len(chain), 32)
        for of_slice in bound
    )
