"""Bodies of the controller's HTTP answers.

Times are in milliseconds since 1970 (`_unix_ms`), or as seconds ago (`_ago_s`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class DashboardLinkBody(BaseModel):
    """A link to the dashboard."""

    url: str
    once_within_s: float | None = Field(
        description="The link logs a browser in once, within this time; null: the port is open, and needs no login."
    )


class LoginBody(BaseModel):
    """A browser's new session."""

    page_key: str = Field(
        description="Proves the session together with the cookie that comes with this answer."
    )
    session_s: float = Field(description="Longest life of the session.")


class SyncBody(BaseModel):
    """Full syncs of one instance."""

    state: Literal["exact", "wanted", "running", "none"] = Field(
        description="`exact`: a full sync has ended, and every event since then was applied; `wanted`: the instance is "
        "asked for one; `running`: one is under way; `none`: only the snapshot is known."
    )
    wanted_because: str = ""
    parts: int = Field(0, description="Parts of the running sync.")
    keys: int = Field(0, description="Keys of the running sync.")
    count: int = Field(0, description="Completed full syncs.")
    last_took_s: float = 0.0
    last_ended_ago_s: float | None = None


class InstanceRow(BaseModel):
    """One instance at a glance."""

    id: str
    state: Literal["live", "dead", "restored"]
    reported_state: str = Field(
        description="State that the instance reports: ready, syncing, frozen, draining, stopping."
    )
    draining: bool
    confirmed: bool = Field(description="The directory's knowledge of its chunks is exact.")
    incarnation: str = Field(description="Number of this run of its process.")
    version: str
    host: str
    pid: int
    zone: str
    http_url: str
    peer_endpoint: str
    tiers: list[str]
    chunk_tokens: int
    l1_bytes: int
    keys: dict[str, int] = Field(description="Chunks (records) by tier, as the directory knows them.")
    used_bytes: dict[str, int] = Field(description="By tier, as the instance last reported.")
    capacity_bytes: dict[str, int]
    tier_states: dict[str, str] = Field(
        description="Of tiers that are not active, as the instance last reported."
    )
    hits_total: dict[str, int] = Field(description="Chunks that lookups asked for, by source, or `miss`.")
    peer_leased_bytes: int
    peer_sent_bytes_total: int
    peer_read_bytes_total: int
    sessions: int
    engines: list[str] = Field(description="URLs of its engines, as far as they tell (`engine_url`).")
    event_batches: int
    last_event: int
    waiting_commands: int
    heard_ago_s: float
    joined_ago_s: float
    sync: SyncBody


class InstancesBody(BaseModel):
    """All instances."""

    instances: list[InstanceRow]
    drained: list[str] = Field(
        description="Instances that an admin has drained, also if they are absent now."
    )
    removed: list[str] = Field(description="Instances that an admin has removed and that may not join.")


class ModelRow(BaseModel):
    """One kind of KV, of engines at live instances."""

    kind: int = Field(description="Its number, for the field `kind` of requests.")
    layout: dict[str, Any]
    slices: int
    instances: list[str]


class ModelsBody(BaseModel):
    """All kinds of KV."""

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
    """One tier, over all instances."""

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
    """The directory's map of placements."""

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
    """Instances' questions which peers have chunks."""

    total: int
    hits_total: int
    keys_total: int
    mean_ms: float


class ElectionBody(BaseModel):
    """The election among several controllers."""

    leads: bool = Field(description="This controller leads, or is the only one.")
    leader: str = Field(description="Name of the leader; empty while none leads.")
    leader_url: str
    token: int = Field(description="Number of the leadership; 0 for the only controller.")
    cluster_id: int = Field(
        description="Compared before the token; grows when etcd has lost its data or was restored."
    )
    members: list[str] = Field(description="Live controllers, including this one.")
    no_leader_s: float = Field(
        description="Time since this controller last knew of a leader; 0: it knows of one."
    )
    problem: str = Field(description="Why this controller cannot take part; empty: it takes part.")


class GatewayBody(BaseModel):
    """A gateway that asks this controller, as its last heartbeat told."""

    name: str
    host: str = Field(description="Address that its heartbeat came from.")
    port: int = Field(description="Its HTTP port; 0: it listens on a Unix socket.")
    version: str
    policy: str
    engines: int
    engines_up: int
    in_flight: int = Field(description="Requests under way.")
    requests_total: int = Field(description="Requests that have ended.")
    heard_ago_s: float = Field(description="Time since its last heartbeat; one comes every 2 s.")


