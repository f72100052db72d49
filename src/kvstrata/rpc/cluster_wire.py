"""Messages between instances, their controllers, gateways and peers: one msgpack array per frame, its name first.

A controller has one port, for requests of instances and gateways:

    instances    Register, Goodbye, Where
    gateways     GatewayBeat

and each instance has one, its control port:

    controllers and gateways    Changes, List      follow what the instance holds (cluster/follow.py)
    controllers                 Do                 carry out an operation
    peers                       PeerHello, Await

A request is `[name, seq, …]`, its answer `[name, seq, epoch, …]` or a Failure.  The asker chooses `seq`, which only
matches the answer to its request.  `epoch` changes whenever the answering process restarts; of an instance it is the
*incarnation*, which names one run of its process.  Times are remaining milliseconds.  Followers know a chunk by its
*tag*, the first 8 bytes of the 32-byte storage key, which are uniformly distributed; the owner of the chunk compares
the whole key.

All ports speak CURVE (zmq_curve.py).  The kind of a connection's key decides which requests it may send, and messages
that name their sender's instance are accepted only with the key under which the instance has registered.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.errors import BadRequest, KvstrataError, WrongVersion
from kvstrata.process.operations import MAX_CLAIM_S, MAX_KEYS
from kvstrata.rpc.wire import ENGINE_URL, INSTANCE_OR_NONE, MAX_BYTES_S, MAX_LATENCY_US, Count, Seq
from kvstrata.types import KEY_BYTES, LATEST, MAX_L2_ADAPTERS, LayoutIdentity

TAG_BYTES = 8
MAX_TAGS = 262_144
"""Maximum number of tags in one message (2 MiB)."""
MAX_ENGINES = 64
"""Maximum number of engines in an instance's condition."""

InstanceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Endpoint = Annotated[str, Meta(max_length=256, pattern=r"^[^\s\x00-\x1f\x7f]*$")]
TierName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,32}$")]
"""`l1`, the name of an L2 adapter, or PROMISED_TIER."""
Tags = Annotated[bytes, Meta(max_length=MAX_TAGS * TAG_BYTES)]
Word = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A text without control characters, which pages and logs show unchanged."""
MAX_ADAPTERS = 256
"""Maximum number of adapters in an instance's condition: the newest."""
MAX_ADAPTER_CHARS = 1_024
"""Maximum length of an adapter's name; adapters with longer names are omitted."""
AdapterName = Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)]
EngineUrl = Annotated[str, Meta(max_length=256, pattern=ENGINE_URL)]
CLUSTER_PROTOCOL_VERSION = 15
MAX_CLUSTER_MESSAGE_BYTES = 4 << 20
MAX_PEER_KEYS = 4_096
"""Maximum number of keys in one command, or of single keys in one Where."""
PROMISED_TIER = "promised"
"""Pseudo-tier of chunks that engines of an instance compute now: the first chunk of each promise; not stored yet."""
MAX_CHANGES = 16_384
"""Maximum number of changes in one answer."""
MAX_WAIT_MS = 60_000
MAX_HINTS = 32
MAX_AWAITED = 1_024
"""Maximum number of chunks in one Await, including those before the first missing one."""
MAX_AWAITED_SLICES = 64
MAX_AWAIT_MS = 2_000
MAX_OWNERS = 8
MAX_CLUSTER_ID = (1 << 53) - 1
MAX_METADATA_BYTES = 1 << 20
"""Maximum length of the metadata that a transfer engine sends to its peers."""

