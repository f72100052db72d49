"""The server's engine and RPC boundary over a real pool, in this process and without sockets: frames in, frames out."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from kvstrata.clock import SystemClock
from kvstrata.config.model import ServerSettings
from kvstrata.memory.attach.server import SessionRow
from kvstrata.native.copying import RecordSpec, seal_record
from kvstrata.native.hashing import storage_keys
from kvstrata.native.pool import Pool
from kvstrata.process.supervisor import PoolLane, Supervisor
from kvstrata.rpc import wire
from kvstrata.rpc.zmq_server import Address
from kvstrata.server.engine import Engine
from kvstrata.server.requests.effects import Lease, Reservation
from kvstrata.server.requests.handlers import Handlers
from kvstrata.types import KEY_BYTES, Role, unpack_extents
from tests.harness.rpc_client import CHUNK_TOKENS, FACTS, RECORD_BYTES, SECTIONS, keys_of, layout, part


class EngineInProcess:
    """One engine with a pool of its own. Everything happens inside `feed`, on a private event loop."""

    def __init__(self, l1_bytes: int = 4 << 20, entries: int = 2048) -> None:
        self.loop = asyncio.new_event_loop()
        index, extents = os.memfd_create("index"), os.memfd_create("extents")
        self.pool = Pool.create(index, extents, extents_bytes=l1_bytes, entry_capacity=entries)
        os.close(index)
        os.close(extents)
        self.supervisor = Supervisor(self.loop)
        self.lane = PoolLane(self.loop)
        self.own_lane = PoolLane(self.loop, threads=1, queue=None)
        self.engine = Engine(
            self.pool,
            ServerSettings(),
            instance_id="fuzzed",
            socket_dir=Path("/nowhere"),
            port=0,
            supervisor=self.supervisor,
            lane=self.lane,
            own_lane=self.own_lane,
            clock=SystemClock(),
        )
        self.engine.set_ready()
        self.handlers = Handlers(self.engine, self.loop)
        self.sent: list[tuple[Any, bytes]] = []
        self.engine.send = lambda address, frame: self.sent.append((address, frame))
        self._rows: dict[bytes, SessionRow] = {}

    def attach(self, session: bytes, group: bytes, role: Role = Role.CLIENT) -> None:
        """As after the handshake on the attach socket."""
        request = wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=session,
            group=group,
            role=role,
            layout=layout(),
            engine_slices=1,
            slice=None if role is Role.SCHEDULER else part(),
            facts=None if role is Role.SCHEDULER else FACTS,
        )
        self.engine.admit(request)
        row = self.pool.claim_row(session, group, os.getpid())
        seen = SessionRow(row=row, session=session, group=group, pid=os.getpid(), request=request)
        self._rows[session] = seen
        self.engine.on_attached(seen)

    def gone(self, session: bytes) -> None:
        """As when the process has died."""
        seen = self._rows.pop(session)
        self.loop.run_until_complete(self.engine.on_gone(seen))
        self.pool.row_gone(seen.row)

    def feed(self, *frames: bytes, local: bool = True) -> list[wire.AnyReply]:
        """What these frames, arriving one right after the other, were answered, in the order of the answers."""
        self.sent.clear()

        async def arrive() -> None:
            for number, frame in enumerate(frames):
                self.handlers.on_frame(Address(local, b"%d" % number), frame)
            await self.supervisor.idle()

        self.loop.run_until_complete(arrive())
        self.loop.run_until_complete(self._hear_events())
        return [wire.decode_reply(frame) for _, frame in self.sent]

    async def _hear_events(self) -> None:
        self.engine.drain_events()

    def store(self, session: bytes, seq: int, identity: wire.IdentifyReply, chain: bytes) -> None:
        """Reserve, write and commit chunks; uses two request numbers."""
        reserve = wire.Reserve(session, seq, 1000, identity.identity_id, b"", chain, RECORD_BYTES)
        [reply] = self.feed(wire.encode(reserve))
        assert isinstance(reply, wire.ReserveReply), reply
        digest = part().digest()
        parent = bytes(KEY_BYTES)
        for key, extent in zip(keys_of(chain), unpack_extents(reply.extents), strict=True):
            spec = RecordSpec(storage_keys(key, digest), identity.root, digest, parent, CHUNK_TOKENS)
            seal_record(self.pool.extents_address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)
            parent = spec.key
        commit = wire.Commit(session, seq + 1, seq, list(range(len(chain) // KEY_BYTES)))
        [done] = self.feed(wire.encode(commit))
        assert isinstance(done, wire.CommitReply) and not any(done.outcomes), done

    def check(self) -> None:
        """Assert every invariant of pool and sessions, that they agree, and that no task crashed."""
        self.pool.validate()
        self.engine.sessions.validate()
        stats = self.pool.stats()
        assert stats["leases"] == len(self.engine.leases)
        assert stats["entries"]["reserved"] == len(self.engine.in_flight)
        effects = [
            effect
            for name in self._rows
            if (session := self.engine.sessions.get(name))
            for effect in session.effects.values()
        ]
        held = [effect for effect in effects if isinstance(effect, Reservation)]
        assert stats["reservations"] == len(held)
        assert stats["entries"]["reserved"] == sum(len(reservation.open_keys) for reservation in held)
        assert all(lease.rows for lease in effects if isinstance(lease, Lease)), (
            "a lease that is over is still named"
        )
        assert not self.supervisor.failure.done(), self.supervisor.failure.result()

    def close(self) -> None:
        """Everybody leaves; then nothing may be held."""
        for session in list(self._rows):
            self.gone(session)
        self.check()
        stats = self.pool.stats()
        held = {
            name: stats[name]
            for name in ("leases", "reservations", "holds", "reserved_bytes", "leased_bytes")
        }
        assert not any(held.values()), held
        assert len(self.engine.leases) == len(self.engine.in_flight) == 0
        self.lane.close()
        self.own_lane.close()
        self.pool.close()
        self.loop.close()
