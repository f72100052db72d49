"""An instance as a member of a cluster: it registers, tells what it holds, lives visibly and carries out commands.

    absent ── Register answered ──▶ member ── another epoch, a new connection, `unknown_instance` ──▶ absent
                                      │ a full sync is wanted
                                      ▼
       SyncBegin(S) ─▶ parts: everything READY ─▶ SyncEnd ─▶ events from S + 1 on

Rules:

1. The controller can neither stop nor slow this instance: nothing here is awaited by a request, every question has a
   time, every queue a bound.  What cannot be told in time is dropped, and a full sync makes up for it.
2. Events are set operations in order.  A full sync reads the pool in slices while chunks come and go, and the events
   since its begin follow it, so that each chunk ends as its last event says.
3. Events that overflow during a full sync make the next one *frozen*: stores are refused with `frozen` until it ends,
   at most FREEZE_S, and no longer than heartbeats are answered.
4. A command is carried out once by its number; its result is told until the controller has answered that.
5. With several controllers each is told everything by a link of its own.  One of them leads: a command that comes with
   a smaller (cluster id, token) than any of them has shown is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata import __version__
from kvstrata.errors import Unavailable
from kvstrata.native.copying import crc32c
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    TAG_BYTES,
    Beat,
    Change,
    CommandKind,
    Done,
    Events,
    Goodbye,
    Heartbeat,
    Load,
    ModelInfo,
    Nudge,
    Register,
    Registered,
    SyncBegin,
    SyncEnd,
    SyncPart,
    encode,
)
from kvstrata.rpc.zmq_link import AskLink, ClusterFailure, Links, PushLink
from kvstrata.server.cluster.commands import Commands
from kvstrata.server.cluster.events import L1_TIER, EventQueue, TierTags
from kvstrata.server.cluster.own_tiers import NotListed, OwnTiers, tier_name
from kvstrata.types import PoolEvent

if TYPE_CHECKING:
    from kvstrata.p2p.lender import PeerServer
    from kvstrata.rpc.zmq_server import ClusterKeys
    from kvstrata.server.engine import Engine

ANSWER_S = 5.0
"""For an answer of the controller to anything but a heartbeat."""
AGAIN_S, AGAIN_MAX_S = 0.2, 5.0
"""Between two attempts to register, doubling; a new connection ends the wait."""
SEND_S = 0.1
"""Between two looks at the queue of events."""
SCAN_ENTRIES = 8_192
"""Of the index, looked at in one turn of the loop (about 0.1 ms)."""
PART_TAGS = 65_536
PARTS_OPEN = 4
PART_ATTEMPTS = 20
FREEZE_S = 5.0
LIST_AGAIN_S, LIST_AGAIN_MAX_S = 1.0, 60.0
"""Between two looks at a tier that could not be listed, doubling."""
MAX_MODELS = 64
GOODBYE_S = 1.0
MAX_HEARTBEAT_S = 3_600.0


class Fence:
    """The greatest leadership that any controller has shown."""

    def __init__(self) -> None:
        self.seen = (0, 0)
        """(cluster id, token)"""

    def admits(self, cluster_id: int, token: int) -> bool:
        """Whether commands of this leadership are those of the leader, as far as is known here."""
        self.seen = max(self.seen, (cluster_id, token))
        return (cluster_id, token) == self.seen


class Cluster:
    """The links to all controllers; what happens here is told to each."""

    def __init__(self, links: Sequence[ClusterLink], tiers: OwnTiers) -> None:
        self._links = links
        self._tiers = tiers

    def start(self) -> None:
        """Begin; the controllers may be absent."""
        self._tiers.start()
        for link in self._links:
            link.start()

    async def stop(self) -> None:
        """Say goodbye to those that listen, and close. Idempotent."""
        await asyncio.gather(self._tiers.stop(), *(link.stop() for link in self._links))

    def status(self) -> dict[str, Any]:
        """For status pages and metrics: numbers of all links together, and what differs by controller."""
        rows = [link.status() for link in self._links]
        numbers: dict[str, Any] = {}
        for name, value in rows[0].items():
            if isinstance(value, bool):
                numbers[name] = any(row[name] for row in rows)
            elif isinstance(value, int):
                numbers[name] = sum(row[name] for row in rows)
        return {**numbers, "controllers": rows}

    def pool_events(self, events: Sequence[tuple[int, bytes, int]]) -> None:
        """What the pool did, in order (Pool.events)."""
        for link in self._links:
            link.pool_events(events)

    def pool_events_lost(self) -> None:
        """The pool has forgotten some before they were taken."""
        for link in self._links:
            link.pool_events_lost()

    def put_there(self, adapter: str, key: bytes) -> None:
        """An own L2 tier has acknowledged this chunk."""
        for link in self._links:
            link.put_there(tier_name(adapter), key)

    def gone_there(self, adapter: str, keys: Sequence[bytes]) -> None:
        """An own L2 tier has these no more."""
        for link in self._links:
            link.gone_there(tier_name(adapter), keys)

    def cleared_there(self, adapter: str) -> None:
        """An own L2 tier is empty."""
        for link in self._links:
            link.cleared_there(tier_name(adapter))


class ClusterLink:
    """One controller's. Everything runs on the loop."""

    def __init__(
        self,
        engine: Engine,
        url: str,
        *,
        keys: ClusterKeys | None,
        incarnation: int,
        peers: PeerServer,
        peer_endpoint: str,
        zone: str,
        http_url: str,
        fence: Fence,
        own: OwnTiers,
    ) -> None:
        """`url`: of the controller's reply port; all links share `fence` and `own`.

        Raises Unavailable for no endpoint.
        """
        self._engine = engine
        self._url = url
        self._keys = keys
        self._incarnation = incarnation
        self._peers = peers
        self._peer_endpoint = peer_endpoint
        self._zone = zone
        self._http_url = http_url
        self._fence = fence
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._log = EventLog("cluster")
        self._links = Links(self._loop)
        self._reply = self._links.ask(url, keys=keys, changed=self._connection_changed)
        self._heart: AskLink | None = None
        self._push: PushLink | None = None
        self._ports = (0, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._reconnected = False
        self._member = False
        self._epoch = 0
        self._seq = 0
        """Of the last batch of events that was sent."""
        self._tiers: list[str] = []
        self._queue = EventQueue()
        self._frame: bytes | None = None
        """A batch that the socket did not take yet."""
        self._l2 = TierTags()
        """Of the tiers that do not list what is there."""
        self._unlisted: list[str] = []
        """Those that list, and did not in the last full sync."""
        self._listing_again: asyncio.Task[None] | None = None
        self._telling = False
        """Events are kept for the controller: a full sync has begun, or has ended."""
        self._syncing: asyncio.Task[None] | None = None
        self._sync_number = 0
        self._sync_wanted = ""
        self._freeze_next_s = 0.0
        self._unfreeze: asyncio.TimerHandle | None = None
        self._synced = asyncio.Event()
        self._stopped = False
        self._heartbeat_s = 10.0
        self.commands = Commands(engine, peers, self._command_ended, self._resync)
        self._counts = dict.fromkeys(
            ("registrations", "heartbeats", "unanswered", "event_batches", "events", "syncs", "syncs_failed",
             "freezes", "freezes_cut", "overflows"), 0,
        )  # fmt: skip

    def start(self) -> None:
        """Begin; the controller may be absent."""
        spawn = self._engine.supervisor.spawn
        self._tasks = [spawn(self._run(), "cluster"), spawn(self._send_events(), "cluster-events")]

    async def stop(self) -> None:
        """Lease nothing more, say goodbye if anybody listens, and close. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._peers.leases.draining = True
        for task in (*self._tasks, self._syncing, self._listing_again):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.commands.stop()
        self._thaw()
        if self._member:
            try:
                request = Goodbye(0, self._engine.instance_id, self._incarnation)
                await self._reply.ask(request, Done, GOODBYE_S)
            except (Unavailable, ClusterFailure) as error:
                self._log.info("goodbye_unheard", reason=error.message)
        self._links.close()

    def status(self) -> dict[str, Any]:
        """For status pages and metrics."""
        return {
            "url": self._url,
            "member": self._member,
            "state": self._state(),
            "last_event": self._seq,
            "queued_tags": self._queue.n_tags,
            "commands_waiting": len(self.commands),
            "frozen": self._unfreeze is not None,
            **self._counts,
        }

    # --- what happens in this instance ---------------------------------------------------------------------

    def pool_events(self, events: Iterable[tuple[int, bytes, int]]) -> None:
        """What the pool did, in order (Pool.events)."""
        if self._telling:
            for kind, key, _ in events:
                change = _CHANGE_OF.get(kind)
                if change is not None:
                    self._queue.add(change, L1_TIER, key[:TAG_BYTES])

    def pool_events_lost(self) -> None:
        """The pool has forgotten some before they were taken."""
        if self._telling:
            self._want_sync("events_lost")

    def put_there(self, tier: str, key: bytes) -> None:
        """An own L2 tier has acknowledged this chunk."""
        if tier in self._tiers:
            if not self._own.lists(tier):
                self._l2.admit(tier, [key])
            if self._telling:
                self._queue.add(Change.ADMIT, tier, key[:TAG_BYTES])

    def gone_there(self, tier: str, keys: Sequence[bytes]) -> None:
        """An own L2 tier has these no more."""
        if tier in self._tiers:
            self._l2.evict(tier, keys)
            if self._telling:
                self._queue.add(Change.EVICT, tier, b"".join(key[:TAG_BYTES] for key in keys))

    def cleared_there(self, tier: str) -> None:
        """An own L2 tier is empty."""
        if tier in self._tiers:
            self._l2.clear(tier)
            if self._telling:
                self._queue.add(Change.CLEAR, tier)

    # --- membership ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        again_s = AGAIN_S
        while True:
            self._member = self._reconnected = False
            try:
                self._joined(await self._register())
            except ClusterFailure as refused:
                again_s = max(min(2 * again_s, AGAIN_MAX_S), refused.failure.retry_after_ms / 1000)
                self._log.repeated(
                    logging.WARNING, "refused", "controller_refuses", code=refused.failure.code,
                    reason=refused.failure.message,
                )  # fmt: skip
                await self._pause(again_s)
                continue
            except Unavailable as absent:
                again_s = min(2 * again_s, AGAIN_MAX_S)
                self._log.repeated(logging.WARNING, "absent", "controller_absent", reason=absent.message)
                await self._pause(again_s)
                continue
            again_s = AGAIN_S
            await self._live()
            self._thaw()

    async def _register(self) -> Registered:
        engine = self._engine
        tiers = self._own_tiers()
        if tiers != self._tiers:
            self._tiers = tiers
            self._telling = False
        request = Register(
            0, CLUSTER_PROTOCOL_VERSION, engine.instance_id, self._incarnation, __version__, tiers,
            engine.pool.extents_bytes, engine.settings.chunk_size, self._peer_endpoint, self._http_url, self._zone,
            platform.node()[:2000], os.getpid(), self._seq,
        )  # fmt: skip
        return await self._reply.ask(request, Registered, ANSWER_S)

    def _joined(self, registered: Registered) -> None:
        """Raises Unavailable when the answer names no ports."""
        ports = (registered.pull_port, registered.heartbeat_port)
        if not all(0 < port <= 65_535 for port in ports):
            raise Unavailable(f"the controller at {self._url} names the ports {ports}")
        self._member = True
        self._counts["registrations"] += 1
        self._epoch = registered.epoch
        self._heartbeat_s = min(max(0.05, registered.heartbeat_ms / 1000), MAX_HEARTBEAT_S)
        if ports != self._ports:
            for link in (self._push, self._heart):
                if link is not None:
                    link.close()
            host = self._url.rpartition(":")[0]
            self._push = self._links.push(f"{host}:{ports[0]}", keys=self._keys)
            self._heart = self._links.ask(f"{host}:{ports[1]}", keys=self._keys, told=self._nudged)
            self._ports = ports
        if registered.sync or not self._telling:
            self._want_sync("registered")
        self._log.info("member", controller=registered.controller, sync=bool(self._sync_wanted))

    async def _live(self) -> None:
        """Beat until it has to register again."""
        while not self._reconnected:
            self._wake.clear()
            if self._sync_wanted and (self._syncing is None or self._syncing.done()):
                self._syncing = self._engine.supervisor.spawn(self._sync(), "cluster-sync")
            if not await self._beat() or self._own_tiers() != self._tiers:
                return
            await self._pause(self._heartbeat_s)

    async def _beat(self) -> bool:
        """One heartbeat; False when it has to register again."""
        assert self._heart is not None
        results = self.commands.results()
        request = Heartbeat(
            0, self._engine.instance_id, self._incarnation, self._seq, self._state(), self._load(), self._models(),
            results, self._fence.seen, self._peers.leases.draining,
        )  # fmt: skip
        try:
            beat = await self._heart.ask(request, Beat, max(self._heartbeat_s, 1.0))
        except Unavailable:
            self._counts["unanswered"] += 1
            self._counts["freezes_cut"] += self._unfreeze is not None
            self._thaw()
            return True
        except ClusterFailure as refused:
            self._log.repeated(
                logging.WARNING, "heartbeat", "heartbeat_refused", code=refused.failure.code,
                reason=refused.failure.message,
            )  # fmt: skip
            return False
        self._counts["heartbeats"] += 1
        self.commands.told(results)
        if beat.epoch != self._epoch:
            return False
        leads = self._fence.admits(beat.cluster_id, beat.token)
        for command in beat.commands:
            if leads or command.kind is CommandKind.RESYNC:
                self.commands.take(command)
            else:
                (cluster_id, token), whose = (
                    self._fence.seen,
                    "an earlier leader" if beat.token else "no leader",
                )
                self.commands.refuse(
                    command,
                    f"token: {beat.token} of cluster {beat.cluster_id} belongs to {whose} (seen: {token} of cluster "
                    f"{cluster_id}); ask the controllers who leads",
                )
        return True

    async def _pause(self, seconds: float) -> None:
        """Until there is something to tell, or for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _connection_changed(self, up: bool) -> None:
        if up:  # perhaps to another process
            self._reconnected = True
            self._wake.set()

    def _nudged(self, _: Nudge) -> None:
        self._wake.set()

    def _command_ended(self) -> None:
        self._wake.set()

    def _own_tiers(self) -> list[str]:
        return [L1_TIER, *self._own.names()]

    def _state(self) -> str:
        if not self._engine.readiness()[0]:
            return "stopping"
        if self._unfreeze is not None:
            return "frozen"
        if self._syncing is not None and not self._syncing.done():
            return "syncing"
        return "draining" if self._peers.leases.draining else "ready"

    def _load(self) -> Load:
        engine, pool = self._engine, self._engine.pool.stats()
        counters = engine.counters
        peer_chunks, peer_bytes = engine.peer_loads()
        usage = self._own.usage()
        return Load(
            chunks={
                L1_TIER: pool["entries"]["ready"],
                **{
                    tier: usage[tier].records if tier in usage else self._l2.count(tier)
                    for tier in self._tiers[1:]
                },
            },
            used_bytes={L1_TIER: pool["used_bytes"], **{tier: one.used_bytes for tier, one in usage.items()}},
            capacity_bytes={
                L1_TIER: pool["extents_bytes"],
                **{tier: one.capacity_bytes for tier, one in usage.items() if one.capacity_bytes},
            },
            hits_total={
                "l1": counters.l1_hit_chunks,
                "l2": max(0, counters.l2_hit_chunks - peer_chunks),
                "peer": peer_chunks,
                "miss": counters.lookup_chunks - counters.l1_hit_chunks - counters.l2_hit_chunks,
            },
            peer_leased_bytes=self._peers.leases.leased_bytes,
            peer_sent_bytes_total=self._peers.leases.read_bytes,
            peer_read_bytes_total=peer_bytes,
            sessions=len(engine.peers.members),
        )  # fmt: skip

    def _models(self) -> list[ModelInfo]:
        found = {
            (group.layout, group.packed_slices): group
            for group in self._engine.peers.groups
            if group.complete
        }
        return [ModelInfo(group.layout, group.slices) for group in list(found.values())[:MAX_MODELS]]

    # --- events --------------------------------------------------------------------------------------------

    async def _send_events(self) -> None:
        while True:
            due_s = self._loop.time() + SEND_S
            await asyncio.sleep(SEND_S)
            self.commands.lag_s = max(self._loop.time() - due_s, self.commands.lag_s * 0.99)
            self._flush()

    def _flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        syncing = self._syncing is not None and not self._syncing.done()
        if self._queue.overflowed and not syncing:
            self._counts["overflows"] += 1
            self._want_sync("overflow")
        if not self._telling or syncing or not self._member or self._sync_wanted or self._push is None:
            return
        while True:
            if self._frame is None:
                runs = self._queue.take()
                if not runs:
                    return
                self._frame = encode(Events(self._engine.instance_id, self._incarnation, self._seq + 1, runs))
                self._counts["events"] += sum(len(run.tags) // TAG_BYTES for run in runs)
            if not self._push.try_send(self._frame):
                return
            self._frame = None
            self._seq += 1
            self._counts["event_batches"] += 1

    # --- full sync -----------------------------------------------------------------------------------------

    async def _resync(self, freeze_ms: int) -> None:
        """What a RESYNC asks for; returns when a full sync has ended."""
        self._freeze_next_s = max(self._freeze_next_s, min(freeze_ms / 1000, FREEZE_S))
        self._want_sync("asked")
        self._synced.clear()
        await self._synced.wait()

    def _want_sync(self, why: str) -> None:
        if not self._sync_wanted:
            self._log.info("sync_wanted", reason=why)
        self._sync_wanted = why
        self._wake.set()

    async def _sync(self) -> None:
        """One attempt; what it did not bring about is still wanted afterwards."""
        if self._listing_again is not None:
            self._listing_again.cancel()
            await asyncio.gather(self._listing_again, return_exceptions=True)
            self._listing_again = None
        self._sync_wanted = ""
        self._queue.clear()
        self._frame = None
        self._telling = True
        if self._freeze_next_s:
            self._freeze(self._freeze_next_s)
            self._freeze_next_s = 0.0
        self._sync_number += 1
        try:
            await self._tell_everything(self._sync_number)
        except (Unavailable, ClusterFailure) as error:
            self._counts["syncs_failed"] += 1
            self._telling = False
            self._log.warning("sync_failed", reason=error.message)
            await asyncio.sleep(AGAIN_S)
            self._want_sync("failed")
            return
        finally:
            self._thaw()
        if self._queue.overflowed:
            self._counts["overflows"] += 1
            self._freeze_next_s = FREEZE_S
            self._want_sync("overflow")
            return
        self._counts["syncs"] += 1
        self._synced.set()
        self._wake.set()
        if self._unlisted:
            self._log.info("tiers_not_listed", tiers=self._unlisted)
            self._listing_again = self._engine.supervisor.spawn(self._list_again(), "cluster-listing")

    async def _list_again(self) -> None:
        """Want another full sync once a tier that was left out can be listed."""
        again_s = LIST_AGAIN_S
        while True:
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, LIST_AGAIN_MAX_S)
            if any([await self._own.can_list(tier) for tier in self._unlisted]):
                self._want_sync("listed")
                return

    async def _tell_everything(self, number: int) -> None:
        me = (self._engine.instance_id, self._incarnation, number)
        counts = dict.fromkeys(self._tiers, 0)
        open_parts: set[asyncio.Task[None]] = set()
        n_parts = 0
        await self._reply.ask(SyncBegin(0, *me, self._seq), Done, ANSWER_S)
        try:
            async for tier, tags in self._everything():
                if len(open_parts) >= PARTS_OPEN:
                    done, open_parts = await asyncio.wait(open_parts, return_when=asyncio.FIRST_COMPLETED)
                    for part in done:
                        part.result()
                request = SyncPart(0, *me, n_parts, tier, tags, crc32c(tags))
                open_parts.add(asyncio.create_task(self._part(request), name="cluster-sync-part"))
                n_parts += 1
                counts[tier] += len(tags) // TAG_BYTES
            await asyncio.gather(*open_parts)
        finally:
            for part in open_parts:
                part.cancel()
            await asyncio.gather(*open_parts, return_exceptions=True)
        await self._reply.ask(SyncEnd(0, *me, n_parts, counts), Done, ANSWER_S)

    async def _everything(self) -> Any:
        """(tier, tags) in parts."""
        collected = bytearray()
        entry = 0
        while True:
            tags, entry = self._engine.pool.ready_tags(entry, SCAN_ENTRIES)
            collected += tags
            if len(collected) >= PART_TAGS * TAG_BYTES or (collected and not entry):
                yield L1_TIER, bytes(collected)
                collected.clear()
            if not entry:
                break
            await asyncio.sleep(0)
        self._unlisted.clear()
        for tier in self._tiers[1:]:
            if not self._own.lists(tier):
                tags = self._l2.of(tier)
                for at in range(0, len(tags), PART_TAGS * TAG_BYTES):
                    yield tier, tags[at : at + PART_TAGS * TAG_BYTES]
                continue
            try:
                async for part in self._own.parts(tier, PART_TAGS):
                    yield tier, part
            except NotListed:
                self._unlisted.append(tier)

    async def _part(self, part: SyncPart) -> None:
        """Send a part until it is taken. A repeated one changes nothing. Raises Unavailable or ClusterFailure."""
        for attempt in range(PART_ATTEMPTS):
            try:
                await self._reply.ask(part, Done, ANSWER_S)
            except ClusterFailure as refused:
                if (
                    not refused.failure.retryable
                    or refused.failure.code == "bad_sync"
                    or attempt == PART_ATTEMPTS - 1
                ):
                    raise
                await asyncio.sleep(max(AGAIN_S, min(refused.failure.retry_after_ms / 1000, ANSWER_S)))
            else:
                return

    # --- freeze --------------------------------------------------------------------------------------------

    def _freeze(self, seconds: float) -> None:
        self._thaw()
        self._engine.frozen_by.add(self._url)
        self._counts["freezes"] += 1
        self._unfreeze = self._loop.call_later(seconds, self._thaw)
        self._log.info("frozen", at_most_s=seconds)

    def _thaw(self) -> None:
        if self._unfreeze is not None:
            self._unfreeze.cancel()
            self._unfreeze = None
        self._engine.frozen_by.discard(self._url)


_CHANGE_OF: dict[int, Change] = {
    kind: Change.ADMIT if kind in (PoolEvent.INSERTED, PoolEvent.VERIFIED) else Change.EVICT
    for kind in PoolEvent
}
