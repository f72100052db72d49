"""The admin API (FastAPI).  It only asks the engine; it holds no state and decides nothing.

Off loopback every request carries `Authorization: Bearer TOKEN`; /healthz and /readyz are open for probes.
Errors are JSON `{"code", "message", "field"}` with the codes of `kvstrata.errors`.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Literal, Protocol

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvstrata import __version__
from kvstrata.errors import (
    BadRequest,
    DeadlineExceeded,
    KvstrataError,
    LayoutRefused,
    NotPermitted,
    Refused,
    Unavailable,
    UnknownSession,
)
from kvstrata.types import RequestIdentity

MAX_PREFETCH_TOKENS = 4_194_304

HTTP_STATUS = {
    BadRequest: 400,
    NotPermitted: 403,
    UnknownSession: 404,
    LayoutRefused: 409,
    Refused: 429,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
"""Status of an error's answer; 500 for those not listed."""


class AdminEngine(Protocol):
    """What the API needs of the server's engine."""

    @property
    def registry(self) -> CollectorRegistry:
        """Where the metrics are."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""

    def status(self) -> dict[str, Any]:
        """The instance at a glance."""

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """What a recent request hit and why its first missing chunk missed."""

    async def prewarm(
        self, *, model: str, request: RequestIdentity, tokens: list[int], budget_bytes: int, ttl_ms: int
    ) -> int:
        """Start loading the chunks of a prompt from L2; returns the job's number."""

    def job(self, number: int) -> dict[str, Any] | None:
        """Outcome of a prewarm so far."""

    async def clear(self, tier: str, tenant: str | None) -> dict[str, int]:
        """Drop what nobody uses; returns how many chunks left each tier."""


class ErrorBody(BaseModel):
    """What went wrong."""

    code: str = Field(description="A stable word, see docs/wire-codes.md; `not_found` for what is not there.")
    message: str = Field(description="What is wrong and what to change, for people.")
    field: str = Field(description="The field that was wrong, empty where none was.")


class PrefetchBody(BaseModel):
    """Which prompt to bring into L1 before any user asks."""

    model_config = ConfigDict(extra="forbid")
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=MAX_PREFETCH_TOKENS)]
    model: str = Field("", description="Model of an attached engine; empty: the only one.")
    adapter: str = ""
    tenant: str = ""
    salt: str = ""
    budget_bytes: int = Field(1 << 30, gt=0, description="Most bytes to load.")
    ttl_ms: int = Field(60_000, gt=0, le=3_600_000, description="Time after which no more is loaded.")


class ClearBody(BaseModel):
    """What to drop."""

    model_config = ConfigDict(extra="forbid")
    tier: Literal["l1", "l2", "all"]
    tenant: str | None = None


def make_app(engine: AdminEngine, *, token: str = "") -> FastAPI:
    """The API over one engine. With `token`, every request but the probes must carry it."""

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "missing or wrong bearer token", {"WWW-Authenticate": "Bearer"})

    app = FastAPI(
        title="kvstrata",
        version=__version__,
        docs_url="/docs",
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request cannot be fulfilled."},
            "5XX": {"model": ErrorBody, "description": "The server cannot fulfil it now, or failed."},
        },
    )
    # The scheme is declared for the description only; `authorised` decides.
    bearer = HTTPBearer(auto_error=False, description="Needed where the server has `http.token_file`.")
    guarded = [Depends(bearer), Depends(authorised)]

    @app.exception_handler(KvstrataError)
    async def refused(_: Request, error: KvstrataError) -> JSONResponse:
        body = {"code": error.code, "message": error.message, "field": error.field}
        return JSONResponse(body, HTTP_STATUS.get(type(error), 500))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        found = f", found {first['input']!r:.80}" if first["type"] != "missing" else ""
        message = f"{field or 'body'}: {first['msg']}{found}"
        return JSONResponse({"code": BadRequest.code, "message": message, "field": field}, 400)

    @app.get("/healthz", tags=["probes"])
    async def healthz() -> dict[str, bool]:
        """The process answers."""
        return {"ok": True}

    @app.get("/readyz", tags=["probes"])
    async def readyz() -> JSONResponse:
        """Requests are served; otherwise 503 and why not."""
        ready, why = engine.readiness()
        return JSONResponse({"ready": ready, "why": why}, 200 if ready else 503)

    @app.get("/metrics", tags=["metrics"], dependencies=guarded, response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(engine.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/status", dependencies=guarded)
    async def status() -> dict[str, Any]:
        """Pool, sessions, adapters and counters at a glance."""
        return engine.status()

    @app.get("/v1/explain/{request_id:path}", dependencies=guarded)
    async def explain(request_id: str) -> dict[str, Any]:
        """How many chunks of a recent request hit where, and why the first missing one missed."""
        found = engine.explain(request_id)
        if found is None:
            raise HTTPException(404, f"request_id: {request_id!r:.80} is not among the recent requests")
        return found

    @app.post("/v1/prefetch", status_code=202, dependencies=guarded)
    async def prefetch(body: PrefetchBody) -> dict[str, int]:
        """Start loading a prompt's chunks from L2 into L1; ask /v1/prefetch/{job} for the outcome."""
        identity = RequestIdentity(adapter=body.adapter, tenant=body.tenant, salt=body.salt)
        job = await engine.prewarm(
            model=body.model,
            request=identity,
            tokens=body.tokens,
            budget_bytes=body.budget_bytes,
            ttl_ms=body.ttl_ms,
        )
        return {"job": job}

    @app.get("/v1/prefetch/{job}", dependencies=guarded)
    async def prefetch_outcome(job: int) -> dict[str, Any]:
        """What a prewarm has loaded so far."""
        found = engine.job(job)
        if found is None:
            raise HTTPException(404, f"job: {job} is not among the recent ones")
        return found

    @app.post("/v1/clear", dependencies=guarded)
    async def clear(body: ClearBody) -> dict[str, int]:
        """Drop the chunks that nobody uses from a tier."""
        return await engine.clear(body.tier, body.tenant)

    @app.exception_handler(StarletteHTTPException)
    async def failed(_: Request, error: StarletteHTTPException) -> JSONResponse:
        code = {401: NotPermitted.code, 404: "not_found"}.get(error.status_code, BadRequest.code)
        body = {"code": code, "message": error.detail, "field": ""}
        return JSONResponse(body, error.status_code, error.headers)

    return app
