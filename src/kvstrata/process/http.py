"""The operations of a process as routes of FastAPI, with the description of the API at /docs and /openapi.json.

The gate decides beforehand who may send which request (process/http_gate.py).  Errors are JSON `{"code", "message",
"field"}` with the codes of `kvstrata.errors`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from kvstrata import __version__
from kvstrata.errors import BadRequest
from kvstrata.process.operations import Error, Operation, Reply

SCHEMAS = "#/components/schemas/{name}"
SECURITY = {"HTTPBearer": {"type": "http", "scheme": "bearer",
                           "description": "The token of `http.token_file`, or of the process's start."}}  # fmt: skip

Answer = Callable[[Operation, Request], Awaitable[Reply]]


def make_app(title: str, operations: Sequence[Operation], answer: Answer) -> FastAPI:
    """The API. `answer` carries out an operation for a request."""
    app = FastAPI(title=title, version=__version__, docs_url="/docs", redoc_url=None)
    schemas: dict[str, Any] = {}

    def content(kind: Any) -> dict[str, Any]:
        [schema], found = msgspec.json.schema_components([kind], ref_template=SCHEMAS)
        schemas.update(found)
        return {"application/json": {"schema": schema}}

    errors: dict[str, Any] = {
        "4XX": {"description": "The request cannot be fulfilled.", "content": content(Error)},
        "5XX": {"description": "The server cannot fulfil it now, or failed.", "content": content(Error)},
    }
    for one in operations:
        described: dict[str, Any] = {
            "parameters": _parameters(one),
            "responses": {str(one.status): {"content": content(one.answer)}, **errors},
            **({} if one.public else {"security": [{"HTTPBearer": []}]}),
            **({} if one.body is None else {"requestBody": {"content": content(one.body), "required": True}}),
        }
        app.add_api_route(
            one.path,
            _endpoint(one, answer),
            methods=[one.method],
            name=one.run.__name__,
            description=one.run.__doc__,
            tags=[one.tag] if one.tag else None,
            include_in_schema=not one.hidden,
            openapi_extra=described,
            status_code=one.status,
            response_class=Response,
            response_model=None,
        )

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        code = "not_found" if error.status_code == 404 else BadRequest.code
        body = Error(code, str(error.detail), "")
        return Response(msgspec.json.encode(body), error.status_code, error.headers, "application/json")

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = FastAPI.openapi(app)
            made["components"] = {"schemas": schemas, "securitySchemes": SECURITY}
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _parameters(one: Operation) -> list[dict[str, Any]]:
    """The fields of a request that come in the path or in the query, as OpenAPI describes them."""
    return [
        {
            "name": field.name,
            "in": "path" if field.name in one.in_path else "query",
            "required": field.required or field.name in one.in_path,
            "schema": msgspec.json.schema(field.type),
        }
        for field in msgspec.structs.fields(one.texts)
    ]


def _endpoint(one: Operation, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        reply = await answer(one, request)
        return Response(reply.body, reply.status, dict(reply.headers), reply.media_type)

    return endpoint
