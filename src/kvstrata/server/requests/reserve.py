"""The verbs of writers: reserve extents, commit or abort them; and report chunks that look corrupt.

reserve ─▶ Reservation with its open keys ─┬─ commit, item by item ─▶ visible: history and store controller hear it
                                           └─ abort, item by item
With its last open key a reservation ends, and its request is settled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from kvstrata.clock import Clock
from kvstrata.errors import BadRequest, Refused
from kvstrata.keys.batch import nth
from kvstrata.native.hashing import storage_keys
from kvstrata.native.pool import Pool
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.misses import IdentityMemory
from kvstrata.policy.processes import AttachedProcess, ProcessTable
from kvstrata.policy.reserved import ReservedBytes, Share
from kvstrata.policy.savings import Savings
from kvstrata.process.lane import PoolLane
from kvstrata.rpc.session import Call, Sessions
from kvstrata.rpc.wire import (
    Abort,
    Commit,
    CommitOutcome,
    CommitReply,
    Corrupt,
    Ok,
    Reserve,
    ReserveOutcome,
    ReserveReply,
    key_count,
)
from kvstrata.server.chunk_history import ChunkHistory
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tails import TailPuts
from kvstrata.server.readiness import StoreFreeze
from kvstrata.server.requests.checks import check_probe, check_tail, whole_keys
from kvstrata.server.requests.leases import InFlight, Reservation
from kvstrata.server.requests.running import KeptOutcome
from kvstrata.types import EXTENT, KEY_BYTES

KEYS_ON_LOOP = 256
"""A reserve of up to this many keys runs on the loop (about 0.1 ms if each evicts); a larger one goes to a lane."""
_MIN_RECORD_BYTES = 4096
"""Bytes of a record's header."""
_NO_EXTENT = bytes(EXTENT.size)
_REFUSALS = {
    ReserveOutcome.CHAIN_EXCEEDS_POOL,
    ReserveOutcome.POOL_PINNED,
    ReserveOutcome.SESSION_LIMIT,
    ReserveOutcome.QUOTA,
    ReserveOutcome.TOO_LARGE,
    ReserveOutcome.ENTRIES_FULL,
    ReserveOutcome.FROZEN,
    ReserveOutcome.PARENT_ABSENT,
}


Answer = tuple[int, bytes, bytes]
"""Ticket, outcomes and extents, as `Pool.reserve` returns them."""


