"""Asks an engine about token ids."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.gateway.engine_http import Asker, LinkBroken, Unreachable
from kvstrata.gateway.fleet import Place

MAX_ANSWER_BYTES = 32 << 20

Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Posts a body to a path of one engine: `post` with its first two arguments."""
TokenIds = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class Silent(Exception):
    """An engine cannot be reached, or breaks off."""


class _Ids(msgspec.Struct):
    """An answer of /tokenize (`tokens`), or of /render (`token_ids`) for one prompt."""

    tokens: TokenIds | None = None
    token_ids: TokenIds | None = None
    features: Any = None
    """What stands for images and the like, which are no text."""


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


_IDS = msgspec.json.Decoder(_Ids | list[_Ids])
_ANSWER = msgspec.json.Decoder(_Answer)


async def post(asker: Asker, place: Place, path: str, body: bytes) -> tuple[int, bytes]:
    """Post JSON to an engine; its status and what it answers. Raises Silent."""
    headers = {"content-type": "application/json"}
    if place.api_key:
        headers["authorization"] = f"Bearer {place.api_key}"
    try:
        return await asker.ask(place.address, "POST", path, headers, body, most_bytes=MAX_ANSWER_BYTES)
    except (Unreachable, LinkBroken) as error:
        raise Silent(str(error)) from None


def tokenized(body: bytes) -> array[int] | None:
    """The ids in an answer of /tokenize, or of /render for one prompt of text; None if there are none."""
    try:
        found = _IDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(found, list):
        if len(found) != 1:
            return None
        [found] = found
    ids = found.tokens if found.tokens is not None else found.token_ids
    return array("I", ids) if ids is not None and not found.features else None


def reported(body: bytes) -> int | None:
    """The number of a prompt's tokens that an engine's answer tells; None if it tells none."""
    try:
        return _ANSWER.decode(body).usage.prompt_tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
