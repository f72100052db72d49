"""server/plan.py: the memory that a server takes, and what moves bytes between instances."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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
from kvstrata.errors import ConfigError, MachineUnfit
from kvstrata.memory import segment_settings
from kvstrata.memory.segment_settings import MemoryLimit
from kvstrata.server import plan as server_plan
from kvstrata.server.plan import HOST_BYTES, SERVER_BYTES, plan

MIB = 1 << 20
HOSTED = {"type": "fs", "base_path": "/nowhere", "isolation": "process"}
CODED = {"type": "fs", "base_path": "/nowhere", "codec": "zstd", "codec_staging_mb": 64}


def settings(*adapters: dict[str, Any], l1_mb: int = 512) -> ServerSettings:
    given = {"l1": {"size_gb": l1_mb / 1024}, "l2_adapters": list(adapters)}
    return msgspec.json.decode(json.dumps(given), type=ServerSettings)


@pytest.mark.parametrize(
    ("adapters", "beside_bytes"),
    [
        ((), SERVER_BYTES),
        ((HOSTED,), SERVER_BYTES + HOST_BYTES),
        ((CODED,), SERVER_BYTES + 64 * MIB),
        ((HOSTED, HOSTED, CODED), SERVER_BYTES + 2 * HOST_BYTES + 64 * MIB),
    ],
    ids=["server", "host", "staging", "hosts and staging"],
)
def test_index_hosts_staging_and_interpreter_count_against_the_memory_limit(
    monkeypatch: pytest.MonkeyPatch, adapters: tuple[dict[str, Any], ...], beside_bytes: int
) -> None:
    wanted, limit = settings(*adapters), 0
    monkeypatch.setattr(segment_settings, "memory_limit", lambda: MemoryLimit(limit, "the limit"))
    l1_bytes = 512 * MIB
    limit = l1_bytes + beside_bytes
    with pytest.raises(
        MachineUnfit, match=r"with its index and the server's processes, but the limit is"
    ) as lacks:
        plan(wanted, os.environ)
    assert lacks.value.message.endswith("set --l1-size-gb to 0.49 or less"), "what fits"
    limit += 2 * MIB + 512 * MIB // (64 << 10) * 144
    assert plan(wanted, os.environ).extents_bytes == l1_bytes


def of_cluster(
    *, insecure: bool = False, curve_file: str = "", engine: str = "auto", seal: bool = True
) -> ServerSettings:
    return ServerSettings(
        l1=L1Settings(size_gb=0.1),
        security=SecuritySettings(insecure=insecure),
        controller=ControllerLinkSettings(url="tcp://127.0.0.1:9", curve_file=curve_file),
        p2p=P2pSettings(engine=engine, seal=seal),  # type: ignore[arg-type]
        l2_adapters=[],
        http=HttpSettings(host="none"),
    )


def test_nobody_is_misled_by_a_seal_that_protects_nothing(tmp_path: Path) -> None:
    for settings, why in (
        (of_cluster(insecure=True), "the cluster has no keys"),
        (of_cluster(engine="nixl"), "has no effect with p2p.engine nixl"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            plan(settings, {})
        assert caught.value.field == "p2p.seal"
    # Nobody reads or is read, so nobody is misled.
    assert plan(of_cluster(insecure=True, engine="off"), {}).p2p_engine is None


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("nixl", [False, True])
@pytest.mark.parametrize("seal", [False, True])
def test_without_a_card_and_without_nixl_owners_send_and_the_reason_is_told(monkeypatch, card, nixl, seal):
    monkeypatch.setattr(server_plan, "has_rdma_card", lambda: card)
    monkeypatch.setattr(
        server_plan.importlib.util, "find_spec", lambda name: object() if nixl or name != "nixl" else None
    )
    found = plan(of_cluster(seal=seal), {}).p2p_engine
    assert found is not None
    assert found.name == ("nixl" if card and nixl and not seal else "tcp")
    assert found.why.startswith(f"{found.name}, since ") and "RDMA card" in found.why
