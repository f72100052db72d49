"""HTTP/1.1's chunked coding, from the grammar of RFC 9112, 7.1, for whole messages."""

from __future__ import annotations

import re

_LINE = rb"[\t -~\x80-\xff]"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(;" + _LINE + rb"*)?\r\n")
_TRAILERS = re.compile(rb"(?:" + _LINE + rb"+\r\n)*\r\n")


def body_of(coded: bytes) -> tuple[bytes, int] | None:
    """The body at the beginning of `coded`, and where it ends; None if it has no end, or is no such coding."""
    body, at = b"", 0
    while (size := _SIZE.match(coded, at)) is not None:
        at, count = size.end(), int(size[1], 16)
        if count == 0:
            trailers = _TRAILERS.match(coded, at)
            return (body, trailers.end()) if trailers is not None else None
        body += coded[at : at + count]
        at += count
        if coded[at : at + 2] != b"\r\n":
            return None
        at += 2
    return None
