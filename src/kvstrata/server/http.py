"""The admin API (FastAPI).  Each route asks one part of the instance; it holds no state and decides nothing.

The OpenAPI page is made from the pydantic models of the bodies.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Path, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from kvstrata.observability.exposition import MEDIA_TYPE, Pages
from kvstrata.observability.logging import EventLog
from kvstrata.process import http_log_level
from kvstrata.process.http import long_list, make_base
from kvstrata.process.http_body import MAX_TOKENS
from kvstrata.server.admin.admin import Admin
from kvstrata.types import GB, RequestIdentity


class PrefetchBody(BaseModel):
    """A prompt to load into L1 before any user asks."""

    model_config = ConfigDict(extra="forbid")
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=1 << 32)]],
        Field(max_length=MAX_TOKENS, fail_fast=True),
        long_list(array, MAX_TOKENS),
    ]
    model: str = Field("", description="Model of an attached engine; empty: the only one.")
    adapter: str = Field("", description="Name of a LoRA adapter; empty: the model itself.")
    tenant: str = ""
    salt: str = ""
    budget_bytes: int = Field(1 << 30, gt=0, description="Maximum number of bytes to load.")
    ttl_ms: int = Field(60_000, gt=0, le=3_600_000, description="Time after which no more is loaded.")


class ClearBody(BaseModel):
    """The chunks to drop."""

    model_config = ConfigDict(extra="forbid")
    tier: Literal["l1", "l2", "all"]
    tenant: str | None = Field(None, description="Only this tenant's chunks; with `l1` alone.")
    wait: bool = Field(
        False, description="Answer when the bytes of all dropped chunks are free, at most 30 s later."
    )


class ClearStrandedBody(BaseModel):
    """The stranded session whose extents no device writes any more."""

    model_config = ConfigDict(extra="forbid")
    session: str = Field(description="As listed, or `all`.", min_length=1, max_length=64)


class QuotaBody(BaseModel):
    """How much of L1 a tenant may have."""

    model_config = ConfigDict(extra="forbid")
    quota_gb: float = Field(description="In GB of 2^30 bytes.", gt=0, le=1 << 20)


def make_app(admin: Admin) -> FastAPI:
    """The API of one instance."""

    app, guarded = make_base("kvstrata", admin.readiness)
    pages, tiers = Pages(admin.collector), admin.tiers

    @app.get("/healthcheck", tags=["probes"])
    async def healthcheck() -> JSONResponse:
        """The same as /readyz, under the name and with the words of LMCache."""
        ready, why = admin.readiness()
        if ready:
            return JSONResponse({"status": "healthy"})
        return JSONResponse({"status": "unhealthy", "reason": why}, 503)

    @app.get("/metrics", tags=["metrics"], dependencies=guarded, response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format; at most 0.25 s old."""
        return Response(pages.page(), media_type=MEDIA_TYPE)

    @app.get("/v1/status", dependencies=guarded)
    async def status() -> dict[str, Any]:
        """The status document: pool, sessions, adapters, counters."""
        return admin.board.document()

    @app.get("/v1/explain", dependencies=guarded)
    async def recent_requests() -> dict[str, list[Any]]:
        """The last 20 lookups, newest first, each as under its request's id."""
        return {"recent": admin.explainer.recent(20)}

    @app.get("/v1/explain/{request_id:path}", dependencies=guarded)
    async def explain(request_id: str) -> dict[str, Any]:
        """How many chunks of a recent request hit, and where, and why the first missing chunk missed."""
        found = admin.explainer.explain(request_id)
        if not found["known"]:
            raise HTTPException(404, f"request_id: {request_id!r:.80} is not among the recent requests")
        return found

    @app.post("/v1/prefetch", status_code=202, dependencies=guarded)
    async def prefetch(body: PrefetchBody) -> dict[str, int]:
        """Start loading a prompt's chunks from L2 into L1; ask /v1/prefetch/{job} for the outcome."""
        identity = RequestIdentity(adapter=body.adapter, tenant=body.tenant, salt=body.salt)
        job = await admin.prewarms.prewarm(
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
        found = admin.prewarms.job(job)
        if found is None:
            raise HTTPException(404, f"job: {job} is not among the recent ones")
        return found

    @app.post("/v1/clear", dependencies=guarded)
    async def clear(body: ClearBody) -> dict[str, dict[str, int]]:
        """Drop the chunks of L1, L2 or both. Puts that are under way go on; a clear of L2 drops their records too.

        `pending`: chunks dropped from L1, now or before, whose bytes are still in use: `held` by a put or a read of the
        server, `leased` by an engine. `kept`: those that are `pinned`, or that another instance reads there.
        """
        done = await admin.clearing.clear(body.tier, body.tenant, wait=body.wait)
        return done.document()

    @app.get("/v1/stranded", dependencies=guarded)
    async def stranded() -> dict[str, list[Any]]:
        """Sessions with registered memory that ended while no server watched, and the extents that they quarantine.

        No server saw their device stop, so the device may still write there. Only the host's operator can rule it out.
        """
        return {"stranded": admin.stranded.rows()}

    @app.post("/v1/stranded/clear", dependencies=guarded)
    async def clear_stranded(body: ClearStrandedBody) -> dict[str, list[Any]]:
        """Free a stranded session's extents. Do it only when neither the system nor the driver lists its process."""
        return {"cleared": await admin.stranded.clear(body.session)}

    @app.put("/v1/tenants/{tenant:path}/quota", dependencies=guarded)
    async def change_quota(
        tenant: Annotated[str, Path(min_length=1, max_length=256)], body: QuotaBody
    ) -> dict[str, Any]:
        """Set how much of L1 a tenant may have, until the server ends: put it into the settings (`quotas_gb`) too."""
        return admin.change_quota(tenant, round(body.quota_gb * GB))

    app.include_router(http_log_level.router(EventLog("server"), guarded))

    def named(name: str, answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            there = ", ".join(tiers.names()) or "none"
            raise HTTPException(404, f"name: there is no adapter {name!r:.80}; there are: {there}")
        return answer

    @app.get("/v1/l2/adapters", dependencies=guarded)
    async def l2_adapters() -> dict[str, list[Any]]:
        """The L2 adapters in the order in which lookups ask them."""
        return {"adapters": await tiers.rows()}

    @app.post("/v1/l2/adapters/{name}/pause", dependencies=guarded)
    async def pause_l2_adapter(name: str) -> dict[str, Any]:
        """Ask an adapter's storage nothing until it is resumed or the server restarts.

        Chunks that wait for a put are skipped. `under_way` counts operations that have not ended.
        """
        return named(name, tiers.pause(name))

    @app.post("/v1/l2/adapters/{name}/resume", dependencies=guarded)
    async def resume_l2_adapter(name: str) -> dict[str, Any]:
        """Use a paused adapter as before, from now on."""
        return named(name, tiers.resume(name))

    return app
