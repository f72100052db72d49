"""The handles of lookups, stores and loads that the client returns to its caller.

`CacheClient` makes each handle and finishes it once: in its I/O thread, or in the calling thread when nothing has to be
awaited.  Any thread may read a handle.  Nothing here does I/O.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.types import LeaseName, MissReason


class LookupResult(NamedTuple):
    """Outcome of a lookup: the leading chunks that are in L1 and leased."""

    n_chunks: int
    lease: LeaseName | None
    """Every process of the group must release it; None when nothing was found."""
    extents: bytes
    """n_chunks × n_slices packed `types.EXTENT`, chunk-major, slices in the order of `Identity.slices`; then n_slices
    more if there is a tail."""
    n_slices: int
    reason: MissReason | Literal[""]
    """Why the first chunk that is not served is missing; empty when all chunks are served."""
    l2_chunks: int = 0
    """How many of these chunks were loaded from L2."""
    tail_tokens: int = 0
    """Number of tokens of the leased tail that follows these chunks; 0: no tail."""
    promised: int = 0
    """Number of leading chunks expected soon, `n_chunks` or more."""


def miss(reason: MissReason) -> LookupResult:
    """The result of a lookup that found nothing or was not made."""
    return LookupResult(0, None, b"", 0, reason)


class LookupCall:
    """A lookup under way, and afterwards its lease.

    Until the lease is claimed, the server may revoke it (`revoked`).  A caller that promises the lease's chunks to its
    engine claims the lease first; a claimed lease stays until it is released.
    """

    __slots__ = ("_cancel", "_claimed", "_finished", "_lock", "_result", "epoch", "revoked", "seq")

    def __init__(self, cancel: Callable[[LookupCall], None]) -> None:
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._result: LookupResult | None = None
        self._cancel = cancel
        self._claimed = False
        self.revoked = False
        """Whether the lease was returned to the server, so that its chunks may be evicted."""
        self.seq = 0
        """Number of the lookup's message, set when it is sent.  Only the I/O thread uses this and `epoch`."""
        self.epoch = 0

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._result is not None

    @property
    def result(self) -> LookupResult:
        """The outcome. Raises RuntimeError while it is not known."""
        if self._result is None:
            raise RuntimeError("the lookup is not done; wait() for it first")
        return self._result

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the outcome. Returns whether it is known."""
        return self._finished.wait(timeout_s)

    def claim(self) -> bool:
        """Keep the lease from being revoked; False when it has been revoked already. Never blocks."""
        with self._lock:
            self._claimed = not self.revoked
            return self._claimed

    def unclaim(self) -> None:
        """Allow the server to revoke the lease again. Not for a lease that was handed to other processes."""
        with self._lock:
            self._claimed = False

    def cancel(self) -> None:
        """Undo the lookup, whatever state it is in; `result` is then a miss. Idempotent, never blocks.

        Not for a lease that was handed to other processes: `CacheClient.release` ends such a lease.
        """
        with self._lock:
            self._result = miss(MissReason.FORGOTTEN)
        self._finished.set()
        self._cancel(self)

    def finish(self, result: LookupResult) -> bool:
        """Set the outcome; returns False if it was set already, and keeps that one. For the client only."""
        with self._lock:
            if self._result is not None:
                return False
            self._result = result
        self._finished.set()
        return True

    def take_back(self, spend: Callable[[LeaseName], bool]) -> bool:
        """Revoke the lease unless it is claimed or not granted yet. For the client's I/O thread only.

        `spend` keeps loads from beginning under the lease, and returns False when one has begun.
        """
        with self._lock:
            lease = None if self._result is None else self._result.lease
            if lease is not None and not self._claimed and not self.revoked:
                self.revoked = spend(lease)
                return self.revoked
            return False


class PromiseCall:
    """A promise of chunks, valid until it is withdrawn or this process ends."""

    __slots__ = ("_withdraw", "epoch", "pending", "seq")

    def __init__(self, withdraw: Callable[[PromiseCall], None]) -> None:
        self._withdraw = withdraw
        self.pending: Any = None
        """Its message.  Only the I/O thread uses this and the following attributes."""
        self.seq = 0
        self.epoch = 0

    def withdraw(self) -> None:
        """End the waits for these chunks: they are stored, or will not be. Idempotent, never blocks."""
        self._withdraw(self)


class StoreOutcome(enum.StrEnum):
    """The outcome of one chunk of a store."""

    STORED = "stored"
    """The chunk is in L1 now."""
    PRESENT = "present"
    """The chunk was in L1 already."""
    IN_FLIGHT = "in_flight"
    """Another process is writing the chunk now."""
    # The server refused the chunk, with the outcome of `reserve` of the same name.
    CHAIN_EXCEEDS_POOL = "chain_exceeds_pool"
    POOL_PINNED = "pool_pinned"
    SESSION_LIMIT = "session_limit"
    QUOTA = "quota"
    TOO_LARGE = "too_large"
    ENTRIES_FULL = "entries_full"
    FROZEN = "frozen"
    PARENT_ABSENT = "parent_absent"
    WORTH_LESS = "worth_less"
    BACKLOG = "backlog"
    """Too many bytes were waiting to be gathered; nothing was read."""
    UNAVAILABLE = "unavailable"
    """No server is attached, or it did not answer."""
    CANCELLED = "cancelled"
    """The caller cancelled the store before the chunk was gathered."""
    FAILED = "failed"
    """The copy or the commit did not succeed; see the log."""


OUTCOME_OF_RESERVE: dict[ReserveOutcome, StoreOutcome] = {
    outcome: StoreOutcome(outcome.name.lower())
    for outcome in ReserveOutcome
    if outcome is not ReserveOutcome.RESERVED
}
"""The store's outcome for a chunk, by the outcome of `reserve` that gave the chunk no extent."""


