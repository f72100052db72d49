"""Reads an owner's leased extents into reserved extents here, verifies them, and asks the owner if the lease stood."""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.native.core import CopyOutcome, Verifier, verify_stored_record
from kvstrata.observability.logging import Thinning
from kvstrata.p2p.connections import Connections
from kvstrata.p2p.engines import base as transfer
from kvstrata.p2p.engines.base import ReadItem
from kvstrata.p2p.leases import Lease
from kvstrata.p2p.mac import MAC_KEY_BYTES, TAG_BYTES, parts_of, tag_of
from kvstrata.p2p.peer_engine import PeerEngine
from kvstrata.p2p.returns import Returns
from kvstrata.p2p.shared import Shared
from kvstrata.rpc.cluster_wire import PeerRelease, PeerReleased
from kvstrata.tiers.base import Item, Outcome
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.reasons import (
    CLOSED,
    LENGTH,
    MISMATCH,
    PEER_DEADLINE,
    PEER_GONE,
    THROTTLED,
    TRANSFER,
    UNAUTHENTICATED,
)
from kvstrata.types import EXTENT, Extent

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

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
_NOT_THERE = Outcome.ABSENT, ""
_LOADED = Outcome.LOADED, ""
_UNAUTHENTICATED = Outcome.FAILED, UNAUTHENTICATED


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
        engine: PeerEngine,
        verifier: Verifier,
        lanes: Lanes,
    ) -> None:
        self._shared = shared
        self._connections = connections
        self._returns = returns
        self._engine = engine
        self._verifier = verifier
        self._lanes = lanes

    async def read_leased(self, wanted: list[Item]) -> None:
        """Read those of these items that are leased now, which settles them."""
        taken = self._shared.leases.take([item.key for item in wanted], self._shared.now_s())
        await asyncio.gather(
            *(
                self._read(lease, [(wanted[at], extent) for at, extent in extents])
                for lease, extents in taken.items()
            )
        )

    async def _read(self, lease: Lease, reads: list[tuple[Item, Extent]]) -> None:
        """Read a batch of one lease. Every hold is dropped in the end."""
        n_bytes = sum(extent.length_bytes for _, extent in reads)
        fitting = []
        for item, extent in reads:
            if extent.length_bytes > item.hold.length:
                item.settle(Outcome.FAILED, LENGTH)
            else:
                fitting.append((item, extent))
        batch, extents = [item for item, _ in fitting], [extent for _, extent in fitting]
        landing = _Landing([item.hold for item in batch])
        reason = await self._transfer(
            lease,
            [
                ReadItem(extent.offset_bytes, item.hold.offset, extent.length_bytes)
                for item, extent in fitting
            ],
            landing,
        )
        over = self._shared.leases.read(lease, n_bytes, self._shared.now_s())
        try:
            if reason or not batch:
                if over:
                    self._shared.work.keep(self._returns.give_back(lease))
                results = [(Outcome.FAILED, reason)] * len(batch)
            else:
                results = await self._checked(lease, over, batch, extents)
        finally:
            landing.leave()
        for item, (outcome, reason) in zip(batch, results, strict=True):
            item.outcome, item.reason = outcome, reason  # `landing` sees to the holds

    async def _transfer(self, lease: Lease, reads: list[ReadItem], landing: _Landing) -> str:
        """Read the bytes; returns "" or a short reason. Calls `landing.leave` when the transfer engine's read ends."""
        n_bytes = sum(read.length for read in reads)
        peer = self._connections.of(lease)
        if not reads or peer is None:
            landing.leave()
            return PEER_GONE
        self._shared.counts["reads"] += 1
        word = await self._engine.current.read(
            lease.owner, reads, self._shared.settings.load_timeout_ms / 1000, landing.leave
        )
        if not word:
            self._shared.counts["read_records"] += len(reads)
            self._shared.counts["read_bytes"] += n_bytes
            self._shared.owners.read(lease.owner, n_bytes)
            return ""
        self._shared.counts["read_failures"] += 1
        if word not in (transfer.BUSY, transfer.CLOSED, transfer.CANCELLED):
            self._shared.owners.failed(lease.owner, self._shared.now_s())
            self._connections.let_go(peer)
        return _REASONS.get(word, TRANSFER)

    async def _checked(
        self, lease: Lease, over: bool, batch: list[Item], extents: list[Extent]
    ) -> list[tuple[Outcome, str]]:
        """Verify the records of a batch, and meanwhile ask the owner whether the lease stood; returns the outcomes.

        With `p2p.mac` the owner answers with the records' tags too, and only bytes with the same tags are LOADED.
        """
        key = secrets.token_bytes(MAC_KEY_BYTES) if self._shared.settings.mac else b""
        lengths = [extent.length_bytes for extent in extents]
        packed = [EXTENT.pack(*extent, 0) for extent in extents] if key else []
        verified: list[asyncio.Future[list[tuple[int, bytes]]]] = []
        for numbers in parts_of(len(batch)) if key else [range(len(batch))]:
            part = self._lanes.submit(
                Lane.LOAD,
                functools.partial(self._verify, batch, lengths, numbers, key, packed),
                beyond_limit=True,
            )
            assert part is not None
            verified.append(part)
        request = PeerRelease(
            0,
            lease.number,
            0 if over else self._shared.settings.lease_ms,
            sum(extent.length_bytes for extent in extents),
            key,
            b"".join(packed),
        )
        released, found = await asyncio.gather(self._released(lease, request), asyncio.gather(*verified))
        if released is None:
            return [(Outcome.FAILED, PEER_GONE)] * len(batch)
        if not released.stood:
            self._shared.counts["leases_lost"] += 1
            return [_NOT_THERE] * len(batch)
        outcomes: list[tuple[Outcome, str]] = []
        for number, (outcome, tag) in enumerate(itertools.chain.from_iterable(found)):
            at = number * TAG_BYTES
            is_owners = hmac.compare_digest(tag, released.tags[at : at + TAG_BYTES]) if key else True
            outcomes.append(_OUTCOME_OF.get(outcome, _NOT_THERE) if is_owners else _UNAUTHENTICATED)
        self._tell_bad(lease.owner, outcomes)
        return outcomes

    def _verify(
        self, batch: list[Item], lengths: list[int], numbers: range, key: bytes, packed: list[bytes]
    ) -> list[tuple[int, bytes]]:
        """Verify these records of a batch; returns the CopyOutcome of each, with its tag if there is a key."""
        if not key:
            records = [(batch[n].hold.address, lengths[n], batch[n].key) for n in numbers]
            return [(outcome, b"") for outcome in self._verifier.verify_stored(records)]
        # The tag of a record is computed while the record is still in the CPU's caches.
        return [
            (
                verify_stored_record(batch[n].hold.address, lengths[n], batch[n].key),
                tag_of(key, n, packed[n], batch[n].hold.address),
            )
            for n in numbers
        ]

    def _tell_bad(self, owner: str, outcomes: list[tuple[Outcome, str]]) -> None:
        """Count and log the records that are not what the owner should have sent, and skip the owner for a while."""
        changed = outcomes.count(_UNAUTHENTICATED)
        unsound = len(outcomes) - outcomes.count(_LOADED) - changed
        for count, number, what in (
            (unsound, "unsound_records", "failed the check"),
            (
                changed,
                "unauthenticated_records",
                "are not the bytes that it holds (p2p.mac): they may have been changed between the hosts",
            ),
        ):
            if count:
                self._shared.counts[number] += count
                text = f"%s: %d records read from %s {what}"
                _thinning.log(log, logging.ERROR, f"{owner} {number}", text, self._shared.name, count, owner)
        if changed or unsound:
            self._shared.owners.failed(owner, self._shared.now_s())

    async def _released(self, lease: Lease, request: PeerRelease) -> PeerReleased | None:
        """Release the lease, or a part of it if it is not over; None: the owner gave no answer."""
        peer, over = self._connections.of(lease), not request.keep_ms
        if peer is None:
            if over:
                self._returns.ended(lease)
            return None
        asked_s = self._shared.now_s()
        try:
            released = await peer.link.ask(
                request, PeerReleased, self._shared.settings.load_timeout_ms / 1000
            )
        except ClusterFailure:
            return PeerReleased(0, lease.epoch, False)
        except Unavailable:
            self._shared.owners.failed(lease.owner, self._shared.now_s())
            self._connections.let_go(peer)
            return None
        finally:
            if over:
                self._returns.ended(lease)
        if released.epoch != lease.epoch or not released.stood:
            self._shared.leases.lost(lease)
            return PeerReleased(0, lease.epoch, False)
        if not over:
            self._shared.leases.renewed(lease, asked_s + request.keep_ms / 1000)
        return released


_OUTCOME_OF = {
    int(CopyOutcome.OK): _LOADED,
    int(CopyOutcome.MISMATCH): (Outcome.FAILED, MISMATCH),
}
"""All other results of the verification are misses. If the owner's record is corrupt, the owner's check removes it."""
