"""Messages between instances, their controller and their peers: one msgpack array a frame, the name first.

Three sockets of the controller, as its `--monitor-ports` name them:

    reply       ROUTER   Register, Goodbye, SyncBegin, SyncPart, SyncEnd, Where        one answer each
    pull        PULL     Events                                                        no answer
    heartbeat   ROUTER   Heartbeat                                                     Beat with commands; Nudge

and one of each instance, for its peers:

    peer        ROUTER   PeerHello, PeerLease, PeerRelease                             one answer each

A request is `[name, seq, …]`, its answer `[name, seq, epoch, …]` or a Failure.  `seq` is chosen by the asker and only
pairs the answer with the question.  `epoch` changes whenever the answering process restarts.  Times are remaining
milliseconds.  The directory knows chunks by *tag*: the first 8 bytes of the 32-byte storage key, which are uniform;
whoever holds the chunk confirms it by the whole key.  An *incarnation* names one run of an instance's process.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.types import KEY_BYTES, MAX_L2_ADAPTERS, LayoutIdentity

CLUSTER_PROTOCOL_VERSION = 2
TAG_BYTES = 8
MAX_CLUSTER_MESSAGE_BYTES = 4 << 20
MAX_TAGS = 262_144
"""Tags in one message (2 MiB)."""
MAX_PEER_KEYS = 4_096
MAX_EXPLAINED_KEYS = 256
"""Keys in one lease of a peer."""
MAX_RUNS = 4_096
MAX_COMMANDS = 64
"""Commands in one answer to a heartbeat."""
MAX_OWNERS = 8
MAX_CLUSTER_ID = (1 << 53) - 1
MAX_METADATA_BYTES = 1 << 20
"""What a transfer engine tells its peers of itself."""

Seq = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
ClusterId = Annotated[int, Meta(ge=0, le=MAX_CLUSTER_ID)]
Incarnation = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
InstanceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Endpoint = Annotated[str, Meta(max_length=256)]
TierName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,32}$")]
"""`l1`, or the name of an L2 adapter that is this instance's own."""
Tags = Annotated[bytes, Meta(max_length=MAX_TAGS * TAG_BYTES)]
PeerKeys = Annotated[bytes, Meta(max_length=MAX_PEER_KEYS * KEY_BYTES)]
Text = Annotated[str, Meta(max_length=2_000)]


class ClusterRequest(msgspec.Struct, array_like=True, frozen=True):
    """Common head of all requests."""

    seq: Seq


class ClusterReply(msgspec.Struct, array_like=True, frozen=True):
    """Common head of all answers."""

    seq: int
    epoch: int


class Failure(ClusterReply, frozen=True, tag="failure"):
    """The request failed and changed nothing."""

    code: str
    """As in the error tree; also `unknown_instance` (register first), `superseded` (another incarnation of this
    id is registered), `instance_id_taken` (it lives elsewhere), `no_slots`, `bad_sync` (begin it again)."""
    message: str
    field: str
    retryable: bool
    retry_after_ms: int = 0


# --- instance to controller: reply socket -----------------------------------------------------------------


class ModelInfo(msgspec.Struct, array_like=True, frozen=True):
    """One kind of KV that engines attached to this instance have."""

    layout: LayoutIdentity
    slices: list[bytes]
    """Digests of the slices of one engine, sorted: a chunk has one storage key for each."""


class Register(ClusterRequest, frozen=True, tag="register"):
    """An instance begins its life in the cluster, or tells a restarted controller that it lives."""

    protocol: int
    instance: InstanceId
    incarnation: Incarnation
    version: Text
    tiers: Annotated[list[TierName], Meta(min_length=1, max_length=1 + MAX_L2_ADAPTERS)]
    """Those whose chunks it reports; the first is `l1`."""
    l1_bytes: Count
    chunk_tokens: Count
    peer_endpoint: Endpoint
    """Where peers ask for leases (`tcp://host:port`); empty: its chunks cannot be read by peers."""
    http_url: Endpoint
    zone: Annotated[str, Meta(max_length=64)] = ""
    """Instances of one zone are near each other."""
    host: Text = ""
    pid: Count = 0
    last_event: Seq = 0
    """The seq of its last Events; the next one is one more."""


