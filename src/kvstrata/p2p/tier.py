"""The L1 of other instances as a tier that is only read: the directory says who, one owner leases, one-sided reads.

    exists   keys ─▶ standing leases ─▶ directory (remembered for a moment) ─▶ PeerLease at one owner ─▶ lengths
    load     leased extents ─(transfer engine)─▶ reserved extents ─▶ verified here ∥ PeerRelease: stood? ─▶ LOADED

Invariants
1. LOADED is answered only for bytes that were read while the owner's lease stood, by the owner's own word after the
   read, and that verify as the record of their key. Anything else is a miss: a wrong directory, an owner that has
   evicted, cleared or restarted, another record version.
2. The hold of a destination is dropped when the engine has said that its read ended and nothing here looks at the
   bytes any more; no clock, deadline or cancelled wait drops it.
3. A lease that nobody reads is given back after IDLE_S; it runs out at the owner in any case.
4. What an owner or the controller says is checked before it is used, and waited for at most `lookup_timeout_ms` in a
   lookup and `load_timeout_ms` in a load. One that fails is let alone for a while (owners.py).
5. Nothing is ever put, deleted or cleared: what an owner has is the owner's.

The keys of a question are a beginning: what an owner does not have from the first key on counts as not there.

Keys for which an owner was named (`prefer`) are asked of that one first, whatever the directory says; of others only
when it leases none of them, which is counted and logged.

An owner leases a quarter of its L1 at most.  What a long prompt has beyond that is answered as there, of the length
that its leased records have; it is leased while it is loaded, when our own leases there have ended.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvstrata.errors import ConfigError, StorageError, TransferError, Unavailable
from kvstrata.native.copying import CopyOutcome, Verifier
from kvstrata.p2p.engines import base as transfer
from kvstrata.p2p.engines.base import ReadItem, Region, TransferEngine
from kvstrata.p2p.engines.links import Devices, find_devices
from kvstrata.p2p.owners import (
    DirectoryCache,
    Lease,
    LeaseBook,
    NamedOwners,
    OwnerBook,
    OwnerLimits,
    Pacer,
    Question,
    question_of,
)
from kvstrata.p2p.reopening import PeerEngine
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    MAX_PEER_KEYS,
    Owner,
    PeerHello,
    PeerLease,
    PeerLeased,
    PeerRelease,
    PeerReleased,
    PeerWelcome,
    Where,
    WhereReply,
    tags_of,
)
from kvstrata.rpc.zmq_link import AskLink, ClusterFailure, Links
from kvstrata.rpc.zmq_server import ClusterKeys, read_cluster_keys
from kvstrata.storage.base import (
    HEAD_BYTES,
    AdapterContext,
    Capabilities,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.storage.wrap.deadline import Breaker
from kvstrata.types import EXTENT, FORMAT_VERSION, KEY_BYTES, Extent, unpack_extents

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH = 256
MAX_PEERS = 256
"""Owners with a connection at a time; more are asked once another was let go."""
IDLE_S = 2.0
"""A lease that nobody reads for so long is given back."""
SWEEP_S = 0.5
STANDS_S = 1.0
"""A lease that stands for less than this is asked for anew."""
ATTEMPTS = 2
"""Owners that one lookup asks at most."""
CONTROLLER_MAX_OPEN_S = 4.0
"""Longest pause between two questions to a controller that does not answer."""
VERIFIERS = 4
LIMIT = "limit"
"""An owner's word: it has more, and leases no more of it now."""
CLOSED, BAD_ITEM, READ_ONLY, THROTTLED, LENGTH = "closed", "bad_item", "read_only", "throttled", "length"
CONTROLLER_DOWN, PEER_GONE, PEER_DEADLINE, TRANSFER = (
    "controller_down",
    "peer_gone",
    "peer_deadline",
    "transfer",
)
_REASONS = {
    transfer.DEADLINE: PEER_DEADLINE,
    transfer.CANCELLED: PEER_GONE,
    transfer.PEER_GONE: PEER_GONE,
    transfer.NOT_CONNECTED: PEER_GONE,
    transfer.BUSY: THROTTLED,
    transfer.CLOSED: CLOSED,
}
"""Of an engine's words; the others are TRANSFER."""
_ABSENT = Found(Presence.ABSENT)
_NOT_THERE = LoadOutcome(LoadStatus.ABSENT)
_LOADED = LoadOutcome(LoadStatus.LOADED)
_COUNTED = (
    "asked_directory", "recalled", "leases", "leases_refused", "leases_lost", "reads", "read_records", "read_bytes",
    "read_failures", "unsound_records", "hellos", "owners", "owners_let_alone", "named_leases", "named_refused",
)  # fmt: skip


