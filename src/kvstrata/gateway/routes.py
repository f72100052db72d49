"""The API paths that the gateway forwards to engines, and the fields of their requests that it reads.

The gateway reads only those fields of a body that it needs to choose an engine; the engine gets the client's own bytes.
Paths that administer an engine (sleep, weights, adapters, caches) are not forwarded: only one engine would change.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, NamedTuple

import msgspec

from kvstrata.gateway.errors import Failure

RESPONSES = "/v1/responses"
MAX_MODEL_CHARS = 1_024
MAX_SESSION_CHARS = 1_024
MAX_TENANT_CHARS = 256
"""Maximum length of a tenant's name; connectors refuse longer ones."""


class Route(NamedTuple):
    """The properties of a path."""

    repeatable: bool = True
    """Whether a request may be retried at a second engine although the first may have begun to process it."""
    multipart: bool = False
    """Whether the body is multipart/form-data."""
    computes: bool = True
    """Whether a model runs for the request, so that its tenant is charged."""
    salted: bool = False
    """Whether the engine keeps the KV of tenants apart by the fields that the gateway adds to the body."""


_COMPUTES, _READS = Route(salted=True), Route(computes=False)
_AUDIO = Route(multipart=True)
_CHAT = "chat/completions completions responses messages"
ROUTES: dict[str, Route] = {
    **{
        f"/v1/{name}": _COMPUTES for name in f"{_CHAT} embeddings score rerank chat/completions/batch".split()
    },
    **{
        f"/{name}": _COMPUTES
        for name in ["score", "rerank", "v2/rerank", "classify", "pooling", "generative_scoring"]
    },
    "/inference/v1/generate": _COMPUTES,
    "/v2/embed": Route(),  # vLLM reads no `cache_salt` of Cohere's requests
    "/cohere/v2/chat": Route(),
    **{f"/v1/{name}/render": _READS for name in _CHAT.split()},
    **{f"/v1/{name}/derender": _READS for name in ("chat/completions", "completions")},
    **dict.fromkeys(("/v1/messages/count_tokens", "/tokenize", "/detokenize"), _READS),
    **{f"/v1/audio/{name}": _AUDIO for name in ("transcriptions", "translations")},
}
"""Paths of POST requests."""
_SPLIT_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES))
"""Paths whose prompts another engine could compute: a leg is the same request for one token."""
_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/messages": "chatcmpl-",
}
"""By path, the prefix that vLLM puts before `X-Request-ID` to form the id of the answer."""
_RESPONSE_PATH = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(?:/cancel)?")
_MODEL = re.compile(rb'[{,]\s*"model"\s*:\s*"([^"\\]{1,1024})"')
_TEXT = re.compile(rb'[{,]\s*"(?:messages|prompt|input)"\s*:\s*')
_STREAM = re.compile(rb'[{,]\s*"stream"\s*:\s*true')
_SEVERAL = re.compile(rb'\[\s*(?:"|\[)')
"""Matches the beginning of a list of prompts; lists of messages or of token ids begin differently."""
_FIELD_MODEL = re.compile(rb'\r\ncontent-disposition:[^\r\n]*;\s*name="?model"?\s*(?:;|\r\n)', re.I)
MAX_FIELDS = 64
MAX_FIELD_HEAD_BYTES = 4_096
MAX_BOUNDARY_BYTES = 256


class BodyFields(NamedTuple):
    """The fields that the gateway reads from a request's body."""

    model: str = ""
    """Empty: the body names no model, and any engine may serve the request."""
    session: str = ""
    """Name of the session that the request belongs to; empty: it names none."""
    repeatable: bool = True
    after_response: str = ""
    """Id of the stored response that this request continues; only the engine that made the response has it."""
    response_id: str = ""
    """Id that the request chooses for its response; empty: the engine draws one."""
    text: bytes = b""
    """JSON text of the prompt: messages, prompt or input."""
    context: bytes = b""
    """JSON texts of the other fields that the prompt's KV depends on (system prompt, tools, salt …), in fixed order."""
    salt: str = ""
    """The cache salt."""
    kv_tenant: str = ""
    """The tenant for whom the engine's connector looks the prompt up; empty: the engine's own tenant."""
    streams: bool = False
    """Whether the client asks for the answer as a stream."""
    adds: str = ""
    """Name of a field of the body that the gateway itself would add for a tenant; empty: the body has none."""
    splits: bool = False
    """Whether another engine could compute the prompt: the request has one prompt, needs nothing but its KV from that
    engine, and has no `kv_transfer_params` of its own in place of the gateway's."""


