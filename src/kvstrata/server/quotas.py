"""How much of L1 each tenant may have: its quota, and what a controller has the others lend it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstrata.native.core import Pool
from kvstrata.observability.explain import TenantNumbers
from kvstrata.rpc.cluster_wire import MAX_SHARES, Shares, TenantShare
from kvstrata.server.processes import tenant_number

NO_QUOTA = -1
TenantForecast = tuple[int | None, int, float, list[tuple[float, float, float]]]
"""See Pool.forecasts."""


class Quotas:
    """The quotas of one pool. Belongs to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._of: dict[str, int] = {}
        """By tenant, in bytes."""
        self._lent = 0.0

    def set(self, tenant: str, quota_bytes: int) -> None:
        """A tenant's quota from now on; NO_QUOTA for none."""
        self._of.pop(tenant, None)
        if quota_bytes != NO_QUOTA:
            self._of[tenant] = quota_bytes
            quota_bytes += int(self._lent * max(0, self._pool.extents_bytes - quota_bytes))
        self._pool.set_quota(tenant_number(tenant), quota_bytes)

    def lend(self, lent: float) -> None:
        """Let each tenant use this part of what L1 has beyond its quota too."""
        self._lent = lent
        for tenant, quota_bytes in list(self._of.items()):
            self.set(tenant, quota_bytes)

    def shares(
        self, forecasts: Iterable[TenantForecast], counted: Mapping[int, TenantNumbers]
    ) -> Shares | None:
        """What followers are told, by the pool's forecasts and the tenants' numbers; None: nothing is known."""
        by_number, rows = {row[0]: row for row in forecasts}, []
        for tenant, quota_bytes in list(self._of.items())[:MAX_SHARES]:
            number = tenant_number(tenant)
            if (forecast := by_number.get(number)) and (numbers := counted.get(number)):
                _, used_bytes, part, sizes = forecast
                saved = {f"{size:g}": share(seconds) for size, _, seconds in sizes}
                found = sum(numbers.found.values())
                rows.append(
                    TenantShare(tenant, used_bytes, quota_bytes, share(part), saved, numbers.asked, found)
                )
        return Shares(self._lent, rows) if rows else None


def share(value: float) -> float:
    """The same, between 0 and 1."""
    return min(1.0, max(0.0, value))
