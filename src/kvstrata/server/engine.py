"""The instance's state and what may be asked of it: sessions, leases, reservations, explain, admin.

The engine decides nothing about messages (requests/handlers.py) or lookups (requests/lookup.py); it owns what they
share.  Everything here runs on the event loop and is quick; pool calls that are not go to a lane.

Invariants:

1. A process's requests are valid from `on_attached` until `on_gone` begins.
2. When `on_gone` returns, nothing runs for that process: no request, and no reservation or lease named by it
   that only it held.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata import __version__
from kvstrata.errors import BadRequest, LayoutRefused, Refused, Unavailable
from kvstrata.native.hashing import chain_keys, storage_keys
from kvstrata.observability.logging import EventLog
from kvstrata.observability.metrics import ServerCollector, ServerCounters
from kvstrata.p2p.borrowed import Borrowed
from kvstrata.policy.misses import Explainer, split_keys
from kvstrata.policy.processes import Group, Registry, TenantTokens, tenant_number
from kvstrata.rpc.session import Call, Effect, Session, Sessions, Undoing
from kvstrata.rpc.wire import Error, Pong, Tier, encode
from kvstrata.server.l2.payload_kinds import PayloadKinds
from kvstrata.server.l2.tiers import AdapterSet
from kvstrata.server.requests.effects import InFlight, Lease, Leases, Reservation
from kvstrata.types import FORMAT_VERSION, KEY_BYTES, MissReason, PoolEvent, RequestIdentity, identity_root

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvstrata.clock import Clock
    from kvstrata.config.model import ServerSettings
    from kvstrata.errors import KvstrataError
    from kvstrata.memory.attach.server import AttachServer, SessionRow, Stranded
    from kvstrata.memory.linux import Peer
    from kvstrata.native.pool import Pool
    from kvstrata.process.supervisor import PoolLane, Supervisor
    from kvstrata.rpc.cluster_wire import Owner
    from kvstrata.rpc.wire import AttachRequest
    from kvstrata.server.cluster.membership import Cluster
    from kvstrata.server.l2.prefetch import PrefetchController
    from kvstrata.server.l2.store import StoreController
    from kvstrata.server.l2.tier_control import AdapterControl
    from kvstrata.storage.wrap.metrics import OpReport

GB = 1 << 30
MAX_JOBS = 256
MAX_RUNNING_JOBS = 8
EVENTS_PER_TURN = 512
CLEAR_WAIT_S = 30.0
"""Longest wait of a clear for bytes in use."""
PEER_TYPE = "peer"
"""Type of the adapter that reads other instances."""
MAX_SESSION_SHARE = 8
"""A session may have 1/8 of L1 reserved or quarantined."""


class Job:
    """One prewarm and its outcome so far."""

    __slots__ = ("chunks", "l1_chunks", "l2_chunks", "number", "reason", "state")

    def __init__(self, number: int, chunks: int) -> None:
        self.number = number
        self.state = "running"
        self.chunks = chunks
        self.l1_chunks = 0
        self.l2_chunks = 0
        self.reason = ""

    def document(self) -> dict[str, Any]:
        """As told to whoever asks."""
        return {name: getattr(self, "number" if name == "job" else name) for name in _JOB_FIELDS}


_JOB_FIELDS = ("job", "state", "chunks", "l1_chunks", "l2_chunks", "reason")


class Cleared(NamedTuple):
    """What a clear did. The words are those of rpc.wire.Cleared."""

    tiers: dict[str, int]
    """Chunks that left each tier."""
    held: int
    leased: int
    kept: int

    @property
    def n_chunks(self) -> int:
        return sum(self.tiers.values())

    def document(self) -> dict[str, dict[str, int]]:
        """As told to an admin."""
        return {
            "cleared": self.tiers,
            "pending": {"held": self.held, "leased": self.leased},
            "kept": {"pinned": self.kept},
        }


class Engine:
    """One instance. `send` delivers a reply to an address (set by the handlers)."""

    def __init__(
        self,
        pool: Pool,
        settings: ServerSettings,
        *,
        instance_id: str,
        socket_dir: Path,
        port: int,
        supervisor: Supervisor,
        lane: PoolLane,
        own_lane: PoolLane,
        clock: Clock,
        tokens: TenantTokens | None = None,
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.instance_id = instance_id
        self.socket_dir = socket_dir
        self.port = port
        self.http_port = 0
        self.supervisor = supervisor
        self.lane = lane
        """For requests of clients; refuses when too many wait."""
        self.own_lane = own_lane
        """For housekeeping, admins and controllers; never refuses."""
        self.clock = clock
        self.adapters = AdapterSet()
        self.l2: AdapterControl | None = None
        """What changes `adapters`; this, `store` and `prefetch` are there once the server has opened L2."""
        self.store: StoreController | None = None
        self.prefetch: PrefetchController | None = None
        self.epoch: int = pool.epoch
        self.peers = Registry(self.epoch)
        self.payload_kinds = PayloadKinds(self.peers)
        self.borrowed = Borrowed(pool, own_lane, clock)
        self.sessions = Sessions(self.error_frame)
        self.leases = Leases()
        self.in_flight = InFlight()
        self.explainer = Explainer()
        self.attach: AttachServer | None = None
        """Who knows the stranded sessions; None while the server starts."""
        self.cluster: Cluster | None = None
        """What tells the controllers of this instance; None outside a cluster."""
        self.frozen_by: set[str] = set()
        """Controllers that take stock (server/cluster/membership.py); while there are any, nothing new is stored."""
        self.counters = ServerCounters()
        self.send: Callable[[Any, bytes], object] = lambda address, reply: False
        """True: dropped, because this peer leaves too many bytes of replies unread."""
        self.work: dict[Call, asyncio.Task[None]] = {}
        """Tasks of requests that take time (kept by the handlers)."""
        self.extra_status: dict[str, Callable[[], dict[str, Any]]] = {}
        self._tokens = tokens or TenantTokens()
        self._log = EventLog("engine")
        self._started_s = clock.monotonic_s()
        self._not_ready = "starting"
        self._events_lost = 0
        self._events: collections.deque[tuple[int, bytes, int]] = collections.deque()
        self.verified: collections.deque[bytes] = collections.deque()
        """Adopted chunks whose verification has ended well and that no adapter was offered yet."""
        self._clearing = asyncio.Lock()
        self._tick = asyncio.Event()
        """Set at the next `drain_events`."""
        self._jobs: dict[int, Job] = {}
        self._next_job = 1
        self._metrics: CollectorRegistry | None = None
        for tenant, gigabytes in settings.quotas_gb.items():
            pool.set_quota(tenant_number(tenant), int(gigabytes * GB))

    # --- attach hooks --------------------------------------------------------------------------------

    def admit(self, request: AttachRequest) -> None:
        """Raises what a process that may not attach is told."""
        if self._not_ready == "stopping":
            raise Unavailable("this server is stopping; attach to its successor")
        if request.layout.format_version != FORMAT_VERSION:
            raise LayoutRefused(
                f"layout.format_version: peer uses {request.layout.format_version}, this server "
                f"{FORMAT_VERSION}; upgrade the older side",
                field="layout.format_version",
            )
        if request.layout.chunk_tokens < 1:
            raise BadRequest(
                f"layout.chunk_tokens: must be at least 1, found {request.layout.chunk_tokens}",
                field="layout.chunk_tokens",
            )

    def tenants_of(self, peer: Peer, request: AttachRequest) -> frozenset[str] | None:
        """Tenants that a process with this token may use, None for any. Raises NotPermitted."""
        return self._tokens.allowed(request.token)

    def on_attached(self, session: SessionRow) -> None:
        """Requests of this session are valid from now on."""
        request = session.request
        assert request is not None
        self.peers.attach(
            session.session,
            group=session.group,
            role=request.role,
            layout=request.layout,
            engine_slices=request.engine_slices,
            part=request.slice,
            tenants=session.tenants,
            row=session.row,
            pid=session.pid,
        )
        self.payload_kinds.attached(request.slice, request.facts)
        self.sessions.open(session.session)
        self._log.debug(
            "attached", session=session.session, group=session.group, role=request.role, pid=session.pid,
            row=session.row, model=request.layout.model, resumed=session.resumed,
        )  # fmt: skip

    def on_detached(self, session: SessionRow) -> None:
        """Its connection closed while it lives; everything it owns stays."""
        self.peers.detached(session.session)
        self._log.debug("detached", session=session.session, pid=session.pid)

    async def on_gone(self, session: SessionRow) -> None:
        """Its process has ended: nothing of it runs any more when this returns."""
        self.peers.gone(session.session)
        left = self.sessions.close(session.session)
        for call in left.stopped:
            if call.stop is not None:
                call.stop()
        for effect in left.effects:
            if isinstance(effect, Reservation):
                self.in_flight.remove(effect.open_keys.values())
                effect.open_keys.clear()
        for lease in self.leases.row_gone(session.row):
            self._settle(lease)
        for effect in left.effects:
            if isinstance(effect, Lease) and effect.rows:
                self.leases.orphan(effect)
        await asyncio.gather(
            *(self.work[call] for call in left.stopped if call in self.work), return_exceptions=True
        )
        self._log.debug("gone", session=session.session, pid=session.pid, row=session.row)

    # --- effects --------------------------------------------------------------------------------

    def keep(self, effect: Effect) -> None:
        """The outcome that names this effect is on its way to its owner."""
        if isinstance(effect, Lease):
            self.leases.add(effect)
        elif isinstance(effect, Reservation):
            self.in_flight.add(effect.open_keys.values())

    def undo(self, effect: Effect, *, kept: bool = True) -> None:
        """Give back what a request did. `kept`: `keep` was called for it."""
        if isinstance(effect, Lease):
            self.pool.release(effect.ticket, -1)
            self.leases.drop(effect)
        elif isinstance(effect, Reservation):
            self.pool.abort(effect.ticket, None)
            if kept:
                self.in_flight.remove(effect.open_keys.values())
            effect.open_keys.clear()

    def carry_out(self, undoing: Undoing) -> int:
        """What a cancel or a ping decided; returns how many requests it touched."""
        for effect in undoing.effects:
            self.undo(effect)
        for call in undoing.stopped:
            if call.stop is not None:
                call.stop()
        for address, reply in undoing.replies:
            self.send(address, reply)
        return len(undoing.effects) + len(undoing.stopped)

    def release_share(self, lease: Lease, row: int, own: bool) -> bool:
        """End one row's share; False if it had none. `own`: the row is that of the process that looked up."""
        if row not in lease.rows:
            return False
        self.pool.release(lease.ticket, row)
        self.leases.begun(lease)
        if own:
            lease.wanted_by_ping = False
        if self.leases.drop_share(lease, row):
            self._settle(lease)
        return True

    def release_all(self, lease: Lease) -> None:
        """End every share."""
        self.pool.release(lease.ticket, -1)
        self.leases.drop(lease)
        self._settle(lease)

    def revoke(self, need_bytes: int) -> int:
        """Ask for the oldest waiting leases, as many as keep `need_bytes` from being leased; how many these are.

        The lookers are told at once, and again in each answer to their pings.  Nothing waits for them, and only
        what they release is free.
        """
        chosen = self.leases.revoke(lambda tickets: self.pool.leases_to_end(tickets, need_bytes))
        self.counters.revoked_leases += len(chosen)
        for session, address in {lease.name[0]: lease.address for lease in chosen}.items():
            self.send(address, encode(Pong(0, self.epoch, [], self.leases.revoked(session))))
        return len(chosen)

    def _settle(self, lease: Lease) -> None:
        self.sessions.settle(*lease.name)

    def committed(self, keys: list[bytes]) -> None:
        """These storage keys became visible."""
        self.explainer.keys.stored(keys)
        self.counters.committed_chunks += len(keys)
        if self.store is not None and keys:
            self.store.committed(keys)

    def put_skipped(self, key: bytes, reason: str) -> None:
        """The store controller did not put this chunk to L2."""
        counters = self.counters.put_skipped
        counters[reason] = counters.get(reason, 0) + 1
        self.explainer.keys.note(key, MissReason.PUT_SKIPPED, reason, self.clock.unix_ms())

    def dropped_from_l2(self, adapter: str, key: bytes) -> None:
        """An adapter's own cap dropped this chunk."""
        if self.adapters.get(adapter) is None:
            return
        if self.store is not None:
            self.store.dropped(adapter, [key])
        self.explainer.keys.note(key, MissReason.EVICTED, f"the cap of {adapter}", self.clock.unix_ms())

    def trimmed_from_l2(self, adapter: str, keys: Sequence[bytes]) -> None:
        """The tenant of these chunks was at its quota in an adapter, which made room of its oldest."""
        for key in keys:
            self.explainer.keys.note(
                key, MissReason.EVICTED, f"its tenant's quota of {adapter}", self.clock.unix_ms()
            )

    def l2_report(self, report: OpReport) -> None:
        """One operation of an adapter ended."""
        if self.adapters.get(report.adapter) is not None:
            self.counters.l2_operation(
                report.adapter, report.operation, report.seconds, report.moved_bytes, report.outcomes
            )

    def peer_loads(self) -> tuple[int, int]:
        """Records and bytes that were read from peers."""
        loads = [
            counted
            for (adapter, operation), counted in self.counters.l2.items()
            if operation == "load" and adapter.startswith(f"{PEER_TYPE}-")
        ]
        return sum(counted.outcomes.get("loaded", 0) for counted in loads), sum(
            counted.moved_bytes for counted in loads
        )

    def prefer_peer(self, keys: Sequence[bytes], owner: Owner | None) -> None:
        """Read these chunks from this peer if it leases them; None: from whoever has them again."""
        source = b"" if owner is None else msgspec.msgpack.encode(owner)
        for member in self.adapters:
            if member.name.startswith(f"{PEER_TYPE}-"):
                member.configured.prefer(keys, source)

    @property
    def has_l2(self) -> bool:
        """Whether a lookup may find something behind L1."""
        return self.prefetch is not None and self.adapters.take_loads

    # --- periodic --------------------------------------------------------------------------------

    def drain_events(self) -> None:
        """Tell explain and the store controller what the pool did since the last call, a part per turn."""
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()
        if self.pool.events_lost != self._events_lost:
            self._events_lost = self.pool.events_lost
            self.explainer.keys.lost_events()
            if self.cluster is not None:
                self.cluster.pool_events_lost()
        idle = not self._events
        events = self.pool.events()
        if self.cluster is not None:
            self.cluster.pool_events(events)
        self._events.extend(events)
        if idle and self._events:
            self._take_events()

    def _take_events(self) -> None:
        memory, now_ms = self.explainer.keys, self.clock.unix_ms()
        evicted: list[bytes] = []
        for _ in range(min(len(self._events), EVENTS_PER_TURN)):
            kind, key, _ = self._events.popleft()
            if kind == PoolEvent.EVICTED or kind in LEFT_BY:
                if kind == PoolEvent.EVICTED:
                    evicted.append(key)
                known = memory.get(key)
                if known is None or known.reason is not MissReason.PUT_SKIPPED:  # else: it would be in L2
                    why = LEFT_BY.get(kind, self.settings.l1.eviction_policy)
                    memory.note(key, MissReason.EVICTED, why, now_ms)
            elif kind == PoolEvent.CORRUPT:
                memory.note(key, MissReason.CORRUPT, "checksum differs", now_ms)
                self._log.repeated(logging.WARNING, "corrupt", "chunk_corrupt", key=key)
            elif kind == PoolEvent.VERIFIED:
                self.verified.append(key)
            elif kind == PoolEvent.INSERTED:
                known = memory.get(key)  # a put may have been skipped since the commit that this tells of
                if known is not None and known.reason is not MissReason.PUT_SKIPPED:
                    memory.stored([key])
        if evicted and self.store is not None:
            self.store.evicted(evicted)
        if self._events:
            asyncio.get_running_loop().call_soon(self._take_events)

    # --- admin --------------------------------------------------------------------------------

    @property
    def registry(self) -> CollectorRegistry:
        """Where the metrics are."""
        if self._metrics is None:
            from prometheus_client import CollectorRegistry

            self._metrics = CollectorRegistry(auto_describe=False)
            self._metrics.register(ServerCollector(self.instance_id, self.counters, self._numbers))
        return self._metrics

    def set_ready(self, why_not: str = "") -> None:
        """Ready with an empty string, otherwise why not."""
        self._not_ready = why_not

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return not self._not_ready, self._not_ready

    def status(self) -> dict[str, Any]:
        """The instance at a glance."""
        members = self.peers.members
        return {
            "instance": {
                "instance_id": self.instance_id,
                "version": __version__,
                "epoch": self.epoch,
                "pid": os.getpid(),
                "host": self.settings.named_host,
                "port": self.port,
                "tcp": self.settings.has_tcp,
                "http_port": self.http_port,
                "socket_dir": str(self.socket_dir),
                "ready": not self._not_ready,
                "uptime_s": round(self.clock.monotonic_s() - self._started_s, 3),
                "unix_s": time.time(),
            },
            **self._numbers(),
            "tenants": self._tenants(),
            "l2_tenants": self._l2_tenants(),
            "counters": self.counters.as_dict(),
            "peers": [
                {
                    "session": member.session.hex(),
                    "group": member.group.name.hex(),
                    "role": str(member.role),
                    "pid": member.pid,
                    "row": member.row,
                    "detached": member.detached,
                    "model": member.group.layout.model,
                    "complete": member.group.complete,
                    "copies": member.copies,
                }
                for member in members
            ],
            "jobs": [job.document() for job in self._jobs.values()],
        }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """What a recent request hit and why its first missing chunk missed; None if it is not remembered."""
        document = self.explainer.explain(request_id, None)
        return document if document["known"] else None

    def explain_keys(self, keys: bytes) -> list[dict[str, str]]:
        """Of each storage key: that it is in L1, or why it is not, as far as is remembered."""
        told = []
        for key in split_keys(keys):
            if self.pool.peek(key, 1):
                told.append({"tier": "l1", "reason": "", "detail": ""})
                continue
            reason, detail = self.explainer.why_key(
                key, in_flight=key in self.in_flight, policy=self.settings.l1.eviction_policy
            )
            told.append({"tier": "", "reason": reason.value, "detail": detail})
        return told

    async def prewarm(
        self, *, model: str, request: RequestIdentity, tokens: list[int], budget_bytes: int, ttl_ms: int
    ) -> int:
        """Start loading the chunks of a prompt from L2; returns the job's number.

        `model`: of an attached engine, empty for the only one. Raises BadRequest or Refused.
        """
        group = self._group_of(model)
        root = identity_root(group.layout, request)
        chain = await asyncio.shield(self.lane.run(chain_keys, root, tokens, group.layout.chunk_tokens))
        return self.start_prewarm(group, root, tenant_number(request.tenant), chain, budget_bytes, ttl_ms)

    def start_prewarm(
        self, group: Group, root: bytes, tenant: int, chain: bytes, budget_bytes: int, ttl_ms: int
    ) -> int:
        """The same for chain keys. Raises Refused."""
        if not group.complete:
            raise Refused("engine_slices: not all slices of this engine are attached; try later")
        running = sum(job.state == "running" for job in self._jobs.values())
        if running >= MAX_RUNNING_JOBS:
            raise Refused(f"{running} prewarm jobs are running; try again when some have ended")
        job = Job(self._next_job, len(chain) // KEY_BYTES)
        self._next_job += 1
        self._jobs[job.number] = job
        if len(self._jobs) > MAX_JOBS:
            ended = (number for number, other in self._jobs.items() if other.state != "running")
            del self._jobs[next(ended)]
        self.supervisor.spawn(
            self._prewarm(
                job, group.packed_slices, len(group.slices), root, tenant, chain, budget_bytes, ttl_ms
            ),
            f"prewarm-{job.number}",
        )
        return job.number

    def job(self, number: int) -> dict[str, Any] | None:
        """Outcome of a prewarm so far; None when it is not remembered."""
        job = self._jobs.get(number)
        return None if job is None else job.document()

    async def clear(self, tier: str, tenant: str | None, *, wait: bool = False) -> Cleared:
        """Drop the chunks of one tenant or of all: nobody finds them any more when this returns.

        Bytes of L1 that are in use are free when the use ends; `wait`: return then, or after CLEAR_WAIT_S.
        """
        if tier != Tier.L1 and tenant is not None:
            raise BadRequest(
                "tenant: L2 can only be cleared as a whole; leave the tenant out", field="tenant"
            )
        tiers: dict[str, int] = {}
        kept = 0
        number = -1 if tenant is None else tenant_number(tenant)
        if tier in (Tier.L1, Tier.ALL):
            tiers["l1"], kept = await self._on_own_lane(self.pool.clear, number)
        if tier in (Tier.L2, Tier.ALL):
            tiers["l2"] = 0 if self.store is None else await self.store.clear()
        held, leased = await self._on_own_lane(self.pool.cleared_in_use)
        if wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLEAR_WAIT_S):
                    while held or leased:
                        await self._tick.wait()
                        held, leased = await self._on_own_lane(self.pool.cleared_in_use)
        cleared = Cleared(tiers, held, leased, kept)
        shown = "*" if tenant is None else tenant
        self._log.repeated(
            logging.INFO, f"cleared {tier} {shown}"[:200], "cleared",
            tier=tier, tenant=shown, **tiers, held=held, leased=leased, kept=kept,
        )  # fmt: skip
        return cleared

    async def _on_own_lane(self, work: Callable[..., tuple[int, int]], *arguments: int) -> tuple[int, int]:
        """For requests of clients: only one of these waits there at a time."""
        async with self._clearing:
            return await asyncio.shield(self.own_lane.run(work, *arguments))

    def stranded(self) -> list[dict[str, Any]]:
        """Sessions that ended unseen and keep extents in quarantine, since their device may still write."""
        return [] if self.attach is None else [_stranded_row(one) for one in self.attach.stranded()]

    async def clear_stranded(self, session: str) -> list[dict[str, Any]]:
        """Free what a stranded session keeps, or all of them with `session` "all"; those that were cleared.

        Raises BadRequest for a session that is not stranded.
        """
        if self.attach is None:
            raise Unavailable("the server is starting")
        try:
            chosen = None if session == "all" else [bytes.fromhex(session)]
            cleared = await self.attach.clear_stranded(chosen)
        except (ValueError, KeyError):
            raise BadRequest(
                f'session: {session!r:.80} is not stranded; name one that GET /v1/stranded lists, or "all"',
                field="session",
            ) from None
        for one in cleared:
            self._log.info("stranded_cleared", session=one.seen.session, kept_bytes=one.kept_bytes)
        return [_stranded_row(one) for one in cleared]

    def error_frame(self, seq: int, error: KvstrataError) -> bytes:
        """The reply that carries an error."""
        counters = self.counters.errors
        counters[error.code] = counters.get(error.code, 0) + 1
        return encode(
            Error(seq, self.epoch, error.code, error.message[:2000], error.field[:200], error.retryable)
        )

    def session(self, name: bytes) -> Session | None:
        """The outcomes of an attached process."""
        return self.sessions.get(name)

    async def _prewarm(
        self, job: Job, slices: bytes, n_slices: int, root: bytes, tenant: int, chain: bytes,
        budget_bytes: int, ttl_ms: int,
    ) -> None:  # fmt: skip
        deadline_s = self.clock.monotonic_s() + ttl_ms / 1000
        try:
            keys = await asyncio.shield(self.lane.run(storage_keys, chain, slices))
            job.l1_chunks = self.pool.peek(keys, n_slices)
            start = job.l1_chunks * n_slices * KEY_BYTES
            if self.prefetch is not None and start < len(keys):
                fetched = await self.prefetch.fetch(
                    keys[start:],
                    n_slices,
                    identity=root,
                    tenant=tenant,
                    parent=keys[start - n_slices * KEY_BYTES : start] if start else b"",
                    deadline_s=deadline_s,
                    budget_bytes=budget_bytes or None,
                )
                job.l2_chunks, job.reason = fetched.l2_chunks, fetched.reason
            elif start < len(keys):
                job.reason = str(MissReason.UNKNOWN_KEY)
        except Refused as error:
            job.reason = error.code
        finally:
            job.state = "done"

    def _group_of(self, model: str) -> Group:
        groups = self.peers.groups
        found = [group for group in groups if model in ("", group.layout.model)]
        if len({group.layout for group in found}) != 1:
            names = ", ".join(sorted({group.layout.model for group in groups})) or "none"
            raise BadRequest(
                f"model: {model!r} must name the one attached engine to load for; attached: {names}",
                field="model",
            )
        return next((group for group in found if group.complete), found[0])

    def _tenants(self) -> list[dict[str, Any]]:
        """L1 bytes by tenant; names where a quota or an attached process tells them."""
        names = self._tenant_names()
        return [
            {"tenant": names.get(number, f"#{number:08x}"), **numbers}
            for number, numbers in self.pool.stats()["tenants"].items()
        ]

    def _l2_tenants(self) -> list[dict[str, Any]]:
        """Known L2 bytes of the tenants that have a quota there, by adapter."""
        names = self._tenant_names()
        rows = self.store.tenants() if self.store is not None else []
        return [{**row, "tenant": names[row["tenant"]]} for row in rows]

    def _tenant_names(self) -> dict[int, str]:
        settings = self.settings
        names = {tenant_number(name): name for name in (*settings.quotas_gb, *settings.l2.quotas_gb)}
        for member in self.peers.members:
            names.update((i.tenant, i.request.tenant) for i in member.identities.values())
        return names

    def _numbers(self) -> dict[str, Any]:
        return {
            "pool": {name: value for name, value in self.pool.stats().items() if name != "tenants"},
            "sessions": {
                "attached": sum(not member.detached for member in self.peers.members),
                "detached": sum(member.detached for member in self.peers.members),
                "groups": len(self.peers.groups),
                "leases": len(self.leases),
                "leases_revoked": self.leases.n_revoked,
                "extents_being_written": len(self.in_flight),
                "tasks": len(self.supervisor),
                "absent_keys_remembered": len(self.explainer.keys),
            },
            **({"l2_store": self.store.stats()} if self.store is not None else {}),
            **({"l2_prefetch": self.prefetch.stats()} if self.prefetch is not None else {}),
            **{name: section() for name, section in self.extra_status.items()},
        }


def _stranded_row(one: Stranded) -> dict[str, Any]:
    seen = one.seen
    return {
        "session": seen.session.hex(),
        "group": seen.group.hex(),
        "pid": seen.pid,
        "row": seen.row,
        "kept_bytes": one.kept_bytes,
    }


LEFT_BY: dict[int, str] = {
    PoolEvent.CLEARED: "clear",
    PoolEvent.REMOVED: "an evict of the controller",
    PoolEvent.RETURNED: "its return (it was read from another instance, and p2p.keep is off)",
}
"""How explain calls what made a chunk leave L1, other than the eviction policy."""
