"""The storage contract: what every L2 medium implements.

Invariants
1. All calls are batches; outcomes are per item and in order; one bad item never fails its batch.
2. Each item carries a hold on its extent.  The lowest layer that touches the bytes drops the hold when the
   medium has really finished with them; a deadline or a cancelled await ends the wait, never the hold.
3. A key that is not there is an outcome (ABSENT), not an exception.  Exceptions mean that the adapter broke
   its contract; the caller counts them as FAILED for every item of the batch.  Holds that were not dropped then
   end with the last reference to them.
4. STORED means durable where `capabilities.persistent` is true.
5. Bytes of a LOADED item were checked against the record's checksums; CORRUPT means that the adapter has also
   removed or quarantined the bad copy, so that the next put can heal it.
"""

from __future__ import annotations

import enum
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec

from kvstrata.errors import StorageError
from kvstrata.observability.logging import Thinning

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from kvstrata.clock import Clock
    from kvstrata.native.pool import Hold


HEAD_BYTES = 512
"""Both headers of a record."""


NOT_THE_MEDIUM = frozenset(
    {
        "throttled", "queue_full", "host_down", "staging", "staging_too_small", "length", "mismatch", "encoded",
        "codec", "codec_unknown", "codec_missing", "no_key", "wrong_key", "read_only",
        "controller_down", "peer_gone", "peer_deadline",
    }
)  # fmt: skip
"""Reasons of outcomes that say nothing about the medium's health: it did, or would have done, what it was asked; or one
of many owners did not, and is let alone by the adapter itself."""


class Presence(enum.IntEnum):
    """Whether a key can be loaded."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2
    """The medium did not answer in time or at all; treat as a miss that says nothing about the future."""


class Found(NamedTuple):
    """Answer of `exists` for one key.

    `record_bytes` is the length of the whole record as stored where PRESENT, else 0: what a load needs room for.
    (Around every adapter lies the codec wrapper, which answers with the length in L1.)
    `reason` is a short word for UNKNOWN (deadline, breaker_open, throttled, io, …), empty otherwise.
    """

    presence: Presence
    record_bytes: int = 0
    reason: str = ""


_PRESENCE = tuple(Presence)


def found_of(presence: int, record_bytes: int, reason: str) -> Found:
    """What native code says of a key."""
    return Found(_PRESENCE[presence], record_bytes, reason)


class PutStatus(enum.IntEnum):
    STORED = 0
    EXISTS = 1
    THROTTLED = 2
    FAILED = 3


class LoadStatus(enum.IntEnum):
    LOADED = 0
    ABSENT = 1
    CORRUPT = 2
    FAILED = 3


class PutOutcome(NamedTuple):
    """`reason` is a short word for THROTTLED and FAILED (full, deadline, io, …), empty otherwise."""

    status: PutStatus
    reason: str = ""


class LoadOutcome(NamedTuple):
    status: LoadStatus
    reason: str = ""


class PutItem(NamedTuple):
    """One record to put. `hold.view()` is the whole record, header and payload; the adapter only reads it."""

    key: bytes
    hold: Hold


class LoadItem(NamedTuple):
    """One record to load into a reserved extent of exactly `hold.length` bytes."""

    key: bytes
    hold: Hold


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the controllers may expect of an adapter."""

    persistent: bool
    """Keeps its records across a restart of this process."""
    shared: bool
    """Other instances put and delete there too, so presence may be stale."""
    max_batch: int = 64
    wants_registered_memory: bool = False
    takes_puts: bool = True
    """False: it is only read, and never offered a chunk."""
    can_delete: bool = True
    has_heads: bool = False
    """`heads` tells: what is needed before records may be stored encoded there."""
    lists: bool = False
    """`list_keys` names what is there: what a cluster's controller is told of records from before this start."""
    quiesce: Literal["drain", "never"] = "drain"
    """What ends an operation in flight: it does so by itself, or only killing its process does."""


class PayloadKind(NamedTuple):
    """What an engine has declared of its payloads, for codecs."""

    element_bytes: int
    """Bytes of one number."""
    fp8: tuple[int, ...] | None = None
    """Where the engine has accepted the fidelity fp8: dtype (1 bfloat16, 2 float16) and the shape of a section."""


def nothing_known(identity: bytes, slice_digest: bytes) -> PayloadKind | None:
    """A `payload_kind` for adapters outside a server."""
    return None


