"""Formats the answers of both APIs: as one JSON object, and as a stream of server-sent events.

A stream is `opening`, then `delta` for each piece of text, then `closing`.  Every method returns the bytes to send.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from kvstrata.testing.engine_sim.bodies import Ask, ChatBody, Choice, CompletionBody, Sampling
from kvstrata.testing.engine_sim.requests import End

DONE = b"data: [DONE]\n\n"


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """vLLM's `usage` of answers as far as they are."""
    requests = [choice.request for choice in choices]
    prompt = sum(request.prompt_tokens for request in requests)
    answer = sum(request.produced for request in requests)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + answer,
        "completion_tokens": answer,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens or 0 for request in requests)},
    }


class Completions:
    """The answer to one request of `/v1/completions`. `choices` are complete when `whole` and `closing` are called."""

    body: ClassVar[type[Sampling]] = CompletionBody
    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, ask: Ask, choices: list[Choice], request_id: str) -> None:
        self.ask = ask
        self.choices = choices
        self.id = f"{self.prefix}{request_id}"
        self.created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """A `text_completion` or `chat.completion`."""
        choices = [
            self._shown(index, choice.text(0, choice.request.produced), choice.request.end, whole=True)
            for index, choice in enumerate(self.choices)
        ]
        return self._head(self.kind, choices) | {"usage": usage(self.choices), "kv_transfer_params": None}

    def opening(self) -> bytes:
        """What is sent before the first token."""
        return b""

    def delta(self, index: int, text: str, end: End | None) -> bytes:
        """A chunk with a piece of the answer of one choice; `end` with its last."""
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
