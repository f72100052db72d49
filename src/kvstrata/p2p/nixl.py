"""One-sided reads of an owner's L1 through NIXL's UCX backend, under a grant of the owner (reading.py).

NIXL is used through its Python package (1.5.1 when this was written), by one thread of ours for each agent, since an
agent takes no lock and posting a transfer can take tens of milliseconds.  This engine must run in an adapter host: when
a peer disappears, UCX can end the process (docs/cluster.md), and only the end of the process stops a transfer.

Any host that reaches a tcp port of UCX can read and write the memory of its process: UCX 1.22 executes the requests of
its tcp peers without a check.  So tcp is disabled unless `p2p.tcp` or UCX_TLS in the environment enables it.

Invariants
1. The agent's own thread, the owner thread, imports NIXL and makes every call to it; an exception becomes the call's
   answer.
2. A read's `ended` is called exactly once, on the event loop, when no byte of its destinations can be written any more:
   when its transfer is DONE, when it has failed and the peer was removed from the agent, which closes the connection
   by force, or when the read was refused before anything was posted.  NIXL cannot end a transfer that is under way:
   `ended` waits until the peer continues or is found to be gone, even after `disconnect` has returned.  `close` leaves
   such transfers and the agent behind.  A deadline or a cancelled await ends only the wait.
3. Nothing outside the memory of either side is read or written: all items are checked before the first is posted.
4. A finished transfer is kept for the next read of the same items from the same peer, so that its descriptor lists are
   prepared only once.

NIXL takes UCX's settings from the environment when it is imported, so they hold for the process, not for one engine.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import queue
import sys
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata as installed
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.config.secrets import scrubbed
from kvstrata.errors import TransferError
from kvstrata.observability.logging import Thinning
from kvstrata.patience import patience
from kvstrata.process.supervisor import answer_future

log = logging.getLogger(__name__)

INSTALL = "pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1 && pip install numpy"
RDMA = Path("/sys/class/infiniband")
MAX_ITEMS = 4096
"""Maximum number of items of one read."""
MAX_ITEMS_UNDER_WAY = 16 * MAX_ITEMS
MAX_METADATA_BYTES = (1 << 20) - 1024
"""Maximum length of the metadata, which must fit into a PeerWelcome (rpc/cluster_wire.py)."""
KEPT_TRANSFERS = 64
CLOSE_WAITS_S = 2.0
"""Maximum time that `close` waits for transfers that may still end by themselves."""
POLL_S = 50e-6
"""Interval of checks of transfers under way."""
DEADLINE, CANCELLED, PEER_GONE = "deadline", "cancelled", "peer_gone"
NOT_CONNECTED, OUT_OF_RANGE, BUSY, CLOSED = "not_connected", "out_of_range", "busy", "closed"
"""The answers of `read` besides "": the time is up; the peer was disconnected meanwhile; the peer's process or the path
to it is gone; the peer is not connected; an item exceeds its region, or the number of items is 0 or too large; too many
bytes are under way already; the engine is closed."""


def has_rdma_card() -> bool:
    """Whether this machine has an RDMA card, usable or not."""
    return RDMA.is_dir() and any(RDMA.iterdir())


def has_a_way(environment: Mapping[str, str], *, tcp: bool) -> bool:
    """Whether UCX has a transport to peers: an RDMA card, or tcp enabled by `p2p.tcp` or UCX_TLS."""
    return tcp or "UCX_TLS" in environment or has_rdma_card()


def ucx_settings(environment: Mapping[str, str], *, tcp: bool, this_host_only: bool) -> dict[str, str]:
    """UCX's settings for an engine, without the prefix UCX_ and without those that the environment sets."""
    if not tcp and "UCX_TLS" not in environment:
        return {"TLS": "^tcp"}
    if this_host_only and "UCX_NET_DEVICES" not in environment:
        return {"NET_DEVICES": "lo"}
    return {}


class Region(NamedTuple):
    """Memory of this process, which peers may read and our reads may fill. It must live until `close` has returned."""

    address: int
    length: int


