"""Prompts of `/v1/responses` and `/v1/messages`, as the chats that vLLM makes of them.

Only bodies whose conversion is certain become chats: text, roles, and for `/v1/messages` tools, their calls and
results, and earlier reasoning.  Everything else is unknown: stored responses that go on, built-in tools, media,
settings of reasoning.  A chat from here has its API's feature (`responses` or `messages`), which is verified like the
others.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_TEXT_PARTS = {"user": "input_text", "system": "input_text", "assistant": "output_text"}


class NoChat(Exception):
    """What chat an engine makes of the body is not certain."""


class _Messages(msgspec.Struct):
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    chat_template_kwargs: Any = None


class _Responses(msgspec.Struct):
    input: Any = None
    instructions: Any = None
    tools: Any = None
    reasoning: Any = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    prompt: Any = None
    truncation: Any = None
    mm_processor_kwargs: Any = None
    chat_template_kwargs: Any = None


_messages = msgspec.json.Decoder(_Messages).decode
_responses = msgspec.json.Decoder(_Responses).decode


def chat_in(path: str, body: bytes) -> dict[str, Any]:
    """The body of the chat. Raises NoChat, and what msgspec raises for bytes that are no JSON object."""
    return _of_messages(_messages(body)) if path == MESSAGES else _of_responses(_responses(body))


# -- /v1/messages ----------------------------------------------------------------------------------------------


def _of_messages(body: _Messages) -> dict[str, Any]:
    thinking = body.thinking.get("type") if isinstance(body.thinking, dict) else body.thinking
    if thinking not in (None, "enabled", "adaptive") or body.output_config is not None:
        raise NoChat  # what these do to the prompt depends on the model
    made: dict[str, Any] = {"messages": [], "chat_template_kwargs": body.chat_template_kwargs}
    system = _system(body.system)
    if system:
        made["messages"].append({"role": "system", "content": system})
    if not isinstance(body.messages, list):
        raise NoChat
    for message in body.messages:
        _add_message(made["messages"], message)
    if body.tools is not None:
        made["tools"] = [_tool(one) for one in _list(body.tools)]
        choice = body.tool_choice
        if choice is not None and _dict(choice).get("type") not in ("auto", "any", "tool"):
            raise NoChat
    return made


def _system(given: Any) -> str:
    texts = [given or ""] if given is None or isinstance(given, str) else [_text(one) for one in _list(given)]
    if any(text.startswith("x-anthropic-billing-header") for text in texts):
        raise NoChat  # engines strip these; what is left is their matter
    return "".join(texts)


def _add_message(messages: list[dict[str, Any]], message: Any) -> None:
    """Add what a message becomes: itself, after the results of tools that it brings."""
    role, content = _dict(message).get("role"), message.get("content")
    if role not in ("user", "assistant") or message.keys() - {"role", "content"}:
        raise NoChat  # system prompts in between are moved for some templates
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in _list(content):
        kind = _dict(block).get("type")
        if kind == "text":
            texts += [text] if (text := _text(block)) else []
        elif kind == "tool_result" and role == "user":
            messages.append(_result(block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_string(block.get("thinking")))
        else:
            raise NoChat
    made: dict[str, Any] = {"role": role}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if texts:
        made["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    elif role == "user":
        return
    messages.append(made)


def _call(block: dict[str, Any]) -> dict[str, Any]:
    if block.keys() - {"type", "id", "name", "input", "cache_control"}:
        raise NoChat
    function = {"name": _string(block.get("name")), "arguments": json.dumps(_dict(block.get("input") or {}))}
    return {"id": _string(block.get("id")), "type": "function", "function": function}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    if block.keys() - {"type", "tool_use_id", "content", "is_error", "cache_control"}:
        raise NoChat
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        content = "\n".join(_text(one) for one in _list(content))
    return {"role": "tool", "tool_call_id": _string(block.get("tool_use_id")), "content": content or ""}


def _tool(one: Any) -> dict[str, Any]:
    if _dict(one).keys() - {"name", "description", "input_schema", "cache_control"}:
        raise NoChat
    function = {"name": _string(one.get("name")), "description": one.get("description")}
    return {"type": "function", "function": {**function, "parameters": _dict(one.get("input_schema"))}}


# -- /v1/responses ---------------------------------------------------------------------------------------------


def _of_responses(body: _Responses) -> dict[str, Any]:
    strange = (
        body.tools,
        body.reasoning,
        body.previous_response_id,
        body.previous_input_messages,
        body.prompt,
    )
    if any(strange) or body.truncation not in (None, "disabled") or body.mm_processor_kwargs:
        raise NoChat
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": _string(body.instructions)})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [_item(one) for one in _list(body.input)]
    return {"messages": messages, "chat_template_kwargs": body.chat_template_kwargs}


def _item(item: Any) -> dict[str, Any]:
    role = _dict(item).get("role")
    known = {"type", "role", "content", "id", "status"}
    if role not in _TEXT_PARTS or item.keys() - known or item.get("type", "message") != "message":
        raise NoChat
    if item.get("status") not in (None, "completed"):  # an answer that is to be continued
        raise NoChat
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    texts = []
    for part in _list(content):
        if _dict(part).get("type") != _TEXT_PARTS[role]:
            raise NoChat
        if part.keys() - {"type", "text", "annotations", "logprobs"}:
            raise NoChat
        texts.append(_string(part.get("text")))
    if role == "assistant":
        if len(texts) != 1:
            raise NoChat  # engines take the first only
        return {"role": role, "content": texts[0]}
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


# -- what is checked -------------------------------------------------------------------------------------------


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoChat
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NoChat
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise NoChat
    return value


def _text(block: Any) -> str:
    """The text of a block; a mark for caching stays without effect."""
    if _dict(block).get("type") != "text" or block.keys() - {"type", "text", "cache_control", "citations"}:
        raise NoChat
    return _string(block.get("text"))
