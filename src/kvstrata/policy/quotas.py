"""Counts the bytes that each tenant has in one L2 adapter, as far as this server knows. Decides only: no I/O, no clock.

A medium outlives the server and its keys name no tenant.  So only records that this server *knows* to be stored count:

    a record that it put, that a put found stored, or that it loaded    counts for the tenant, as the newest
    a record that the cap dropped, that was deleted, corrupt or gone    no longer counts

Records that were stored before the server's start and not used since do not count; the adapter's cap drops these first
(docs/decisions/0007-l2-quotas.md).

Invariants
1. Counted bytes plus the bytes of admitted puts never exceed the tenant's quota, except by records that were found or
   loaded, since those are stored already, and after a quota was set or lowered.
2. Each admitted put ends once, in `ended`.
3. At most `limit_keys` records are known; when one more is noted, the least recently used record of the same tenant is
   forgotten and no longer counts.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import NamedTuple

LIMIT_KEYS = 1 << 18
"""Most known records, at some 300 bytes each; only records of tenants with a quota are known."""
TRIM_SHARE = 16
"""A tenant at its quota is trimmed to 1/16 below it, so that not every put has to make room for itself."""


class _Known(NamedTuple):
    tenant: int
    length_bytes: int


class TenantLedger:
    """See the module. Tenants are named by their 32-bit number; tenants without a quota are not counted."""

    def __init__(self, quotas: Mapping[int, int], limit_keys: int = LIMIT_KEYS) -> None:
        self.quotas = dict(quotas)
        self._limit_keys = limit_keys
        self._known: dict[bytes, _Known] = {}
        # Not plain dicts, which find their first item only by stepping over all items deleted before it.
        self._order: dict[int, collections.OrderedDict[bytes, None]] = {
            tenant: collections.OrderedDict() for tenant in quotas
        }
        """Each tenant's records, the least recently used first."""
        self._there: collections.Counter[int] = collections.Counter()
        self._on_its_way: collections.Counter[int] = collections.Counter()

    def set_quotas(self, quotas: Mapping[int, int]) -> None:
        """Other quotas from now on. What a tenant has stored counts from the time at which it has a quota."""
        for tenant in self.quotas.keys() - quotas.keys():
            self.gone(list(self._order[tenant]))
            del self._order[tenant]
        for tenant in quotas.keys() - self.quotas.keys():
            self._order[tenant] = collections.OrderedDict()
        self.quotas = dict(quotas)

    def admit(self, tenant: int, key: bytes, length_bytes: int) -> bool:
        """Whether this record may be put now; if so, its bytes count until `ended`."""
        quota_bytes = self.quotas.get(tenant)
        new_bytes = 0 if key in self._known else length_bytes
        if quota_bytes is not None and new_bytes and self.used_bytes(tenant) + new_bytes > quota_bytes:
            return False
        self._on_its_way[tenant] += length_bytes
        return True

    def ended(self, tenant: int, key: bytes, length_bytes: int, there: bool) -> None:
        """Note that an admitted put has ended; `there`: the record is stored now."""
        self._on_its_way[tenant] -= length_bytes
        if not self._on_its_way[tenant]:
            del self._on_its_way[tenant]
        if there:
            self.found(tenant, key, length_bytes)

    def found(self, tenant: int, key: bytes, length_bytes: int) -> None:
        """Note that this record is stored, and has just been used."""
        if tenant not in self.quotas:
            return
        self.gone((key,))
        self._known[key] = _Known(tenant, length_bytes)
        self._order[tenant][key] = None
        self._there[tenant] += length_bytes
        if len(self._known) > self._limit_keys:
            self.gone((next(iter(self._order[tenant])),))

    def gone(self, keys: Iterable[bytes]) -> None:
        """Note that these records are not stored (any more)."""
        for key in keys:
            known = self._known.pop(key, None)
            if known is not None:
                del self._order[known.tenant][key]
                self._there[known.tenant] -= known.length_bytes

    def forget(self) -> None:
        """Note that no record is stored any more."""
        self._known.clear()
        self._there.clear()
        for order in self._order.values():
            order.clear()

    def used_bytes(self, tenant: int) -> int:
        """Bytes that count against the tenant's quota."""
        return self._there[tenant] + self._on_its_way[tenant]

    def to_leave(self, tenant: int, need_bytes: int, max_keys: int) -> list[bytes]:
        """A tenant's least recently used records, at most `max_keys`, whose deletion makes room for `need_bytes`.

        Their deletion frees a further 1/TRIM_SHARE of the quota.  Empty if no deletion is needed, or if none helps
        because the new record and the admitted puts alone exceed the quota.
        """
        quota_bytes = self.quotas.get(tenant)
        if quota_bytes is None or self._on_its_way[tenant] + need_bytes > quota_bytes:
            return []
        over_bytes = self.used_bytes(tenant) + need_bytes - quota_bytes
        if over_bytes <= 0:
            return []
        over_bytes = min(over_bytes + quota_bytes // TRIM_SHARE, self._there[tenant])
        leaving: list[bytes] = []
        for key in self._order[tenant]:
            if over_bytes <= 0 or len(leaving) == max_keys:
                break
            leaving.append(key)
            over_bytes -= self._known[key].length_bytes
        return leaving

    def validate(self) -> None:
        """Assert the invariants (tests call it after every step)."""
        there: collections.Counter[int] = collections.Counter()
        for tenant, order in self._order.items():
            for key in order:
                assert self._known[key].tenant == tenant
                there[tenant] += self._known[key].length_bytes
        assert sum(map(len, self._order.values())) == len(self._known)
        assert there == +self._there, "the sums are not those of the known records"
        assert all(count >= 0 for count in (*self._there.values(), *self._on_its_way.values()))
        assert len(self._known) <= self._limit_keys
