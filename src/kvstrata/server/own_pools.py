"""The pools of tenants that have one of their own: their memory is mapped by no other tenant's processes.

Every process whose token opens such a tenant is attached to that tenant's pool (memory/attach/server.py), and to no
other; `EngineGroup.own_pool` names it.  All other processes share one pool.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvstrata.config.model import ServerSettings
from kvstrata.config.tenant_model import TenantSettings
from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.memory.own_segments import OwnSize
from kvstrata.memory.segment_settings import MIN_EXTENTS_BYTES
from kvstrata.native.pool import Pool
from kvstrata.policy.processes import TenantTokens, tenant_number
from kvstrata.storage.base import Capabilities
from kvstrata.storage.entry import TierConfig
from kvstrata.types import GB

DESCRIPTORS_EACH = 7
"""Descriptors of the server for one pool."""
MOST_DESCRIPTORS = 65_536
"""The server raises its limit of descriptors up to this, if it may (process/lifecycle.py)."""


class OwnPools:
    """The pools by tenant. They stay the same while the server runs; their segments belong to the caller."""

    def __init__(self, pools: Mapping[str, Pool] | None = None) -> None:
        self._pools = dict(pools or {})
        self._by_number = {tenant_number(tenant): pool for tenant, pool in self._pools.items()}
        self._tenants = {pool: tenant for tenant, pool in self._pools.items()}

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    def get(self, tenant: str) -> Pool | None:
        """The pool of a tenant; None: its chunks are in the shared pool."""
        return self._pools.get(tenant)

    def items(self) -> Iterable[tuple[str, Pool]]:
        """Tenants and their pools, in a fixed order."""
        return self._pools.items()

    def of_number(self, number: int) -> Pool | None:
        """As `get`, by the number of a tenant (policy.processes.tenant_number)."""
        return self._by_number.get(number)

    def tenant_of(self, pool: Pool) -> str:
        """The tenant whose pool this is."""
        return self._tenants[pool]

    def section(self) -> list[dict[str, Any]]:
        """The section `own_pools` of the status: for each pool its tenant, and what the section `pool` says."""
        return [
            {"tenant": tenant, **{name: value for name, value in pool.stats().items() if name != "tenants"}}
            for tenant, pool in self._pools.items()
        ]


def own_sizes(
    settings: ServerSettings, tokens: TenantTokens, l1_bytes: int, alignment: int
) -> dict[str, OwnSize]:
    """The size of each own pool by tenant; the rest of `l1_bytes` is the shared pool's. Raises ConfigError."""
    check_tokens(settings, tokens)
    sizes: dict[str, OwnSize] = {}
    names = [tenant.name for tenant in settings.tenants]
    for number, tenant in enumerate(settings.tenants):
        path = f"tenants[{number}]"
        if tenant.name in names[:number]:
            raise ConfigError(
                f"{path}.name: {tenant.name!r:.80} is named twice; remove one of the two",
                field=f"{path}.name",
            )
        if tenant.pool == "own":
            _check_company(settings, f"{path}.pool")
            sizes[tenant.name] = _size(settings, tenant, path, alignment)
        elif tenant.max_gb is not None:
            raise ConfigError(
                f"{path}.max_gb: {tenant.max_gb:g}, but its pool is shared, where a quota can be raised without it; "
                "remove it, or choose pool: own",
                field=f"{path}.max_gb",
            )
    _check_descriptors(len(sizes))
    taken = sum(size.quota_bytes for size in sizes.values())
    if sizes and taken + MIN_EXTENTS_BYTES > l1_bytes:
        raise ConfigError(
            f"quotas_gb: the tenants' own pools have {taken} bytes together, L1 has {l1_bytes}, of which the shared "
            f"pool needs {MIN_EXTENTS_BYTES}; lower quotas, or raise --l1-size-gb",
            field="quotas_gb",
        )
    return sizes


def check_tokens(settings: ServerSettings, tokens: TenantTokens) -> None:
    """Raises ConfigError unless each own pool's tenant has a token, and no token opens it together with others."""
    for number, tenant in enumerate(settings.tenants):
        if tenant.pool == "own":
            _check_tokens(tokens, tenant.name, f"tenants[{number}].pool")


def refuse_hosts(own: OwnPools, config: TierConfig, capabilities: Capabilities) -> None:
    """Raises ConfigError for a tier that cannot reach the chunks of own pools."""
    registers_memory = capabilities.wants_registered_memory and not capabilities.registers_own_pools
    if own and (config.isolated or registers_memory):
        raise config.recipe.place.refused(
            "type" if registers_memory else "isolation",
            config.entry.get("type") if registers_memory else "process",
            "it reaches the shared pool alone, and tenants with pool: own have others; choose another adapter, or "
            "pool: shared for all tenants",
        )


def _check_company(settings: ServerSettings, field: str) -> None:
    """Raises ConfigError for settings that own pools cannot be combined with."""
    if settings.l1.use_hugepages:
        raise ConfigError(
            f"{field}: own, but l1.use_hugepages is set, which only the shared pool can have; leave it out, or choose "
            "pool: shared",
            field=field,
        )


def _check_tokens(tokens: TenantTokens, name: str, field: str) -> None:
    """Raises ConfigError unless there is a token for this tenant, and none opens it together with others."""
    opening = [tenants for tenants in tokens.sets if name in tenants]
    if not opening:
        raise ConfigError(
            f"{field}: own, but no token of security.tenants_file opens {name!r:.80}; add a line `TOKEN {name:.80}`",
            field=field,
        )
    for tenants in opening:
        if len(tenants) > 1:
            others = ", ".join(sorted(tenants - {name}))
            raise ConfigError(
                f"{field}: own, but a token of security.tenants_file opens {name!r:.80} and {others:.200}; a process "
                "maps one pool, so give this tenant a token of its own",
                field=field,
            )


def _check_descriptors(count: int) -> None:
    """Raises MachineLacks if this many pools would take most of the descriptors that the server can have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    there = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    needed = count * DESCRIPTORS_EACH
    if needed > there * 3 // 4:
        raise MachineLacks(
            f"tenants: {count} own pools need {needed} descriptors of the {there} that this process may have, and "
            "clients need a quarter of them; raise the limit (`ulimit -Hn`, LimitNOFILE of systemd), or choose pool: "
            "shared for some",
            field="tenants",
        )


def _size(settings: ServerSettings, tenant: TenantSettings, path: str, alignment: int) -> OwnSize:
    gigabytes = settings.quotas_gb.get(tenant.name)
    if gigabytes is None:
        raise ConfigError(
            f"{path}.pool: own, but quotas_gb has no {tenant.name!r:.80}; it is the size of the pool, so set it",
            field=f"{path}.pool",
        )
    quota_bytes = round(gigabytes * GB) & ~(alignment - 1)
    if quota_bytes < MIN_EXTENTS_BYTES:
        raise ConfigError(
            f"quotas_gb: {gigabytes:g} for {tenant.name!r:.80} makes an own pool of {quota_bytes} bytes, the least is "
            f"{MIN_EXTENTS_BYTES}; raise it",
            field="quotas_gb",
        )
    if tenant.max_gb is None:
        return OwnSize(quota_bytes, quota_bytes)
    most_bytes = round(tenant.max_gb * GB) & ~(alignment - 1)
    if most_bytes < quota_bytes:
        raise ConfigError(
            f"{path}.max_gb: {tenant.max_gb:g} is less than the tenant's {gigabytes:g} in quotas_gb; raise it, or "
            "leave it out",
            field=f"{path}.max_gb",
        )
    return OwnSize(quota_bytes, most_bytes)
