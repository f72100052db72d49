"""A cluster in one process for tests of the reader: a directory and owners that answer as the test says, over real
sockets, and a transfer engine that copies within this process, so that a test decides when a read ends and how.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvstrata.native.pool import Pool
from kvstrata.p2p.engines.base import (
    CANCELLED,
    DEADLINE,
    NOT_CONNECTED,
    ReadItem,
    Region,
    TransferEngine,
    in_range,
    pack_metadata,
    unpack_metadata,
)
from kvstrata.rpc.cluster_wire import (
    PEER_REQUESTS,
    REPLY_REQUESTS,
    ClusterReply,
    Failure,
    Owner,
    PeerHello,
    PeerLease,
    PeerLeased,
    PeerRelease,
    PeerReleased,
    PeerWelcome,
    Where,
    WhereReply,
    encode,
    tags_of,
)
from kvstrata.rpc.zmq_server import Address, ZmqServer
from kvstrata.types import KEY_BYTES


class CopyEngine(TransferEngine):
    """Copies at once; or, while `held`, when the test lets go, also after a deadline, as a late DMA would."""

    name = "copy"
    quiesce: Literal["drain", "never"] = "drain"

    def __init__(self) -> None:
        self.peers: dict[str, tuple[int, int]] = {}
        self.local = (0, 0)
        self.held = False
        self.answer = ""
        """What reads answer instead of copying, where not empty."""
        self.waiting: list[tuple[str, Callable[[], None], asyncio.Future[str]]] = []
        self.reads = 0
        self.before_read: Callable[[], None] = lambda: None

    async def open(self, regions: Sequence[Region]) -> bytes:
        [region] = regions
        self.local = (region.address, region.length)
        return metadata_of(*region)

    async def connect(self, peer: str, metadata: bytes) -> None:
        known = unpack_metadata(self.name, peer, metadata)
        self.peers[peer] = (int.from_bytes(known.part, "little"), known.region_bytes[0])

    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        self.reads += 1
        if peer not in self.peers:
            ended()
            return NOT_CONNECTED
        address, length = self.peers[peer]
        assert in_range(items, [self.local[1]], [length])
        self.before_read()
        if self.answer:
            ended()
            return self.answer

        def copy() -> None:
            for item in items:
                ctypes.memmove(self.local[0] + item.local_offset, address + item.remote_offset, item.length)
            ended()

        if not self.held:
            copy()
            return ""
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append((peer, copy, outcome))
        await asyncio.wait({outcome}, timeout=deadline_s)
        return outcome.result() if outcome.done() else DEADLINE

    def let_go(self) -> None:
        """End the reads that are held, with all their bytes."""
        waiting, self.waiting = self.waiting, []
        for _, copy, outcome in waiting:
            copy()
            if not outcome.done():
                outcome.set_result("")

    async def disconnect(self, peer: str) -> None:
        self.peers.pop(peer, None)
        for name, _, outcome in self.waiting:
            if name == peer and not outcome.done():
                outcome.set_result(CANCELLED)

    async def close(self) -> None:
        self.let_go()


def metadata_of(address: int, length: int) -> bytes:
    """What `CopyEngine` connects to."""
    return pack_metadata("copy", [Region(address, length)], address.to_bytes(8, "little"))


class _Endpoint:
    """A ROUTER that answers each request with what `answer` returns; None: says nothing."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._server = ZmqServer(asyncio.get_running_loop())
        port = self._server.bind_tcp("127.0.0.1", 0, curve=None, insecure=False)
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.asked: collections.Counter[str] = collections.Counter()
        self.silent = False
        self.postponed: tuple[type, ...] = ()
        """Requests that are answered at `catch_up`."""
        self.later: list[tuple[Address, Any]] = []
        self._server.start(self._take, lambda address, frames: b"")

    def _take(self, address: Address, frame: bytes) -> None:
        request = self._decoder.decode(frame)
        self.asked[type(request).__name__] += 1
        if isinstance(request, self.postponed):
            self.later.append((address, request))
        else:
            self._reply(address, request)

    def catch_up(self) -> None:
        """Answer what was postponed, and all that comes from now on at once."""
        self.postponed = ()
        later, self.later = self.later, []
        for address, request in later:
            self._reply(address, request)

    def _reply(self, address: Address, request: Any) -> None:
        reply = None if self.silent else self.answer(request)
        if reply is not None:
            self._server.send(address, encode(reply))

    def answer(self, request: Any) -> ClusterReply | None:
        raise NotImplementedError

    def close(self) -> None:
        self._server.close()


