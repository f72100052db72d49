"""Reads an owner's leased extents into reserved extents here, verifies them, and asks the owner if the lease stood."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.native.record import CopyOutcome, Verifier
from kvstrata.observability.logging import Thinning
from kvstrata.p2p.connections import Connections
from kvstrata.p2p.destinations import Destinations
from kvstrata.p2p.engines import base as transfer
from kvstrata.p2p.engines.base import ReadItem
from kvstrata.p2p.leases import Lease
from kvstrata.p2p.owners import Pacer
from kvstrata.p2p.reopening import PeerEngine
from kvstrata.p2p.returns import Returns
from kvstrata.p2p.shared import Shared
from kvstrata.policy.reasons import (
    BAD_ITEM,
    CLOSED,
    LENGTH,
    MISMATCH,
    PEER_DEADLINE,
    PEER_GONE,
    THROTTLED,
    TRANSFER,
)
from kvstrata.rpc.cluster_wire import PeerRelease, PeerReleased
from kvstrata.storage.base import LoadItem, LoadOutcome, LoadStatus
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.types import Extent

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)
_thinning = Thinning()

_REASONS = {
    transfer.DEADLINE: PEER_DEADLINE,
    transfer.CANCELLED: PEER_GONE,
    transfer.PEER_GONE: PEER_GONE,
    transfer.NOT_CONNECTED: PEER_GONE,
    transfer.BUSY: THROTTLED,
    transfer.CLOSED: CLOSED,
}
"""The short reason for each word that a transfer engine answers with; all other words become TRANSFER."""
_NOT_THERE = LoadOutcome(LoadStatus.ABSENT)
_LOADED = LoadOutcome(LoadStatus.LOADED)


class _Landing:
    """The holds of one read, dropped when both the transfer engine and the Reader have finished with the bytes."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        self._holds = list(holds)
        self._sides = 2

    def leave(self) -> None:
        """Called once by each of the two when it has finished."""
        self._sides -= 1
        if not self._sides:
            for hold in self._holds:
                hold.drop()
            self._holds.clear()


