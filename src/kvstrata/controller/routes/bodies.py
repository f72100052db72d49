"""What goes over the controller's HTTP API.

Times are milliseconds since 1970 (`_unix_ms`) or seconds ago (`_ago_s`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstrata.controller.prompts import MAX_KEYS, MAX_TOKENS

MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 5.0
MAX_TTL_S = 86_400.0

Token = Annotated[int, Field(ge=0, lt=1 << 32)]
InstanceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class SyncFacts(BaseModel):
    """Full syncs of one instance, without the time of the last."""

    state: Literal["exact", "wanted", "running", "none"] = Field(
        description="`exact`: one has ended and every event since then was applied; `wanted`: it was asked for one; "
        "`running`: one is under way; `none`: nothing is known but the snapshot."
    )
    wanted_because: str = ""
    parts: int = Field(0, description="Of the one under way.")
    keys: int = Field(0, description="Of the one under way.")
    count: int = Field(0, description="Full syncs that have ended.")
    last_took_s: float = 0.0


class SyncBody(SyncFacts):
    """Full syncs of one instance."""

    last_ended_ago_s: float | None = None


class LiveSync(SyncFacts):
    """Full syncs of one instance."""

    last_ended_unix_ms: int | None = None


class InstanceFacts(BaseModel):
    """What one instance is and has, without times."""

    id: str
    state: Literal["live", "dead", "restored"]
    reported_state: str = Field(
        description="What it says of itself: ready, syncing, frozen, draining, stopping."
    )
    draining: bool
    confirmed: bool = Field(description="What is known of its chunks is exact.")
    incarnation: str = Field(description="Names this run of its process.")
    version: str
    host: str
    pid: int
    zone: str
    http_url: str
    peer_endpoint: str
    tiers: list[str]
    chunk_tokens: int
    l1_bytes: int
    keys: dict[str, int] = Field(description="Chunks (records) by tier, as the directory has them.")
    used_bytes: dict[str, int] = Field(description="By tier, as the instance told last.")
    capacity_bytes: dict[str, int]
    hits_total: dict[str, int] = Field(description="Chunks that lookups found, by source; and `miss`.")
    peer_leased_bytes: int
    peer_sent_bytes_total: int
    peer_read_bytes_total: int
    sessions: int
    event_batches: int
    last_event: int
    waiting_commands: int


class InstanceRow(InstanceFacts):
    """One instance at a glance."""

    heard_ago_s: float
    joined_ago_s: float
    sync: SyncBody


class LiveRow(InstanceFacts):
    """One instance at a glance, with times that stay the same while nothing happens."""

    heard_unix_ms: int
    joined_unix_ms: int
    sync: LiveSync


class InstancesBody(BaseModel):
    """All of them."""

    instances: list[InstanceRow]
    drained: list[str] = Field(description="Drained by an admin, those too that are not there now.")
    removed: list[str] = Field(description="Removed by an admin and not let in again.")


class ModelRow(BaseModel):
    """One kind of KV that engines of live instances have."""

    kind: int = Field(description="Its number, for bodies that ask for `kind`.")
    layout: dict[str, Any]
    slices: int
    instances: list[str]


class ModelsBody(BaseModel):
    """All kinds."""

    models: list[ModelRow]


class TierRow(BaseModel):
    """One tier of one instance."""

    instance: str
    tier: str
    keys: int
    used_bytes: int
    capacity_bytes: int
    confirmed: bool


class TierSum(BaseModel):
    """One tier of all instances."""

    tier: str
    instances: int
    keys: int
    used_bytes: int
    capacity_bytes: int


class TiersBody(BaseModel):
    """Chunks and bytes by tier."""

    tiers: list[TierSum]
    rows: list[TierRow]


class DirectoryBody(BaseModel):
    """The registry."""

    placements: int
    bytes: int
    max_bytes: int
    shared_tags: int
    slots: int
    retired_slots: int
    rebuilds: int
    admitted_keys_total: int
    evicted_keys_total: int
    synced_keys_total: int
    refused_keys_total: int
    waiting_bytes: int


class LookupsBody(BaseModel):
    """Questions of instances who else has chunks."""

    total: int
    hits_total: int
    keys_total: int
    mean_ms: float


class ElectionBody(BaseModel):
    """Which of several controllers leads."""

    leads: bool = Field(description="This one does; always where it is the only one.")
    leader: str = Field(description="Empty while nobody leads.")
    leader_url: str
    token: int = Field(description="Of the leadership; 0 where this controller is the only one.")
    cluster_id: int = Field(
        description="Goes before the token; grows when etcd has lost its data or was restored."
    )
    members: list[str] = Field(description="Controllers that live, this one included.")
    no_leader_s: float = Field(
        description="For how long this controller has known of no leader; 0: it knows of one."
    )
    problem: str = Field(description="Why this controller cannot take part; empty: it does.")


class ClusterBody(BaseModel):
    """The cluster at a glance."""

    name: str
    version: str
    epoch: int
    unix_ms: int
    up_s: float
    restarts: int = Field(description="Times that its keeper has started it again because it died.")
    last_end: str = Field(description="What ended it the last time; empty: it has not died.")
    ready: bool
    why_not_ready: str
    heartbeat_s: float
    dead_after_s: float
    instances: dict[str, int] = Field(
        description="By state: live, dead, restored; and draining, unconfirmed."
    )
    keys: dict[str, int] = Field(description="By tier.")
    used_bytes: dict[str, int]
    capacity_bytes: dict[str, int]
    hits_total: dict[str, int] = Field(description="Since the controller started, by source.")
    directory: DirectoryBody
    lookups: LookupsBody
    dropped_event_batches: dict[str, int] = Field(description="By reason.")
    refused_requests: dict[str, int] = Field(description="Of instances, by code.")
    sockets: dict[str, dict[str, int]]
    monitor_ports: dict[str, int] = Field(
        description="Of the sockets; `reply` is the one for controller.url."
    )
    snapshot: dict[str, Any] = Field(description="Empty without one.")
    election: ElectionBody
    last_event: int = Field(description="Cursor for /v1/events.")


class PointBody(BaseModel):
    """Numbers at one time; `_per_s` since the point before."""

    unix_ms: int
    live: int
    dead: int
    keys: dict[str, int]
    used_bytes: dict[str, int]
    hits_per_s: dict[str, float]
    event_keys_per_s: float
    sync_keys_per_s: float
    lookups_per_s: float
    directory_bytes: int


class SeriesBody(BaseModel):
    """The last hour."""

    sample_s: float
    points: list[PointBody]


class EventRow(BaseModel):
    """Something that happened."""

    number: int
    unix_ms: int
    kind: str = Field(
        description="joined, left, died, superseded, came_back, removed, draining, resync, synced, …"
    )
    instance: str
    facts: dict[str, Any]


class EventsBody(BaseModel):
    """A piece of the tail."""

    events: list[EventRow]
    next_after: int = Field(description="`after` of the next request.")
    lost: bool = Field(description="Some behind `after` are not kept any more.")


class ChangeBody(BaseModel):
    """What leads from one look at the cluster to the next, or a whole state."""

    look: str = Field(description="Names the state that one has then, for `after`.")
    after: str | None = Field(description="The look it follows; null: a whole state, which follows nothing.")
    cluster: dict[str, Any] = Field(description="Fields of ClusterBody that have changed.")
    instances: dict[str, dict[str, Any]] = Field(
        description="By id: fields of InstanceRow that have changed; all of them for an instance that is new. Times "
        "are `heard_unix_ms`, `joined_unix_ms` and, in `sync`, `last_ended_unix_ms` instead of seconds ago."
    )
    gone: list[str] = Field(description="Instances that are not there any more.")
    drained: list[str] | None = Field(None, description="As in InstancesBody; left out when unchanged.")
    removed: list[str] | None = Field(None, description="As in InstancesBody; left out when unchanged.")
    events: list[EventRow] = Field(
        description="Since the look before, the newest 1,000; none in a whole state."
    )


class ChangesBody(BaseModel):
    """What one lacks, in order."""

    changes: list[ChangeBody]


class CommandRow(BaseModel):
    """Something asked of an instance."""

    number: int
    instance: str
    kind: str
    state: Literal["waiting", "sent", "done", "failed"]
    message: str
    age_s: float
    argument: dict[str, Any]
    result: dict[str, Any]


class CommandsBody(BaseModel):
    """What was asked, and whether all of it has ended. 200 when it has, 202 otherwise."""

    done: bool
    commands: list[CommandRow]


class Wait(BaseModel):
    """Of what asks instances."""

    model_config = ConfigDict(extra="forbid")
    wait_s: float = Field(
        DEFAULT_WAIT_S,
        ge=0,
        le=MAX_WAIT_S,
        description="Longest wait for the result; then the answer is 202.",
    )


class ChunksBody(BaseModel):
    """Chunks: a prompt's, or keys."""

    model_config = ConfigDict(extra="forbid")
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS)] | None = None
    keys: Annotated[list[str], Field(max_length=MAX_KEYS)] | None = Field(
        None, description="Storage keys in hexadecimal, instead of tokens."
    )
    model: str = Field("", description="Of an attached engine; empty: the only one.")
    kind: int | None = Field(None, description="Number in /v1/models, where several match.")
    adapter: str = ""
    tenant: str = ""
    salt: str = ""