class PeerSettings(NamedTuple):
    """Checked fields of an entry."""

    controllers: tuple[str, ...]
    """Endpoints of the reply sockets; any of them may be asked."""
    engine: str
    """Name of the transfer engine."""
    curve_file: str = ""
    lookup_timeout_ms: int = 250
    load_timeout_ms: int = 5_000
    lease_ms: int = 10_000
    remember_ms: int = 500
    """How long the directory's answer is used again, …"""
    remember_none_ms: int = 200
    """… and how long that nobody has a chunk."""
    max_bytes_per_s: float = 0.0
    """0: no bound."""
    limits: OwnerLimits = OwnerLimits()


class _Asked(NamedTuple):
    """What came of a question."""

    reason: str = ""
    """Why nobody could be asked."""
    more: int = 0
    """Leading keys that an owner has, by the directory's word, and leases only when others are given back."""


class _Peer:
    """The connection to one owner."""

    def __init__(self, instance: str, endpoint: str, link: AskLink) -> None:
        self.instance = instance
        self.endpoint = endpoint
        self.link = link
        self.epoch = 0
        """Of the process whose memory the engine reaches; 0 while it reaches none."""
        self.extents_bytes = 0
        self.engine: TransferEngine | None = None
        """That has connected it; None while none has."""
        self.metadata = b""
        self.opening: asyncio.Task[None] | None = None


