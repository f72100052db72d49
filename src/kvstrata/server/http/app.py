"""The admin API (FastAPI).  It only asks the engine; it holds no state and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, HTTPException, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from kvstrata.errors import Unavailable
from kvstrata.process.http import make_base
from kvstrata.types import RequestIdentity

MAX_PREFETCH_TOKENS = 4_194_304
MAX_WAIT_S = 600.0
DEFAULT_WAIT_S = 10.0


class AdapterAdmin(Protocol):
    """What the API needs to change the set of L2 adapters."""

    async def rows(self) -> list[dict[str, Any]]:
        """A row for each adapter, nearest first."""

    def missing(self) -> list[str]:
        """Adapters of the settings that are not there any more."""

    async def add(
        self, entry: Mapping[str, Any], *, position: int | None, backfill: bool, may_name_code: bool
    ) -> dict[str, Any]:
        """Open an adapter and take it in; its row."""

    async def drain(self, name: str, *, loads: bool, wait_s: float) -> dict[str, Any] | None:
        """Give an adapter nothing new; its row, None when there is none of that name."""

    async def resume(self, name: str, *, backfill: bool) -> dict[str, Any] | None:
        """Use a drained adapter again; its row, None when there is none of that name."""

    async def remove(self, name: str, *, wait_s: float) -> dict[str, Any] | None:
        """Drain an adapter, close it and take it out; what came of it, None when there is none of that name."""

    def names(self) -> list[str]:
        """Names of all adapters."""


class ClearOutcome(Protocol):
    """What a clear did."""

    def document(self) -> dict[str, dict[str, int]]:
        """As told to an admin."""


class AdminEngine(Protocol):
    """What the API needs of the server's engine."""

    @property
    def l2(self) -> AdapterAdmin | None:
        """The L2 adapters; None while the server starts."""

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

    async def clear(self, tier: str, tenant: str | None, *, wait: bool = False) -> ClearOutcome:
        """Drop chunks: nobody finds them any more when this returns."""

    def stranded(self) -> list[dict[str, Any]]:
        """Sessions that ended unseen and whose device may still write."""

    async def clear_stranded(self, session: str) -> list[dict[str, Any]]:
        """Free what they keep; those that were cleared."""


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
    wait: bool = Field(
        False, description="Answer when the bytes of all dropped chunks are free, at most 30 s later."
    )


class ClearAnswer(BaseModel):
    """What was dropped, and what is left to do."""

    cleared: dict[Literal["l1", "l2"], int] = Field(
        description="Chunks that left each tier: nobody finds them any more."
    )
    pending: dict[Literal["held", "leased"], int] = Field(
        description="Chunks dropped from L1, now or before, whose bytes are still in use: `held` by a put or a read of "
        "the server, `leased` by an engine. They are free when that ends."
    )
    kept: dict[Literal["pinned"], int] = Field(
        description="Chunks that stay in L1: pinned through the controller, or being read by another instance."
    )


class ClearStrandedBody(BaseModel):
    """Whose extents no device writes any more."""

    model_config = ConfigDict(extra="forbid")
    session: str = Field(description="As listed, or `all`.", min_length=1, max_length=64)


class AddAdapterBody(BaseModel):
    """An L2 adapter for a server that runs."""

    model_config = ConfigDict(extra="forbid")
    adapter: dict[str, Any] = Field(description="What `--l2-adapter` takes.")
    position: int | None = Field(
        None, ge=0, description="Place in the order in which lookups ask, from 0; by default the last."
    )
    backfill: bool = Field(
        False,
        description="Offer it once what is in L1 already; otherwise it gets what its policy chooses from now on.",
    )


class DrainAdapterBody(BaseModel):
    """How an adapter is drained."""

    model_config = ConfigDict(extra="forbid")
    loads: bool = Field(True, description="Lookups go on to ask it and to load from it.")
    wait_s: float = Field(
        DEFAULT_WAIT_S,
        ge=0,
        le=MAX_WAIT_S,
        description="Longest wait for the answer; draining goes on after it.",
    )


