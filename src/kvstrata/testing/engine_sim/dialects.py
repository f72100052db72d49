"""What the answers of each API look like: as one JSON object, and as a stream of server-sent events.

A stream is `opening`, then `delta` for each piece of text, then `closing`.  Every method returns the bytes to send.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from kvstrata.testing.engine_sim.bodies import (
    Ask,
    ChatBody,
    Choice,
    CompletionBody,
    MessagesBody,
    ResponsesBody,
    Sampling,
)
from kvstrata.testing.engine_sim.requests import End

DONE = b"data: [DONE]\n\n"


def sse(value: object, event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """vLLM's `usage` of answers as far as they are."""
    requests = [choice.request for choice in choices]
    prompt = sum(request.prompt_tokens for request in requests)
    answer = sum(request.produced for request in requests)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + answer,
        "completion_tokens": answer,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(choices_of=requests)},
    }


def cached_tokens(*, choices_of: Sequence[Any]) -> int:
    """Tokens of the prompts that were found computed."""
    return sum(request.cached_tokens or 0 for request in choices_of)


class Dialect:
    """The answer to one request. `choices` are complete when `whole` and `closing` are called."""

    body: ClassVar[type[Sampling]]
    prefix: ClassVar[str]

    def __init__(self, ask: Ask, choices: list[Choice], request_id: str) -> None:
        self.ask = ask
        self.choices = choices
        self.id = f"{self.prefix}{request_id}"
        self.created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """What is sent before the first token."""
        return b""

    def delta(self, index: int, text: str, end: End | None) -> bytes:
        """What is sent for a piece of the answer of a choice; `end` with its last."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """What is sent once all choices have ended."""
        raise NotImplementedError

    def _text(self, choice: Choice) -> str:
        return choice.text(0, choice.request.produced)


class Completions(Dialect):
    """`/v1/completions`."""

    body: ClassVar[type[Sampling]] = CompletionBody
    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def whole(self) -> dict[str, Any]:
        """A `text_completion` or `chat.completion`."""
        choices = [
            self._shown(index, self._text(choice), choice.request.end, whole=True)
            for index, choice in enumerate(self.choices)
        ]
        return self._head(self.kind, choices) | {"usage": usage(self.choices), "kv_transfer_params": None}

    def delta(self, index: int, text: str, end: End | None) -> bytes:
        """A chunk with one choice."""
        chunk = self._head(self.chunk_kind, [self._shown(index, text, end, whole=False)])
        if self.ask.options.continuous_usage_stats and self.ask.options.include_usage:
            chunk["usage"] = usage([self.choices[index]])
        return sse(chunk)

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self.ask.options.include_usage:
            return DONE
        return sse(self._head(self.chunk_kind, []) | {"usage": usage(self.choices)}) + DONE

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.ask.model,
            "choices": choices,
        }

    def _shown(self, index: int, text: str, end: End | None, *, whole: bool) -> dict[str, Any]:
        return {"index": index, "text": text} | self._ending(index, end)

    def _ending(self, index: int, end: End | None) -> dict[str, Any]:
        stopped_by = self.choices[index].stopped_by if end is not None else None
        return {"logprobs": None, "finish_reason": end, "stop_reason": stopped_by}


class Chat(Completions):
    """`/v1/chat/completions`."""

    body = ChatBody
    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        """The chunk with the role."""
        first = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return sse(self._head(self.chunk_kind, [first]))

    def _shown(self, index: int, text: str, end: End | None, *, whole: bool) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if whole else {"delta": {"content": text}}
        return {"index": index} | said | self._ending(index, end)


class Responses(Dialect):
    """`/v1/responses`."""

    body = ResponsesBody
    prefix = "resp_"

    def __init__(self, ask: Ask, choices: list[Choice], request_id: str) -> None:
        super().__init__(ask, choices, request_id)
        self._sent = 0
        self._item_id = f"msg_{request_id}"

    def whole(self) -> dict[str, Any]:
        """A complete `response`."""
        return self._response(self._status(), [self._item(self._text(self.choices[0]), self._status())])

    def opening(self) -> bytes:
        """The events before the text."""
        begun = self._response("in_progress", [])
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event(
                "response.output_item.added",
                output_index=0,
                item=self._item(None, "in_progress"),
            )
            + self._event("response.content_part.added", part=self._part(""), **self._place())
        )

    def delta(self, index: int, text: str, end: End | None) -> bytes:
        """A piece of the text."""
        return self._event("response.output_text.delta", delta=text, logprobs=[], **self._place())

    def closing(self) -> bytes:
        """The events after the text."""
        text, status = self._text(self.choices[0]), self._status()
        whole = self.whole()
        return (
            self._event("response.output_text.done", text=text, logprobs=[], **self._place())
            + self._event("response.content_part.done", part=self._part(text), **self._place())
            + self._event("response.output_item.done", output_index=0, item=self._item(text, status))
            + self._event(f"response.{status}", response=whole)
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return sse({"type": name, "sequence_number": number} | fields, name)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _status(self) -> str:
        return "incomplete" if self.choices[0].request.end is End.LENGTH else "completed"

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [self._part(text)]
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        counted = usage(self.choices)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.ask.model,
            "output": output,
            "usage": None
            if status == "in_progress"
            else {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }


class Messages(Dialect):
    """`/v1/messages`, Anthropic's API."""

    body = MessagesBody
    prefix = "msg_"

    def whole(self) -> dict[str, Any]:
        """A complete `message`."""
        text = {"type": "text", "text": self._text(self.choices[0])}
        return self._message([text]) | self._ending() | {"usage": self._usage()}

    def opening(self) -> bytes:
        """The message without text."""
        begun = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        block = {"type": "text", "text": ""}
        return sse({"type": "message_start", "message": begun}, "message_start") + sse(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )

    def delta(self, index: int, text: str, end: End | None) -> bytes:
        """A piece of the text."""
        piece = {"type": "text_delta", "text": text}
        return sse({"type": "content_block_delta", "index": 0, "delta": piece}, "content_block_delta")

    def closing(self) -> bytes:
        """The reason of the end, and the usage."""
        return (
            sse({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + sse({"type": "message_delta", "delta": self._ending(), "usage": self._usage()}, "message_delta")
            + sse({"type": "message_stop"}, "message_stop")
        )

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.ask.model,
            "content": content,
        }

    def _ending(self) -> dict[str, Any]:
        choice = self.choices[0]
        reason = {End.STOP: "end_turn", End.LENGTH: "max_tokens"}.get(choice.request.end or End.STOP)
        return {
            "stop_reason": "stop_sequence" if choice.stopped_by else reason,
            "stop_sequence": choice.stopped_by,
        }

    def _usage(self) -> dict[str, Any]:
        request = self.choices[0].request
        cached = request.cached_tokens or 0
        return {
            "input_tokens": request.prompt_tokens - cached,
            "output_tokens": request.produced,
            "cache_read_input_tokens": cached,
        }