class ClusterBody(BaseModel):
    """The cluster at a glance."""

    name: str
    version: str
    epoch: int
    unix_ms: int
    up_s: float
    restarts: int = Field(description="Restarts of the controller by its keeper, after it died.")
    last_end: str = Field(description="What ended the last run; empty: it has not died.")
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
    gateways: list[GatewayBody] = Field(
        description="Gateways that were heard in the last ten minutes, by name; at most 256."
    )
    dropped_event_batches: dict[str, int] = Field(description="By reason.")
    refused_requests: dict[str, int] = Field(description="Refused requests of instances, by code.")
    sockets: dict[str, dict[str, int]]
    monitor_ports: dict[str, int] = Field(
        description="Ports of the sockets; `reply` is the one for controller.url."
    )
    snapshot: dict[str, Any] = Field(description="Empty without a snapshot.")
    election: ElectionBody
    last_event: int = Field(description="Cursor for /v1/events.")


class PointBody(BaseModel):
    """Numbers at one time; rates (`_per_s`) are since the previous point."""

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
    """Numbers over the last hour."""

    sample_s: float
    points: list[PointBody]


class EventRow(BaseModel):
    """One event of the cluster."""

    number: int
    unix_ms: int
    kind: str = Field(
        description="joined, left, died, superseded, came_back, removed, draining, resync, synced, …"
    )
    instance: str
    facts: dict[str, Any]


class EventsBody(BaseModel):
    """Consecutive events."""

    events: list[EventRow]
    next_after: int = Field(description="`after` of the next request.")
    lost: bool = Field(description="Some events after `after` are no longer kept.")


class StateBody(BaseModel):
    """The whole cluster."""

    cluster: ClusterBody
    instances: list[InstanceRow]
    drained: list[str] = Field(description="As in InstancesBody.")
    removed: list[str] = Field(description="As in InstancesBody.")


class CommandRow(BaseModel):
    """A command to an instance."""

    number: int
    instance: str
    kind: str
    state: Literal["waiting", "sent", "done", "failed"]
    message: str
    age_s: float
    argument: dict[str, Any]
    result: dict[str, Any]


class CommandsBody(BaseModel):
    """Commands, and whether all of them have ended: 200 if they have, else 202."""

    done: bool
    commands: list[CommandRow]


class PlaceBody(BaseModel):
    """A tier of an instance that has a chunk."""

    instance: str
    tier: str
    confirmed: bool


class ChunkPlaces(BaseModel):
    """One chunk."""

    index: int
    keys: list[str] = Field(description="Its storage keys, one for each slice.")
    places: list[PlaceBody] = Field(
        description="Places that have all of its slices that each hit needs, so without windows and states."
    )


class HolderBody(BaseModel):
    """An instance that could serve a hit of these chunks from L1, where peers can read it."""

    instance: str
    chunks: int
    tokens: int
    confirmed: bool


class PlacementBody(BaseModel):
    """The places of chunks."""

    n_chunks: int
    n_slices: int
    chunk_tokens: int
    identity: str = Field(description="Root of their identity; empty if keys were named.")
    held_chunks: int = Field(
        description="Chunks of the longest hit whose parts some instances have, in any tier."
    )
    longest: list[HolderBody] = Field(description="Best first.")
    chunks: list[ChunkPlaces]


class PinRow(BaseModel):
    """One pin."""

    claim: str
    instance: str
    keys: int = Field(
        description="Records that it keeps; until the instance has answered, those that it was commanded to keep."
    )
    left_s: float
    state: Literal["asked", "kept", "unknown"] = Field(
        description="`asked`: the instance has not answered yet; `unknown`: it does not live now."
    )


class PinsBody(BaseModel):
    """Pins that have not ended, also from before a restart and from other controllers of the same etcd."""

    pins: list[PinRow]


class PinnedBody(CommandsBody):
    """The outcome of a pin."""

    claim: str


class RemovedBody(BaseModel):
    """The outcome of a removal."""

    id: str
    was: str
    barred: bool = Field(description="The instance lived, so it may not join again until it is allowed.")


class DocumentBody(BaseModel):
    """The answer of an instance."""

    instance: str
    done: bool
    command: int = Field(description="Ask /v1/commands/{number} if it is not done yet.")
    ok: bool
    message: str
    document: dict[str, Any]
