"""Messages between a process and its server: one msgpack array each, which begins with the operation's name.

A request is `[op, seq, …]`, its reply `[op, seq, epoch, …]` or `["error", seq, epoch, code, message, field,
retryable]`.  The connection identifies the sender and delivers messages once and in order, so no message is sent twice.
A process numbers its requests upwards with one counter as long as it lives: the number of a lookup or reserve names its
lease or reservation.  If its connection is cut, a process attaches again, fails its unanswered requests, and names in
`resume` the grants that it still has; the server ends the others.  Times on the wire are remaining milliseconds.  Keys
travel as concatenated 32-byte strings.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.errors import BadRequest
from kvstrata.types import KEY_BYTES, LATEST, LayoutIdentity, RequestIdentity, Role, Slice

PROTOCOL_VERSION = 10
MAX_MESSAGE_BYTES = 4 << 20
"""Maximum length of a request; the server closes the connection of a process that sends a longer one."""
MAX_CHUNKS = 65_536
"""Maximum number of chunks in one request (16 M tokens, at 256 tokens a chunk)."""
MAX_DEADLINE_MS = 60_000
MAX_RESERVE_CHUNKS = 1_024
"""Maximum number of chunks in one reserve, commit, abort or corrupt; a longer prompt takes several. A commit of that
many holds the server's loop for about 1.5 ms."""
MAX_LIVE = 16_384
"""Maximum number of lookups, reserves and promises named in one resume."""
MAX_MISSES = 32
"""Maximum number of misses, and of hints, in one ping."""
MAX_MISSED_CHUNKS = 1_024
MAX_RELEASES = 1_024
"""Maximum number of leases in one release."""
MAX_RETRIEVE_BYTES = 256 << 10
"""Maximum bytes of a record in one reply; a longer record takes several."""
MAX_SLICES = 4096
"""Maximum number of distinct slices of one engine."""
MAX_TAIL_SETS = 4
"""Maximum number of chunks of which one lookup may name tails."""
MAX_TAILS = 256
"""Maximum number of tails of one chunk in a lookup, and of tails that one reserve replaces."""
MAX_TAIL_TOKENS = 1 << 16
MAX_LEADING_CHUNKS = 1 << 16
ENGINE_URL = r"^(|https?://[^\s/?#@]+:[0-9]{1,5})$"
"""Form of an engine's URL."""
MAX_HELD_LOCKS = 1024
"""Maximum number of lock files of one process: one per segment that it was ever attached to."""
MAX_LATENCY_US = 3_600_000_000
MAX_BYTES_S = 1 << 50
MAX_TOKENS_S = 1 << 40
MAX_SHORT_TEXT = 512
TRACEPARENT_CHARS = 55
SESSION_BYTES = 16
NO_SESSION = bytes(SESSION_BYTES)
MAX_SEQ = (1 << 63) - 1

Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
Count = Seq
SessionName = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Keys = Annotated[bytes, Meta(max_length=MAX_CHUNKS * KEY_BYTES)]
"""Concatenated 32-byte keys."""
ReserveKeys = Annotated[bytes, Meta(max_length=MAX_RESERVE_CHUNKS * KEY_BYTES)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Probe = Annotated[bytes, Meta(max_length=8)]
INSTANCE_OR_NONE = r"^[A-Za-z0-9._-]{0,64}$"
DeadlineMs = Annotated[int, Meta(ge=0, le=MAX_DEADLINE_MS)]
Index = Annotated[int, Meta(ge=0, lt=MAX_RESERVE_CHUNKS)]
Indices = Annotated[list[Index], Meta(max_length=MAX_RESERVE_CHUNKS)]
RequestId = Annotated[str, Meta(max_length=256)]
TraceParent = Annotated[str, Meta(max_length=TRACEPARENT_CHARS)]
"""The client's span in the format of W3C Trace Context, the parent of the server's spans; empty: none."""
TailKeys = Annotated[bytes, Meta(max_length=MAX_TAILS * KEY_BYTES)]
ShortText = Annotated[str, Meta(max_length=MAX_SHORT_TEXT)]
LeaseId = tuple[SessionName, Seq]
"""(session that looked up, seq of the lookup)"""


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a connection; the caller's own pidfd travels with it."""

    protocol: int
    session: SessionName
    """Random bytes that the caller chooses; the same when the process attaches again."""
    group: SessionName
    """Name of the engine: all its processes attach with the same 16 bytes."""
    role: Role
    """Role of the process in its engine."""
    layout: LayoutIdentity
    engine_slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)]
    """Number of distinct slices of the whole engine."""
    slice: Slice | None = None
    """The slice that this process reads and writes; nil for a scheduler."""
    facts: dict[str, Any] | None = None
    """Layout facts from which `slice.layout` is derived. The same identity with other facts, apart from `axes` and
    `block_tokens`, is refused; the error names the first fact that differs."""
    old_epoch: int = 0
    """Epoch of the previous attachment, 0 for none."""
    registers_memory: bool = False
    """Whether the extents are registered with a device's driver, so that the device may access them for this process.
    Such access may outlast the locks of a process that dies, but not its pidfd."""
    token: Annotated[str, Meta(max_length=256)] = ""
    """Token for the tenants that this process may use, if the server has a tenants file."""
    kv_bytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes that the chunks in the engine's own cache would take in L1, sent by its scheduler; 0: unknown."""
    engine_url: Annotated[str, Meta(max_length=256, pattern=ENGINE_URL)] = ""
    """HTTP URL at which gateways reach the engine, sent by its scheduler; empty: it is not announced to gateways."""
    held_locks: Annotated[list[tuple[int, int]], Meta(max_length=MAX_HELD_LOCKS)] = []
    """(device, inode) of every sessions.lock that this process has open. The process must never get a second descriptor
    of such a file, because closing that descriptor would drop its locks."""

    def __repr__(self) -> str:
        """Every field but the token, which is a secret."""
        shown = {**msgspec.structs.asdict(self), "token": "***" if self.token else ""}
        return f"AttachRequest({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to it; an empty `code` means accepted.

    With an accepted attach, descriptors travel with it: index (read-only), extents (read-only for a process without a
    slice), and sessions.lock, unless the request's `held_locks` names it.
    """

    code: str = ""
    message: str = ""
    field: str = ""
    """The field of the request that was refused, as in an error reply."""
    row: int = 0
    """Row of the process in the session table."""
    epoch: int = 0
    """Changes with every start of the server."""
    pool_id: bytes = b""
    """Changes with every new pool, whose files the client must then map again."""
    extents_bytes: int = 0
    """Length of the extents file."""
    max_reserved_bytes: int = 0
    """Maximum number of bytes that the process may have reserved at a time; a larger store takes several reserves."""
    instance_id: str = ""
    lock_file: tuple[int, int] = (0, 0)
    """(device, inode) of sessions.lock; the client locks byte `row` of it for life."""


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Base of all requests, with their common first field."""

    seq: Seq


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all replies, with their common first fields."""

    seq: int
    epoch: int


class Identify(Request, frozen=True, tag="identify"):
    """Declares a request identity, once for each; the layout identity was declared when the process attached."""

    request: RequestIdentity
    layout: LayoutIdentity | None = None
    """The layout identity, from a client that is not attached."""
    slices: Annotated[list[Key], Meta(max_length=MAX_SLICES)] = []
    """Digests of the slices of its chunks, from a client that is not attached."""


class IdentifyReply(Reply, frozen=True, tag="identify"):
    """The server knows the identity from now on."""

    identity_id: int
    """Number that names the identity in later messages of this session and epoch."""
    root: bytes
    """The identity's root, 32 bytes; the client compares it with its own."""
    slices: list[bytes]
    """Digests of the group's slices that are known now, sorted; extents in lookup replies have this order."""
    complete: bool
    """Whether all `engine_slices` of the group are known; until then every lookup answers 0."""
    spans: list[int] = []
    """For each slice how many of a hit's last chunks it needs, 0: all. Empty if every slice needs all."""


