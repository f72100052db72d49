"""When the entry point makes LMCache's names of connectors ours, and when it leaves them to LMCache."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvstrata.config.lmcache import CONNECTORS
from kvstrata.connectors.vllm import plugin

OURS = object()
MODULES = [module for modules in CONNECTORS.values() for module in modules]
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registry(monkeypatch):
    """vLLM's registry of connectors, with its own entry for the name."""
    entries = {name: lambda: "theirs" for name in ("LMCacheConnectorV1", "LMCacheMPConnector")}
    entries["NixlConnector"] = lambda: "nixl"
    parts = FACTORY.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    sys.modules["vllm"].__version__ = "0.32.0"
    sys.modules[FACTORY].KVConnectorFactory = SimpleNamespace(_registry=entries)
    ours = ModuleType("kvstrata.connectors.vllm.connector")
    ours.LMCacheConnectorV1 = OURS
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        del sys.modules[module]
    return entries


def installed(monkeypatch, yes):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: object() if yes else None if name == "lmcache" else original(name),
    )


def test_without_lmcache_the_names_are_ours_and_the_log_says_so(registry, monkeypatch, caplog):
    installed(monkeypatch, False)
    monkeypatch.delenv("KVSTRATA_TAKEOVER", raising=False)
    with caplog.at_level(logging.INFO, "vllm.kvstrata"):
        plugin.register()
        plugin.register()
    for name in ("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic", "LMCacheMPConnector"):
        assert registry[name]() is OURS
    assert registry["NixlConnector"]() == "nixl"
    assert [r.message for r in caplog.records] == [
        "LMCacheConnectorV1, LMCacheConnectorV1Dynamic, LMCacheMPConnector are provided by kvstrata"
    ]


def test_an_installed_lmcache_keeps_its_names(registry, monkeypatch, caplog):
    installed(monkeypatch, True)
    monkeypatch.delenv("KVSTRATA_TAKEOVER", raising=False)
    with caplog.at_level(logging.INFO, "vllm.kvstrata"):
        plugin.register()
    assert registry["LMCacheConnectorV1"]() == registry["LMCacheMPConnector"]() == "theirs"
    assert "LMCacheConnectorV1Dynamic" not in registry and not sys.modules.keys() & set(MODULES)
    assert "KVSTRATA_TAKEOVER=1" in caplog.text


def test_takeover_wins_over_an_installed_lmcache(registry, monkeypatch):
    installed(monkeypatch, True)
    monkeypatch.setenv("KVSTRATA_TAKEOVER", "1")
    plugin.register()
    assert registry["LMCacheConnectorV1"]() is registry["LMCacheMPConnector"]() is OURS
