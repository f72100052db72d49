"""Reads a request's prompt in the form from which the gateway can compute its token ids.

A prompt's *features* are the parts of a chat template that it uses.  Each is verified separately (engines.py), since a
template, or the engine around it, may treat one of them in its own way.  With a field that might change the prompt in
an unknown way, the prompt is `None` (unknown), never guessed.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION, PLAIN, SYSTEM, TOOLS, CALLS = "completion", "plain", "system", "tools", "calls"
PARTS, REASONING, OPTIONS = "parts", "reasoning", "options"
FEATURES = (COMPLETION, PLAIN, SYSTEM, TOOLS, CALLS, PARTS, REASONING, OPTIONS)
"""A text completion; a chat between user and assistant; with a system prompt; with tools; with calls of tools and their
results; with content in several parts; with the reasoning of earlier answers; with variables of the template."""


class Chat(NamedTuple):
    """A conversation in the form that templates get."""

    messages: list[dict[str, Any]]
    """Contents are text, or lists of texts for content in several parts."""
    tools: list[dict[str, Any]] | None
    open_ended: bool
    """Whether the template adds the beginning of the answer (`add_generation_prompt`)."""
    options: dict[str, Any]
    """Further variables of the template."""
    features: frozenset[str]


class Text(NamedTuple):
    """A completion's prompt."""

    text: str
    special: bool
    """Whether the tokenizer adds its special tokens, such as a BOS token."""
    features: frozenset[str] = frozenset((COMPLETION,))


Nothing = Annotated[list[Any], Meta(max_length=0)] | Literal["", False] | None
"""A field that leaves the prompt unchanged if it is empty; other values are not accepted."""


class _Part(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class _Named(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any]


class _Call(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: _Named
    id: str | None = None


class _Declared(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: _Declared


class _Message(Struct, forbid_unknown_fields=True):
    """A message; its content must be text, since images and the like become tokens that only the engine knows."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None


class _Body(Struct, kw_only=True):
    """The fields on which the prompt depends; other fields of a body are ignored."""

    truncate_prompt_tokens: None = None
    prompt_embeds: None = None


class _Completion(_Body, kw_only=True):
    prompt: str
    suffix: None = None
    add_special_tokens: bool | None = None


class _Chat(_Body, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: Annotated[list[_Tool], Meta(min_length=1)] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Nothing = None
    add_special_tokens: Nothing = None
    documents: Nothing = None
    chat_template: Nothing = None
    functions: Nothing = None


_decode_completion, _decode_chat = (
    msgspec.json.Decoder(_Completion).decode,
    msgspec.json.Decoder(_Chat).decode,
)


def prompt_in(path: str, body: bytes) -> Chat | Text | None:
    """The prompt of a request; None if its token ids cannot be computed here."""
    try:
        if path == COMPLETIONS:
            found = _decode_completion(body)
            return Text(found.prompt, special=found.add_special_tokens is not False)
        return _chat(_decode_chat(body)) if path == CHAT else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _chat(body: _Chat) -> Chat | None:
    features = {PLAIN}
    messages = [_message(one, features) for one in body.messages]
    if any(
        one.role == "system" and "x-anthropic-billing-header" in str(one.content) for one in body.messages
    ):
        return None  # engines strip this header from the prompt
    if body.tools is not None:
        if body.tool_choice == "none":  # an engine's settings decide whether it leaves the tools out
            return None
        features.add(TOOLS)
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("enable_thinking", body.reasoning_effort != "none")
        options["reasoning_effort"] = body.reasoning_effort
    if options:
        features.add(OPTIONS)
    tools = [_tool(one.function) for one in body.tools] if body.tools is not None else None
    return Chat(messages, tools, body.add_generation_prompt is not False, options, frozenset(features))


def _message(message: _Message, features: set[str]) -> dict[str, Any]:
    """A message in the form in which vLLM passes it to a template."""
    content: str | list[str] = []
    if isinstance(message.content, str):
        content = message.content
    elif message.content is not None:
        features.add(PARTS)
        content = [part.text for part in message.content]
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "system":
        features.add(SYSTEM)
    elif message.role == "tool":
        features.add(CALLS)
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
    elif message.role == "assistant":
        if message.tool_calls:
            features.add(CALLS)
            made["tool_calls"] = [_call(one) for one in message.tool_calls]
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning is not None:
            features.add(REASONING)
            made["reasoning"] = made["reasoning_content"] = reasoning
    return made


def _call(call: _Call) -> dict[str, Any]:
    """A tool call, with its arguments decoded into an object."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    known = {} if call.id is None else {"id": call.id}
    return {**known, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _tool(tool: _Declared) -> dict[str, Any]:
    """A tool, with its fields in vLLM's order."""
    of: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        of["strict"] = tool.strict
    return {"type": "function", "function": of}
