"""The owner's side of reads by peers: other instances lease records of this L1, and this process's clock ends leases.

    hello     asks how to reach the memory; the answer is the transfer engine's metadata
    lease     asks to keep the leading records of a run where they are for a while
    release   says that all or some of a lease's records were read; the answer is whether the lease stood until now

Invariants
1. While a lease is in `PeerLeases`, the pool keeps its extents (as leases of row 0, the server itself).  After the
   lease has left `PeerLeases`, no release of it is answered with `stood`.  So `stood` is exact even after this process
   was frozen, since a frozen process releases no extent.
2. Leases of peers and pins together are at most MAX_LEASES, and keep at most `limit_bytes` of distinct records.
3. Only verified records are leased: the pool's lease stops at a record that is not READY, such as one whose CRC is
   pending.
4. Lease numbers begin at a random number, so that the numbers of an earlier process name no lease here.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.errors import BadRequest, KvstrataError, Refused, Unavailable, WrongVersion
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.cluster_wire import (
    BAD_FRAME,
    CLUSTER_PROTOCOL_VERSION,
    PEER_REQUESTS,
    ClusterReply,
    Failure,
    PeerHello,
    PeerLeased,
    PeerRelease,
    PeerReleased,
    PeerWelcome,
    ToPeer,
    encode,
    seq_of,
)
from kvstrata.types import EXTENT, FORMAT_VERSION, KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.clock import Clock
    from kvstrata.native.pool import Pool
    from kvstrata.rpc.zmq_server import Address, ZmqServer

MAX_LEASES = 4_096
MIN_TIMER_S = 0.001
ABSENT, LIMIT, DRAINING = "absent", "limit", "draining"
SERVER_ROW = 0


class Leased(NamedTuple):
    """The answer to a reader that asks for a lease; `number` 0: no lease was granted, `reason` says why."""

    number: int
    extents: bytes
    reason: str


class _Lease:
    __slots__ = ("claim", "entries", "expires_s", "n_bytes", "tickets")

    def __init__(self, tickets: list[int], entries: list[int], n_bytes: int, expires_s: float) -> None:
        self.tickets = tickets
        self.entries = entries
        self.n_bytes = n_bytes
        self.expires_s = expires_s
        self.claim = ""
        """Name of a controller's pin; empty for a reader's lease."""


class PeerLeases:
    """Leases of peers and pins of the controller on one pool. The caller passes the time; no I/O."""

    def __init__(self, pool: Pool, limit_bytes: int) -> None:
        self._pool = pool
        self._limit_bytes = limit_bytes
        self._next = secrets.randbits(61) + 1
        self._leases: dict[int, _Lease] = {}
        self._claims: dict[str, int] = {}
        self._shares: dict[int, list[int]] = {}
        """Pool entry → [number of leases on it, its bytes]."""
        self._due: list[tuple[float, int]] = []
        """Heap of (when to check whether a lease has expired, its number); may name leases that have ended."""
        self.draining = False
        self.leased_bytes = 0
        """Bytes of the distinct records that are leased or pinned."""
        self.counts = {"granted": 0, "released": 0, "expired": 0, "absent": 0, "limit": 0, "draining": 0}
        self.read_bytes = 0
        """Bytes that readers have reported as read."""

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, keys: bytes, n_slices: int, ttl_s: float, now_s: float) -> Leased:
        """Lease the leading chunks that are wholly in L1, as many as the limits allow.

        `keys` are the storage keys chunk by chunk, `n_slices` of them for each chunk.
        """
        if self.draining or len(self._leases) >= MAX_LEASES:
            reason = DRAINING if self.draining else LIMIT
            self.counts[reason] += 1
            return Leased(0, b"", reason)
        lease, extents, reason = self._take(keys, n_slices)
        if reason:
            self.counts[reason] += 1
        if lease is None:
            return Leased(0, b"", reason)
        self.counts["granted"] += 1
        return Leased(self._add(lease, now_s + ttl_s), extents, reason)

    def release(self, number: int, keep_s: float, now_s: float, read_bytes: int = 0) -> bool:
        """End a reader's lease, or keep it for `keep_s` from now; returns whether it stood until now."""
        lease = self._leases.get(number)
        if lease is None or lease.claim:
            return False
        self.read_bytes += min(read_bytes, lease.n_bytes)
        if keep_s:
            lease.expires_s = now_s + keep_s
        else:
            self.counts["released"] += 1
            self._end(number)
        return True

    def pin(self, claim: str, keys: bytes, ttl_s: float, now_s: float) -> int:
        """Keep those of these records that are in L1; returns how many. An older pin with the same name ends first.

        Raises Refused if the limits leave no room for all of them; then nothing is pinned under this name.
        """
        self.unpin(claim)
        whole = _Lease([], [], 0, 0.0)
        at, reason = 0, ""
        while at < len(keys) and reason != LIMIT:
            lease, _, reason = self._take(keys[at:], 1)
            at += KEY_BYTES
            if lease is not None:
                at += (len(lease.entries) - 1) * KEY_BYTES
                whole.tickets += lease.tickets
                whole.entries += lease.entries
                whole.n_bytes += lease.n_bytes
        if reason == LIMIT or len(self._leases) >= MAX_LEASES:
            self._give_back(whole)
            raise Refused(
                f"keys: pins and leases of peers may keep {self._limit_bytes} bytes of L1, which leaves no room for "
                "all of these chunks; pin fewer, or try again when some leases have ended",
                field="keys",
            )
        if not whole.entries:
            return 0
        whole.claim = claim
        self._claims[claim] = self._add(whole, now_s + ttl_s)
        return len(whole.entries)

    def unpin(self, claim: str) -> int:
        """End a pin; returns how many records it kept."""
        number = self._claims.get(claim)
        if number is None:
            return 0
        count = len(self._leases[number].entries)
        self._end(number)
        return count

    def expire(self, now_s: float) -> float | None:
        """End the leases whose time is over; returns when to call again, None if no lease is left."""
        while self._due and self._due[0][0] <= now_s:
            number = heapq.heappop(self._due)[1]
            lease = self._leases.get(number)
            if lease is None:
                continue
            if lease.expires_s > now_s:  # a release has prolonged the lease
                heapq.heappush(self._due, (lease.expires_s, number))
            else:
                self.counts["expired"] += 1
                self._end(number)
        while self._due and self._due[0][1] not in self._leases:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def end_all(self) -> None:
        """End all leases and pins."""
        for number in list(self._leases):
            self._end(number)
        self._due.clear()

    def stats(self) -> dict[str, Any]:
        """For status and metrics."""
        return {
            "leases": len(self._leases) - len(self._claims),
            "pins": len(self._claims),
            "leased_bytes": self.leased_bytes,
            "limit_bytes": self._limit_bytes,
            "draining": self.draining,
            "read_bytes": self.read_bytes,
            **{("draining_refused" if word == DRAINING else word): n for word, n in self.counts.items()},
        }

    def _take(self, keys: bytes, n_slices: int) -> tuple[_Lease | None, bytes, str]:
        """Lease leading chunks in the pool. Returns the lease, its extents, and the reason why it lacks some chunks.

        The lease is in no table yet, and None if it would be empty.  The reason is "" if no chunk is lacking.
        """
        ticket, n_chunks, extents, _, short_bytes = self._pool.lease(keys, n_slices, [SERVER_ROW])
        if not ticket:
            return None, b"", LIMIT if short_bytes else ABSENT
        room, fits, more = self._limit_bytes - self.leased_bytes, 0, 0
        entries: list[int] = []
        n_bytes = 0
        for index, (_, length, entry, _, _) in enumerate(EXTENT.iter_unpack(extents)):
            if entry not in self._shares:
                more += length
                if more > room:
                    break
            entries.append(entry)
            n_bytes += length
            if (index + 1) % n_slices == 0:
                fits = index + 1
        if fits < n_chunks * n_slices:
            self._pool.release(ticket)
            if not fits:
                return None, b"", LIMIT
            # The same records are leased again, unless another thread has removed some since the release.
            ticket, n_chunks, extents, _, _ = self._pool.lease(
                keys[: fits * KEY_BYTES], n_slices, [SERVER_ROW]
            )
            if not ticket:
                return None, b"", ABSENT
            reason = LIMIT
        else:
            reason = "" if len(keys) == fits * KEY_BYTES else LIMIT if short_bytes else ABSENT
        records = [(entry, length) for _, length, entry, _, _ in EXTENT.iter_unpack(extents)]
        for entry, length in records:
            share = self._shares.setdefault(entry, [0, length])
            if not share[0]:
                self.leased_bytes += length
            share[0] += 1
        lease = _Lease([ticket], [entry for entry, _ in records], sum(length for _, length in records), 0.0)
        return lease, extents, reason

    def _add(self, lease: _Lease, expires_s: float) -> int:
        number, self._next = self._next, self._next + 1
        lease.expires_s = expires_s
        self._leases[number] = lease
        if len(self._due) > 2 * MAX_LEASES:  # many leases were released long before they would have expired
            self._due = [due for due in self._due if due[1] in self._leases]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (expires_s, number))
        return number

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number)
        if lease.claim:
            del self._claims[lease.claim]
        self._give_back(lease)

    def _give_back(self, lease: _Lease) -> None:
        for ticket in lease.tickets:
            self._pool.release(ticket)
        for entry in lease.entries:
            share = self._shares[entry]
            share[0] -= 1
            if not share[0]:
                self.leased_bytes -= share[1]
                del self._shares[entry]


