"""The verbs of clients other than lookups (lookup.py) and writes (reserve.py); each answers one request."""

from __future__ import annotations

import time

import msgspec

from kvstrata import __version__
from kvstrata.errors import BadRequest, NotPermitted, UnknownSession, WrongVersion
from kvstrata.native.hashing import storage_keys
from kvstrata.native.pool import Pool
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.processes import AttachedProcess, ProcessTable
from kvstrata.rpc.session import Call, Sessions
from kvstrata.rpc.wire import (
    MAX_MESSAGE_BYTES,
    NO_SESSION,
    PROTOCOL_VERSION,
    Cancel,
    Hello,
    HelloReply,
    Identify,
    IdentifyReply,
    Ok,
    Ping,
    Pong,
    Quiesced,
    Release,
    Reply,
    Retrieve,
    RetrieveReply,
    encode,
)
from kvstrata.server.facts import InstanceFacts
from kvstrata.server.l2.tiers import TierSet
from kvstrata.server.requests.effects import Effects
from kvstrata.server.requests.leases import Lease, Leases
from kvstrata.server.requests.running import KeptOutcome
from kvstrata.types import shown_name


class Handlers:
    """Answers requests. Each method is a verb of the boundary. Belongs to the event loop."""

    def __init__(
        self,
        *,
        facts: InstanceFacts,
        pool: Pool,
        processes: ProcessTable,
        sessions: Sessions,
        leases: Leases,
        effects: Effects,
        tiers: TierSet,
        counters: ServerCounters,
    ) -> None:
        self._facts = facts
        self._epoch = facts.epoch
        self._pool = pool
        self._processes = processes
        self._sessions = sessions
        self._leases = leases
        self._effects = effects
        self._tiers = tiers
        self._counters = counters

    # --- sessions -----------------------------------------------------------------------------------------

    def hello(self, request: Hello, process: AttachedProcess | None) -> Reply:
        """Tell which server this is; the first request of every client."""
        if request.protocol != PROTOCOL_VERSION:
            raise WrongVersion(
                f"protocol: the client speaks {request.protocol}, this server {PROTOCOL_VERSION}; upgrade "
                "the older side",
                field="protocol",
            )
        facts = self._facts
        return HelloReply(
            seq=request.seq,
            epoch=facts.epoch,
            protocol=PROTOCOL_VERSION,
            server=f"kvstrata {__version__}",
            instance_id=facts.instance_id,
            chunk_tokens=facts.chunk_tokens,
            socket_dir=str(facts.socket_dir),
            max_message_bytes=MAX_MESSAGE_BYTES,
            has_l2=self._tiers.hit_beyond_l1,
            max_reserved_bytes=facts.max_reserved_bytes,
        )

    def ping(self, request: Ping) -> bytes:
        """Answer a ping. If it names the lookups that the process still wants, the others are undone."""
        if request.session == NO_SESSION:
            return encode(Pong(request.seq, self._epoch))
        process = self._processes.get(request.session)
        if process is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        process.pinged_s = time.monotonic()
        undoing = self._sessions.ping(request.session, request.seq, request.live)
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
        hold = self._pool.hold(storage_keys(root, request.key, request.slice_digest), identity=root)
        if hold is None:
            return RetrieveReply(request.seq, self._epoch, False, 0, b"")
        try:
            first = min(request.offset_bytes, hold.length)
            end = min(first + request.length_bytes, hold.length)
            body = bytes(hold.view()[first:end])
            length = hold.length
        finally:
            hold.drop()
        self._counters.retrieved_bytes += end - first
        return RetrieveReply(request.seq, self._epoch, True, length, body)