class StoreJob:
    """Chunks on their way from the engine's blocks into L1.

    `gathered`: no block of the job is read any more; the engine may reuse them all.
    `done`: all outcomes are known; never before `gathered`.
    """

    def __init__(
        self,
        n_chunks: int,
        cancel: Callable[[StoreJob], None],
    ) -> None:
        self.outcomes: list[StoreOutcome] = [StoreOutcome.UNAVAILABLE] * n_chunks
        """One outcome per chunk, final once `done`."""
        self.bytes = 0
        """Payload bytes copied so far."""
        self.gathered = threading.Event()
        self.done = threading.Event()
        self.cancelled = False
        self._chunks_to_gather = n_chunks
        self._chunks_to_settle = n_chunks
        self._cancel = cancel

    def wait_gathered(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no block is read any more. Returns whether all reads have ended."""
        return self.gathered.wait(timeout_s)

    def cancel(self) -> None:
        """Stop gathering, and commit only chunks that are gathered already. Never blocks.

        A copy in progress continues for some milliseconds: blocks may be reused after `gathered`, not before.
        """
        self.cancelled = True
        self._cancel(self)

    def ended_gather(self, n_chunks: int) -> None:
        """Record that the blocks of `n_chunks` more chunks are not read any more. For the client's I/O thread only."""
        self._chunks_to_gather -= n_chunks
        assert self._chunks_to_gather >= 0, "a chunk ended its gather twice"
        if self._chunks_to_gather == 0:
            self.gathered.set()

    def settle(self, chunks: Sequence[int], outcome: StoreOutcome) -> None:
        """Give these chunks their final outcome. For the client only."""
        for chunk in chunks:
            self.outcomes[chunk] = outcome
        self._chunks_to_settle -= len(chunks)
        assert self._chunks_to_settle >= 0, "a chunk was settled twice"
        if self._chunks_to_settle == 0 and not self.done.is_set():
            self.done.set()

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
    """Blocks of the chunk in order. Where the id is negative, the bytes are verified but not written."""


class LoadJob:
    """Chunks on their way from L1 into the engine's blocks. Once `done`, none of its blocks is written any more."""

    __slots__ = ("_cancel", "bytes", "cancelled", "copy_jobs", "done", "failed")

    def __init__(self, cancel: Callable[[LoadJob], None]) -> None:
        self.failed: set[int] = set()
        """Indices of the items whose blocks the engine must compute; final once `done`."""
        self.bytes = 0
        """Payload bytes copied."""
        self.done = threading.Event()
        self.cancelled = False
        self.copy_jobs: list[int] = []
        """Numbers of the native copies; empty for a synchronous load."""
        self._cancel = cancel

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of all copies. Returns whether they have ended."""
        return self.done.wait(timeout_s)

    def cancel(self) -> None:
        """Begin no further copies; items that have not begun fail. Never blocks.

        Copies that have begun continue: reuse the blocks only after `done`.
        """
        self.cancelled = True
        self._cancel(self)

    def finish(self, failed: Iterable[int], copied_bytes: int) -> None:
        """Set the outcome once all copies have ended. For the client only."""
        self.failed.update(failed)
        self.bytes += copied_bytes
        self.done.set()
