"""The controller's HTTP API and dashboard (FastAPI)."""

from __future__ import annotations

from fastapi import FastAPI

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.door import Door
from kvstrata.controller.operations import Operations
from kvstrata.controller.routes import act, live, login, look
from kvstrata.controller.routes.dashboard import add_dashboard
from kvstrata.controller.surroundings import Surroundings
from kvstrata.observability.logging import EventLog
from kvstrata.process import http_log_level
from kvstrata.process.http import make_base


def make_app(
    cluster: Cluster,
    operations: Operations,
    around: Surroundings,
    door: Door,
) -> FastAPI:
    """The API of one cluster."""
    app, guarded = make_base("kvstrata controller", cluster.readiness)

    app.include_router(look.router(cluster, operations, around, guarded))
    app.include_router(act.router(cluster, operations, guarded))
    app.include_router(live.router(cluster, around, guarded))
    app.include_router(http_log_level.router(EventLog("controller"), guarded))
    app.include_router(login.router(door, guarded))
    add_dashboard(app)
    return app
