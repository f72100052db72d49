"""The operations of an instance's admin port.  Each calls one part of the instance; none keeps state or decides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.errors import BadRequest, NotFound
from kvstrata.observability.logging import EventLog
from kvstrata.process import operations
from kvstrata.process.operations import Chunks, Claiming, Reply, operation, operations_of
from kvstrata.types import GB, MAX_QUOTAS, next_of, shown_name

if TYPE_CHECKING:  # these load compiled modules, which `kvstrata ctl` must not need
    from kvstrata.server.parts import Parts
    from kvstrata.server.processes import Process

Document = dict[str, Any]


class Admin(NamedTuple):
    """The parts of one instance that the operations use."""

    parts: Parts
    page: Callable[[], bytes]
    """Makes /metrics."""
    log: EventLog

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return self.parts.readiness()


class Explain(msgspec.Struct):
    """A request of an engine."""

    request_id: Annotated[
        str, Meta(description="Id of the request, from the API's answer or the engine's log.")
    ] = ""


class Hint(msgspec.Struct):
    """What follows a request of an engine."""

    request_id: Annotated[
        str, Meta(min_length=1, description="Id of the request, from the API's answer or the engine's log.")
    ]
    next: Annotated[
        str | float,
        Meta(description="`end` if no request will use its prompt again, the API's finish_reason (tool_calls, stop, …) "
        "or the seconds until the next request that continues it.", extra={"demand": "must be text or a number"}),
    ]  # fmt: skip


class Prompt(Chunks, kw_only=True):
    """A prompt to load into L1 before any request needs it."""

    budget_bytes: Annotated[int, Meta(gt=0, description="Maximum number of bytes to bring to L1.")] = 1 << 30
    budget_s: Annotated[
        float, Meta(gt=0, le=3_600, description="Seconds after which no load is started.")
    ] = 60.0


class Job(msgspec.Struct):
    """The number of a prewarm."""

    job: Annotated[int, Meta(description="Number of the job, as the prewarm printed it.")]


class Claimed(msgspec.Struct):
    """One claim."""

    claim: Annotated[str, Meta(description="Id of the claim, as `claims` prints it.")]


class Clear(msgspec.Struct):
    """The chunks to drop."""

    tier: Annotated[Literal["l1", "l2", "all"], Meta(description="Tier to clear.")] = "l1"
    tenant: Annotated[str | None, Meta(description="Drop only this tenant's chunks; needs tier `l1`.")] = None
    wait: Annotated[
        bool, Meta(description="Wait until the bytes of all dropped chunks are free, at most 30 s.")
    ] = False


class StrandedSession(msgspec.Struct):
    """The stranded session whose extents no device writes any more."""

    session: Annotated[
        str, Meta(min_length=1, max_length=64, description="Session, as `stranded list` prints it, or `all`.")
    ]


class Quota(msgspec.Struct):
    """The share of L1 that other tenants cannot take from a tenant."""

    tenant: Annotated[str, Meta(min_length=1, max_length=256, description="Name of the tenant.")]
    quota_gb: Annotated[float, Meta(gt=0, le=1 << 20, description="Quota in GB of 2^30 bytes.")]


class Adapter(msgspec.Struct):
    """One L2 adapter."""

    name: Annotated[str, Meta(description="Name, as `l2 list` prints it, such as fs-0.")]


@operation("GET", "/healthcheck", tag="probes", public=True)
def healthcheck(admin: Admin) -> dict[str, str] | Reply:
    """The same as /readyz, with LMCache's path and answer."""
    ready, why = admin.readiness()
    return {"status": "healthy"} if ready else Reply({"status": "unhealthy", "reason": why}, 503)


@operation("GET", "/v1/status", ctl="status")
def status(admin: Admin) -> Document:
    """Show the status document: pool, sessions, adapters, counters."""
    return admin.parts.board.document()


@operation("GET", "/v1/explain")
def recent_requests(admin: Admin) -> Document:
    """List the last 20 lookups, newest first, each in the form of `/v1/explain/{request_id}`."""
    return {"recent": admin.parts.explainer.recent(20)}


@operation("GET", "/v1/explain/{request_id:path}", ctl="explain")
def explain(admin: Admin, ask: Explain) -> Document:
    """Explain why a recent request missed; without an id, list recent requests.

    The answer has the number of chunks that hit in each tier, and the reason of the first miss.
    """
    found = admin.parts.explainer.explain(ask.request_id)
    if not found["known"]:
        raise NotFound(f"request_id: {ask.request_id!r:.80} is not a recent request")
    return found


@operation("POST", "/v1/hint", ctl="hint")
async def hint(admin: Admin, ask: Hint) -> Document:
    """Tell the server what follows a recent request, so that L1 can judge how long to keep its chunks.

    Hints are not trusted: the value of a hint is learnt from the later use of the chunks that had it. `chunks`: number
    of chunks of the request in L1.
    """
    try:
        said = next_of(ask.next)
    except ValueError as error:
        raise BadRequest(f"next: {error}", field="next") from None
    return {"chunks": await admin.parts.requests.lookups.hint(ask.request_id, said)}


@operation("POST", "/v1/prewarm", status=202)
async def prewarm(admin: Admin, ask: Prompt) -> Document:
    """Start to load a prompt's chunks from L2 into L1; returns the job's report so far."""
    return (await admin.parts.prewarms.prewarm(ask)).report()