class DeviceCopies(msgspec.Struct, array_like=True, frozen=True):
    """How a process whose blocks are on a device copies between them and L1; a list."""

    engine: Annotated[str, Meta(max_length=32)]
    """The way of copying: `dma` or `kernel`."""
    pinned_bytes: Count
    """Bytes of L1 that are registered with the device's driver."""
    pin_refusal: ShortText
    """The driver's reason for refusing to register more bytes; empty if it refused none."""


class LoadRate(msgspec.Struct, array_like=True, frozen=True):
    """How fast a process copies its slice of chunks from L1 into its blocks: latency, and rate beyond it; a list."""

    latency_us: Annotated[int, Meta(ge=0, le=MAX_LATENCY_US)]
    bytes_s: Annotated[int, Meta(ge=1, le=MAX_BYTES_S)]

    @classmethod
    def of(cls, latency_s: float, bytes_s: float) -> LoadRate:
        """The rate with these numbers, cut to the limits of the fields."""
        return cls(min(MAX_LATENCY_US, round(latency_s * 1e6)), max(1, min(MAX_BYTES_S, round(bytes_s))))

    def differs(self, other: LoadRate) -> bool:
        """Whether a number is more than a tenth of the other's away from it; latencies at least 100 µs."""
        latency_us = abs(self.latency_us - other.latency_us)
        rate = abs(self.bytes_s - other.bytes_s)
        return latency_us > max(100, other.latency_us // 10) or rate > other.bytes_s // 10


class TailSet(msgspec.Struct, array_like=True, frozen=True):
    """Tails of one chunk of a prompt, of which one may end the hit."""

    chunk: Annotated[int, Meta(ge=0, le=MAX_LEADING_CHUNKS)]
    """Index of the chunk; its tails count if exactly the chunks before it are present."""
    tokens: Annotated[list[Annotated[int, Meta(gt=0, le=MAX_TAIL_TOKENS)]], Meta(max_length=MAX_TAILS)]
    """Number of tokens of each tail, in the order of preference."""
    keys: TailKeys
    """Their concatenated chain keys."""
    in_l2: bool = False
    """Whether L2 is asked for them if L1 has none."""


class Miss(msgspec.Struct, array_like=True, frozen=True):
    """A miss that the process found in the shared index, without a lookup; a list."""

    identity_id: Count
    request_id: RequestId
    """As in a lookup."""
    chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    """Number of chunks from the first absent one to the last requested one."""
    absent: Key
    """Chain key of the first absent chunk."""
    last: Key
    """Chain key of the last requested chunk."""
    probe: Probe = b""
    """As in a lookup; empty if the first absent chunk is not the prompt's first."""
    chain: Annotated[bytes, Meta(max_length=MAX_MISSED_CHUNKS * KEY_BYTES)] = b""
    """Chain keys of the prompt's first chunks, for the server's statistics of requests."""


class Hint(msgspec.Struct, array_like=True, frozen=True):
    """What follows a request of the process; a list."""

    identity_id: Count
    last: Key
    """Chain key of the last chunk of the request that was stored or loaded."""
    next: Annotated[int, Meta(ge=1, le=LATEST)]
    """A number of `types.Next`."""


class Ping(Request, frozen=True, tag="ping"):
    """Says that the process is alive."""

    copies: DeviceCopies | None = None
    """Sent when it has changed, and once to each new server."""
    loads: LoadRate | None = None
    """Sent when it is known and has changed by more than a tenth, and once to each new server."""
    misses: Annotated[list[Miss], Meta(max_length=MAX_MISSES)] = []
    """Misses since the last ping; the server counts and explains them as it does those of lookups."""
    hints: Annotated[list[Hint], Meta(max_length=MAX_MISSES)] = []
    """Hints about requests that have ended since the last ping."""
    prompt_tokens_s: Annotated[float, Meta(ge=0, le=MAX_TOKENS_S)] = 0.0
    """Tokens at a prompt's start that the engine computes per second; 0: unknown, or reported before."""


class Pong(Reply, frozen=True, tag="ping"):
    """The server is alive. Also sent without a ping, with seq 0, when the server revokes leases."""

    orphaned: list[tuple[bytes, int]] = []
    """Leases (session that looked up, seq) of sessions that have ended: release your own share once no copy runs."""
    revoked: list[int] = []
    """Your own lookups whose leases the server revokes: release, for the group, those promised to no request."""
    engines_kv_bytes: int | None = None
    """The sum of `AttachRequest.kv_bytes` over all attached engines, for an engine that has sent its own."""


class Lookup(Request, frozen=True, tag="lookup"):
    """Asks how many leading chunks are present, and leases them for the engine group of the caller."""

    deadline_ms: DeadlineMs
    """Time left for the answer."""
    identity_id: Count
    request_id: RequestId
    """The engine's id of the request, by which `explain` finds this lookup."""
    keys: Keys
    """The prompt's concatenated chain keys; those up to the first whose chunk is not present are a hit."""
    probe: Probe = b""
    """Digest of the first chunk's tokens without any identity, for explaining a miss."""
    tails: Annotated[list[TailSet], Meta(max_length=MAX_TAIL_SETS)] = []
    """Tails that may end the hit. Not for engines with slices that have a span."""
    traceparent: TraceParent = ""
    own_chunks: Count = 0
    """Number of leading chunks in the engine's own cache: it computes and copies only those after them."""
    stores_late: bool = False
    """The engine stores a chunk when its own cache is about to lose it, so hits there are no uses of L1's chunks."""
    wait_ms: DeadlineMs = 0
    """Time beyond `deadline_ms` that it may wait for chunks that other engines have promised."""
    expects: bool = False
    """Another engine is about to promise them: wait for that too."""
    source: Annotated[str, Meta(pattern=INSTANCE_OR_NONE)] = ""
    """Id of the instance whose engine promises them; empty: this one."""
    in_parts: bool = False
    """Whether it may be answered before L1 has all promised chunks, when the rest is expected soon."""
    follows: Count = 0
    """Number of leading chunks that the engine got by earlier parts of this lookup; it holds blocks for the rest."""


class LookupReply(Reply, frozen=True, tag="lookup"):
    """The leading chunks that are present, and now leased."""

    n_chunks: int
    """Leading chunks that are present in all slices, or as far as the slices' spans need them."""
    extents: bytes
    """n_chunks × slices packed extents, chunk by chunk, with the slices in the order of the reply to `identify`. They
    are zero for chunks that a slice with a span does not need."""
    l1_chunks: int
    """The number of these chunks that were in L1."""
    l2_chunks: int
    """The number of these chunks that were loaded from L2."""
    reason: str
    """Why the first chunk that is not served is missing; empty if all are served."""
    tail_tokens: int = 0
    """Number of tokens of the leased tail that follows these chunks; 0: none."""
    tail_extents: bytes = b""
    """Its packed extents, one for each slice."""
    promised: int = 0
    """If more than `n_chunks`: number of leading chunks expected soon; a lookup that `follows` asks for the rest."""


class Release(Request, frozen=True, tag="release"):
    """Ends the caller's share of leases; with `group`, those of all processes, if the caller handed no lease on."""

    leases: Annotated[list[LeaseId], Meta(max_length=MAX_RELEASES)]
    """(session that looked up, seq of the lookup)"""
    group: bool = False
    """End the shares of all processes."""


class Reserve(Request, frozen=True, tag="reserve"):
    """Asks for extents to write chunks of the caller's own slice."""

    deadline_ms: DeadlineMs
    """Time left for the answer."""
    identity_id: Count
    parent: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    """Chain key of the chunk before the first, empty at the start of a prompt."""
    keys: ReserveKeys
    """Concatenated chain keys of one chain, in order."""
    record_bytes: Count
    """Length of each record."""
    probe: Probe = b""
    """Digest of the first chunk's tokens, as in a lookup."""
    tail_tokens: Annotated[int, Meta(ge=0, le=MAX_TAIL_TOKENS)] = 0
    """Number of tokens if the only key is that of a tail; else 0."""
    replaces: TailKeys = b""
    """Chain keys of tails that are useless when the chunks, or the tail, are in L1; they leave L1 then."""
    traceparent: TraceParent = ""


class ReserveOutcome(enum.IntEnum):
    """Outcome of a reserve for one chunk. Values above IN_FLIGHT are refusals, each with its reason."""

    RESERVED = 0
    """The chunk has an extent to write."""
    PRESENT = 1
    """The chunk is in L1 already."""
    IN_FLIGHT = 2
    """Another process is writing the chunk."""
    CHAIN_EXCEEDS_POOL = 3
    """Space could only be made by evicting chunks of the same chain."""
    POOL_PINNED = 4
    """All chunks that could be evicted are in use."""
    SESSION_LIMIT = 5
    """This session, its process or its token has reserved too many bytes; reserve again when some have ended."""
    QUOTA = 6
    """It would exceed its tenant's quota, and all chunks that could be evicted for it are within others' quotas."""
    TOO_LARGE = 7
    """The record is longer than L1, or has 4 GiB or more."""
    ENTRIES_FULL = 8
    """The index has no entry left."""
    FROZEN = 9
    """The instance stores nothing new for some seconds, during a full sync with its cluster's controller."""
    PARENT_ABSENT = 10
    """The previous chunk was refused or evicted, so no lookup could reach this one; nothing is evicted for it."""
    WORTH_LESS = 11
    """L1 is full of chunks that are worth more than this one, and no L2 would take it."""


class ReserveReply(Reply, frozen=True, tag="reserve"):
    """Which chunks may be written, and where."""

    outcomes: bytes
    """One byte per chunk, see the outcomes of reserve."""
    extents: bytes
    """One packed extent per chunk; zeros for a chunk without one."""


class CommitOutcome(enum.IntEnum):
    """Outcome of a commit for one chunk."""

    COMMITTED = 0
    """The chunk is visible."""
    NOT_RESERVED = 1
    """The chunk is not in this reservation, or no longer."""
    BAD_RECORD = 2
    """The record's header does not match the reservation; the extent was freed."""


class Promise(Request, frozen=True, tag="promise"):
    """Promises that the caller's engine computes these chunks now and will store them, until a `cancel` of its number.

    Lookups of other engines may wait for them.  It reserves no memory.
    """

    identity_id: Count
    chain: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_RESERVE_CHUNKS * KEY_BYTES)]
    """Concatenated chain keys of one prompt's chunks, in order."""


