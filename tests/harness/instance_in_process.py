"""An instance over a real pool, in this process and without sockets or tiers: messages in, messages out."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvstrata.clock import SystemClock
from kvstrata.config.model import ServerSettings
from kvstrata.native.core import Pool, RecordSpec, seal_record, storage_keys
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import wire
from kvstrata.server.parts import Parts
from kvstrata.server.plan import MAX_SESSION_SHARE, InstanceFacts
from kvstrata.server.processes import Process, RowState, TenantTokens
from kvstrata.server.requests.grants import Lease, Reservation
from kvstrata.server.requests.requests import Requests
from kvstrata.tiers.puts import News
from kvstrata.tiers.set import TierSet
from kvstrata.types import KEY_BYTES, Role, unpack_extents
from tests.harness.rpc_client import CHUNK_TOKENS, FACTS, RECORD_BYTES, SECTIONS, keys_of, layout, part
from tests.harness.validation import validate
from tests.harness.virtual import VirtualLoop


class Said(NamedTuple):
    """A message and the session that sends it."""

    session: bytes
    message: bytes


def said(session: bytes, request: wire.AnyRequest) -> Said:
    return Said(session, wire.encode(request))


class Line:
    """A connection, which a process speaks over (None: a client without a row)."""

    def __init__(self, instance: InstanceInProcess, process: Process | None) -> None:
        self.process = process
        self.plain: dict[int, Any] = {}
        self._instance = instance

    def send(self, message: bytes) -> None:
        self._instance.send(self, message)


class InstanceInProcess:
    """One instance with a pool of its own. Everything happens inside `feed`, on a private event loop."""

    def __init__(
        self,
        l1_bytes: int = 4 << 20,
        entries: int = 2048,
        *,
        loop: VirtualLoop | None = None,
        news: News | None = None,
    ) -> None:
        self.loop = loop or asyncio.new_event_loop()
        index, extents = os.memfd_create("index"), os.memfd_create("extents")
        self.pool = Pool.create(index, extents, extents_bytes=l1_bytes, entry_capacity=entries)
        os.close(index)
        os.close(extents)
        self.supervisor = Supervisor(self.loop)
        self.sent: list[tuple[Any, bytes]] = []
        self.send: Any = lambda address, frame: self.sent.append((address, frame))
        """Called with each reply; a test may replace it."""
        settings, clock = ServerSettings(), loop.clock if loop else SystemClock()
        facts = InstanceFacts(
            instance_id="fuzzed",
            epoch=self.pool.epoch,
            port=0,
            http_port=0,
            socket_dir=Path("/nowhere"),
            chunk_tokens=settings.chunk_size,
            max_reserved_bytes=l1_bytes // MAX_SESSION_SHARE,
            started_s=clock.monotonic_s(),
        )
        self.parts = Parts(
            settings,
            facts,
            self.pool,
            self.loop,
            self.supervisor,
            clock=clock,
            tiers=TierSet(),
            news=news,
            tokens=TenantTokens(),
            peer_tier="",
        )
        self.lane, self.own_lane = self.parts.lane, self.parts.own_lane
        self.parts.readiness.set()
        self.lines: dict[bytes, Line] = {}
        """The connection of each session."""
        self.answer_with()

    @property
    def epoch(self) -> int:
        return self.parts.facts.epoch

    def answer_with(self, **l2: Any) -> None:
        """Replace these parts of L2 (`prefetch`, `tiers`) for the frames that arrive from now on."""
        parts = copy.copy(self.parts)
        vars(parts).update(l2)
        self.requests = Requests(parts)

    def status(self) -> dict[str, Any]:
        return self.parts.board.document()

    def attach(
        self,
        session: bytes,
        group: bytes,
        role: Role = Role.CLIENT,
        *,
        pid: int = 0,
        tenants: frozenset[str] | None = None,
        lookahead_tokens: int | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        """Attach a session as a handshake on the attach socket would. `pid` 0: of this process."""
        pid = pid or os.getpid()
        request = wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=session,
            group=group,
            role=role,
            layout=layout(lookahead_tokens=lookahead_tokens),
            engine_slices=1,
            slice=None if role is Role.SCHEDULER else part(),
            facts=None if role is Role.SCHEDULER else FACTS,
        )
        process = Process(self.pool.claim_row(session, group, pid), session, group, pid, request, tenants)
        process.state = RowState.CLAIMED
        self.parts.processes.announce(process)
        self.requests.on_attached(process)
        process.line = self.line(session)  # type: ignore[assignment]

    def gone(self, session: bytes) -> None:
        """End a session as the death of its process would."""
        process = self.parts.processes.get(session)
        assert process is not None
        self.lines.pop(session, None)
        self.parts.processes.leave(process)
        self.loop.run_until_complete(self.requests.on_gone(process))
        self.pool.row_gone(process.row)

    def line(self, session: bytes) -> Line:
        """The connection of a session; one without a row for a session that is not attached."""
        process = self.parts.processes.get(session)
        return self.lines.setdefault(session if process else b"", Line(self, process))

    def feed(self, *messages: Said) -> list[wire.AnyReply]:
        """Receive messages without a pause between them; return the replies in their order."""
        self.sent.clear()

        async def arrive() -> None:
            for session, message in messages:
                self.requests.on_frame(self.line(session), message)
            await self.supervisor.idle()

        self.loop.run_until_complete(arrive())
        self.loop.run_until_complete(self._hear_events())
        return [wire.decode_reply(frame) for _, frame in self.sent]

    async def _hear_events(self) -> None:
        self.parts.events.drain()

    def store(self, session: bytes, seq: int, identity: wire.IdentifyReply, chain: bytes) -> None:
        """Reserve, write and commit chunks; uses two request numbers."""
        reserve = wire.Reserve(seq, 1000, identity.identity_id, b"", chain, RECORD_BYTES)
        [reply] = self.feed(said(session, reserve))
        assert isinstance(reply, wire.ReserveReply), reply
        digest = part().digest()
        parent = bytes(KEY_BYTES)
        for key, extent in zip(keys_of(chain), unpack_extents(reply.extents), strict=True):
            own_key = storage_keys(identity.root, key, digest)
            spec = RecordSpec(own_key, identity.root, digest, parent, CHUNK_TOKENS)
            seal_record(self.pool.extents_address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)
            parent = spec.key
        commit = wire.Commit(seq + 1, seq, list(range(len(chain) // KEY_BYTES)))
        [done] = self.feed(said(session, commit))
        assert isinstance(done, wire.CommitReply) and not any(done.outcomes), done

    def check(self) -> None:
        """Assert every invariant of pool and grants, that pool and grants agree, and that no task crashed."""
        validate(self.pool)
        self.parts.grants.validate()
        stats = self.pool.stats()
        assert stats["leases"] == self.parts.grants.n_leases
        processes = list(self.parts.processes)
        grants = [grant for process in processes for grant in process.grants.values()]
        held = [grant for grant in grants if isinstance(grant, Reservation)]
        assert stats["reservations"] == len(held)
        assert stats["entries"]["reserved"] == sum(len(reservation.open) for reservation in held)
        for reservation in held:
            assert reservation.open and reservation.n_counted == len(reservation.open)
        uses = {process.uses[0] for process in processes}
        assert sum(use.reserved_bytes for use in uses) == stats["reserved_bytes"]
        assert sum(use.n_tasks for use in uses) == sum(len(process.running) for process in processes)
        assert all(lease.owner.row in lease.rows for lease in grants if isinstance(lease, Lease)), (
            "a process still names a lease whose share it has released"
        )
        assert not self.supervisor.failure.done(), self.supervisor.failure.result()
        assert not self.supervisor.failed_jobs, "see the log"

    def close(self) -> None:
        """End all sessions, then assert that nothing is held."""
        for process in self.parts.processes:
            self.gone(process.session)
        self.check()
        stats = self.pool.stats()
        held = {
            name: stats[name]
            for name in ("leases", "reservations", "holds", "reserved_bytes", "leased_bytes")
        }
        assert not any(held.values()), held
        assert self.parts.grants.n_leases == 0
        self.parts.close()
        self.pool.close()
        self.loop.close()
