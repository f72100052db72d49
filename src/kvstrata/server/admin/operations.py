"""The operations of an instance's admin port.  Each asks one part of the instance; none holds state or decides."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.errors import NotFound
from kvstrata.process import operations
from kvstrata.process.operations import Reply, Tokens, operation, operations_of
from kvstrata.types import GB, RequestIdentity

if TYPE_CHECKING:
    from kvstrata.server.admin.admin import Admin

Document = dict[str, Any]


class Explain(msgspec.Struct):
    """A request of an engine."""

    request_id: Annotated[str, Meta(description="As the API returned it, or as the engine logs it.")] = ""


class Prompt(msgspec.Struct, kw_only=True):
    """A prompt to load into L1 before any user asks."""

    tokens: Tokens
    model: Annotated[str, Meta(description="Model of an attached engine; empty: the only one.")] = ""
    adapter: Annotated[str, Meta(description="Name of a LoRA adapter; empty: the model itself.")] = ""
    tenant: Annotated[str, Meta(description="Tenant; empty: the unnamed one.")] = ""
    salt: Annotated[str, Meta(description="Salt of the requests.")] = ""
    budget_bytes: Annotated[int, Meta(gt=0, description="Maximum number of bytes to load.")] = 1 << 30
    ttl_ms: Annotated[int, Meta(gt=0, le=3_600_000, description="Time after which no more is loaded.")] = (
        60_000
    )


class Job(msgspec.Struct):
    """The number of a prewarm."""

    job: Annotated[int, Meta(description="As `prefetch` returned it.")]


class Clear(msgspec.Struct):
    """The chunks to drop."""

    tier: Annotated[Literal["l1", "l2", "all"], Meta(description="Where.")] = "l1"
    tenant: Annotated[str | None, Meta(description="Only this tenant's chunks; with `l1` alone.")] = None
    wait: Annotated[
        bool, Meta(description="Answer when the bytes of all dropped chunks are free, at most 30 s later.")
    ] = False


class Stranded(msgspec.Struct):
    """The stranded session whose extents no device writes any more."""

    session: Annotated[str, Meta(min_length=1, max_length=64, description="As listed, or `all`.")]


class Quota(msgspec.Struct):
    """How much of L1 a tenant may have."""

    tenant: Annotated[str, Meta(min_length=1, max_length=256, description="Name of the tenant.")]
    quota_gb: Annotated[float, Meta(gt=0, le=1 << 20, description="In GB of 2^30 bytes.")]


class Adapter(msgspec.Struct):
    """One L2 adapter."""

    name: Annotated[str, Meta(description="As listed, such as fs-0.")]


@operation("GET", "/healthcheck", tag="probes", public=True)
def healthcheck(parts: Admin) -> dict[str, str] | Reply:
    """The same as /readyz, under the name and with the words of LMCache."""
    ready, why = parts.readiness()
    return {"status": "healthy"} if ready else Reply({"status": "unhealthy", "reason": why}, 503)


@operation("GET", "/v1/status", ctl="status")
def status(parts: Admin) -> Document:
    """The status document: pool, sessions, adapters, counters."""
    return parts.board.document()


@operation("GET", "/v1/explain")
def recent_requests(parts: Admin) -> Document:
    """The last 20 lookups, newest first, each as under its request's id."""
    return {"recent": parts.explainer.recent(20)}


@operation("GET", "/v1/explain/{request_id:path}", ctl="explain")
def explain(parts: Admin, ask: Explain) -> Document:
    """Why a recent request missed; without an id, recent requests.

    How many of its chunks hit, and where, and why the first missing chunk missed.
    """
    found = parts.explainer.explain(ask.request_id)
    if not found["known"]:
        raise NotFound(f"request_id: {ask.request_id!r:.80} is not among the recent requests")
    return found


@operation("POST", "/v1/prefetch", ctl="prefetch", status=202)
async def prefetch(parts: Admin, ask: Prompt) -> Job:
    """Load a prompt's chunks from L2 into L1; `job` tells the outcome."""
    identity = RequestIdentity(adapter=ask.adapter, tenant=ask.tenant, salt=ask.salt)
    return Job(
        await parts.prewarms.prewarm(
            model=ask.model,
            request=identity,
            tokens=ask.tokens,
            budget_bytes=ask.budget_bytes,
            ttl_ms=ask.ttl_ms,
        )
    )


@operation("GET", "/v1/prefetch/{job}", ctl="job")
def prefetch_outcome(parts: Admin, ask: Job) -> Document:
    """What a prefetch has loaded so far."""
    found = parts.prewarms.job(ask.job)
    if found is None:
        raise NotFound(f"job: {ask.job} is not among the recent ones")
    return found


@operation("POST", "/v1/clear", ctl="clear", timeout_s=60)
async def clear(parts: Admin, ask: Clear) -> Document:
    """Drop the chunks of L1, L2 or both.

    Puts that are under way go on; a clear of L2 drops their records too. `pending`: chunks dropped from L1, now or
    before, whose bytes are still in use: `held` by a put or a read of the server, `leased` by an engine. `kept`: those
    that are `pinned`, or that another instance reads there.
    """
    return (await parts.clearing.clear(ask.tier, ask.tenant, wait=ask.wait)).document()


@operation("GET", "/v1/stranded", ctl="stranded list")
def stranded(parts: Admin) -> Document:
    """Sessions of dead processes whose GPU may still write into L1, and the bytes that they quarantine.

    Their registered memory ended while no server watched. No server saw their device stop, so the device may still
    write there. Only the host's operator can rule it out.
    """
    return {"stranded": parts.stranded.rows()}


@operation("POST", "/v1/stranded/clear", ctl="stranded clear")
async def clear_stranded(parts: Admin, ask: Stranded) -> Document:
    """Free a stranded session's extents, only when neither the system nor the driver lists its process."""
    return {"cleared": await parts.stranded.clear(ask.session)}


@operation("PUT", "/v1/tenants/{tenant:path}/quota", ctl="quota")
def change_quota(parts: Admin, ask: Quota) -> Document:
    """Set how much of L1 a tenant may have, until the server ends: put it into the settings (`quotas_gb`) too."""
    return parts.change_quota(ask.tenant, round(ask.quota_gb * GB))


@operation("GET", "/v1/l2/adapters", ctl="l2 list")
async def l2_adapters(parts: Admin) -> Document:
    """The L2 adapters in the order in which lookups ask them."""
    return {"adapters": await parts.tiers.rows()}


@operation("POST", "/v1/l2/adapters/{name}/pause", ctl="l2 pause")
def pause_l2_adapter(parts: Admin, ask: Adapter) -> Document:
    """Ask an adapter's storage nothing until it is resumed or the server restarts.

    Chunks that wait for a put are skipped. `under_way` counts operations that have not ended.
    """
    return _named(parts, ask.name, parts.tiers.pause(ask.name))


@operation("POST", "/v1/l2/adapters/{name}/resume", ctl="l2 resume")
def resume_l2_adapter(parts: Admin, ask: Adapter) -> Document:
    """Use a paused adapter as before, from now on."""
    return _named(parts, ask.name, parts.tiers.resume(ask.name))


def _named(parts: Admin, name: str, answer: Document | None) -> Document:
    if answer is None:
        names = ", ".join(parts.tiers.names()) or "none"
        raise NotFound(f"name: there is no adapter {name!r:.80}; there are: {names}")
    return answer


OPERATIONS = operations_of(operations, sys.modules[__name__])
