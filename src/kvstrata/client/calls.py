"""What the client hands to its caller: identities, and handles of lookups, stores and loads.

Handles are made by `CacheClient`, finished once by the client's I/O thread (or at once by the calling thread when
there is nothing to wait for), and may be read from any thread.  Nothing here does I/O.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvstrata.keys import ChunkHasher, MediaItem
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.types import LayoutIdentity, LeaseName, MissReason, RequestIdentity, identity_root


class Declared(NamedTuple):
    """What the server of one epoch answered to `identify`."""

    epoch: int
    identity_id: int


class Attached(Protocol):
    """The client that an identity belongs to, as far as the identity asks it."""

    @property
    def epoch(self) -> int:
        """Of the server that it is attached to; 0 while there is none."""

    @property
    def slices(self) -> tuple[bytes, ...]:
        """Digests of the engine's slices; empty until all workers have attached."""


class Identity:
    """One request identity. Keys can be computed at once; the server's id follows in the background."""

    __slots__ = (
        "_client",
        "_layout",
        "declared",
        "error",
        "refused_epoch",
        "refused_until_s",
        "request",
        "root",
    )

    def __init__(self, client: Attached, layout: LayoutIdentity, request: RequestIdentity) -> None:
        self._client = client
        self._layout = layout
        self.request = request
        self.root = identity_root(layout, request)
        """32 bytes, the start of the hash chain."""
        self.declared: Declared | None = None
        """Written by the I/O thread only; None until first answered. Counts while its epoch is the present one."""
        self.error = ""
        """Why the server refused this identity, if it did; its lookups are misses and its stores refused."""
        self.refused_epoch = 0
        self.refused_until_s = math.inf
        """By `time.monotonic`: when a server that refused it may be asked again in the same epoch."""

    @property
    def ready(self) -> bool:
        """The server of the present epoch knows it, and all slices of the engine are known."""
        declared = self.declared
        return declared is not None and declared.epoch == self._client.epoch and bool(self.slices)

    @property
    def slices(self) -> tuple[bytes, ...]:
        """Digests in the order of extents in lookup results; empty until all workers have attached."""
        return self._client.slices

    def hasher(self, media: Iterable[MediaItem] = ()) -> ChunkHasher:
        """A hasher for one request of this identity."""
        return ChunkHasher(self.root, self._layout.chunk_tokens, media)


class LookupResult(NamedTuple):
    """Outcome of a lookup: the leading chunks that are in L1 and leased."""

    n_chunks: int
    lease: LeaseName | None
    """To be released by every process of the group; None when `n_chunks` is 0."""
    extents: bytes
    """n_chunks × n_slices packed `types.EXTENT`, chunk-major, slices in the order of `Identity.slices`."""
    n_slices: int
    reason: str
    """types.MissReason of the first chunk that is not served; empty when all are."""


def miss(reason: MissReason) -> LookupResult:
    """The result of a lookup that found nothing or was not made."""
    return LookupResult(0, None, b"", 0, reason)


