"""The operations of a controller's HTTP port, and the parts of the process that they use.

Operations that change something or ask an instance answer 202 if the instance has not answered within `wait_s`; an
event with the command's number then reports its outcome.  Only the leader of several controllers carries them out; the
others redirect the client to it (307).
"""

from __future__ import annotations

import asyncio
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.controller import views
from kvstrata.controller.dashboard_files import DashboardFiles
from kvstrata.errors import BadRequest, NotFound
from kvstrata.observability.logging import EventLog
from kvstrata.process import operations as common
from kvstrata.process.operations import MAX_WAIT_S, Claiming, Headers, Reply, operation, operations_of
from kvstrata.rpc import cluster_wire as wire

if TYPE_CHECKING:
    from kvstrata.controller.cluster import Cluster
    from kvstrata.controller.commands import Command
    from kvstrata.controller.metrics import Surroundings
    from kvstrata.controller.operations import Operations

MAX_EVENTS = 1_000
FRESH_S = 1.0
"""Maximum age of a state that is served to further readers."""
NO_STORE = {"cache-control": "no-store"}
Document = dict[str, Any]


@dataclass(slots=True)
class Admin:
    """The parts of one controller process that the operations use."""

    cluster: Cluster
    orders: Operations
    around: Surroundings
    url: str
    """URL of the port."""
    page: Callable[[], bytes]
    """Makes /metrics."""
    files: DashboardFiles
    log: EventLog
    state: tuple[float, bytes] = float("-inf"), b""
    """The time and the body of the last answer to /v1/state."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return self.cluster.readiness()

    def elsewhere(self, target: str) -> Reply | None:
        """The redirection of a request to the leader; None if this controller leads. Raises NotLeading."""
        leadership = self.cluster.leadership
        leader = leadership.election.leader if leadership.election is not None else None
        if (
            leadership.token is None
            and leader is not None
            and leader.member.http_url
            and leader.member.name != self.cluster.name
        ):
            says = f"this controller is not the leader; ask {leader.member.name}"
            where = {"location": f"{leader.member.http_url}{target}"}
            return Reply(common.Error(BadRequest.code, says, ""), 307, where)
        leadership.must_lead()
        return None

    async def ended(self, issued: Sequence[Command], wait_s: float = 0.0, **more: Any) -> Reply:
        """The state of commands once they have ended, or after `wait_s`."""
        done = await self.cluster.outcome(issued, wait_s)
        rows = [views.command_row(self.cluster, one) for one in issued]
        return Reply({**more, "done": done, "commands": rows}, 200 if done else 202)


# --- what is asked ----------------------------------------------------------------------------------------------------

InstanceName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$", extra={"demand": "must be 1 to 64 letters, digits and . _ -"}),
]
WaitS = Annotated[
    float,
    Meta(ge=0, le=MAX_WAIT_S, description="Maximum wait for instances in seconds; then the answer is 202."),
]
Name = Annotated[str, Meta(max_length=64, description="Id of an instance, as `instances` prints it.")]


class Instance(msgspec.Struct):
    """One instance."""

    name: Name


class Waiting(msgspec.Struct):
    """One instance, and how long to wait for it."""

    name: Name
    wait_s: WaitS = 5.0


class Freeze(msgspec.Struct, kw_only=True):
    """One instance, and for how long it stores nothing new."""

    name: Name
    seconds: Annotated[
        float, Meta(ge=0, le=60, description="Duration in seconds, at most 60; 0 ends the freeze.")
    ]
    wait_s: WaitS = 5.0


class Events(msgspec.Struct):
    """The events to list."""

    after: (
        Annotated[
            int,
            Meta(
                ge=-1, description="Number of the last event that the client has; default: list the newest."
            ),
        ]
        | None
    ) = None
    limit: Annotated[int, Meta(ge=1, le=MAX_EVENTS, description="Maximum number of events.")] = 100
    wait_s: Annotated[
        float, Meta(ge=0, le=MAX_WAIT_S, description="Maximum wait in seconds for an event after `after`.")
    ] = 0.0


class Chunks(common.Chunks, kw_only=True):
    """Chunks, of one of the kinds of KV in the cluster."""

    kind: Annotated[
        int | None, Meta(description="Number of the kind of KV in `models`, if several match.")
    ] = None


class Lookup(Chunks, kw_only=True):
    """Chunks to locate."""

    limit: Annotated[
        int, Meta(ge=1, le=65_536, description="Maximum number of chunks that are listed individually.")
    ] = 1_024


class WaitingChunks(Chunks, kw_only=True):
    """Chunks, and how long to wait for instances."""

    wait_s: WaitS = 5.0


class Claim(Claiming, kw_only=True):
    """Chunks to keep in the L1 of one instance."""

    kind: Annotated[
        int | None, Meta(description="Number of the kind of KV in `models`, if several match.")
    ] = None
    instance: Annotated[
        InstanceName | None,
        Meta(description="Instance that keeps the chunks; default: the one with the longest prefix."),
    ] = None
    wait_s: WaitS = 5.0


class Claims(msgspec.Struct):
    """How long to wait for the instances."""

    wait_s: WaitS = 5.0


class Claimed(msgspec.Struct, kw_only=True):
    """One claim."""

    claim: Annotated[str, Meta(max_length=64, description="Id of the claim, as `claims` prints it.")]
    instance: Annotated[InstanceName | None, Meta(description="Default: all live instances.")] = None
    wait_s: WaitS = 5.0


class Copy(WaitingChunks, kw_only=True):
    """Chunks to be copied into another instance's L1."""

    to: Annotated[InstanceName, Meta(description="The instance that gets the chunks.", extra={"flag": True})]
    source: Annotated[
        InstanceName | None,
        Meta(description="Instance to copy from; default: the one with the longest prefix."),
    ] = None