class LookupBody(ChunksBody):
    """Where chunks are."""

    limit: int = Field(1_024, ge=1, le=65_536, description="Most chunks told one by one.")


class PlaceBody(BaseModel):
    """One that has a chunk."""

    instance: str
    tier: str
    confirmed: bool


class ChunkPlaces(BaseModel):
    """One chunk."""

    index: int
    keys: list[str] = Field(description="Its storage keys, one a slice.")
    places: list[PlaceBody] = Field(description="Those that have all of its slices.")


class HolderBody(BaseModel):
    """One that has a beginning of the prompt in L1, where peers can read it."""

    instance: str
    chunks: int
    tokens: int
    confirmed: bool


class PlacementBody(BaseModel):
    """Where chunks are."""

    n_chunks: int
    n_slices: int
    chunk_tokens: int
    identity: str = Field(description="Root of their identity, for /v1/evict; empty where keys were named.")
    held_chunks: int = Field(description="Leading chunks that somebody has, in whatever tier.")
    longest: list[HolderBody] = Field(description="Best first.")
    chunks: list[ChunkPlaces]


class ExplainBody(ChunksBody, Wait):
    """What is to be explained: a prompt's chunks, keys, or a recent request."""

    request_id: str | None = Field(
        None, min_length=1, max_length=256, description="Of the engine, instead of tokens or keys."
    )
    instances: list[InstanceName] | None = Field(None, description="Who is asked; by default all.")
    limit: int = Field(1_024, ge=1, le=65_536, description="Most chunks told one by one.")