class Reader:
    """Reads leased records for one tier."""

    def __init__(
        self,
        shared: Shared,
        connections: Connections,
        returns: Returns,
        engines: PeerEngine,
        pacer: Pacer,
        verifier: Verifier,
        lanes: Lanes,
        destinations: Destinations,
    ) -> None:
        self._shared = shared
        self._connections = connections
        self._returns = returns
        self._engines = engines
        self._pacer = pacer
        self._verifier = verifier
        self._lanes = lanes
        self._destinations = destinations

    async def read_leased(
        self, items: list[LoadItem], wanted: list[int], outcomes: list[LoadOutcome]
    ) -> set[int]:
        """Read the items at the indices `wanted` that are leased now; returns the indices that got an outcome."""
        taken = self._shared.leases.take([items[place].key for place in wanted], self._shared.now_s())
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

    async def _read(
        self, lease: Lease, items: list[LoadItem], extents: list[tuple[int, Extent]]
    ) -> list[LoadOutcome]:
        """Read a batch of one lease; returns the outcomes in the same order. Every hold is dropped in the end."""
        n_bytes = sum(extent.length_bytes for _, extent in extents)
        outcomes = [LoadOutcome(LoadStatus.FAILED, LENGTH)] * len(extents)
        fitting: list[int] = []
        reads: list[ReadItem] = []
        for at, (place, extent) in enumerate(extents):
            hold, destination = items[place].hold, self._destinations.of(items[place])
            if destination is None or destination.tenant != lease.tenant:
                outcomes[at] = LoadOutcome(LoadStatus.FAILED, BAD_ITEM)
                hold.drop()
            elif extent.length_bytes != hold.length:
                hold.drop()
            else:
                fitting.append(at)
                reads.append(
                    ReadItem(lease.region, extent.offset_bytes, destination.region, hold.offset, hold.length)
                )
        batch = [items[extents[at][0]] for at in fitting]
        landing = _Landing([item.hold for item in batch])
        reason = await self._transfer(lease, reads, landing)
        over = self._shared.leases.read(lease, n_bytes, self._shared.now_s())
        try:
            if reason or not batch:
                if over:
                    self._shared.work.keep(self._returns.give_back(lease))
                results = [LoadOutcome(LoadStatus.FAILED, reason)] * len(batch)
            else:
                results = await self._checked(lease, over, batch)
        finally:
            landing.leave()
        for at, outcome in zip(fitting, results, strict=True):
            outcomes[at] = outcome
        return outcomes

    async def _transfer(self, lease: Lease, reads: list[ReadItem], landing: _Landing) -> str:
        """Read the bytes; returns "" or a short reason. Calls `landing.leave` when the transfer engine's read ends."""
        n_bytes = sum(read.length for read in reads)
        delay_s = self._pacer.take(n_bytes, self._shared.now_s())
        if delay_s:
            await asyncio.sleep(delay_s)
        peer = self._connections.of(lease)
        if not reads or peer is None or peer.engine is None:
            landing.leave()
            return PEER_GONE
        self._shared.counts["reads"] += 1
        engine = peer.engine
        word = await engine.read(
            lease.owner, reads, self._shared.settings.load_timeout_ms / 1000, landing.leave
        )
        if not word:
            self._engines.reached()
            self._shared.counts["read_records"] += len(reads)
            self._shared.counts["read_bytes"] += n_bytes
            self._shared.owners.read(lease.owner, n_bytes)
            return ""
        self._shared.counts["read_failures"] += 1
        # A failure of a transfer engine that was replaced meanwhile says nothing about the current one.
        if word not in (transfer.BUSY, transfer.CLOSED, transfer.CANCELLED) and peer.engine is engine:
            if word in (transfer.DEADLINE, transfer.PEER_GONE):
                self._engines.failed()
            self._shared.owners.failed(lease.owner, self._shared.now_s())
            self._connections.let_go(peer)
        return _REASONS.get(word, TRANSFER)

    async def _checked(self, lease: Lease, over: bool, batch: list[LoadItem]) -> list[LoadOutcome]:
        """Verify the records of a batch, and meanwhile ask the owner whether the lease stood; returns the outcomes."""
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
            self._shared.counts["leases_lost"] += 1
            return [_NOT_THERE] * len(batch)
        outcomes = [_OUTCOME_OF.get(outcome, _NOT_THERE) for outcome in found]
        if outcomes.count(_LOADED) < len(outcomes):
            unsound = len(outcomes) - outcomes.count(_LOADED)
            self._shared.counts["unsound_records"] += unsound
            what = "%s: %d records read from %s failed the check"
            _thinning.log(log, logging.ERROR, lease.owner, what, self._shared.name, unsound, lease.owner)
            self._shared.owners.failed(lease.owner, self._shared.now_s())
        return outcomes

    async def _stood(self, lease: Lease, over: bool, n_bytes: int) -> bool | None:
        """Ask the owner whether the lease has stood until now; None: it gave no answer."""
        peer = self._connections.of(lease)
        if peer is None:
            if over:
                self._returns.ended(lease)
            return None
        keep_ms = 0 if over else self._shared.settings.lease_ms
        asked_s = self._shared.now_s()
        try:
            released = await peer.link.ask(
                PeerRelease(0, lease.number, keep_ms, n_bytes),
                PeerReleased,
                self._shared.settings.load_timeout_ms / 1000,
            )
        except ClusterFailure:
            return False
        except Unavailable:
            self._shared.owners.failed(lease.owner, self._shared.now_s())
            self._connections.let_go(peer)
            return None
        finally:
            if over:
                self._returns.ended(lease)
        if released.epoch != lease.epoch or not released.stood:
            self._shared.leases.lost(lease)
            return False
        if not over:
            self._shared.leases.renewed(lease, asked_s + keep_ms / 1000)
        return True


_OUTCOME_OF = {
    int(CopyOutcome.OK): _LOADED,
    int(CopyOutcome.MISMATCH): LoadOutcome(LoadStatus.FAILED, MISMATCH),
}
"""All other results of the verification are misses. If the owner's record is corrupt, the owner's check removes it."""
