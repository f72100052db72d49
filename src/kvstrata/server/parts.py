"""The parts of an instance that need no file and no port. server/instance.py opens the others."""

from __future__ import annotations

import asyncio
import functools

from kvstrata.clock import Clock
from kvstrata.config.model import ServerSettings
from kvstrata.native.core import Pool
from kvstrata.observability.explain import Explainer, ServerNumbers, TenantNumbers, Trend
from kvstrata.observability.tracing import Tracer
from kvstrata.p2p.awaiting import AwaitedPeers
from kvstrata.p2p.medium import PeerReads
from kvstrata.patience import patience
from kvstrata.process.supervisor import PoolLane, Supervisor
from kvstrata.server.admin.clear import Clearing
from kvstrata.server.admin.prewarm import Prewarms
from kvstrata.server.admin.status import (
    ForecastNumbers,
    InstanceNumbers,
    PoolNumbers,
    SessionNumbers,
    StatusBoard,
    TenantRows,
    engines_section,
    processes_section,
)
from kvstrata.server.claims import Claims
from kvstrata.server.cluster.shared import SharedPrefixes
from kvstrata.server.housekeeping import PoolEvents
from kvstrata.server.plan import InstanceFacts
from kvstrata.server.processes import Processes, Readiness, TenantTokens, tenant_number
from kvstrata.server.recuts.recuts import Recuts
from kvstrata.server.requests.grants import Grants
from kvstrata.server.requests.requests import Requests
from kvstrata.tiers.fetch import TIER_PATIENCE_S, PrefetchLimits
from kvstrata.tiers.loads import PrefetchController
from kvstrata.tiers.puts import News, StoreController, StoreLimits
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tails import TailPuts
from kvstrata.types import GB

RECUTS_WAITING = 16
"""Maximum number of lookups that wait for a recut of their missing chunks; one recut runs at a time."""
IN_FLIGHT_SHARE = 8
"""The loads under way of one tier may have 1/8 of L1's bytes."""
BACKLOG_SHARE = 0.25
"""Maximum share of L1's bytes for chunks that wait for a put."""


class Parts:
    """All the parts of one instance that need no file and no port. The tiers are opened later."""

    def __init__(
        self,
        settings: ServerSettings,
        facts: InstanceFacts,
        pool: Pool,
        loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        *,
        clock: Clock,
        tiers: TierSet,
        news: News | None = None,
        tokens: TenantTokens,
        peer_tier: str,
        awaited: AwaitedPeers | None = None,
    ) -> None:
        """Set the quotas of tenants and make the parts.

        `news`: in a cluster, receives changes of the tiers' contents.  `peer_tier`: the tier that reads peers, ""
        without one. `awaited`: asks peers for chunks that their engines compute.
        """
        self.settings, self.facts, self.pool = settings, facts, pool
        self.loop, self.supervisor, self.clock = loop, supervisor, clock
        self.tiers, self.tokens = tiers, tokens
        self.lane = PoolLane(loop)
        """For clients' requests; refuses work when its queue is full, as the lane for recuts does."""
        self._recut_lane = PoolLane(loop, threads=1, queue=RECUTS_WAITING, name="kv-recut")
        self.own_lane = PoolLane(loop, threads=1, queue=None, name="kv-own")
        """For housekeeping, admins and controllers; never refuses work."""
        for tenant, gigabytes in settings.quotas_gb.items():
            self.set_quota(tenant, int(gigabytes * GB))

        # Parts that refer to no other part.
        self.counters = counters = ServerNumbers()
        for tenant in sorted(set(settings.quotas_gb).union(*tokens.sets)):
            counters.tenants[tenant_number(tenant)] = TenantNumbers(tenant)
        self.readiness = Readiness()
        self.frozen_by: set[str] = set()
        """Controllers that have ordered that no reserve is granted now, for a bounded time."""
        self.explainer = explainer = Explainer(counters, clock, settings.l1.eviction_policy)
        self.trend = Trend(counters, explainer, clock)
        endpoint = settings.observability.otlp_endpoint
        self.tracer = Tracer(endpoint, facts.instance_id) if endpoint else None

        # The attached processes and their grants.
        self.processes = Processes(pool, facts.epoch, tokens, self.readiness)
        self.grants = Grants(pool, counters, facts.epoch)
        self.awaited_peers = awaited
        self.shared = SharedPrefixes(clock) if news is not None else None
        """None without a cluster."""

        # The controllers that put to the tiers and load from them.
        self.store = StoreController(
            pool,
            tiers,
            StoreLimits(backlog_bytes=int(pool.extents_bytes * BACKLOG_SHARE)),
            explainer.put_skipped,
            news=news,
        )
        self.peer_reads = PeerReads(peer_tier, tiers)
        limits = PrefetchLimits(
            patience_s=patience(TIER_PATIENCE_S),
            in_flight_bytes=pool.extents_bytes // IN_FLIGHT_SHARE,
        )
        self.prefetch = PrefetchController(pool, tiers, limits, clock, self.store.dropped, self.store.found)
        self.tails = TailPuts(pool, self.store, tiers, clock, settings.l2.tails_after_s)
        self.prewarms = Prewarms(self)
        self.claims = Claims(self)
        self.events = PoolEvents(pool, explainer, clock, self.claims.break_damaged)

        # Parts that serve processes.
        self.recuts = Recuts(self, self._recut_lane)
        self.requests = Requests(self)

        # Operations of admins, which controllers use too.
        self.clearing = Clearing(self)
        self.tenants = TenantRows(self)
        self.board = self._board()

    def set_quota(self, tenant: str, quota_bytes: int) -> bool:
        """As Pool.set_quota, of the tenant of this name."""
        return self.pool.set_quota(tenant_number(tenant), quota_bytes)

    def close(self) -> None:
        """End the lanes."""
        for lane in (self.own_lane, self._recut_lane, self.lane):
            lane.close()

    def _board(self) -> StatusBoard:
        board = StatusBoard()
        board.put("instance", InstanceNumbers(self))
        board.put("pool", PoolNumbers(self.pool), ForecastNumbers(self))
        board.put("counters", self.counters)
        if self.tracer is not None:
            board.put("tracing", self.tracer)
        board.put_facts("trend", self.trend.section)
        board.put("sessions", SessionNumbers(self))
        board.put_facts("peers", functools.partial(processes_section, self.processes))
        board.put_facts("engines", functools.partial(engines_section, self.processes, self.grants))
        board.put("l2_store", self.store)
        board.put("tails", self.tails)
        board.put("l2_prefetch", self.prefetch)
        board.put("recuts", self.recuts)
        board.put("claims", self.claims)
        board.put("promises", self.grants.promises)
        board.put_facts("tenants", self.tenants.in_l1)
        board.put_facts("jobs", self.prewarms.documents)
        return board
