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

PROTOCOL_VERSION = 1
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
    client: Annotated[str, Meta(max_length=256)] = ""


class HelloReply(Reply, frozen=True, tag="hello"):
    protocol: int
    server: str
    instance_id: str
    chunk_tokens: int
    socket_dir: str
    max_message_bytes: int
    has_l2: bool
    max_reserved_bytes: int
    """Bytes one session may hold reserved at a time; larger stores go in several reserves."""


class Identify(Request, frozen=True, tag="identify"):
    """Declares a request identity once. The layout identity was declared at attach."""

    request: RequestIdentity


class IdentifyReply(Reply, frozen=True, tag="identify"):
    identity_id: int
    root: bytes
    slices: list[bytes]
    """Digests of the group's slices known now, sorted; the order of extents in lookup replies."""
    complete: bool
    """True once all `engine_slices` of the group are known; until then every lookup answers 0."""


class Ping(Request, frozen=True, tag="ping"):
    """Liveness. `live` names the lookups this session still wants, among those older than this ping.

    A lookup that is not named and whose own share was not released is undone for the whole group: a looker
    that handed a lease to workers names it until its own release was answered.
    """

    live: Annotated[list[Seq], Meta(max_length=MAX_LIVE)] | None = None


class Pong(Reply, frozen=True, tag="ping"):
    revoked: list[tuple[bytes, int]] = []
    """Leases (session that looked up, seq) whose looker is gone: release the own share once no copy runs."""


class Rule(enum.StrEnum):
    """How a group of keys counts as hit."""

    PREFIX = "prefix"


class Group(msgspec.Struct, array_like=True, frozen=True):
    """Keys of one KV-cache group: chain keys c_i, concatenated."""

    rule: Rule
    keys: Keys


class Lookup(Request, frozen=True, tag="lookup"):
    """How many leading chunks are there; leases them for the caller's engine group."""

    deadline_ms: DeadlineMs
    identity_id: Count
    request_id: RequestId
    groups: Annotated[list[Group], Meta(min_length=1, max_length=1)]
    probe: Probe = b""


class LookupReply(Reply, frozen=True, tag="lookup"):
    n_chunks: int
    extents: bytes
    """n_chunks × slices packed `types.EXTENT`, chunk-major, slices in the order of IdentifyReply."""
    l1_chunks: int
    l2_chunks: int
    reason: str
    """types.MissReason of the first chunk that is not served, empty if all are."""


class Release(Request, frozen=True, tag="release"):
    """Ends the caller's share of leases; with `group` every member's share (never handed to workers)."""

    leases: Annotated[list[LeaseId], Meta(max_length=MAX_RELEASES)]
    group: bool = False


class Reserve(Request, frozen=True, tag="reserve"):
    """Asks for extents to write chunks of the caller's own slice."""

    deadline_ms: DeadlineMs
    identity_id: Count
    parent: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    """Chain key of the chunk before the first, empty at the start of a prompt."""
    keys: ReserveKeys
    record_bytes: Count
    probe: Probe = b""


class ReserveOutcome(enum.IntEnum):
    """Per chunk of a reserve. Everything above IN_FLIGHT is a refusal with its reason."""

    RESERVED = 0
    PRESENT = 1
    IN_FLIGHT = 2
    CHAIN_EXCEEDS_POOL = 3
    POOL_PINNED = 4
    SESSION_LIMIT = 5
    QUOTA = 6
    TOO_LARGE = 7
    ENTRIES_FULL = 8


class ReserveReply(Reply, frozen=True, tag="reserve"):
    outcomes: bytes
    """One ReserveOutcome per chunk."""
    extents: bytes
    """One packed EXTENT per chunk, zeros where not RESERVED."""


class CommitOutcome(enum.IntEnum):
    """Per chunk of a commit."""

    COMMITTED = 0
    NOT_RESERVED = 1
    BAD_RECORD = 2


class Commit(Request, frozen=True, tag="commit"):
    """Makes written chunks visible. `reservation` is the seq of the reserve; `indices` into its keys."""

    reservation: Seq
    indices: Indices