MAX_SHARED, MAX_ASKED_ENDS = 16, 256
"""Maximum number of prefixes in one answer to AskShared, and in one AskShared."""
MAX_TOLD_INSTANCES = 1_024
"""Maximum number of instances in the answer to one heartbeat of a gateway."""
MAX_RATED, MAX_SHAPES = 4_096, 4_096
"""Maximum numbers of engines and of shapes of requests in one heartbeat of a gateway."""
ClusterId = Annotated[int, Meta(ge=0, le=MAX_CLUSTER_ID)]
Incarnation = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
PublicKey = Annotated[str, Meta(min_length=40, max_length=40)]
"""A public CURVE key in Z85."""
Medium = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Text = Annotated[str, Meta(max_length=2_000)]
StorageKeys = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_PEER_KEYS * KEY_BYTES)]
"""Storage keys, concatenated."""
SliceCount = Annotated[int, Meta(ge=1, le=4096)]
Spans = Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=4096)]
Root = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
"""Root of an identity."""
TenantName = Annotated[str, Meta(max_length=256)]
Scope = Literal["l1", "l2", "all"]
MAX_TIERS = 2 * (1 + MAX_L2_ADAPTERS)
"""Maximum number of tiers in one report; an instance has at most half as many."""
ByTier = Annotated[dict[TierName, Count], Meta(max_length=MAX_TIERS)]
"""A number by tier. The names become labels of metrics, so their alphabet and their number are bounded."""
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[str, Meta(pattern=r"^(?=.*[1-9])[0-9]{1,4}(\.[0-9]{1,3})?$")]
"""A number above 0."""
BySize = Annotated[dict[Factor, Share], Meta(max_length=8)]
HitSource = Literal["l1", "l2", "peer", "miss"]
"""Where a chunk was found. These values become labels of metrics."""


class ClusterRequest(msgspec.Struct, array_like=True, frozen=True):
    """Base of all requests, with their common first field."""

    seq: Seq


class Greeting(ClusterRequest, frozen=True):
    """Base of the requests by which two processes meet. A port refuses another protocol, whatever fields follow it."""

    protocol: int


class ClusterReply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all answers, with their common first fields."""

    seq: int
    epoch: int


class KvKind(msgspec.Struct, array_like=True, frozen=True):
    """One kind of KV, of engines that are attached to this instance."""

    layout: LayoutIdentity
    slices: list[bytes]
    """Digests of the slices of one engine, sorted; a chunk has one storage key for each slice."""
    spans: Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=4096)] = []
    """For each slice how many of a hit's last chunks it needs (windows, states), 0: all; empty: all in every slice."""
    record_bytes: Annotated[list[Count], Meta(max_length=4096)] = []
    """For each slice the length of a whole chunk's record; empty if unknown."""
    adapters: Annotated[list[AdapterName], Meta(max_length=MAX_ADAPTERS)] = []
    """`RequestIdentity.adapter` of the engines' requests, as last declared; the newest first."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's records in all slices; 0: unknown."""
        return sum(self.record_bytes)


class Failure(ClusterReply, frozen=True, tag="failure"):
    """The request failed and changed nothing."""

    code: str
    """A code of the error tree, or `unknown_instance` (register first), `superseded` (another incarnation of this id is
    registered), `instance_id_taken` (a live instance elsewhere has this id), `wrong_key` (this id belongs to another
    key), `too_old` (list the instance's chunks again)."""
    message: str
    field: str
    retryable: bool
    retry_after_ms: int = 0


# --- instance to controller ---------------------------------------------------------------------------------


class Register(Greeting, frozen=True, tag="register"):
    """An instance joins the cluster. Sent again every `beat_ms` of the answer: the controller may have forgotten it.

    The first answer comes once the controller has reached the instance's control port.
    """

    instance: InstanceId
    incarnation: Incarnation
    version: Word
    tiers: Annotated[list[TierName], Meta(min_length=1, max_length=1 + MAX_L2_ADAPTERS)]
    """The tiers whose chunks followers may list; the first is `l1`."""
    l1_bytes: Count
    chunk_tokens: Count
    control_endpoint: Endpoint
    """The instance's control port (`tcp://host:port`)."""
    http_url: Endpoint
    gives_to_peers: bool = False
    """Whether peers may request records there."""
    zone: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """Instances of one zone are near each other."""
    host: Word = ""
    pid: Count = 0
    media: Annotated[dict[TierName, Medium], Meta(max_length=MAX_L2_ADAPTERS)] = msgspec.field(
        default_factory=dict
    )
    """For tiers whose media other instances share: a name of the medium, equal for all its tiers.  For such a tier an
    instance lists the chunks that it has put or found there."""
    peer_engine: Word = ""
    """The engine that moves bytes between it and its peers, and the reason, for operators; empty: none."""


