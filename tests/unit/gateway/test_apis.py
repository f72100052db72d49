"""Requests of `/v1/messages` and `/v1/responses` become the chats that vLLM makes of them."""

from __future__ import annotations

import json
from typing import Any

from kvstrata.gateway.tokens.apis import MESSAGES, RESPONSES
from kvstrata.gateway.tokens.prompts import Chat, prompt_in


def messages_of(body: dict[str, Any]) -> Any:
    """The messages of a chat that came by `/v1/messages`."""
    found = prompt_in(MESSAGES, json.dumps(body).encode())
    assert found is None or (isinstance(found, Chat) and "messages" in found.features)
    return found and found.messages


def test_messages_become_the_chat_that_vllm_makes_of_them() -> None:
    text = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": text[1:]}
    made = messages_of(
        {
            "system": text,
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "t", "signature": ""}, call],
                },
                {"role": "user", "content": [result, *text]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "max_tokens": 5,
        }
    )
    function = {"name": "f", "arguments": {"x": "é"}}
    assert made == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
            "reasoning": "t",
            "reasoning_content": "t",
        },
        {"role": "tool", "content": "b", "tool_call_id": "1"},
        {"role": "user", "content": ["a", "b"]},
    ]
    hello = {"messages": [{"role": "user", "content": "x"}]}
    assert messages_of(hello) is not None
    for more in (
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}},
        {"system": "x-anthropic-billing-header: 1"},
        {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": "x"},
    ):
        assert messages_of({**hello, **more}) is None, more


def test_responses_become_the_chat_that_vllm_makes_of_them() -> None:
    def chat(**body: Any) -> Any:
        found = prompt_in(RESPONSES, json.dumps(body).encode())
        assert found is None or (isinstance(found, Chat) and "responses" in found.features)
        return found and found.messages

    assert chat(input="q", instructions="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
    ]
    answer = {"type": "message", "id": "1", "role": "assistant", "status": "completed"}
    answer["content"] = [{"type": "output_text", "text": "a", "annotations": []}]  # type: ignore[assignment]
    asked = {
        "role": "user",
        "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}],
    }
    assert chat(input=[answer, asked]) == [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": ["x", "y"]},
    ]
    for body in (
        {"input": "q", "tools": [{"type": "function", "name": "f"}]},
        {"input": "q", "previous_response_id": "resp_1"},
        {"input": "q", "reasoning": {"effort": "low"}},
        {"input": "q", "truncation": "auto"},
        {"input": [{**answer, "status": "incomplete"}]},
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "developer", "content": "x"}]},
        {},
    ):
        assert chat(**body) is None, body
