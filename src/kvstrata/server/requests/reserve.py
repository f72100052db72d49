"""The verbs of writers: reserve extents, commit or abort them; and report chunks that look corrupt.

reserve ─▶ Reservation with its open chunks ─┬─ commit, item by item ─▶ visible: history and store controller notified
                                             └─ abort, item by item
A reservation ends with its last open chunk (grants.py).

All sessions of one process together may reserve as many bytes as one session, and all sessions with one token
1/TOKEN_SHARE of L1; but an owner without reservations may reserve one chunk of any length, as in the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from kvstrata.errors import BadRequest
from kvstrata.keys.batch import count, nth
from kvstrata.native.core import Pool, storage_keys
from kvstrata.rpc.wire import (
    Abort,
    Commit,
    CommitOutcome,
    CommitReply,
    Corrupt,
    Ok,
    Reply,
    Reserve,
    ReserveOutcome,
    ReserveReply,
    check_keys,
)
from kvstrata.server.plan import MAX_SESSION_SHARE
from kvstrata.server.processes import Process
from kvstrata.server.requests.grants import Reservation
from kvstrata.types import EXTENT, KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

KEYS_ON_LOOP = 256
"""A reserve of up to this many keys runs on the loop (about 0.1 ms if each evicts); a larger one goes to a lane."""
TOKEN_SHARE = 2
GRANULE_BYTES = 4_096
"""Reserved bytes are counted in multiples of this, as in the pool."""
_MIN_RECORD_BYTES = 4096
"""Bytes of a record's header."""
_NO_EXTENT = bytes(EXTENT.size)
_REFUSALS = frozenset(ReserveOutcome) - {
    ReserveOutcome.RESERVED,
    ReserveOutcome.PRESENT,
    ReserveOutcome.IN_FLIGHT,
}

Answer = tuple[int, bytes, bytes]
"""Ticket, outcomes and extents, as `Pool.reserve` returns them."""


