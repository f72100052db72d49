"""Asks an engine something over the links that requests use."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.gateway.engine_link import LinkBroken, Links, Unreachable, request_bytes
from kvstrata.gateway.fleet import Place

MAX_ANSWER_BYTES = 32 << 20

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Silent(Exception):
    """An engine cannot be reached, or breaks off."""


class _Tokenized(msgspec.Struct):
    tokens: list[TokenId]


class _Rendered(msgspec.Struct):
    token_ids: list[TokenId]
    features: Any = None
    """What stands for images and the like, which are no text."""


_RENDERED = msgspec.json.Decoder(_Rendered | list[_Rendered])
_TOKENIZED = msgspec.json.Decoder(_Tokenized)


async def post(links: Links, place: Place, path: str, body: bytes) -> tuple[int, bytes]:
    """Post JSON to an engine; its status and what it answers. Raises Silent."""
    headers = [(b"content-type", b"application/json")]
    if place.api_key:
        headers.append((b"authorization", b"Bearer " + place.api_key.encode()))
    try:
        answer = await links.send(place.address, request_bytes("POST", path, place.address, headers, body))
        try:
            await answer.head()
            return answer.status, await answer.whole(MAX_ANSWER_BYTES)
        finally:
            answer.end()
    except (Unreachable, LinkBroken) as error:
        raise Silent(str(error)) from None


def tokenized(body: bytes) -> array[int] | None:
    """The ids in an answer of /tokenize; None if there are none."""
    try:
        return array("I", _TOKENIZED.decode(body).tokens)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def rendered(body: bytes) -> array[int] | None:
    """The ids in an answer of /render for one prompt of text; None if there are none."""
    try:
        found = _RENDERED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(found, list):
        if len(found) != 1:
            return None
        [found] = found
    return array("I", found.token_ids) if not found.features else None
