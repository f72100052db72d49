"""Parses the bodies of requests to the simulated engine.

Fields that change nothing about time or tokens (temperature, penalties, …) are accepted and ignored, like those that
vLLM does not know.  Fields whose effect is not simulated are refused.

A token is a byte of UTF-8, or an id that the client gives.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.errors import BadRequest, NotFound
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.requests import End, SimRequest, answer_to, root_key

MOST_TOKEN_ID = (1 << 32) - 1


class StreamOptions(msgspec.Struct):
    """What a stream contains besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that both APIs share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    n: int | None = 1
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    logprobs: int | bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBody(Sampling, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None


class ChatBody(Sampling, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class Ask(NamedTuple):
    """What a request asks for, whatever its dialect."""

    model: str
    adapter: str | None
    prompts: list[Sequence[int]]
    max_tokens: int | None
    """None: as many as there is room for."""
    stop: list[str]
    body: Sampling

    @property
    def options(self) -> StreamOptions:
        """What a stream contains."""
        return self.body.stream_options or StreamOptions()


class Choice(NamedTuple):
    """One answer: the request to the engine, and the part of its text that is shown."""

    request: SimRequest
    shown_tokens: int
    """Tokens before the stop string, which is not shown."""
    stopped_by: str | None

    def text(self, begin: int, end: int) -> str:
        """The shown text of the answer's tokens `begin` to `end`."""
        at = self.request.prompt_tokens
        return decode(self.request.tokens[at + begin : at + min(end, self.shown_tokens)])


def encode(text: str) -> bytes:
    """The tokens of a text."""
    return text.encode()


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens; one that is no byte is spelled by its number."""
    parts = (bytes([token]) if token < 256 else f"<|{token}|>".encode() for token in tokens)
    return b"".join(parts).decode(errors="replace")


def encode_chat(messages: Sequence[Message], tools: list[Any] | None, *, open_ended: bool = True) -> bytes:
    """The tokens of a conversation, to which an answer is added if it is `open_ended`. Raises BadRequest."""
    if not messages:
        raise BadRequest("messages: must have at least one message", field="messages")
    text = f"<|tools|>{json.dumps(tools, sort_keys=True)}<|end|>\n" if tools else ""
    for number, message in enumerate(messages):
        content = _content(message.content, f"messages[{number}].content")
        text += f"<|{message.role}|>\n{content}<|end|>\n"
    return encode(text + ("<|assistant|>\n" if open_ended else ""))


def ask_of(body: Sampling, served: Sequence[str]) -> Ask:
    """What a body asks for; the first of `served` is the model, the others are adapters.

    Raises BadRequest, or NotFound.
    """
    model = body.model or served[0]
    if model not in served:
        raise NotFound(f"The model `{model}` does not exist.", field="model")
    _refuse_missing(body)
    prompts, most, stop = _parts(body)
    if body.kv_transfer_params and "prompt_token_ids" in body.kv_transfer_params:
        prompts = [
            _token_ids(body.kv_transfer_params["prompt_token_ids"], "kv_transfer_params.prompt_token_ids")
        ]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise BadRequest(f"prompt[{number}]: must have at least one token", field="prompt")
    if most is not None and most < 1:
        raise BadRequest(f"max_tokens: must be at least 1, found {most}", field="max_tokens")
    if "" in stop:
        raise BadRequest("stop: must not contain an empty string", field="stop")
    return Ask(model, None if model == served[0] else model, prompts, most, stop, body)


def plan(ask: Ask, model: EngineModel, names: Sequence[str]) -> list[Choice]:
    """The requests to the engine, one for each prompt. Raises BadRequest."""
    root = root_key(ask.adapter, ask.body.cache_salt)
    if ask.max_tokens is not None and ask.max_tokens > model.max_model_tokens:
        raise BadRequest(
            f"max_tokens={ask.max_tokens} cannot be greater than max_model_len={model.max_model_tokens}. Please "
            "request fewer output tokens.",
            field="max_tokens",
        )
    choices = []
    for name, prompt in zip(names, ask.prompts, strict=True):
        room = model.max_model_tokens - len(prompt)
        if room < 1:
            raise BadRequest(
                f"This model's maximum context length is {model.max_model_tokens} tokens. However, the prompt has "
                f"{len(prompt)} tokens, which leaves no room for an answer. Please reduce the length of the prompt.",
                field="prompt",
            )
        most, end = min(ask.max_tokens or room, room), End.LENGTH
        natural = max(model.answer_tokens, ask.body.min_tokens)
        if natural < most and not ask.body.ignore_eos:
            most, end = natural, End.STOP
        answer = answer_to(prompt, most, ask.body.seed or 0)
        shown, stopped_by = most, None
        cuts = [(answer.find(word.encode(), ask.body.min_tokens), word) for word in ask.stop]
        for at, word in sorted(cut for cut in cuts if cut[0] >= 0)[:1]:
            shown, stopped_by, end = at, word, End.STOP
            answer = answer[: at + len(word.encode())]
        request = SimRequest(
            name,
            prompt,
            answer=answer,
            end=end,
            root=root,
            adapter=ask.adapter,
            salt=ask.body.cache_salt,
            transfer=ask.body.kv_transfer_params,
        )
        choices.append(Choice(request, shown, stopped_by))
    return choices


def _refuse_missing(body: Sampling) -> None:
    missing = {
        "n": (body.n or 1) != 1,
        "logprobs": body.logprobs is not None and body.logprobs is not False,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "echo": bool(body.echo),
    }
    for field, given in missing.items():
        if given:
            raise BadRequest(
                f"{field}: is not simulated, found {getattr(body, field)!r}; leave it out",
                field=field,
            )
    if body.priority:
        raise BadRequest(
            f"priority: found {body.priority}, but requests are served first come first served; leave it out",
            field="priority",
        )
    if body.min_tokens < 0:
        raise BadRequest(f"min_tokens: must be at least 0, found {body.min_tokens}", field="min_tokens")


def _parts(body: Sampling) -> tuple[list[Sequence[int]], int | None, list[str]]:
    """Prompts, most tokens of an answer, and stop strings of a body."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if isinstance(body, CompletionBody):
        return _prompts(body.prompt), body.max_tokens, stop
    assert isinstance(body, ChatBody)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return [encode_chat(body.messages, body.tools, open_ended=body.add_generation_prompt)], most, stop


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Sequence[int]]:
    if isinstance(prompt, str):
        return [encode(prompt)]
    if not prompt:
        raise BadRequest("prompt: must not be empty", field="prompt")
    if all(isinstance(each, int) for each in prompt):
        return [_token_ids(prompt, "prompt")]
    found: list[Sequence[int]] = []
    for number, each in enumerate(prompt):
        if isinstance(each, int):
            raise BadRequest(
                f"prompt[{number}]: must be a text or a list of ids like the others, found {each}",
                field="prompt",
            )
        found.append(encode(each) if isinstance(each, str) else _token_ids(each, f"prompt[{number}]"))
    return found


def _token_ids(value: Any, field: str) -> Sequence[int]:
    if not isinstance(value, list):
        raise BadRequest(f"{field}: must be a list of token ids, found {value!r:.80}", field=field)
    try:
        return array("I", value)
    except (TypeError, OverflowError):
        at, token = next(
            (at, token)
            for at, token in enumerate(value)
            if not isinstance(token, int) or not 0 <= token <= MOST_TOKEN_ID
        )
    raise BadRequest(
        f"{field}[{at}]: must be a token id from 0 to {MOST_TOKEN_ID}, found {token!r:.80}", field=field
    )


def _content(content: str | list[Part] | None, field: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.text is None:
            raise BadRequest(
                f"{field}[{number}]: the simulator knows parts with text only, found {part.type!r}",
                field="messages",
            )
    return "".join(part.text or "" for part in content)
