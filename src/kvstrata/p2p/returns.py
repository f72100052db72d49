"""Gives leases back to their owners, and wakes the loads that wait for room at an owner."""

from __future__ import annotations

import asyncio
import logging

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.p2p.connections import Connections
from kvstrata.p2p.leases import Lease
from kvstrata.p2p.shared import Shared
from kvstrata.rpc.cluster_wire import PeerRelease, PeerReleased

log = logging.getLogger(__name__)

IDLE_S = 2.0
"""A lease that nobody has read for this long is given back."""
SWEEP_S = 0.5


class Returns:
    """Gives the leases of one tier back to their owners."""

    def __init__(self, shared: Shared, connections: Connections) -> None:
        self._shared = shared
        self._connections = connections
        self.lease_ended = asyncio.Event()
        """Set whenever a lease no longer takes room at its owner."""

    def give_back(self, lease: Lease) -> asyncio.Task[None]:
        """Tell the owner that this lease is not needed any more. The caller owns the task, which never fails."""

        async def tell() -> None:
            peer = self._connections.of(lease)
            if peer is None:
                self.ended(lease)
                return
            try:
                await peer.link.ask(
                    PeerRelease(0, lease.number), PeerReleased, self._shared.settings.lookup_timeout_ms / 1000
                )
            except (Unavailable, ClusterFailure):
                log.debug("%s: could not tell %s that a lease is over", self._shared.name, lease.owner)
            finally:
                self.ended(lease)

        return asyncio.create_task(tell(), name=f"{self._shared.name}-release")

    def ended(self, lease: Lease) -> None:
        """As far as we can tell, the lease takes no room at its owner any more: loads that wait for room ask again."""
        self._shared.leases.released(lease)
        self.lease_ended.set()

    async def other_lease_ends(self, ends_s: float) -> bool:
        """Wait until one of our leases ends and so makes room; False: we have none, or `ends_s` has passed."""
        if self._shared.now_s() >= ends_s or not (len(self._shared.leases) or self.lease_ended.is_set()):
            return False
        try:
            async with asyncio.timeout(max(0.0, ends_s - self._shared.now_s())):
                await self.lease_ended.wait()
        except TimeoutError:
            return False
        return True

    async def sweep(self) -> None:
        """Give unused leases back, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for lease in self._shared.leases.unused(self._shared.now_s(), IDLE_S):
                self._shared.work.keep(self.give_back(lease))