class Registered(ClusterReply, frozen=True, tag="register"):
    """The instance is a member from now on."""

    controller: str
    beat_ms: int


class Goodbye(ClusterRequest, frozen=True, tag="goodbye"):
    """The instance leaves; the controller forgets its chunks at once."""

    instance: InstanceId
    incarnation: Incarnation


class Done(ClusterReply, frozen=True, tag="done"):
    """The request has succeeded."""


class Where(ClusterRequest, frozen=True, tag="where"):
    """Asks which other instances hold the longest prefix of these chunks in L1."""

    asker: InstanceId
    tags: Tags
    """Tags of the storage keys, chunk by chunk."""
    n_slices: Annotated[int, Meta(ge=1, le=4096)]
    max_owners: Annotated[int, Meta(ge=1, le=MAX_OWNERS)] = 2
    each: bool = False
    """The keys do not form a prefix: each is useful by itself, the first ones most, and `n_slices` is 1.  Owners that
    hold an earlier one come first, and their `n_keys` counts from the first one that they hold to the end."""
    promised: bool = False
    """With `each`: asks for instances whose engines compute the chunks from one of these on now, instead of owners."""
    on_disks: bool = False
    """Count chunks in instances' own L2 tiers too, which they load into L1 for an Await."""
    named: Annotated[str, Meta(pattern=INSTANCE_OR_NONE)] = ""
    """Asks for the address of this instance, whatever it holds; no tags are looked up."""


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """An instance that holds a prefix of the chunks, according to the directory."""

    instance: str
    incarnation: int
    peer_endpoint: str
    n_keys: int
    """Number of leading keys that it holds, a multiple of n_slices."""
    confirmed: bool
    """Whether it is current; False: it is from before the controller's restart."""
    peer_key: PublicKey
    """Public key with which the owner registered; readers connect only to a process that has its secret key."""


class WhereReply(ClusterReply, frozen=True, tag="where"):
    """Owners, best first: longest prefix, confirmed, same zone, least loaded; none if no one has the first chunk."""

    owners: Annotated[list[Owner], Meta(max_length=MAX_OWNERS)]


# --- to an instance: following -------------------------------------------------------------------------------


class Change(enum.IntEnum):
    """The change of a run's chunks; the numbers are those of `Pool.note_changes`."""

    ADMIT = 0
    EVICT = 1
    CLEAR = 2
    """The tier is empty now; the run has no tags."""


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Chunks of one tier that changed in the same way."""

    change: Change
    tier: TierName
    tags: Tags


class Hinted(msgspec.Struct, array_like=True, frozen=True):
    """What follows a request that one of the instance's engines has answered."""

    request_id: Annotated[str, Meta(max_length=256)]
    """The request's id in the API."""
    next: Annotated[int, Meta(ge=0, le=LATEST)]
    """A number of `kvstrata.types.Next`."""


class Changes(ClusterRequest, frozen=True, tag="changes"):
    """Asks what has changed since `cursor`.

    Without changes the answer comes at the next change, or after `wait_ms`.  Refused with `too_old` if the instance
    does not have all changes since then: the follower lists the chunks again.
    """

    cursor: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
    """`next` of the last answer; -1: asks only for the current `next`, at once."""
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 0
    condition: bool = False
    """Whether the answer has the instance's condition."""
    hints: Annotated[list[Hinted], Meta(max_length=MAX_HINTS)] = []
    """A gateway's hints about requests whose answers have ended. Hints about unknown requests are ignored."""


class Load(msgspec.Struct, array_like=True, frozen=True):
    """Counts of an instance since its start (`_total`), and its current numbers."""

    used_bytes: ByTier
    """Bytes used, by tier, as of a moment ago; tiers that do not know them are omitted."""
    capacity_bytes: ByTier
    """Capacity by tier; tiers without a cap are omitted."""
    hits_total: dict[HitSource, int]
    """Number of chunks that lookups asked for, by where they were found."""
    peer_sending_bytes: int
    """Bytes of L1 that are being sent to peers."""
    peer_sent_bytes_total: int
    peer_read_bytes_total: int
    sessions: int
    tier_states: Annotated[dict[TierName, Word], Meta(max_length=MAX_TIERS)] = {}
    """States of the tiers that are not active."""
    saved: BySize = {}
    """Share of recent requests' prefill seconds that an L1 of another size would have saved, by its relative size."""


