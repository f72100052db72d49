"""What our HTTP APIs do alike: errors as JSON, bearer token, and the two probes (FastAPI).

Off loopback every request carries `Authorization: Bearer TOKEN`; /healthz and /readyz are open for probes.
Errors are JSON `{"code", "message", "field"}` with the codes of `kvstrata.errors`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvstrata import __version__
from kvstrata.config.load import odd_value
from kvstrata.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    KvstrataError,
    LayoutRefused,
    NotLeading,
    NotPermitted,
    Refused,
    StorageError,
    Unavailable,
    UnknownSession,
)

SPELLS_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
HTTP_STATUS = {
    BadRequest: 400,
    ConfigError: 400,
    NotPermitted: 403,
    UnknownSession: 404,
    LayoutRefused: 409,
    StorageError: 422,
    Refused: 429,
    Unavailable: 503,
    NotLeading: 503,
    DeadlineExceeded: 504,
}
"""Status of an error's answer; 500 for those not listed."""


class ErrorBody(BaseModel):
    """What went wrong."""

    code: str = Field(description="A stable word, see docs/wire-codes.md; `not_found` for what is not there.")
    message: str = Field(description="What is wrong and what to change, for people.")
    field: str = Field(description="The field that was wrong, empty where none was.")


def make_base(title: str, readiness: Callable[[], tuple[bool, str]], token: str) -> tuple[FastAPI, list[Any]]:
    """An app with errors and probes, and the dependencies of every guarded route.

    With `token`, every guarded request must carry it.
    """

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "missing or wrong bearer token", {"WWW-Authenticate": "Bearer"})

    async def readable(request: Request) -> None:
        """JSON can spell lone surrogates, which no answer, hash or log line can contain."""
        if not SPELLS_SURROGATE.search(await request.body()):
            return
        if odd := odd_value(await request.json()):
            field, must, found = odd
            raise BadRequest(f"{field or 'body'}: {must}, found {found!a:.80}", field=field)

    app = FastAPI(
        title=title,
        version=__version__,
        dependencies=[Depends(readable)],
        docs_url="/docs",
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request cannot be fulfilled."},
            "5XX": {"model": ErrorBody, "description": "The server cannot fulfil it now, or failed."},
        },
    )
    # The scheme is declared for the description only; `authorised` decides.
    bearer = HTTPBearer(auto_error=False, description="Needed where the server has `http.token_file`.")

    @app.exception_handler(KvstrataError)
    async def refused(_: Request, error: KvstrataError) -> JSONResponse:
        body = {"code": error.code, "message": error.message, "field": error.field}
        return JSONResponse(body, HTTP_STATUS.get(type(error), 500))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
        found = f", found {first['input']!r:.80}" if first["type"] != "missing" else ""
        message = f"{field or 'body'}: {first['msg']}{found}"
        return JSONResponse({"code": BadRequest.code, "message": message, "field": field}, 400)

    @app.exception_handler(StarletteHTTPException)
    async def failed(_: Request, error: StarletteHTTPException) -> JSONResponse:
        code = {401: NotPermitted.code, 404: "not_found"}.get(error.status_code, BadRequest.code)
        body = {"code": code, "message": error.detail, "field": ""}
        return JSONResponse(body, error.status_code, error.headers)

    @app.get("/healthz", tags=["probes"])
    async def healthz() -> dict[str, bool]:
        """The process answers."""
        return {"ok": True}

    @app.get("/readyz", tags=["probes"])
    async def readyz() -> JSONResponse:
        """Requests are served; otherwise 503 and why not."""
        ready, why = readiness()
        return JSONResponse({"ready": ready, "why": why}, 200 if ready else 503)

    return app, [Depends(bearer), Depends(authorised)]