class ToldBody(BaseModel):
    """What one instance says of a chunk."""

    instance: str
    tier: str = Field(description="`l1`: it is there, the directory has not heard of it yet; else empty.")
    reason: str = Field(description="See docs/wire-codes.md, reasons of a miss; empty where it is there.")
    detail: str


class MissBody(BaseModel):
    """A chunk that nobody is known to have whole."""

    chunk: int
    key: str = Field(description="Storage key of its first slice.")
    reason: str = Field(
        description="The most telling one; empty where some instance has it, or nobody answered."
    )
    told: list[ToldBody] = Field(description="The most telling first.")


class LookupTold(BaseModel):
    """One lookup of a request."""

    instance: str
    document: dict[str, Any] = Field(description="As the instance's own `/v1/explain` tells it.")
    missing_now: list[PlaceBody] = Field(description="Who has the chunk now that it missed first.")


class UnansweredBody(BaseModel):
    """An instance that did not answer."""

    instance: str
    why: str


class ExplainedBody(BaseModel):
    """What the directory knows and instances remember."""

    lookups: list[LookupTold] = Field(description="Of the request, oldest first.")
    placement: PlacementBody | None = Field(description="Of the chunks, as /v1/lookup tells it.")
    misses: list[MissBody] = Field(description="The first chunks that nobody is known to have whole.")
    answered: list[str] = Field(description="Instances; none is asked about chunks that are all there.")
    unanswered: list[UnansweredBody]


class PinBody(ChunksBody, Wait):
    """Chunks to be kept in L1."""

    instance: InstanceName | None = Field(
        None, description="Where; by default who has the longest beginning."
    )
    ttl_s: float = Field(3_600, gt=0, le=MAX_TTL_S)


class UnpinBody(Wait):
    """A pin to be ended."""

    claim: str = Field(max_length=64)
    instance: InstanceName | None = Field(None, description="Needed for pins that are not listed.")


class PinRow(BaseModel):
    """A pin."""

    claim: str
    instance: str
    keys: int = Field(
        description="Records that it keeps; before the instance has answered, those it was asked for."
    )
    left_s: float
    state: Literal["asked", "kept", "unknown"] = Field(
        description="`asked`: the instance has not answered yet; `unknown`: it does not live at present."
    )


class PinsBody(BaseModel):
    """Pins that have not ended, those of before a restart and of other controllers of the same etcd too."""

    pins: list[PinRow]


class PinnedBody(CommandsBody):
    """What came of a pin."""

    claim: str


class CopyBody(ChunksBody, Wait):
    """Chunks to be copied into another instance's L1."""

    to: InstanceName
    source: InstanceName | None = Field(None, description="By default who has the longest beginning.")


class ClearBody(Wait):
    """What to drop."""

    tier: Literal["l1", "l2", "all"]
    tenant: str | None = None
    instances: list[InstanceName] | None = Field(None, description="By default all that live.")


class EvictBody(ChunksBody, Wait):
    """What to drop from L1: chunks, all of an identity, or all of a tenant."""

    identity: str | None = Field(
        None, description="Root of an identity in hexadecimal, as /v1/lookup tells it."
    )
    whole_identity: bool = Field(
        False, description="All of the identity that model, adapter, tenant and salt make."
    )
    whole_tenant: bool = Field(False, description="All of `tenant`, whatever the model.")
    instances: list[InstanceName] | None = Field(None, description="By default all that have some of it.")


class RemovedBody(BaseModel):
    """What came of a removal."""

    id: str
    was: str
    barred: bool = Field(description="It lived: it is not let in again until it is allowed.")


class DocumentBody(BaseModel):
    """What an instance answered."""

    instance: str
    done: bool
    command: int = Field(description="Ask /v1/commands/{number} when it was not done yet.")
    ok: bool
    message: str
    document: dict[str, Any]