@operation("GET", "/v1/prewarm/{job}")
def prewarm_outcome(admin: Admin, ask: Job) -> Document:
    """Show the report of a prewarm so far: its cost, and how much of it later requests used."""
    return admin.parts.prewarms.job(ask.job).report()


@operation("POST", "/v1/claims", ctl="claim")
async def claim(admin: Admin, ask: Claiming) -> Document:
    """Keep the chunks of a prompt in L1 until a time: all of them, or none.

    An accepted claim survives restarts. A claim is refused (429) with the reason and what would be possible. All claims
    together keep at most a quarter of L1. Name the chunks by tokens, or by keys, whose ancestors are then kept too.
    """
    return (await admin.parts.claims.claim_prompt(ask)).document()


@operation("GET", "/v1/claims", ctl="claims")
def claims(admin: Admin) -> Document:
    """List active claims, and the last ended ones: `released`, `expired`, or `broken` with the reason."""
    return admin.parts.claims.listed()


@operation("POST", "/v1/claims/{claim}/release", ctl="release")
async def release(admin: Admin, ask: Claimed) -> Document:
    """End a claim."""
    released = await admin.parts.claims.release(ask.claim)
    if released is None:
        raise NotFound(
            f"claim: {ask.claim!r:.80} is not active here; `kvstrata ctl claims` lists those that are"
        )
    return released.document()


@operation("POST", "/v1/clear", ctl="clear", timeout_s=60)
async def clear(admin: Admin, ask: Clear) -> Document:
    """Drop the chunks of L1, L2 or both.

    Puts in flight continue; a clear of L2 drops their records too. `pending`: number of chunks dropped from L1, by this
    clear or an earlier one, whose bytes are still in use: `held` by a put or a read of the server, `leased` by an
    engine. `kept`: number of chunks not dropped because they are claimed, or because another instance reads them.
    """
    return (await admin.parts.clearing.clear(ask.tier, ask.tenant, wait=ask.wait)).document()


@operation("GET", "/v1/stranded", ctl="stranded list")
def stranded(admin: Admin) -> Document:
    """List sessions of dead processes whose GPU may still write into L1, with their quarantined bytes.

    These processes had registered memory and ended while no server ran. So no server saw their device stop, and the
    device may still write there. Only the host's operator can rule that out.
    """
    return {"stranded": [_row(one) for one in admin.parts.processes.stranded()]}


@operation("POST", "/v1/stranded/clear", ctl="stranded clear")
async def clear_stranded(admin: Admin, ask: StrandedSession) -> Document:
    """Free a stranded session's extents; safe only if neither the system nor the driver lists its process."""
    processes = admin.parts.processes
    names = {shown_name(one.session): one.session for one in processes.stranded()}
    try:
        cleared = await processes.clear_stranded(None if ask.session == "all" else [names[ask.session]])
    except KeyError:
        raise BadRequest(
            f'session: {ask.session!r:.80} is not stranded; name one that GET /v1/stranded lists, or "all"',
            field="session",
        ) from None
    for one in cleared:
        admin.log.info("stranded_cleared", session=shown_name(one.session), kept_bytes=one.kept_bytes)
    return {"cleared": [_row(one) for one in cleared]}


def _row(one: Process) -> Document:
    names = {"session": shown_name(one.session), "group": shown_name(one.group_name)}
    return {**names, "pid": one.pid, "row": one.row, "kept_bytes": one.kept_bytes}


@operation("PUT", "/v1/tenants/{tenant:path}/quota", ctl="quota")
def change_quota(admin: Admin, ask: Quota) -> Document:
    """Set a tenant's quota of L1 until the server ends; for longer, also set it in `quotas_gb`."""
    quota_bytes = round(ask.quota_gb * GB)
    if not admin.parts.set_quota(ask.tenant, quota_bytes):
        raise BadRequest(
            f"tenant: {MAX_QUOTAS} other tenants have quotas, the maximum; remove some from quotas_gb",
            field="tenant",
        )
    admin.log.info("quota_changed", tenant=ask.tenant, quota_bytes=quota_bytes)
    return {"tenant": ask.tenant, "quota_bytes": quota_bytes}


@operation("GET", "/v1/l2/adapters", ctl="l2 list")
async def l2_adapters(admin: Admin) -> Document:
    """List the L2 adapters in lookup order."""
    return {"adapters": await admin.parts.tiers.rows()}


@operation("POST", "/v1/l2/adapters/{name}/pause", ctl="l2 pause")
def pause_l2_adapter(admin: Admin, ask: Adapter) -> Document:
    """Stop using an adapter's storage until it is resumed or the server restarts.

    Chunks that wait for a put are skipped. `under_way`: number of operations that have not ended.
    """
    return _named(admin, ask.name, admin.parts.tiers.pause(ask.name))


@operation("POST", "/v1/l2/adapters/{name}/resume", ctl="l2 resume")
def resume_l2_adapter(admin: Admin, ask: Adapter) -> Document:
    """Resume a paused adapter."""
    return _named(admin, ask.name, admin.parts.tiers.resume(ask.name))


def _named(admin: Admin, name: str, answer: Document | None) -> Document:
    if answer is None:
        names = ", ".join(admin.parts.tiers.names()) or "none"
        raise NotFound(f"name: unknown adapter {name!r:.80}; adapters: {names}")
    return answer


OPERATIONS = operations_of(operations, sys.modules[__name__])
