"""Whether an engine makes of prompts what our own tokenizer makes of them.

Each feature of prompts (prompts.py) is tried with fixed and with drawn texts: the engine's `/tokenize` must give the
same ids for all of them.  `/v1/messages` and `/v1/responses` have no such path: what their `/render` says is compared
if the engine may be asked, else the number of tokens that the engine counts.  Whether an engine hands contents to the
template as text or as lists of parts shows in which of the two passes.
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
from kvstrata.gateway.tokens.apis import MESSAGES, RESPONSES
from kvstrata.gateway.tokens.asking import post, rendered, tokenized
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS, FEATURES, prompt_in
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer

PATH = "/tokenize"
PARAMETERS = "kv_transfer_params"
DRAWN = 4
"""Drawn cases of each feature, beside the fixed one."""
COMPUTED_CHARACTERS = 40
"""Of each of the texts, where an engine may have to compute them."""
_FIXED = "What is 12345.67 € in ¥?  \n\tdef f(x):\n        return x  # ünï 日本語 🙂‍↔️ \r\n\n end "
_CALL_ID = "abcdefghi"
"""Some templates insist on nine characters."""


class Verdict(NamedTuple):
    """What an engine and a tokenizer agree on."""

    agreed: frozenset[tuple[str, bool]]
    """Features, each with whether the template gets contents as lists of parts."""
    reasons: dict[str, str]
    """Why a feature is not used, by feature."""
    takes_ids: frozenset[str] = frozenset()
    """The paths on which the engine takes a prompt's ids from the gateway."""


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
    if feature == prompts.AS_RESPONSES:
        # An engine that cannot only render them computes them, and what is shorter than a chunk no server stores.
        texts = [text[:COMPUTED_CHARACTERS] for text in texts]
        said: list[tuple[str, Any]] = [("user", texts[0]), ("assistant", texts[1]), ("user", texts[2])]
        items = [{"role": role, "content": text} for role, text in said]
        if variant == 1:
            items[2]["content"] = [{"type": "input_text", "text": texts[2]}]
        return Case(RESPONSES, {"input": texts[0] if variant == 2 else items})
    if feature == prompts.AS_MESSAGES:
        blocks = [{"type": "text", "text": text} for text in texts[: 1 + (variant == 1)]]
        answer = {"role": "assistant", "content": texts[1]}
        return Case(
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": blocks},
                    answer,
                    {"role": "user", "content": texts[2]},
                ]
            },
        )
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


class _Counted(msgspec.Struct):
    input_tokens: int


class _Answered(msgspec.Struct):
    usage: _Counted


_counted = msgspec.json.Decoder(_Counted).decode
_answered = msgspec.json.Decoder(_Answered).decode


class Verifier:
    """Compares a tokenizer with an engine. All methods raise Silent if the engine does not answer."""

    def __init__(
        self, links: Links, place: Place, model: str, tokenizer: OwnTokenizer | None, *, renders: bool
    ) -> None:
        """`renders`: whether the engine may be asked by `/render`."""
        self._links = links
        self._place = place
        self._model = model
        self._tokenizer = tokenizer
        self._renders = renders

    async def verify(self, draw: random.Random) -> Verdict:
        """What the engine agrees on with the tokenizer."""
        agreed: set[tuple[str, bool]] = set()
        reasons: dict[str, str] = {}
        if self._tokenizer is None:
            return Verdict(frozenset(), reasons)
        for feature in FEATURES:
            forms = {False, True}
            for case in cases(feature, draw, self._tokenizer.cut):
                status, theirs = await self._theirs(case)
                if theirs is None:
                    reasons[feature] = (
                        f"{case.path} answers {status}" if status != 200 else "an unknown answer"
                    )
                    if status in (401, 403, 404, 405) and case.path in (CHAT, COMPLETIONS):
                        return Verdict(frozenset(), dict.fromkeys(FEATURES, f"{PATH} answers {status}"))
                    forms.clear()
                    break
                wrong = {}
                for parted in forms:
                    ours = await asyncio.to_thread(_ours, self._tokenizer, case, parted)
                    if (differs := _difference(ours, theirs)) is not None:
                        wrong[parted] = differs
                forms -= wrong.keys()
                if not forms:
                    reasons[feature] = next(iter(wrong.values()))
                    break
            agreed |= {(feature, parted) for parted in forms}
        return Verdict(frozenset(agreed), reasons)

    async def _theirs(self, case: Case) -> tuple[int, array[int] | int | None]:
        """An engine's status, and what it makes of a prompt: its ids, or only their number; None: it does not tell."""
        document = {"model": self._model, **case.document}
        if case.path in (CHAT, COMPLETIONS):
            status, body = await self._post(PATH, document)
            return status, tokenized(body) if status == 200 else None
        if case.path == MESSAGES:
            document["max_tokens"] = 1
        else:
            document |= {"max_output_tokens": 1, "store": False, "stream": False}
        if self._renders:
            status, body = await self._post(f"{case.path}/render", document)
            if status == 200:
                return status, rendered(body)
        if case.path == MESSAGES:
            del document["max_tokens"]
        status, body = await self._post(
            f"{MESSAGES}/count_tokens" if case.path == MESSAGES else RESPONSES, document
        )
        try:
            if status == 200:
                counted = _counted(body) if case.path == MESSAGES else _answered(body).usage
                return status, counted.input_tokens
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        return status, None

    async def taken(self) -> frozenset[str]:
        """The paths on which the engine takes ids beside or instead of a prompt's text, by asking with other ids."""
        longer = Case(CHAT, {"messages": [{"role": "user", "content": "What is longer than one letter?"}]})
        ids = await asyncio.to_thread(_ours, self._tokenizer, longer, False) if self._tokenizer else None
        if ids is None and self._renders:
            status, body = await self._post(f"{CHAT}/render", {"model": self._model, **longer.document})
            ids = rendered(body) if status == 200 else None
        if not ids:
            return frozenset()
        asked: dict[str, dict[str, Any]] = {
            CHAT: {"messages": [{"role": "user", "content": "x"}]},
            COMPLETIONS: {"prompt": "x"},
        }
        taken = set()
        for path, short in asked.items():
            plain = {"model": self._model, **short, "max_tokens": 1, "stream": False}
            body = with_ids(path, msgspec.json.encode(plain), ids)
            status, answer = await post(self._links, self._place, path, body)
            try:
                if status == 200 and msgspec.json.decode(answer, type=_Answer).usage.prompt_tokens == len(
                    ids
                ):
                    taken.add(path)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return frozenset(taken)

    async def _post(self, path: str, document: dict[str, Any]) -> tuple[int, bytes]:
        return await post(self._links, self._place, path, msgspec.json.encode(document))


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


class _Choice(msgspec.Struct):
    """What makes a completion show its prompt."""

    echo: Any = None
    prompt_logprobs: Any = None


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


def _ours(tokenizer: OwnTokenizer, case: Case, parted: bool) -> array[int] | None:
    prompt = prompt_in(case.path, msgspec.json.encode(case.document))
    return tokenizer.ids_of(prompt, parted=parted) if prompt is not None else None


def _difference(ours: array[int] | None, theirs: array[int] | int) -> str | None:
    """What is different; None: nothing."""
    if ours is None:
        return "the template refuses it here, but not there"
    if isinstance(theirs, int):
        return None if len(ours) == theirs else f"{len(ours)} tokens here, {theirs} there"
    if ours == theirs:
        return None
    same = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return f"{len(ours)} tokens here, {len(theirs)} there, different from number {same} on"
