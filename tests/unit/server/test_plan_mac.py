"""server/plan.py: `p2p.mac` is refused where nobody could tell whose MACs they are, or where none can be computed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
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
from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.server.plan import plan


def settings(*, insecure: bool = False, curve_file: str = "", engine: str = "ucx") -> ServerSettings:
    return ServerSettings(
        l1=L1Settings(size_gb=0.1),
        security=SecuritySettings(insecure=insecure),
        controller=ControllerLinkSettings(url="tcp://127.0.0.1:9", curve_file=curve_file),
        p2p=P2pSettings(engine=engine, mac=True),  # type: ignore[arg-type]
        l2_adapters=[],
        http=HttpSettings(enabled=False),
    )


def test_a_cluster_without_keys_has_no_macs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the cluster has no keys") as caught:
        plan(settings(insecure=True), {})
    assert caught.value.field == "p2p.mac"
    # Nobody reads or is read, so nobody is misled.
    assert plan(settings(insecure=True, engine="off"), {}).p2p_engine == ""


def test_the_key_of_a_user_and_key_files_are_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("secret " + "a" * 40 + "\n")
    assert plan(settings(), {}).settings.p2p.mac
    assert plan(settings(insecure=True, curve_file=str(keys)), {}).settings.p2p.mac


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def lacking(name: str) -> ModuleSpec | None:
        return None if name == "cryptography" else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    with pytest.raises(MachineLacks, match=r"pip install '\.\[codecs\]'") as caught:
        plan(settings(), {})
    assert caught.value.field == "p2p.mac"