class CommitReply(Reply, frozen=True, tag="commit"):
    outcomes: bytes


class Abort(Request, frozen=True, tag="abort"):
    """Gives reserved extents back; the caller promises that nobody writes them any more."""

    reservation: Seq
    indices: Indices | None = None


class Cancel(Request, frozen=True, tag="cancel"):
    """Whatever `target` did or will do is undone; valid before, after and without the request."""

    target: Seq


class Retrieve(Request, frozen=True, tag="retrieve"):
    """Bytes of one record by RPC, for clients that cannot map the pool."""

    identity_id: Count
    key: Key
    slice_digest: Key
    offset_bytes: Count
    length_bytes: Annotated[int, Meta(ge=0, le=MAX_RETRIEVE_BYTES)]


class RetrieveReply(Reply, frozen=True, tag="retrieve"):
    found: bool
    record_bytes: int
    body: bytes


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Prewarm: load chunks from L2 to L1 with no request behind it."""

    identity_id: Count
    keys: Keys
    budget_bytes: Count
    """Bytes it may load; 0 means as much as fits."""
    ttl_ms: Annotated[int, Meta(ge=0, le=3_600_000)]
    """It stops after this long."""


class PrefetchReply(Reply, frozen=True, tag="prefetch"):
    job: int


class Status(Request, frozen=True, tag="status"):
    """`job` 0: the instance; otherwise the outcome of a prewarm job."""

    job: Count = 0


class Tier(enum.StrEnum):
    """What a clear empties."""

    L1 = "l1"
    L2 = "l2"
    ALL = "all"


class Clear(Request, frozen=True, tag="clear"):
    """Drops what nobody uses. `tier`: l1, l2 or all; `tenant` None = every tenant the peer may use."""

    tier: Tier
    tenant: Annotated[str, Meta(max_length=256)] | None = None


class Explain(Request, frozen=True, tag="explain"):
    request_id: RequestId


class Quiesced(Request, frozen=True, tag="quiesced"):
    """Nothing of this process touches extents leased or reserved before the present epoch any more."""


class Corrupt(Request, frozen=True, tag="corrupt"):
    """The caller's verified copy failed on these chain keys of its slice; the server checks them."""

    keys: ReserveKeys


class Ok(Reply, frozen=True, tag="ok"):
    """Outcome of release, abort, cancel, quiesced, corrupt, clear: how many things changed.

    release: leases whose share ended; abort: extents given back; cancel: 1 if something was undone or
    stopped; corrupt: chunks dropped; clear: chunks dropped.
    """

    count: int = 0


class Document(Reply, frozen=True, tag="document"):
    """Outcome of status and explain."""

    body: dict[str, Any]


class Error(Reply, frozen=True, tag="error"):
    code: str
    message: str
    field: str
    retryable: bool


AnyRequest = (
    Hello | Identify | Ping | Lookup | Release | Reserve | Commit | Abort | Cancel | Retrieve | Prefetch
    | Status | Clear | Explain | Quiesced | Corrupt
)  # fmt: skip
AnyReply = (
    HelloReply | IdentifyReply | Pong | LookupReply | ReserveReply | CommitReply | RetrieveReply
    | PrefetchReply | Ok | Document | Error
)  # fmt: skip


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """First message on the attach socket, with the caller's own pidfd."""

    protocol: int
    session: SessionName
    """Chosen by the caller, random; the same one when it attaches again."""
    group: SessionName
    """Names the engine; all its processes attach with the same 16 bytes."""
    role: Role
    layout: LayoutIdentity
    engine_slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)]
    """How many distinct slices the whole engine has."""
    slice: Slice | None = None
    """The slice this process reads and writes; None for a scheduler."""
    facts: dict[str, Any] | None = None
    """Derived layout facts behind `slice.layout`, compared field by field with earlier ones."""
    old_epoch: int = 0
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
    row: int = 0
    epoch: int = 0
    pool_id: bytes = b""
    extents_bytes: int = 0
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