class Directory(_Endpoint):
    """Answers Where with what the test says that owners hold."""

    def __init__(self) -> None:
        super().__init__(REPLY_REQUESTS)
        self.holds: dict[str, tuple[Owner, set[bytes]]] = {}
        self.failure: Failure | None = None

    def tell(self, owner: TestOwner, keys: Sequence[bytes], *, confirmed: bool = True) -> None:
        """This owner holds these keys."""
        entry = Owner(owner.instance, owner.epoch, owner.endpoint, 0, confirmed)
        self.holds[owner.instance] = (entry, {tags_of(key) for key in keys})

    def answer(self, request: Any) -> ClusterReply | None:
        assert isinstance(request, Where)
        if self.failure is not None:
            return Failure(request.seq, 1, self.failure.code, self.failure.message, "", True)
        tags = [request.tags[at : at + 8] for at in range(0, len(request.tags), 8)]
        owners = []
        for entry, held in self.holds.values():
            n_keys = next((i for i, tag in enumerate(tags) if tag not in held), len(tags))
            if n_keys:
                owners.append(
                    Owner(entry.instance, entry.incarnation, entry.peer_endpoint, n_keys, entry.confirmed)
                )
        owners.sort(key=lambda owner: -owner.n_keys)
        return WhereReply(request.seq, 7, owners[: request.max_owners])


class TestOwner(_Endpoint):
    """An owner of a real pool whose leases end when the test says so."""

    __test__ = False

    def __init__(self, instance: str, pool: Pool) -> None:
        super().__init__(PEER_REQUESTS)
        self.instance = instance
        self.pool = pool
        self.epoch = 11
        self.row = pool.claim_row(b"p" * 16, b"p" * 16, 1)
        self.metadata = metadata_of(pool.extents_address, pool.extents_bytes)
        self.leases: dict[int, int] = {}
        self.kept = 0
        """Releases that prolonged."""
        self.lies = False
        self.max_leased = 1 << 20
        """Records that it leases at a time."""
        self.refuses: dict[str, str] = {}
        """Failure codes by the name of a request."""

    def answer(self, request: Any) -> ClusterReply | None:
        seq, epoch = request.seq, self.epoch
        if (code := self.refuses.get(type(request).__name__)) is not None:
            return Failure(seq, epoch, code, "the test says so", "", False)
        if isinstance(request, PeerHello):
            return PeerWelcome(seq, epoch, self.instance, self.metadata, self.pool.extents_bytes)
        if isinstance(request, PeerLease):
            if self.lies:
                return PeerLeased(seq, epoch, 1, b"\xff" * 24, 1_000, "")
            room = self.max_leased - sum(self.leases.values())
            keys = request.keys[: room * KEY_BYTES]
            ticket, n_chunks, extents, _, _ = self.pool.lease(keys, request.n_slices, [self.row])
            if ticket:
                self.leases[ticket] = n_chunks
            whole = n_chunks * KEY_BYTES == len(request.keys)
            reason = "" if whole else "limit" if n_chunks * KEY_BYTES == len(keys) else "absent"
            return PeerLeased(seq, epoch, ticket, extents, request.ttl_ms, reason)
        assert isinstance(request, PeerRelease)
        stood = request.lease in self.leases
        if request.keep_ms:
            self.kept += stood
        elif stood:
            self.expire(request.lease)
        return PeerReleased(seq, epoch, stood)

    def expire(self, lease: int) -> None:
        """It stands no more."""
        del self.leases[lease]
        self.pool.release(lease)
