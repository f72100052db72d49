"""Stores on their way: reserve → gather → commit, in batches.  Belongs to the I/O thread, but for `admit`.

    batch state  event                      does
    -----------  -------------------------  ----------------------------------------------------------------------
    RESERVING    extents                    gather them; chunks without one get their outcome; if the last chunk was
                                            refused, so is what the job has not sent yet
                 no answer, cancelled       cancel or abort the reserve; outcome unavailable / cancelled
    GATHERING    the copies ended           blocks are free; commit what was copied, abort the rest
    COMMITTING   outcomes                   each chunk gets its own
                 server silent or gone      outcome failed; the commit goes on by itself within the epoch

Invariants
1. Nothing is aborted or cancelled while a copy into it runs.
2. What was gathered after `StoreJob.cancel` may hold foreign bytes, so it is never committed.
3. Reserved bytes stay below what the server allows one session, and admitted bytes below `backlog_bytes`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvstrata.client.calls import OUTCOME_OF_RESERVE, Declared, Identity, StoreJob, StoreOutcome
from kvstrata.client.copies import Copier, CopyLedger, GatherItem, Plan
from kvstrata.client.link import Link
from kvstrata.client.requests import Kind, Pending
from kvstrata.errors import KvstrataError, UnknownIdentity
from kvstrata.native.copying import RecordSpec
from kvstrata.native.hashing import storage_keys
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES, Extent, unpack_extents

log = logging.getLogger(__name__)

RESERVE_DEADLINE_S = 2.0
BATCH_BYTES = 128 << 20
"""Batches are cut so that one is reserved while another is gathered and a third committed."""
BATCH_CHUNKS = 1024
BATCHES_IN_FLIGHT = 4
REFUSALS = frozenset(OUTCOME_OF_RESERVE) - {wire.ReserveOutcome.PRESENT, wire.ReserveOutcome.IN_FLIGHT}


class StoreRequest(NamedTuple):
    """What `CacheClient.store` was given, checked."""

    job: StoreJob
    identity: Identity
    parent: bytes
    """Chain key before the first chunk, b"" at the start."""
    chain: bytes
    plan: Plan
    blocks: Sequence[Sequence[int]]
    record_bytes: int
    payload_bytes: int
    probe: bytes

    @property
    def n_chunks(self) -> int:
        """Chunks to store."""
        return len(self.blocks)


class _Batch:
    """Chunks [first, first + n) of one request, reserved together."""

    __slots__ = ("asked", "copy_job", "epoch", "first", "n_chunks", "request", "reserved", "seq", "unsettled")

    def __init__(self, request: StoreRequest, first: int, n_chunks: int) -> None:
        self.request = request
        self.first = first
        self.n_chunks = n_chunks
        self.reserved: list[int] = []
        """Indices within the batch that got an extent."""
        self.asked: Pending | None = None
        """The reserve while it is not answered."""
        self.unsettled: list[int] = []
        """Chunks of the job that wait for the commit's outcome."""
        self.seq = 0
        self.epoch = 0
        self.copy_job = 0
        """Number of the native copy, 0 while none runs."""

    @property
    def keys(self) -> bytes:
        """Chain keys of the batch."""
        return self.request.chain[self.first * KEY_BYTES : (self.first + self.n_chunks) * KEY_BYTES]

    @property
    def parent(self) -> bytes:
        """Chain key before the batch."""
        if self.first == 0:
            return self.request.parent
        return self.request.chain[(self.first - 1) * KEY_BYTES : self.first * KEY_BYTES]

    def chunks(self, indices: Sequence[int]) -> list[int]:
        """Chunks of the job, of indices within the batch."""
        return [self.first + index for index in indices]