class _Landing:
    """The holds of one read: dropped when both the engine and the reader have finished with the bytes."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        self._holds = list(holds)
        self._sides = 2

    def leave(self) -> None:
        """One side has finished."""
        self._sides -= 1
        if not self._sides:
            for hold in self._holds:
                hold.drop()
            self._holds.clear()


class PeerAdapter(StorageAdapter):
    """See the module. Nothing is connected or registered before `open`."""

    def __init__(
        self,
        settings: PeerSettings,
        make_engine: Callable[[], TransferEngine],
        *,
        name: str = "peer",
        look: Callable[[], Devices] = find_devices,
    ) -> None:
        """`make_engine` may raise TransferError with what to install; `look` tells which network devices there are."""
        self.name = name
        self.settings = settings
        self._engines = PeerEngine(name, make_engine, linger_s=settings.load_timeout_ms / 1000, look=look)
        self.capabilities = Capabilities(
            persistent=False,
            shared=True,
            max_batch=MAX_BATCH,
            wants_registered_memory=True,
            takes_puts=False,
            can_delete=False,
            quiesce="never" if settings.engine == "nixl" else "drain",
        )
        self._leases = LeaseBook()
        self._owners = OwnerBook(settings.limits, self._leases.under_way_bytes)
        self._directory = DirectoryCache(
            ttl_s=settings.remember_ms / 1000, negative_ttl_s=settings.remember_none_ms / 1000
        )
        self._named = NamedOwners()
        self._pacer = Pacer(settings.max_bytes_per_s)
        self._peers: dict[str, _Peer] = {}
        self._asking: dict[Question, asyncio.Task[_Asked]] = {}
        self._lease_ended = asyncio.Event()
        """Set whenever an owner has heard that a lease is over."""
        self._running: set[asyncio.Future[Any]] = set()
        self._counts = collections.Counter(dict.fromkeys(_COUNTED, 0))
        self._told: set[str] = set()
        """Sentences that are logged once."""
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)
        self._lanes = Lanes(name, num_workers=1)
        self._opened = self._closed = False

    # --- life --------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Register the pool with the engine. The controller may be absent. Raises StorageError or ConfigError."""
        self._context = context
        self._clock = context.clock
        try:
            self._keys = self._read_keys()
            await self._engines.open(Region(context.region_address, context.region_bytes), context.clock)
        except TransferError as error:
            self._closed = True
            await self._lanes.close()
            raise StorageError(f"{self.name}: {error.message}", field="p2p.engine") from None
        self._links = Links(asyncio.get_running_loop())
        try:
            self._controllers = [
                (self._links.ask(url, keys=self._keys), Breaker(1, 0.25, CONTROLLER_MAX_OPEN_S))
                for url in self.settings.controllers
            ]
        except Unavailable as error:
            self._closed = True
            self._links.close()
            await self._engines.close()
            await self._lanes.close()
            raise ConfigError(f"controller.url: {error.message}", field="controller.url") from None
        self._opened = True
        self._engines.start(self._connect_all)
        self._sweeper = asyncio.create_task(self._sweep(), name=f"{self.name}-leases")

    async def close(self) -> None:
        """Wait for what is in flight, give all leases back, unregister. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._opened:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        for peer in self._peers.values():
            if peer.opening is not None:
                peer.opening.cancel()
        while self._running:
            await asyncio.wait(set(self._running))
        if self._opened:
            given_back = [self._give_back(lease) for lease in self._leases.all()]
            for controller, _ in self._controllers:
                controller.close()
            await asyncio.gather(*given_back)
            for peer in self._peers.values():
                peer.link.close()
            self._peers.clear()
            await self._engines.close()
            self._links.close()
        await self._lanes.close()

    def _read_keys(self) -> ClusterKeys | None:
        curve_file = self.settings.curve_file
        return read_cluster_keys(curve_file, "controller.curve_file") if curve_file else None

    # --- the contract ------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """The leading keys that one owner keeps for us from now on; UNKNOWN where nobody could be asked."""
        reason = self._not_ready()
        if not reason and any(len(key) != KEY_BYTES for key in keys):
            reason = BAD_ITEM
        if reason or not keys:
            return [Found(Presence.UNKNOWN, 0, reason)] * len(keys)
        return await self._own(self._find(list(keys)))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Nothing is put here."""
        for item in items:
            item.hold.drop()
        return [PutOutcome(PutStatus.FAILED, self._not_ready() or READ_ONLY)] * len(items)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """Read what is leased, and what can be leased now. A cancelled wait lets the batch go on to its end."""
        return await self._own(self._load(list(items)))

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Nothing is deleted here."""
        return 0

    def advertisement(self) -> bytes:
        """The metadata of the engine in place."""
        return self._engines.metadata

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """`source`: an Owner in msgpack. Raises msgspec.MsgspecError for anything else."""
        self._named.name(keys, _OWNER.decode(source) if source else None)

    def numbers(self) -> dict[str, int]:
        """See `_COUNTED`."""
        return {**self._counts, **self._owners.states(), **self._engines.numbers()}

    def remarks(self) -> dict[str, str]:
        """Why the transfer engine was opened anew."""
        return self._engines.remarks()

    async def usage(self) -> Usage:
        """Nothing is kept here."""
        return Usage(0, 0, 0)

    def _not_ready(self) -> str:
        return "" if self._opened and not self._closed else CLOSED

    async def _own(self, work: Awaitable[T]) -> T:
        """Cancelling the call ends the wait, not the work."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Future[T]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()

    # --- who has it --------------------------------------------------------------------------------------

    async def _find(self, keys: list[bytes]) -> list[Found]:
        first = len(self._leases.leading(keys, self._now_s() + STANDS_S))
        asked = _Asked()
        if first < len(keys):
            asked = await self._lease(keys[first:][:MAX_PEER_KEYS])
        standing = self._leases.leading(keys, self._now_s())
        found = [_present(extent.length_bytes) for extent in standing]
        if len(set(found)) == 1:
            found += found[:1] * (first + asked.more - len(found))
        rest = Found(Presence.UNKNOWN, 0, asked.reason) if asked.reason else _ABSENT
        return found + [rest] * (len(keys) - len(found))

    async def _lease(self, keys: list[bytes]) -> _Asked:
        """Lease the leading ones of these keys somewhere; the same question is asked once at a time."""
        question = question_of(keys)
        task = self._asking.get(question)
        if task is None:
            task = asyncio.create_task(self._ask(question, keys), name=f"{self.name}-ask")
            self._asking[question] = task
            self._keep(task)
            task.add_done_callback(lambda _: self._asking.pop(question, None))
        return await asyncio.shield(task)

    async def _ask(self, question: Question, keys: list[bytes]) -> _Asked:
        ends_s = self._now_s() + self.settings.lookup_timeout_ms / 1000
        if self._pacer.delay_s(self._now_s()) * 1000 > self.settings.load_timeout_ms / 2:
            return _Asked(THROTTLED)
        named = self._named.of(keys[0])
        if named is not None:
            asked = await self._ask_named(named, keys, ends_s)
            if asked is not None:
                return asked
            ends_s = self._now_s() + self.settings.lookup_timeout_ms / 1000
        owners = self._directory.recall(question, self._now_s())
        if owners is None:
            owners = await self._ask_directory(question, keys, ends_s)
            if owners is None:
                return _Asked(CONTROLLER_DOWN)
        else:
            self._counts["recalled"] += 1
        outcome = _Asked(more=self._owners.crowded(owners, self._now_s()))
        for owner in self._owners.in_order(owners, self._now_s())[:ATTEMPTS]:
            if not self._owners.admit(owner.instance, self._now_s()):
                continue
            count, word = await self._lease_at(owner, keys[: owner.n_keys], ends_s)
            if word == LIMIT:
                return _Asked(more=owner.n_keys)
            if count:
                return _Asked()
            outcome = outcome._replace(reason=word)
            self._directory.wrong(question)
        return outcome

    async def _ask_named(self, owner: Owner, keys: list[bytes], ends_s: float) -> _Asked | None:
        """Lease at the owner that was named for these keys; None: it leases none of them."""
        now_s = self._now_s()
        if self._owners.crowded([owner], now_s):
            return _Asked(more=len(keys))
        if self._owners.admit(owner.instance, now_s):
            count, word = await self._lease_at(owner, keys, ends_s)
            if count:
                self._counts["named_leases"] += 1
            if count or (word == LIMIT and self._leases.under_way_bytes(owner.instance)):
                return _Asked(more=len(keys) if word == LIMIT else 0)
        self._counts["named_refused"] += 1
        self._tell_once(f"{owner.instance} leases nothing of what it was named for; others are asked")
        return None

    async def _ask_directory(
        self, question: Question, keys: list[bytes], ends_s: float
    ) -> list[Owner] | None:
        asked_s = self._now_s()
        request = Where(0, self._context.instance_id, tags_of(b"".join(keys)), 1)
        reply = None
        for controller, breaker in self._controllers:
            left_s = ends_s - self._now_s()
            if reply is not None or left_s <= 0 or not breaker.admit(self._now_s()):
                continue
            self._counts["asked_directory"] += 1
            try:
                reply = await controller.ask(request, WhereReply, left_s)
            except Unavailable:
                breaker.ended(False, self._now_s())
                continue
            except ClusterFailure as refused:
                self._tell_once(f"the controller refuses lookups: {refused.message}")
            breaker.ended(True, self._now_s())
        if reply is None:
            return None
        owners = [owner for owner in reply.owners if owner.instance != self._context.instance_id]
        self._directory.learn(question, owners, asked_s)
        return owners

    async def _lease_at(self, owner: Owner, keys: list[bytes], ends_s: float) -> tuple[int, str]:
        """How many of these keys this owner leases now; LIMIT where that is all for now, or why it did not say.

        Ends what `admit` began.
        """
        now_s = self._now_s
        try:
            peer = await self._connected(owner, ends_s)
        except Unavailable:
            self._owners.failed(owner.instance, now_s())
            return 0, PEER_DEADLINE
        except (ClusterFailure, TransferError) as error:
            self._owners.failed(owner.instance, now_s())
            self._tell_once(f"{owner.instance} cannot be read: {error.message}")
            return 0, ""
        request = PeerLease(0, self._context.instance_id, b"".join(keys), 1, ttl_ms=self.settings.lease_ms)
        asked_s = now_s()
        try:
            leased = await peer.link.ask(request, PeerLeased, max(0.0, ends_s - asked_s))
        except Unavailable:
            self._owners.failed(owner.instance, now_s())
            self._let_go(peer)
            return 0, PEER_DEADLINE
        except ClusterFailure as refused:
            self._owners.well(owner.instance, now_s())
            self._tell_once(f"{owner.instance} leases nothing: {refused.message}")
            return 0, ""
        try:
            extents = _extents_of(leased, len(keys), peer.extents_bytes)
        except ValueError as error:
            self._owners.failed(owner.instance, now_s())
            self._tell_once(f"{owner.instance} leases what cannot be: {error}")
            return 0, ""
        self._owners.well(owner.instance, now_s())
        if leased.epoch != peer.epoch:  # another process than the one whose memory is connected
            self._let_go(peer)
            return 0, PEER_GONE
        word = LIMIT if leased.reason == LIMIT else ""
        if not extents:
            self._counts["leases_refused"] += 1
            return 0, word
        self._counts["leases"] += 1
        lease = Lease(
            owner.instance,
            leased.lease,
            leased.epoch,
            dict(zip(keys, extents, strict=False)),
            asked_s + leased.ttl_ms / 1000,
            now_s(),
        )
        for over in self._leases.add(lease):
            self._keep(self._give_back(over))
        return len(extents), word

    # --- connections -------------------------------------------------------------------------------------

    async def _connected(self, owner: Owner, ends_s: float) -> _Peer:
        """The owner's process, reached by the engine. Raises Unavailable, ClusterFailure or TransferError.

        What is not there in time goes on, for the next one.
        """
        peer = self._peers.get(owner.instance)
        if peer is not None and peer.endpoint != owner.peer_endpoint:
            self._let_go(peer)
            peer = None
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self._let_go(next(iter(self._peers.values())))
            link = self._links.ask(owner.peer_endpoint, keys=self._keys)
            peer = self._peers[owner.instance] = _Peer(owner.instance, owner.peer_endpoint, link)
        if not peer.epoch:
            if peer.opening is None:
                peer.opening = asyncio.create_task(self._hello(peer), name=f"{self.name}-hello")
                self._keep(peer.opening)
                peer.opening.add_done_callback(functools.partial(self._greeted, peer))
            opening = peer.opening
            await asyncio.wait({opening}, timeout=max(0.0, ends_s - self._now_s()))
            if not opening.done() or opening.cancelled():
                raise Unavailable(f"{owner.instance} did not introduce itself in time")
            opening.result()
        return peer

    async def _hello(self, peer: _Peer) -> None:
        self._counts["hellos"] += 1
        request = PeerHello(
            0, CLUSTER_PROTOCOL_VERSION, self._context.instance_id, FORMAT_VERSION, self.settings.engine
        )
        timeout_s = self.settings.load_timeout_ms / 1000
        welcome = await peer.link.ask(request, PeerWelcome, timeout_s)
        if welcome.instance != peer.instance:
            raise TransferError(f"at {peer.endpoint} is {welcome.instance!r:.80}", field="instance")
        engine = self._engines.current
        try:
            await engine.connect(peer.instance, welcome.metadata)
        except TransferError as error:
            if error.field == "network":
                self._engines.failed()
            raise
        if engine is not self._engines.current:
            raise Unavailable("the transfer engine was opened anew meanwhile")
        peer.engine, peer.metadata = engine, welcome.metadata
        peer.epoch, peer.extents_bytes = welcome.epoch, welcome.extents_bytes

    def _greeted(self, peer: _Peer, opening: asyncio.Task[None]) -> None:
        peer.opening = None
        if (opening.cancelled() or opening.exception() is not None) and self._peers.get(
            peer.instance
        ) is peer:
            self._let_go(peer)

    def _let_go(self, peer: _Peer) -> None:
        """Forget a connection: its leases are lost, and what is being read is forced to its end."""
        if self._peers.get(peer.instance) is not peer:
            return
        del self._peers[peer.instance]
        self._leases.lost_all(peer.instance)
        peer.link.close()
        if peer.opening is not None:
            peer.opening.cancel()
        if not self._closed and peer.engine is not None:
            self._keep(asyncio.ensure_future(peer.engine.disconnect(peer.instance)))

    async def _connect_all(self, engine: TransferEngine) -> Callable[[], None]:
        """Connect the peers by an engine that is about to take its place; what to call when it has."""
        connected = []
        for peer in [peer for peer in self._peers.values() if peer.engine is not None]:
            try:
                await engine.connect(peer.instance, peer.metadata)
            except TransferError as error:
                log.debug(
                    "%s: %s is asked for its metadata again: %s", self.name, peer.instance, error.message
                )
            else:
                connected.append((peer, peer.metadata))
        return functools.partial(self._moved, engine, connected)

    def _moved(self, engine: TransferEngine, connected: list[tuple[_Peer, bytes]]) -> None:
        """An engine has taken its place: leases of the peers that it has connected go on, the others' are lost."""
        for peer, metadata in connected:
            if self._peers.get(peer.instance) is peer and peer.metadata == metadata:
                peer.engine = engine
            elif not self._closed:
                self._keep(asyncio.ensure_future(engine.disconnect(peer.instance)))
        for peer in list(self._peers.values()):
            if peer.engine is not None and peer.engine is not engine:
                self._let_go(peer)
        self._owners.forgive()

    # --- reading -----------------------------------------------------------------------------------------

    async def _load(self, items: list[LoadItem]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome(LoadStatus.FAILED, self._not_ready() or BAD_ITEM)] * len(items)
        wanted = [place for place, item in enumerate(items) if not self._not_ready() and self._fits(item)]
        for place in set(range(len(items))).difference(wanted):
            items[place].hold.drop()
        ends_s = self._now_s() + self.settings.load_timeout_ms / 1000
        reason, hopeless = "", False
        while wanted and not hopeless:
            done = await self._read_leased(items, wanted, outcomes)
            wanted = [place for place in wanted if place not in done]
            if not wanted:
                break
            self._lease_ended.clear()
            keys = [items[place].key for place in wanted][:MAX_PEER_KEYS]
            asked = await self._lease(keys)
            reason = asked.reason
            if not self._leases.leading(keys[:1], self._now_s()):
                reason = reason or (THROTTLED if asked.more else "")
                hopeless = not asked.more or not await self._other_lease_ends(ends_s)
        for place in wanted:
            items[place].hold.drop()
            outcomes[place] = LoadOutcome(LoadStatus.FAILED, reason) if reason else _NOT_THERE
        return outcomes

    async def _other_lease_ends(self, ends_s: float) -> bool:
        """Wait for an own lease to end, which makes room for another; False: there is none, or the time is over."""
        if self._now_s() >= ends_s or not (len(self._leases) or self._lease_ended.is_set()):
            return False
        try:
            async with asyncio.timeout(max(0.0, ends_s - self._now_s())):
                await self._lease_ended.wait()
        except TimeoutError:
            return False
        return True

    async def _read_leased(
        self, items: list[LoadItem], wanted: list[int], outcomes: list[LoadOutcome]
    ) -> set[int]:
        """Read what is leased of the wanted places; the places that have an outcome then."""
        taken = self._leases.take([items[place].key for place in wanted], self._now_s())
        reads = [
            (lease, [(wanted[at], extent) for at, extent in extents]) for lease, extents in taken.items()
        ]
        works = [self._read(lease, items, extents) for lease, extents in reads]
        done: set[int] = set()
        for (_, extents), ended in zip(reads, await asyncio.gather(*works), strict=True):
            for (place, _), outcome in zip(extents, ended, strict=True):
                outcomes[place] = outcome
                done.add(place)
        return done

    def _fits(self, item: LoadItem) -> bool:
        hold, context = item.hold, self._context
        return (
            len(item.key) == KEY_BYTES
            and 0 <= hold.offset <= context.region_bytes - hold.length
            and hold.address == context.region_address + hold.offset
        )

    async def _read(
        self, lease: Lease, items: list[LoadItem], extents: list[tuple[int, Extent]]
    ) -> list[LoadOutcome]:
        """Read a batch of one lease. The outcomes, in its order; every hold will be dropped."""
        n_bytes = sum(extent.length_bytes for _, extent in extents)
        outcomes = [LoadOutcome(LoadStatus.FAILED, LENGTH)] * len(extents)
        sound_length: list[int] = []
        for at, (place, extent) in enumerate(extents):
            if extent.length_bytes == items[place].hold.length:
                sound_length.append(at)
            else:
                items[place].hold.drop()
        batch = [items[extents[at][0]] for at in sound_length]
        landing = _Landing([item.hold for item in batch])
        reads = [
            ReadItem(0, extents[at][1].offset_bytes, 0, item.hold.offset, item.hold.length)
            for at, item in zip(sound_length, batch, strict=True)
        ]
        reason = await self._transfer(lease, reads, landing)
        over = self._leases.read(lease, n_bytes, self._now_s())
        try:
            if reason or not batch:
                if over:
                    self._keep(self._give_back(lease))
                results = [LoadOutcome(LoadStatus.FAILED, reason)] * len(batch)
            else:
                results = await self._checked(lease, over, batch)
        finally:
            landing.leave()
        for at, outcome in zip(sound_length, results, strict=True):
            outcomes[at] = outcome
        return outcomes

    async def _transfer(self, lease: Lease, reads: list[ReadItem], landing: _Landing) -> str:
        """Why the bytes are not there, or "". The engine's side of the landing ends when its read has."""
        n_bytes = sum(read.length for read in reads)
        delay_s = self._pacer.take(n_bytes, self._now_s())
        if delay_s:
            await asyncio.sleep(delay_s)
        peer = self._peers.get(lease.owner)
        if not reads or peer is None or peer.engine is None or peer.epoch != lease.epoch:
            landing.leave()
            return PEER_GONE
        self._counts["reads"] += 1
        engine = peer.engine
        word = await engine.read(lease.owner, reads, self.settings.load_timeout_ms / 1000, landing.leave)
        if not word:
            self._engines.reached()
            self._counts["read_records"] += len(reads)
            self._counts["read_bytes"] += n_bytes
            self._owners.read(lease.owner, n_bytes)
            return ""
        self._counts["read_failures"] += 1
        # An engine that has left its place tells nothing of how the one in place reaches the peer.
        if word not in (transfer.BUSY, transfer.CLOSED, transfer.CANCELLED) and peer.engine is engine:
            if word in (transfer.DEADLINE, transfer.PEER_GONE):
                self._engines.failed()
            self._owners.failed(lease.owner, self._now_s())
            self._let_go(peer)
        return _REASONS.get(word, TRANSFER)

    async def _checked(self, lease: Lease, over: bool, batch: list[LoadItem]) -> list[LoadOutcome]:
        """Of what was read: whether it is what the lease named, and sound records of their keys."""
        records = [(item.hold.address, item.hold.length, item.key) for item in batch]
        verified = self._lanes.submit(
            Lane.LOAD, lambda: self._verifier.verify_stored(records), beyond_limit=True
        )
        assert verified is not None
        n_bytes = sum(item.hold.length for item in batch)
        found, stood = await asyncio.gather(verified, self._stood(lease, over, n_bytes))
        if stood is None:
            return [LoadOutcome(LoadStatus.FAILED, PEER_GONE)] * len(batch)
        if not stood:
            self._counts["leases_lost"] += 1
            return [_NOT_THERE] * len(batch)
        outcomes = [_OUTCOME_OF.get(outcome, _NOT_THERE) for outcome in found]
        if outcomes.count(_LOADED) < len(outcomes):
            unsound = len(outcomes) - outcomes.count(_LOADED)
            self._counts["unsound_records"] += unsound
            log.error("%s: %d records of %s are not sound", self.name, unsound, lease.owner)
            self._owners.failed(lease.owner, self._now_s())
        return outcomes

    async def _stood(self, lease: Lease, over: bool, n_bytes: int) -> bool | None:
        """Whether the lease has stood until now, by its owner's word; None without one."""
        peer = self._peers.get(lease.owner)
        if peer is None or peer.epoch != lease.epoch:
            self._ended(lease)
            return None
        keep_ms = 0 if over else self.settings.lease_ms
        asked_s = self._now_s()
        try:
            released = await peer.link.ask(
                PeerRelease(0, lease.number, keep_ms, n_bytes),
                PeerReleased,
                self.settings.load_timeout_ms / 1000,
            )
        except ClusterFailure:
            return False
        except Unavailable:
            self._owners.failed(lease.owner, self._now_s())
            self._let_go(peer)
            return None
        finally:
            if over:
                self._ended(lease)
        if released.epoch != lease.epoch or not released.stood:
            self._leases.lost(lease)
            return False
        if not over:
            self._leases.renewed(lease, asked_s + keep_ms / 1000)
        return True

    # --- leases that are not read ------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for lease in self._leases.unused(self._now_s(), IDLE_S):
                self._keep(self._give_back(lease))

    def _give_back(self, lease: Lease) -> asyncio.Task[None]:
        """Tell the owner that a lease is of no use; whatever it says."""

        async def tell() -> None:
            peer = self._peers.get(lease.owner)
            if peer is None or peer.epoch != lease.epoch:
                self._ended(lease)
                return
            try:
                await peer.link.ask(
                    PeerRelease(0, lease.number), PeerReleased, self.settings.lookup_timeout_ms / 1000
                )
            except (Unavailable, ClusterFailure):
                log.debug("%s: %s was not told that a lease is over", self.name, lease.owner)
            finally:
                self._ended(lease)

        return asyncio.create_task(tell(), name=f"{self.name}-release")

    def _ended(self, lease: Lease) -> None:
        """Its room at the owner is free, or not ours to free: who waits for room asks again."""
        self._leases.ended(lease)
        self._lease_ended.set()

    def _tell_once(self, what: str) -> None:
        if what not in self._told and len(self._told) < MAX_PEERS:
            self._told.add(what)
            log.warning("%s: %s", self.name, what)


_OWNER = msgspec.msgpack.Decoder(Owner)
_OUTCOME_OF = {
    int(CopyOutcome.OK): _LOADED,
    int(CopyOutcome.MISMATCH): LoadOutcome(LoadStatus.FAILED, "mismatch"),
}
"""What else a record turns out to be is a miss: the owner's own check removes it there."""


@functools.lru_cache(maxsize=64)
def _present(record_bytes: int) -> Found:
    return Found(Presence.PRESENT, record_bytes)


def _extents_of(leased: PeerLeased, n_keys: int, extents_bytes: int) -> list[Extent]:
    """The leased extents, checked. Raises ValueError."""
    if len(leased.extents) % EXTENT.size or len(leased.extents) > n_keys * EXTENT.size:
        raise ValueError(f"{len(leased.extents)} bytes of extents for {n_keys} keys")
    extents = unpack_extents(leased.extents)
    for extent in extents:
        if extent.length_bytes < HEAD_BYTES or extent.offset_bytes + extent.length_bytes > extents_bytes:
            raise ValueError(f"{extent} in a pool of {extents_bytes} bytes")
    if extents and not leased.lease:
        raise ValueError("extents without a lease")
    return extents