class LookupCall:
    """A lookup under way, and afterwards its lease's claim.

    The server may ask for a lease back while it waits for its use (`revoked`).  Who promises its chunks to somebody
    claims it first; a claimed lease stays until it is released.
    """

    __slots__ = ("_cancel", "_claimed", "_finished", "_lock", "_result", "epoch", "revoked", "seq")

    def __init__(self, cancel: Callable[[LookupCall], None]) -> None:
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._result: LookupResult | None = None
        self._cancel = cancel
        self._claimed = False
        self.revoked = False
        """Whether the lease went back to the server; its chunks may be gone."""
        self.seq = 0
        """Its number, set when it is sent; owned by the I/O thread, as is `epoch`."""
        self.epoch = 0

    @property
    def done(self) -> bool:
        """Whether `result` is there."""
        return self._result is not None

    @property
    def result(self) -> LookupResult:
        """The outcome. Raises RuntimeError while there is none."""
        if self._result is None:
            raise RuntimeError("the lookup is not done; wait() for it first")
        return self._result

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the result; whether it is there."""
        return self._finished.wait(timeout_s)

    def claim(self) -> bool:
        """Keep the lease from being revoked; False when it was already. Never blocks."""
        with self._lock:
            self._claimed = not self.revoked
            return self._claimed

    def unclaim(self) -> None:
        """The lease may be revoked again. Not after it was handed to other processes."""
        with self._lock:
            self._claimed = False

    def cancel(self) -> None:
        """Undo it, whatever state it is in; `result` is then a miss. Idempotent, never blocks.

        Not for a lease that was handed to other processes: they end by `CacheClient.release`.
        """
        with self._lock:
            self._result = miss(MissReason.FORGOTTEN)
        self._finished.set()
        self._cancel(self)

    def finish(self, result: LookupResult) -> bool:
        """Set the outcome, unless there is one. For the client only."""
        with self._lock:
            if self._result is not None:
                return False
            self._result = result
        self._finished.set()
        return True

    def take_back(self, spend: Callable[[LeaseName], bool]) -> bool:
        """Revoke the lease unless it is claimed or not there yet. For the client's I/O thread only.

        `spend` keeps loads from beginning under it; False when it is too late for that.
        """
        with self._lock:
            lease = None if self._result is None else self._result.lease
            if lease is not None and not self._claimed and not self.revoked:
                self.revoked = spend(lease)
                return self.revoked
            return False


class StoreOutcome(enum.StrEnum):
    """What became of one chunk of a store."""

    STORED = "stored"
    """It is in L1 now."""
    PRESENT = "present"
    """It was in L1 already."""
    IN_FLIGHT = "in_flight"
    """Somebody else is writing it now."""
    CHAIN_EXCEEDS_POOL = "chain_exceeds_pool"
    """Refused, as the outcome of reserve of this name."""
    POOL_PINNED = "pool_pinned"
    """Refused likewise."""
    SESSION_LIMIT = "session_limit"
    """Refused likewise."""
    QUOTA = "quota"
    """Refused likewise."""
    TOO_LARGE = "too_large"
    """Refused likewise."""
    ENTRIES_FULL = "entries_full"
    """Refused likewise."""
    FROZEN = "frozen"
    """Refused likewise."""
    PARENT_ABSENT = "parent_absent"
    """Refused likewise."""
    BACKLOG = "backlog"
    """Too many bytes were waiting to be gathered; nothing was read."""
    UNAVAILABLE = "unavailable"
    """No server, or it did not answer."""
    CANCELLED = "cancelled"
    """By the caller, before it was gathered."""
    FAILED = "failed"
    """The copy or the commit did not succeed; see the log."""


OUTCOME_OF_RESERVE = {
    ReserveOutcome.PRESENT: StoreOutcome.PRESENT,
    ReserveOutcome.IN_FLIGHT: StoreOutcome.IN_FLIGHT,
    ReserveOutcome.CHAIN_EXCEEDS_POOL: StoreOutcome.CHAIN_EXCEEDS_POOL,
    ReserveOutcome.POOL_PINNED: StoreOutcome.POOL_PINNED,
    ReserveOutcome.SESSION_LIMIT: StoreOutcome.SESSION_LIMIT,
    ReserveOutcome.QUOTA: StoreOutcome.QUOTA,
    ReserveOutcome.TOO_LARGE: StoreOutcome.TOO_LARGE,
    ReserveOutcome.ENTRIES_FULL: StoreOutcome.ENTRIES_FULL,
    ReserveOutcome.FROZEN: StoreOutcome.FROZEN,
    ReserveOutcome.PARENT_ABSENT: StoreOutcome.PARENT_ABSENT,
}
"""What a reserve that gave no extent means for its chunk."""


class StoreJob:
    """Chunks on their way from the engine's blocks into L1.

    `gathered`: no block of the job is read any more, the engine may reuse them all.
    `done`: all outcomes are known; never before `gathered`.
    """

    __slots__ = (
        "_cancel",
        "_chunks_to_gather",
        "_chunks_to_settle",
        "_on_done",
        "bytes",
        "cancelled",
        "done",
        "gathered",
        "outcomes",
    )

    def __init__(
        self,
        n_chunks: int,
        cancel: Callable[[StoreJob], None],
        on_done: Callable[[StoreJob], Any] | None = None,
    ) -> None:
        self.outcomes: list[StoreOutcome] = [StoreOutcome.UNAVAILABLE] * n_chunks
        """One per chunk, final once `done`."""
        self.bytes = 0
        """Payload bytes copied so far."""
        self.gathered = threading.Event()
        self.done = threading.Event()
        self.cancelled = False
        self._chunks_to_gather = n_chunks
        self._chunks_to_settle = n_chunks
        self._cancel = cancel
        self._on_done = on_done

    def wait_gathered(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no block is read any more; whether that is so."""
        return self.gathered.wait(timeout_s)

    def cancel(self) -> None:
        """Gather nothing more, and commit nothing that was not gathered by now. Never blocks.

        A copy in progress goes on for some milliseconds: blocks may be reused after `gathered`, not before.
        """
        self.cancelled = True
        self._cancel(self)

    def ended_gather(self, n_chunks: int) -> None:
        """`n_chunks` more will not be read any more. For the client's I/O thread only."""
        self._chunks_to_gather -= n_chunks
        assert self._chunks_to_gather >= 0, "a chunk ended its gather twice"
        if self._chunks_to_gather == 0:
            self.gathered.set()

    def settle(self, chunks: Sequence[int], outcome: StoreOutcome) -> None:
        """These chunks have their final outcome. For the client only; calls `on_done` after the last one."""
        for chunk in chunks:
            self.outcomes[chunk] = outcome
        self._chunks_to_settle -= len(chunks)
        assert self._chunks_to_settle >= 0, "a chunk was settled twice"
        if self._chunks_to_settle == 0 and not self.done.is_set():
            self.done.set()
            if self._on_done is not None:
                self._on_done(self)

    def refuse(self, outcome: StoreOutcome) -> None:
        """Finish a job that never began."""
        self.ended_gather(len(self.outcomes))
        self.settle(range(len(self.outcomes)), outcome)


