"""Stores: reserve → gather → commit, in batches.  Everything except `begin` and `admit` belongs to the I/O thread.

Each batch goes through these states:

    RESERVING ─▶ GATHERING ─▶ COMMITTING ─▶ LEFT        a commit is answered
        │ │          │ └────────────────────▶ LEFT      the server that reserved the extents is gone
        │ └──────────┴─▶ UNDOING ───────────▶ LEFT      a cancel or abort is answered
        └───────────────────────────────────▶ LEFT      no extent was reserved, or the reserve was never sent

If the server refuses the last chunk of a batch, the chunks of its job that are in no batch yet are refused too.  When
the server falls silent, the chunks of an unanswered commit count as failed at once.  A process that attaches again to
the same server names the reserves of its batches, and the server ends all others; a commit whose connection was lost
may have stored its chunks or not.

Invariants
1. No reservation is aborted or cancelled while a copy into its extents runs.
2. A chunk that was gathered after `StoreJob.cancel` may hold bytes of another chunk, so it is never committed.
3. Reserved bytes stay within the server's limit for one session, and admitted bytes within BACKLOG_BYTES; only a lone
   batch or store may exceed them.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvstrata.client.copies import Copier, CopyLedger, GatherItem, Mapping, Plan
from kvstrata.client.handles import OUTCOME_OF_RESERVE, StoreJob, StoreOutcome
from kvstrata.client.identities import Identity, IdentityTable
from kvstrata.client.link import Kind, Link, Pending
from kvstrata.errors import KvstrataError, UnknownIdentity
from kvstrata.keys import batch as keys
from kvstrata.native.core import RecordSpec, record_bytes, storage_keys
from kvstrata.patience import patience
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES, Extent, unpack_extents

log = logging.getLogger(__name__)

BACKLOG_BYTES = 1 << 30
"""Maximum bytes that wait to be copied into the pool; further stores are refused."""
RESERVE_DEADLINE_S = 2.0
BATCH_BYTES = 128 << 20
"""Maximum bytes of a batch: small enough to reserve one batch while another is gathered and a third committed."""
BATCH_CHUNKS = wire.MAX_RESERVE_CHUNKS
BATCHES_IN_FLIGHT = 4
NOT_COPIED = 1
"""Code of a copy that did not run, or whose bytes may not be committed."""
REFUSALS = frozenset(OUTCOME_OF_RESERVE) - {wire.ReserveOutcome.PRESENT, wire.ReserveOutcome.IN_FLIGHT}


class BatchState(enum.Enum):
    """The progress of a batch, see the module."""

    RESERVING = enum.auto()
    """Its reserve is not sent yet, or not answered yet."""
    GATHERING = enum.auto()
    """Extents are reserved, and the copies into them run."""
    COMMITTING = enum.auto()
    """All copies have ended, and the commit of the whole records is not answered yet."""
    UNDOING = enum.auto()
    """None of its chunks will be stored; the cancel or abort of its reserve is not answered yet."""
    LEFT = enum.auto()
    """The server has no reservation for it any more, and its bytes are free for other batches."""


class StoreRequest(NamedTuple):
    """The checked arguments of `CacheClient.store`."""

    job: StoreJob
    identity: Identity
    parent: bytes
    """Chain key of the chunk before the first; b"" at the start of a prompt."""
    chain: bytes
    plan: Plan
    blocks: Sequence[Sequence[int]]
    record_bytes: int
    payload_bytes: int
    probe: bytes
    tail_tokens: int = 0
    """Number of tokens if the only chunk is a tail; else 0."""
    replaces: bytes = b""
    """Chain keys of tails that these chunks replace."""
    traceparent: str = ""

    @property
    def n_chunks(self) -> int:
        """Number of chunks to store."""
        return len(self.blocks)


class Batch(msgspec.Struct, eq=False):
    """Chunks [first, first + n_chunks) of one request."""

    request: StoreRequest
    first: int
    n_chunks: int
    state: BatchState = BatchState.RESERVING
    asked: Pending | None = None
    """The reserve, until it is answered."""
    seq: int = 0
    """Number of the reserve; 0 until it is sent."""
    epoch: int = 0
    """Epoch of the server that got the reserve."""
    reserved: list[int] = []
    """Indices within the batch that got an extent."""
    copy_job: int = 0
    """Number of the native copy; 0 while none runs."""
    unsettled: list[int] = []
    """Chunks of the job that wait for the commit's outcome."""

    @property
    def keys(self) -> bytes:
        """Chain keys of the batch."""
        return keys.part(self.request.chain, self.first, self.first + self.n_chunks)

    @property
    def parent(self) -> bytes:
        """Chain key of the chunk before the batch; b"" at the start of a prompt."""
        return keys.before(self.request.chain, self.first, self.request.parent)

    @property
    def held_bytes(self) -> int:
        """Bytes that the server has reserved for the batch or, until the server answers, was asked to reserve."""
        return (len(self.reserved) or self.n_chunks) * self.request.record_bytes

    def chunks(self, indices: Sequence[int]) -> list[int]:
        """Indices within the job, from indices within the batch."""
        return [self.first + index for index in indices]


