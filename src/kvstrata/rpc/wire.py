"""Messages of the RPC protocol: one msgpack array per frame, the operation's name first.

A request is `[op, session, seq, …]`, its reply `[op, seq, epoch, …]` or
`["error", seq, epoch, code, message, field, retryable]`.  `session` (16 bytes) and `seq` are chosen by the
client; a repeated (session, seq) gets the same outcome and does nothing twice.  Times on the wire are
remaining milliseconds.  Keys travel as concatenated 32-byte strings.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.types import KEY_BYTES, LayoutIdentity, RequestIdentity, Role, Slice

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 8 << 20
"""A larger request is dropped by the socket and its sender disconnected."""
MAX_CHUNKS = 65_536
"""Chunks in one request (16 M tokens of 256)."""
MAX_DEADLINE_MS = 60_000
MAX_RESERVE_CHUNKS = 4_096
"""Chunks in one reserve, commit, abort or corrupt; longer prompts go in several."""
MAX_LIVE = 16_384
"""Lookups named in one ping."""
MAX_RELEASES = 1_024
"""Leases in one release."""
MAX_RETRIEVE_BYTES = 4 << 20
MAX_SLICES = 4096
"""Distinct slices of one engine."""
MAX_HELD_LOCKS = 1024
"""Lock files of one process: one per segment it was ever attached to."""
SESSION_BYTES = 16
NO_SESSION = bytes(SESSION_BYTES)
MAX_SEQ = (1 << 63) - 1

Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
SessionName = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Keys = Annotated[bytes, Meta(max_length=MAX_CHUNKS * KEY_BYTES)]
"""Concatenated 32-byte keys."""
ReserveKeys = Annotated[bytes, Meta(max_length=MAX_RESERVE_CHUNKS * KEY_BYTES)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Probe = Annotated[bytes, Meta(max_length=8)]
DeadlineMs = Annotated[int, Meta(ge=0, le=MAX_DEADLINE_MS)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, Meta(ge=0, lt=MAX_RESERVE_CHUNKS)]
Indices = Annotated[list[Index], Meta(max_length=MAX_RESERVE_CHUNKS)]
MAX_SHORT_TEXT = 512
ShortText = Annotated[str, Meta(max_length=MAX_SHORT_TEXT)]
RequestId = Annotated[str, Meta(max_length=256)]
LeaseId = tuple[SessionName, Seq]
"""(session that looked up, its lookup's seq)"""


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Common head of all requests."""

    session: SessionName
    seq: Seq


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Common head of all replies."""

    seq: int
    epoch: int


class Hello(Request, frozen=True, tag="hello"):
    """Opens a conversation; allowed without a session (then `session` is 16 zero bytes)."""

    protocol: int
    """The version the client speaks."""
    client: Annotated[str, Meta(max_length=256)] = ""


class HelloReply(Reply, frozen=True, tag="hello"):
    """What the server is; `wrong_version` names both versions."""

    protocol: int
    server: str
    """Name and version."""
    instance_id: str
    chunk_tokens: int
    socket_dir: str
    max_message_bytes: int
    """Longest frame it takes."""
    has_l2: bool
    """Whether a miss in L1 may still be a hit."""
    max_reserved_bytes: int
    """Bytes one session may hold reserved at a time; larger stores go in several reserves."""


class Identify(Request, frozen=True, tag="identify"):
    """Declares a request identity once. The layout identity was declared at attach."""

    request: RequestIdentity


class IdentifyReply(Reply, frozen=True, tag="identify"):
    """The identity is known from here on."""

    identity_id: int
    """Stands for the identity in later messages of this session, in this epoch."""
    root: bytes
    """32 bytes; the client compares it with its own."""
    slices: list[bytes]
    """Digests of the group's slices known now, sorted; the order of extents in lookup replies."""
    complete: bool
    """All `engine_slices` of the group are known; until then every lookup answers 0."""


class DeviceCopies(msgspec.Struct, array_like=True, frozen=True):
    """A list: how a process whose blocks are on a device copies between them and L1."""

    engine: Annotated[str, Meta(max_length=32)]
    """The way of copying: `dma`, `kernel` or `staged`."""
    reason: ShortText
    """Why that one."""
    mb_per_s: Annotated[dict[Annotated[str, Meta(max_length=32)], Count], Meta(max_length=16)]
    """What each way reached when they were measured, in 10^6 bytes per second."""
    pinned_bytes: Count
    """Bytes of L1 that are registered with the device's driver."""
    pin_refusal: ShortText
    """Why no more are, in the driver's words; empty: nothing was refused."""


class Ping(Request, frozen=True, tag="ping"):
    """Liveness. `live` names the lookups this session still wants, among those older than this ping.

    A lookup that is not named and whose own share was not released is undone for the whole group: a looker
    that handed a lease to workers names it until its own release was answered.
    """

    live: Annotated[list[Seq], Meta(max_length=MAX_LIVE)] | None = None
    copies: DeviceCopies | None = None
    """Told when it has changed, and again to another server."""


class Pong(Reply, frozen=True, tag="ping"):
    """The server is alive. Also sent unasked, with seq 0, when leases are asked back."""

    orphaned: list[tuple[bytes, int]] = []
    """Leases (session that looked up, seq) whose looker is gone: release the own share once no copy runs."""
    revoked: list[int] = []
    """Own lookups whose leases are asked back: release for the group what nobody was promised."""


class Rule(enum.StrEnum):
    """How a group of keys counts as hit."""

    PREFIX = "prefix"
    """As far as all leading chunks are there."""


class Group(msgspec.Struct, array_like=True, frozen=True):
    """Keys of one KV-cache group: chain keys c_i, concatenated."""

    rule: Rule
    keys: Keys


class Lookup(Request, frozen=True, tag="lookup"):
    """How many leading chunks are there; leases them for the caller's engine group."""

    deadline_ms: DeadlineMs
    """Time left until it must be answered."""
    identity_id: Count
    request_id: RequestId
    """What `explain` asks for later."""
    groups: Annotated[list[Group], Meta(min_length=1, max_length=1)]
    """`rule` and the prompt's concatenated chain keys."""
    probe: Probe = b""
    """Names the first chunk's tokens without any identity, to explain a miss."""


class LookupReply(Reply, frozen=True, tag="lookup"):
    """These chunks are leased."""

    n_chunks: int
    """Leading chunks that are there in all slices."""
    extents: bytes
    """n_chunks × slices packed extents, chunk-major, slices in the order of the reply to `identify`."""
    l1_chunks: int
    """Of them, those that L1 had."""
    l2_chunks: int
    """Those that were loaded."""
    reason: str
    """Reason of the first chunk that is not served, empty if all are."""


class Release(Request, frozen=True, tag="release"):
    """Ends the caller's share of leases; with `group` every member's share (never handed to workers)."""

    leases: Annotated[list[LeaseId], Meta(max_length=MAX_RELEASES)]
    """(session that looked up, seq of the lookup)"""
    group: bool = False
    """All shares at once."""


class Reserve(Request, frozen=True, tag="reserve"):
    """Asks for extents to write chunks of the caller's own slice."""

    deadline_ms: DeadlineMs
    """As in a lookup."""
    identity_id: Count
    parent: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    """Chain key of the chunk before the first, empty at the start of a prompt."""
    keys: ReserveKeys
    """Concatenated chain keys of one chain, in order."""
    record_bytes: Count
    """Length of each record."""
    probe: Probe = b""


class ReserveOutcome(enum.IntEnum):
    """Per chunk of a reserve. Everything above IN_FLIGHT is a refusal with its reason."""

    RESERVED = 0
    """There is an extent to write."""
    PRESENT = 1
    """It is in L1 already."""
    IN_FLIGHT = 2
    """Somebody else writes it."""
    CHAIN_EXCEEDS_POOL = 3
    """Only chunks of the same chain could make room."""
    POOL_PINNED = 4
    """Everything that could make room is in use."""
    SESSION_LIMIT = 5
    """This process has too much reserved."""
    QUOTA = 6
    """Its tenant's share of L1 is used up."""
    TOO_LARGE = 7
    """No extent of L1 is that long."""
    ENTRIES_FULL = 8
    """The index has no entry left."""
    FROZEN = 9
    """The instance stores nothing new for some seconds, while its cluster's controller takes stock of it."""
    PARENT_ABSENT = 10
    """The chunk before it was refused or evicted, so no lookup could count this one; nothing is evicted for it."""


class ReserveReply(Reply, frozen=True, tag="reserve"):
    """What may be written where."""

    outcomes: bytes
    """One byte per chunk, see the outcomes of reserve."""
    extents: bytes
    """One packed extent per chunk, zeros where there is none."""


class CommitOutcome(enum.IntEnum):
    """Per chunk of a commit."""

    COMMITTED = 0
    """It is visible."""
    NOT_RESERVED = 1
    """This reservation does not, or no longer, have it."""
    BAD_RECORD = 2
    """Its header is not that of what was reserved; the extent was given back."""


class Commit(Request, frozen=True, tag="commit"):
    """Makes written chunks visible. `reservation` is the seq of the reserve; `indices` into its keys."""

    reservation: Seq
    indices: Indices


class CommitReply(Reply, frozen=True, tag="commit"):
    """The reservation of these items has ended, whatever the outcome."""

    outcomes: bytes
    """One byte per index, see the outcomes of commit."""


class Abort(Request, frozen=True, tag="abort"):
    """Gives reserved extents back; the caller promises that nobody writes them any more."""

    reservation: Seq
    indices: Indices | None = None
    """nil: all that are left."""


class Cancel(Request, frozen=True, tag="cancel"):
    """Whatever `target` did or will do is undone; valid before, after and without the request."""

    target: Seq
    """The request's seq."""


class Retrieve(Request, frozen=True, tag="retrieve"):
    """Bytes of one record by RPC, for clients that cannot map the pool."""

    identity_id: Count
    key: Key
    """Chain key."""
    slice_digest: Key
    offset_bytes: Count
    length_bytes: Annotated[int, Meta(ge=0, le=MAX_RETRIEVE_BYTES)]


class RetrieveReply(Reply, frozen=True, tag="retrieve"):
    """A part of a record."""

    found: bool
    record_bytes: int
    body: bytes


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Prewarm: load chunks from L2 to L1 with no request behind it."""

    identity_id: Count
    keys: Keys
    """Concatenated chain keys of one prompt, in order."""
    budget_bytes: Count
    """Bytes it may load; 0 means as much as fits."""
    ttl_ms: Annotated[int, Meta(ge=0, le=3_600_000)]
    """It stops after this long."""


class PrefetchReply(Reply, frozen=True, tag="prefetch"):
    """It has begun."""

    job: int
    """What `status` is asked for its outcome."""


class Status(Request, frozen=True, tag="status"):
    """`job` 0: the instance; otherwise the outcome of a prewarm job."""

    job: Count = 0


class Tier(enum.StrEnum):
    """What a clear empties."""

    L1 = "l1"
    """Shared memory."""
    L2 = "l2"
    """Everything behind it."""
    ALL = "all"
    """Both."""


class Clear(Request, frozen=True, tag="clear"):
    """Drops chunks. `tier`: l1, l2 or all; without `tenant`: every tenant the peer may use.

    Nobody finds a dropped chunk any more. Where its bytes are in use, they are free when the use ends.
    """

    tier: Tier
    tenant: Annotated[str, Meta(max_length=256)] | None = None
    wait: bool = False
    """Answer when all bytes of dropped chunks are free, at most 30 s later."""


class Explain(Request, frozen=True, tag="explain"):
    """How many chunks of a recent lookup hit where, and why the first missing one missed."""

    request_id: RequestId


class Quiesced(Request, frozen=True, tag="quiesced"):
    """Nothing of this process touches extents leased or reserved before the present epoch any more."""


class Corrupt(Request, frozen=True, tag="corrupt"):
    """The caller's verified copy failed on these chunks of its slice; the server checks them itself."""

    keys: ReserveKeys
    """Concatenated chain keys."""


class Cleared(Reply, frozen=True, tag="cleared"):
    """Outcome of clear."""

    count: int
    """Chunks that left the tiers."""
    held: int
    """Chunks that clears have dropped from L1 and whose bytes a put or a read of the server still uses."""
    leased: int
    """Such whose bytes an engine still reads."""
    kept: int
    """Chunks that stay in L1, because they are pinned or another instance reads them."""


class Ok(Reply, frozen=True, tag="ok"):
    """Outcome of release, abort, cancel, quiesced, corrupt: how many things changed.

    release: leases whose share ended; abort: extents given back; cancel: 1 if something was undone or
    stopped; corrupt: chunks dropped.
    """

    count: int = 0
    """As said above."""


class Document(Reply, frozen=True, tag="document"):
    """Outcome of status and explain."""

    body: dict[str, Any]


class Error(Reply, frozen=True, tag="error"):
    """The request failed."""

    code: str
    message: str
    """What is wrong and what to change, for people."""
    field: str
    """The field that was wrong, where one was."""
    retryable: bool
    """Whether the same request may succeed later without the sender changing anything."""


REPLIES: dict[type[Request], type[Reply]] = {
    Hello: HelloReply,
    Identify: IdentifyReply,
    Ping: Pong,
    Lookup: LookupReply,
    Release: Ok,
    Reserve: ReserveReply,
    Commit: CommitReply,
    Abort: Ok,
    Cancel: Ok,
    Retrieve: RetrieveReply,
    Prefetch: PrefetchReply,
    Status: Document,
    Clear: Cleared,
    Explain: Document,
    Quiesced: Ok,
    Corrupt: Ok,
}
"""What answers each request, unless an Error does."""


AnyRequest = (
    Hello | Identify | Ping | Lookup | Release | Reserve | Commit | Abort | Cancel | Retrieve | Prefetch
    | Status | Clear | Explain | Quiesced | Corrupt
)  # fmt: skip
AnyReply = (
    HelloReply | IdentifyReply | Pong | LookupReply | ReserveReply | CommitReply | RetrieveReply
    | PrefetchReply | Cleared | Ok | Document | Error
)  # fmt: skip


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """First message on the attach socket, with the caller's own pidfd."""

    protocol: int
    session: SessionName
    """Chosen by the caller, random; the same one when it attaches again."""
    group: SessionName
    """Names the engine; all its processes attach with the same 16 bytes."""
    role: Role
    """What the process does in its engine."""
    layout: LayoutIdentity
    engine_slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)]
    """How many distinct slices the whole engine has."""
    slice: Slice | None = None
    """The slice this process reads and writes; nil for a scheduler."""
    facts: dict[str, Any] | None = None
    """Derived layout facts behind `slice.layout`: the same identity with other facts is refused, naming the field."""
    old_epoch: int = 0
    """Epoch of the attachment before, 0 for none."""
    registers_memory: bool = False
    """Whether a device may access the extents on behalf of this process (they are registered with its driver). Such
    access may outlast the locks of a process that dies, though not its pidfd."""
    token: Annotated[str, Meta(max_length=256)] = ""
    """Proves which tenants this process may use, where the server was given a tenants file."""
    held_locks: Annotated[list[tuple[int, int]], Meta(max_length=MAX_HELD_LOCKS)] = []
    """(device, inode) of every sessions.lock this process already has open. It must never get a second
    descriptor of one: closing that would drop its locks."""

    def __repr__(self) -> str:
        """Every field but the token, which is a secret."""
        shown = {**msgspec.structs.asdict(self), "token": "***" if self.token else ""}
        return f"AttachRequest({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer on the attach socket; `code` empty means accepted. Then the descriptors index (read-only) and
    extents come along, and sessions.lock unless the request's `held_locks` names it."""

    code: str = ""
    message: str = ""
    field: str = ""
    """As in an error reply."""
    row: int = 0
    """Of the session table."""
    epoch: int = 0
    """Changes with every start of the server."""
    pool_id: bytes = b""
    """Changes with every new pool: then the descriptors must be mapped anew."""
    extents_bytes: int = 0
    """Length of the extents file."""
    instance_id: str = ""
    lock_file: tuple[int, int] = (0, 0)
    """(device, inode) of sessions.lock; the client locks byte `row` of it for life."""


def encode(reply: msgspec.Struct) -> bytes:
    """One frame."""
    return _ENCODER.encode(reply)


def decode_request(frame: bytes) -> AnyRequest:
    """The request in a frame. Raises msgspec.MsgspecError for anything else."""
    return _REQUESTS.decode(frame)


def decode_reply(frame: bytes) -> AnyReply:
    """The reply in a frame. Raises msgspec.MsgspecError for anything else."""
    return _REPLIES.decode(frame)


_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_REPLIES: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def key_count(keys: bytes) -> int:
    """Number of 32-byte keys; -1 when the length is not a multiple of 32."""
    count, rest = divmod(len(keys), KEY_BYTES)
    return -1 if rest else count
