"""A conversation's next turn costs its new text only, and has the ids that its whole text has."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.tokens import tails
from kvstrata.gateway.tokens.conversations import Found, ids_of
from kvstrata.gateway.tokens.memory import WINDOW, Memory
from kvstrata.gateway.tokens.prompts import CHAT, FEATURES, Chat, conversation_in, prompt_in
from kvstrata.gateway.tokens.template import ChatTemplate
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer
from tests.harness import tokenizer_folder as made
from tests.harness.amount import amount

TEMPLATES = {
    "chatml": made.CHATML,
    "thinking": made.THINKING,
    "hasty": made.HASTY,
    "parted": made.PARTED.replace("</s>", "<|im_end|>"),
} | amount({}, {"counted": made.COUNTED, "joined": made.JOINED})
AGREED = frozenset((feature, parted) for feature in FEATURES for parted in (False, True))
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": {}, "a": {}}}}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OwnTokenizer]:
    """A tokenizer with each template."""
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer = made.byte_level()
    found = {
        name: OwnTokenizer(name, str(made.save(folder / name, tokenizer, template, bos_token="<b>")), "path")
        for name, template in TEMPLATES.items()
    }
    for one in found.values():
        assert one.tails is not None
        one.tails.prove(random.Random(4))
    return found


def body_of(messages: list[Any], **more: Any) -> bytes:
    """A chat's body."""
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def ids_in(
    tokenizer: OwnTokenizer, body: bytes, memory: Memory, tenant: str = "", *, parted: bool = False
) -> Found:
    """The ids of a chat."""
    conversation = conversation_in(body)
    assert conversation is not None
    return ids_of(
        tokenizer, frozenset(one for one in AGREED if one[1] is parted), conversation, memory, tenant
    )


TEXTS = st.lists(
    st.sampled_from(
        [*made.SPECIAL, "hurry", "</think>", "<result>", "<think>", "\n", " ", "the", "fox 12", "é", "ß\n\n"]
    ),
    max_size=4,
).map("".join)
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=2).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
USERS = st.builds(lambda text: {"role": "user", "content": text}, CONTENTS)
SYSTEMS = st.builds(lambda text: {"role": "system", "content": text}, CONTENTS)
ANSWERS = st.builds(
    lambda text, thought: (
        {"role": "assistant", "content": text} | ({"reasoning": thought} if thought else {})
    ),
    CONTENTS,
    TEXTS,
)
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "x"}'}}
CALLS = st.builds(
    lambda text, thought: (
        {"role": "assistant", "content": text or None, "tool_calls": [CALL]}
        | ({"reasoning": thought} if thought else {})
    ),
    TEXTS,
    TEXTS,
)
RESULTS = st.builds(lambda text: {"role": "tool", "tool_call_id": "abcdefghi", "content": text}, TEXTS)
ROUNDS = st.one_of(
    st.tuples(USERS),
    st.tuples(ANSWERS, USERS),
    st.tuples(ANSWERS, USERS),
    st.tuples(CALLS, RESULTS),
    st.tuples(CALLS, RESULTS, RESULTS),
    st.tuples(ANSWERS),
    st.tuples(SYSTEMS),
)


@pytest.mark.parametrize("template", TEMPLATES)
@given(
    first=st.lists(st.one_of(SYSTEMS, USERS), min_size=1, max_size=2),
    rounds=st.lists(ROUNDS, max_size=6),
    tools=st.booleans(),
    edit=st.none() | st.tuples(st.integers(0, 8), CONTENTS),
    kept=st.sampled_from([2_000, 1 << 20]),
)
@settings(max_examples=amount(15, 25), deadline=None)
def test_turns_have_the_ids_of_their_whole_text(
    own: dict[str, OwnTokenizer],
    template: str,
    first: list[Any],
    rounds: list[tuple[Any, ...]],
    tools: bool,
    edit: tuple[int, Any] | None,
    kept: int,
) -> None:
    tokenizer, memory, parted = own[template], Memory(kept), template == "parted"
    more = {"tools": [TOOL]} if tools else {}

    def compare(messages: list[Any]) -> None:
        body = body_of(messages, **more)
        prompt = prompt_in(CHAT, body)
        assert isinstance(prompt, Chat)
        found = ids_in(tokenizer, body, memory, parted=parted)
        assert found.ids == tokenizer.ids_of(prompt, parted=parted)
        assert memory.bytes <= kept

    turns = list(itertools.accumulate(rounds, lambda before, new: before + list(new), initial=first))
    for messages in turns:
        compare(messages)
    if edit is not None:  # an earlier message becomes another one, and the conversation goes on
        at = edit[0] % len(turns[-1])
        for messages in turns:
            compare(
                [*messages[:at], {**messages[at], "content": edit[1]}, *messages[at + 1 :]]
                if at < len(messages)
                else messages
            )
    for messages in reversed(turns):
        compare(messages)


def test_a_template_that_shows_the_time_has_no_rules() -> None:
    template = ChatTemplate("{{ strftime_now('%d') if messages[0].content == 'when' }}" + made.CHATML, {})
    found = tails.Tails(template, "<|im_start|>")
    found.prove(random.Random(1))
    assert found.tried and not found.proved


def test_a_next_turn_decodes_renders_and_tokenises_its_new_text_only(
    own: dict[str, OwnTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chatml", "thinking"):
        tokenizer, memory = own[name], Memory(1 << 20)
        messages = [{"role": "system", "content": "OLD"}, {"role": "user", "content": "OLD"}]
        assert not ids_in(tokenizer, body_of(messages), memory).stem_chars
        seen: list[str] = []
        template, plain = tokenizer.template, tokenizer._batch
        assert template is not None
        render = template.render

        def rendered(chat: Chat, *, parted: bool, render: Any = render, seen: list[str] = seen) -> str:
            seen.append(str(chat.messages))
            return str(render(chat, parted=parted))

        monkeypatch.setattr(template, "render", rendered)
        monkeypatch.setattr(
            tokenizer, "_batch", lambda texts, plain=plain, seen=seen: seen.extend(texts) or plain(texts)
        )
        for turn in range(4):
            seen.clear()
            messages += [
                {"role": "assistant", "content": f"answer {turn}", "reasoning": "so"},
                {"role": "user", "content": f"question {turn}"},
            ]
            found = ids_in(tokenizer, body_of(messages), memory)
            assert found.stem_chars, name
            said = "".join(seen)
            assert f"question {turn}" in said and f"answer {turn - 2}" not in said
            assert turn == 0 or "OLD" not in said
        assert not ids_in(tokenizer, body_of(messages), memory, "other").stem_chars, "tenants share nothing"


def test_steps_of_an_agent_begin_where_the_last_ended(own: dict[str, OwnTokenizer]) -> None:
    tokenizer, memory = own["thinking"], Memory(1 << 20)
    messages: list[Any] = [{"role": "user", "content": "do"}]
    for step in range(WINDOW):
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so"},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": str(step)},
        ]
        found = ids_in(tokenizer, body_of(messages, tools=[TOOL]), memory)
        assert bool(found.stem_chars) == (step > 0)
    messages += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]
    assert not ids_in(tokenizer, body_of(messages, tools=[TOOL]), memory).stem_chars, "the reasoning goes"


def test_another_tool_or_option_begins_anew(own: dict[str, OwnTokenizer]) -> None:
    tokenizer, memory = own["chatml"], Memory(1 << 20)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    for more in (
        {},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
    ):
        assert not ids_in(tokenizer, body_of(messages, **more), memory).stem_chars, more
        assert ids_in(tokenizer, body_of(messages, **more), memory).stem_chars, more