class Clear(msgspec.Struct, kw_only=True):
    """The chunks to drop."""

    tier: Annotated[Literal["l1", "l2", "all"], Meta(description="Tier to clear.")] = "l1"
    tenant: Annotated[str | None, Meta(description="Drop only this tenant's chunks; needs tier `l1`.")] = None
    instances: Annotated[list[InstanceName] | None, Meta(description="Default: all live instances.")] = None
    wait_s: WaitS = 5.0


class Evict(WaitingChunks, kw_only=True):
    """The chunks to drop from L1."""

    instances: Annotated[
        list[InstanceName] | None,
        Meta(description="Default: all instances that have some of these chunks."),
    ] = None


# --- the cluster ------------------------------------------------------------------------------------------------------


@operation("GET", "/v1/cluster", ctl="status", tag="cluster")
def at_a_glance(parts: Admin) -> Document:
    """Show what needs attention, and the state of the cluster as a whole."""
    return views.cluster_body(parts.cluster, parts.around)


@operation("GET", "/v1/plan", ctl="plan", tag="cluster")
def plan(parts: Admin) -> Document:
    """Predict the requests that engines serve in time, and the gain of more memory, engines or splitting."""
    return parts.cluster.planning.page()


@operation("GET", "/v1/models", ctl="models", tag="cluster")
def models(parts: Admin) -> Document:
    """List the kinds of KV of the engines at live instances."""
    return views.models(parts.cluster)


@operation("GET", "/v1/events", ctl="events", tag="events")
async def events(parts: Admin, ask: Events) -> Document:
    """List recent events of the cluster, oldest first.

    `lost`: some events after `after` are no longer kept. Pass `next_after` as `after` of the next request.
    """
    tail, after = parts.cluster.journal, ask.after
    if after is None:
        found, lost, after = tail.latest(ask.limit), False, tail.last
    else:
        if ask.wait_s:
            await tail.wait(after, ask.wait_s)
        found, lost = tail.after(after, ask.limit)
    rows = [views.event_row(event) for event in found]
    return {"events": rows, "next_after": found[-1].number if found else after, "lost": lost}


@operation("GET", "/v1/state", tag="events")
def state(parts: Admin) -> Reply:
    """Show the whole cluster, as on the dashboard; updated at most once a second for all readers."""
    now_s = parts.cluster.clock.monotonic_s()
    if now_s - parts.state[0] >= FRESH_S:
        parts.state = now_s, msgspec.json.encode(views.state(parts.cluster, parts.around))
    return Reply(parts.state[1])


# --- instances --------------------------------------------------------------------------------------------------------


@operation("GET", "/v1/instances", ctl="instances", tag="instances")
def instances(parts: Admin) -> Document:
    """List all instances; dead ones stay listed for a while.

    `confirmed`: the directory's list of the instance's chunks is exact. `keys`: number of chunks by tier, according to
    the directory. `drained` and `removed`: ids that an admin has drained or barred, also of absent instances.
    """
    return views.instances(parts.cluster)


