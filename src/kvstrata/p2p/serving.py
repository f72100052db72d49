"""The owner's side of reads by peers: records of this L1, sent straight from their extents.

A reader asks on the port for peers (CURVE) for a ticket, and opens a connection with it (frames.py).  Each connection
has a thread, which takes holds on the next records, sends them, and drops the holds.

Invariants
1. Each record that is being sent or granted has a hold, so the pool keeps it in place (P3).  The hold of a granted
   record is dropped when the reader says DONE, or after its connection has been closed, never by a clock alone.
2. Only READY records are sent; these have been verified.
3. Bytes under holds are at most SENDING_SHARE of L1 over all connections; above that, and while this instance is
   draining, the answer is BUSY.
4. At most MAX_CONNECTIONS are open.  For one more, the oldest unauthenticated one is closed, else the one that has been
   idle longest; if all are busy, the new one is refused.
5. A reader that stops or hardly reads is disconnected after STALL_S, one that does not end a grant after GRANT_S, and
   one that is no longer a member within MEMBERS_S.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.errors import BadRequest, MachineLacks, Unavailable, WrongVersion
from kvstrata.native.core import PoolError
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.p2p import frames
from kvstrata.p2p.frames import (
    ABSENT,
    BUSY,
    DONE,
    GRANT,
    HAVE,
    MAX_TABLE,
    Asked,
    FrameError,
    Stream,
    Ticket,
)
from kvstrata.patience import patience
from kvstrata.process.ports import resolve
from kvstrata.rpc.cluster_wire import PeerHello, PeerWelcome
from kvstrata.rpc.zmq_curve import KeyKind
from kvstrata.types import FORMAT_VERSION, SERVER_ROW

if TYPE_CHECKING:
    from kvstrata.native.core import Hold, Pool
    from kvstrata.rpc.control_port import ControlPort
    from kvstrata.rpc.zmq_server import Address

SENDING_SHARE = 1 / 4
MAX_CONNECTIONS = 256
MAX_TICKETS = 1_024
"""Maximum number of unused tickets; beyond it the oldest is forgotten."""
WINDOW_BYTES = 16 << 20
"""Maximum bytes of records that a connection holds at a time for sending; a single record may be longer."""
AHEAD_BYTES = 1 << 20
"""Size of a unix socket's send buffer (the kernel doubles it, up to net.core.wmem_max): the reader reads it while the
next records are looked up."""
GRANT_S = 60.0
MEMBERS_S = 5.0
"""Interval of checks that readers are still members."""
HOST_MARK = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """A name that is equal for processes of one host, or of one network namespace of it; empty: unknown."""
    try:
        return f"{HOST_MARK.read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


class _Connection:
    """One reader's connection; its thread and the accepting threads use it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.thread: threading.Thread
        self.ticket: Ticket | None = None
        """None until the reader has proved that it may read."""
        self.idle_since_s: float | None = time.monotonic()
        """None while an ask is being answered."""
        self.is_cut = False
        self.grant: list[Hold] = []
        self.grant_number = 0
        self.granted_s = 0.0

    def cut(self) -> None:
        """Wake the thread, which closes the connection."""
        self.is_cut = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class RecordServer(Numbers):
    """Sends records of one pool over its sockets."""

    connections = gauge("Open connections of readers.", lambda self: len(self._connections))
    sending_bytes = gauge("Bytes of L1 that are being sent or are granted to readers.")
    limit_bytes = gauge("Maximum number of bytes of L1 that may be sent at a time.")
    draining = gauge("1 while the instance sends nothing to peers, else 0.")
    sent_bytes = counter("Bytes of records sent to readers, or granted and read.")
    sent_records = counter("Records sent to readers, or granted and read.")
    absent = counter("Records that readers requested but this instance does not have.", name="absent_records")
    busy = counter("Records not sent because of the limit, or while draining.", name="busy_records")
    refused = counter(
        "Connections closed because they violated the protocol or stalled.", name="refused_connections"
    )

    def __init__(self, pool: Pool, *, socket_path: Path | None, host: str, port: int) -> None:
        """Listen on a unix socket and on a tcp port (0: a free one); accepts nothing yet. Raises MachineLacks."""
        self._pool = pool
        self.limit_bytes = int(pool.extents_bytes * SENDING_SHARE)
        self.sending_bytes, self.draining = 0, False
        self._lock = threading.Lock()
        self._tickets: collections.OrderedDict[bytes, Ticket] = collections.OrderedDict()
        self._connections: dict[_Connection, None] = {}
        self._closing = threading.Event()
        self.path = ""
        """The unix socket; empty if there is none."""
        self._listeners = [_listen_tcp(host, port)]
        self.port: int = self._listeners[0].getsockname()[1]
        if socket_path is not None:
            self._listeners.append(_listen_unix(socket_path))
            self.path = str(socket_path)
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="kv-peers", daemon=True)
            for listener in self._listeners
        ]

    def start(self) -> None:
        """Accept connections."""
        for thread in self._accepting:
            thread.start()

    async def close(self) -> None:
        """Close all connections, and return when no thread touches the pool any more. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
        await asyncio.to_thread(self._join)
        for listener in self._listeners:
            listener.close()
        if self.path:
            await asyncio.to_thread(Path(self.path).unlink, missing_ok=True)

    def ticket(self, *, seal: bool, reader: str) -> Ticket:
        """Issue a ticket for one connection of the member with this public key."""
        ticket = frames.new_ticket(seal=seal, reader=reader)
        with self._lock:
            self._tickets[ticket.name] = ticket
            if len(self._tickets) > MAX_TICKETS:
                self._tickets.popitem(last=False)
        return ticket

    def keep_only(self, members: frozenset[bytes] | None) -> None:
        """Close the connections of readers whose public keys are not in `members`; None: keep all."""
        if members is None:
            return
        with self._lock:
            for name in [one.name for one in self._tickets.values() if one.reader.encode() not in members]:
                del self._tickets[name]
            for connection in self._connections:
                if connection.ticket is not None and connection.ticket.reader.encode() not in members:
                    connection.cut()

    def _join(self) -> None:
        for thread in self._accepting:
            if thread.ident is not None:
                thread.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()
        for connection in connections:
            connection.thread.join()

    # --- threads ----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                self._closing.wait(0.1)  # too many open files, or the server is closing
                continue
            connection = _Connection(sock)
            connection.thread = threading.Thread(
                target=self._serve, args=(connection,), name="kv-peer", daemon=True
            )
            if self._closing.is_set() or not self._admits(connection):
                sock.close()
                continue
            try:
                connection.thread.start()
            except RuntimeError:  # no more threads
                self._forget(connection)

    def _admits(self, connection: _Connection) -> bool:
        with self._lock:
            live = [one for one in self._connections if not one.is_cut]
            if len(live) >= MAX_CONNECTIONS:
                idle = [one for one in live if one.idle_since_s is not None and not one.grant]
                # A cut connection leaves the table when its thread has ended.
                if not idle or len(self._connections) >= 2 * MAX_CONNECTIONS:
                    self.refused += 1
                    return False
                min(idle, key=lambda one: (one.ticket is not None, one.idle_since_s)).cut()
            self._connections[connection] = None
        return True

    def _forget(self, connection: _Connection) -> None:
        """Close a connection, and only then drop the holds of records granted on it."""
        connection.socket.close()
        self._end_grant(connection)
        with self._lock:
            self._connections.pop(connection, None)

    def _serve(self, connection: _Connection) -> None:
        try:
            frames.set_stall(connection.socket)
            frames.set_tcp(connection.socket)
            if connection.socket.family == socket.AF_UNIX:
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AHEAD_BYTES)
            stream, connection.ticket = frames.admit_reader(connection.socket, self._take_ticket)
            while self._next_comes(connection):
                connection.idle_since_s = None
                self._answer(connection, stream, frames.receive_ask(stream))
                connection.idle_since_s = time.monotonic()
        except FrameError:
            with self._lock:
                self.refused += 1
        except (OSError, PoolError):
            pass  # the reader is gone, or the pool is closed
        finally:
            self._forget(connection)

    def _take_ticket(self, name: bytes) -> Ticket | None:
        with self._lock:
            return self._tickets.pop(name, None)

    def _next_comes(self, connection: _Connection) -> bool:
        """Wait for the next ask; False: the reader has closed the connection, or must be cut."""
        while not self._closing.is_set():
            try:
                return bool(connection.socket.recv(1, socket.MSG_PEEK))
            except BlockingIOError:  # no bytes arrived within STALL_S
                if connection.grant and time.monotonic() - connection.granted_s > patience(GRANT_S):
                    break
        return False

    def _answer(self, connection: _Connection, stream: Stream, ask: Asked) -> None:
        if ask.kind == DONE:
            if not connection.grant_number or ask.number != connection.grant_number:
                raise FrameError("no such grant")
            self._count(connection.grant)
            self._end_grant(connection)
            frames.send_table(stream, ask.number, [])
            return
        if ask.kind == HAVE:
            found = self._pool.has(b"".join(ask.keys))
            for at in range(0, len(found), MAX_TABLE):
                frames.send_table(stream, ask.number, found[at : at + MAX_TABLE])
            return
        if ask.kind == GRANT and (connection.grant_number or not ask.number):
            raise FrameError("a grant is open")
        left = ask.keys
        while left:
            lengths, holds = self._hold(left, grant=ask.kind == GRANT)
            left = left[len(lengths) :]
            if ask.kind == GRANT:
                connection.grant += [hold for hold in holds if hold is not None]
                connection.grant_number, connection.granted_s = ask.number, time.monotonic()
                offsets = [0 if hold is None else hold.offset for hold in holds]
                frames.send_table(stream, ask.number, lengths, struct.pack(f"<{len(offsets)}Q", *offsets))
                continue
            held = [hold for hold in holds if hold is not None]
            try:
                frames.send_table(stream, ask.number, lengths, *(hold.view() for hold in held))
                self._count(held)
            finally:
                self._drop(held)

    def _hold(self, keys: list[bytes], *, grant: bool) -> tuple[list[int], list[Hold | None]]:
        """Take holds for the next table: lengths (or ABSENT, BUSY), and for each key its hold, if any.

        The table ends before a record that does not fit now, but may when those before it have been sent.
        """
        first = keys[:MAX_TABLE]
        holds: list[Hold | None] = [None if self.draining else self._pool.hold(key) for key in first]
        lengths: list[int] = []
        window = 0
        with self._lock:
            room = self.limit_bytes - self.sending_bytes
            for hold in holds:
                length = ABSENT if hold is None else hold.length
                fits = window + length <= room and (grant or not window or window + length <= WINDOW_BYTES)
                if not fits and window and not grant:
                    break
                lengths.append(BUSY if self.draining or not fits else length)
                window += length if fits else 0
            self.sending_bytes += window
            self.absent += lengths.count(ABSENT)
            self.busy += lengths.count(BUSY)
        for at, hold in enumerate(holds):
            if hold is not None and (at >= len(lengths) or lengths[at] == BUSY):
                hold.drop()
                holds[at] = None
        del holds[len(lengths) :]
        used = b"".join([hold.key for hold in holds if hold is not None])
        if used:  # a lease counts as a use of the records; the holds keep them
            self._pool.release(self._pool.lease(used, 1, [SERVER_ROW], again=True)[0])
        return lengths, holds

    def _drop(self, holds: list[Hold]) -> None:
        n_bytes = sum(hold.length for hold in holds)
        for hold in holds:
            hold.drop()
        with self._lock:
            self.sending_bytes -= n_bytes

    def _end_grant(self, connection: _Connection) -> None:
        holds, connection.grant, connection.grant_number = connection.grant, [], 0
        self._drop(holds)

    def _count(self, holds: list[Hold]) -> None:
        with self._lock:
            self.sent_records += len(holds)
            self.sent_bytes += sum(hold.length for hold in holds)


def _listen_tcp(host: str, port: int) -> socket.socket:
    address, family = resolve(host, "p2p.listen")
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise MachineLacks(
            f"p2p.data_port: cannot listen on {host}:{port}: {error.strerror}; choose another --p2p-data-port, or 0 "
            "for a free one",
            field="p2p.data_port",
        ) from None
    return listener


def _listen_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener


class PeerServer:
    """Issues tickets to peers on the control port. Everything runs on the loop."""

    def __init__(
        self,
        records: RecordServer,
        port: ControlPort,
        *,
        instance_id: str,
        incarnation: int,
        engine: str,
        metadata: Callable[[], bytes],
        seal: bool,
        members: Callable[[], frozenset[bytes] | None],
    ) -> None:
        """`metadata()`: the data by which `engine` reads L1 one-sidedly; empty: it cannot now.

        `members()`: public keys of the processes that may read now; None: any process may.
        """
        self.records = records
        port.serve((KeyKind.INSTANCE,), {PeerHello: self._hello})
        self._instance_id, self._incarnation = instance_id, incarnation
        self._engine, self._metadata, self._seal, self._members = engine, metadata, seal, members
        self._host = this_host()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._log = EventLog("peers")

    async def close(self) -> None:
        """Wait until no record is sent any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        await self.records.close()

    def _look_at_members(self) -> None:
        self.records.keep_only(self._members())
        self._timer = self._loop.call_later(MEMBERS_S, self._look_at_members)

    def _hello(self, request: PeerHello, address: Address) -> PeerWelcome:
        if request.record_version != FORMAT_VERSION:
            raise WrongVersion(
                f"record_version: the reader reads {request.record_version}, {self._instance_id} has {FORMAT_VERSION}; "
                "upgrade the older side",
                field="record_version",
            )
        asked, own = (request.engine, request.seal), (self._engine, self._seal)
        if asked != own:
            field = "engine" if asked[0] != own[0] else "seal"
            shown = [f"p2p.engine {engine!r} and p2p.seal {seal}" for engine, seal in (asked, own)]
            raise BadRequest(
                f"{field}: the reader has {shown[0]}, {self._instance_id} has {shown[1]}; set the same on both",
                field=field,
            )
        metadata = self._metadata()
        if not metadata and self._engine != "tcp":
            raise Unavailable(f"the transfer engine of {self._instance_id} is not up; ask again later")
        if self._timer is None:  # no reader can connect before this
            self.records.start()
            self._look_at_members()
        ticket = self.records.ticket(seal=self._seal, reader=address.key)
        self._log.debug("peer", reader=request.reader)
        return PeerWelcome(
            request.seq,
            self._incarnation,
            self._instance_id,
            ticket.name,
            ticket.secret,
            self.records.port,
            self._host,
            self.records.path,
            metadata,
        )


class PeersServed:
    """The state of serving peers, for the instance's commands and condition."""

    def __init__(self, server: PeerServer | None) -> None:
        """`server` None: peers are neither read nor served."""
        self.server = server
        self.draining = False

    def drain(self, on: bool) -> None:
        """Stop sending to peers, or send again."""
        self.draining = on
        if self.server is not None:
            self.server.records.draining = on

    def sending(self) -> tuple[int, int]:
        """Numbers of bytes that are being sent, and that were sent since the start."""
        records = None if self.server is None else self.server.records
        return (0, 0) if records is None else (records.sending_bytes, records.sent_bytes)
