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

    request_id: Annotated[str, Meta(description="As the API returned it, or as the engine logs it.")] = ""


class Hint(msgspec.Struct):
    """What follows a request of an engine."""

    request_id: Annotated[
        str, Meta(min_length=1, description="As the API returned it, or as the engine logs it.")
    ]
    next: Annotated[
        str | float,
        Meta(description="end: no request will use its prompt again; the API's finish_reason (tool_calls, stop, …); or "
        "the seconds until the next request that goes on from it.", extra={"demand": "must be text or a number"}),
    ]  # fmt: skip


class Prompt(Chunks, kw_only=True):
    """A prompt to load into L1 before any request needs it."""

    budget_bytes: Annotated[int, Meta(gt=0, description="Maximum number of bytes to bring to L1.")] = 1 << 30
    budget_s: Annotated[float, Meta(gt=0, le=3_600, description="Seconds after which no load is begun.")] = (
        60.0
    )


class Job(msgspec.Struct):
    """The number of a prewarm."""

    job: Annotated[int, Meta(description="As the prewarm printed it.")]


class Claimed(msgspec.Struct):
    """One claim."""

    claim: Annotated[str, Meta(description="As `claims` prints it.")]


class Clear(msgspec.Struct):
    """The chunks to drop."""

    tier: Annotated[Literal["l1", "l2", "all"], Meta(description="Where.")] = "l1"
    tenant: Annotated[str | None, Meta(description="Only this tenant's chunks; with `l1` alone.")] = None
    wait: Annotated[
        bool, Meta(description="Answer when the bytes of all dropped chunks are free, at most 30 s later.")
    ] = False


class StrandedSession(msgspec.Struct):
    """The stranded session whose extents no device writes any more."""

    session: Annotated[str, Meta(min_length=1, max_length=64, description="As listed, or `all`.")]


class Quota(msgspec.Struct):
    """The share of L1 that other tenants cannot take from a tenant."""

    tenant: Annotated[str, Meta(min_length=1, max_length=256, description="Name of the tenant.")]
    quota_gb: Annotated[float, Meta(gt=0, le=1 << 20, description="In GB of 2^30 bytes.")]


class Adapter(msgspec.Struct):
    """One L2 adapter."""

    name: Annotated[str, Meta(description="As listed, such as fs-0.")]


@operation("GET", "/healthcheck", tag="probes", public=True)
def healthcheck(admin: Admin) -> dict[str, str] | Reply:
    """The same as /readyz, under the name and with the words of LMCache."""
    ready, why = admin.readiness()
    return {"status": "healthy"} if ready else Reply({"status": "unhealthy", "reason": why}, 503)


@operation("GET", "/v1/status", ctl="status")
def status(admin: Admin) -> Document:
    """The status document: pool, sessions, adapters, counters."""
    return admin.parts.board.document()


@operation("GET", "/v1/explain")
def recent_requests(admin: Admin) -> Document:
    """The last 20 lookups, newest first, each as under its request's id."""
    return {"recent": admin.parts.explainer.recent(20)}


@operation("GET", "/v1/explain/{request_id:path}", ctl="explain")
def explain(admin: Admin, ask: Explain) -> Document:
    """Why a recent request missed; without an id, recent requests.

    How many of its chunks hit, and where, and why the first missing chunk missed.
    """
    found = admin.parts.explainer.explain(ask.request_id)
    if not found["known"]:
        raise NotFound(f"request_id: {ask.request_id!r:.80} is not among the recent requests")
    return found


@operation("POST", "/v1/hint", ctl="hint")
async def hint(admin: Admin, ask: Hint) -> Document:
    """Say what follows a recent request, so that L1 keeps its chunks as long as such chunks are worth it.

    Hints are not trusted: the value of a hint is learnt from the later use of the chunks that had it. `chunks`: how
    many chunks of the request are in L1.
    """
    try:
        said = next_of(ask.next)
    except ValueError as error:
        raise BadRequest(f"next: {error}", field="next") from None
    return {"chunks": await admin.parts.requests.lookups.hint(ask.request_id, said)}


@operation("POST", "/v1/prewarm", status=202)
async def prewarm(admin: Admin, ask: Prompt) -> Document:
    """Begin to load a prompt's chunks from L2 into L1; returns the job's report so far."""
    return (await admin.parts.prewarms.prewarm(ask)).report()


