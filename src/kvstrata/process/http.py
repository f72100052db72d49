"""The common part of our HTTP APIs: errors as JSON, and the two probes (FastAPI).

Who may send which request is decided before (process/http_gate.py).  Errors are JSON `{"code", "message", "field"}`
with the codes of `kvstrata.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvstrata import __version__
from kvstrata.config.load import odd_value
from kvstrata.config.secrets import quoted
from kvstrata.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    KvstrataError,
    LayoutRefused,
    NotFound,
    NotLeading,
    NotPermitted,
    Refused,
    StorageError,
    Unavailable,
)
from kvstrata.process.http_body import TAKEN
from kvstrata.text import one_line

SPELLS_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
HTTP_STATUS = {
    BadRequest: 400,
    ConfigError: 400,
    NotPermitted: 403,
    NotFound: 404,
    LayoutRefused: 409,
    StorageError: 422,
    Refused: 429,
    Unavailable: 503,
    NotLeading: 503,
    DeadlineExceeded: 504,
}
"""HTTP status of each error; 500 for those not listed."""


def long_list(kind: type, max_items: int) -> WrapValidator:
    """Let a field of this list type accept a list that was taken out of the body (http_body.py).

    `kind`: `array` for token ids, `list` for texts.
    """

    def validate(value: Any, ordinary: ValidatorFunctionWrapHandler) -> Any:
        found = TAKEN.get({}).get(value) if isinstance(value, str) else None
        if found is None or not isinstance(found, kind):
            return ordinary(value)
        if len(found) > max_items:
            message = "List should have at most {max_items} items"
            raise PydanticCustomError("too_long", message, {"max_items": max_items})
        return found

    return WrapValidator(validate)


class ErrorBody(BaseModel):
    """Body of an answer that is an error."""

    code: str = Field(
        description="A stable word (docs/protocol.md), `not_found` for a thing that does not exist."
    )
    message: str = Field(description="What is wrong and what to change, for people.")
    field: str = Field(description="The wrong field; empty if no single field is wrong.")


def make_base(title: str, readiness: Callable[[], tuple[bool, str]]) -> tuple[FastAPI, list[Any]]:
    """An app with errors and probes, and the dependencies of every route that needs the token."""

    async def readable(request: Request) -> None:
        """Refuse lone surrogates, which JSON can spell but no answer, hash or log line can contain."""
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
    # The scheme is declared only for the API description.
    bearer = HTTPBearer(
        auto_error=False, description="The token of `http.token_file`, or of the process's start."
    )

    @app.exception_handler(KvstrataError)
    async def refused(_: Request, error: KvstrataError) -> JSONResponse:
        body = {"code": error.code, "message": error.message, "field": error.field}
        return JSONResponse(body, HTTP_STATUS.get(type(error), 500))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(f"{part!s:.80}" for part in first["loc"] if part not in ("body", "query"))
        found = f", found {quoted(field, first['input'])}" if first["type"] != "missing" else ""
        message = one_line(f"{field or 'body'}: {first['msg']}{found}")
        return JSONResponse({"code": BadRequest.code, "message": message, "field": field}, 400)

    @app.exception_handler(StarletteHTTPException)
    async def failed(request: Request, error: StarletteHTTPException) -> JSONResponse:
        code = {401: NotPermitted.code, 404: "not_found"}.get(error.status_code, BadRequest.code)
        body = {"code": code, "message": one_line(str(error.detail)), "field": ""}
        return JSONResponse(body, error.status_code, error.headers)

    @app.get("/healthz", tags=["probes"])
    async def healthz() -> dict[str, bool]:
        """The process answers."""
        return {"ok": True}

    @app.get("/readyz", tags=["probes"])
    async def readyz() -> JSONResponse:
        """Requests are served; otherwise 503 with the reason."""
        ready, why = readiness()
        return JSONResponse({"ready": ready, "why": why}, 200 if ready else 503)

    return app, [Depends(bearer)]
