"""The parts of an instance that need no file, no port and no tier, and how they are put together.

    ground ─▶ tables ─▶ L2 ─▶ requests, admin ─▶ boundary

Each function makes the parts of one room from those of the rooms before it; every part is complete when it is
constructed.  server/instance.py calls the functions in this order and adds the parts that open files, ports and tiers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.clock import Clock
from kvstrata.config.model import ServerSettings
from kvstrata.native.pool import Pool
from kvstrata.observability.metrics import ServerCounters, TenantChunks
from kvstrata.p2p.borrowed import Borrowed
from kvstrata.p2p.peer_reads import PeerReads
from kvstrata.patience import patience
from kvstrata.policy.misses import Explainer
from kvstrata.policy.processes import ProcessTable, TenantTokens, tenant_number
from kvstrata.policy.reserved import ReservedBytes
from kvstrata.policy.savings import Savings
from kvstrata.process.lane import PoolLane
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.session import Sessions
from kvstrata.server.admin.clear import Clearing
from kvstrata.server.admin.prewarm import Prewarms
from kvstrata.server.admin.status import (
    StatusBoard,
    TenantRows,
    engines_section,
    instance_section,
    pool_section,
    processes_section,
)
from kvstrata.server.admin.trend import Trend
from kvstrata.server.chunk_history import ChunkHistory
from kvstrata.server.cluster.events import TierNews
from kvstrata.server.facts import MAX_SESSION_SHARE, InstanceFacts
from kvstrata.server.l2.gate import TIER_PATIENCE_S, PrefetchLimits
from kvstrata.server.l2.payload_kinds import PayloadKinds
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.puts import StoreLimits
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tails import TailPuts
from kvstrata.server.l2.tiers import TierSet
from kvstrata.server.pool_events import PoolEvents
from kvstrata.server.readiness import Readiness, StoreFreeze
from kvstrata.server.recuts.recuts import Recuts
from kvstrata.server.requests.boundary import Boundary
from kvstrata.server.requests.effects import Effects
from kvstrata.server.requests.handlers import Handlers
from kvstrata.server.requests.leases import InFlight, Leases
from kvstrata.server.requests.lookup import Lookups
from kvstrata.server.requests.plain import PlainClients
from kvstrata.server.requests.processes import Processes
from kvstrata.server.requests.reserve import Reserving
from kvstrata.server.requests.running import Replies, Running
from kvstrata.types import GB

IN_FLIGHT_SHARE = 8
"""One tier may be loading 1/8 of L1's bytes at a time."""
BACKLOG_SHARE = 0.25
"""Of L1, for chunks that wait for a put."""


class Ground(NamedTuple):
    """The parts that every later step uses: L1, lanes, the clock, and parts that refer to no other part."""

    settings: ServerSettings
    facts: InstanceFacts
    pool: Pool
    loop: asyncio.AbstractEventLoop
    supervisor: Supervisor
    lane: PoolLane
    """For requests of clients; refuses work when its queue is full."""
    recut_lane: PoolLane
    """For recuts; refuses work when its queue is full."""
    own_lane: PoolLane
    """For housekeeping, admins and controllers; never refuses work."""
    clock: Clock
    counters: ServerCounters
    readiness: Readiness
    freeze: StoreFreeze
    explainer: Explainer
    history: ChunkHistory
    savings: Savings
    trend: Trend
    board: StatusBoard


class Tables(NamedTuple):
    """The attached processes, and the leases and reservations that their requests left behind."""

    processes: ProcessTable
    payload_kinds: PayloadKinds
    sessions: Sessions
    leases: Leases
    in_flight: InFlight
    reserved: ReservedBytes
    replies: Replies


class L2(NamedTuple):
    """The tiers and the controllers that put to them and load from them."""

    tiers: TierSet
    store: StoreController
    tails: TailPuts
    prefetch: PrefetchController
    borrowed: Borrowed
    peer_reads: PeerReads
    events: PoolEvents


