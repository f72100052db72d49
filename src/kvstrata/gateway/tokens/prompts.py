"""What a request's prompt is made of, as far as its token ids can be computed here.

A prompt's *features* are the parts of a chat template that it uses.  Each is verified by itself (verifying.py), since
a template, or the engine around it, may treat one of them in its own way.  Whatever is not known to leave the prompt
alone makes it `None`: unknown, never guessed.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION, PLAIN, SYSTEM, TOOLS, CALLS = "completion", "plain", "system", "tools", "calls"
PARTS, REASONING, OPTIONS = "parts", "reasoning", "options"
FEATURES = (COMPLETION, PLAIN, SYSTEM, TOOLS, CALLS, PARTS, REASONING, OPTIONS)
"""A text completion; a chat between user and assistant; with a system prompt; with tools; with calls of tools and their
results; with content in several parts; with the reasoning of earlier answers; with variables of the template."""
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE = frozenset(
    ("role", "content", "tool_calls", "tool_call_id", "reasoning", "refusal", "annotations", "audio")
)
_IGNORED = frozenset(("refusal", "annotations", "audio", "function_call"))
"""Fields of an answer's message that clients send back, and no template gets; they are null."""
_EFFORTS = ("none", "minimal", "low", "medium", "high")


class _Body(msgspec.Struct):
    """What decides the prompt; the rest of a body is not decoded."""

    messages: Any = None
    prompt: Any = None
    tools: Any = None
    tool_choice: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    add_special_tokens: Any = None
    reasoning_effort: Any = None
    include_reasoning: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    truncate_prompt_tokens: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    functions: Any = None
    mm_processor_kwargs: Any = None


_decode = msgspec.json.Decoder(_Body).decode


class Chat(NamedTuple):
    """A conversation as templates get it."""

    messages: list[dict[str, Any]]
    """Contents are text, or lists of texts for content in several parts."""
    tools: list[dict[str, Any]] | None
    open_ended: bool
    """Whether the answer's beginning is added."""
    options: dict[str, Any]
    """Further variables of the template."""
    features: frozenset[str]


class Text(NamedTuple):
    """A completion's prompt."""

    text: str
    special: bool
    """Whether the tokenizer adds its special tokens, like one for the beginning."""
    features: frozenset[str] = frozenset((COMPLETION,))


class _Unknown(Exception):
    """The prompt has something whose tokens are not known here."""


def prompt_in(path: str, body: bytes) -> Chat | Text | None:
    """The prompt of a request; None if its token ids cannot be computed here."""
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        found = _decode(body)
        if found.truncate_prompt_tokens is not None or found.prompt_embeds is not None:
            return None
        return _chat(found) if path == CHAT else _text(found)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _Unknown):
        return None


def _text(body: _Body) -> Text | None:
    if not isinstance(body.prompt, str) or body.suffix is not None:
        return None
    return Text(body.prompt, special=body.add_special_tokens in (None, True))


def _chat(body: _Body) -> Chat | None:
    found = body.messages
    strange = (body.continue_final_message, body.add_special_tokens, body.documents, body.chat_template)
    if any(strange) or body.functions or not isinstance(found, list) or not found:
        return None
    features = {PLAIN}
    messages = [_message(one, features) for one in found]
    tools = _tools(body.tools)
    if tools is not None:
        if body.tool_choice == "none":  # whether an engine leaves the tools out is one of its settings
            return None
        features.add(TOOLS)
    options = body.chat_template_kwargs or {}
    if not isinstance(options, dict):
        return None
    options = dict(options)
    effort = body.reasoning_effort
    if effort is not None:
        if effort not in _EFFORTS:
            return None
        options.setdefault("enable_thinking", effort != "none")
        options["reasoning_effort"] = effort
    if options:
        features.add(OPTIONS)
    return Chat(messages, tools, body.add_generation_prompt is not False, options, frozenset(features))


def _message(message: Any, features: set[str]) -> dict[str, Any]:
    """A message as vLLM hands it to a template."""
    if not isinstance(message, dict) or (role := message.get("role")) not in _ROLES:
        raise _Unknown
    if any(message[name] for name in _IGNORED & message.keys()):
        raise _Unknown
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if message.keys() - _MESSAGE - _IGNORED - {"reasoning_content"}:
        raise _Unknown
    made: dict[str, Any] = {"role": role, "content": _content(message.get("content"), features)}
    if role == "system":
        features.add(SYSTEM)
        text = made["content"] if isinstance(made["content"], str) else "".join(made["content"])
        if "x-anthropic-billing-header" in text:  # which engines strip
            raise _Unknown
    if role == "assistant":
        if message.get("tool_calls"):
            features.add(CALLS)
            made["tool_calls"] = _calls(message["tool_calls"])
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise _Unknown
            features.add(REASONING)
            made["reasoning"] = made["reasoning_content"] = reasoning
    if role == "tool":
        features.add(CALLS)
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
    return made


def _content(content: Any, features: set[str]) -> str | list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Unknown
    features.add(PARTS)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise _Unknown  # images and the like become tokens that only the engine knows
        if not isinstance(part["text"], str):
            raise _Unknown
        texts.append(part["text"])
    return texts


def _function(one: Any) -> dict[str, Any]:
    """The function of a tool, or of a call of one."""
    function = one.get("function") if isinstance(one, dict) else None
    if not isinstance(function, dict) or one.get("type", "function") != "function":
        raise _Unknown
    return function


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Calls of tools, whose arguments become objects."""
    made = []
    if not isinstance(calls, list):
        raise _Unknown
    for call in calls:
        function = _function(call)
        if call.keys() - {"id", "type", "function"} or function.keys() != {"name", "arguments"}:
            raise _Unknown
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = {}
        if not isinstance(arguments, dict):
            arguments = {}
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools in the order of fields that vLLM gives them."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise _Unknown
    made = []
    for tool in tools:
        function = _function(tool)
        if tool.keys() != {"type", "function"}:
            raise _Unknown
        if function.keys() - {"name", "description", "parameters", "strict"} or "name" not in function:
            raise _Unknown
        of = {name: function.get(name) for name in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            of["strict"] = function["strict"]
        made.append({"type": "function", "function": of})
    return made
