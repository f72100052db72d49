"""Reads records from owners: each owner has one link for tickets and some connections, each with a thread.

    ticket (CURVE) ─▶ connect and prove ─▶ get ─▶ bytes in the reserved extents ─▶ verified ─▶ LOADED
    with a transfer engine:                grant ─▶ the engine reads one-sidedly ─▶ done ─▶ verified ─▶ LOADED

Invariants
1. Only the thread of a connection writes into extents, where its own caller said; with a transfer engine only the
   engine does.  The holds of a read are dropped when that thread, or the engine, has finished with them; a deadline
   ends the wait and then the connection, so that the thread ends.
2. An answer is LOADED only if its bytes verify as the record of their key, and, with a transfer engine, only if the
   owner says after the last byte, on the same connection, that the grant stood.
3. Endpoint and public key come from the controller.  Only the process with the owner's secret key can issue a ticket at
   that endpoint, and only a process with the ticket's secret can authenticate on the connection.
4. At most OWNER_CONNECTIONS are open to one owner and MAX_CONNECTIONS in all; to open one more, the least recently used
   one is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple, TypeVar

from kvstrata.errors import TransferError
from kvstrata.native.core import CopyOutcome, Verifier
from kvstrata.observability.logging import Thinning
from kvstrata.p2p import frames
from kvstrata.p2p.finding import Shared
from kvstrata.p2p.frames import ABSENT, BUSY, FrameError, Stream, Ticket
from kvstrata.p2p.nixl import NixlEngine, ReadItem
from kvstrata.p2p.serving import this_host
from kvstrata.process.supervisor import answer_future
from kvstrata.rpc.cluster_wire import CLUSTER_PROTOCOL_VERSION, Owner, PeerHello, PeerWelcome
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import AskLink, Links
from kvstrata.tiers.base import Item, Outcome
from kvstrata.tiers.reasons import MISMATCH, THROTTLED
from kvstrata.types import FORMAT_VERSION

log = logging.getLogger(__name__)
_thinning = Thinning()
T = TypeVar("T")

OWNER_CONNECTIONS = 4
MAX_CONNECTIONS = 64
MAX_OWNERS = 256
VERIFIERS = 4
Came = tuple[Outcome, str]
"""The result of reading one record: its outcome and a reason."""
LOADED: Came = Outcome.LOADED, ""
_WORDS: dict[int, Came] = {ABSENT: (Outcome.ABSENT, ""), BUSY: (Outcome.FAILED, THROTTLED)}
UNSOUND: Came = Outcome.ABSENT, "unsound"
"""The bytes are not the record of their key; the tier counts these, and answers that the record is absent."""
_OUTCOME_OF: dict[int, Came] = {
    int(CopyOutcome.OK): LOADED,
    int(CopyOutcome.MISMATCH): (Outcome.FAILED, MISMATCH),
}
"""All other results of the verification are misses. If the owner's record is corrupt, the owner's check removes it."""


class Checked(NamedTuple):
    """The result for each record, and the bytes of those that are LOADED."""

    outcomes: list[Came]
    loaded_bytes: int


class Late(Exception):
    """The deadline has passed; the holds of the read are dropped when nothing touches the extents any more."""


class Busy(Exception):
    """All connections that may be open are in use by other reads."""


class Connection:
    """One connection, and the thread that makes all calls on it. The constructor and the methods belong to the loop."""

    def __init__(self, connect: Callable[[Connection], Stream], name: str) -> None:
        """`connect(self)` runs on the thread and raises OSError or FrameError."""
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[Stream], object], asyncio.Future[object]] | None]
        self._work = queue.SimpleQueue()
        self._cut = False
        self.socket: socket.socket | None = None
        self.numbers = itertools.count(1)
        self.thread = threading.Thread(target=self._run, args=(connect,), name=name, daemon=True)
        self.thread.start()

    def do(self, work: Callable[[Stream], T]) -> asyncio.Future[T]:
        """Call `work(stream)` on the thread. The future fails with OSError or FrameError if the connection breaks."""
        done: asyncio.Future[object] = self._loop.create_future()
        self._work.put((work, done))
        return done  # type: ignore[return-value]

    def cut(self) -> None:
        """Make the thread end soon; work under way and later work fails. Idempotent."""
        if not self._cut:
            self._cut = True
            self._work.put(None)
        self._shut()

    def use(self, sock: socket.socket) -> None:
        """Called on the thread: use this socket from now on. Raises FrameError if the connection was cut."""
        self.socket = sock
        if self._cut:
            raise FrameError("the connection was given up")

    def _shut(self) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def _run(self, connect: Callable[[Connection], Stream]) -> None:
        stream, broken = None, None
        try:
            stream = connect(self)
        except (OSError, FrameError) as error:
            broken = error
        while (task := self._work.get()) is not None:
            work, done = task
            result: object = None
            if broken is None:
                assert stream is not None
                try:
                    result = work(stream)
                except (OSError, FrameError) as error:
                    broken = error
            self._loop.call_soon_threadsafe(answer_future, done, result, broken)
        if self.socket is not None:
            self.socket.close()
        while not self._work.empty():
            if (task := self._work.get()) is not None:
                gone = FrameError("the connection was given up")
                self._loop.call_soon_threadsafe(answer_future, task[1], None, gone)


class _Peer:
    """The link and connections to one owner's process."""

    def __init__(self, owner: Owner, link: AskLink) -> None:
        self.owner = owner
        self.link = link
        self.slots = asyncio.Semaphore(OWNER_CONNECTIONS)
        self.idle: list[Connection] = []
        self.is_reached = False
        """Whether the transfer engine has been connected to the owner."""
        self.under_way = 0
        """Number of reads that have not ended."""

    @property
    def address(self) -> tuple[str, str, int]:
        """The address that identifies this process of the owner."""
        return self.owner.peer_endpoint, self.owner.peer_key, self.owner.incarnation


