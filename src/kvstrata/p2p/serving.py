"""The owner's side of reads by peers: other instances lease records of this L1, and this process's clock ends leases.

    hello     asks how to reach the memory; the answer is the transfer engine's metadata
    lease     asks to keep the leading records of a run where they are for a while
    release   says that all or some of a lease's records were read; the answer is whether the lease stood until now, and
              with `p2p.mac` the MACs of these records (mac.py)

Invariants
1. While a lease is in `PeerLeases`, the pool keeps its extents (as leases of row 0, the server itself).  After the
   lease has left `PeerLeases`, no release of it is answered with `stood`.  So `stood` is exact even after this process
   was frozen, since a frozen process releases no extent.
2. Leases of peers are at most MAX_LEASES, and keep at most LENT_SHARE of L1.
3. Only verified records are leased: the pool's lease stops at a record that is not READY, such as one whose CRC is
   pending.
4. Lease numbers begin at a random number, so that the numbers of an earlier process name no lease here.
5. While MACs of a lease's records are computed, the pool keeps these records, even if the lease ends meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import secrets
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.errors import BadRequest, Refused, Unavailable, WrongVersion
from kvstrata.keys.batch import split
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.p2p.lent import ABSENT, LIMIT, LentPool, LentRecords, split_extents
from kvstrata.p2p.mac import MAC_KEY_BYTES, THREADS, parts_of, tags_of
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    ClusterReply,
    PeerHello,
    PeerLease,
    PeerLeased,
    PeerRelease,
    PeerReleased,
    PeerWelcome,
)
from kvstrata.rpc.zmq_curve import KeyKind
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.types import EXTENT, FORMAT_VERSION, KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.clock import Clock
    from kvstrata.native.core import Pool
    from kvstrata.rpc.control_port import ControlPort

LENT_SHARE = 1 / 4
MAX_LEASES = 4_096
MIN_TIMER_S = 0.001
DRAINING = "draining"


class Leased(NamedTuple):
    """The answer to a reader that asks for a lease; `number` 0: no lease was granted, `reason` says why."""

    number: int
    extents: bytes
    reason: str


class PeerLeases(Numbers):
    """Leases of peers on this L1. The caller passes the time; no I/O."""

    leases = gauge("Leases that readers hold on chunks of this instance.", len)
    leased_bytes = gauge(
        "Bytes of L1 kept by readers' leases, each record once.", lambda self: self._lent.leased_bytes
    )
    limit_bytes = gauge(
        "Maximum number of bytes of L1 that readers' leases may keep.", lambda self: self._lent.limit_bytes
    )
    draining = gauge("1 while peers are granted no leases, else 0.")
    read_bytes = counter("Bytes that readers have reported as read from here.")
    granted = counter("Leases granted.", name="granted_leases")
    released = counter("Leases ended by their reader.", name="released_leases")
    expired = counter("Leases that expired.", name="expired_leases")
    absent = counter("Lease requests for records that are not here.", name="absent_requests")
    limit = counter("Lease requests shortened by the limit.", name="limited_requests")
    draining_refused = counter("Lease requests refused while draining.", name="draining_refused_requests")

    def __init__(self, pool: Pool) -> None:
        """At most LENT_SHARE of the pool is lent."""
        self._lent = LentPool(pool, LENT_SHARE)
        self._next = secrets.randbits(61) + 1
        self._leases: dict[int, LentRecords] = {}
        self._due: list[tuple[float, int]] = []
        """Heap of (when to check whether a lease has expired, its number); may name leases that have ended."""
        self.draining = False

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, keys: bytes, n_slices: int, ttl_s: float, now_s: float, *, each: bool = False) -> Leased:
        """Lease the leading chunks that are wholly in L1, as many as the limits allow.

        `keys` are the storage keys chunk by chunk, `n_slices` of them for each chunk.  With `each` every key that is
        present is leased, and `extents` has one for each key, zero for those that are not leased.
        """
        taken, extents = None, b""
        if self.draining:
            reason = DRAINING
        elif len(self._leases) >= MAX_LEASES:
            reason = LIMIT
        elif each:
            taken, reason, extents = self._lent.take_each(split(keys))
        else:
            taken, reason = self._lent.take(keys, n_slices)
        self.absent += reason == ABSENT
        self.limit += reason == LIMIT
        self.draining_refused += reason == DRAINING
        if taken is None:
            return Leased(0, b"", reason)
        self.granted += 1
        number, self._next = self._next, self._next + 1
        self._leases[number] = lease = LentRecords(self._lent, taken, now_s + ttl_s)
        if len(self._due) > 2 * MAX_LEASES:  # many leases were released long before they would have expired
            self._due = [due for due in self._due if due[1] in self._leases]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (lease.expires_s, number))
        return Leased(number, extents or taken.extents, reason)

    def release(self, number: int, keep_s: float, now_s: float, read_bytes: int = 0) -> bool:
        """End a reader's lease, or keep it for `keep_s` from now; returns whether it stood until now."""
        lease = self._leases.get(number)
        if lease is None:
            return False
        self.read_bytes += min(read_bytes, lease.taken.n_bytes)
        if keep_s:
            lease.expires_s = now_s + keep_s
        else:
            self.released += 1
            self._end(number)
        return True

    def records(self, number: int, packed: list[bytes]) -> tuple[list[tuple[bytes, int]], LentRecords] | None:
        """Some records of a reader's lease, see `LentRecords.named`, and the lease; None if there is no such lease."""
        lease = self._leases.get(number)
        return None if lease is None else (lease.named(packed), lease)

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
                self.expired += 1
                self._end(number)
        while self._due and self._due[0][1] not in self._leases:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def end_all(self) -> None:
        """End all leases."""
        for number in list(self._leases):
            self._end(number)
        self._due.clear()

    def _end(self, number: int) -> None:
        self._leases.pop(number).let_go()


