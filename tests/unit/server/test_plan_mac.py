"""server/plan.py: `p2p.mac` is refused where nobody could tell whose MACs they are, or where none can be computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.config.model import (
    ControllerLinkSettings,
    HttpSettings,
    L1Settings,
    P2pSettings,
    SecuritySettings,
    ServerSettings,
)
from kvstrata.errors import ConfigError
from kvstrata.server.plan import plan


def settings(*, insecure: bool = False, curve_file: str = "", engine: str = "ucx") -> ServerSettings:
    return ServerSettings(
        l1=L1Settings(size_gb=0.1),
        security=SecuritySettings(insecure=insecure),
        controller=ControllerLinkSettings(url="tcp://127.0.0.1:9", curve_file=curve_file),
        p2p=P2pSettings(engine=engine, mac=True),  # type: ignore[arg-type]
        l2_adapters=[],
        http=HttpSettings(host="none"),
    )


def test_a_cluster_without_keys_has_no_macs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the cluster has no keys") as caught:
        plan(settings(insecure=True), {})
    assert caught.value.field == "p2p.mac"
    # Nobody reads or is read, so nobody is misled.
    assert plan(settings(insecure=True, engine="off"), {}).p2p_engine == ""