class TierRate(msgspec.Struct, array_like=True, frozen=True):
    """How fast an instance loads from one tier into its L1, or its engines from L1 into their blocks, as measured."""

    tier: Annotated[str, Meta(pattern="^(l1|l2|peer)$")]
    latency_us: Annotated[int, Meta(ge=0, le=MAX_LATENCY_US)]
    bytes_s: Annotated[int, Meta(ge=1, le=MAX_BYTES_S)]


class Condition(msgspec.Struct, array_like=True, frozen=True):
    """The condition of an instance."""

    state: Annotated[str, Meta(pattern="^(ready|frozen|draining|stopping)$")]
    load: Load
    models: Annotated[list[KvKind], Meta(max_length=64)]
    obeys: tuple[ClusterId, Count] = (0, 0)
    """The greatest (cluster id, token) that the instance has received. A leader with a smaller pair concludes that etcd
    has lost its data, and takes a greater cluster id."""
    draining: bool = False
    """Whether the instance has stopped sending to peers. A leader that ordered otherwise repeats its order."""
    engines: Annotated[list[EngineUrl], Meta(max_length=MAX_ENGINES)] = msgspec.field(default_factory=list)
    """HTTP URLs of the engines attached to this instance, as far as they report them, sorted."""
    rates: Annotated[list[TierRate], Meta(max_length=3)] = msgspec.field(default_factory=list)
    """Load rates into its L1 from L2 and from peers, and from L1 into its engines, as far as measured."""


NO_CONDITION = Condition("ready", Load({}, {}, {}, 0, 0, 0, 0), [])
"""Placeholder for the condition of an instance that has not reported one yet."""


class Changed(ClusterReply, frozen=True, tag="changes"):
    """The changes, to be applied in this order; runs of one tier name no tag twice.

    If `next` is MAX_CHANGES beyond the asked cursor, more changes may wait.
    """

    next: int
    runs: Annotated[list[Run], Meta(max_length=3 * MAX_TIERS)]
    condition: Condition | None = None


class List(ClusterRequest, frozen=True, tag="list"):
    """Asks for a page of the chunks that a tier holds. Chunks that come or go meanwhile are in the changes."""

    tier: TierName
    cursor: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """0, or `next` of the previous page."""


class Listed(ClusterReply, frozen=True, tag="list"):
    """One page."""

    next: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """0 after the last page."""
    tags: Tags
    complete: bool = True
    """False: the tier cannot be listed (any further) now; list it again later."""


# --- to an instance: operations ------------------------------------------------------------------------------


class BaseOperation(msgspec.Struct, frozen=True, tag_field="operation"):
    """Base of the operations that a controller has an instance carry out. Unknown fields are ignored."""

    @property
    def kind(self) -> str:
        """The operation's name."""
        return str(self.__struct_config__.tag)


class Freeze(BaseOperation, frozen=True, tag="freeze"):
    """Accept no stores for this time, but serve the chunks in L1; 0 ends it."""

    freeze_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class Clear(BaseOperation, frozen=True, tag="clear"):
    """Drop the chunks; bytes in use become free when their use ends."""

    tier: Scope
    tenant: TenantName | None = None
    """Only this tenant's chunks; None: those of all tenants."""


class Evict(BaseOperation, frozen=True, tag="evict"):
    """Drop these chunks from L1."""

    keys: StorageKeys


class Claim(BaseOperation, frozen=True, tag="claim"):
    """Keep these chunks in L1 for this time, all or none."""

    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_KEYS * KEY_BYTES)]
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_CLAIM_S)]
    n_slices: SliceCount = 1
    spans: Spans = []
    identity: Root | None = None
    """None: the keys are storage keys, and the chunks before them are kept too."""
    tenant: TenantName = ""
    max_bytes: Annotated[int, Meta(gt=0)] | None = None