class PeerServer:
    """Answers peers on the control port. Everything runs on the loop."""

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        port: ControlPort | None,
        *,
        instance_id: str,
        incarnation: int,
        engine: str,
        metadata: Callable[[], bytes],
        mac: bool = False,
    ) -> None:
        """`port` is None if peers are not served.

        `metadata()` returns the metadata of the transfer engine by which peers reach L1 now;
        empty while there is no such engine.  `mac`: all readers get MACs, and must want them.
        """
        self.leases = PeerLeases(pool)
        self._extents_bytes = pool.extents_bytes
        self._clock = clock
        if port is not None:
            port.serve(
                (KeyKind.INSTANCE,),
                {PeerHello: self._hello, PeerLease: self._lease, PeerRelease: self._release},
            )
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._engine = engine
        self._metadata = metadata
        self._lanes = Lanes("peer-macs", num_workers=THREADS) if mac else None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._log = EventLog("peers")

    async def close(self) -> None:
        """End every lease, and wait until no record is read here any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self.leases.draining = True
        self.leases.end_all()
        if self._lanes is not None:
            await self._lanes.close()

    def _release(self, request: PeerRelease) -> ClusterReply | Coroutine[Any, Any, ClusterReply]:
        """Release, and answer now or when the tags are computed. Raises BadRequest or Refused; nothing is released."""
        now_s = self._clock.monotonic_s()
        self.leases.expire(now_s)
        tags = self._tags(request) if request.mac_key else None
        stood = self.leases.release(request.lease, request.keep_ms / 1000, now_s, request.read_bytes)
        released = PeerReleased(request.seq, self._incarnation, stood)
        return released if tags is None else self._with_tags(released, tags)

    async def _with_tags(self, released: PeerReleased, tags: asyncio.Future[list[bytes]]) -> PeerReleased:
        return msgspec.structs.replace(released, tags=b"".join(await tags))

    def _tags(self, request: PeerRelease) -> asyncio.Future[list[bytes]] | None:
        """Begin to compute the tags that a reader asks for, in parts; None if it has no such lease."""
        if self._lanes is None:
            raise self._other_mac(True)
        if len(request.mac_key) != MAC_KEY_BYTES:
            raise BadRequest(
                f"mac_key: found {len(request.mac_key)} bytes; send {MAC_KEY_BYTES}", field="mac_key"
            )
        if len(request.extents) % EXTENT.size:
            raise BadRequest(
                f"extents: found {len(request.extents)} bytes; send {EXTENT.size} for each record",
                field="extents",
            )
        found = self.leases.records(request.lease, split_extents(request.extents))
        if found is None:
            return None
        records, lease = found
        parts: list[asyncio.Future[bytes]] = []
        for numbers in parts_of(len(records)):
            work = functools.partial(tags_of, request.mac_key, records, numbers)
            part = self._lanes.submit(Lane.LOAD, work, beyond_limit=bool(parts))
            if part is None:
                raise Refused(f"mac_key: {self._instance_id} computes too many MACs already; try again later")
            lease.keep()
            part.add_done_callback(lambda _: lease.let_go())
            parts.append(part)
        return asyncio.gather(*parts)

    def _other_mac(self, readers: bool) -> BadRequest:
        here = self._lanes is not None
        return BadRequest(
            f"mac: p2p.mac is {str(readers).lower()} for the reader, but {str(here).lower()} for {self._instance_id}; "
            "set the same p2p.mac on both",
            field="mac",
        )

    def _lease(self, request: PeerLease) -> PeerLeased:
        now_s = self._clock.monotonic_s()
        self.leases.expire(now_s)
        n_keys, rest = divmod(len(request.keys), KEY_BYTES)
        if rest or not n_keys or n_keys % request.n_slices:
            raise BadRequest(
                f"keys: found {len(request.keys)} bytes; send {request.n_slices} keys of {KEY_BYTES} bytes for each of "
                "one or more chunks",
                field="keys",
            )
        leased = self.leases.lease(
            request.keys,
            request.n_slices,
            request.ttl_ms / 1000,
            now_s,
            each=request.each,
        )
        self._look_later()
        return PeerLeased(
            request.seq,
            self._incarnation,
            leased.number,
            leased.extents,
            request.ttl_ms,
            leased.reason,
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
        if request.mac != (self._lanes is not None):
            raise self._other_mac(request.mac)
        metadata = self._metadata()
        if not metadata:
            raise Unavailable(f"the transfer engine of {self._instance_id} is not up; ask again later")
        self._log.debug("peer", reader=request.reader)
        return PeerWelcome(request.seq, self._incarnation, self._instance_id, metadata, self._extents_bytes)

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
