"""Which own pools the settings may ask for, as far as no server is needed to tell."""

from __future__ import annotations

import resource

import pytest

from kvstrata.config.model import ServerSettings
from kvstrata.config.tenant_model import TenantSettings
from kvstrata.errors import ConfigError
from kvstrata.memory.own_segments import OwnSize
from kvstrata.policy.processes import TenantTokens
from kvstrata.server.own_pools import own_sizes
from kvstrata.types import GB

MIB = 1 << 20


def settings(count: int, **more: float) -> tuple[ServerSettings, TenantTokens]:
    """Settings of this many tenants with own pools of 16 MiB, and a token for each."""
    names = [f"tenant-{number}" for number in range(count)]
    return (
        ServerSettings(
            quotas_gb=dict.fromkeys(names, 1 / 64),
            tenants=[TenantSettings(name=name, pool="own", **more) for name in names],
        ),
        TenantTokens({f"token-of-{name}-0123": frozenset({name}) for name in names}),
    )


def test_sizes_are_whole_steps_of_the_alignment() -> None:
    found = own_sizes(*settings(1, max_gb=0.0401), GB, MIB)
    assert found == {"tenant-0": OwnSize(16 * MIB, 41 * MIB)}


def test_more_pools_than_the_descriptors_suffice_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    assert len(own_sizes(*settings(100), 4 * GB, MIB)) == 100
    with pytest.raises(ConfigError, match="110 own pools need 770 descriptors of the 1024") as caught:
        own_sizes(*settings(110), 4 * GB, MIB)
    assert caught.value.field == "tenants"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    assert len(own_sizes(*settings(1000), 32 * GB, MIB)) == 1000


@pytest.mark.parametrize(
    ("pool", "most", "says"),
    [
        ("own", 0.01, "tenants[0].max_gb: 0.01 is less than the tenant's 0.015625 in quotas_gb"),
        ("shared", 0.01, "tenants[0].max_gb: 0.01, but its pool is shared"),
    ],
)
def test_a_growth_bound_that_means_nothing_is_refused(pool: str, most: float, says: str) -> None:
    wanted, tokens = settings(1)
    wanted = ServerSettings(
        quotas_gb=wanted.quotas_gb,
        tenants=[TenantSettings(name="tenant-0", pool=pool, max_gb=most)],  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError) as caught:
        own_sizes(wanted, tokens, GB, MIB)
    assert says in caught.value.message and caught.value.field == "tenants[0].max_gb"
