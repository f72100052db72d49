"""The storage contract: what every L2 medium implements.

The server calls an adapter only after `open` has returned and before it calls `close` (`remarks` at any time), with
keys of 32 bytes (tiers/tier.py).

Invariants
1. All calls are batches; the medium settles each item of a put or load; one bad item never fails its batch.
2. Each item carries a hold on its extent.  The lowest layer that touches the bytes drops the hold when the medium has
   really finished with them; a deadline or a cancelled await ends the wait, never the hold.
3. An absent key is an outcome (ABSENT), not an exception.  An exception, or an item that is not settled when the call
   returns, means that the adapter broke its contract; the caller then counts every item of the batch as FAILED, and a
   hold that the adapter did not drop ends with its last reference.
4. STORED means durable where `capabilities.persistent` is true.
5. LOADED means that the bytes passed the record's checksums.  CORRUPT means that they did not, and that the adapter
   has removed or quarantined the bad copy, so that the next put can store the record again.
"""

from __future__ import annotations

import enum
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from kvstrata.errors import StorageError
from kvstrata.observability.logging import Thinning
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from kvstrata.clock import Clock
    from kvstrata.native.core import Hold


MIN_RECORD_BYTES = 512
"""Length of a record's two headers together, and so the minimum length of a record."""


class Presence(enum.IntEnum):
    """Whether a key can be loaded; one byte of the answer of `exists`."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2
    """The medium did not answer in time, or at all; treat the key as a miss now, and ask again next time."""


PHASES = ("lookup", "wait", "medium", "verify", "promote")
"""Phases of loads: asking which records are stored; waiting (at the tier, in the adapter's lane, or for another load of
the same record); reading; verifying checksums; making the records visible in L1."""


class Ask:
    """How the keys of a request belong together, and why its answer is incomplete. One object per request."""

    __slots__ = ("each", "owner", "phases", "reason")

    def __init__(
        self, *, each: bool = False, owner: bytes = b"", phases: dict[str, float] | None = None
    ) -> None:
        self.each = each
        """Whether each key is useful by itself; else key i is useful only if keys 0..i-1 are present."""
        self.owner = owner
        """The instance to ask first, encoded for the medium that reads other instances; other media ignore it."""
        self.reason = ""
        """Set by the adapter: a reason code (deadline, breaker_open, throttled, io, …) why some keys are UNKNOWN."""
        self.phases = phases or dict.fromkeys(PHASES, 0.0)
        """Seconds of each phase of the loads.  The caller of `load` counts all of it as `medium`; an adapter that can
        measure its other phases moves their seconds from there."""

    def unknown(self, keys: bytes, reason: str) -> bytes:
        """The answer UNKNOWN for all keys, for this reason."""
        self.reason = reason
        return bytes([Presence.UNKNOWN]) * (len(keys) // KEY_BYTES)


class Outcome(enum.IntEnum):
    """The outcome of one item of a batch; see the invariants."""

    STORED = 0
    EXISTS = 1
    """The medium already has the record."""
    THROTTLED = 2
    """The adapter accepts no more now; the same put may succeed later."""
    FAILED = 3
    """The put or load failed."""
    LOADED = 4
    ABSENT = 5
    CORRUPT = 6
    UNSETTLED = 7
    """Not ended yet."""


class Item(msgspec.Struct, eq=False):
    """One record to put, or to load to the start of an extent; the medium settles it.

    For a put, `hold.view()` is the whole record, headers and payload, which the adapter only reads.  For a load,
    `hold.length` is the length of the extent; the record may be shorter, as a tail is.  The record's headers have its
    length, so the adapter does not report it.
    """

    key: bytes
    hold: Hold
    ask: Ask | None = None
    """The request of a load, for its `each` and `owner`; None: the key is part of a prefix."""
    outcome: Outcome = Outcome.UNSETTLED
    reason: str = ""
    """A reason code for THROTTLED and FAILED (full, deadline, io, …), empty otherwise."""

    def settle(self, outcome: Outcome, reason: str = "") -> None:
        """Set the outcome and drop the hold: the medium has finished with the bytes. Any thread, once."""
        self.outcome, self.reason = outcome, reason
        self.hold.drop()


def failed(items: Sequence[Item], reason: str) -> list[Item]:
    """Copies of these items with the outcome FAILED; the medium may still settle the originals."""
    return [Item(item.key, item.hold, item.ask, Outcome.FAILED, reason) for item in items]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the server may expect of an adapter."""

    persistent: bool
    """Whether it keeps its records across a restart of this process."""
    shared: bool
    """Whether other instances put and delete on the same medium, so that answers about presence may be stale."""
    medium: str = ""
    """A name that is equal for exactly those instances that share one medium; empty: unknown."""
    max_batch: int = 64
    wants_registered_memory: bool = False
    takes_puts: bool = True
    """Whether chunks are put into the medium, or else only loaded from it."""
    can_delete: bool = True
    lists: bool = False
    """`list_keys` is implemented; through it the cluster's controllers learn of records stored before this start."""
    quiesce: Literal["drain", "never"] = "drain"
    """Whether an operation in flight ends by itself ("drain"), or only when its process is killed ("never")."""


def two_bytes(slice_digest: bytes) -> int:
    """The `element_bytes_of` for adapters outside a server."""
    return 2