class PeerServer:
    """Answers peers on one ROUTER socket. Everything runs on the loop."""

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        server: ZmqServer | None,
        *,
        instance_id: str,
        incarnation: int,
        limit_bytes: int,
        engine: str,
        metadata: Callable[[], bytes],
    ) -> None:
        """`server` is None if peers are not served and only controllers' pins are kept.

        `metadata()` returns the metadata of the transfer engine by which peers reach the pool now; empty while there is
        no such engine.
        """
        self.leases = PeerLeases(pool, limit_bytes)
        self._pool = pool
        self._clock = clock
        self._server = server
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._engine = engine
        self._metadata = metadata
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._errors = 0
        self._log = EventLog("peers")

    def start(self) -> None:
        """Begin to answer."""
        if self._server is not None:
            self._server.start(self._on_frame, self._on_frame_count)

    def close(self) -> None:
        """Stop answering, and end every lease."""
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        self.leases.draining = True
        self.leases.end_all()

    def pin(self, claim: str, keys: bytes, ttl_s: float) -> int:
        """See PeerLeases.pin."""
        count = self.leases.pin(claim, keys, ttl_s, self._clock.monotonic_s())
        self._look_later()
        return count

    def status(self) -> dict[str, Any]:
        """For status pages and metrics."""
        return {
            **self.leases.stats(),
            "errors": self._errors,
            **({} if self._server is None else self._server.stats()),
        }

    def _on_frame(self, address: Address, frame: bytes) -> None:
        try:
            reply = self._answer(PEER_REQUESTS.decode(frame))
        except BAD_FRAME as error:
            reply = self._failure(seq_of(frame), BadRequest(f"invalid message to a peer: {error}"))
        except KvstrataError as error:
            reply = self._failure(seq_of(frame), error)
        if self._server is not None:
            self._server.send(address, encode(reply))

    def _on_frame_count(self, address: Address, count: int) -> bytes:
        return encode(self._failure(0, BadRequest(f"a message must be one frame, found {count}")))

    def _answer(self, request: ToPeer) -> ClusterReply:
        if isinstance(request, PeerHello):
            return self._hello(request)
        now_s = self._clock.monotonic_s()
        self.leases.expire(now_s)
        if isinstance(request, PeerRelease):
            stood = self.leases.release(request.lease, request.keep_ms / 1000, now_s, request.read_bytes)
            return PeerReleased(request.seq, self._incarnation, stood)
        n_keys, rest = divmod(len(request.keys), KEY_BYTES)
        if rest or not n_keys or n_keys % request.n_slices:
            raise BadRequest(
                f"keys: found {len(request.keys)} bytes; send {request.n_slices} keys of {KEY_BYTES} bytes for each of "
                "one or more chunks",
                field="keys",
            )
        leased = self.leases.lease(request.keys, request.n_slices, request.ttl_ms / 1000, now_s)
        self._look_later()
        return PeerLeased(
            request.seq, self._incarnation, leased.number, leased.extents, request.ttl_ms, leased.reason
        )

    def _hello(self, request: PeerHello) -> PeerWelcome:
        for field, found, ours in (
            ("protocol", request.protocol, CLUSTER_PROTOCOL_VERSION),
            ("record_version", request.record_version, FORMAT_VERSION),
        ):
            if found != ours:
                raise WrongVersion(
                    f"{field}: the reader speaks {found}, {self._instance_id} speaks {ours}; upgrade the older side",
                    field=field,
                )
        if request.engine != self._engine:
            raise BadRequest(
                f"engine: the reader uses {request.engine!r}, {self._instance_id} uses {self._engine!r}; set the "
                "same p2p.engine on both",
                field="engine",
            )
        metadata = self._metadata()
        if not metadata:
            raise Unavailable(f"the transfer engine of {self._instance_id} is not up; ask again later")
        self._log.debug("peer", reader=request.reader)
        return PeerWelcome(
            request.seq, self._incarnation, self._instance_id, metadata, self._pool.extents_bytes
        )

    def _failure(self, seq: int, error: KvstrataError) -> Failure:
        self._errors += 1
        return Failure(
            seq, self._incarnation, error.code, error.message[:2000], error.field[:200], error.retryable
        )

    def _look_later(self) -> None:
        """Set the timer to the time when the next lease expires."""
        now_s = self._clock.monotonic_s()
        due_s = self.leases.expire(now_s)
        if due_s is None or (self._timer is not None and self._timer_due_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = due_s
        self._timer = self._loop.call_later(max(MIN_TIMER_S, due_s - now_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._look_later()
