"""Quotas that change while the server runs: how much of L1 each tenant may have.

The quota of a tenant that shares the pool is a count.  An own pool's quota is memory: what one pool gives back another
one gets, so that all of them together never have more than L1.

    change ─▶ wanted ─▶ settle: pools that have too much give back ─▶ what is free goes to those that have too little

A pool cannot give back what its processes use at the moment; `settle` is called again until all have what is wanted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvstrata.errors import BadRequest, Refused
from kvstrata.memory.segment_settings import MIN_EXTENTS_BYTES
from kvstrata.native.pool import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.policy.processes import tenant_number
from kvstrata.process.lane import PoolLane
from kvstrata.server.own_pools import OwnPools


class Quotas:
    """Changes the quotas of tenants in L1. Belongs to the event loop; pools give memory back on the lane."""

    def __init__(self, pool: Pool, own: OwnPools, lane: PoolLane, *, pinned: bool = False) -> None:
        """`pool`: the shared one, which has what the own pools leave; `pinned`: no pool can give memory back."""
        self._pinned = pinned
        self._pool = pool
        self._own = own
        self._lane = lane
        self._wanted = {one: one.limit_bytes for one in own}
        self._l1_bytes = pool.limit_bytes + sum(self._wanted.values())
        self._settling = asyncio.Lock()
        self._log = EventLog("instance")
        self.owed_bytes = 0
        """Memory that pools still have to get, because others cannot give it back yet."""

    async def change(self, tenant: str, quota_bytes: int) -> dict[str, Any]:
        """Set the quota of a tenant until the server ends. Returns what the tenant may have now.

        Raises BadRequest for a quota that an own pool cannot have, Refused if memory cannot move; nothing has changed
        then.
        """
        pool = self._own.get(tenant)
        if pool is None:
            self._pool.set_quota(tenant_number(tenant), quota_bytes)
            self._log.info("quota_changed", tenant=tenant, quota_bytes=quota_bytes)
            return {"tenant": tenant, "quota_bytes": quota_bytes, "now_bytes": quota_bytes}
        quota_bytes -= quota_bytes % MIN_EXTENTS_BYTES
        self._check(tenant, pool, quota_bytes)
        self._wanted[pool] = quota_bytes
        await self.settle()
        now_bytes = pool.limit_bytes
        self._log.info(
            "quota_changed",
            tenant=tenant,
            quota_bytes=quota_bytes,
            now_bytes=now_bytes,
            owed_bytes=self.owed_bytes,
        )
        return {"tenant": tenant, "quota_bytes": quota_bytes, "now_bytes": now_bytes}

    async def settle(self) -> None:
        """Move memory between pools as far as it can be moved now."""
        async with self._settling:
            self.owed_bytes = await asyncio.shield(self._lane.run(self._move))

    def _move(self) -> int:
        """Let pools give back, then get. Returns the bytes that are still to be got."""
        left = self._l1_bytes - sum(self._wanted.values())
        wanted = {self._pool: min(left, self._pool.extents_bytes), **self._wanted}
        free = self._l1_bytes
        for pool, bytes_wanted in wanted.items():
            excess = pool.set_limit(min(bytes_wanted, pool.limit_bytes))
            free -= pool.limit_bytes + excess
        owed = 0
        for pool, bytes_wanted in wanted.items():
            more = min(bytes_wanted - pool.limit_bytes, max(free, 0))
            if more > 0:
                pool.set_limit(pool.limit_bytes + more)
                free -= more
            owed += bytes_wanted - pool.limit_bytes
        return owed

    def _check(self, tenant: str, pool: Pool, quota_bytes: int) -> None:
        if not MIN_EXTENTS_BYTES <= quota_bytes <= pool.extents_bytes:
            raise BadRequest(
                f"quota_gb: {quota_bytes} bytes, but the pool of {tenant!r:.80} may have {MIN_EXTENTS_BYTES} to "
                f"{pool.extents_bytes}; the most is set by tenants[].max_gb",
                field="quota_gb",
            )
        others = sum(wanted for one, wanted in self._wanted.items() if one is not pool)
        if others + quota_bytes + MIN_EXTENTS_BYTES > self._l1_bytes:
            raise BadRequest(
                f"quota_gb: {quota_bytes} bytes, but L1 has {self._l1_bytes}, of which other tenants' own pools have "
                f"{others} and the shared pool needs {MIN_EXTENTS_BYTES}; lower another quota first",
                field="quota_gb",
            )
        if quota_bytes != self._wanted[pool] and self._pinned:
            raise Refused(
                "quota_gb: an RDMA card has registered L1 so that peers can read it, and keeps all of its memory; "
                "change quotas_gb and start the server again, or set p2p.engine: off",
                field="quota_gb",
            )
        giving = pool if quota_bytes < self._wanted[pool] else self._pool
        pids = [row["pid"] for row in giving.rows() if row["registers_memory"]]
        if quota_bytes != self._wanted[pool] and pids:
            raise Refused(
                "quota_gb: a GPU has registered memory that would have to be given back, for process "
                f"{', '.join(map(str, pids[:8]))}; end these engines, or give them gpu_pin: false",
                field="quota_gb",
            )
