"""The verbs of clients other than lookups (lookup.py) and writes (reserve.py); each answers one request."""

from __future__ import annotations

import time

import msgspec

from kvstrata.errors import BadRequest, NotPermitted
from kvstrata.native.pool import Pool
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.processes import AttachedProcess, ProcessTable
from kvstrata.rpc.session import Call, Sessions
from kvstrata.rpc.wire import (
    Cancel,
    Identify,
    IdentifyReply,
    Ok,
    Ping,
    Pong,
    Quiesced,
    Release,
    Reply,
    Retrieve,
    encode,
)
from kvstrata.server.requests.effects import Effects
from kvstrata.server.requests.leases import Lease, Leases
from kvstrata.server.requests.plain import read_piece
from kvstrata.server.requests.running import KeptOutcome
from kvstrata.types import shown_name


class Handlers:
    """Answers requests. Each method is a verb of the boundary. Belongs to the event loop."""

    def __init__(
        self,
        *,
        epoch: int,
        pool: Pool,
        processes: ProcessTable,
        sessions: Sessions,
        leases: Leases,
        effects: Effects,
        counters: ServerCounters,
    ) -> None:
        self._epoch = epoch
        self._pool = pool
        self._processes = processes
        self._sessions = sessions
        self._leases = leases
        self._effects = effects
        self._counters = counters

    # --- sessions -----------------------------------------------------------------------------------------

    def ping(self, request: Ping, process: AttachedProcess) -> bytes:
        """Answer a ping. If it names the lookups that the process still wants, the others are undone."""
        process.pinged_s = time.monotonic()
        undoing = self._sessions.ping(process.session, request.seq, request.live)
        if request.copies is not None:
            process.copies = msgspec.structs.asdict(request.copies)
        if request.loads is not None:
            process.load_rate = request.loads.latency_us / 1e6, float(request.loads.bytes_s)
        self._effects.carry_out(undoing)
        leases = self._leases
        pong = Pong(
            request.seq,
            self._epoch,
            leases.orphans(process.group.name, process.row),
            leases.revoked(process.session),
        )
        return encode(pong)

    def identify(self, call: Call, process: AttachedProcess, request: Identify) -> KeptOutcome:
        """Give the process a number for an identity, which its later requests use."""
        identity = self._processes.identify(process, request.request)
        group = process.group
        reply = IdentifyReply(
            call.seq,
            self._epoch,
            identity.number,
            identity.root,
            group.slices,
            group.complete,
            list(group.spans),
        )
        return reply, None

    def quiesced(self, call: Call, process: AttachedProcess, request: Quiesced) -> KeptOutcome:
        """End the earlier epochs of a process: it does not touch their bytes any more."""
        self._pool.row_quiesced(process.row)
        return Ok(call.seq, self._epoch, 1), None

    # --- effects of requests ------------------------------------------------------------------------------

    def release(self, call: Call, process: AttachedProcess, request: Release) -> KeptOutcome:
        """End this process's shares of leases, or with `group` those of its whole group."""
        found: list[Lease] = []
        for name in request.leases:
            lease = self._leases.get(name)
            if lease is None or (process.tenants is not None and lease.group != process.group.name):
                continue  # a tenant does not hear whether another one has such a lease
            if lease.group != process.group.name:
                raise NotPermitted(
                    f"leases: ({shown_name(name[0])}, {name[1]}) belongs to another engine; nothing was released",
                    field="leases",
                )
            found.append(lease)
        count = 0
        for lease in found:
            if not lease.rows:
                continue  # named twice
            if request.group:
                self._effects.release_all(lease)
                count += 1
            else:
                own = lease.name[0] == process.session
                count += self._effects.release_share(lease, process.row, own=own)
        return Ok(call.seq, self._epoch, count), None

    def cancel(self, call: Call, process: AttachedProcess, request: Cancel) -> KeptOutcome:
        """Undo another request of this session, whether it has arrived or not."""
        if request.target == call.seq:
            raise BadRequest("target: a cancel cannot cancel itself", field="target")
        count = self._effects.carry_out(self._sessions.cancel(process.session, request.target))
        return Ok(call.seq, self._epoch, count), None

    # --- bytes without a mapping --------------------------------------------------------------------------

    def retrieve(self, request: Retrieve, process: AttachedProcess) -> Reply:
        """Reply with bytes of a record, for a process that does not map L1."""
        root = self._processes.identity(process, request.identity_id).root
        return read_piece(self._pool, root, request, self._epoch, self._counters)
