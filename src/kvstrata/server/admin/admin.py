"""The parts of an instance that the admin API uses, in one value."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstrata.native.pool import Pool
from kvstrata.observability.exposition import ServerCollector
from kvstrata.observability.logging import EventLog
from kvstrata.policy.processes import tenant_number
from kvstrata.server.admin.clear import Clearing
from kvstrata.server.admin.explain import Explaining
from kvstrata.server.admin.prewarm import Prewarms
from kvstrata.server.admin.status import StatusBoard
from kvstrata.server.admin.stranded import StrandedSessions
from kvstrata.server.l2.tier_control import TierControl
from kvstrata.server.readiness import Readiness


class Admin(NamedTuple):
    """The parts of one instance that the admin API uses."""

    pool: Pool
    readiness: Readiness
    board: StatusBoard
    collector: ServerCollector
    explain: Explaining
    prewarms: Prewarms
    clearing: Clearing
    stranded: StrandedSessions
    tiers: TierControl

    def change_quota(self, tenant: str, quota_bytes: int) -> dict[str, Any]:
        """Set how much of L1 a tenant may have until the server ends; returns the JSON that an admin gets."""
        self.pool.set_quota(tenant_number(tenant), quota_bytes)
        EventLog("instance").info("quota_changed", tenant=tenant, quota_bytes=quota_bytes)
        return {"tenant": tenant, "quota_bytes": quota_bytes}
