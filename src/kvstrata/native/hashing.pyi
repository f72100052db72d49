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
    """Chain keys of the full chunks of tokens[first:], 32 bytes each; what is left over is ignored.

    `start` is the chain key of the chunk before, or the identity's root.  `tokens` is a sequence of ints or a
    buffer of 32-bit unsigned numbers (bytes are taken as little-endian ones).  `extras` gives 32 bytes for
    chunks with other content than tokens, by number of the chunk among those of this call.

    Raises ValueError naming index and value for a token outside 0..2**32-1, and for an extra without a full
    chunk; TypeError for what is no int.  Drops the GIL while it hashes 64 chunks or more.
    """

def storage_keys(chain: Buffer, slice_digests: Buffer) -> bytes:
    """SHA-256(chain key ‖ slice digest) for each of both, chunk-major: all slices of chunk 0, of chunk 1, …"""

def sha256_path() -> str:
    """The implementation in use: scalar, armsha2 or shani."""

def sha256_paths() -> list[str]:
    """What this CPU can run, slowest first."""

def set_sha256_path(name: str | None) -> None:
    """Forces an implementation, for tests and benchmarks; None: the best one. ValueError if unsupported."""