class Reserving:
    """Answers the requests of writers. Each public method is a verb of the boundary. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        lane: PoolLane,
        processes: ProcessTable,
        sessions: Sessions,
        in_flight: InFlight,
        freeze: StoreFreeze,
        history: ChunkHistory,
        identities: IdentityMemory,
        store: StoreController,
        tails: TailPuts,
        savings: Savings,
        clock: Clock,
        counters: ServerCounters,
        epoch: int,
        reserved: ReservedBytes,
    ) -> None:
        self._pool = pool
        self._lane = lane
        self._processes = processes
        self._sessions = sessions
        self._in_flight = in_flight
        self._freeze = freeze
        self._history = history
        self._identities = identities
        self._store = store
        self._tails = tails
        self._savings = savings
        self._clock = clock
        self._counters = counters
        self._epoch = epoch
        self._reserved = reserved

    def reserve(
        self, call: Call, process: AttachedProcess, request: Reserve
    ) -> KeptOutcome | Coroutine[Any, Any, KeptOutcome]:
        """Reserve extents for new chunks. Raises BadRequest or UnknownIdentity."""
        identity = self._processes.identity(process, request.identity_id)
        if not process.digest:
            raise BadRequest(
                "slice: this process declared none when it attached, so it stores nothing", field="slice"
            )
        n_chunks = whole_keys(request.keys, "keys")
        if len(request.parent) not in (0, KEY_BYTES):
            raise BadRequest(
                f"parent: must be one {KEY_BYTES}-byte chain key or empty, found {len(request.parent)} bytes",
                field="parent",
            )
        check_probe(request.probe)
        pool = self._pool
        if not _MIN_RECORD_BYTES < request.record_bytes <= pool.extents_bytes:
            raise BadRequest(
                f"record_bytes: must be more than {_MIN_RECORD_BYTES} and at most the pool's "
                f"{pool.extents_bytes}, found {request.record_bytes}",
                field="record_bytes",
            )
        tail = check_tail(request, n_chunks)
        if not tail:
            process.has_records_of(request.record_bytes)
        keys = storage_keys(identity.root, request.keys, process.digest)
        replaces = storage_keys(identity.root, request.replaces, process.digest) if request.replaces else b""
        parent = storage_keys(identity.root, request.parent, process.digest) if request.parent else b""
        if parent and process.span and not pool.peek(parent):
            parent = b""  # a hit does not need the chunks before a window, so they may be absent
        if not request.parent:
            self._identities.stored(request.probe, identity.root, identity.layout, identity.request)
        if self._freeze:
            outcomes = bytes([ReserveOutcome.FROZEN]) * n_chunks
            share = self._reserved.begin(process.owner, pool.extents_bytes, request.record_bytes, 0)
            return self._outcome(call, keys, share, (0, outcomes, _NO_EXTENT * n_chunks))
        # A tail lies in an extent of a chunk's size, so that whatever evicts it has room for a chunk.
        longest = max(request.record_bytes, process.chunk_record_bytes) if tail else request.record_bytes
        share = self._reserved.begin(process.owner, pool.extents_bytes, longest, n_chunks)
        arguments = (
            parent, request.record_bytes, process.row, identity.root, identity.tenant, tail, longest
        )  # fmt: skip
        if n_chunks > KEYS_ON_LOOP:
            return self._reserve_on_lane(call, keys, share, arguments, replaces)
        answer = _reserve(pool, share.n_chunks, keys, arguments)
        return self._outcome(call, keys, share, answer, tail=tail, replaces=replaces)

    def commit(self, call: Call, process: AttachedProcess, request: Commit) -> KeptOutcome:
        """Make written chunks visible, item by item."""
        reservation = self._reservation(process, request.reservation)
        outcomes = bytearray([CommitOutcome.NOT_RESERVED]) * len(request.indices)
        if reservation is None:
            return CommitReply(call.seq, self._epoch, bytes(outcomes)), None
        wanted: dict[int, int] = {}
        for position, index in enumerate(request.indices):
            if index in reservation.open_keys and index not in wanted:
                wanted[index] = position
        codes = self._pool.commit(reservation.ticket, list(wanted)) if wanted else b""
        reservation.share.end(len(wanted))
        done: list[bytes] = []
        for (index, position), code in zip(wanted.items(), codes, strict=True):
            outcomes[position] = code
            key = reservation.open_keys.pop(index)  # whatever the outcome, the item's reservation has ended
            self._in_flight.remove([key])
            if code == CommitOutcome.COMMITTED:
                done.append(key)
            elif code == CommitOutcome.BAD_RECORD:
                self._counters.bad_records += 1
        if done:
            self._history.committed(done)
            self._tails.replaced(reservation.replaces)
            reservation.replaces = b""
            if reservation.tail:
                self._tails.committed(done)
            else:
                self._store.committed(done)
            self._savings.committed(process.group.use, done, self._clock.monotonic_s())
            if not reservation.open_keys:
                self._counters.store.add(time.perf_counter() - reservation.begun_s)
        self._settle_if_over(process, request.reservation, reservation)
        return CommitReply(call.seq, self._epoch, bytes(outcomes)), None

    def abort(self, call: Call, process: AttachedProcess, request: Abort) -> KeptOutcome:
        """Give back extents that were reserved and not committed."""
        reservation = self._reservation(process, request.reservation)
        if reservation is None:
            return Ok(call.seq, self._epoch, 0), None
        indices = list(reservation.open_keys) if request.indices is None else request.indices
        given_back = list(dict.fromkeys(index for index in indices if index in reservation.open_keys))
        if given_back:
            self._pool.abort(reservation.ticket, given_back)
            reservation.share.end(len(given_back))
            self._in_flight.remove(reservation.open_keys.pop(index) for index in given_back)
        self._settle_if_over(process, request.reservation, reservation)
        return Ok(call.seq, self._epoch, len(given_back)), None

    async def corrupt(self, call: Call, process: AttachedProcess, request: Corrupt) -> KeptOutcome:
        """Check chunks that a reader reports as corrupt; those whose checksum is wrong leave L1."""
        identity = self._processes.identity(process, request.identity_id)
        n_chunks = whole_keys(request.keys, "keys")
        if not process.digest:
            raise BadRequest("slice: this process declared none when it attached", field="slice")
        keys = storage_keys(identity.root, request.keys, process.digest)

        def check() -> int:
            return sum(self._pool.mark_bad(nth(keys, index), identity.root) for index in range(n_chunks))

        return Ok(call.seq, self._epoch, await asyncio.shield(self._lane.run(check))), None

    async def _reserve_on_lane(
        self, call: Call, keys: bytes, share: Share, arguments: tuple[Any, ...], replaces: bytes
    ) -> KeptOutcome:
        def undo(done: asyncio.Future[Answer]) -> None:
            if (
                not done.cancelled() and done.exception() is None
            ):  # the pool refuses a process that has died meanwhile
                self._pool.abort(done.result()[0], None)
            share.keep(0)

        try:
            future = self._lane.run(_reserve, self._pool, share.n_chunks, keys, arguments)
        except Refused:
            share.keep(0)
            raise
        try:
            answer = await asyncio.shield(future)
        except BaseException:
            future.add_done_callback(undo)
            raise
        return self._outcome(call, keys, share, answer, replaces=replaces)

    def _outcome(
        self,
        call: Call,
        keys: bytes,
        share: Share,
        answer: Answer,
        *,
        tail: bool = False,
        replaces: bytes = b"",
    ) -> KeptOutcome:
        ticket, outcomes, extents = answer
        open_keys: dict[int, bytes] = {}
        counters = self._counters.reserve_outcomes
        for index, code in enumerate(outcomes):
            if code == ReserveOutcome.RESERVED:
                open_keys[index] = nth(keys, index)
            elif code in _REFUSALS:
                self._history.refused(nth(keys, index), ReserveOutcome(code).name.lower())
        for code in set(outcomes):
            name = ReserveOutcome(code).name.lower()
            counters[name] = counters.get(name, 0) + outcomes.count(code)
        share.keep(len(open_keys))
        if not open_keys:
            if all(code == ReserveOutcome.PRESENT for code in outcomes):
                self._tails.replaced(replaces)
            return ReserveReply(call.seq, self._epoch, outcomes, extents), None
        effect = Reservation(ticket, open_keys, share, tail=tail, replaces=replaces)
        return ReserveReply(call.seq, self._epoch, outcomes, extents), effect

    def _reservation(self, process: AttachedProcess, seq: int) -> Reservation | None:
        session = self._sessions.get(process.session)
        effect = None if session is None else session.effects.get(seq)
        return effect if isinstance(effect, Reservation) else None

    def _settle_if_over(self, process: AttachedProcess, seq: int, reservation: Reservation) -> None:
        if not reservation.open_keys:
            self._sessions.settle(process.session, seq)


def _reserve(pool: Pool, n_new: int, keys: bytes, arguments: tuple[Any, ...]) -> Answer:
    """Reserve extents for at most `n_new` chunks besides those present; the others hear of the session's limit."""
    n_chunks = key_count(keys)
    n_asked = n_chunks if n_new == n_chunks else min(n_chunks, pool.peek(keys) + n_new)
    ticket, outcomes, extents = 0, b"", b""
    if n_asked:
        ticket, outcomes, extents = pool.reserve(keys[: n_asked * KEY_BYTES], *arguments)
    left = n_chunks - n_asked
    return ticket, outcomes + bytes([ReserveOutcome.SESSION_LIMIT]) * left, extents + _NO_EXTENT * left
