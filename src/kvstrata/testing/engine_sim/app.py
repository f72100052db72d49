"""vLLM's HTTP interface over a simulated engine (ASGI).

A request ends in the engine when its client disconnects, whether it streams or not: each handler waits for the answer
and for the disconnect at the same time.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvstrata.errors import BadRequest, KvstrataError, NotFound
from kvstrata.testing.engine_sim.bodies import (
    Sampling,
    TokenizeBody,
    ask_of,
    decode,
    encode,
    encode_chat,
    plan,
)
from kvstrata.testing.engine_sim.dialects import Chat, Completions
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.live import LiveEngine
from kvstrata.testing.engine_sim.metrics import CONTENT_TYPE, Metrics
from kvstrata.testing.engine_sim.zmq_events import Publisher

RANK = b"x-data-parallel-rank"
BODY_BYTES = 64 << 20
"""Largest body that is read."""
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
DIALECTS: dict[str, type[Completions]] = {"/v1/completions": Completions, "/v1/chat/completions": Chat}
T = TypeVar("T")


class Face(NamedTuple):
    """What the routes answer for."""

    ranks: tuple[LiveEngine, ...]
    """The data-parallel ranks: one, or several with caches and queues of their own."""
    metrics: Metrics
    publishers: tuple[Publisher, ...]
    """By rank; empty: no KV events are published."""
    served: tuple[str, ...]
    """The model's name, and its adapters'."""
    renders: bool

    @property
    def model(self) -> EngineModel:
        """Of every rank."""
        return self.ranks[0].engine.model

    def rank_of(self, headers: Iterable[tuple[bytes, bytes]]) -> LiveEngine:
        """The rank for a request: the one that it names, else one with the fewest requests. Raises BadRequest."""
        named = next((value for name, value in headers if name == RANK), b"").decode("latin-1")
        # As vLLM does, what is no number is passed over.
        if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", named):
            return min(self.ranks, key=lambda one: one.engine.running + one.engine.waiting)
        rank = int(named)
        if not 0 <= rank < len(self.ranks):
            raise BadRequest(
                f"data_parallel_rank {rank} is out of range [0, {len(self.ranks)}).",
                field="data_parallel_rank",
            )
        return self.ranks[rank]


class ClientGone(Exception):
    """The client closed its connection."""


def make_app(face: Face) -> Starlette:
    """The ASGI application."""
    started = int(time.time())

    async def health(_: Request) -> Response:
        return Response()

    async def models(_: Request) -> Response:
        most = face.model.max_model_tokens
        return JSONResponse(
            {"object": "list", "data": [_card(face.served, n, most, started) for n in face.served]}
        )

    async def metrics(_: Request) -> Response:
        return Response(face.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def sources(_: Request) -> Response:
        return JSONResponse({str(rank): one.described() for rank, one in enumerate(face.publishers)})

    async def reset(_: Request) -> Response:
        cleared = [one.clear_cache() for one in face.ranks]
        return JSONResponse({"success": all(cleared)})

    async def tokenize(request: Request) -> Response:
        body = parse(await read(request.receive), TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("prompt: give either prompt or messages", field="prompt")
        if body.messages is not None:
            tokens = encode_chat(body.messages, body.tools, open_ended=body.add_generation_prompt)
        else:
            tokens = encode(body.prompt or "")
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": face.model.max_model_tokens,
                "tokens": list(tokens),
                "token_strs": [decode([token]) for token in tokens] if body.return_token_strs else None,
            }
        )

    routes: list[Route] = [
        Route("/health", health),
        Route("/ping", health),
        Route("/v1/models", models),
        Route("/metrics", metrics),
        Route("/kv_event_sources", sources),
        Route("/reset_prefix_cache", reset, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
    ]
    for path, dialect in DIALECTS.items():
        routes.append(Route(path, _Answers(face, dialect), methods=["POST"]))
        routes.append(Route(f"{path}/render", _render_of(face, dialect), methods=["POST"]))
    return Starlette(
        routes=routes,
        exception_handlers={KvstrataError: _refused, HTTPException: _no_route, ClientGone: _gone},
    )


class _Answers:
    """The handler of one dialect; an ASGI application of its own, since it listens for the client's end."""

    def __init__(self, face: Face, dialect: type[Completions]) -> None:
        self._face = face
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given_id = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"x-request-id"), "")
        raw = await read(receive)
        body = parse(raw, self._dialect.body)
        ask = ask_of(body, self._face.served)
        request_id = body.request_id or given_id or secrets.token_hex(16)
        # As vLLM names the requests of an answer.
        names = [
            f"{self._dialect.prefix}{request_id}-{i}-{secrets.token_hex(4)}" for i in range(len(ask.prompts))
        ]
        live = self._face.rank_of(scope["headers"])
        choices = plan(ask, live.engine.model, names)
        requests = [choice.request for choice in choices]
        live.check(requests)
        answer = self._dialect(ask, choices, request_id)
        changed = live.submit(requests)
        work = self._stream if body.stream else self._whole
        try:
            await until_gone(receive, work(answer, changed, send))
        except ClientGone:
            pass  # nobody is there to be told
        finally:
            live.abort(requests)

    async def _whole(self, answer: Completions, changed: asyncio.Event, send: Send) -> None:
        while any(choice.request.end is None for choice in answer.choices):
            await changed.wait()
            changed.clear()
        body = msgspec.json.encode(answer.whole())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, answer: Completions, changed: asyncio.Event, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = answer.opening()
        sent = [0] * len(answer.choices)
        open_choices = set(range(len(sent)))
        while open_choices:
            await changed.wait()
            changed.clear()
            pieces = opening
            for index in sorted(open_choices):
                choice = answer.choices[index]
                produced, end = choice.request.produced, choice.request.end
                if produced > sent[index] or end is not None:
                    pieces += answer.delta(index, choice.text(sent[index], produced), end)
                    sent[index] = produced
                if end is not None:
                    open_choices.discard(index)
            if pieces:
                opening = b""
                await send({"type": "http.response.body", "body": pieces, "more_body": True})
        await send({"type": "http.response.body", "body": answer.closing()})