NO_TEXT = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: Any = None
    user: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    request_id: Any = None
    store: Any = None
    background: Any = None
    stream: Any = None
    messages: msgspec.Raw = NO_TEXT
    prompt: msgspec.Raw = NO_TEXT
    input: msgspec.Raw = NO_TEXT
    system: msgspec.Raw = NO_TEXT
    instructions: msgspec.Raw = NO_TEXT
    tools: msgspec.Raw = NO_TEXT
    tool_choice: msgspec.Raw = NO_TEXT
    chat_template: msgspec.Raw = NO_TEXT
    chat_template_kwargs: msgspec.Raw = NO_TEXT
    cache_salt: msgspec.Raw = NO_TEXT
    kv_transfer_params: msgspec.Raw = NO_TEXT
    n: Any = None
    best_of: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None

    @property
    def has_plain_answer(self) -> bool:
        """Whether the request asks for one answer, and for nothing about its prompt."""
        alone = self.n in (None, 1) and self.best_of in (None, 1) and self.prompt_logprobs is None
        return alone and not (self.echo or self.use_beam_search)


class _KvParams(msgspec.Struct):
    tenant: Any = msgspec.field(default=None, name="kvstrata.tenant")


_decode = msgspec.json.Decoder(_Body).decode
_kv_params = msgspec.json.Decoder(_KvParams | None).decode


def response_of(path: str) -> str:
    """The id of the stored response that a path names; empty: the path names none."""
    match = _RESPONSE_PATH.fullmatch(path)
    return match[1] if match else ""


def answer_id(path: str, word: str, response: str) -> str:
    """vLLM's id of the answer to request `word`; empty: unknown. `response`: id of the stored response, if any."""
    return _PREFIXES[path] + word if path in _PREFIXES else response


def any_engine_answers(path: str) -> bool:
    """Whether any engine may answer a GET of this path."""
    return path in ("/v1/models", "/version", "/health", "/ping") or path.startswith("/v1/models/")


def route_of(method: str, path: str) -> Route | Failure:
    """The properties of a request's path, or the reason why the gateway does not forward the request."""
    if method == "GET" and any_engine_answers(path):
        return _READS
    if method == "POST" and (route := ROUTES.get(path)) is not None:
        return route
    if response_of(path):
        # GET is allowed on the response itself only, POST on its cancellation only.
        if (method == "GET") != path.endswith("/cancel"):
            return Route(repeatable=method == "GET", computes=False)
    elif path not in ROUTES:
        says = (
            f"{path!a:.200} is not a path of this gateway; paths that administer an engine, or that only "
            "one engine answers, must be asked of the engine itself"
        )
        return Failure(404, "unknown_path", says)
    return Failure(405, "wrong_method", f"{method:.20} is not a method of {path:.200}")