class Commit(Request, frozen=True, tag="commit"):
    """Makes written chunks visible. `reservation` is the seq of the reserve, `indices` point into its keys."""

    reservation: Seq
    indices: Indices


class CommitReply(Reply, frozen=True, tag="commit"):
    """The chunks' part of the reservation has ended, whatever the outcome."""

    outcomes: bytes
    """One byte per index, see the outcomes of commit."""


class Abort(Request, frozen=True, tag="abort"):
    """Frees reserved extents; the caller guarantees not to write to them any more."""

    reservation: Seq
    indices: Indices | None = None
    """nil: all extents that the reservation still has."""


class Cancel(Request, frozen=True, tag="cancel"):
    """Stops the earlier lookup or reserve `target`, or ends its lease (for all processes) or reservation; or withdraws
    the promise `target`."""

    target: Seq
    """Its seq."""


class Resume(Request, frozen=True, tag="resume"):
    """First message of a process that has attached again: the lookups, reserves and promises that it still has.

    All others end as if cancelled.  Leases of which the process has released its own share stay with the others.
    """

    live: Annotated[list[Seq], Meta(max_length=MAX_LIVE)]
    """Seqs of the lookups whose share it has not released, of the reserves into which it may still write, and of its
    promises."""


class Retrieve(Request, frozen=True, tag="retrieve"):
    """Asks for bytes of one record, for clients that cannot map the pool."""

    identity_id: Count
    key: Key
    """Chain key."""
    slice_digest: Key
    offset_bytes: Count
    length_bytes: Annotated[int, Meta(ge=0, le=MAX_RETRIEVE_BYTES)]