class AdapterContext(NamedTuple):
    """What the server lends an adapter for its life."""

    instance_id: str
    clock: Clock
    region_address: int
    region_bytes: int
    """The pool's mapping, to register with devices; valid until `close` returned."""
    record_evicted: Callable[[bytes], None]
    """Tells the server that the adapter's own cap dropped a key (thread-safe)."""
    region_fd: int = -1
    """The file behind the mapping, the server's, for another process that maps it too; -1 where there is none."""
    lock_fd: int = -1
    """The server's sessions.lock, of which such a process locks HOSTS_BYTE (memory.segment); -1 where there is none."""
    payload_kind: Callable[[bytes, bytes], PayloadKind | None] = nothing_known
    """What is known of the payloads of an identity root and a slice digest (thread-safe)."""


Counts = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,63}$")],
        Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)],
    ],
    msgspec.Meta(max_length=200),
]
"""What `numbers` may answer: names become parts of metrics' names."""
MAX_REMARK_CHARS = 500
Remarks = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,63}$")],
        Annotated[str, msgspec.Meta(max_length=MAX_REMARK_CHARS)],
    ],
    msgspec.Meta(max_length=8),
]
"""What `remarks` may answer."""


class Usage(NamedTuple):
    """`capacity_bytes` 0 means unlimited."""

    used_bytes: int
    capacity_bytes: int
    records: int


_broken = Thinning(60.0)


def log_broken_contract(name: str, operation: str, error: BaseException) -> None:
    """Log that an adapter raised, once in a while for each kind of it, and let go of what its frames refer to.

    Holds of items that it did not drop then end with the last reference that the medium itself has.
    """
    if _broken.left_out(f"{name} {operation} {type(error).__name__}") is None:
        log.debug("%s: %s raised again: %s", name, operation, type(error).__name__)
    else:
        text = "".join(traceback.format_exception(error))
        log.error("%s: %s raised, which the storage contract forbids\n%s", name, operation, text)
    traceback.clear_frames(error.__traceback__)


MORE_KEYS = 64
"""So many more than were asked for may be in a page, where an index cannot tell some of its keys apart."""


class KeyPage(NamedTuple):
    """Some of the keys that are there, and where to go on; 0 after the last."""

    keys: Sequence[bytes]
    cursor: int


class StorageAdapter(ABC):
    """One L2 medium.  Called on the server's event loop; must not block it."""

    name: str
    capabilities: Capabilities
    """Valid once `open` has returned."""

    @abstractmethod
    async def open(self, context: AdapterContext) -> None:
        """Make the medium ready. Raises StorageError with what to change when it cannot be."""

    @abstractmethod
    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """Which keys can be loaded and how long their records are, in order. Never touches payloads."""

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """The first HEAD_BYTES of each stored record, in order; fewer or none where there are no more or it fails.

        An encoded record's length in L1 is told by its header alone.  Asked once per key and life of the server;
        only where `capabilities.has_heads`.
        """
        return [b""] * len(keys)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """Keys of records that are there, from `cursor` on (0: from the beginning): `most`, or up to MORE_KEYS more.

        A record that is there from the first page's call to the last one's is named at least once; what comes or goes
        meanwhile may be named.  A page may be empty and not the last.  None: not now, ask from the beginning later.
        Quick, from an index; only where `capabilities.lists`.
        """
        return None

    @abstractmethod
    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Store records. Drops each item's hold when the medium has finished with its bytes."""

    @abstractmethod
    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """Read records into their extents and verify them. Drops each item's hold likewise."""

    @abstractmethod
    async def delete(self, keys: Sequence[bytes]) -> int:
        """Remove records; returns how many were there. A running load of one still ends well or as ABSENT."""

    async def clear(self) -> int:
        """Remove every record that may be removed; returns how many. Raises StorageError if it cannot."""
        raise StorageError(f"{self.name}: this kind of storage cannot be cleared from here", field=self.name)

    def numbers(self) -> dict[str, int]:
        """What else it counts, by a fixed set of names in snake_case (see Counts); for status pages and metrics.

        Never blocks.
        """
        return {}

    def remarks(self) -> dict[str, str]:
        """What else an operator should know, by a fixed set of names in snake_case; for status pages. Never blocks."""
        return {}

    def advertisement(self) -> bytes:
        """What other instances need to reach the memory that this adapter has registered; empty where they cannot.

        Valid once `open` has returned; may become another later. Never blocks.
        """
        return b""

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """Read these keys from `source`, which only this adapter understands, rather than from its other places.

        It holds until the same keys come with an empty source. Never blocks; whoever has one place ignores it.
        """
        return

    @abstractmethod
    async def usage(self) -> Usage:
        """Bytes and records held now."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is in flight as `capabilities.quiesce` says and free everything. Idempotent."""
