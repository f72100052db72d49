"""The headers that the gateway reads and sets of requests."""

from __future__ import annotations

import secrets

RANK = b"x-data-parallel-rank"
"""Names a rank of the engine, which the client does not know; vLLM reads it."""
MAX_ID_CHARS = 128


def request_id(given: bytes) -> str:
    """The client's id of its request, or a new one if it gave none that fits into a header and a line of a log."""
    text = given.decode("latin-1")
    return (
        text
        if 0 < len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable()
        else secrets.token_hex(16)
    )