class ResumeAdapterBody(BaseModel):
    """How a drained adapter is used again."""

    model_config = ConfigDict(extra="forbid")
    backfill: bool = Field(
        False, description="Offer it once what is in L1; otherwise what was skipped meanwhile is not put."
    )


def make_app(engine: AdminEngine, *, token: str = "") -> FastAPI:
    """The API over one engine. With `token`, every request but the probes must carry it."""

    app, guarded = make_base("kvstrata", lambda: engine.readiness(), token)

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
    async def clear(body: ClearBody) -> ClearAnswer:
        """Drop the chunks of a tier. Puts that are under way go on, and L2 has their records afterwards."""
        done = await engine.clear(body.tier, body.tenant, wait=body.wait)
        return ClearAnswer.model_validate(done.document())

    @app.get("/v1/stranded", dependencies=guarded)
    async def stranded() -> dict[str, list[Any]]:
        """Sessions with registered memory that ended while no server watched, and what they keep in quarantine.

        Nobody saw their device stop: it may still write there until whoever runs the host says otherwise.
        """
        return {"stranded": engine.stranded()}

    @app.post("/v1/stranded/clear", dependencies=guarded)
    async def clear_stranded(body: ClearStrandedBody) -> dict[str, list[Any]]:
        """Free what a stranded session keeps: only when neither the system nor the driver lists its process."""
        return {"cleared": await engine.clear_stranded(body.session)}

    def adapters() -> AdapterAdmin:
        if engine.l2 is None:
            raise Unavailable("L2 is not open yet")
        return engine.l2

    def named(name: str, answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            there = ", ".join(adapters().names()) or "none"
            raise HTTPException(404, f"name: there is no adapter {name!r:.80}; there are: {there}")
        return answer

    @app.get("/v1/l2/adapters", dependencies=guarded)
    async def l2_adapters() -> dict[str, list[Any]]:
        """The L2 adapters in the order in which lookups ask them, then those being removed.

        A restart has the adapters of the settings: those not `in_settings` are gone then, and those `missing` back.
        """
        return {"adapters": await adapters().rows(), "missing": adapters().missing()}

    @app.post("/v1/l2/adapters", status_code=201, dependencies=guarded)
    async def add_l2_adapter(body: AddAdapterBody) -> dict[str, Any]:
        """Open an L2 adapter and use it from now on. Nothing changes where that fails.

        Types whose fields name code to run (`plugin`) are taken only where the server has `http.token_file`.
        """
        return await adapters().add(
            body.adapter, position=body.position, backfill=body.backfill, may_name_code=bool(token)
        )

    @app.post("/v1/l2/adapters/{name}/drain", dependencies=guarded)
    async def drain_l2_adapter(name: str, body: DrainAdapterBody) -> dict[str, Any]:
        """Give an adapter no new chunks; it is `drained` when what waited for it was put and nothing is under way."""
        return named(name, await adapters().drain(name, loads=body.loads, wait_s=body.wait_s))

    @app.post("/v1/l2/adapters/{name}/resume", dependencies=guarded)
    async def resume_l2_adapter(name: str, body: ResumeAdapterBody) -> dict[str, Any]:
        """Use a draining or drained adapter as before, from now on."""
        return named(name, await adapters().resume(name, backfill=body.backfill))

    @app.delete("/v1/l2/adapters/{name}", dependencies=guarded)
    async def remove_l2_adapter(
        name: str,
        wait_s: Annotated[
            float, Query(ge=0, le=MAX_WAIT_S, description="Longest wait for what is under way.")
        ] = DEFAULT_WAIT_S,
    ) -> dict[str, Any]:
        """Drain an adapter, close it and forget it. Its records stay on the medium."""
        return named(name, await adapters().remove(name, wait_s=wait_s))

    return app
