"""Renders chat templates like transformers, with the messages in the form in which vLLM passes them.

The template is the operator's own file; Jinja's sandbox restricts it to producing text.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from kvstrata.gateway.tokens.prompts import Chat

RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)
"""Variables that a request's `chat_template_kwargs` cannot set here."""


class NotRendered(Exception):
    """The template refused this conversation, or failed on it."""


class ChatTemplate:
    """One template. Threads may use it at once."""

    def __init__(self, text: str, special: dict[str, str]) -> None:
        """`special`: the tokenizer's special tokens by name, like `bos_token`. Raises ValueError."""
        from jinja2 import TemplateError, meta, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`, which marks the model's own text and adds no text."""

            tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

            def parse(self, parser: Any) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        made = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        made.filters["tojson"] = _json
        made.globals["raise_exception"] = raise_exception
        made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = made.from_string(text)
            self._variables = meta.find_undeclared_variables(made.parse(text))
        except TemplateError as error:
            raise ValueError(f"{error}") from None
        self._special = special

    def render(self, chat: Chat, *, parted: bool) -> str:
        """Render a conversation; `parted`: the template gets contents as lists of parts. Raises NotRendered."""
        if chat.options.keys() & RESERVED:
            raise NotRendered("the request sets a reserved variable of the template")
        options = {name: value for name, value in chat.options.items() if name in self._variables}
        messages = [{**one, "content": _content(one, parted=parted)} for one in chat.messages]
        try:
            return self._template.render(
                messages=messages,
                tools=chat.tools,
                documents=None,
                add_generation_prompt=chat.open_ended,
                **{**self._special, **options},
            )
        except Exception as error:  # the boundary of the template's code
            raise NotRendered(f"{type(error).__name__}") from None


def _content(message: dict[str, Any], *, parted: bool) -> Any:
    content = message["content"]
    texts = [content] if isinstance(content, str) else content
    if not parted:
        return "\n".join(text for text in texts if text)
    if message["role"] == "tool":  # most templates accept only text for this role
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _json(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
    """The filter `tojson` of transformers, which does not escape HTML."""
    separators, sort_keys = more.get("separators"), more.get("sort_keys", False)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
