"""The controller's HTTP API and dashboard (FastAPI)."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.members import Denied
from kvstrata.controller.operations import NotThere, Operations
from kvstrata.controller.routes import act, live, look
from kvstrata.controller.routes.dashboard import add_dashboard
from kvstrata.process.http import HTTP_STATUS, make_base

_STATUS = {error.code: status for error, status in HTTP_STATUS.items()}


def make_app(
    cluster: Cluster,
    operations: Operations,
    sockets: Callable[[], dict[str, dict[str, int]]],
    *,
    token: str = "",
) -> FastAPI:
    """The API over one cluster. With `token`, every request but the probes and the dashboard's files must carry it."""
    app, guarded = make_base("kvstrata controller", cluster.readiness, token)

    @app.exception_handler(Denied)
    async def denied(_: Request, error: Denied) -> JSONResponse:
        body = {"code": error.code, "message": error.message, "field": error.field}
        return JSONResponse(body, _STATUS.get(error.code, 409))

    @app.exception_handler(NotThere)
    async def not_there(_: Request, error: NotThere) -> JSONResponse:
        return JSONResponse({"code": "not_found", "message": str(error), "field": ""}, 404)

    app.include_router(look.router(cluster, operations, sockets, guarded))
    app.include_router(act.router(cluster, operations, guarded))
    app.include_router(live.router(cluster, sockets, guarded))
    add_dashboard(app)
    return app
