"""Bodies of HTTP requests, bounded so that no step of reading one holds up the event loop for long.

    parts ─▶ counted as they arrive ─▶ whole body ─▶ long lists taken out, in steps ─▶ the rest, for the JSON parser

A parser makes an object of each value and holds the interpreter until it is done: a body of 30 MB took seconds.  So:

1. A body has at most MAX_BODY_BYTES, or MAX_STRANGER_BYTES without a token; and at most MAX_CONTAINERS objects and
   lists, MAX_MEMBERS colons and MAX_QUOTES quotes, wherever they stand.
2. Of a body above SHORT_BYTES, each list above SHORT_BYTES that contains no other list is taken out: token ids
   become `array("I")`, anything in quotes a list of texts.  It is decoded in pieces of PIECE_BYTES, with a turn of the
   loop after each, and a text that names it stands in its place.
3. What then remains of the body has at most MAX_REST_BYTES.

A bracket within a text may be taken for a list's only if the text is longer than SHORT_BYTES; such a body is refused,
since no text of a call is so long.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any

import msgspec

MAX_BODY_BYTES = 32 << 20
MAX_STRANGER_BYTES = 64 << 10
SHORT_BYTES = 64 << 10
PIECE_BYTES = 64 << 10
MAX_REST_BYTES = 64 << 10
MAX_CONTAINERS = 512
"""Objects and lists: a bound of nesting too. The largest are settings of an adapter, with some dozens."""
MAX_MEMBERS = 4_096
MAX_KEYS = 65_536
"""Most texts in one list: the keys of chunks."""
MAX_TOKENS = 4_194_304
"""Most token ids in one list."""
MAX_QUOTES = 2 * (MAX_KEYS + MAX_MEMBERS)
TAKEN: ContextVar[Mapping[str, Sequence[int] | Sequence[str]]] = ContextVar("lists taken out of the body")
"""The long lists of the request under way, by the texts that stand in their places."""
LongList = Sequence[int] | Sequence[str]

_NAME = re.compile(rb'"([A-Za-z_]{1,32})"\s*:$')
_TOKENS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
_TEXTS = msgspec.json.Decoder(list[str])


class BodyRefused(Exception):
    """A body that is not parsed: the HTTP status, what to change, and the field, if one is known to be wrong."""

    def __init__(self, status: int, message: str, field: str = "body") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field


class Arriving:
    """A body that arrives in parts. `limit`: its most bytes, and `without` what the sender lacks for more."""

    def __init__(self, limit: int, without: str = "") -> None:
        self._limit = limit
        self._without = without
        self.length = self._containers = self._ends = self._members = self._quotes = 0
        self._refused: BodyRefused | None = None
        self._body = bytearray()

    def expect(self, length: int) -> None:
        """Raises BodyRefused for a body of this length."""
        if length > self._limit:
            raise BodyRefused(413, f"body: more than {self._limit} bytes{self._without}; send less")

    def add(self, part: bytes) -> None:
        """Take in one part. Raises BodyRefused if the body is too long; other bounds show at its end.

        A client that still sends when it is answered would find its connection reset instead of the answer.
        """
        self.length += len(part)
        self.expect(self.length)
        if self._refused is not None:
            return
        self._containers += part.count(b"{") + part.count(b"[")
        self._ends += part.count(b"]")
        self._members += part.count(b":")
        self._quotes += part.count(b'"')
        for found, limit, what in (
            (self._containers, MAX_CONTAINERS, "objects and lists"),
            (self._ends, MAX_CONTAINERS, "ends of lists"),
            (self._members, MAX_MEMBERS, "colons"),
            (self._quotes, MAX_QUOTES, "quotes"),
        ):
            if found > limit:
                message = f"body: more than {limit} {what}, and no call needs that; send less"
                self._refused = BodyRefused(413, message)
                self._body.clear()
                return
        self._body += part

    def whole(self) -> bytearray:
        """The whole body. Raises BodyRefused if it exceeds a bound."""
        if self._refused is not None:
            raise self._refused
        return self._body


async def shorten(body: bytearray) -> tuple[bytes, dict[str, LongList]]:
    """The rest of a body, and the lists taken out, by the text in its place; the loop has turns meanwhile.

    Raises BodyRefused for a long list that holds neither only token ids nor only texts, and for a long rest.
    """
    if len(body) <= SHORT_BYTES:
        return bytes(body), {}
    parts: list[bytes] = []
    taken: dict[str, LongList] = {}
    done = after = 0
    while (close := body.find(b"]", after)) >= 0:
        start = body.rfind(b"[", after, close) + 1
        if start and close - start > SHORT_BYTES:
            before = bytes(body[max(0, start - 81) : start - 1]).rstrip()
            if before[-1:] not in b":,[":
                raise BodyRefused(400, f"body: not JSON: a list begins at byte {start - 1}, behind no colon")
            name = _NAME.search(before)
            items = await _decoded(body, start, close, name[1].decode() if name else "body")
            mark = f"<long list {len(taken)} of {len(items)} items>"
            taken[mark] = items
            parts += [bytes(body[done : start - 1]), b'"', mark.encode(), b'"']
            done = close + 1
        after = close + 1
    if sum(map(len, parts)) + len(body) - done > MAX_REST_BYTES:
        message = f"body: more than {MAX_REST_BYTES} bytes beside its lists of tokens or keys; send less"
        raise BodyRefused(413, message)
    return b"".join([*parts, body[done:]]), taken


async def _decoded(body: bytearray, start: int, end: int, field: str) -> LongList:
    """The items of the list between its brackets. Raises BodyRefused."""
    items: array[int] | list[str]
    texts = body.find(b'"', start, min(end, start + PIECE_BYTES)) >= 0
    items, decoder = ([], _TEXTS) if texts else (array("I"), _TOKENS)
    while start < end:
        stop = end if end - start <= PIECE_BYTES else body.rfind(b",", start, start + PIECE_BYTES)
        if stop < 0:
            raise BodyRefused(400, f"{field}.{len(items)}: an item of more than {PIECE_BYTES} bytes", field)
        try:
            piece: Any = decoder.decode(b"[%b]" % bytes(body[start:stop]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            says, _, where = str(error).partition(" - at `$[")
            number = len(items) + (int(where.partition("]")[0]) if where else 0)
            kind = "texts" if texts else "token ids from 0 to 2^32-1"
            message = f"{field}.{number}: {says}; a list of more than {SHORT_BYTES} bytes holds only {kind}"
            raise BodyRefused(400, message, field) from None
        if not piece:
            raise BodyRefused(400, f"{field}.{len(items)}: an item is missing", field)
        items.extend(piece)
        if len(items) > MAX_TOKENS:
            raise BodyRefused(413, f"{field}: more than {MAX_TOKENS} items; send fewer", field)
        start = stop + 1
        await asyncio.sleep(0)
    return items