@operation("GET", "/v1/instances/{name}", ctl="instance", tag="instances")
def instance(parts: Admin, ask: Instance) -> Document:
    """Show the state of one instance."""
    member = parts.orders.member(ask.name)
    keys = views.keys_of(parts.cluster).get(member.group, {})
    return views.instance_row(parts.cluster, member, keys)


@operation("POST", "/v1/instances/{name}/drain", ctl="drain", tag="instances", acts=True)
async def drain(parts: Admin, ask: Waiting) -> Reply:
    """Drain an instance: direct no peers to it, and command it to lease nothing to peers.

    The order holds until the instance is undrained, also across restarts. If the instance is not live, the answer
    names no command; the instance gets the command when it returns.
    """
    return await parts.ended(await parts.orders.drain(ask.name, True), ask.wait_s)


@operation("POST", "/v1/instances/{name}/undrain", ctl="undrain", tag="instances", acts=True)
async def undrain(parts: Admin, ask: Waiting) -> Reply:
    """End the drain of an instance; one that is not live gets the command when it returns."""
    return await parts.ended(await parts.orders.drain(ask.name, False), ask.wait_s)


@operation("POST", "/v1/instances/{name}/resync", ctl="resync", tag="instances")
def resync(parts: Admin, ask: Instance) -> Document:
    """Have an instance list its chunks again for this controller's directory."""
    member = parts.orders.member(ask.name)
    parts.cluster.list_anew(member)
    return {"id": member.id, "following": views.instance_row(parts.cluster, member, {})["following"]}


@operation("POST", "/v1/instances/{name}/freeze", ctl="freeze", tag="instances", acts=True)
async def freeze(parts: Admin, ask: Freeze) -> Reply:
    """Stop an instance from storing new chunks for some time; it still serves the chunks it has."""
    issued = parts.orders.at([ask.name], wire.Freeze(round(1000 * ask.seconds)))
    return await parts.ended(issued, ask.wait_s)


@operation("DELETE", "/v1/instances/{name}", ctl="remove", tag="instances", acts=True)
async def remove(parts: Admin, ask: Instance) -> Document:
    """Remove an instance and its chunks from the directory; a live one cannot rejoin until `allow`.

    A live instance continues without the cluster. The id is no longer bound to a CURVE key: the next instance that
    registers under it binds it to its own.
    """
    was = await parts.orders.remove(ask.name)
    return {"id": ask.name, "was": was.value, "barred": ask.name in parts.cluster.orders.removed}


@operation("POST", "/v1/instances/{name}/allow", ctl="allow", tag="instances", acts=True)
async def allow(parts: Admin, ask: Instance) -> dict[str, bool]:
    """Allow a removed instance to rejoin."""
    if not await parts.cluster.orders.allow(ask.name):
        raise NotFound(f"name: {ask.name!r:.80} was not removed")
    return {"allowed": True}


@operation("GET", "/v1/instances/{name}/status", ctl="document", tag="instances", acts=True)
async def status(parts: Admin, ask: Waiting) -> Reply:
    """Show the status document of an instance: pool, engine processes (workers), adapters, counters, `runtime`.

    `runtime` has threads, memory, garbage collector and lag of the event loop.
    """
    member = parts.orders.member(ask.name)
    issued = parts.cluster.issue(member, wire.AskStatus(), ttl_s=max(60.0, ask.wait_s))
    done = await parts.cluster.outcome([issued], ask.wait_s)
    result = issued.result
    answer = {
        "instance": ask.name,
        "done": done,
        "command": issued.number,
        "ok": result is not None and result.ok,
        "message": result.message if result is not None else "the instance has not answered yet",
        "document": views.plain(result.body) if result is not None else {},
    }
    return Reply(answer, 200 if done else 202)


# --- chunks -----------------------------------------------------------------------------------------------------------


@operation("POST", "/v1/lookup", ctl="lookup", tag="chunks")
async def lookup(parts: Admin, ask: Lookup) -> Document:
    """Locate the chunks of a prompt, or of some keys, in the directory.

    `longest`: instances that could serve a hit from L1, the best first. `held_chunks`: number of chunks in the longest
    hit of which some instance has each slice, in any tier. `places` of a chunk: those with all slices that every hit
    needs.
    """
    found = await parts.orders.find(await parts.orders.name(ask, ask.kind))
    return views.placement(parts.cluster, found, ask.limit)