class Reserving:
    """Answers the requests of writers. Each public method is a verb of `Requests`. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.lane, parts.clock
        self._processes, self._grants, self._frozen_by = parts.processes, parts.grants, parts.frozen_by
        self._store, self._tails, self._explainer = parts.store, parts.tails, parts.explainer
        self._counters, self._tracer, self._epoch = parts.counters, parts.tracer, parts.facts.epoch

    def reserve(self, process: Process, request: Reserve) -> Reply | Coroutine[Any, Any, Reply]:
        """Reserve extents for new chunks. Raises BadRequest or UnknownIdentity."""
        identity = self._processes.identity(process, request.identity_id)
        if not process.digest:
            raise BadRequest(
                "slice: this process declared none when it attached, so it stores nothing", field="slice"
            )
        n_chunks = check_keys(request.keys, "keys", request.probe)
        if len(request.parent) not in (0, KEY_BYTES):
            raise BadRequest(
                f"parent: must be one {KEY_BYTES}-byte chain key or empty, found {len(request.parent)} bytes",
                field="parent",
            )
        pool = self._pool
        tail, longest = request.tail_tokens > 0, process.chunk_record_bytes
        shortest = _MIN_RECORD_BYTES + 1 if tail else longest
        if not shortest <= request.record_bytes <= min(longest, pool.extents_bytes):
            raise BadRequest(
                f"record_bytes: found {request.record_bytes}; by the facts of the slice a chunk's record has {longest} "
                f"bytes and a tail's is shorter, and the pool has {pool.extents_bytes} bytes",
                field="record_bytes",
            )
        if tail and n_chunks != 1:
            raise BadRequest(
                f"tail_tokens: a tail is reserved by itself, found {n_chunks} keys", field="tail_tokens"
            )
        keys = storage_keys(identity.root, request.keys, process.digest)
        replaces = b""
        if request.replaces:
            check_keys(request.replaces, "replaces")
            replaces = storage_keys(identity.root, request.replaces, process.digest)
        parent = storage_keys(identity.root, request.parent, process.digest) if request.parent else b""
        if parent and process.span and not pool.peek(parent):
            parent = b""  # a hit does not need the chunks before a window, so they may be absent
        if not request.parent:
            self._explainer.stored_under(request.probe, identity.root, identity.layout, identity.request)
        # A tail lies in an extent of a chunk's size, so that evicting it makes space for a chunk.
        bytes_each = -(-longest // GRANULE_BYTES) * GRANULE_BYTES
        trace = self._tracer.begin(request.traceparent) if self._tracer else None
        reservation = Reservation(process.uses, bytes_each, keys, tail, replaces, time.perf_counter(), trace)
        if self._frozen_by:
            outcomes = bytes([ReserveOutcome.FROZEN]) * n_chunks
            return self._reserved(process, request, reservation, (0, outcomes, _NO_EXTENT * n_chunks))
        n_new = self._room(process, bytes_each, n_chunks)
        arguments = (
            parent, request.record_bytes, process.row, identity.root, identity.tenant, tail, longest
        )  # fmt: skip
        if n_chunks > KEYS_ON_LOOP:
            return self._reserve_on_lane(process, request, reservation, n_new, arguments)
        answer = _reserve(pool, n_new, keys, arguments)
        return self._reserved(process, request, reservation, answer)

    def _room(self, process: Process, bytes_each: int, n_chunks: int) -> int:
        """How many of `n_chunks` chunks the limits of the process and of its token allow."""
        for use, share in zip(process.uses, (MAX_SESSION_SHARE, TOKEN_SHARE), strict=False):
            left_bytes = self._pool.extents_bytes // share - use.reserved_bytes
            n_chunks = min(n_chunks, max(0, left_bytes // bytes_each, not use.reserved_bytes))
        return n_chunks

    def commit(self, process: Process, request: Commit) -> Reply:
        """Make written chunks visible, item by item."""
        reservation = self._grants.reservation(process, request.reservation)
        outcomes = bytearray([CommitOutcome.NOT_RESERVED]) * len(request.indices)
        if reservation is None:
            return CommitReply(request.seq, self._epoch, bytes(outcomes))
        wanted: dict[int, int] = {}
        for position, index in enumerate(request.indices):
            if index in reservation.open and index not in wanted:
                wanted[index] = position
        codes = self._pool.commit(reservation.ticket, list(wanted)) if wanted else b""
        reservation.open.difference_update(wanted)  # whatever the outcomes, these chunks have ended
        self._grants.settle(process, request.reservation, reservation)
        done: list[bytes] = []
        for (index, position), code in zip(wanted.items(), codes, strict=True):
            outcomes[position] = code
            if code == CommitOutcome.COMMITTED:
                done.append(nth(reservation.keys, index))
        if done:
            self._explainer.committed(process.group.use, done)
            if self._grants.promises.awaited:
                self._grants.promises.committed(process)
            if reservation.replaces:
                self._tails.replaced(reservation.replaces)
                reservation.replaces = b""
            if reservation.tail:
                self._tails.committed(done)
            else:
                self._store.committed(done)
            if not reservation.open:
                self._counters.store.add(time.perf_counter() - reservation.begun_s)
                if reservation.trace:
                    reservation.trace.end("store", chunks=len(done), bytes=len(done) * reservation.bytes_each)
        return CommitReply(request.seq, self._epoch, bytes(outcomes))

    def abort(self, process: Process, request: Abort) -> Reply:
        """Free extents that were reserved and not committed."""
        reservation = self._grants.reservation(process, request.reservation)
        if reservation is None:
            return Ok(request.seq, self._epoch, 0)
        given_back = reservation.open
        if request.indices is not None:
            given_back = given_back.intersection(request.indices)
        if given_back:
            self._pool.abort(reservation.ticket, sorted(given_back))
            reservation.open = reservation.open - given_back
            self._grants.settle(process, request.reservation, reservation)
        return Ok(request.seq, self._epoch, len(given_back))

    async def corrupt(self, process: Process, request: Corrupt) -> Reply:
        """Check chunks that a reader reports as corrupt; those whose checksum is wrong leave L1."""
        identity = self._processes.identity(process, request.identity_id)
        n_chunks = check_keys(request.keys, "keys")
        if not process.digest:
            raise BadRequest("slice: this process declared none when it attached", field="slice")
        keys = storage_keys(identity.root, request.keys, process.digest)

        def check() -> int:
            return sum(self._pool.mark_bad(nth(keys, index), identity.root) for index in range(n_chunks))

        return Ok(request.seq, self._epoch, await asyncio.shield(self._lane.run(check)))

    async def _reserve_on_lane(
        self,
        process: Process,
        request: Reserve,
        reservation: Reservation,
        n_new: int,
        arguments: tuple[Any, ...],
    ) -> Reply:
        """Reserve on a lane what would block the loop. Raises Refused. When cancelled, nothing stays reserved."""
        pool, future = self._pool, None

        def undo(done: asyncio.Future[Answer]) -> None:
            if (
                not done.cancelled() and done.exception() is None
            ):  # the pool refuses a process that has died meanwhile
                pool.abort(done.result()[0], None)
            reservation.count(0)

        reservation.count(n_new)
        try:
            future = self._lane.run(_reserve, pool, n_new, reservation.keys, arguments)
            answer = await asyncio.shield(future)
        except BaseException:
            if future is None:
                reservation.count(0)
            else:
                future.add_done_callback(undo)
            raise
        return self._reserved(process, request, reservation, answer)

    def _reserved(
        self, process: Process, request: Reserve, reservation: Reservation, answer: Answer
    ) -> Reply:
        """Keep the reservation, count the outcomes, and make the reply."""
        reservation.ticket, outcomes, extents = answer
        reservation.open.update(i for i, code in enumerate(outcomes) if code == ReserveOutcome.RESERVED)
        reservation.count(len(reservation.open))
        if reservation.open:
            process.grants[request.seq] = reservation
        for code in set(outcomes):
            outcome = ReserveOutcome(code)
            name = outcome.name.lower()
            self._counters.reserve_outcomes[name] += outcomes.count(code)
            if outcome in _REFUSALS:
                for index in (i for i, other in enumerate(outcomes) if other == code):
                    self._explainer.refused(nth(reservation.keys, index), name)
        if reservation.replaces and all(code == ReserveOutcome.PRESENT for code in outcomes):
            self._tails.replaced(reservation.replaces)
        return ReserveReply(request.seq, self._epoch, outcomes, extents)


def _reserve(pool: Pool, n_new: int, keys: bytes, arguments: tuple[Any, ...]) -> Answer:
    """Reserve extents for at most `n_new` absent chunks; further ones get the outcome of the session's limit."""
    n_chunks = count(keys)
    n_asked = n_chunks if n_new == n_chunks else min(n_chunks, pool.peek(keys) + n_new)
    ticket, outcomes, extents = 0, b"", b""
    if n_asked:
        ticket, outcomes, extents = pool.reserve(keys[: n_asked * KEY_BYTES], *arguments)
    left = n_chunks - n_asked
    return ticket, outcomes + bytes([ReserveOutcome.SESSION_LIMIT]) * left, extents + _NO_EXTENT * left