class Requests(NamedTuple):
    """The parts that serve processes, without the boundary."""

    effects: Effects
    running: Running
    recuts: Recuts
    hooks: Processes


class AdminParts(NamedTuple):
    """The admin's operations that clients and controllers may use too."""

    prewarms: Prewarms
    clearing: Clearing
    tenants: TenantRows


def lay_ground(
    settings: ServerSettings,
    facts: InstanceFacts,
    pool: Pool,
    loop: asyncio.AbstractEventLoop,
    supervisor: Supervisor,
    lane: PoolLane,
    recut_lane: PoolLane,
    own_lane: PoolLane,
    clock: Clock,
    explainer: Explainer,
) -> Ground:
    """Make the parts that refer to no other part, and set the quotas of tenants."""
    for tenant, gigabytes in settings.quotas_gb.items():
        pool.set_quota(tenant_number(tenant), int(gigabytes * GB))
    counters, readiness, board = ServerCounters(), Readiness(), StatusBoard()
    board.put("instance", functools.partial(instance_section, facts, readiness, clock), metrics=False)
    board.put("pool", functools.partial(pool_section, pool))
    board.put("counters", counters.as_dict, metrics=False)
    savings = Savings()
    trend = Trend(counters, savings, clock)
    board.put("trend", trend.section, metrics=False)
    return Ground(
        settings=settings,
        facts=facts,
        pool=pool,
        loop=loop,
        supervisor=supervisor,
        lane=lane,
        recut_lane=recut_lane,
        own_lane=own_lane,
        clock=clock,
        counters=counters,
        readiness=readiness,
        freeze=StoreFreeze(),
        explainer=explainer,
        history=ChunkHistory(explainer, counters, clock, settings.l1.eviction_policy),
        savings=savings,
        trend=trend,
        board=board,
    )


def make_tables(ground: Ground) -> Tables:
    """Make the tables, empty."""
    epoch = ground.facts.epoch
    processes = ProcessTable(epoch)
    replies = Replies(epoch, ground.counters)
    leases, in_flight = Leases(), InFlight()

    def numbers() -> dict[str, int]:
        return {
            "attached": sum(not process.detached for process in processes),
            "detached": sum(process.detached for process in processes),
            "groups": len(processes.groups),
            "leases": len(leases),
            "leases_revoked": leases.n_revoked,
            "extents_being_written": len(in_flight),
            "tasks": len(ground.supervisor),
            "absent_keys_remembered": len(ground.explainer.keys),
        }

    ground.board.put("sessions", numbers)
    ground.board.put("peers", functools.partial(processes_section, processes), metrics=False)
    ground.board.put("engines", functools.partial(engines_section, processes, leases), metrics=False)
    return Tables(
        processes=processes,
        payload_kinds=PayloadKinds(),
        sessions=Sessions(replies.error),
        leases=leases,
        in_flight=in_flight,
        reserved=ReservedBytes(MAX_SESSION_SHARE),
        replies=replies,
    )


def make_l2(ground: Ground, tiers: TierSet, news: Sequence[TierNews], *, peer_tier: str) -> L2:
    """Make the controllers of a set of tiers. `peer_tier`: name of the tier that reads peers, "" without one."""
    pool, settings, history = ground.pool, ground.settings, ground.history
    store = StoreController(
        pool,
        tiers,
        StoreLimits(backlog_bytes=int(pool.extents_bytes * BACKLOG_SHARE)),
        history.put_skipped,
        news=news,
    )
    borrowed = Borrowed(pool, ground.own_lane, ground.clock)

    def loaded(tier: str, keys: Sequence[bytes]) -> None:
        if tier == peer_tier and not settings.p2p.keep:
            borrowed.read(keys)
        store.found(tier, keys)

    peer_reads = PeerReads(peer_tier, tiers.stack, ground.counters)

    limits = PrefetchLimits(
        patience_s=patience(TIER_PATIENCE_S),
        in_flight_bytes=pool.extents_bytes // IN_FLIGHT_SHARE,
    )
    prefetch = PrefetchController(
        pool, tiers, limits, ground.clock, store.dropped, loaded, peer_reads.scatter
    )
    tails = TailPuts(pool, store, tiers, ground.clock, settings.l2.tails_after_s)
    ground.board.put("l2_store", store.stats)
    ground.board.put("tails", tails.stats)
    ground.board.put("l2_prefetch", prefetch.stats)
    return L2(
        tiers=tiers,
        store=store,
        tails=tails,
        prefetch=prefetch,
        borrowed=borrowed,
        peer_reads=peer_reads,
        events=PoolEvents(pool, history, store, news, ground.clock),
    )


