"""The token ids of conversations, whose earlier turns are remembered.

    a stem is remembered ─▶ its parts' ids, and those of the tail after it   (only new text is decoded and rendered)
    else                 ─▶ the whole text's, part by part, as far as remembered

Both remember the stems that the next turn may begin with.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvstrata.gateway.tokens.cuts import parts_of
from kvstrata.gateway.tokens.memory import Memory, Stem
from kvstrata.gateway.tokens.prompts import Chat, Conversation
from kvstrata.gateway.tokens.tails import ANY, Tails, goes_on, starts
from kvstrata.gateway.tokens.template import NotRendered
from kvstrata.gateway.tokens.tokenizer import MAX_TEXT_CHARS, OwnTokenizer, joined

Agreed = frozenset[tuple[str, bool]]
"""What engines agree on with a tokenizer: features, each with whether contents are lists of parts."""


class Found(NamedTuple):
    """A conversation's ids."""

    ids: array[int] | None
    stem_chars: int = 0
    """Characters before the tail, which were not rendered; 0: the whole was."""
    agreed: bool = True
    """False: engines do not agree on the features."""


class _Text(NamedTuple):
    """What was rendered of a conversation."""

    chat: Chat
    """With the messages from `first` on."""
    first: int
    text: str
    parts: tuple[bytes, ...]
    """Keys of the text's parts."""
    stem: Stem
    """What is before it; empty: nothing."""


def ids_of(
    tokenizer: OwnTokenizer,
    agreed: Agreed,
    conversation: Conversation,
    memory: Memory,
    tenant: str,
    *,
    by_tail: bool = True,
) -> Found:
    """The ids of a conversation in the form that engines agree on. `by_tail` may be False: always by the whole text."""
    tails = tokenizer.tails if by_tail else None
    context = conversation.context if tails is not None and tails.proved else None
    if tails is None or context is None:
        return _Asked(tokenizer, agreed, conversation, memory, tenant, {}).whole()
    keys = memory.stem_keys(tokenizer.context_of(tenant) + context, conversation.messages)
    asked = _Asked(tokenizer, agreed, conversation, memory, tenant, keys)
    for parted in sorted({parted for _, parted in tails.proved}):
        found = asked.from_stem(tails, parted)
        if found is not None:
            return found
    return asked.whole()


class _Asked(NamedTuple):
    """A conversation whose ids are asked for."""

    tokenizer: OwnTokenizer
    agreed: Agreed
    conversation: Conversation
    memory: Memory
    tenant: str
    keys: dict[int, bytes]
    """Of its stems, by the number of their messages, the longest first."""

    def from_stem(self, tails: Tails, parted: bool) -> Found | None:
        """The ids of a stem and its tail; None: none is remembered that this conversation may begin with."""
        for first, key in self.keys.items():
            stem = self.memory.stem(_form(key, parted))
            if stem is None:
                continue
            chat = self.conversation.since(first)
            if chat is None:
                return None
            features = stem.features | chat.features
            if not all((feature, parted) in self.agreed for feature in features):
                return None
            proved = tails.proved.get((stem.rule, parted), frozenset())
            if not features <= proved or not goes_on(stem.rule, [one["role"] for one in chat.messages]):
                continue
            if not tails.is_safe(chat, parted=parted):
                return None
            before = [ids for ids in self.memory.find(stem.parts) if ids is not None]
            text = (
                tails.of(chat, system=stem.system, parted=parted) if len(before) == len(stem.parts) else None
            )
            if text is None or stem.chars + len(text) > MAX_TEXT_CHARS:
                return None
            parts = parts_of(text, self.tokenizer.cut)[1:]  # it begins with the cut
            keys, ids = self.tokenizer.remembered(parts, self.memory, self.tenant)
            chat = chat._replace(features=features)
            self._remember(tails, _Text(chat, first, text, tuple(keys), stem), parted)
            return Found(joined([*before, *ids]), stem.chars)
        return None

    def whole(self) -> Found:
        """The ids of the whole text."""
        chat, template, tails = self.conversation.since(0), self.tokenizer.template, self.tokenizer.tails
        if chat is None or template is None or tails is None:
            return Found(None)
        for parted in (False, True):
            if not all((feature, parted) in self.agreed for feature in chat.features):
                continue
            try:
                text = template.render(chat, parted=parted)
            except NotRendered:
                return Found(None)
            if len(text) > MAX_TEXT_CHARS:
                return Found(None)
            parts = parts_of(text, self.tokenizer.cut)
            keys, ids = self.tokenizer.remembered(parts, self.memory, self.tenant)
            nothing = Stem("", (), 0, frozenset(), chat.messages[0]["role"] == "system")
            self._remember(tails, _Text(chat, 0, text, tuple(keys), nothing), parted)
            return Found(joined(ids))
        return Found(None, agreed=False)

    def _remember(self, tails: Tails, told: _Text, parted: bool) -> None:
        """Remember the stems that the next turn may begin with."""
        chat, stem, is_tail = told.chat, told.stem, told.first > 0
        if not is_tail and (not self.keys or not tails.is_safe(chat, parted=parted)):
            return
        roles = [one["role"] for one in chat.messages]
        for start in starts(["", *roles] if is_tail else roles):
            at = start.at - is_tail
            key = self.keys.get(told.first + at)
            known = is_tail and not at and start.rule == stem.rule
            if (
                known
                or key is None
                or not chat.features <= tails.proved.get((start.rule, parted), frozenset())
            ):
                continue
            end = tails.of(chat._replace(messages=chat.messages[at:]), system=stem.system, parted=parted)
            if end is None or not told.text.endswith(end):
                continue
            count = len(parts_of(end, self.tokenizer.cut)) - 1
            parts = stem.parts + told.parts[: len(told.parts) - count]
            chars = stem.chars + len(told.text) - len(end)
            made = Stem(start.rule, parts, chars, chat.features, stem.system)
            self.memory.add(_form(key, parted), made)
            if start.rule == ANY:
                return


def _form(key: bytes, parted: bool) -> bytes:
    return key + (b"p" if parted else b"t")