class Registered(ClusterReply, frozen=True, tag="register"):
    """It is a member from now on."""

    controller: str
    pull_port: int
    heartbeat_port: int
    """Both on the host that this connection leads to."""
    heartbeat_ms: int
    dead_after_ms: int
    sync: bool
    """A full sync is wanted; without it what the controller has of this incarnation stands."""


class Goodbye(ClusterRequest, frozen=True, tag="goodbye"):
    """It leaves; its chunks are forgotten at once."""

    instance: InstanceId
    incarnation: Incarnation


class SyncBegin(ClusterRequest, frozen=True, tag="sync_begin"):
    """What follows under this `sync` is everything that the instance holds.

    Events up to `events_seq` are contained in it; the instance sends later ones only after SyncEnd was answered.
    What was known before serves until then.  A new begin ends an unfinished sync.
    """

    instance: InstanceId
    incarnation: Incarnation
    sync: Count
    events_seq: Seq


class SyncPart(ClusterRequest, frozen=True, tag="sync_part"):
    """One batch of a full sync. Parts are numbered from 0 over all tiers; a repeated one changes nothing."""

    instance: InstanceId
    incarnation: Incarnation
    sync: Count
    index: Count
    tier: TierName
    tags: Tags
    crc: Count
    """CRC32C of `tags`."""


class SyncEnd(ClusterRequest, frozen=True, tag="sync_end"):
    """Refused with `bad_sync` unless every part has come and the counts agree; then it replaces what was known."""

    instance: InstanceId
    incarnation: Incarnation
    sync: Count
    parts: Count
    tags: dict[TierName, Count]
    """How many tags each tier had."""


class Done(ClusterReply, frozen=True, tag="done"):
    """Outcome of goodbye and of the steps of a sync."""


class Where(ClusterRequest, frozen=True, tag="where"):
    """Which other instances hold the longest beginning of these chunks in L1."""

    asker: InstanceId
    tags: Tags
    """Of storage keys, chunk-major."""
    n_slices: Annotated[int, Meta(ge=1, le=4096)]
    max_owners: Annotated[int, Meta(ge=1, le=MAX_OWNERS)] = 2


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """One that holds a beginning of the chunks, as far as the directory knows."""

    instance: str
    incarnation: int
    peer_endpoint: str
    n_keys: int
    """Leading keys, a multiple of n_slices."""
    confirmed: bool
    """False: known from before a restart of the controller only."""


class WhereReply(ClusterReply, frozen=True, tag="where"):
    """Best first: longest, then same zone, then least loaded. Empty when nobody has the first chunk."""

    owners: list[Owner]


# --- instance to controller: pull socket ------------------------------------------------------------------


