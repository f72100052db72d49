"""Renders the end of a conversation alone, where that is known to give the text that the whole gives.

A template gets all messages and may look at each of them, so a conversation's next turn may change the text of the
turns before: Qwen3's drops the reasoning of earlier answers once a further question comes.  Still, most text of a long
conversation stays.  A *tail* from message k on is what the template makes of a short stand-in for the messages before
it, followed by the messages from k on; it begins with the tokenizer's cut (cuts.py).  Three *rules* say for which k

    text of a longer conversation = its text before the tail from k, as an earlier turn had it + its own tail from k

    any      k is the last message of a user or of the assistant
    query    k is the last message of a user
    same     k is as in `any`, and no user's message has come since

A rule is used only for templates and features for which it was *proved*: by drawn conversations that are rendered both
ways once an engine was compared.  Their contents have each word that the template itself mentions; a conversation
with a word that breaks a rule (`risky`) is rendered whole.  That an earlier turn's text ends with the tail from k is
checked each time.  Templates that show the time have no rules.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvstrata.gateway.tokens.prompts import (
    CALLS,
    CHAT,
    OPTIONS,
    PARTS,
    PLAIN,
    REASONING,
    SYSTEM,
    TOOLS,
    Chat,
    prompt_in,
)
from kvstrata.gateway.tokens.template import ChatTemplate, NotRendered

ANY, QUERY, SAME = "any", "query", "same"
RULES = (ANY, QUERY, SAME)
CASES = 16
"""Drawn conversations for each feature."""
WORD_CASES = 24
"""Drawn conversations for each word of the template."""
ENOUGH = 6
"""Comparisons without which nothing is proved."""
_LEAST = dict.fromkeys(RULES, frozenset((PLAIN, SYSTEM))) | {SAME: frozenset((PLAIN, SYSTEM, CALLS))}
"""Features without which a rule is of no use: without calls of tools, no turn lacks a user's message."""
_EXTRA = (TOOLS, CALLS, PARTS, REASONING, OPTIONS)
_MARK = secrets.token_hex(16)
"""Ends the stand-in; no request has it."""

Proved = Mapping[tuple[str, bool], frozenset[str]]
"""Features of conversations, by rule and by whether contents are lists of parts."""


class Start(NamedTuple):
    """Where a tail may begin."""

    rule: str
    at: int
    """The message's number."""


def starts(roles: list[str]) -> list[Start]:
    """Where tails may begin, by rule."""
    if "system" in roles[1:]:  # which an engine or a template may move
        return []
    spoken = next((at for at in range(len(roles) - 1, 0, -1) if roles[at] in ("user", "assistant")), 0)
    asked = next((at for at in range(len(roles) - 1, 0, -1) if roles[at] == "user"), 0)
    found = (Start(ANY, spoken), Start(QUERY, asked), Start(SAME, spoken))
    return [one for one in found if one.at]


def goes_on(rule: str, roles: list[str]) -> bool:
    """Whether a rule holds for a conversation with messages of these roles, the tail's first and those after it."""
    return "system" not in roles and (rule != SAME or "user" not in roles[1:])