class Reader:
    """Reads for one tier. Belongs to the event loop."""

    def __init__(self, shared: Shared, links: Links, keys: ClusterKeys, engine: NixlEngine | None) -> None:
        """`engine`: reads one-sidedly; None: owners send."""
        self._shared, self._links, self._keys, self._engine = shared, links, keys, engine
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        """Peers by instance, ordered by their last use."""
        self._open: OrderedDict[Connection, _Peer] = OrderedDict()
        self._host = this_host()

    def under_way(self, instance: str) -> int:
        """Number of reads from an owner that have not ended."""
        peer = self._peers.get(instance)
        return 0 if peer is None else peer.under_way

    async def close(self) -> None:
        """Close all connections, and return when no thread touches an extent any more. No read may begin."""
        threads = [connection.thread for connection in self._open]
        for peer in list(self._peers.values()):
            self._drop_peer(peer)
        for connection in list(self._open):
            self._drop(connection)
        for thread in threads:
            await asyncio.to_thread(thread.join)

    async def have(self, owner: Owner, keys: Sequence[bytes], ends_s: float) -> bytes:
        """For each of these keys 1 if the owner has it, else 0. Raises as `read`."""

        def ask(connection: Connection) -> Coroutine[object, object, bytes]:
            work = functools.partial(frames.have, number=next(connection.numbers), keys=keys)
            return self._within(connection, connection.do(work), ends_s, [])

        return await self._with_connection(owner, ends_s, ask)

    async def read(self, owner: Owner, items: Sequence[Item], ends_s: float) -> list[Came]:
        """Read these records from an owner; the caller keeps the holds.

        Raises Late at `ends_s` (then the caller no longer owns the holds), and when the owner cannot be read: Busy,
        Unavailable, ClusterFailure and TransferError (its settings differ), OSError, FrameError.
        """
        read = self._send_for if self._engine is None else self._reach
        outcomes, loaded_bytes = await self._with_connection(
            owner, ends_s, lambda connection: read(connection, owner, items, ends_s)
        )
        self._shared.counts["read_records"] += outcomes.count(LOADED)
        self._shared.counts["read_bytes"] += loaded_bytes
        return outcomes

    # --- one read -----------------------------------------------------------------------------------------------

    async def _send_for(
        self, connection: Connection, owner: Owner, items: Sequence[Item], ends_s: float
    ) -> Checked:
        keys, number = [item.key for item in items], next(connection.numbers)
        rooms = [item.hold.view() for item in items]

        def work(stream: Stream) -> Checked:
            return self._checked(items, frames.get(stream, number, keys, rooms))

        return await self._within(connection, connection.do(work), ends_s, items)

    async def _reach(
        self, connection: Connection, owner: Owner, items: Sequence[Item], ends_s: float
    ) -> Checked:
        assert self._engine is not None
        keys, number = [item.key for item in items], next(connection.numbers)
        rooms = [item.hold.length for item in items]
        granted = await self._within(
            connection, connection.do(lambda stream: frames.grant(stream, number, keys, rooms)), ends_s, items
        )
        reads = [
            ReadItem(offset, item.hold.offset, length)
            for item, (offset, length) in zip(items, granted, strict=True)
            if length not in _WORDS
        ]
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if reads:
            left_s = max(0.0, ends_s - self._shared.now_s())
            word = await self._engine.read(owner.instance, reads, left_s, lambda: ended.set_result(None))
            if word:  # the owner's engine may have been replaced: its metadata come with the next ticket
                if (peer := self._open.get(connection)) is not None:
                    self._drop_idle(peer)
                self._drop(connection)
                if not ended.done():
                    _drop_after(ended, items)
                    raise Late
                raise FrameError(f"the transfer engine answered {word}")

        def work(stream: Stream) -> Checked:
            frames.done(stream, number)
            return self._checked(items, [length for _, length in granted])

        return await self._within(connection, connection.do(work), ends_s, items)

    def _checked(self, items: Sequence[Item], lengths: Sequence[int]) -> Checked:
        """Verify the records of these lengths that lie in their extents. On any thread."""
        outcomes = [_WORDS.get(length, LOADED) for length in lengths]
        came = [at for at, outcome in enumerate(outcomes) if outcome is LOADED]
        found = self._verifier.verify_stored(
            [(items[at].hold.address, lengths[at], items[at].key) for at in came]
        )
        for at, outcome in zip(came, found, strict=True):
            outcomes[at] = _OUTCOME_OF.get(outcome, UNSOUND)
        return Checked(outcomes, sum(lengths[at] for at in came if outcomes[at] is LOADED))

    async def _within(
        self, connection: Connection, work: asyncio.Future[T], ends_s: float, items: Sequence[Item]
    ) -> T:
        """The result of a connection's work. At the deadline the connection is closed, and Late raised."""
        try:
            await asyncio.wait({work}, timeout=max(0.0, ends_s - self._shared.now_s()))
        finally:
            if not work.done():
                self._drop(connection)
                _drop_after(work, items)
        if not work.done():
            raise Late
        return work.result()

    # --- connections --------------------------------------------------------------------------------------------

    async def _with_connection(
        self,
        owner: Owner,
        ends_s: float,
        work: Callable[[Connection], Coroutine[object, object, T]],
    ) -> T:
        """Do work on a connection to this owner; once more if the connection had been idle and was broken meanwhile."""
        peer = self._peer(owner)
        peer.under_way += 1
        try:
            try:
                async with asyncio.timeout(max(0.0, ends_s - self._shared.now_s())):
                    await peer.slots.acquire()
            except TimeoutError:
                raise Busy from None
            try:
                return await self._in_slot(peer, ends_s, work)
            finally:
                peer.slots.release()
        finally:
            peer.under_way -= 1

    async def _in_slot(
        self, peer: _Peer, ends_s: float, work: Callable[[Connection], Coroutine[object, object, T]]
    ) -> T:
        if peer.idle:
            try:
                return await self._used(peer, peer.idle.pop(), work)
            except (OSError, FrameError):
                if self._shared.now_s() >= ends_s:
                    raise
            self._drop_idle(peer)
        return await self._used(peer, await self._connected(peer, ends_s), work)

    async def _used(
        self, peer: _Peer, connection: Connection, work: Callable[[Connection], Coroutine[object, object, T]]
    ) -> T:
        try:
            result = await work(connection)
        except BaseException:
            self._drop(connection)
            raise
        if self._peers.get(peer.owner.instance) is not peer:
            self._drop(connection)
        elif connection in self._open:
            self._open.move_to_end(connection)
            peer.idle.append(connection)
        return result

    def _peer(self, owner: Owner) -> _Peer:
        peer = self._peers.get(owner.instance)
        if peer is not None and peer.address != (owner.peer_endpoint, owner.peer_key, owner.incarnation):
            self._drop_peer(peer)
            peer = None
        if peer is None:
            unused = [one for one in self._peers.values() if not one.under_way]
            if len(self._peers) >= MAX_OWNERS and unused:
                self._drop_peer(unused[0])
            link = self._links.ask(owner.peer_endpoint, keys=self._keys.to(owner.peer_key))
            peer = self._peers[owner.instance] = _Peer(owner, link)
        self._peers.move_to_end(owner.instance)
        return peer

    async def _connected(self, peer: _Peer, ends_s: float) -> Connection:
        """A new connection, whose thread still connects. Raises Unavailable, ClusterFailure, TransferError."""
        settings, owner = self._shared.settings, peer.owner
        self._shared.counts["hellos"] += 1
        hello = PeerHello(
            0,
            CLUSTER_PROTOCOL_VERSION,
            self._shared.instance_id,
            FORMAT_VERSION,
            settings.engine,
            settings.seal,
        )
        welcome = await peer.link.ask(hello, PeerWelcome, max(0.0, ends_s - self._shared.now_s()))
        if welcome.instance != owner.instance:
            raise TransferError(
                f"{owner.peer_endpoint}: {welcome.instance!r:.80} answers there, not {owner.instance!r}",
                field="instance",
            )
        if self._engine is not None:  # the same metadata again have no effect
            await self._engine.connect(owner.instance, welcome.metadata)
            peer.is_reached = True
        if len(self._open) >= MAX_CONNECTIONS:
            idle = {one for other in self._peers.values() for one in other.idle}
            least = next((one for one in self._open if one in idle), None)
            if least is None:
                raise Busy
            self._drop(least)
        ticket = Ticket(welcome.ticket, welcome.secret, settings.seal)
        unix = welcome.socket if welcome.host and welcome.host == self._host else ""
        host = owner.peer_endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        left_s = max(0.001, ends_s - self._shared.now_s())
        connect = functools.partial(_connect, ticket, unix, (host, welcome.port), left_s)
        connection = Connection(connect, f"kv-{owner.instance}"[:15])
        self._open[connection] = peer
        return connection

    def _drop(self, connection: Connection) -> None:
        peer = self._open.pop(connection, None)
        if peer is not None:
            if connection in peer.idle:
                peer.idle.remove(connection)
            connection.cut()

    def _drop_idle(self, peer: _Peer) -> None:
        for connection in list(peer.idle):
            self._drop(connection)

    def _drop_peer(self, peer: _Peer) -> None:
        """Forget an owner's process; reads under way from it continue to their end."""
        self._peers.pop(peer.owner.instance)
        self._drop_idle(peer)
        peer.link.close()
        if self._engine is not None and peer.is_reached:
            self._shared.work.keep(asyncio.ensure_future(self._engine.disconnect(peer.owner.instance)))