class Change(enum.IntEnum):
    """What happened to the chunks of a run."""

    ADMIT = 0
    EVICT = 1
    CLEAR = 2
    """The tier is empty; no tags."""


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Chunks of one tier to which the same happened one after the other."""

    change: Change
    tier: TierName
    tags: Tags


class Events(msgspec.Struct, array_like=True, frozen=True, tag="events"):
    """What happened, in order. `seq` counts the batches of one incarnation from 1; a gap calls for a full sync."""

    instance: InstanceId
    incarnation: Incarnation
    seq: Seq
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]


# --- instance to controller: heartbeat socket -------------------------------------------------------------


class CommandKind(enum.StrEnum):
    """What the controller may ask of an instance; `argument` as said."""

    RESYNC = "resync"
    """Begin a full sync. {"freeze_ms": 0 to 5000}: store nothing new and tell no events meanwhile, at most so long."""
    CLEAR = "clear"
    """{"tier": "l1" | "l2" | "all", "tenant": str | null}: drop the chunks; bytes in use are free when the use ends."""
    EVICT = "evict"
    """{"keys": bytes} (storage keys) or {"identity": bytes} (an identity root): drop them from L1."""
    PIN = "pin"
    """{"keys": bytes, "ttl_ms": int, "claim": str}: keep them in L1 so long; counts as leased to peers."""
    UNPIN = "unpin"
    """{"claim": str}"""
    PULL = "pull"
    """{"keys": bytes, "n_slices": int, "identity": bytes, "tenant": str, "owner": {…as Owner…}}: read into L1, from
    that peer if it leases them, else from others (replicate; move, when an EVICT at the owner follows)."""
    DRAIN = "drain"
    """{"on": bool}: lease nothing to peers any more, and serve them again."""
    EXPLAIN = "explain"
    """{"request_id": str}: the document of /v1/explain; or {"keys": bytes}, at most 256: of each one that it is in L1,
    or why it is not."""
    RUNTIME = "runtime"
    """{}: threads, memory, garbage collector, lag of the loop, allow-listed environment."""
    STATUS = "status"
    """{}: the document of /v1/status."""


class Command(msgspec.Struct, array_like=True, frozen=True):
    """Repeated in each answer until its result has come; carried out once by its `number`."""

    number: Seq
    kind: CommandKind
    argument: dict[str, Any]


class CommandResult(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of a command."""

    number: Seq
    ok: bool
    message: Text
    """Why not, where it failed."""
    body: dict[str, Any] = {}
    """`count` of what changed, or the document asked for."""


class Load(msgspec.Struct, array_like=True, frozen=True):
    """Numbers of an instance since it started (`_total`) or now."""

    chunks: dict[str, int]
    """Records by tier."""
    used_bytes: dict[str, int]
    """By tier, a moment ago; without those that could not say."""
    capacity_bytes: dict[str, int]
    """By tier; without those that have no cap."""
    hits_total: dict[str, int]
    """Chunks that lookups found, by source: `l1`, `l2`, `peer`; and `miss`."""
    peer_leased_bytes: int
    peer_sent_bytes_total: int
    peer_read_bytes_total: int
    sessions: int


class Heartbeat(ClusterRequest, frozen=True, tag="heartbeat"):
    """It lives. Sent every `heartbeat_ms`, and at once after a Nudge or when commands have ended."""

    instance: InstanceId
    incarnation: Incarnation
    last_event: Seq
    """What the controller must have got by now; if it lacks some, events were lost."""
    state: Annotated[str, Meta(pattern="^(ready|syncing|frozen|draining|stopping)$")]
    load: Load
    models: Annotated[list[ModelInfo], Meta(max_length=64)]
    results: Annotated[list[CommandResult], Meta(max_length=MAX_COMMANDS)]
    obeys: tuple[ClusterId, Count] = (0, 0)
    """The greatest (cluster id, token) that it has seen. A leader whose own is smaller learns from it that etcd has
    lost what it knew, and takes a greater cluster id."""
    draining: bool = False
    """It leases nothing to peers. A leader that ordered something else tells it again."""


class Beat(ClusterReply, frozen=True, tag="beat"):
    """The controller heard it. Another `epoch` than before: register again."""

    commands: list[Command]
    token: int = 0
    """Of the controller's leadership, where there are several; 0: it does not lead, or is the only one."""
    cluster_id: int = 0
    """Goes before the token: it grows when etcd has lost its data or was restored. An instance keeps the greatest
    (cluster id, token) it has seen from any controller and refuses commands that come with a smaller one."""


class Nudge(msgspec.Struct, array_like=True, frozen=True, tag="nudge"):
    """From the controller, unasked. There are commands: send a heartbeat now."""

    epoch: int