class AdapterContext(NamedTuple):
    """The server's resources that an adapter may use until it is closed."""

    instance_id: str
    clock: Clock
    region_address: int
    region_bytes: int
    """The pool's mapping, to register with devices; valid until `close` has returned."""
    record_evicted: Callable[[bytes], None]
    """Reports to the server that the adapter's own cap dropped a key (thread-safe)."""
    region_fd: int = -1
    """The server's descriptor of the file behind the mapping, so that an adapter host can map it; -1: no file."""
    lock_fd: int = -1
    """The server's descriptor of sessions.lock, in which an adapter host locks HOSTS_BYTE (memory/segment_files.py).

    -1: no such file.
    """
    element_bytes_of: Callable[[bytes], int] = two_bytes
    """Slice digest → element size in bytes of its payloads, as declared by engines (thread-safe)."""


Counts = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,63}$")],
        Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)],
    ],
    msgspec.Meta(max_length=200),
]
"""The type of the result of `numbers`. Its keys become labels of metrics."""
MAX_REMARK_CHARS = 500
Remarks = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,63}$")],
        Annotated[str, msgspec.Meta(max_length=MAX_REMARK_CHARS)],
    ],
    msgspec.Meta(max_length=8),
]
"""The type of the result of `remarks`."""


class Usage(NamedTuple):
    """Bytes and records in a medium; `capacity_bytes` 0 means unlimited."""

    used_bytes: int
    capacity_bytes: int
    records: int


_broken = Thinning(60.0)


def log_broken_contract(name: str, operation: str, error: BaseException) -> None:
    """Log that an adapter raised, at most once a minute per operation and exception type; clear the traceback's frames.

    The frames refer to items.  Once the frames are cleared, only the medium's references keep holds that were not
    dropped.
    """
    if _broken.left_out(f"{name} {operation} {type(error).__name__}") is None:
        log.debug("%s: %s raised again: %s", name, operation, type(error).__name__)
    else:
        text = "".join(traceback.format_exception(error))
        log.error("%s: %s raised, which the storage contract forbids\n%s", name, operation, text)
    traceback.clear_frames(error.__traceback__)


def read_checked(name: str, operation: str, ask: Callable[[], object], kind: Any) -> dict[str, Any]:
    """The result of an adapter's `numbers` or `remarks`; empty if the adapter breaks its contract."""
    try:
        answer: dict[str, Any] = msgspec.convert(ask(), kind)
        return answer
    except Exception as error:  # the plugin boundary
        log_broken_contract(name, operation, error)
        return {}


MORE_KEYS = 64
"""Number of keys by which a page may exceed the requested number, since one cursor may stand for several keys."""


class KeyPage(NamedTuple):
    """Some of the stored keys, and the cursor of the next page; the cursor is 0 if this page is the last."""

    keys: Sequence[bytes]
    cursor: int


class StorageAdapter(ABC):
    """One L2 medium.  Called on the server's event loop; must not block it."""

    name: str
    capabilities: Capabilities
    """Valid once `open` has returned."""

    @abstractmethod
    async def open(self, context: AdapterContext) -> None:
        """Make the medium ready.

        Raises ConfigError, which says what to change and stops the start of the server, if the configuration is wrong.
        Raises any other exception, usually StorageError, if the medium cannot be reached now: the server serves without
        it, and periodically opens a new adapter with the same settings.  Nothing is left open then.
        """

    @abstractmethod
    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """One Presence for each of these 32-byte keys, in order. Never touches payloads."""

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """A page of stored keys from `cursor` on (0: the first page); it has at most `most` + MORE_KEYS keys.

        A record that is stored during the whole listing, from the call for the first page to the call for the last, is
        listed at least once; a record that is put or removed during the listing may be listed or not.  An empty page
        need not be the last one.  None: the medium cannot list now; begin again later.  Called only if
        `capabilities.lists`.  It must be fast, so the keys must come from an index.
        """
        return None

    @abstractmethod
    async def put(self, items: Sequence[Item]) -> None:
        """Store records. Settles each item, and drops its hold when the medium has finished with its bytes."""

    @abstractmethod
    async def load(self, items: Sequence[Item]) -> None:
        """Read records into their extents and verify them. Settles each item as `put` does."""

    @abstractmethod
    async def delete(self, keys: bytes) -> int:
        """Remove the records of these 32-byte keys; returns how many were stored.

        A load that is reading such a record ends LOADED or ABSENT.
        """

    async def clear(self) -> int:
        """Remove every record that may be removed; returns how many. Raises StorageError if the medium cannot."""
        raise StorageError(f"{self.name}: this kind of storage cannot be cleared from here", field=self.name)

    def numbers(self) -> dict[str, int]:
        """The adapter's own counters by name, for status and metrics; see Counts.

        The set of names is fixed, and the numbers only grow.  Never blocks.
        """
        return {}

    def remarks(self) -> dict[str, str]:
        """Texts for operators by name, for status pages; see Remarks. The set of names is fixed. Never blocks."""
        return {}

    @abstractmethod
    async def usage(self) -> Usage:
        """The bytes and records in the medium now; a shared medium may count only those of this server."""

    @abstractmethod
    async def close(self) -> None:
        """Wait for operations in flight as far as `capabilities.quiesce` allows, and free everything. Idempotent."""


class ReadsPeers(ABC):
    """A medium that reads other instances, or the host of such a medium. No call blocks."""

    @abstractmethod
    def advertisement(self) -> bytes:
        """Metadata by which other instances reach the memory that the medium has registered; empty if they cannot.

        Valid once `open` has returned; may change later.
        """
