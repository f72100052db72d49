"""Chunk keys in batches, without the GIL (ext/core/include/kvstrata/sha256.h)."""

from collections.abc import Mapping, Sequence
from typing import Any

def chain_keys(
    start: bytes,
    tokens: Sequence[int] | Any,
    chunk_tokens: int,
    extras: Mapping[int, bytes] | None = None,
    first: int = 0,
) -> bytes:
    """Chain keys of the full chunks in `tokens[first:]`, 32 bytes each; what is left over is ignored.

    `start`: 32 bytes, the key of the chunk before or the identity's root. `tokens`: a list of token ids, or a
    contiguous buffer of u32 (or of their bytes, little-endian). `extras`: chunk number (from `first`) → 32 bytes
    that are hashed behind that chunk's tokens. Raises ValueError that names the argument, index and value.
    """

def storage_keys(chain_: bytes, slice_digests: bytes) -> bytes:
    """Keys of n chunks × m slices, all slices of a chunk together. Raises ValueError for odd lengths."""

def sha256_path() -> str:
    """Which implementation this CPU got."""