def parse_body(path: str, route: Route, body: bytes) -> BodyFields | Failure:
    """Read the fields of a whole body."""
    if route.multipart:
        model = _checked(_model_in_form(body))
        return model if isinstance(model, Failure) else BodyFields(model)
    try:
        found = _decode(body)
    except msgspec.ValidationError:
        return Failure(400, "invalid_body", "The body must be a JSON object.")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Failure(400, "invalid_json", f"The body is not JSON: {error}.")
    # Claude Code names its session in `metadata`.
    user = found.metadata.get("user_id") if isinstance(found.metadata, dict) else None
    names = (found.prompt_cache_key, found.user, user)
    session = next((one for one in names if isinstance(one, str) and one), "")
    after = found.previous_response_id if isinstance(found.previous_response_id, str) else ""
    # A retry would store the response, or run the background work, on two engines.
    stores = path == RESPONSES and (found.store is not False or bool(found.background))
    text = next((bytes(one) for one in (found.messages, found.prompt, found.input) if one), b"")
    tenant = _tenant_in(found.kv_transfer_params)
    more = (
        found.system, found.instructions, found.tools, found.tool_choice, found.chat_template,
        found.chat_template_kwargs, found.cache_salt, tenant.encode(),
    )  # fmt: skip
    model = _checked(found.model)
    if isinstance(model, Failure):
        return model
    return BodyFields(
        model,
        session[:MAX_SESSION_CHARS],
        route.repeatable and not stores,
        after,
        found.request_id if path == RESPONSES and isinstance(found.request_id, str) else "",
        text,
        b"\0".join(more),
        _text_of(found.cache_salt),
        tenant,
        found.stream is True,
        "cache_salt" if found.cache_salt else "kv_transfer_params" if found.kv_transfer_params else "",
        path in _SPLIT_PATHS
        and found.has_plain_answer
        and not (found.kv_transfer_params or after or _SEVERAL.match(text)),
    )


def parse_body_start(path: str, route: Route, body: bytes, *, several: bool) -> BodyFields | Failure:
    """Read the fields from the first part of a long body. `several`: the engines serve several models."""
    if route.multipart:
        name = _model_in_form(body)
    else:
        match = _MODEL.search(body)
        name = match[1].decode("utf-8", "replace") if match else None
    if name is None and several:
        says = f"model: not among the first {len(body)} bytes of the body; put it before the long fields"
        return Failure(413, "model_too_late", says, "model")
    text = None if route.multipart else _TEXT.search(body)
    repeatable = route.repeatable and path != RESPONSES
    return BodyFields(
        name or "",
        repeatable=repeatable,
        text=body[text.end() :] if text else b"",
        streams=bool(_STREAM.search(body)),
    )


def _tenant_in(kv_transfer_params: bytes) -> str:
    try:
        params = _kv_params(kv_transfer_params) if kv_transfer_params else None
    except (msgspec.ValidationError, UnicodeDecodeError):
        return ""  # the engine answers with an error
    named = params.tenant if params is not None else None
    return named[: MAX_TENANT_CHARS + 1] if isinstance(named, str) else ""


def _model_in_form(body: bytes) -> str | None:
    """The field `model` of a form; None: not among the first MAX_FIELDS fields, or no form. Takes one pass."""
    at = body.find(b"\r\n", 0, MAX_BOUNDARY_BYTES)
    if at < 0 or not body.startswith(b"--"):
        return None
    boundary = b"\r\n" + body[:at]
    for _ in range(MAX_FIELDS):
        head = body.find(b"\r\n\r\n", at, at + MAX_FIELD_HEAD_BYTES)
        end = body.find(boundary, head + 4) if head >= 0 else -1
        if end < 0:
            return None
        if _FIELD_MODEL.search(body, at, head + 2):
            return body[head + 4 : min(end, head + 5 + 4 * MAX_MODEL_CHARS)].decode("utf-8", "replace")
        at = end + len(boundary)
    return None


def _text_of(raw: msgspec.Raw) -> str:
    """The decoded JSON string; empty if `raw` is no JSON string."""
    try:
        return msgspec.json.decode(raw, type=str) if bytes(raw) else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def ids_in(text: bytes) -> array[int] | None:
    """The token ids of a prompt that is given as a list of ids; None if it has another form."""
    if not text.startswith(b"[") or not text[1:2].isdigit():
        return None
    try:
        return array("I", msgspec.json.decode(text, type=list[int]))
    except (msgspec.DecodeError, OverflowError):
        return None


def _checked(model: Any) -> str | Failure:
    """The model's name if it is valid; empty: the body names none."""
    if model is None:
        return ""
    if not isinstance(model, str) or len(model) > MAX_MODEL_CHARS:
        says = f"model: must be a model's name of at most {MAX_MODEL_CHARS} characters, found {model!a:.80}"
        return Failure(400, "invalid_model", says, "model")
    return model
