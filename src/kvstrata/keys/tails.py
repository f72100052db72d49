"""Keys of tails: records of a prompt's unfinished last chunk, which end with a block of the engine.

    key = SHA-256(DOMAIN ‖ c ‖ extra ‖ tokens)

`c` is the chain key of the chunk before (the identity's root for the first chunk), `extra` the 32 bytes that media add
(zeros without media), and `tokens` are the tail's tokens, at least one and fewer than a chunk has.  DOMAIN has 32 bytes
and is no hash, while the input of a chunk's key begins with one: so no tail has the key of a chunk.  All inputs but the
tokens have fixed lengths, so tails of different tokens have different keys.  In an identity whose keys look ahead,
`tokens` and `extra` cover the first `lookahead_tokens` tokens behind the tail too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstrata.keys.multimodal import MediaItem, media_extra
from kvstrata.types import KEY_BYTES

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