class AskClaims(BaseOperation, frozen=True, tag="claims"):
    """Answer with the document of /v1/claims."""


class Release(BaseOperation, frozen=True, tag="release"):
    """End this claim; `count` is 0 if the instance does not keep it."""

    claim: Annotated[str, Meta(min_length=1, max_length=200)]


class Pull(BaseOperation, frozen=True, tag="pull"):
    """Read these chunks into L1, from the owner if it sends them, else from other peers.

    Used by replicate, and by move, which then sends the owner an Evict.
    """

    keys: StorageKeys
    identity: Root | None
    """None if an admin named keys, whose identity is unknown: such a pull is refused."""
    n_slices: SliceCount = 1
    tenant: TenantName = ""
    owner: Owner | None = None
    spans: Spans = []
    """For slices with a span (see KvKind), only the chunks that the longest hit needs are read."""
    record_bytes: Annotated[list[Annotated[int, Meta(ge=1, le=2**32 - 1)]], Meta(max_length=4096)] = []
    """For each slice the length of a whole chunk's record; empty: unknown, and nothing can be loaded."""


class Drain(BaseOperation, frozen=True, tag="drain"):
    """Stop sending to peers; or, with `on` false, send to them again."""

    on: bool = True


class AskStatus(BaseOperation, frozen=True, tag="status"):
    """Answer with /v1/status, and in `runtime` with threads, memory, garbage collector and lag of the loop."""


class AskShared(BaseOperation, frozen=True, tag="shared"):
    """Answer with a Shared: the prefixes that the requests since the last AskShared have in common."""

    ends: Annotated[list[Root], Meta(max_length=MAX_ASKED_ENDS)] = []
    """Chain keys of the last chunks of prefixes that the controller tracks already."""
    depths: Annotated[list[Count], Meta(max_length=MAX_ASKED_ENDS)] = []
    """Number of chunks of each of them."""


Operation = Freeze | Clear | Evict | Claim | AskClaims | Release | Pull | Drain | AskStatus | AskShared


class Do(ClusterRequest, frozen=True, tag="do"):
    """Carry out an operation, once. Refused unless it comes from the latest leader that the instance knows.

    The answer, an Outcome, comes when it has ended; the controller waits at most `deadline_ms`.
    """

    operation: Operation
    deadline_ms: Annotated[int, Meta(ge=1, le=3_600_000)]
    token: Count = 0
    """Number of the controller's leadership, if the cluster has several controllers; 0: it is the only one."""
    cluster_id: ClusterId = 0
    """Compared before the token; it grows when etcd has lost its data or was restored. An instance keeps the greatest
    (cluster id, token) that any controller has sent, and refuses operations with a smaller pair."""


class Outcome(ClusterReply, frozen=True, tag="do"):
    """The operation has succeeded."""

    body: dict[str, Any] = {}
    """The `count` of changed objects, or the requested document."""


class SharedPrefix(msgspec.Struct, frozen=True):
    """Leading chunks that several requests had in common."""

    root: Root
    """Root of their identity."""
    chain: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_PEER_KEYS * KEY_BYTES)]
    """Chain keys."""
    slices: Annotated[list[Root], Meta(min_length=1, max_length=MAX_PEER_KEYS)]
    """As in KvKind."""
    spans: Spans
    record_bytes: Annotated[list[Annotated[int, Meta(ge=1, le=2**32 - 1)]], Meta(max_length=4096)]
    tenant: TenantName
    requests_s: Annotated[float, Meta(ge=0, le=1e9)]
    """Requests per second that asked for all of it."""
    own_chunks: Annotated[int, Meta(ge=1)]
    """Number of chunks at its end that no shorter prefix of this answer has."""
    compute_s: Annotated[float, Meta(ge=0, le=1e9)]
    """Seconds that an engine needs to compute these."""


class Shared(msgspec.Struct, frozen=True):
    """The body of an Outcome to AskShared."""

    prefixes: Annotated[list[SharedPrefix], Meta(max_length=MAX_SHARED)]
    """The prefixes that save the most computing."""
    asked: Annotated[list[Count], Meta(max_length=MAX_ASKED_ENDS)]
    """For each of `ends` the number of requests that asked for it."""
    served: Annotated[list[Count], Meta(max_length=MAX_ASKED_ENDS)]
    """For each of `ends` the number of these requests that got it without computing."""
    seconds: Annotated[float, Meta(gt=0, le=1e9)]
    """Length of the time in which these requests came."""