class LoadItem(NamedTuple):
    """One chunk to copy out of the pool into the engine's blocks."""

    key: bytes
    """Chain key of the chunk (32 bytes)."""
    offset_bytes: int
    length_bytes: int
    block_ids: Sequence[int]
    """Blocks of the chunk in order; a negative id is verified but not written."""


class LoadJob:
    """Chunks on their way from L1 into the engine's blocks. Once `done`, none of its blocks is written any more."""

    __slots__ = ("_cancel", "bytes", "cancelled", "copy_jobs", "done", "failed")

    def __init__(self, cancel: Callable[[LoadJob], None]) -> None:
        self.failed: set[int] = set()
        """Indices of items whose blocks must be computed instead; final once `done`."""
        self.bytes = 0
        """Payload bytes copied."""
        self.done = threading.Event()
        self.cancelled = False
        self.copy_jobs: list[int] = []
        """Numbers of the native copies; none for a synchronous load."""
        self._cancel = cancel

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of all copies; whether it came."""
        return self.done.wait(timeout_s)

    def cancel(self) -> None:
        """Copy nothing more: items not begun fail. Wait for `done` before reusing blocks. Never blocks."""
        self.cancelled = True
        self._cancel(self)

    def finish(self, failed: Iterable[int], copied_bytes: int) -> None:
        """All copies have ended. For the client only."""
        self.failed.update(failed)
        self.bytes += copied_bytes
        self.done.set()