def reserve_outcomes(reply: wire.AnyReply, n_chunks: int) -> tuple[bytes, list[Extent]]:
    """(outcome, extent) of each chunk. Raises ValueError unless the reply has both for all `n_chunks` chunks."""
    if not isinstance(reply, wire.ReserveReply):
        raise ValueError(f"reply {type(reply).__name__}")
    if len(reply.outcomes) != n_chunks or len(reply.extents) != n_chunks * EXTENT.size:
        raise ValueError(
            f"{len(reply.outcomes)} outcomes and {len(reply.extents)} bytes of extents for {n_chunks} chunks"
        )
    unknown = set(reply.outcomes) - set(wire.ReserveOutcome)
    if unknown:
        raise ValueError(f"unknown outcomes {sorted(unknown)}")
    return reply.outcomes, unpack_extents(reply.extents)


class StoreQueue(msgspec.Struct, eq=False):
    """All stores of one process, first come first served."""

    _link: Link
    _ledger: CopyLedger
    _copier: Copier
    _identities: IdentityTable
    _slice_digest: bytes
    """Digest of the slice that this process writes; b"" for a scheduler, which writes none."""
    _chunk_tokens: int
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    _queue: deque[StoreRequest] = msgspec.field(default_factory=deque)
    _next_chunk: int = 0
    """First chunk of the queue's head that is in no batch yet."""
    _pumping: bool = False
    _closing: bool = False
    _max_reserved_bytes: int = 0
    """Maximum bytes that this session may have reserved at a time; 0 until the server has sent its limit."""
    _reserved_bytes: int = 0
    _batches: dict[Batch, None] = {}
    """Batches that count as under way (`BATCHES_IN_FLIGHT`), oldest first."""
    waiting_bytes: int = 0
    counts: dict[str, int] = {}
    """Number of chunks by outcome."""

    def begin(
        self,
        identity: Identity,
        parent_chain: bytes,
        chain: bytes,
        plan: Plan,
        blocks: Sequence[Sequence[int]],
        probe: bytes,
        tail_tokens: int = 0,
        replaces: bytes = b"",
        traceparent: str = "",
    ) -> StoreJob:
        """See `CacheClient.store`. Any thread."""
        n = len(blocks)
        if not self._slice_digest:
            raise ValueError("a scheduler has no slice and cannot store")
        if len(chain) != n * KEY_BYTES:
            raise ValueError(f"chain has {len(chain)} bytes for {n} chunks, must have {n * KEY_BYTES}")
        if len(parent_chain) not in (0, KEY_BYTES):
            raise ValueError(f"parent_chain has {len(parent_chain)} bytes, must have 0 or {KEY_BYTES}")
        if tail_tokens and n != 1:
            raise ValueError(f"a tail is stored by itself, and not with {n - 1} other chunks")
        if len({len(ids) for ids in blocks}) > 1:
            raise ValueError("all chunks of one store must have the same number of blocks")
        job = StoreJob(
            n,
            lambda job: self._link.post(lambda: self.cancel(job)),
        )
        if n == 0 or not self._link.accepts:
            job.refuse(StoreOutcome.UNAVAILABLE)
            return job
        payload = plan.payload_bytes(len(blocks[0]))
        size = record_bytes(plan.section_count, payload)
        request = StoreRequest(
            job, identity, parent_chain, chain, plan, blocks, size, payload, probe, tail_tokens, replaces,
            traceparent,
        )  # fmt: skip
        if self.admit(request):
            self._link.post(lambda: self.add(request))
        else:
            job.refuse(StoreOutcome.BACKLOG)
        return job

    def admit(self, request: StoreRequest) -> bool:
        """Count the request's bytes in the backlog until they are gathered; False if they do not fit. Any thread."""
        size = request.n_chunks * request.record_bytes
        with self._lock:
            if self.waiting_bytes and self.waiting_bytes + size > BACKLOG_BYTES:
                return False
            self.waiting_bytes += size
        return True

    @property
    def idle(self) -> bool:
        """Whether no store is under way."""
        return not self._queue and not self._batches

    def add(self, request: StoreRequest) -> None:
        """Queue an admitted store."""
        if self._closing or not self._link.usable:
            self._drop(request, 0, StoreOutcome.UNAVAILABLE)
            return
        self._queue.append(request)
        self.pump()

    def cancel(self, job: StoreJob) -> None:
        """Begin no further batch of a cancelled job, and end its chunks that are not reserved yet."""
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
            if batch.state is BatchState.RESERVING:
                assert batch.asked is not None
                self._link.table.remove(batch.asked)
                self._withdraw(batch, StoreOutcome.CANCELLED)
            elif batch.copy_job:
                self._copier.cancel(batch.copy_job)
        self.pump()

    def reserves(self) -> list[int]:
        """Numbers of the reserves of the current epoch whose extents this process may still write, commit or abort."""
        return [batch.seq for batch in self._batches if batch.seq and batch.epoch == self._link.epoch]

    def ready(self, max_reserved_bytes: int) -> None:
        """A server answers; this session may have `max_reserved_bytes` reserved at a time."""
        self._max_reserved_bytes = max_reserved_bytes

    def pump(self) -> None:
        """Send reserves until as many batches are in flight as are allowed."""
        if self._pumping:
            return  # `_pump` is running further up the stack, and its loop continues
        self._pumping = True
        try:
            self._pump()
        finally:
            self._pumping = False

    def _pump(self) -> None:
        limit = max(self._max_reserved_bytes, 1)
        while self._queue and len(self._batches) < BATCHES_IN_FLIGHT:
            request = self._queue[0]
            room = max(BATCH_BYTES if limit > 2 * BATCH_BYTES else limit // 2, request.record_bytes)
            n = min(room // request.record_bytes, BATCH_CHUNKS, request.n_chunks - self._next_chunk)
            if self._reserved_bytes and self._reserved_bytes + n * request.record_bytes > limit:
                return
            batch = Batch(request, self._next_chunk, n)
            self._next_chunk += n
            if self._next_chunk == request.n_chunks:
                self._queue.popleft()
                self._next_chunk = 0
            self._reserve(batch)

    def close(self) -> None:
        """Stop reserving; batches under way continue until they end or their reserve fails."""
        self._closing = True
        self._empty()

    def give_up(self) -> None:
        """Settle every chunk that waits for the server, which is silent or lost. Running copies continue."""
        self._empty()
        for batch in self._batches:
            self._settle(batch, batch.unsettled, StoreOutcome.FAILED)
            batch.unsettled = []

    def _empty(self) -> None:
        while self._queue:
            request = self._queue.popleft()
            self._drop(request, self._next_chunk, StoreOutcome.UNAVAILABLE)
            self._next_chunk = 0

    def _reserve(self, batch: Batch, *, again: bool = False) -> None:
        request = batch.request
        if not again:
            self._batches[batch] = None
            self._reserved_bytes += batch.held_bytes

        def message(seq: int, remaining_ms: int) -> wire.Reserve | None:
            declared = self._identities.declared(request.identity)
            if declared is None:
                return None
            batch.seq, batch.epoch = seq, declared.epoch
            return wire.Reserve(
                seq,
                remaining_ms,
                declared.identity_id,
                batch.parent,
                batch.keys,
                request.record_bytes,
                request.probe,
                request.tail_tokens,
                request.replaces,
                request.traceparent,
            )

        batch.asked = Pending(
            Kind.ASK,
            message,
            partial(self._reserved, batch),
            partial(self._not_reserved, batch, again),
            time.monotonic() + patience(RESERVE_DEADLINE_S),
        )
        self._link.ask(batch.asked)

    def _not_reserved(self, batch: Batch, again: bool, error: KvstrataError) -> None:
        if isinstance(error, UnknownIdentity) and not again:
            batch.request.identity.declared = None
            self._reserve(batch, again=True)
            return
        refused = batch.request.identity.error
        if not error.retryable or refused:
            log.warning("a store was refused (%s): %s", error.code, refused or error.message)
        self._withdraw(batch, StoreOutcome.UNAVAILABLE)

    def _withdraw(self, batch: Batch, outcome: StoreOutcome) -> None:
        """End a batch before any chunk was gathered, and cancel its reserve if it was sent."""
        batch.asked = None
        if batch.seq:
            batch.state = BatchState.UNDOING
            self._undo(batch)
        else:
            self._freed(batch)
        self._end_gather(batch, batch.n_chunks)
        self._settle(batch, batch.chunks(range(batch.n_chunks)), outcome)
        self._leave(batch)

    def _reserved(self, batch: Batch, reply: wire.AnyReply) -> None:
        request, n = batch.request, batch.n_chunks
        try:
            outcomes, extents = reserve_outcomes(reply, n)
        except ValueError as error:
            log.error("invalid reply to a reserve, so its chunks are not stored: %s", error)
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
            batch.state = BatchState.LEFT
            self._leave(batch)
            return
        batch.state = BatchState.GATHERING
        mapping = None if request.job.cancelled else self._ledger.begin_gather(batch.epoch)
        if mapping is None:
            self._gathered(batch, [NOT_COPIED] * len(batch.reserved))
            return
        try:
            items = self._gather_items(batch, mapping, extents)
            batch.copy_job = self._copier.begin("gather", request.plan, items, partial(self._copied, batch))
        except ValueError as error:
            log.error("chunks cannot be gathered, so they are not stored: %s", error)
            self._ledger.end_gather(batch.epoch)
            self._gathered(batch, [NOT_COPIED] * len(batch.reserved))

    def _gather_items(self, batch: Batch, mapping: Mapping, extents: Sequence[Extent]) -> list[GatherItem]:
        """The copies of the batch's reserved chunks. Raises ValueError for an extent outside the pool."""
        request = batch.request
        digest = self._slice_digest
        root = request.identity.root
        own_keys = storage_keys(root, batch.keys, digest)
        before = storage_keys(root, batch.parent, digest) if batch.parent else bytes(KEY_BYTES)
        parents = keys.parents(own_keys, before)
        return [
            (
                request.blocks[batch.first + i],
                mapping.address(extents[i].offset_bytes, extents[i].length_bytes),
                extents[i].length_bytes,
                RecordSpec(
                    keys.nth(own_keys, i),
                    root,
                    digest,
                    keys.nth(parents, i),
                    request.tail_tokens or self._chunk_tokens,
                ),
            )
            for i in batch.reserved
        ]

    def _refuse_rest(self, request: StoreRequest, outcome: StoreOutcome) -> None:
        """Refuse the chunks of a job that are in no batch yet, because the last chunk of a batch was refused.

        No lookup would count these chunks: a chunk counts only if all chunks before it are present.
        """
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
            first, self._next_chunk = self._next_chunk, 0
            self._drop(request, first, outcome)

    def _copied(self, batch: Batch, codes: list[int]) -> None:
        batch.copy_job = 0
        self._ledger.end_gather(batch.epoch)
        if batch.request.job.cancelled:
            # The engine may have reused the blocks before the copy read them.
            codes = [NOT_COPIED] * len(codes)
        self._gathered(batch, codes)

    def _gathered(self, batch: Batch, codes: list[int]) -> None:
        """Commit or undo a batch whose copies have ended; code 0 marks an extent that holds a whole record."""
        request = batch.request
        whole = [i for i, code in zip(batch.reserved, codes, strict=True) if code == 0]
        torn = [i for i, code in zip(batch.reserved, codes, strict=True) if code != 0]
        request.job.bytes += len(whole) * request.payload_bytes
        self._end_gather(batch, len(batch.reserved))
        if torn:
            outcome = StoreOutcome.CANCELLED if request.job.cancelled else StoreOutcome.FAILED
            self._settle(batch, batch.chunks(torn), outcome)
        if batch.epoch != self._link.epoch:
            # The reservation ended with its server; the bytes stay ours until we send `quiesced`.
            self._settle(batch, batch.chunks(whole), StoreOutcome.FAILED)
            self._freed(batch)
            self._leave(batch)
            return
        batch.state = BatchState.COMMITTING if whole else BatchState.UNDOING
        if torn:
            self._abort(batch, torn, last=not whole)
        if whole:
            self._commit(batch, whole)

    def _commit(self, batch: Batch, indices: list[int]) -> None:
        batch.unsettled = batch.chunks(indices)
        reservation = batch.seq

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
                Kind.TELL,
                lambda seq, _: wire.Commit(seq, reservation, indices),
                replied,
                failed,
            )
        )
        if not self._link.usable:
            lost, batch.unsettled = batch.unsettled, []
            self._settle(batch, lost, StoreOutcome.FAILED)

    def _abort(self, batch: Batch, indices: list[int], *, last: bool) -> None:
        """Abort extents that no copy touches any more; with `last` the answer ends the batch."""
        reservation = batch.seq

        def ended(_: object) -> None:
            if last:
                self._freed(batch)
                self._leave(batch)

        self._link.ask(
            Pending(
                Kind.TELL,
                lambda seq, _: wire.Abort(seq, reservation, indices),
                ended,
                ended,
            )
        )

    def _undo(self, batch: Batch) -> None:
        """Cancel a reserve that the server may have executed."""
        target = batch.seq

        def ended(_: object) -> None:
            self._freed(batch)
            self.pump()  # queued requests may wait for these bytes

        self._link.ask(Pending(Kind.TELL, lambda seq, _: wire.Cancel(seq, target), ended, ended))

    def _freed(self, batch: Batch) -> None:
        """The server has no reservation of the batch any more; its bytes are free for other batches."""
        assert batch.state is not BatchState.LEFT, "reserved bytes were given back twice"
        batch.state = BatchState.LEFT
        self._reserved_bytes -= batch.held_bytes

    def _leave(self, batch: Batch) -> None:
        """Stop counting the batch as under way, even while its reserve is being undone."""
        self._batches.pop(batch, None)
        self.pump()

    def _end_gather(self, batch: Batch, n_chunks: int) -> None:
        with self._lock:
            self.waiting_bytes -= n_chunks * batch.request.record_bytes
        batch.request.job.ended_gather(n_chunks)

    def _drop(self, request: StoreRequest, first: int, outcome: StoreOutcome) -> None:
        """Settle the chunks from `first` on, none of which was begun."""
        n = request.n_chunks - first
        with self._lock:
            self.waiting_bytes -= n * request.record_bytes
        request.job.ended_gather(n)
        self._count(outcome, n)
        request.job.settle(range(first, request.n_chunks), outcome)

    def _settle(self, batch: Batch, chunks: Sequence[int], outcome: StoreOutcome) -> None:
        if chunks:
            self._count(outcome, len(chunks))
            batch.request.job.settle(chunks, outcome)

    def _count(self, outcome: StoreOutcome, n_chunks: int) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + n_chunks
