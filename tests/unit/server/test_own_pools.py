"""Which own pools the settings may ask for, as far as no server is needed to tell."""

from __future__ import annotations

import asyncio
import importlib.util
import resource
from pathlib import Path

import msgspec
import pytest

from kvstrata.config.model import (
    ControllerLinkSettings,
    HttpSettings,
    L1Settings,
    P2pSettings,
    SecuritySettings,
    ServerSettings,
)
from kvstrata.config.tenant_model import TenantSettings
from kvstrata.errors import ConfigError, Refused
from kvstrata.memory.own_segments import OwnSize
from kvstrata.p2p.engines import ports
from kvstrata.policy.processes import TenantTokens
from kvstrata.process.lane import PoolLane
from kvstrata.server.admin.quotas import Quotas
from kvstrata.server.own_pools import OwnPools, own_sizes
from kvstrata.server.plan import plan
from kvstrata.types import GB
from tests.harness.l1 import L1

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


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An RDMA card in this machine, with a port that has no link."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    monkeypatch.setattr(ports, "RDMA", tmp_path)


def clustered(folder: Path, engine: str, **tenant: float) -> ServerSettings:
    """Settings of a member of a cluster with one own pool."""
    tokens = folder / "tenants"
    tokens.touch(0o600)
    tokens.write_text("token-of-tenant-0-0123 tenant-0\n")
    return msgspec.structs.replace(
        settings(1, **tenant)[0],
        l1=L1Settings(size_gb=1.0),
        security=SecuritySettings(tenants_file=str(tokens)),
        controller=ControllerLinkSettings(url="tcp://127.0.0.1:9"),
        p2p=P2pSettings(engine=engine, tcp=True),
        l2_adapters=[],
        http=HttpSettings(enabled=False),
    )


def test_where_a_card_registers_l1_own_pools_keep_their_size(tmp_path: Path, card: None) -> None:
    assert plan(clustered(tmp_path, "ucx"), {}).l1_is_pinned
    with pytest.raises(ConfigError, match="this host has an RDMA card") as caught:
        plan(clustered(tmp_path, "ucx", max_gb=0.04), {})
    assert caught.value.field == "tenants[0].max_gb"
    assert not plan(clustered(tmp_path, "off", max_gb=0.04), {}).l1_is_pinned


def test_without_a_card_own_pools_of_a_cluster_may_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "RDMA", tmp_path / "none")
    assert not plan(clustered(tmp_path, "ucx", max_gb=0.04), {}).l1_is_pinned


def test_own_pools_choose_no_engine_that_reaches_the_shared_pool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"set p2p\.engine to ucx or off") as caught:
        plan(clustered(tmp_path, "nixl"), {})
    assert caught.value.field == "p2p.engine"
    found = {"kvstrata.native.ucx", "nixl"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    assert plan(clustered(tmp_path, "auto"), {}).p2p_engine == "ucx"
    found.remove("kvstrata.native.ucx")
    assert plan(clustered(tmp_path, "auto"), {}).p2p_engine == ""


async def test_memory_that_a_card_has_registered_does_not_move() -> None:
    shared, green = L1(8 * MIB), L1(4 * MIB)
    lane = PoolLane(asyncio.get_running_loop())
    own = OwnPools({"green": green.pool})
    quotas = Quotas(shared.pool, own, lane, pinned=True)
    with pytest.raises(Refused, match="an RDMA card has registered L1"):
        await quotas.change("green", 2 * MIB)
    assert green.pool.limit_bytes == green.pool.extents_bytes
    assert (await quotas.change("green", green.pool.limit_bytes))["now_bytes"] == green.pool.extents_bytes
    assert (await quotas.change("other", 2 * MIB))["now_bytes"] == 2 * MIB, "a share of a pool is a count"
    lane.close()