# --- instance to instance ---------------------------------------------------------------------------------


class PeerHello(Greeting, frozen=True, tag="peer_hello"):
    """Asks an owner for a ticket: the right to open one connection on which it sends records (p2p/frames.py)."""

    reader: InstanceId
    record_version: int
    """Version of the records that the reader can read (docs/internals/formats.md)."""
    engine: Annotated[str, Meta(max_length=32)]
    seal: bool
    """`p2p.engine` in use at the reader, and its `p2p.seal`. An owner with other values refuses the reader."""


class PeerWelcome(ClusterReply, frozen=True, tag="peer_hello"):
    """A ticket, and where to use it. `epoch` is the owner's incarnation."""

    instance: str
    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Both sides of the connection prove that they know it. The ticket is used once."""
    port: Annotated[int, Meta(ge=1, le=65_535)]
    """TCP port on the host of the owner's `peer_endpoint`."""
    host: Word
    """A name that is equal for processes of the owner's host; empty: unknown."""
    socket: Word
    """The owner's unix socket, for readers on its host; empty: none."""
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)] = b""
    """Metadata by which the transfer engine reaches the extents file of the owner's L1; empty without one."""


class Await(ClusterRequest, frozen=True, tag="await"):
    """Asks which further chunks of a prompt are in L1, and waits for one more if an engine has promised it.

    A sender that knows the root and the chain keys can derive the storage keys, so it may read the chunks.
    """

    root: Root
    """Root of the identity."""
    chain: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_AWAITED * KEY_BYTES)]
    """Chain keys of consecutive chunks, from before the first missing one."""
    slices: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_AWAITED_SLICES * KEY_BYTES)]
    """Digests of the slices of the asker's engine, sorted."""
    n_present: Count
    """Number of these chunks that the asker has."""
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_AWAIT_MS)]
    expects: bool = False
    """An engine is about to promise them: wait for that too."""
    within_ms: Count = 0
    """Do not wait for an engine that is expected to take longer than this; 0: no limit."""
    record_bytes: Annotated[
        list[Annotated[int, Meta(ge=1, le=2**32 - 1)]], Meta(max_length=MAX_AWAITED_SLICES)
    ] = []
    """For each slice the length of a chunk's record.  If given, chunks in the owner's L2 tiers are loaded into L1, and
    promises are not awaited."""
    tenant: TenantName = ""
    """The tenant for which loaded bytes count."""


class Awaited(ClusterReply, frozen=True, tag="await"):
    """The number of these chunks in L1 now, and how the wait has ended."""

    n_chunks: Count
    end: Literal["ready", "broken", "late", "expected", "none"]
    """`ready`: more chunks than the asker had; `broken`: the promise has ended; `late`: a promise of more exists, ask
    again; `expected`: no promise was made yet, ask again; `none`: no engine has promised any."""


# --- gateways ---------------------------------------------------------------------------------------------- A gateway
# sends a GatewayBeat periodically.  The answer names the instances, which the gateway follows itself.  Their conditions
# name their engines and the kinds of KV, from which the gateway derives the keys of a prompt's chunks.


Role = Literal["both", "prefill", "decode"]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class RatedEngine(msgspec.Struct, array_like=True, frozen=True):
    """An engine, and its speed as measured by a gateway."""

    url: Word
    group: Word
    """Name of the engine's group, equal for engines that can compute prompts for each other."""
    role: Role
    prefill_tokens_s: Annotated[float, Meta(gt=0, le=1e9)]
    alone_s: Seconds
    each_s: Seconds
    """A token of an answer takes `alone_s`, and `each_s` more for each request in flight."""


