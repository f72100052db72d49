"""Messages of the RPC protocol: one msgpack array per frame, the operation's name first.

A request is `[op, session, seq, …]`, its reply `[op, seq, epoch, …]` or
`["error", seq, epoch, code, message, field, retryable]`.  `session` (16 bytes) and `seq` are chosen by the
client; a repeated (session, seq) gets the same outcome and does nothing twice.  Times on the wire are
remaining milliseconds.  Keys travel as concatenated 32-byte strings.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from kvstrata.types import KEY_BYTES, LayoutIdentity, RequestIdentity, Role, Slice

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
"""A larger request is dropped by the socket and its sender disconnected."""
MAX_CHUNKS = 65_536
"""Chunks in one request (16 M tokens of 256)."""
MAX_DEADLINE_MS = 60_000
SESSION_BYTES = 16
NO_SESSION = bytes(SESSION_BYTES)


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Common head of all requests."""

    session: bytes
    seq: int


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Common head of all replies."""

    seq: int
    epoch: int


class Hello(Request, frozen=True, tag="hello"):
    """Opens a conversation; allowed without a session (then `session` is 16 zero bytes)."""

    protocol: int
    client: str = ""


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
    """Liveness. `live` names the lookups this session still wants; unnamed ones are released."""

    live: list[int] | None = None


class Pong(Reply, frozen=True, tag="ping"):
    pass


class Rule(enum.StrEnum):
    """How a group of keys counts as hit."""

    PREFIX = "prefix"


class Group(msgspec.Struct, array_like=True, frozen=True):
    """Keys of one KV-cache group: chain keys c_i, concatenated."""

    rule: Rule
    keys: bytes


class Lookup(Request, frozen=True, tag="lookup"):
    """How many leading chunks are there; leases them for the caller's engine group."""

    deadline_ms: int
    identity_id: int
    request_id: str
    groups: list[Group]
    probe: bytes = b""


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

    leases: list[tuple[bytes, int]]
    """(session that looked up, its lookup's seq)"""
    group: bool = False


class Reserve(Request, frozen=True, tag="reserve"):
    """Asks for extents to write chunks of the caller's own slice."""

    deadline_ms: int
    identity_id: int
    parent: bytes
    """Chain key of the chunk before the first, empty at the start of a prompt."""
    keys: bytes
    record_bytes: int
    probe: bytes = b""


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

    reservation: int
    indices: list[int]


class CommitReply(Reply, frozen=True, tag="commit"):
    outcomes: bytes


class Abort(Request, frozen=True, tag="abort"):
    """Gives reserved extents back; the caller promises that nobody writes them any more."""

    reservation: int
    indices: list[int] | None = None


class Cancel(Request, frozen=True, tag="cancel"):
    """Whatever `target` did or will do is undone; valid before, after and without the request."""

    target: int


class Retrieve(Request, frozen=True, tag="retrieve"):
    """Bytes of one record by RPC, for clients that cannot map the pool."""

    identity_id: int
    key: bytes
    slice_digest: bytes
    offset_bytes: int
    length_bytes: int


class RetrieveReply(Reply, frozen=True, tag="retrieve"):
    found: bool
    record_bytes: int
    body: bytes


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Prewarm: load chunks from L2 to L1 with no request behind it."""

    identity_id: int
    keys: bytes
    budget_bytes: int
    ttl_ms: int


class PrefetchReply(Reply, frozen=True, tag="prefetch"):
    job: int


class Status(Request, frozen=True, tag="status"):
    """`job` = 0: the instance; otherwise the outcome of a prewarm job."""

    job: int = 0


class Clear(Request, frozen=True, tag="clear"):
    """Drops what nobody uses. `tier`: l1, l2 or all; `tenant` None = every tenant the peer may use."""

    tier: str
    tenant: str | None = None


class Explain(Request, frozen=True, tag="explain"):
    request_id: str


class Quiesced(Request, frozen=True, tag="quiesced"):
    """Nothing of this process touches extents leased or reserved before the present epoch any more."""


class Corrupt(Request, frozen=True, tag="corrupt"):
    """The caller's verified copy failed on these chain keys of its slice; the server checks and drops them."""

    keys: bytes


class Ok(Reply, frozen=True, tag="ok"):
    """Outcome of release, abort, cancel, quiesced, corrupt, clear: how many things changed."""

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
    session: bytes
    group: bytes
    role: Role
    layout: LayoutIdentity
    engine_slices: int
    """How many distinct slices the whole engine has."""
    slice: Slice | None = None
    """The slice this process reads and writes; None for a scheduler."""
    facts: dict[str, Any] | None = None
    """Derived layout facts behind `slice.layout`, compared field by field with earlier ones."""
    old_epoch: int = 0


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer on the attach socket; `code` empty means accepted and three descriptors come along."""

    code: str = ""
    message: str = ""
    field: str = ""
    row: int = 0
    epoch: int = 0
    pool_id: bytes = b""
    extents_bytes: int = 0
    instance_id: str = ""


def key_count(keys: bytes) -> int:
    """Number of 32-byte keys; -1 when the length is not a multiple of 32."""
    count, rest = divmod(len(keys), KEY_BYTES)
    return -1 if rest else count
