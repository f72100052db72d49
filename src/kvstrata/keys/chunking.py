"""Chain and storage keys of one growing request; every token is hashed once.

Invariants
1. `chain` holds one key for each full chunk of the tokens fed so far; keys are only appended.  Keys that look ahead
   cover the first `lookahead_tokens` tokens behind their chunk too, so these must be fed before the chunk has a key.
2. The storage keys of a tuple of slices grow with the chain; each is derived once, until other slices are asked for.

Media (images, audio, …) in a prompt all have the same placeholder tokens, so the ids of their content enter the keys.

Keys of tails: records of a prompt's unfinished last chunk, which end with a block of the engine.

    key = SHA-256(DOMAIN ‖ c ‖ extra ‖ tokens)

`c` is the chain key of the chunk before (the identity's root for the first chunk), `extra` the 32 bytes that media add
(zeros without media), and `tokens` are the tail's tokens, at least one and fewer than a chunk has.  The 32-byte DOMAIN
separates tail keys from chunk keys, whose input starts with a SHA-256 digest.  All inputs but the tokens have fixed
lengths, so tails of different tokens have different keys.  In an identity whose keys look ahead, `tokens` and `extra`
cover the first `lookahead_tokens` tokens behind the tail too.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstrata.keys import batch
from kvstrata.native.core import chain_keys, storage_keys
from kvstrata.types import KEY_BYTES, canonical_json


class MediaItem(NamedTuple):
    """One piece of media: the run of placeholder tokens that stands for it, and its content id.

    `content_id` is a hash of the content: different content must have different ids.  An empty run is ignored.
    """

    offset_tokens: int
    length_tokens: int
    content_id: str


def check_media(items: Iterable[MediaItem]) -> list[MediaItem]:
    """The items that cover at least one token, in prompt order. Raises ValueError naming an invalid item."""
    checked = []
    for item in items:
        offset, length, content_id = item
        if offset < 0 or length < 0:
            raise ValueError(
                f"media item {content_id!r:.80}: offset_tokens {offset} and length_tokens {length} must not be negative"
            )
        if not content_id:
            raise ValueError(f"media item at token {offset}: content_id is empty; give a hash of its content")
        if length:
            checked.append(MediaItem(offset, length, content_id))
    return sorted(checked)


def media_extra(items: Iterable[MediaItem], first_token: int, chunk_tokens: int) -> bytes:
    """The 32 bytes that media add to the hash of the chunk that begins at `first_token`; b"" if it has no media.

    An item that began in an earlier chunk is hashed with a negative offset, so that the second half of a picture is
    not mistaken for its first half.
    """
    end = first_token + chunk_tokens
    inside = [
        [item.offset_tokens - first_token, item.content_id]
        for item in items
        if item.offset_tokens < end and item.offset_tokens + item.length_tokens > first_token
    ]
    return hashlib.sha256(canonical_json(inside)).digest() if inside else b""


PROBE_BYTES = 8


class ChunkHasher:
    """The keys of one request. Not thread-safe; lives as long as its request.

    It keeps no tokens: `feed` reads the new tokens in the caller's list.
    """

    __slots__ = (
        "_chain",
        "_chunk_tokens",
        "_media",
        "_root",
        "_storage",
        "_storage_slices",
        "lookahead_tokens",
        "probe",
    )

    def __init__(
        self, root: bytes, chunk_tokens: int, media: Iterable[MediaItem] = (), *, lookahead_tokens: int = 0
    ) -> None:
        """`root` is the identity's root (32 bytes), and `lookahead_tokens` is the layout's.

        Raises ValueError for a root of another length, for `chunk_tokens` below 1, for `lookahead_tokens` below 0, and
        for invalid media.
        """
        if len(root) != KEY_BYTES:
            raise ValueError(f"root has {len(root)} bytes, but an identity root has {KEY_BYTES}")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}, but must be at least 1")
        if lookahead_tokens < 0:
            raise ValueError(f"lookahead_tokens is {lookahead_tokens}, but must be at least 0")
        self._root = root
        self._chunk_tokens = chunk_tokens
        self.lookahead_tokens = lookahead_tokens
        self._media = check_media(media)
        self._chain = b""
        self._storage = b""
        self._storage_slices: tuple[bytes, ...] = ()
        self.probe = b""
        """First 8 bytes of the SHA-256 of the first chunk's tokens, b"" until they are fed; depends on no identity."""

    @property
    def chain(self) -> bytes:
        """The chain keys so far, 32 bytes per full chunk."""
        return self._chain

    @property
    def n_chunks(self) -> int:
        """The number of full chunks hashed so far."""
        return batch.count(self._chain)

    def key(self, chunk: int) -> bytes:
        """The chain key of one chunk. Raises IndexError when the chunk is not hashed yet."""
        if not 0 <= chunk < self.n_chunks:
            raise IndexError(f"chunk {chunk} is not hashed; the request has {self.n_chunks} so far")
        return batch.nth(self._chain, chunk)

    def feed(self, tokens: Sequence[int], start: int = 0) -> int:
        """Hash the full chunks that `tokens` completes; returns how many are new.

        `tokens[0]` is token number `start` of the request.  The list may be the whole request (start 0) or a tail that
        begins at or before the first token not hashed yet.  Raises ValueError when the tail begins later, and for a
        token outside 0..2**32-1; nothing changes then.
        """
        size = self._chunk_tokens
        done_chunks = len(self._chain) // KEY_BYTES
        done_tokens = done_chunks * size
        if not 0 <= start <= done_tokens:
            raise ValueError(f"start is {start}, but the next token to hash is {done_tokens}")
        new_chunks = (start + len(tokens) - done_tokens - self.lookahead_tokens) // size
        if new_chunks <= 0:
            return 0
        extras = self._extras(tokens, start, new_chunks)
        previous = self._chain[-KEY_BYTES:] or self._root
        numbers = tokens if isinstance(tokens, list | array) else list(tokens)
        # Keys that look ahead may lack tokens of a last full chunk.
        new = chain_keys(previous, numbers, size, extras, done_tokens - start)[: new_chunks * KEY_BYTES]
        if not self._chain:
            self.probe = _probe(tokens[:size])
        self._chain += new
        return new_chunks

    def _extras(self, tokens: Sequence[int], start: int, new_chunks: int) -> dict[int, bytes] | None:
        """What enters the keys of the next chunks besides their tokens, by position; arguments as of `feed`."""
        size, ahead = self._chunk_tokens, self.lookahead_tokens
        if not self._media and not ahead:
            return None
        extras = {}
        for position in range(new_chunks):
            first = (self.n_chunks + position) * size
            extra = media_extra(self._media, first, size + ahead) if self._media else b""
            if ahead:
                end = first + size - start
                extra = lookahead_extra(tokens[end : end + ahead], extra)
            if extra:
                extras[position] = extra
        return extras

    def tail_keys(self, chunk: int, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
        """The keys of the tails of a chunk, of which `tokens` are the leading tokens.

        Keys that look ahead need the tokens behind a tail as well, which may lie behind the chunk.

        Raises IndexError when the chunk before is not hashed yet.
        """
        before = self.key(chunk - 1) if chunk else self._root
        return tail_keys(
            before,
            tokens,
            block_tokens,
            self._media,
            chunk * self._chunk_tokens,
            lookahead_tokens=self.lookahead_tokens,
        )

    def storage_keys(self, slices: tuple[bytes, ...]) -> bytes:
        """Storage keys of all chunks, chunk-major: chunk 0 in each slice, then chunk 1 in each slice, …

        `slices` are one or more 32-byte digests, in the caller's order.
        """
        if slices != self._storage_slices:
            self._storage_slices = slices
            self._storage = b""
        derived = len(self._storage) // len(slices)
        if derived < len(self._chain):
            self._storage += storage_keys(self._root, self._chain[derived:], b"".join(slices))
        return self._storage


def lookahead_extra(ahead: Sequence[int], media: bytes) -> bytes:
    """The 32 bytes that the tokens behind a chunk add to its hash; `media` are those that media add, b"" for none.

    Raises ValueError for a token outside 0..2**32-1.
    """
    try:
        return hashlib.sha256(struct.pack(f"<{len(ahead)}I", *ahead) + media).digest()
    except struct.error as error:
        raise ValueError(f"tokens must be numbers from 0 to 2**32 - 1: {error}") from None


def _probe(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()[:PROBE_BYTES]


DOMAIN = b"kvstrata: key of a tail, form 1\n"
NO_MEDIA = bytes(KEY_BYTES)


class Tail(NamedTuple):
    """A tail of a prompt."""

    chunk: int
    """Number of the chunk whose first tokens it has."""
    tokens: int
    key: bytes
    """Its chain key."""


def tail_keys(
    before: bytes,
    tokens: Sequence[int],
    block_tokens: int,
    media: Iterable[MediaItem] = (),
    first_token: int = 0,
    *,
    lookahead_tokens: int = 0,
) -> list[bytes]:
    """The keys of the tails of a chunk that end with each whole block of `tokens`, the shortest tail first.

    `before` is the chain key of the chunk before, or the root.  `tokens` are the leading tokens of the chunk, which
    begins at token `first_token` of the request; `media` are the request's.  With `lookahead_tokens`, a tail has a key
    only if `tokens` go on for so many tokens behind it.  Raises ValueError for a token outside
    0..2**32-1.
    """
    items = list(media)
    keys: list[bytes] = []
    running, extra_of_running = None, b""
    done = 0
    for end in range(block_tokens, len(tokens) - lookahead_tokens + 1, block_tokens):
        extra = (items and media_extra(items, first_token, end + lookahead_tokens)) or NO_MEDIA
        if running is None or extra != extra_of_running:
            running, extra_of_running, done = hashlib.sha256(DOMAIN + before + extra), extra, 0
        try:
            running.update(struct.pack(f"<{end - done}I", *tokens[done:end]))
            hashed = running.copy()
            hashed.update(struct.pack(f"<{lookahead_tokens}I", *tokens[end : end + lookahead_tokens]))
        except struct.error as error:
            raise ValueError(f"tokens must be numbers from 0 to 2**32 - 1: {error}") from None
        done = end
        keys.append(hashed.digest())
    return keys