class ReadItem(NamedTuple):
    """Read `length` bytes at an offset in the peer's memory into the memory of this process."""

    remote_offset: int
    local_offset: int
    length: int


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The description of a peer's memory, received from another instance over CURVE."""

    version: str
    """Version of NIXL."""
    address: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    length: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    """Length of the memory at `address` in the peer's process."""
    agent: bytes
    """NIXL's own metadata."""


_METADATA = msgspec.msgpack.Decoder(Metadata)


class _Peer:
    """One process of a peer; the owner thread and the loop use it."""

    def __init__(self, metadata: bytes, told: Metadata, agent: str) -> None:
        self.metadata = metadata
        self.region_bytes = told.length
        self.base = told.address
        self.agent = agent
        self.broken = False
        self.forgotten = False
        # Only the owner thread uses these.
        self.under_way = 0
        self.removed = False


class _Read:
    """One transfer; `over(reason)` is called on the loop, once, when it has ended."""

    def __init__(self, peer: _Peer, items: tuple[ReadItem, ...], over: Callable[[str], None]) -> None:
        self.peer = peer
        self.items = items
        self.over = over
        self.handle: Any = None


class NixlEngine:
    """A transfer engine over NIXL. `settings` are UCX's, with or without the prefix UCX_. Called on one event loop."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = {f"UCX_{key.removeprefix('UCX_')}": value for key, value in (settings or {}).items()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._peers: dict[str, _Peer] = {}
        self._connecting = asyncio.Lock()
        self._answers: dict[asyncio.Future[str], _Peer] = {}
        self._region = Region(0, 0)
        self._items_under_way = 0
        self._closed = False
        self._drained = asyncio.Event()
        # Only the owner thread uses these.
        self._agent: Any = None
        self._registered: Any = None
        self._thinning = Thinning()
        self._version = ""
        self._reads: list[_Read] = []
        self._kept: OrderedDict[tuple[str, tuple[ReadItem, ...]], Any] = OrderedDict()

    # --- on the loop -------------------------------------------------------------------------------------

    async def open(self, region: Region) -> bytes:
        """Register memory for peers; returns metadata for their `connect`.

        Raises a TransferError that says what to install or change.
        """
        if self._loop is not None:
            raise TransferError("nixl: an engine can be opened only once", field="engine")
        self._loop = asyncio.get_running_loop()
        self._region = region
        self._thread = threading.Thread(target=self._own, name="kvs-nixl", daemon=True)
        self._thread.start()
        try:
            metadata: bytes = await self._do(self._set_up)
        except TransferError:
            await self.close()
            raise
        return metadata

    async def connect(self, peer: str, metadata: bytes) -> None:
        """Connect to a peer by its metadata.

        The same metadata again have no effect while the connection lives.  Other metadata mean that the peer has
        restarted.  Raises a TransferError that says what is wrong; an older connection to that peer then stays.
        """
        try:
            told = _METADATA.decode(metadata)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _wrong(peer, f"are damaged: {error}") from None
        async with self._connecting:
            old = self._peers.get(peer)
            if old is not None and old.metadata == metadata and not old.broken:
                return
            if self._loop is None or self._closed:
                raise TransferError("nixl: the engine is not open", field="engine")
            added = await self._do(lambda: self._add(peer, metadata, told))
            old = self._peers.pop(peer, None)
            self._peers[peer] = added
            if old is not None:
                self._forget(old)

    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        """Fill the items' destinations; returns "" when all bytes have arrived, else a reason code; does not raise.

        It returns within `deadline_s` seconds from now. `ended`: see the invariants.
        """
        known = self._peers.get(peer)
        refused = ""
        if self._loop is None or self._closed:
            refused = CLOSED
        elif known is None:
            refused = NOT_CONNECTED
        elif not in_range(items, self._region.length, known.region_bytes):
            refused = OUT_OF_RANGE
        elif known.broken:
            refused = PEER_GONE
        elif self._items_under_way + len(items) > MAX_ITEMS_UNDER_WAY:
            refused = BUSY
        if refused or known is None or self._loop is None:
            ended()
            return refused
        count = len(items)
        answer: asyncio.Future[str] = self._loop.create_future()

        def over(reason: str) -> None:
            self._items_under_way -= count
            ended()
            if self._items_under_way == 0:
                self._drained.set()
            if not answer.done():
                answer.set_result(reason)

        self._items_under_way += count
        self._answers[answer] = known
        read = _Read(known, tuple(items), over)
        self._work.put(lambda: self._post(read))
        try:
            done, _ = await asyncio.wait([answer], timeout=max(0.0, deadline_s))
        finally:
            del self._answers[answer]
        if done:
            return answer.result()
        answer.cancel()
        return DEADLINE

    async def disconnect(self, peer: str) -> None:
        """Forget a peer; its reads are answered "cancelled", and keep their destinations until they have ended."""
        known = self._peers.pop(peer, None)
        if known is not None:
            self._forget(known)

    async def close(self) -> None:
        """End all connections. While transfers are under way, memory stays registered until the process ends."""
        if self._loop is None or self._closed:
            return
        self._closed = True
        for known in self._peers.values():
            self._answer_cancelled(known)
        self._peers.clear()
        assert self._thread is not None
        if self._items_under_way:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), patience(CLOSE_WAITS_S))
            except TimeoutError:
                pass
        left = await self._do(self._tear_down)
        if left:
            log.warning(
                "nixl: %d reads were under way at the close; their memory stays registered until this process ends",
                left,
            )
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _forget(self, known: _Peer) -> None:
        known.forgotten = True
        self._answer_cancelled(known)
        self._work.put(lambda: self._remove(known))

    def _answer_cancelled(self, known: _Peer) -> None:
        for answer, of in self._answers.items():
            if of is known and not answer.done():
                answer.set_result(CANCELLED)

    async def _do(self, work: Callable[[], Any]) -> Any:
        """Do work on the owner thread, even if the call is cancelled; returns its result or raises TransferError."""
        assert self._loop is not None
        loop = self._loop
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result, error = work(), None
            except (
                Exception
            ) as caught:  # the plugin boundary: without an answer its caller would wait forever
                what = f"nixl: {type(caught).__name__}: {scrubbed(caught)}"
                result = None
                error = caught if isinstance(caught, TransferError) else TransferError(what, field="engine")
            loop.call_soon_threadsafe(answer_future, future, result, error)

        self._work.put(run)
        return await future

    # --- on the owner thread -----------------------------------------------------------------------------

    def _own(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=POLL_S) if self._reads else self._work.get()
            except queue.Empty:
                self._look()
                continue
            if work is None:
                return
            work()
            self._look()

    def _set_up(self) -> bytes:
        nixl = self._import()
        self._version = installed.version("nixl")
        name = uuid.uuid4().hex
        try:
            self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
            described = (self._region.address, self._region.length, 0, "")
            self._registered = self._agent.register_memory([described], "DRAM")
            own: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # the plugin boundary: NIXL's exceptions have no common class
            self._agent = None
            raise TransferError(f"nixl: {type(error).__name__}: {scrubbed(error)}", field="engine") from error
        packed = msgspec.msgpack.encode(Metadata(self._version, *self._region, own))
        if len(packed) > MAX_METADATA_BYTES:
            what = f"nixl: the metadata for peers have {len(packed)} bytes; use fewer network devices"
            raise TransferError(what, field="metadata")
        return packed

    def _import(self) -> Any:
        """Import NIXL's module, with the environment variables that it needs."""
        if "nixl" not in sys.modules:
            os.environ.update(self._settings)
            os.environ.setdefault("UCX_LOG_FILE", "stderr")
            if "UCX_MODULES" not in os.environ and not has_rdma_card():
                # With libibverbs on a machine without an RDMA network card, UCX crashes when the process ends.
                os.environ["UCX_MODULES"] = "^ib"
        else:
            for name, value in self._settings.items():
                if os.environ.get(name) != value:
                    what = f"{name}={value} must be in the environment before this process opens its first NIXL engine"
                    raise TransferError(f"nixl: {what}", field="settings")
        try:
            module = importlib.import_module("nixl._api")
        except ImportError as error:
            raise TransferError(f"nixl: cannot be imported: {error}; {INSTALL}", field="engine") from None
        # NIXL's own handler writes to stdout; our log gets its records instead.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return module

    def _add(self, peer: str, metadata: bytes, told: Metadata) -> _Peer:
        if told.version != self._version:
            raise _wrong(
                peer,
                f"come from NIXL {told.version!r:.40}, but this instance has {self._version}; install the same on both",
            )
        try:
            agent: str | bytes = self._agent.add_remote_agent(told.agent)
        except Exception as error:  # the plugin boundary
            raise _wrong(peer, f"{type(error).__name__}: {scrubbed(error)}") from error
        return _Peer(metadata, told, agent.decode() if isinstance(agent, bytes) else agent)

    def _post(self, read: _Read) -> None:
        peer = read.peer
        if peer.removed:
            self._end(read, CANCELLED if peer.forgotten else PEER_GONE)
            return
        peer.under_way += 1
        try:
            read.handle = self._kept.pop((peer.agent, read.items), None) or self._prepare(read)
            state = self._agent.transfer(read.handle)
        except Exception as error:  # the plugin boundary
            self._failed(read, error)
            return
        self._reads.append(read)
        self._judge(read, state)

    def _prepare(self, read: _Read) -> Any:
        local = [(self._region.address + item.local_offset, item.length, 0) for item in read.items]
        remote = [(read.peer.base + item.remote_offset, item.length, 0) for item in read.items]
        agent = self._agent
        return agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), read.peer.agent
        )

    def _look(self) -> None:
        for read in list(self._reads):
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:  # the plugin boundary: NIXL raises when the connection broke
                self._reads.remove(read)
                self._failed(read, error)
                continue
            self._judge(read, state)

    def _judge(self, read: _Read, state: str) -> None:
        if state == "PROC":
            return
        self._reads.remove(read)
        if state != "DONE":
            self._failed(read, None)
            return
        read.peer.under_way -= 1
        self._kept[read.peer.agent, read.items] = read.handle
        if len(self._kept) > KEPT_TRANSFERS:
            self._release(self._kept.popitem(last=False)[1])
        self._end(read, "")
        if read.peer.forgotten:
            self._remove(read.peer)

    def _failed(self, read: _Read, error: BaseException | None) -> None:
        """End a failed read, after its peer was removed by force, which closes the connection."""
        peer = read.peer
        peer.under_way -= 1
        peer.broken = True
        self._say("a read failed", error or "the transfer is in error")
        if read.handle is not None:
            self._release(read.handle)
        self._remove(peer, by_force=True)
        self._end(read, CANCELLED if peer.forgotten else PEER_GONE)

    def _remove(self, peer: _Peer, *, by_force: bool = False) -> None:
        """Remove a peer from the agent if none of its reads is under way, or by force because the peer is gone."""
        if peer.removed or (peer.under_way and not by_force):
            return
        peer.removed = True
        for key in [key for key in self._kept if key[0] == peer.agent]:
            self._release(self._kept.pop(key))
        try:
            self._agent.remove_remote_agent(peer.agent)
        except Exception as error:  # the plugin boundary
            self._say("a peer could not be removed", error)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception as error:  # the plugin boundary
            self._say("a transfer could not be released", error)

    def _say(self, what: str, why: BaseException | str) -> None:
        named = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        self._thinning.log(log, logging.INFO, what, "nixl: %s: %s", what, named)

    def _end(self, read: _Read, reason: str) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(read.over, reason)

    def _tear_down(self) -> int:
        """Free everything unless transfers are under way; returns the number of these transfers."""
        left = len(self._reads)
        if self._agent is None or left:
            self._reads.clear()
            return left
        for handle in self._kept.values():
            self._release(handle)
        self._kept.clear()
        try:
            self._agent.deregister_memory(self._registered)
        except Exception as error:  # the plugin boundary
            self._say("memory could not be unregistered", error)
        self._agent = self._registered = None
        return 0


def _wrong(peer: str, what: str) -> TransferError:
    return TransferError(f"nixl: metadata of peer {peer!r:.80}: {what}", field="metadata")


def in_range(items: Sequence[ReadItem], local_bytes: int, remote_bytes: int) -> bool:
    """Whether the number of items is 1 to MAX_ITEMS, and every item lies within the memory of both sides."""
    return 0 < len(items) <= MAX_ITEMS and all(
        item.length > 0
        and 0 <= item.remote_offset <= remote_bytes - item.length
        and 0 <= item.local_offset <= local_bytes - item.length
        for item in items
    )