@operation("GET", "/v1/prewarm/{job}")
def prewarm_outcome(admin: Admin, ask: Job) -> Document:
    """The report of a prewarm so far: its cost, and how much later requests used of it."""
    return admin.parts.prewarms.job(ask.job).report()


@operation("POST", "/v1/claims", ctl="claim")
async def claim(admin: Admin, ask: Claiming) -> Document:
    """Keep the chunks of a prompt in L1 until a time: all of them, or none.

    A claim is accepted, also across restarts, or refused (429) with a reason and what would be possible. All claims
    together keep at most a quarter of L1. Chunks are named by tokens, or by keys, whose ancestors are then kept too.
    """
    return (await admin.parts.claims.claim_prompt(ask)).document()


@operation("GET", "/v1/claims", ctl="claims")
def claims(admin: Admin) -> Document:
    """The claims that are kept, and the last that have ended: `released`, `expired`, or `broken` with the reason."""
    return admin.parts.claims.listed()


@operation("POST", "/v1/claims/{claim}/release", ctl="release")
async def release(admin: Admin, ask: Claimed) -> Document:
    """End a claim."""
    released = await admin.parts.claims.release(ask.claim)
    if released is None:
        raise NotFound(
            f"claim: {ask.claim!r:.80} is not kept here; `kvstrata ctl claims` lists those that are"
        )
    return released.document()


@operation("POST", "/v1/clear", ctl="clear", timeout_s=60)
async def clear(admin: Admin, ask: Clear) -> Document:
    """Drop the chunks of L1, L2 or both.

    Puts that are under way continue; a clear of L2 drops their records too. `pending`: chunks dropped from L1, now or
    before, whose bytes are still in use: `held` by a put or a read of the server, `leased` by an engine. `kept`: chunks
    that stay because they are `claimed`, or because another instance reads them.
    """
    return (await admin.parts.clearing.clear(ask.tier, ask.tenant, wait=ask.wait)).document()


@operation("GET", "/v1/stranded", ctl="stranded list")
def stranded(admin: Admin) -> Document:
    """Sessions of dead processes whose GPU may still write into L1, and the bytes that they quarantine.

    These processes had registered memory and ended while no server ran. So no server saw their device stop, and the
    device may still write there. Only the host's operator can rule that out.
    """
    return {"stranded": [_row(one) for one in admin.parts.processes.stranded()]}


@operation("POST", "/v1/stranded/clear", ctl="stranded clear")
async def clear_stranded(admin: Admin, ask: StrandedSession) -> Document:
    """Free a stranded session's extents; do it only when neither the system nor the driver lists its process."""
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
    """Set a tenant's quota of L1 until the server ends; to keep it, put it into the settings (`quotas_gb`) too."""
    quota_bytes = round(ask.quota_gb * GB)
    if not admin.parts.set_quota(ask.tenant, quota_bytes):
        raise BadRequest(
            f"tenant: {MAX_QUOTAS} others have quotas; leave some out of quotas_gb", field="tenant"
        )
    admin.log.info("quota_changed", tenant=ask.tenant, quota_bytes=quota_bytes)
    return {"tenant": ask.tenant, "quota_bytes": quota_bytes}


@operation("GET", "/v1/l2/adapters", ctl="l2 list")
async def l2_adapters(admin: Admin) -> Document:
    """The L2 adapters in the order in which lookups ask them."""
    return {"adapters": await admin.parts.tiers.rows()}


@operation("POST", "/v1/l2/adapters/{name}/pause", ctl="l2 pause")
def pause_l2_adapter(admin: Admin, ask: Adapter) -> Document:
    """Stop using an adapter's storage until it is resumed or the server restarts.

    Chunks that wait for a put are skipped. `under_way` counts operations that have not ended.
    """
    return _named(admin, ask.name, admin.parts.tiers.pause(ask.name))


@operation("POST", "/v1/l2/adapters/{name}/resume", ctl="l2 resume")
def resume_l2_adapter(admin: Admin, ask: Adapter) -> Document:
    """Use a paused adapter again from now on."""
    return _named(admin, ask.name, admin.parts.tiers.resume(ask.name))


def _named(admin: Admin, name: str, answer: Document | None) -> Document:
    if answer is None:
        names = ", ".join(admin.parts.tiers.names()) or "none"
        raise NotFound(f"name: there is no adapter {name!r:.80}; there are: {names}")
    return answer


OPERATIONS = operations_of(operations, sys.modules[__name__])