class StoreQueue:
    """All stores of one process, first come first served."""

    def __init__(
        self,
        link: Link,
        ledger: CopyLedger,
        copier: Copier,
        *,
        slice_digest: bytes,
        chunk_tokens: int,
        backlog_bytes: int,
        declared: Callable[[Identity], Declared | None],
    ) -> None:
        """`declared(identity)` is what the present server knows it by; if None, it is told and we wake then."""
        self._link = link
        self._ledger = ledger
        self._copier = copier
        self._slice_digest = slice_digest
        self._chunk_tokens = chunk_tokens
        self._backlog_bytes = backlog_bytes
        self._declared = declared
        self._lock = threading.Lock()
        self._queue: deque[StoreRequest] = deque()
        self._next_chunk = 0
        """First chunk of the queue's head that is in no batch yet."""
        self._pumping = False
        self._closing = False
        self._reserved_bytes = 0
        self._batches: dict[_Batch, None] = {}
        """Those under way, oldest first."""
        self.max_reserved_bytes = 0
        """What the server allows; 0 until it said so."""
        self.waiting_bytes = 0
        self.counts: dict[str, int] = {}
        """Chunks by outcome."""

    def admit(self, request: StoreRequest) -> bool:
        """Whether its bytes fit into the backlog; they count until gathered. Any thread."""
        size = request.n_chunks * request.record_bytes
        with self._lock:
            if self.waiting_bytes and self.waiting_bytes + size > self._backlog_bytes:
                return False
            self.waiting_bytes += size
        return True

    @property
    def idle(self) -> bool:
        """No store is under way."""
        return not self._queue and not self._batches

    def add(self, request: StoreRequest) -> None:
        """Take up an admitted store."""
        if self._closing or not self._link.usable:
            self._drop(request, 0, StoreOutcome.UNAVAILABLE)
            return
        self._queue.append(request)
        self.pump()

    def cancel(self, job: StoreJob) -> None:
        """A job was cancelled: nothing more of it begins, and what was not reserved yet ends here."""
        kept: deque[StoreRequest] = deque()
        first = self._next_chunk
        for request in self._queue:
            if request.job is job:
                self._drop(request, first, StoreOutcome.CANCELLED)
            else:
                kept.append(request)
            if request is self._queue[0] and request.job is job:
                self._next_chunk = 0
            first = 0
        self._queue = kept
        for batch in [batch for batch in self._batches if batch.request.job is job]:
            if batch.asked is not None:
                self._link.table.remove(batch.asked)
                self._withdraw(batch, StoreOutcome.CANCELLED)
            elif batch.copy_job:
                self._copier.cancel(batch.copy_job)
        self.pump()

    def pump(self) -> None:
        """Reserve for as many batches as may be in flight."""
        if self._pumping:
            return  # called back from within; the outer call goes on
        self._pumping = True
        try:
            self._pump()
        finally:
            self._pumping = False

    def _pump(self) -> None:
        limit = max(self.max_reserved_bytes, 1)
        while self._queue and len(self._batches) < BATCHES_IN_FLIGHT:
            request = self._queue[0]
            room = max(BATCH_BYTES if limit > 2 * BATCH_BYTES else limit // 2, request.record_bytes)
            n = min(room // request.record_bytes, BATCH_CHUNKS, request.n_chunks - self._next_chunk)
            if self._reserved_bytes and self._reserved_bytes + n * request.record_bytes > limit:
                return
            batch = _Batch(request, self._next_chunk, n)
            self._next_chunk += n
            if self._next_chunk == request.n_chunks:
                self._queue.popleft()
                self._next_chunk = 0
            self._reserve(batch)

    def close(self) -> None:
        """Nothing more is reserved; batches under way go on to their end, or until their reserve fails."""
        self._closing = True
        self._empty()

    def give_up(self) -> None:
        """The server is silent or gone: nothing waits for it. Copies that run go on to their end."""
        self._empty()
        for batch in self._batches:
            self._settle(batch, batch.unsettled, StoreOutcome.FAILED)
            batch.unsettled = []

    def _empty(self) -> None:
        while self._queue:
            request = self._queue.popleft()
            self._drop(request, self._next_chunk, StoreOutcome.UNAVAILABLE)
            self._next_chunk = 0

    def _reserve(self, batch: _Batch, *, again: bool = False) -> None:
        request = batch.request
        if not again:
            self._batches[batch] = None
            self._reserved_bytes += batch.n_chunks * request.record_bytes

        def message(seq: int, remaining_ms: int) -> wire.Reserve | None:
            declared = self._declared(request.identity)
            if declared is None:
                return None
            batch.seq, batch.epoch = seq, declared.epoch
            return wire.Reserve(
                self._link.session,
                seq,
                remaining_ms,
                declared.identity_id,
                batch.parent,
                batch.keys,
                request.record_bytes,
                request.probe,
            )

        batch.asked = Pending(
            Kind.ASK,
            message,
            partial(self._reserved, batch),
            partial(self._not_reserved, batch, again),
            time.monotonic() + RESERVE_DEADLINE_S,
        )
        self._link.ask(batch.asked)

    def _not_reserved(self, batch: _Batch, again: bool, error: KvstrataError) -> None:
        if isinstance(error, UnknownIdentity) and not again:
            batch.request.identity.declared = None
            self._reserve(batch, again=True)
            return
        refused = batch.request.identity.error
        if not error.retryable or refused:
            log.warning("a store was refused (%s): %s", error.code, refused or error.message)
        self._withdraw(batch, StoreOutcome.UNAVAILABLE)

    def _withdraw(self, batch: _Batch, outcome: StoreOutcome) -> None:
        """A batch ends before anything of it was gathered; its reserve, if it was sent, is taken back."""
        batch.asked = None
        if batch.seq:
            self._undo(batch)
        else:
            self._freed(batch)
        self._end_gather(batch, batch.n_chunks)
        self._settle(batch, batch.chunks(range(batch.n_chunks)), outcome)
        self._leave(batch)

    def _reserved(self, batch: _Batch, reply: wire.AnyReply) -> None:
        request, n = batch.request, batch.n_chunks
        try:
            outcomes, extents = _reserve_outcomes(reply, n)
        except ValueError as error:
            log.error("the server's answer to a reserve makes no sense, nothing is stored: %s", error)
            self._not_reserved(batch, True, KvstrataError("bad answer"))
            return
        batch.asked = None
        batch.reserved = [i for i in range(n) if outcomes[i] == wire.ReserveOutcome.RESERVED]
        for outcome, refused in OUTCOME_OF_RESERVE.items():
            chunks = [batch.first + i for i in range(n) if outcomes[i] == outcome]
            if chunks:
                self._settle(batch, chunks, refused)
        if outcomes[-1] in REFUSALS:
            self._refuse_rest(request, OUTCOME_OF_RESERVE[wire.ReserveOutcome(outcomes[-1])])
        self._end_gather(batch, n - len(batch.reserved))
        self._reserved_bytes -= (n - len(batch.reserved)) * request.record_bytes
        if not batch.reserved:
            self._leave(batch)
            return
        mapping = None if request.job.cancelled else self._ledger.begin_gather(batch.epoch)
        if mapping is None:
            self._gathered(batch, [1] * len(batch.reserved))
            return
        digest = self._slice_digest
        own_keys = storage_keys(batch.keys, digest)
        before = storage_keys(batch.parent, digest) if batch.parent else bytes(KEY_BYTES)
        parents = before + own_keys[:-KEY_BYTES]
        try:
            items: list[GatherItem] = [
                (
                    request.blocks[batch.first + i],
                    mapping.address(extents[i].offset_bytes, extents[i].length_bytes),
                    extents[i].length_bytes,
                    RecordSpec(
                        own_keys[i * KEY_BYTES : (i + 1) * KEY_BYTES],
                        request.identity.root,
                        digest,
                        parents[i * KEY_BYTES : (i + 1) * KEY_BYTES],
                        self._chunk_tokens,
                    ),
                )
                for i in batch.reserved
            ]
            batch.copy_job = self._copier.begin("gather", request.plan, items, partial(self._copied, batch))
        except ValueError as error:
            log.error("chunks cannot be gathered, they are not stored: %s", error)
            self._ledger.end_gather(batch.epoch)
            self._gathered(batch, [1] * len(batch.reserved))

    def _refuse_rest(self, request: StoreRequest, outcome: StoreOutcome) -> None:
        """A chunk was refused: no lookup counts what follows it, so the chunks that no batch has yet end likewise."""
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
            first, self._next_chunk = self._next_chunk, 0
            self._drop(request, first, outcome)

    def _copied(self, batch: _Batch, codes: list[int]) -> None:
        batch.copy_job = 0
        self._ledger.end_gather(batch.epoch)
        if batch.request.job.cancelled:
            # Blocks may have been given away before the copy read them.
            codes = [1] * len(codes)
        self._gathered(batch, codes)

    def _gathered(self, batch: _Batch, codes: list[int]) -> None:
        """No block of the batch is read any more; codes say which extents hold whole records."""
        request = batch.request
        whole = [i for i, code in zip(batch.reserved, codes, strict=True) if code == 0]
        torn = [i for i, code in zip(batch.reserved, codes, strict=True) if code != 0]
        request.job.bytes += len(whole) * request.payload_bytes
        self._end_gather(batch, len(batch.reserved))
        if torn:
            outcome = StoreOutcome.CANCELLED if request.job.cancelled else StoreOutcome.FAILED
            self._settle(batch, batch.chunks(torn), outcome)
        if batch.epoch != self._link.epoch:
            # The reservation died with its server; the bytes are ours until we say `quiesced`.
            self._settle(batch, batch.chunks(whole), StoreOutcome.FAILED)
            self._freed(batch)
            self._leave(batch)
            return
        if torn:
            self._abort(batch, torn, last=not whole)
        if whole:
            self._commit(batch, whole)

    def _commit(self, batch: _Batch, indices: list[int]) -> None:
        batch.unsettled = batch.chunks(indices)
        session, reservation = self._link.session, batch.seq

        def replied(reply: wire.AnyReply) -> None:
            outcomes = bytes([wire.CommitOutcome.BAD_RECORD]) * len(indices)
            if isinstance(reply, wire.CommitReply) and len(reply.outcomes) == len(indices):
                outcomes = reply.outcomes
            chunks, batch.unsettled = batch.unsettled, []
            if chunks:
                accepted = [outcome == wire.CommitOutcome.COMMITTED for outcome in outcomes]
                stored = [chunk for chunk, ok in zip(chunks, accepted, strict=True) if ok]
                failed = [chunk for chunk, ok in zip(chunks, accepted, strict=True) if not ok]
                if failed:
                    log.error(
                        "the server did not accept %d of %d chunks of a commit", len(failed), len(chunks)
                    )
                self._settle(batch, stored, StoreOutcome.STORED)
                self._settle(batch, failed, StoreOutcome.FAILED)
            ended()

        def failed(error: KvstrataError) -> None:
            log.debug("a commit ended without an outcome: %s", error)
            lost, batch.unsettled = batch.unsettled, []
            self._settle(batch, lost, StoreOutcome.FAILED)
            ended()

        def ended() -> None:
            self._freed(batch)
            self._leave(batch)

        self._link.ask(
            Pending(
                Kind.SETTLE,
                lambda seq, _: wire.Commit(session, seq, reservation, indices),
                replied,
                failed,
            )
        )
        if not self._link.usable:
            lost, batch.unsettled = batch.unsettled, []
            self._settle(batch, lost, StoreOutcome.FAILED)

    def _abort(self, batch: _Batch, indices: list[int], *, last: bool) -> None:
        """Give extents back that no copy touches; with `last` that ends the batch."""
        session, reservation = self._link.session, batch.seq

        def ended(_: object) -> None:
            if last:
                self._freed(batch)
                self._leave(batch)

        self._link.ask(
            Pending(
                Kind.SETTLE,
                lambda seq, _: wire.Abort(session, seq, reservation, indices),
                ended,
                ended,
            )
        )

    def _undo(self, batch: _Batch) -> None:
        """The reserve was perhaps executed, its answer is not known: take it back."""
        session, target = self._link.session, batch.seq

        def ended(_: object) -> None:
            self._freed(batch)
            self.pump()  # the batch has left already, and what is queued may have waited for its bytes

        self._link.ask(Pending(Kind.SETTLE, lambda seq, _: wire.Cancel(session, seq, target), ended, ended))

    def _freed(self, batch: _Batch) -> None:
        held = len(batch.reserved) if batch.reserved else batch.n_chunks
        self._reserved_bytes -= held * batch.request.record_bytes
        assert self._reserved_bytes >= 0, "reserved bytes were given back twice"

    def _leave(self, batch: _Batch) -> None:
        self._batches.pop(batch, None)
        self.pump()

    def _end_gather(self, batch: _Batch, n_chunks: int) -> None:
        with self._lock:
            self.waiting_bytes -= n_chunks * batch.request.record_bytes
        batch.request.job.ended_gather(n_chunks)

    def _drop(self, request: StoreRequest, first: int, outcome: StoreOutcome) -> None:
        """Chunks from `first` on are not stored; nothing of them was begun."""
        n = request.n_chunks - first
        with self._lock:
            self.waiting_bytes -= n * request.record_bytes
        request.job.ended_gather(n)
        self._count(outcome, n)
        request.job.settle(range(first, request.n_chunks), outcome)

    def _settle(self, batch: _Batch, chunks: Sequence[int], outcome: StoreOutcome) -> None:
        if chunks:
            self._count(outcome, len(chunks))
            batch.request.job.settle(chunks, outcome)

    def _count(self, outcome: StoreOutcome, n_chunks: int) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + n_chunks


def _reserve_outcomes(reply: wire.AnyReply, n_chunks: int) -> tuple[bytes, list[Extent]]:
    """Raises ValueError when the reply does not say of each of `n_chunks` chunks what became of it."""
    if not isinstance(reply, wire.ReserveReply):
        raise ValueError(f"reply {type(reply).__name__}")
    if len(reply.outcomes) != n_chunks or len(reply.extents) != n_chunks * EXTENT.size:
        raise ValueError(
            f"{len(reply.outcomes)} outcomes and {len(reply.extents)} bytes of extents for {n_chunks} chunks"
        )
    unknown = set(reply.outcomes) - set(wire.ReserveOutcome)
    if unknown:
        raise ValueError(f"outcomes {sorted(unknown)}, which a reserve does not have")
    return reply.outcomes, unpack_extents(reply.extents)
