"""`kvstrata doctor --model` with real vLLM: how the connector sees a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import run_in_vllm

pytestmark = pytest.mark.vllm


def findings(folder: Path, model: Path) -> list[dict[str, Any]]:
    """The findings about vLLM and the model."""
    flags = ("--l1-size-gb", "1", "--l2-adapter", "none", "--no-http")
    printed = run_in_vllm(folder, "kvstrata", "doctor", "--json", "--model", str(model), *flags, status=None)
    found = json.loads(printed[printed.index("[\n") :])
    return [each for each in found if each["check"].startswith(("model", "vllm"))]


def test_a_model_is_described_as_the_connector_sees_it(small_model: Path, tmp_path: Path) -> None:
    config = json.loads((small_model / "config.json").read_text())
    vllm, model = findings(tmp_path, small_model)
    assert vllm["state"] == "ok"
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert model["state"] == "ok", model
    assert f"{layers} layers, {heads} KV heads of {size}, " in model["found"]
    token_bytes = layers * heads * size * 2 * (2 if "float16" in model["found"] else 4)
    assert f"L1 holds some {(1 << 30) // (256 * token_bytes)} chunks" in model["found"]


def test_a_folder_without_a_model_is_a_failure(vllm_python: Path, tmp_path: Path) -> None:
    [_, model] = findings(tmp_path / "state", tmp_path)
    assert model["state"] == "fail" and "vLLM cannot read it" in model["found"]
