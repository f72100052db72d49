"""Queries engines about token ids: the ids of a prompt, whether they equal the gateway's own, and whether the engine
accepts ids from the gateway.

Each feature of prompts (prompts.py) is tried with several texts in each position: the engine's `/tokenize` must give
the same ids as the gateway's tokenizer for all of them.  An engine passes contents to the template as text or as lists
of parts; the form that gives equal ids is the engine's.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.gateway.engine_http import HttpClient, LinkBroken, Unreachable
from kvstrata.gateway.fleet import Place
from kvstrata.gateway.tokens import prompts
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS, FEATURES, prompt_in
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer

PATH = "/tokenize"
MAX_ANSWER_BYTES = 32 << 20
REFUSED = frozenset((401, 403, 404, 405, 501))
"""Statuses by which an engine shows that it does not serve a path at all."""
_TEXTS = (
    "What is 12345.67 € in ¥?  \n\tdef f(x):\n        return x  # ünï 日本語 🙂‍↔️ \r\n\n end ",
    "👩‍👩‍👧e\u0301ﬁİ\u200d's don't  9 :// 1234567890 \u00a0\u3000<||></s> \n \n\t x",
    "".join(map(chr, (*range(0x20, 0x250, 3), *range(0x370, 0x600, 5), *range(0x4E00, 0x9FA5, 700)))),
)
"""Texts with blanks, digits, code, and characters of many scripts."""
_CALL_ID = "abcdefghi"
"""Id of a tool call; some templates require nine characters."""

Agreed = frozenset[tuple[str, bool]]
"""Features on which an engine and a tokenizer agree, each with whether the template gets contents as lists of parts."""


Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Posts a body to a path of one engine, and returns the status and body of the response."""


class NoResponse(Exception):
    """The engine cannot be reached, or its response is incomplete."""


TokenIds = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class _Ids(msgspec.Struct):
    """A response of /tokenize (`tokens`), or of /render (`token_ids`), for one prompt."""

    tokens: TokenIds | None = None
    token_ids: TokenIds | None = None
    features: Any = None
    """Placeholders of images and other parts that are not text."""


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


_IDS = msgspec.json.Decoder(_Ids | list[_Ids])
_ANSWER = msgspec.json.Decoder(_Answer)


def asks(asker: HttpClient, place: Place) -> Ask:
    """The `Ask` for one engine, which raises NoResponse."""
    headers = {"content-type": "application/json"}
    if place.api_key:
        headers["authorization"] = f"Bearer {place.api_key}"

    async def ask(path: str, body: bytes) -> tuple[int, bytes]:
        try:
            return await asker.ask(place.address, "POST", path, headers, body, most_bytes=MAX_ANSWER_BYTES)
        except (Unreachable, LinkBroken) as error:
            raise NoResponse(str(error)) from None

    return ask


def tokenized(body: bytes) -> array[int] | None:
    """The ids in a response of /tokenize, or of /render for one text prompt; None if the response has no such ids."""
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
    """The prompt's number of tokens in the `usage` of an answer; None if the answer has none."""
    try:
        return _ANSWER.decode(body).usage.prompt_tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Verdict(NamedTuple):
    """The result of a comparison."""

    agreed: Agreed
    reasons: dict[str, str]
    """By feature that is not used: the reason."""
    takes_ids: bool = False
    """Whether the engine accepts the ids of chats from the gateway."""


def cases(feature: str, special: str) -> Iterator[dict[str, Any]]:
    """The request bodies with which a feature is tried. `special`: a special token of the tokenizer."""
    texts = [*_TEXTS, f"x{special} y{special}{special}\n"]
    for number in range(len(texts)):
        yield _case(feature, texts[number:] + texts[:number], variant=number)


