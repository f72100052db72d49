"""The concatenated keys of a run of chunks: `KEY_BYTES` for each chunk, or for each of its `n_slices` slices.

Messages carry the keys of a prompt as one byte string, and native code takes them in that form.  Only these functions
know where the keys of chunk i lie in that string.  Indices count chunks; ranges are half-open and are cut at the last
key.
"""

from __future__ import annotations

from kvstrata.types import KEY_BYTES


def count(keys: bytes, n_slices: int = 1) -> int:
    """The number of chunks whose keys `keys` holds."""
    return len(keys) // (n_slices * KEY_BYTES)


def nth(keys: bytes, index: int) -> bytes:
    """The key of chunk `index`, in keys of one slice."""
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


def split(keys: bytes) -> list[bytes]:
    """All keys, one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def part(keys: bytes, first: int, end: int, n_slices: int = 1) -> bytes:
    """The keys of chunks [first, end)."""
    row = n_slices * KEY_BYTES
    return keys[first * row : end * row]


def before(keys: bytes, first: int, parent: bytes = b"") -> bytes:
    """The key of the chunk before chunk `first`, in keys of one slice; before chunk 0 it is `parent`."""
    return nth(keys, first - 1) if first else parent


def parents(keys: bytes, parent: bytes) -> bytes:
    """For each chunk, the keys of the chunk before it.  `parent` holds the keys of the chunk before chunk 0."""
    return (parent + keys)[: len(keys)]