class RetrieveReply(Reply, frozen=True, tag="retrieve"):
    """The bytes asked for."""

    found: bool
    record_bytes: int
    body: bytes


class Quiesced(Request, frozen=True, tag="quiesced"):
    """Says that this process no longer touches extents that were leased or reserved before the current epoch."""


class Corrupt(Request, frozen=True, tag="corrupt"):
    """Says that the caller's copy found these chunks of its slice corrupt; the server checks them itself."""

    identity_id: Count
    keys: ReserveKeys
    """Concatenated chain keys."""


class Ok(Reply, frozen=True, tag="ok"):
    """Outcome of release, promise, abort, cancel, resume, quiesced and corrupt: a count.

    release: leases whose share ended; promise: chunks promised; abort: extents given back; cancel and resume: requests
    that were stopped or whose grant ended; corrupt: chunks dropped.
    """

    count: int = 0
    """The count, as listed above."""


class Error(Reply, frozen=True, tag="error"):
    """The request failed."""

    code: str
    message: str
    """Says in plain language what is wrong and what to change."""
    field: str
    """The wrong field; empty if it is not a single field."""
    retryable: bool
    """Whether the same request may succeed later without the sender changing anything."""


AnyRequest = (
    Identify | Ping | Lookup | Release | Reserve | Promise | Commit | Abort | Cancel | Resume | Retrieve | Quiesced
    | Corrupt
)  # fmt: skip
AnyReply = (
    IdentifyReply | Pong | LookupReply | ReserveReply | CommitReply | RetrieveReply | Ok | Error
)  # fmt: skip


def encode(reply: msgspec.Struct) -> bytes:
    """One frame."""
    return _ENCODER.encode(reply)


def decode_request(message: bytes | memoryview) -> AnyRequest:
    """The request in a message. Raises msgspec.MsgspecError for anything else."""
    return _REQUESTS.decode(message)


def decode_reply(frame: bytes) -> AnyReply:
    """The reply in a frame. Raises msgspec.MsgspecError for anything else."""
    return _REPLIES.decode(frame)


_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_REPLIES: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def check_keys(keys: bytes, field: str, probe: bytes = b"") -> int:
    """The number of keys. Raises BadRequest for none, for bytes that are not whole keys, and for a bad probe."""
    n_keys, rest = divmod(len(keys), KEY_BYTES)
    if rest or not n_keys:
        raise BadRequest(f"{field}: {len(keys)} bytes are not one or more {KEY_BYTES}-byte keys", field=field)
    if len(probe) not in (0, 8):
        raise BadRequest(f"probe: must be 0 or 8 bytes, found {len(probe)}", field="probe")
    return n_keys