def _case(feature: str, texts: list[str], *, variant: int) -> dict[str, Any]:
    if feature == prompts.COMPLETION:
        return {"prompt": texts[0]}
    first: dict[str, Any] = {"role": "user", "content": texts[0]}
    answer: dict[str, Any] = {"role": "assistant", "content": texts[1]}
    last: dict[str, Any] = {"role": "user", "content": texts[2]}
    messages = [last] if variant == 1 else [first, answer, last]
    body: dict[str, Any] = {"messages": messages}
    if feature in (prompts.TOOLS, prompts.CALLS):
        parameters = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
        tool = {"name": "look_up", "description": texts[3], "parameters": parameters}
        body["tools"] = [{"type": "function", "function": tool}]
    if feature == prompts.SYSTEM:
        messages.insert(0, {"role": "system", "content": texts[3]})
    elif feature == prompts.CALLS:
        function = {"name": "look_up", "arguments": msgspec.json.encode({"b": texts[3], "a": 1}).decode()}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        asks = {"role": "assistant", "content": None, "tool_calls": [call]}
        body["messages"] = [first, asks, {"role": "tool", "tool_call_id": _CALL_ID, "content": texts[1]}]
    elif feature == prompts.PARTS:
        last["content"] = [{"type": "text", "text": text} for text in texts[: 1 + variant]]
    elif feature == prompts.REASONING:
        answer["reasoning"] = texts[3]
    elif feature == prompts.OPTIONS:
        effort = ("low", "high", "none")[variant % 3]
        body["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return body


async def verify(ask: Ask, model: str, tokenizer: OwnTokenizer) -> Verdict:
    """Compare an engine with a model's tokenizer, feature by feature. Raises NoResponse."""
    agreed: set[tuple[str, bool]] = set()
    reasons: dict[str, str] = {}
    for feature in FEATURES:
        forms = {False, True}
        for case in cases(feature, tokenizer.cut):
            status, answer = await ask(PATH, msgspec.json.encode({"model": model, **case}))
            theirs = tokenized(answer) if status == 200 else None
            if theirs is None:
                why = f"{PATH} answers {status}" if status != 200 else f"{PATH}: invalid response"
                if status in REFUSED:
                    return Verdict(frozenset(), dict.fromkeys(FEATURES, why))
                reasons[feature] = why
                forms.clear()
                break
            for parted in sorted(forms):
                ours = await asyncio.to_thread(_ours, tokenizer, case, parted)
                if ours != theirs:
                    forms.remove(parted)
                    reasons[feature] = f"{len(ours or [])} tokens here, {len(theirs)} at the engine"
            if not forms:
                break
        if forms:
            agreed |= {(feature, parted) for parted in forms}
            reasons.pop(feature, None)
    return Verdict(frozenset(agreed), reasons)


async def taken(ask: Ask, model: str, tokenizer: OwnTokenizer | None, *, renders: bool) -> bool:
    """Whether an engine accepts ids in place of a chat's text. Raises NoResponse.

    It gets a short text with a longer one's ids, and must report their number. `renders`: /render may give the ids.
    """
    longer = {"model": model, "messages": [{"role": "user", "content": "What is longer than one letter?"}]}
    ids = await asyncio.to_thread(_ours, tokenizer, longer, False) if tokenizer is not None else None
    if ids is None and renders:
        status, answer = await ask(f"{CHAT}/render", msgspec.json.encode(longer))
        ids = tokenized(answer) if status == 200 else None
    if not ids:
        return False
    short = [{"role": "user", "content": "x"}]
    params = {"prompt_token_ids": ids.tolist()}
    body = {"kv_transfer_params": params, "model": model, "messages": short, "max_tokens": 1, "stream": False}
    status, answer = await ask(CHAT, msgspec.json.encode(body))
    return status == 200 and reported(answer) == len(ids)


def _ours(tokenizer: OwnTokenizer, case: dict[str, Any], parted: bool) -> array[int] | None:
    prompt = prompt_in(COMPLETIONS if "prompt" in case else CHAT, msgspec.json.encode(case))
    return tokenizer.ids_of(prompt, parted=parted) if prompt is not None else None
