"""Chunk keys in batches (SHA-256; definitions in `docs/formats.md`)."""

from collections.abc import Mapping, Sequence

from typing_extensions import Buffer

def chain_keys(
    start: bytes,
    tokens: Sequence[int] | Buffer,
    chunk_tokens: int,
    extras: Mapping[int, bytes] | None = None,
    first: int = 0,
) -> bytes:
    """Chain keys of the full chunks of tokens[first:], 32 bytes each; tokens after the last full chunk are ignored.

    `start` is the chain key of the chunk before, or the identity's root.  `tokens` is a sequence of ints or a
    buffer of 32-bit unsigned numbers (a `bytes` object holds them little-endian).  `extras` maps the number of a chunk
    in this call to the 32 bytes that stand for its content other than tokens (media).

    Raises ValueError naming index and value for a token outside 0..2**32-1, and ValueError for an extra whose chunk is
    not full; TypeError for a token that is not an int.  Drops the GIL while it hashes 64 chunks or more.
    """

def storage_keys(root: Buffer, chain: Buffer, slice_digests: Buffer) -> bytes:
    """SHA-256(chain key ‖ SHA-256(root ‖ slice digest)) for each pair, chunk-major: all slices of chunk 0, then of 1, …

    `root` is the identity's.  Since it enters here once more, no chain key gives a storage key of another identity: a
    process that names foreign chain keys reaches nothing but chunks of its own identities.
    """

def sha256_path() -> str:
    """The implementation in use: scalar, armsha2 or shani."""
