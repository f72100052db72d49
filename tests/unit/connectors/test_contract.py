"""What a process says of the version of vLLM that it runs in; tests/vllm runs the versions themselves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvstrata.connectors.vllm.compat import contract


class KVConnectorOutput:
    """As vLLM's, with fields that only its annotations name."""

    finished_recving: set[str]


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM that has what the connector needs."""
    module = ModuleType("a_vllm.outputs")
    module.KVConnectorOutput = KVConnectorOutput
    monkeypatch.setitem(sys.modules, "a_vllm", ModuleType("a_vllm"))
    monkeypatch.setitem(sys.modules, "a_vllm.outputs", module)
    needed = {"a_vllm.outputs.KVConnectorOutput": ("finished_recving",)}
    monkeypatch.setattr(contract, "NEEDED", needed)
    return needed


def test_a_tested_version_that_has_all_names_is_used_without_a_word(vllm, caplog):
    assert contract.check_vllm(f"{contract.TESTED[0]}+cpu") and not caplog.messages


def test_an_untested_version_that_has_all_names_is_used_with_one_warning(vllm, caplog):
    assert contract.check_vllm("0.99.0")
    [line] = caplog.messages
    assert line.startswith("vLLM 0.99.0 is not among the versions")


@pytest.mark.parametrize("version", [contract.TESTED[0], "0.99.0"])
def test_one_warning_names_all_that_is_missing(vllm, caplog, version):
    vllm |= {
        "a_vllm.outputs.KVConnectorOutput": ("finished_recving", "gone"),
        "a_vllm.core.BlockPool": ("touch",),
    }
    assert not contract.check_vllm(version)
    [line] = caplog.messages
    assert "has no a_vllm.outputs.KVConnectorOutput.gone, a_vllm.core.BlockPool; use" in line
