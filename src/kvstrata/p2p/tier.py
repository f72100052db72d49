"""The L1 of other instances as a read-only tier.  The directory names owners, one of them leases the records, and the
transfer engine reads them one-sidedly.

    exists   keys ─▶ standing leases ─▶ directory (remembered for a moment) ─▶ PeerLease at one owner ─▶ lengths
    load     leased extents ─(transfer engine)─▶ reserved extents ─▶ verified here ∥ PeerRelease: stood? ─▶ LOADED

Invariants
1. LOADED is answered only for bytes that verify as the record of their key, and only if the owner says after the read
   that its lease stood.  Everything else is a miss, such as a wrong directory, an owner that has evicted, cleared or
   restarted, or another record version.
2. The hold of a destination is dropped when the engine has reported the end of the read into it and nothing here looks
   at the bytes any more; no clock, deadline or cancelled wait drops it.
3. A lease that nobody reads is given back after IDLE_S (returns.py); it expires at the owner in any case.
4. Each answer of an owner or a controller is checked before it is used, and awaited for at most `lookup_timeout_ms` in
   a lookup and `load_timeout_ms` in a load.  After a failure the owner is skipped for a while (owners.py).
5. Nothing is put, deleted or cleared, since the records belong to their owner.

The keys of a lookup form a prefix: key i is only useful if keys 0..i-1 are present.  So an owner that lacks the first
key has nothing for us.

If an owner was named for keys (`Ask.owner`, in msgpack), it is asked first, whatever the directory says.  Other owners
are asked only if it leases none of the keys, which is counted and logged.

An owner leases at most a quarter of its L1.  If a long prompt has more records than that,
`exists` answers the others as present too.  They are leased during the load, when our earlier leases at that owner have
ended.

The parts: finding.py (keys → owner → lease), connections.py (one per owner), reading.py (leased extents → extents
here), returns.py (gives leases back), owners.py (which owners to ask), leases.py (our leases there), peer_engine.py
(the engine).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstrata.errors import ConfigError, TransferError, Unavailable
from kvstrata.keys.batch import split
from kvstrata.native.core import Verifier
from kvstrata.p2p.connections import Connections
from kvstrata.p2p.engines.base import Region, TransferEngine
from kvstrata.p2p.finding import Finder
from kvstrata.p2p.mac import THREADS
from kvstrata.p2p.peer_engine import PeerEngine
from kvstrata.p2p.reading import Reader
from kvstrata.p2p.returns import Returns
from kvstrata.p2p.settings import PeerSettings
from kvstrata.p2p.shared import COUNTED, Shared
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS
from kvstrata.rpc.zmq_curve import ClusterKeys, open_keys, read_cluster_keys
from kvstrata.rpc.zmq_link import AskLink, Links
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    Outcome,
    ReadsPeers,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.breaker import Breaker
from kvstrata.tiers.lanes import Lanes
from kvstrata.tiers.reasons import BAD_ITEM, CLOSED, READ_ONLY, THROTTLED
from kvstrata.types import KEY_BYTES

MAX_BATCH = 256
CONTROLLER_MAX_OPEN_S = 4.0
"""Longest pause before a controller that did not answer is asked again."""
VERIFIERS = 4


class _Parts(NamedTuple):
    """The parts of an open tier."""

    shared: Shared
    links: Links
    controllers: list[tuple[AskLink, Breaker]]
    connections: Connections
    returns: Returns
    finder: Finder
    reader: Reader


class PeerTier(StorageAdapter, ReadsPeers):
    """See the module. Nothing is connected or registered before `open`."""

    def __init__(
        self,
        settings: PeerSettings,
        make_engine: Callable[[], TransferEngine],
        *,
        name: str = "peer",
    ) -> None:
        """`make_engine` may raise a TransferError that says what to install."""
        self.name = name
        self.capabilities = Capabilities(
            persistent=False,
            shared=True,
            max_batch=MAX_BATCH,
            wants_registered_memory=True,
            takes_puts=False,
            can_delete=False,
            quiesce="never" if settings.engine == "nixl" else "drain",
        )
        self._settings = settings
        self._engine = PeerEngine(name, make_engine)
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)
        self._lanes = Lanes(name, num_workers=THREADS if settings.mac else 1)
        self._parts: _Parts | None = None
        """None until the tier is open."""
        self._closed = False

    # --- life --------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Register L1 with the transfer engine; controllers may be absent. Raises ConfigError."""
        self._region = Region(context.region_address, context.region_bytes)
        try:
            keys = self._read_keys()
            await self._engine.open(self._region)
        except TransferError as error:
            self._closed = True
            await self._lanes.close()
            raise ConfigError(f"{self.name}: {error.message}", field="p2p.engine") from None
        links = Links(asyncio.get_running_loop())
        try:
            controllers = [
                (links.ask(url, keys=keys), Breaker(1, 0.25, CONTROLLER_MAX_OPEN_S))
                for url in self._settings.controllers
            ]
        except Unavailable as error:
            self._closed = True
            links.close()
            await self._engine.close()
            await self._lanes.close()
            raise ConfigError(f"controller.url: {error.message}", field="controller.url") from None
        self._parts = parts = self._put_together(context, links, keys, controllers)
        parts.shared.work.background(parts.returns.sweep(), "leases")

    def _put_together(
        self,
        context: AdapterContext,
        links: Links,
        keys: ClusterKeys,
        controllers: list[tuple[AskLink, Breaker]],
    ) -> _Parts:
        shared = Shared(self.name, self._settings, context.clock, context.instance_id)
        connections = Connections(shared, links, keys, self._engine)
        returns = Returns(shared, connections)
        finder = Finder(shared, connections, returns, controllers)
        reader = Reader(shared, connections, returns, self._engine, self._verifier, self._lanes)
        return _Parts(shared, links, controllers, connections, returns, finder, reader)

    async def close(self) -> None:
        """Wait for the operations in flight, give all leases back, unregister L1. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._parts is not None:
            shared, links, controllers, connections, returns, _, _ = self._parts
            await shared.work.stop()
            connections.stop()
            await shared.work.ended()
            given_back = [returns.give_back(lease) for lease in shared.leases.end_all()]
            for controller, _ in controllers:
                controller.close()
            await asyncio.gather(*given_back)
            connections.close()
            await self._engine.close()
            links.close()
        await self._lanes.close()

    def _read_keys(self) -> ClusterKeys:
        """The keys of the file; without one (--insecure) a new key, since owners then serve every reader."""
        curve_file = self._settings.curve_file
        return read_cluster_keys(curve_file, "controller.curve_file") if curve_file else open_keys()

    # --- the contract ------------------------------------------------------------------------------------

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Lease the leading keys that one owner has: they are PRESENT. The others are UNKNOWN if nobody answered."""
        if self._parts is None or self._closed:
            return ask.unknown(keys, CLOSED)
        if not keys:
            return b""
        return await self._parts.shared.work.own(self._parts.finder.find(split(keys), ask))

    async def put(self, items: Sequence[Item]) -> None:
        """Refuse all items."""
        is_open = self._parts is not None and not self._closed
        for item in items:
            item.settle(Outcome.FAILED, READ_ONLY if is_open else CLOSED)

    async def load(self, items: Sequence[Item]) -> None:
        """Read the records that are leased or can be leased now. If the call is cancelled, the batch still goes on."""
        if self._parts is not None and not self._closed:
            await self._parts.shared.work.own(self._load(self._parts, items))
            return
        for item in items:
            item.settle(Outcome.FAILED, CLOSED)

    async def delete(self, keys: bytes) -> int:
        """Delete nothing."""
        return 0

    def advertisement(self) -> bytes:
        """The metadata of the transfer engine; empty while none is open."""
        return self._engine.metadata

    def numbers(self) -> dict[str, int]:
        """The counters of COUNTED, and how many owners are known and skipped."""
        if self._parts is None:
            return dict.fromkeys(COUNTED, 0)
        return {**self._parts.shared.counts, **self._parts.shared.owners.states()}

    def remarks(self) -> dict[str, str]:
        """Why no transfer engine is open, and which background tasks have failed."""
        failed = {} if self._parts is None else self._parts.shared.work.remarks()
        return {**self._engine.remarks(), **failed}

    async def usage(self) -> Usage:
        """All zero, since the records belong to their owners."""
        return Usage(0, 0, 0)

    # --- loads -------------------------------------------------------------------------------------------

    def _is_whole_extent(self, item: Item) -> bool:
        """Whether a storage key is to be loaded into a whole extent of L1."""
        hold, region = item.hold, self._region
        in_l1 = (
            hold.address - hold.offset == region.address and 0 <= hold.offset <= region.length - hold.length
        )
        return in_l1 and len(item.key) == KEY_BYTES

    async def _load(self, parts: _Parts, items: Sequence[Item]) -> None:
        now_s, settings = parts.shared.now_s, parts.shared.settings
        wanted = [item for item in items if self._is_whole_extent(item)]
        for item in items:
            if not self._is_whole_extent(item):
                item.settle(Outcome.FAILED, BAD_ITEM)
        ends_s = now_s() + settings.load_timeout_ms / 1000
        reason, hopeless = "", False
        while wanted and not hopeless:
            await parts.reader.read_leased(wanted)
            wanted = [item for item in wanted if item.outcome is Outcome.UNSETTLED]
            if not wanted:
                break
            parts.returns.lease_ended.clear()
            ask = wanted[0].ask or Ask()
            keys = [item.key for item in wanted][:MAX_PEER_KEYS]
            asked = await parts.finder.lease(keys, ask)
            reason = asked.reason
            if not any(parts.shared.leases.standing(key, now_s()) for key in keys):
                reason = reason or (THROTTLED if asked.more else "")
                hopeless = not asked.more or not await parts.returns.other_lease_ends(ends_s)
        for item in wanted:
            item.settle(Outcome.FAILED if reason else Outcome.ABSENT, reason)
