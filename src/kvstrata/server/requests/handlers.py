"""The verbs of clients other than lookups (lookup.py) and writes (reserve.py); each answers one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvstrata import __version__
from kvstrata.errors import BadRequest, NotPermitted, UnknownSession, WrongVersion
from kvstrata.native.hashing import storage_keys
from kvstrata.native.pool import Pool
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.processes import AttachedProcess, ProcessTable, TenantTokens
from kvstrata.process.lane import PoolLane
from kvstrata.rpc.session import Call, Sessions
from kvstrata.rpc.wire import (
    MAX_MESSAGE_BYTES,
    NO_SESSION,
    PROTOCOL_VERSION,
    Cancel,
    Clear,
    Cleared,
    ClearScope,
    Document,
    Explain,
    Hello,
    HelloReply,
    Identify,
    IdentifyReply,
    Ok,
    Ping,
    Pong,
    Prefetch,
    PrefetchReply,
    Quiesced,
    Release,
    Reply,
    Retrieve,
    RetrieveReply,
    Status,
    encode,
)
from kvstrata.server.admin.clear import Clearing
from kvstrata.server.admin.explain import Explaining
from kvstrata.server.admin.prewarm import Prewarms
from kvstrata.server.admin.status import StatusBoard
from kvstrata.server.facts import InstanceFacts
from kvstrata.server.l2.tiers import TierSet
from kvstrata.server.requests.checks import whole_keys
from kvstrata.server.requests.effects import Effects
from kvstrata.server.requests.leases import Lease, Leases
from kvstrata.server.requests.running import KeptOutcome
from kvstrata.types import shown_name

RETRIEVE_ON_LOOP_BYTES = 128 << 10


class Handlers:
    """Answers requests. Each method is a verb of the boundary. Belongs to the event loop."""

    def __init__(
        self,
        *,
        facts: InstanceFacts,
        pool: Pool,
        lane: PoolLane,
        processes: ProcessTable,
        tokens: TenantTokens,
        sessions: Sessions,
        leases: Leases,
        effects: Effects,
        tiers: TierSet,
        prewarms: Prewarms,
        clearing: Clearing,
        explain: Explaining,
        board: StatusBoard,
        counters: ServerCounters,
    ) -> None:
        self._facts = facts
        self._epoch = facts.epoch
        self._pool = pool
        self._lane = lane
        self._processes = processes
        self._tokens = tokens
        self._sessions = sessions
        self._leases = leases
        self._effects = effects
        self._tiers = tiers
        self._prewarms = prewarms
        self._clearing = clearing
        self._explain = explain
        self._board = board
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

    def retrieve(
        self, request: Retrieve, process: AttachedProcess | None
    ) -> Reply | Coroutine[Any, Any, Reply]:
        """Reply with the bytes of a chunk, for a process that does not map L1."""
        assert process is not None
        root = self._processes.identity(process, request.identity_id).root
        hold = self._pool.hold(storage_keys(root, request.key, request.slice_digest), identity=root)
        if hold is None:
            return RetrieveReply(request.seq, self._epoch, False, 0, b"")
        first = min(request.offset_bytes, hold.length)
        end = min(first + request.length_bytes, hold.length)

        def body() -> bytes:
            try:
                return bytes(hold.view()[first:end])
            finally:
                hold.drop()

        self._counters.retrieved_bytes += end - first
        if end - first <= RETRIEVE_ON_LOOP_BYTES:
            return RetrieveReply(request.seq, self._epoch, True, hold.length, body())
        return self._retrieve_on_lane(request, hold.length, body)

    async def _retrieve_on_lane(self, request: Retrieve, length: int, body: Callable[[], bytes]) -> Reply:
        content = await asyncio.shield(self._lane.run(body))
        return RetrieveReply(request.seq, self._epoch, True, length, content)

    # --- operations of admins too -------------------------------------------------------------------------

    def prefetch(self, call: Call, process: AttachedProcess, request: Prefetch) -> KeptOutcome:
        """Start a prewarm: load chunks from L2 before they are looked up."""
        identity = self._processes.identity(process, request.identity_id)
        whole_keys(request.keys, "keys")
        job = self._prewarms.start(
            process.group,
            identity.root,
            identity.tenant,
            request.keys,
            request.budget_bytes,
            request.ttl_ms,
            process.tenants,
        )
        return PrefetchReply(call.seq, self._epoch, job), None

    async def clear(self, call: Call, process: AttachedProcess, request: Clear) -> KeptOutcome:
        """Drop chunks of the tenants that this process may use."""
        return await self._clear(request, process.tenants), None

    async def clear_unattached(self, request: Clear) -> Reply:
        """Drop chunks for a local process that is not attached, and so has no token."""
        return await self._clear(request, self._tokens.without)

    async def _clear(self, request: Clear, tenants: frozenset[str] | None) -> Reply:
        chosen: list[str | None] = [request.tenant]
        if tenants is not None:
            if request.tenant is not None and request.tenant not in tenants:
                raise NotPermitted(
                    f"tenant: this process may not use tenant {request.tenant!r:.80}; attach with its token",
                    field="tenant",
                )
            if request.tenant is None:
                chosen = [*sorted(tenants)]
        if request.tier is not ClearScope.L1 and chosen != [None]:
            raise BadRequest(
                "tenant: a process may clear L2 only as a whole",
                field="tenant",
            )
        done = [await self._clearing.clear(request.tier, tenant, wait=request.wait) for tenant in chosen]
        count, kept = sum(one.n_chunks for one in done), sum(one.kept for one in done)
        return Cleared(request.seq, self._epoch, count, done[-1].held, done[-1].leased, kept)

    def status(self, request: Status, process: AttachedProcess | None) -> Reply:
        """The part of the status document that the process may see, or the outcome of a prewarm."""
        tenants = self._tenants_of(process)
        if request.job == 0:
            group = "" if process is None else shown_name(process.group.name)
            status = self._board.document() if tenants is None else self._board.document_of(tenants, group)
            return Document(request.seq, self._epoch, status)
        document = self._prewarms.job(request.job, tenants)
        if document is None:
            raise BadRequest(f"job: {request.job} is not among the recent ones", field="job")
        return Document(request.seq, self._epoch, document)

    def explain(self, request: Explain, process: AttachedProcess | None) -> Reply:
        """Explain what a recent request hit, and why its first missing chunk missed."""
        document = self._explain.request_of(self._tenants_of(process), request.request_id)
        return Document(request.seq, self._epoch, document)

    def _tenants_of(self, process: AttachedProcess | None) -> frozenset[str] | None:
        """The tenants of an attached process, or those of a local process that is not attached; None: any."""
        return self._tokens.without if process is None else process.tenants