# --- instance to instance ---------------------------------------------------------------------------------


class PeerHello(ClusterRequest, frozen=True, tag="peer_hello"):
    """A reader asks how to reach an owner's memory."""

    protocol: int
    reader: InstanceId
    record_version: int
    """Format of the records it can read (docs/formats.md)."""
    engine: Annotated[str, Meta(max_length=32)]
    """The transfer engine it reads with."""


class PeerWelcome(ClusterReply, frozen=True, tag="peer_hello"):
    """`epoch` is the owner's incarnation: it names the memory that `metadata` leads to."""

    instance: str
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
    """Of its transfer engine; region 0 is the extents file."""
    extents_bytes: int


class PeerLease(ClusterRequest, frozen=True, tag="peer_lease"):
    """Keep the leading ones of these records in L1 for a while."""

    reader: InstanceId
    keys: PeerKeys
    n_slices: Annotated[int, Meta(ge=1, le=4096)]
    ttl_ms: Annotated[int, Meta(ge=1, le=60_000)]


class PeerLeased(ClusterReply, frozen=True, tag="peer_lease"):
    """Records that stay where they are until the lease is released or `ttl_ms` have passed on the owner's clock."""

    lease: int
    """0 where nothing is leased."""
    extents: bytes
    """Packed extents of the leading keys (as in a lookup of an engine): whole chunks."""
    ttl_ms: int
    reason: str
    """Why it is not all: `absent`, `limit` (25 % of L1), `draining`; empty when it is."""


class PeerRelease(ClusterRequest, frozen=True, tag="peer_release"):
    """The reader has read what it wanted, or wants it no more; with `keep_ms` it has read a part of it."""

    lease: int
    keep_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Not 0: the lease goes on, for so long from now on the owner's clock, and only whether it stood is asked."""
    read_bytes: Count = 0
    """What was read under it since the last release, for the owner's count of what it has sent."""


class PeerReleased(ClusterReply, frozen=True, tag="peer_release"):
    """The lease has ended, or goes on as it was asked to where it stood."""

    stood: bool
    """It stood until now: what was read since it was granted is what it named. Else the reader drops what it read."""


ToReply = Register | Goodbye | SyncBegin | SyncPart | SyncEnd | Where
ToPeer = PeerHello | PeerLease | PeerRelease
FromCluster = (
    Failure | Registered | Done | WhereReply | Beat | Nudge | PeerWelcome | PeerLeased | PeerReleased
)  # fmt: skip


BAD_FRAME = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding a frame that is no message may raise."""


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


_ENCODER = msgspec.msgpack.Encoder()
REPLY_REQUESTS: msgspec.msgpack.Decoder[ToReply] = msgspec.msgpack.Decoder(ToReply)
EVENTS: msgspec.msgpack.Decoder[Events] = msgspec.msgpack.Decoder(Events)
HEARTBEATS: msgspec.msgpack.Decoder[Heartbeat] = msgspec.msgpack.Decoder(Heartbeat)
PEER_REQUESTS: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(ToPeer)
ANSWERS: msgspec.msgpack.Decoder[FromCluster] = msgspec.msgpack.Decoder(FromCluster)
"""What an instance, or a reader, may be told. All raise one of BAD_FRAME for anything else."""


def seq_of(frame: bytes) -> int:
    """The seq of a request that is none of the protocol, as far as it can be told, so that its sender hears of it."""
    try:
        parts = msgspec.msgpack.decode(frame)
    except BAD_FRAME:
        return 0
    seq = parts[1] if isinstance(parts, list) and len(parts) > 1 else 0
    return seq if isinstance(seq, int) and 0 <= seq < 1 << 63 else 0


def tags_of(keys: bytes) -> bytes:
    """The tags of concatenated 32-byte keys, in order."""
    words = memoryview(keys).cast("Q")
    return words[:: KEY_BYTES // TAG_BYTES].tobytes()