class ShapeCount(msgspec.Struct, array_like=True, frozen=True):
    """Requests of one class and about the same length that a group has answered since the gateway's start."""

    group: Word
    size: Annotated[int, Meta(ge=0, le=65_535)]
    """Code of the range of prompt and answer lengths."""
    ttft_ms: Annotated[float, Meta(ge=0, le=1e9)]
    tpot_ms: Annotated[float, Meta(ge=0, le=1e9)]
    requests: Count
    met: Count
    prompt_tokens: Count
    """Number of prompt tokens that were computed."""
    answer_tokens: Count


class GatewayBeat(Greeting, frozen=True, tag="gateway_beat"):
    """A gateway's heartbeat. Sent every `beat_ms` of the answer."""

    gateway: InstanceId
    version: Word
    port: Annotated[int, Meta(ge=0, le=65_535)]
    """Its HTTP port, on the host that the connection comes from; 0: a Unix socket."""
    policy: Word
    engines: Count
    engines_up: Count
    in_flight: Count
    requests_total: Count
    """Number of requests that have ended."""
    splits: bool = False
    """Whether one engine may compute a prompt for another."""
    rated: Annotated[list[RatedEngine], Meta(max_length=MAX_RATED)] = []
    shapes: Annotated[list[ShapeCount], Meta(max_length=MAX_SHAPES)] = []


class Served(msgspec.Struct, array_like=True, frozen=True):
    """An instance, with the facts that gateways need."""

    told: Register
    key: PublicKey
    """Public key with which the instance has registered; gateways connect only to a process that has its secret key."""
    readable: bool
    """Whether peers may read from it."""


class GatewayHeard(ClusterReply, frozen=True, tag="gateway_beat"):
    """The instances that the controller knows."""

    beat_ms: int
    instances: Annotated[list[Served], Meta(max_length=MAX_TOLD_INSTANCES)]


ToController = Register | Goodbye | Where | GatewayBeat
ToInstance = Changes | List | Do | PeerHello | Await
Answer = (
    Failure | Registered | Done | WhereReply | Changed | Listed | Outcome | PeerWelcome | Awaited | GatewayHeard
)  # fmt: skip


BAD_FRAME = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that decoding an invalid frame may raise."""


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


_ENCODER = msgspec.msgpack.Encoder()
TO_CONTROLLER: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
TO_INSTANCE: msgspec.msgpack.Decoder[ToInstance] = msgspec.msgpack.Decoder(ToInstance)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
"""Decoders of the messages that each side may receive; all raise one of BAD_FRAME for anything else."""


def failure(seq: int, epoch: int, error: KvstrataError) -> Failure:
    """The answer to a request that failed with this error."""
    return Failure(
        seq, epoch, error.code, error.message[:2000], error.field[:200], error.retryable, error.retry_after_ms
    )


def refusal_of(frame: bytes, error: Exception) -> tuple[int, KvstrataError]:
    """The seq of an invalid request, so that its sender gets an answer (0: it has none), and why it is refused."""
    refused: KvstrataError = BadRequest(f"not a request that is answered here: {error}")
    try:
        parts = msgspec.msgpack.decode(frame)
    except BAD_FRAME:
        return 0, refused
    name, seq, protocol = [*parts, None, None, None][:3] if isinstance(parts, list) else (None, None, None)
    if name in [one.__struct_config__.tag for one in Greeting.__subclasses__()]:
        refused = other_protocol(protocol) or refused
    return seq if isinstance(seq, int) and 0 <= seq < 1 << 63 else 0, refused


def other_protocol(found: object) -> WrongVersion | None:
    """Why a greeting with this protocol is refused; None: it is ours."""
    if found == CLUSTER_PROTOCOL_VERSION:
        return None
    spoken = f"version {found}" if isinstance(found, int) else "a version below 15"
    older = "answering" if isinstance(found, int) and found > CLUSTER_PROTOCOL_VERSION else "asking"
    return WrongVersion(
        f"protocol: the asking process speaks {spoken}, the answering one {CLUSTER_PROTOCOL_VERSION}; "
        f"upgrade the {older} process",
        field="protocol",
    )


def tags_of(keys: bytes) -> bytes:
    """The tags of concatenated 32-byte keys, in order."""
    words = memoryview(keys).cast("Q")
    return words[:: KEY_BYTES // TAG_BYTES].tobytes()