def _drop_after(work: asyncio.Future[T], items: Sequence[Item]) -> None:
    """Drop the holds when the work has ended."""

    def drop(done: asyncio.Future[T]) -> None:
        done.cancelled() or done.exception()  # it was not read
        for item in items:
            item.hold.drop()

    work.add_done_callback(drop)


def _connect(
    ticket: Ticket, unix: str, address: tuple[str, int], left_s: float, connection: Connection
) -> Stream:
    """Connect over the owner's unix socket if possible, else over tcp. Raises OSError, FrameError."""
    if unix:
        with contextlib.suppress(OSError, FrameError):
            return _proved(
                ticket, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), unix, left_s, connection
            )
    begun_s = time.monotonic()
    family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    left_s = max(0.001, left_s - (time.monotonic() - begun_s))
    return _proved(ticket, socket.socket(family, socket.SOCK_STREAM), where, left_s, connection)


def _proved(
    ticket: Ticket, sock: socket.socket, where: object, left_s: float, connection: Connection
) -> Stream:
    try:
        connection.use(sock)
        sock.settimeout(left_s)
        sock.connect(where)  # type: ignore[arg-type]
        sock.settimeout(None)
        frames.set_tcp(sock)
        return frames.prove_as_reader(sock, ticket)
    except (OSError, FrameError):
        sock.close()
        raise
