"""Which headers pass through the gateway.

A connection's own headers (RFC 9110, 7.6.1) end at the gateway, and so do those that `Connection` names.  The engine
gets the client's remaining headers, without the key that was meant for the gateway.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

Raw = Collection[tuple[bytes, bytes]]
"""Names are in lower case."""

HOP = frozenset(
    (
        *(
            b"connection",
            b"keep-alive",
            b"proxy-connection",
            b"te",
            b"trailer",
            b"transfer-encoding",
            b"upgrade",
        ),
        *(b"proxy-authenticate", b"proxy-authorization", b"http2-settings"),
    )
)
RANK = b"x-data-parallel-rank"
"""Names a rank of the engine, which the client does not know; vLLM reads it."""
_NOT_UP = HOP | {b"host", b"content-length", b"expect", b"x-request-id", RANK}
_KEYS = frozenset((b"authorization", b"x-api-key"))
_NOT_DOWN = HOP | {b"date", b"server", b"x-request-id", b"set-cookie"}
MAX_ID_CHARS = 128


def request_id(given: bytes) -> str:
    """The client's id of its request, or a new one if it gave none that fits into a header and a line of a log."""
    text = given.decode("latin-1")
    return (
        text
        if 0 < len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable()
        else secrets.token_hex(16)
    )


def to_engine(
    raw: Raw, word: str, api_key: str, *, drop_keys: bool, rank: int | None = None
) -> list[tuple[bytes, bytes]]:
    """The headers for an engine. `word`: id of the request. `api_key`: the engine's own; empty: it has none.

    `rank`: the data-parallel rank of the engine that must answer; None: it has one, or chooses by itself.
    """
    dropped = _named(raw)
    if drop_keys or api_key:
        dropped |= _KEYS
    found = [one for one in raw if one[0] not in _NOT_UP and one[0] not in dropped]
    found.append((b"x-request-id", word.encode()))
    if rank is not None:
        found.append((RANK, str(rank).encode()))
    if api_key:
        found.append((b"authorization", b"Bearer " + api_key.encode()))
    return found


def to_client(raw: Raw, word: str) -> list[tuple[bytes, bytes]]:
    """The headers of an answer for the client."""
    dropped = _named(raw)
    found = [one for one in raw if one[0] not in _NOT_DOWN and one[0] not in dropped]
    found.append((b"x-request-id", word.encode()))
    return found


def _named(raw: Raw) -> set[bytes]:
    """The headers that `Connection` says belong to the connection."""
    return {
        word.strip().lower() for name, value in raw if name == b"connection" for word in value.split(b",")
    } - {b"content-type", b"content-length", b"authorization", b""}