def make_requests(ground: Ground, tables: Tables, l2: L2, tokens: TenantTokens) -> Requests:
    """Make the parts that keep the effects of requests, run requests, and follow attached processes."""
    settings = ground.settings
    for tenant in sorted(set(settings.quotas_gb).union(*tokens.sets)):
        ground.counters.tenants[tenant_number(tenant)] = TenantChunks(tenant)
    effects = Effects(
        ground.pool,
        tables.sessions,
        tables.leases,
        tables.in_flight,
        ground.counters,
        ground.facts.epoch,
    )
    running = Running(ground.loop, ground.supervisor, tables.sessions, effects, tables.replies)
    recuts = Recuts(
        ground.recut_lane, ground.clock, l2.tiers, l2.prefetch, ground.pool, enabled=settings.l1.recut
    )
    ground.board.put("recuts", recuts.status)
    hooks = Processes(
        tables.processes,
        tables.payload_kinds,
        tables.sessions,
        effects,
        running,
        tokens,
        ground.readiness,
        recuts,
    )
    return Requests(effects, running, recuts, hooks)


def make_admin(ground: Ground, tables: Tables, l2: L2) -> AdminParts:
    """Make prewarms and clear."""
    prewarms = Prewarms(
        tables.processes,
        ground.pool,
        ground.lane,
        l2.prefetch,
        ground.clock,
        ground.supervisor,
    )
    tenants = TenantRows(ground.settings, tables.processes, ground.pool)
    ground.board.put("tenants", tenants.in_l1, metrics=False)
    ground.board.put("jobs", prewarms.documents, metrics=False)
    return AdminParts(
        prewarms,
        Clearing(ground.pool, ground.own_lane, l2.store, l2.events),
        tenants,
    )


def make_boundary(
    ground: Ground, tables: Tables, l2: L2, requests: Requests, tokens: TenantTokens
) -> Boundary:
    """Make the boundary, which answers frames."""
    facts, pool, counters = ground.facts, ground.pool, ground.counters
    lookups = Lookups(
        pool=pool,
        lane=ground.lane,
        clock=ground.clock,
        processes=tables.processes,
        effects=requests.effects,
        in_flight=tables.in_flight,
        tiers=l2.tiers,
        prefetch=l2.prefetch,
        store=l2.store,
        tails=l2.tails,
        recuts=requests.recuts,
        events=l2.events,
        explainer=ground.explainer,
        savings=ground.savings,
        counters=counters,
        epoch=facts.epoch,
        policy=ground.settings.l1.eviction_policy,
    )
    reserving = Reserving(
        pool,
        ground.lane,
        tables.processes,
        tables.sessions,
        tables.in_flight,
        ground.freeze,
        ground.history,
        ground.explainer.identities,
        l2.store,
        l2.tails,
        ground.savings,
        ground.clock,
        counters,
        facts.epoch,
        tables.reserved,
    )
    handlers = Handlers(
        epoch=facts.epoch,
        pool=pool,
        processes=tables.processes,
        sessions=tables.sessions,
        leases=tables.leases,
        effects=requests.effects,
        counters=counters,
    )
    return Boundary(
        handlers=handlers,
        reserving=reserving,
        lookups=lookups,
        processes=tables.processes,
        sessions=tables.sessions,
        effects=requests.effects,
        running=requests.running,
        replies=tables.replies,
        plain=PlainClients(pool, tokens, counters, facts.epoch),
        counters=counters,
    )
