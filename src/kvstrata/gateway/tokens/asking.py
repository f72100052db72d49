"""Asks an engine about token ids over the links that requests use, and puts ids into requests for it."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.gateway.engine_link import LinkBroken, Links, Unreachable, request_bytes
from kvstrata.gateway.fleet import Place
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS

MAX_ANSWER_BYTES = 32 << 20
PARAMETERS = "kv_transfer_params"

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


class _Choice(msgspec.Struct):
    """What makes a completion show its prompt."""

    echo: Any = None
    prompt_logprobs: Any = None


_IDS = msgspec.json.Decoder(_Ids | list[_Ids])
_ANSWER = msgspec.json.Decoder(_Answer)


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


def with_ids(path: str, body: bytes, ids: array[int]) -> bytes:
    """The body of a request with the ids of its prompt: of a chat beside the text, of a completion instead of it.

    Empty if the request's answer could become another one, or if it has such parameters of its own.
    """
    listed = msgspec.json.encode(ids.tolist())
    if path == COMPLETIONS:
        shows = msgspec.json.decode(body, type=_Choice)
        if shows.echo or shows.prompt_logprobs is not None:
            return b""
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode(fields | {"prompt": msgspec.Raw(listed)})
    start = body.find(b"{") + 1
    if path != CHAT or not start or PARAMETERS.encode() in body:
        return b""
    # The chat's own fields follow, at least its messages.
    head = b'%b"%b":{"prompt_token_ids":%b},' % (body[:start], PARAMETERS.encode(), listed)
    return head + body[start:]
