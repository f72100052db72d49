"""Token ids of prompts: parts are tokenised as wholes are, and what is unknown is not guessed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from kvstrata.config.gateway_model import TokenSettings
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.tokens.engines import Verdict
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS, FEATURES, Chat, Text, prompt_in
from kvstrata.gateway.tokens.source import MISTAKES, Tokens
from kvstrata.gateway.tokens.template import ChatTemplate, NotRendered
from kvstrata.gateway.tokens.tokenizer import Memory, OwnTokenizer, certain, parts_of
from tests.harness import tokenizer_folder as made
from tests.harness.waiting import eventually_async

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": made.byte_level,
    "head": lambda: made.byte_level(head=True),
    "spaced": made.spaced,
    "composed": made.composed,
}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*made.SPECIAL, "<|im_", "|>", "<|", "|>\n", "e qu", "over", " ", "\n", "  ", "the", "fox 12"]
        ),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OwnTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: OwnTokenizer(name, str(made.save(folder / name, make(), made.CHATML)), "path")
        for name, make in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
@settings(max_examples=25)
def test_parts_of_a_text_have_the_tokens_of_the_whole(own, kind, texts):
    tokenizer, memory = own[kind], Memory()
    whole = tokenizer.tokenizer
    assert tokenizer.cut in made.SPECIAL
    text = ""
    for piece in texts:  # a conversation that grows
        text += f"<|im_start|>user\n{piece}<|im_end|>\n"
        ids = tokenizer.encode(text, memory)
        assert list(ids or []) == whole.encode(text, add_special_tokens=False).ids
        prompt = Text(text, special=True)
        assert list(tokenizer.ids_of(prompt, parted=False, memory=memory) or []) == whole.encode(text).ids
    again = tokenizer.encode(text, memory)
    assert again == ids


def test_only_tokens_that_nothing_can_cover_are_cuts() -> None:
    def found(*tokens: AddedToken) -> list[str]:
        return certain(tokens)

    raw = AddedToken("<e>", normalized=False)
    assert found(raw) == ["<e>"]
    assert found(raw, AddedToken("a<e>", normalized=False)) == ["a<e>"]
    assert found(raw, AddedToken("x<", normalized=False)) == ["x<"], (
        "a token before it would take its beginning"
    )
    assert found(AddedToken("aba", normalized=False)) == [], "it overlaps itself"
    for unsure in ({"normalized": True}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}):
        assert found(AddedToken("<e>", **{"normalized": False, **unsure})) == []
    assert "".join(parts_of("a<e>b<e>", "<e>")) == "a<e>b<e>"


def test_the_next_turn_tokenises_its_new_text_only(own, monkeypatch):
    tokenizer, memory = own["byte_level"], Memory()
    seen: list[str] = []
    plain = tokenizer._batch
    monkeypatch.setattr(tokenizer, "_batch", lambda texts: seen.extend(texts) or plain(texts))
    first = "<|im_start|>user\nlong<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.encode(first, memory, "a")
    seen.clear()
    tokenizer.encode(first + "answer<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n", memory, "a")
    assert "long" not in "".join(seen) and "answer" in "".join(seen)
    tokenizer.encode(first, memory, "b")
    assert "long" in "".join(seen), "tenants share nothing"


BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
UNKNOWN: list[dict[str, Any]] = [
    {"chat_template": "x"},
    {"continue_final_message": True},
    {"add_special_tokens": True},
    {"truncate_prompt_tokens": 5},
    {"documents": [{"text": "x"}]},
    {"tools": [{"type": "web"}]},
    {"tools": [{"type": "function", "function": {"name": "f", "more": 1}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"reasoning_effort": "enormous"},
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"role": "developer", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x", "name": "joe"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
    {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nhi"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
    {"chat_template_kwargs": 5},
]


def test_what_may_change_a_prompt_makes_it_unknown() -> None:
    for more in UNKNOWN:
        assert isinstance(prompt_in(CHAT, json.dumps(BODY).encode()), Chat)
        assert prompt_in(CHAT, json.dumps({**BODY, **more}).encode()) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["role", "content", "tool_calls", "function", "type", "text", "name"]), x
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(["messages", "tools", "prompt", "chat_template_kwargs", "reasoning_effort"]),
)
@example([{"role": []}], "messages")
@example({}, "reasoning_effort")
@settings(max_examples=40)
def test_no_body_fails(value: Any, field: str) -> None:
    for path in (CHAT, COMPLETIONS):
        prompt_in(path, json.dumps({**BODY, field: value}).encode())


def test_a_template_cannot_be_given_other_messages_by_a_request() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ x }}{% generation %}!{% endgeneration %}", {})
    chat = prompt_in(CHAT, json.dumps({**BODY, "chat_template_kwargs": {"x": 5, "y": 6}}).encode())
    assert isinstance(chat, Chat)
    assert template.render(chat, parted=False) == "hi5!"
    parts = ChatTemplate(made.PARTED, {"bos_token": "<s>"})
    assert parts.render(chat._replace(messages=[{"role": "user", "content": ["a", "b"]}]), parted=True) == (
        "<s>[user]a;b;</s>"
    )
    with pytest.raises(NotRendered):
        template.render(chat._replace(options={"messages": []}), parted=False)
    with pytest.raises(NotRendered):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render(chat, parted=False)
    with pytest.raises(NotRendered):
        ChatTemplate("{{ raise_exception('no') }}", {}).render(chat, parted=False)


Serve = Callable[..., Tokens]


@pytest.fixture
async def service(own: dict[str, OwnTokenizer]) -> AsyncIterator[Serve]:
    made: list[Tokens] = []

    def serve(features: set[tuple[str, bool]] | None = None, **more: Any) -> Tokens:
        made.append(served(own["byte_level"], features, **{"deadline_ms": 10_000, **more}))
        return made[-1]

    yield serve
    for one in made:
        await one.close()


def served(tokenizer: OwnTokenizer, features: set[tuple[str, bool]] | None, **more: Any) -> Tokens:
    """A service before one engine that agrees on these features; None: on all."""
    fleet = Fleet(lambda: 0.0)
    [engine] = fleet.set_places([Place("e", Address("h", 1, False))])
    fleet.up(engine, {"m": {"id": "m"}, "a": {"id": "a", "parent": "m"}})
    tokens = Tokens(TokenSettings(**more), {"m": tokenizer}, fleet, None, lambda: 0.0)  # type: ignore[arg-type]
    agreed = frozenset(features if features is not None else {(one, False) for one in FEATURES})
    tokens._verified["e", "m"] = engine, engine.generation, Verdict(agreed, {})
    return tokens


async def test_ids_are_given_for_what_each_engine_agrees_on_only(service, own):
    body = json.dumps(BODY).encode()
    tokenizer = own["byte_level"]
    tokens = service()
    expected = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (await tokens.of(CHAT, body, "m", "")).ids == expected
    assert (await tokens.of(CHAT, body, "a", "")).ids == expected, "an adapter has its model's tokenizer"
    assert (await tokens.of(CHAT, body, "z", "")).ids is None
    assert (await tokens.of("/v1/responses", body, "m", "")).ids is None
    tokens._fleet.engines["e"].generation += 1
    assert (await tokens.of(CHAT, body, "m", "")).ids is None, "an engine that came back is another one"
    assert (await service({("completion", False)}).of(CHAT, body, "m", "")).ids is None
    assert (await service({("plain", True)}).of(CHAT, body, "m", "")).ids is None, "ChatML takes text"
    assert dict(tokens.counts) == {
        ("m", "tokenizer"): 2, ("other", "unknown_model"): 1, ("m", "unsupported"): 1, ("m", "unverified"): 1
    }  # fmt: skip


async def test_a_request_goes_on_when_its_time_is_over(service, own, monkeypatch):
    import threading

    tokenizer, go_on = own["byte_level"], threading.Event()
    tokens = service(deadline_ms=300)
    plain = tokenizer._batch
    monkeypatch.setattr(tokenizer, "_batch", lambda texts: go_on.wait(120) and plain(texts))
    assert (await tokens.of(CHAT, json.dumps(BODY).encode(), "m", "")).ids is None
    assert tokens.counts["m", "late"] == 1
    assert not len(tokens.memory)
    go_on.set()

    async def done() -> bool:
        return not tokens._waiting

    await eventually_async("the end of the work", done)
    assert len(tokens.memory), "work that was begun helps the next turn"


async def test_a_model_whose_ids_are_wrong_again_and_again_is_degraded(service: Serve) -> None:
    tokens = service()
    body = json.dumps(BODY).encode()
    for _ in range(MISTAKES - 1):
        tokens.reported("m", "e", 5, 6)
    tokens.reported("m", "e", 5, 5)
    assert not tokens.degraded and (await tokens.of(CHAT, body, "m", "")).ids is not None
    tokens.reported("a", "e", 5, 6)
    assert tokens.degraded == {"m"} and tokens.mistakes["m", "e"] == MISTAKES
    assert (await tokens.of(CHAT, body, "m", "")).ids is None and tokens.counts["m", "degraded"] == 1
    tokens.set(tokens.settings, tokens.tokenizers)
    assert not tokens.degraded and (await tokens.of(CHAT, body, "m", "")).ids is not None


async def test_ids_go_on_beside_the_text_of_a_chat_without_parameters_of_its_own(service: Serve) -> None:
    tokens = service(pass_ids=True)
    assert (await tokens.of(CHAT, b"  " + json.dumps(BODY).encode(), "m", "")).passes
    own_ones = {**BODY, "kv_transfer_params": {"x": 1}}
    assert not (await tokens.of(CHAT, json.dumps(own_ones).encode(), "m", "")).passes
    assert not (await tokens.of(COMPLETIONS, b'{"prompt": "x"}', "m", "")).passes
    assert not (await service().of(CHAT, json.dumps(BODY).encode(), "m", "")).passes