class Tails:
    """The tails of one template's conversations. Threads may use it at once."""

    def __init__(self, template: ChatTemplate, cut: str) -> None:
        self._template = template
        self._cut = cut
        self.proved: Proved = {}
        """The features for which rules hold; whoever finds a tail wrong empties it."""
        self.risky: dict[bool, frozenset[str]] = {}
        """Words without which they hold, by whether contents are lists of parts."""
        self.tried = not cut or template.timed
        """Whether nothing is left to prove, or somebody proves it."""

    def of(self, chat: Chat, *, system: bool, parted: bool) -> str | None:
        """The text of a chat, which has the messages of the tail only; None: there is no tail.

        `system`: whether the conversation begins with a system prompt.
        """
        stand_in: list[dict[str, Any]] = [{"role": "system", "content": "x"}] if system else []
        if chat.messages[0]["role"] == "user":
            stand_in += [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        else:
            stand_in.append({"role": "user", "content": _MARK})
        try:
            text = self._template.render(chat._replace(messages=stand_in + chat.messages), parted=parted)
        except NotRendered:
            return None
        marked = text.rfind(_MARK)
        begin = text.find(self._cut, marked) if marked >= 0 else -1
        return text[begin:] if begin >= 0 else None

    def is_safe(self, chat: Chat, *, parted: bool) -> bool:
        """Whether these messages have no risky word."""
        risky = self.risky.get(parted, frozenset())
        return not risky or not any(word in text for text in _texts(chat.messages) for word in risky)

    # -- proving -----------------------------------------------------------------------------------------------

    def prove(self, draw: random.Random) -> None:
        """Find the rules that hold. It takes a second or more of CPU time."""
        if not self._cut or self._template.timed:
            return
        proved: dict[tuple[str, bool], frozenset[str]] = {}
        for parted in (False, True):
            if not self._renders(parted):
                continue
            risky: set[str] = set()
            for rule in RULES:
                least = _LEAST[rule]
                best = proved.get((ANY, parted), frozenset())
                if best.issuperset(_EXTRA) or not self._holds(rule, parted, draw, least):
                    continue
                sure = least | {one for one in _EXTRA if self._holds(rule, parted, draw, least | {one})}
                sure = sure if self._holds(rule, parted, draw, sure) else least
                proved[rule, parted] = sure
                risky |= {
                    word
                    for word in self._template.words
                    if word and not self._holds(rule, parted, draw, sure, word, WORD_CASES)
                }
            self.risky[parted] = frozenset(risky)
            most = proved.get((ANY, parted), frozenset())
            others = [features for (_, form), features in proved.items() if form is parted]
            if most and any(not features <= most for features in others):
                del proved[ANY, parted]  # a conversation may come to have what another rule allows
        self.proved = proved

    def _renders(self, parted: bool) -> bool:
        """Whether the template takes contents in this form."""
        hello = Chat([{"role": "user", "content": "x"}], None, True, {}, frozenset())
        try:
            return "x" in self._template.render(hello, parted=parted)
        except NotRendered:
            return False

    def _holds(
        self,
        rule: str,
        parted: bool,
        draw: random.Random,
        features: frozenset[str],
        word: str = "w",
        cases: int = CASES,
    ) -> bool:
        """Whether a rule holds for all drawn conversations with these features and a word, and for enough of them."""
        compared = refused = 0
        for _ in range(cases):
            for shorter, longer in _growing(features, word, self._cut, draw):
                try:
                    same = self._is_same(rule, parted, shorter, longer)
                except NotRendered:
                    refused += 1
                    if refused >= ENOUGH > compared:
                        return False
                    continue
                if same is False:
                    return False
                compared += same is not None
        return compared >= ENOUGH

    def _is_same(self, rule: str, parted: bool, shorter: Chat, longer: Chat) -> bool | None:
        """Whether a rule gives the text of the longer one; None: it does not apply. Raises NotRendered."""
        roles = [one["role"] for one in longer.messages]
        at = next((one.at for one in starts(roles[: len(shorter.messages)]) if one.rule == rule), 0)
        if not at or not goes_on(rule, roles[at:]):
            return None
        before, whole = (self._template.render(one, parted=parted) for one in (shorter, longer))
        system = roles[0] == "system"
        old, new = (
            self.of(one._replace(messages=one.messages[at:]), system=system, parted=parted)
            for one in (shorter, longer)
        )
        if old is None or new is None or not before.endswith(old):
            return None
        return before[: len(before) - len(old)] + new == whole


def _texts(value: Any) -> Iterator[str]:
    """All texts in messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _growing(
    features: frozenset[str], word: str, cut: str, draw: random.Random
) -> Iterator[tuple[Chat, Chat]]:
    """A drawn conversation as it was and as it is some messages later, at all turns."""
    document: dict[str, Any] = {}
    if TOOLS in features or (CALLS in features and draw.random() < 0.5):
        document["tools"] = [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
        ]
    if OPTIONS in features and draw.random() < 0.7:
        thinks = draw.random() < 0.5
        document["chat_template_kwargs"] = {"enable_thinking": thinks, "reasoning_effort": "low"}
    messages = list(_messages(features, word, cut, draw))
    turns = [at + 1 for at, one in enumerate(messages) if one["role"] in ("user", "tool")]
    chats = []
    for turn in turns:
        chat = prompt_in(CHAT, msgspec.json.encode({**document, "messages": messages[:turn]}))
        assert isinstance(chat, Chat)
        chats.append(chat)
    for number, longer in enumerate(chats[1:], 1):
        yield chats[draw.randrange(max(0, number - 3), number)], longer


def _messages(features: frozenset[str], word: str, cut: str, draw: random.Random) -> Iterator[dict[str, Any]]:
    def text() -> str:
        pieces = ["x", " y\n", "\n\n z", "12", cut, *[word] * 5]
        return "".join(draw.choices(pieces, k=draw.randrange(1, 4)))

    def content() -> Any:
        if PARTS in features and draw.random() < 0.5:
            return [{"type": "text", "text": text()} for _ in range(draw.randrange(1, 3))]
        return text()

    if draw.random() < 0.6:
        yield {"role": "system", "content": content()}
    for number in range(draw.randrange(2, 6)):
        yield {"role": "user", "content": content()}
        for _ in range(draw.randrange(0, 3) if CALLS in features else 0):
            ids = [f"abcdefgh{one}" for one in range(draw.randrange(1, 3))]
            calls = [
                {"id": one, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                for one in ids
            ]
            yield _thinking(
                {"role": "assistant", "content": draw.choice([None, text()]), "tool_calls": calls},
                features,
                draw,
                text(),
            )
            for one in ids:
                yield {"role": "tool", "tool_call_id": one, "content": content()}
        if number or draw.random() < 0.9:
            yield _thinking({"role": "assistant", "content": content()}, features, draw, text())


def _thinking(
    message: dict[str, Any], features: frozenset[str], draw: random.Random, text: str
) -> dict[str, Any]:
    if REASONING in features and draw.random() < 0.6:
        return {**message, "reasoning": text}
    return message
