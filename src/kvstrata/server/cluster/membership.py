"""An instance as a member of a cluster: a link to each controller, and the parts that the links share.

Rules:

1. A controller can neither stop nor slow this instance: no request waits for anything here, every question has a
   timeout, every queue a bound.  Events that cannot be sent in time are dropped, and a full sync replaces them.
2. A command is carried out once by its number; its result is sent until the controller has acknowledged it.
3. Each of several controllers gets all news by a link of its own.  One of them leads: a command with a smaller
   (cluster id, token) than any of them has shown is refused.

One link: link.py; its full syncs: sync.py; its events: events.py; commands: commands.py and actions.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvstrata.p2p.serving import PeerServer
from kvstrata.server.cluster.link import ControllerLink
from kvstrata.server.cluster.told_tiers import ToldTiers


class Membership:
    """The links to all controllers. Belongs to the event loop."""

    def __init__(self, links: Sequence[ControllerLink], told: ToldTiers, peer_server: PeerServer) -> None:
        self._links = links
        self._told = told
        self._peer_server = peer_server

    def start(self) -> None:
        """Begin to register with each controller; they may be absent."""
        self._told.start()
        for link in self._links:
            link.start()

    async def stop(self) -> None:
        """Lease nothing more to peers, say goodbye to the connected controllers, and close. Idempotent."""
        self._peer_server.leases.draining = True
        await asyncio.gather(self._told.stop(), *(link.stop() for link in self._links))

    def status(self) -> dict[str, Any]:
        """For the status document and metrics: sums over all links, and a row for each controller."""
        rows = [link.status() for link in self._links]
        numbers: dict[str, Any] = {}
        for name, value in rows[0].items():
            if isinstance(value, bool):
                numbers[name] = any(row[name] for row in rows)
            elif isinstance(value, int):
                numbers[name] = sum(row[name] for row in rows)
        return {**numbers, "controllers": rows}
