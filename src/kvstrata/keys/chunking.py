"""Chain and storage keys of one growing request; every token is hashed once.

Invariants
1. `chain` holds one key for each full chunk of the tokens fed so far, and never changes but by growing.
2. Storage keys of a set of slices grow with the chain; each is derived once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from kvstrata.keys.multimodal import MediaItem, check_media, media_extra
from kvstrata.native.hashing import chain_keys, storage_keys
from kvstrata.types import KEY_BYTES

PROBE_BYTES = 8


class ChunkHasher:
    """The keys of one request. Not thread-safe; one object lives as long as its request.

    Tokens themselves are not kept: the caller's own list is read where it has grown.
    """

    __slots__ = ("_chain", "_chunk_tokens", "_media", "_root", "_storage", "_storage_slices", "probe")

    def __init__(self, root: bytes, chunk_tokens: int, media: Iterable[MediaItem] = ()) -> None:
        """`root` is the identity's (32 bytes). Raises ValueError for other lengths and for senseless media."""
        if len(root) != KEY_BYTES:
            raise ValueError(f"root has {len(root)} bytes, an identity root has {KEY_BYTES}")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}, must be at least 1")
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._media = check_media(media)
        self._chain = b""
        self._storage = b""
        self._storage_slices: tuple[bytes, ...] = ()
        self.probe = b""
        """SHA-256 of the first chunk's tokens, 8 bytes; b"" before there is one. Names no identity."""

    @property
    def chain(self) -> bytes:
        """The chain keys so far, 32 bytes per full chunk."""
        return self._chain

    @property
    def n_chunks(self) -> int:
        """How many full chunks were hashed."""
        return len(self._chain) // KEY_BYTES

    def key(self, chunk: int) -> bytes:
        """Chain key of one chunk; IndexError when it is not hashed yet."""
        if not 0 <= chunk < self.n_chunks:
            raise IndexError(f"chunk {chunk} is not hashed, the request has {self.n_chunks} so far")
        return self._chain[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]

    def add_media(self, items: Iterable[MediaItem]) -> None:
        """More media, known later. Raises ValueError when one reaches into a chunk already hashed."""
        new = check_media(items)
        hashed_tokens = self.n_chunks * self._chunk_tokens
        for item in new:
            if item.offset_tokens < hashed_tokens:
                raise ValueError(
                    f"media item {item.content_id!r} at token {item.offset_tokens} comes too late: "
                    f"{hashed_tokens} tokens are already hashed"
                )
        self._media = sorted([*self._media, *new])

    def feed(self, tokens: Sequence[int], start: int = 0) -> int:
        """Hash the full chunks that `tokens` completes; returns how many are new.

        `tokens[0]` is token number `start` of the request, so both the whole list (start 0) and a tail that
        begins at or before the first token not hashed yet will do.  Raises ValueError when tokens are
        missing in between and for a token outside 0..2**32-1; nothing changes then.
        """
        size = self._chunk_tokens
        done_chunks = len(self._chain) // KEY_BYTES
        done_tokens = done_chunks * size
        if not 0 <= start <= done_tokens:
            raise ValueError(f"start is {start}, but the next token to hash is {done_tokens}")
        new_chunks = (start + len(tokens) - done_tokens) // size
        if new_chunks <= 0:
            return 0
        extras: dict[int, bytes] | None = None
        if self._media:
            extras = {}
            for position in range(new_chunks):
                extra = media_extra(self._media, done_tokens + position * size, size)
                if extra:
                    extras[position] = extra
        previous = self._chain[-KEY_BYTES:] or self._root
        numbers = tokens if isinstance(tokens, list) else list(tokens)
        new = chain_keys(previous, numbers, size, extras, done_tokens - start)
        if not self._chain:
            self.probe = _probe(tokens[:size])
        self._chain += new
        return new_chunks

    def storage_keys(self, slices: tuple[bytes, ...]) -> bytes:
        """Storage keys of all chunks, chunk-major: chunk 0 of each slice, chunk 1 of each slice, …

        `slices` are 32-byte digests in the caller's order, at least one.
        """
        if slices != self._storage_slices:
            self._storage_slices = slices
            self._storage = b""
        derived = len(self._storage) // len(slices)
        if derived < len(self._chain):
            self._storage += storage_keys(self._chain[derived:], b"".join(slices))
        return self._storage


def _probe(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()[:PROBE_BYTES]
