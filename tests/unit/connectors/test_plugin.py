"""When the entry point makes the bare name LMCacheConnectorV1 ours, and when it leaves the name to LMCache."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvstrata.connectors.vllm import plugin

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registry(monkeypatch):
    """vLLM's registry of connectors, with its own entry for the name."""
    entries = {"LMCacheConnectorV1": lambda: "theirs", "NixlConnector": lambda: "nixl"}
    parts = FACTORY.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    sys.modules[FACTORY].KVConnectorFactory = SimpleNamespace(_registry=entries)
    return entries


def installed(monkeypatch, yes):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: object() if yes else None if name == "lmcache" else original(name),
    )


def test_without_lmcache_the_name_is_ours_and_the_log_says_so(registry, monkeypatch, caplog):
    installed(monkeypatch, False)
    monkeypatch.delenv("KVSTRATA_TAKEOVER", raising=False)
    with caplog.at_level(logging.INFO, "vllm.kvstrata"):
        plugin.register()
        plugin.register()
    assert registry["LMCacheConnectorV1"].kvstrata
    assert registry["NixlConnector"]() == "nixl"
    assert [r.message for r in caplog.records] == ["LMCacheConnectorV1 is provided by kvstrata"]


def test_an_installed_lmcache_keeps_its_name(registry, monkeypatch, caplog):
    installed(monkeypatch, True)
    monkeypatch.delenv("KVSTRATA_TAKEOVER", raising=False)
    with caplog.at_level(logging.INFO, "vllm.kvstrata"):
        plugin.register()
    assert registry["LMCacheConnectorV1"]() == "theirs"
    assert "KVSTRATA_TAKEOVER=1" in caplog.text


def test_takeover_wins_over_an_installed_lmcache(registry, monkeypatch):
    installed(monkeypatch, True)
    monkeypatch.setenv("KVSTRATA_TAKEOVER", "1")
    plugin.register()
    assert registry["LMCacheConnectorV1"].kvstrata


def test_an_unknown_takeover_value_is_logged_and_counts_as_no(registry, monkeypatch, caplog):
    installed(monkeypatch, True)
    monkeypatch.setenv("KVSTRATA_TAKEOVER", "please")
    with caplog.at_level(logging.WARNING, "vllm.kvstrata"):
        plugin.register()
    assert registry["LMCacheConnectorV1"]() == "theirs" and "please" in caplog.text
