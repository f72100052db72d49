"""The connections to the owners of chunks, one for each owner's process.

An owner's endpoint and public key come from the controller.  Nobody at that endpoint but the process with the owner's
secret key gets a message of ours, or is believed.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from kvstrata.errors import TransferError, Unavailable
from kvstrata.p2p.leases import Lease
from kvstrata.p2p.peer_engine import PeerEngine
from kvstrata.p2p.shared import Shared
from kvstrata.rpc.cluster_wire import CLUSTER_PROTOCOL_VERSION, Owner, PeerHello, PeerWelcome
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import AskLink, Links
from kvstrata.types import FORMAT_VERSION

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Maximum number of connections at a time; for a further owner the oldest connection is closed."""


class Connection:
    """The connection to one owner: a link for messages, and the transfer engine's access to the owner's memory."""

    def __init__(self, owner: Owner, link: AskLink) -> None:
        self.instance = owner.instance
        self.endpoint = owner.peer_endpoint
        self.key = owner.peer_key
        """The public key that the process at `endpoint` has proven to have, once it has answered."""
        self.link = link
        self.epoch = 0
        """Epoch of the owner's process whose memory the transfer engine reaches; 0 while it reaches none."""
        self.extents_bytes = 0
        """Length of the owner's L1."""
        self.opening: asyncio.Task[None] | None = None


class Connections:
    """The connections of one tier, by the owner's instance id."""

    def __init__(self, shared: Shared, links: Links, keys: ClusterKeys, engine: PeerEngine) -> None:
        self._shared = shared
        self._links = links
        self._keys = keys
        self._engine = engine
        self._peers: dict[str, Connection] = {}
        self.closing = False
        """The tier is closing: peers are not disconnected one by one, since closing the transfer engine does that."""

    def of(self, lease: Lease) -> Connection | None:
        """The connection to the process that granted a lease; None if that connection has ended."""
        peer = self._peers.get(lease.owner)
        return peer if peer is not None and peer.epoch == lease.epoch else None

    def stop(self) -> None:
        """Cancel the connections that are being opened; from now on `let_go` disconnects no peer."""
        self.closing = True
        for peer in self._peers.values():
            if peer.opening is not None:
                peer.opening.cancel()

    def close(self) -> None:
        """Close and forget all connections. REQUIRES that no read is under way."""
        for peer in self._peers.values():
            peer.link.close()
        self._peers.clear()

    async def connected(self, owner: Owner, ends_s: float) -> Connection:
        """The connection to this owner, opened if necessary. Raises Unavailable, ClusterFailure or TransferError.

        If the connection is not open at `ends_s` (the tier's clock), the call raises Unavailable.  A call that has
        raised this or was cancelled does not stop the opening, so that later callers can use the connection.
        """
        peer = self._peers.get(owner.instance)
        if peer is not None and (peer.endpoint, peer.key) != (owner.peer_endpoint, owner.peer_key):
            self.let_go(peer)
            peer = None
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self.let_go(next(iter(self._peers.values())))
            link = self._links.ask(owner.peer_endpoint, keys=self._keys.to(owner.peer_key))
            peer = self._peers[owner.instance] = Connection(owner, link)
        if not peer.epoch:
            if peer.opening is None:
                peer.opening = asyncio.create_task(self._hello(peer), name=f"{self._shared.name}-hello")
                self._shared.work.keep(peer.opening)
                peer.opening.add_done_callback(functools.partial(self._greeted, peer))
            opening = peer.opening
            await asyncio.wait({opening}, timeout=max(0.0, ends_s - self._shared.now_s()))
            if opening.cancelled():
                raise Unavailable(
                    f"the connection to {owner.instance} was given up while it was being opened"
                )
            if not opening.done():
                raise Unavailable(f"{owner.instance} did not answer PeerHello in time")
            opening.result()
        return peer

    async def _hello(self, peer: Connection) -> None:
        self._shared.counts["hellos"] += 1
        request = PeerHello(
            0,
            CLUSTER_PROTOCOL_VERSION,
            self._shared.instance_id,
            FORMAT_VERSION,
            self._shared.settings.engine,
            self._shared.settings.mac,
        )
        timeout_s = self._shared.settings.load_timeout_ms / 1000
        welcome = await peer.link.ask(request, PeerWelcome, timeout_s)
        if welcome.instance != peer.instance:
            raise TransferError(
                f"{peer.endpoint}: {welcome.instance!r:.80} answers there, not {peer.instance!r}",
                field="instance",
            )
        await self._engine.current.connect(peer.instance, welcome.metadata)
        peer.epoch, peer.extents_bytes = welcome.epoch, welcome.extents_bytes

    def _greeted(self, peer: Connection, opening: asyncio.Task[None]) -> None:
        peer.opening = None
        if (opening.cancelled() or opening.exception() is not None) and self._peers.get(
            peer.instance
        ) is peer:
            self.let_go(peer)

    def let_go(self, peer: Connection) -> None:
        """Close and forget a connection: its leases are lost, and the transfer engine disconnects the peer."""
        if self._peers.get(peer.instance) is not peer:
            return
        del self._peers[peer.instance]
        self._shared.leases.lost_all(peer.instance)
        peer.link.close()
        if peer.opening is not None:
            peer.opening.cancel()
        if not self.closing and peer.epoch:
            self._shared.work.keep(asyncio.ensure_future(self._engine.current.disconnect(peer.instance)))
