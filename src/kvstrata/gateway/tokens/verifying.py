"""Whether an engine makes of prompts what our own tokenizer makes of them.

Each feature of prompts (prompts.py) is tried with fixed and with drawn texts: the engine's `/tokenize` must give the
same ids for all of them.  Whether an engine hands contents to the template as text or as lists of parts shows in which
of the two passes.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from kvstrata.gateway.engine_link import Links
from kvstrata.gateway.fleet import Place
from kvstrata.gateway.tokens import prompts
from kvstrata.gateway.tokens.asking import post, tokenized
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS, FEATURES, prompt_in
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer

PATH = "/tokenize"
PARAMETERS = "kv_transfer_params"
DRAWN = 4
"""Drawn cases of each feature, beside the fixed one."""
_FIXED = "What is 12345.67 € in ¥?  \n\tdef f(x):\n        return x  # ünï 日本語 🙂‍↔️ \r\n\n end "
_CALL_ID = "abcdefghi"
"""Some templates insist on nine characters."""


class Verdict(NamedTuple):
    """What an engine and a tokenizer agree on."""

    agreed: frozenset[tuple[str, bool]]
    """Features, each with whether the template gets contents as lists of parts."""
    reasons: dict[str, str]
    """Why a feature is not used, by feature."""
    takes_ids: bool = False
    """Whether the engine takes a chat's ids from the gateway."""


class Case(NamedTuple):
    """A prompt to compare."""

    path: str
    document: dict[str, Any]


def text_in(draw: random.Random, special: str) -> str:
    """A drawn text: words, digits, blanks, characters of many scripts, and the tokenizer's own special token."""
    pieces = []
    for _ in range(draw.randrange(1, 30)):
        kind = draw.randrange(7)
        if kind == 0:
            pieces.append(draw.choice([" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000"]))
        elif kind == 1:
            pieces.append(str(draw.randrange(10 ** draw.randrange(1, 12))))
        elif kind == 2:
            pieces.append(
                "".join(chr(draw.choice([*range(0x20, 0x250), *range(0x370, 0x600)])) for _ in range(6))
            )
        elif kind == 3:
            pieces.append("".join(chr(draw.randrange(0x4E00, 0x9FA5)) for _ in range(3)))
        elif kind == 4:
            pieces.append(
                draw.choice(
                    ["🙂", "👩‍👩‍👧", "e\u0301", "ﬁ", "İ", "\u200d", "'s", "don't", "://", "<|", "|>", "</s>"]
                )
            )
        elif kind == 5:
            pieces.append(special)
        else:
            pieces.append(
                "".join(draw.choices("abcdefghijklmnopqrstuvwxyzABC_", k=draw.randrange(1, 9))) + " "
            )
    return "".join(pieces)


def cases(feature: str, draw: random.Random, special: str) -> Iterator[Case]:
    """The prompts with which a feature is tried."""
    yield _case(feature, [_FIXED] * 4, variant=0)
    for number in range(DRAWN):
        yield _case(feature, [text_in(draw, special) for _ in range(4)], variant=number)


def _case(feature: str, texts: list[str], *, variant: int) -> Case:
    if feature == prompts.COMPLETION:
        return Case(COMPLETIONS, {"prompt": texts[0]})
    user, assistant = {"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}
    messages: list[dict[str, Any]] = [user, assistant, {"role": "user", "content": texts[2]}][
        -1 if variant == 1 else 0 :
    ]
    document: dict[str, Any] = {"messages": messages}
    tool = {
        "name": "look_up",
        "description": texts[3],
        "parameters": {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}},
    }
    if feature == prompts.SYSTEM:
        messages.insert(0, {"role": "system", "content": texts[3]})
    elif feature in (prompts.TOOLS, prompts.CALLS):
        document["tools"] = [{"type": "function", "function": tool}]
    if feature == prompts.CALLS:
        function = {"name": "look_up", "arguments": msgspec.json.encode({"b": texts[3], "a": 1}).decode()}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        messages[:] = [
            user,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": _CALL_ID, "content": texts[1]},
        ]
    elif feature == prompts.PARTS:
        messages[-1]["content"] = [{"type": "text", "text": text} for text in texts[: 1 + variant]]
    elif feature == prompts.REASONING and len(messages) > 1:
        messages[1] = {**assistant, "reasoning": texts[3]}
    elif feature == prompts.OPTIONS:
        effort = ("low", "high", "none")[variant % 3]
        document["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return Case(CHAT, document)


async def verify(
    links: Links, place: Place, model: str, tokenizer: OwnTokenizer, draw: random.Random
) -> Verdict:
    """Compare a tokenizer with an engine. Raises Silent if the engine does not answer."""
    agreed: set[tuple[str, bool]] = set()
    reasons: dict[str, str] = {}
    for feature in FEATURES:
        forms = {False, True}
        for case in cases(feature, draw, tokenizer.cut):
            status, body = await post(
                links, place, PATH, msgspec.json.encode({"model": model, **case.document})
            )
            theirs = tokenized(body) if status == 200 else None
            if theirs is None:
                reasons[feature] = f"{PATH} answers {status}"
                if status in (401, 403, 404, 405):
                    return Verdict(frozenset(), dict.fromkeys(FEATURES, reasons[feature]))
                forms.clear()
                break
            wrong = {}
            for parted in forms:
                ours = await asyncio.to_thread(_ours, tokenizer, case, parted)
                if ours != theirs:
                    wrong[parted] = _difference(ours, theirs)
            forms -= wrong.keys()
            if not forms:
                reasons[feature] = next(iter(wrong.values()))
                break
        agreed |= {(feature, parted) for parted in forms}
    return Verdict(frozenset(agreed), reasons)


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


async def takes_ids(links: Links, place: Place, model: str, tokenizer: OwnTokenizer) -> bool:
    """Whether an engine takes the ids beside a chat for its prompt, by a chat of other ids. Raises Silent."""
    messages = [{"role": "user", "content": "x"}]
    longer = Case(CHAT, {"messages": [{"role": "user", "content": "What is longer than one letter?"}]})
    ids = await asyncio.to_thread(_ours, tokenizer, longer, False)
    if ids is None:
        return False
    document = {"model": model, "messages": messages, "max_tokens": 1, "stream": False}
    document[PARAMETERS] = {"prompt_token_ids": ids.tolist()}
    status, body = await post(links, place, CHAT, msgspec.json.encode(document))
    try:
        return status == 200 and msgspec.json.decode(body, type=_Answer).usage.prompt_tokens == len(ids)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def with_ids(body: bytes, ids: array[int]) -> bytes:
    """The body of a chat with its ids beside the text; empty if it has such parameters of its own."""
    start = body.find(b"{") + 1
    if not start or PARAMETERS.encode() in body:
        return b""
    # The chat's own fields follow, at least its messages.
    return b'%b"%b":{"prompt_token_ids":%b},%b' % (
        body[:start],
        PARAMETERS.encode(),
        msgspec.json.encode(ids.tolist()),
        body[start:],
    )


def _ours(tokenizer: OwnTokenizer, case: Case, parted: bool) -> array[int] | None:
    prompt = prompt_in(case.path, msgspec.json.encode(case.document))
    return tokenizer.ids_of(prompt, parted=parted) if prompt is not None else None


def _difference(ours: array[int] | None, theirs: array[int]) -> str:
    if ours is None:
        return "the template refuses it here, but not there"
    same = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return f"{len(ours)} tokens here, {len(theirs)} there, different from number {same} on"