@operation("POST", "/v1/claims", ctl="claim", tag="chunks", acts=True)
async def claim(parts: Admin, ask: Claim) -> Reply:
    """Keep the chunks of a prompt in the L1 of one instance until a time: all of them, or none.

    The instance owns the claim, also across restarts of itself and of the controller. If it refuses the claim, the
    command fails with a message that gives the reason and what would be possible.
    """
    issued = await parts.orders.claim(await parts.orders.name(ask, ask.kind), ask.instance, ask)
    return await parts.ended(issued, ask.wait_s)


@operation("GET", "/v1/claims", ctl="claims", tag="chunks", acts=True)
async def claims(parts: Admin, ask: Claims) -> Reply:
    """List the active and the last ended claims of all live instances."""
    issued = parts.orders.at(None, wire.AskClaims())
    await parts.cluster.outcome(issued, ask.wait_s)
    told = {one.member.id: one.result.body for one in issued if one.result is not None and one.result.ok}
    rows = [{"instance": name, **row} for name, body in told.items() for row in body["claims"]]
    silent = [one.member.id for one in issued if one.member.id not in told]
    return Reply({"claims": rows, "unanswered": silent}, 202 if silent else 200)


@operation("POST", "/v1/claims/{claim}/release", ctl="release", tag="chunks", acts=True)
async def release(parts: Admin, ask: Claimed) -> Reply:
    """End a claim; `count` in the result of the instance that kept it is 1."""
    where = None if ask.instance is None else [ask.instance]
    return await parts.ended(parts.orders.at(where, wire.Release(ask.claim)), ask.wait_s)


@operation("POST", "/v1/replicate", ctl="replicate", tag="chunks", acts=True)
async def replicate(parts: Admin, ask: Copy) -> Reply:
    """Copy chunks from the L1 of one instance into that of another."""
    return await _copied(parts, ask, move=False)


@operation("POST", "/v1/move", ctl="move", tag="chunks", acts=True)
async def move(parts: Admin, ask: Copy) -> Reply:
    """Copy chunks into the L1 of another instance, and drop them at the source once all have arrived."""
    return await _copied(parts, ask, move=True)


async def _copied(parts: Admin, ask: Copy, *, move: bool) -> Reply:
    named = await parts.orders.name(ask, ask.kind)
    issued, task = await parts.orders.copy(named, ask.to, ask.source, move=move)
    await asyncio.wait([task], timeout=ask.wait_s)
    return await parts.ended(issued)


@operation("POST", "/v1/clear", ctl="clear", tag="chunks", acts=True)
async def clear(parts: Admin, ask: Clear) -> Reply:
    """Drop the chunks of all tenants or of one; bytes in use are freed when their use ends."""
    return await parts.ended(parts.orders.at(ask.instances, wire.Clear(ask.tier, ask.tenant)), ask.wait_s)


@operation("POST", "/v1/evict", ctl="evict", tag="chunks", acts=True)
async def evict(parts: Admin, ask: Evict) -> Reply:
    """Drop the chunks of a prompt, or of some keys, from L1."""
    issued = await parts.orders.evict_chunks(await parts.orders.name(ask, ask.kind), ask.instances)
    return await parts.ended(issued, ask.wait_s)


# --- browsers ---------------------------------------------------------------------------------------------------------


@operation("POST", "/v1/dashboard-link", ctl="dashboard-link", here=True)
def dashboard_link(parts: Admin, headers: Headers) -> Reply:
    """Make a link that opens the dashboard with the token of this request.

    The token is in the URL's fragment, which browsers never send, so that no proxy can log it.
    """
    token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")[2]
    login = f"#/login/{urllib.parse.quote(token, safe='')}" if token else ""
    return Reply({"url": f"{parts.url}/{login}"}, headers=NO_STORE)


@operation("GET", "/", here=True, public=True, hidden=True)
def index(parts: Admin, headers: Headers) -> Reply:
    """The dashboard."""
    return parts.files.answer("index.html", headers)


class File(msgspec.Struct):
    """A file of the dashboard."""

    name: str


@operation("GET", "/dashboard/{name:path}", here=True, public=True, hidden=True)
def file(parts: Admin, ask: File, headers: Headers) -> Reply:
    """A file of the dashboard."""
    return parts.files.answer(ask.name, headers)


OPERATIONS = operations_of(common, sys.modules[__name__])