async def read(receive: Receive) -> bytes:
    """The whole body of a request. Raises BadRequest if it is too large, and ClientGone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_BYTES:
            raise BadRequest(f"body: must have at most {BODY_BYTES} bytes; send less", field="body")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, or raise ClientGone once the client has gone; `work` is then cancelled and has ended."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


B = TypeVar("B", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[B]) -> B:
    """A body of a kind. Raises BadRequest that names the field."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `")
        field = path.removesuffix("`").removeprefix("$.") or "body"
        raise BadRequest(f"{field}: {what}", field=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"body: is not JSON: {error}", field="body") from None


def _render_of(face: Face, dialect: type[Completions]) -> Callable[[Request], Awaitable[Response]]:
    async def render(request: Request) -> Response:
        if not face.renders:
            return _error(DISABLED, "PermissionDeniedError", HTTPStatus.FORBIDDEN)
        body: Sampling = parse(await read(request.receive), dialect.body)
        ask = ask_of(body, face.served)
        rendered = [
            {
                "request_id": f"{dialect.prefix}{body.request_id or secrets.token_hex(16)}",
                "token_ids": list(prompt),
                "features": None,
                "sampling_params": {"max_tokens": ask.max_tokens, "stop": ask.stop, "seed": body.seed},
                "model": ask.model,
                "stream": bool(body.stream),
                "cache_salt": body.cache_salt,
                "priority": body.priority,
                "kv_transfer_params": body.kv_transfer_params,
            }
            for prompt in ask.prompts
        ]
        return JSONResponse(rendered if dialect is Completions else rendered[0])

    return render


def _card(served: tuple[str, ...], name: str, most: int, created: int) -> dict[str, Any]:
    adapter = name != served[0]
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": name,
        "parent": served[0] if adapter else None,
        "max_model_len": None if adapter else most,
        "permission": [],
    }


def _error(message: str, kind: str, status: HTTPStatus, field: str | None = None) -> Response:
    body = {"error": {"message": message, "type": kind, "param": field, "code": int(status)}}
    return JSONResponse(body, status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, KvstrataError)
    missing = isinstance(error, NotFound)
    status = HTTPStatus.NOT_FOUND if missing else HTTPStatus.BAD_REQUEST
    kind = "NotFoundError" if missing else "BadRequestError"
    return _error(error.message, kind, status, error.field or None)


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    return _error(str(error.detail), status.phrase, status)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)
