"""Media (images, audio, …) in a prompt: all have the same placeholder tokens, so their content ids enter the keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from kvstrata.types import canonical_json


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
