"""`kvstrata doctor --model` with real vLLM: how the connector sees a model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def findings(python: Path, environment: dict[str, str], model: Path) -> list[dict[str, Any]]:
    """The findings about vLLM and the model."""
    flags = ("--l1-size-gb", "1", "--l2-adapter", "none", "--no-http")
    done = subprocess.run(
        [str(python), "-m", "kvstrata", "doctor", "--json", "--model", str(model), *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout[done.stdout.index("[\n") :]
    return [each for each in json.loads(printed) if each["check"].startswith(("model", "vllm"))]


def test_a_model_is_described_as_the_connector_sees_it(
    vllm_python: Path,
    vllm_model_folder: Callable[[str], Path],
    vllm_environment: dict[str, str],
) -> None:
    folder = vllm_model_folder("19m")
    config = json.loads((folder / "config.json").read_text())
    vllm, model = findings(vllm_python, vllm_environment, folder)
    assert vllm["state"] == "ok"
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert model["state"] == "ok", model
    assert f"{layers} layers, {heads} KV heads of {size}, " in model["found"]
    token_bytes = layers * heads * size * 2 * (2 if "float16" in model["found"] else 4)
    assert f"L1 holds some {(1 << 30) // (256 * token_bytes)} chunks" in model["found"]


def test_a_folder_without_a_model_is_a_failure(
    vllm_python: Path, vllm_environment: dict[str, str], tmp_path: Path
) -> None:
    [_, model] = findings(vllm_python, vllm_environment, tmp_path)
    assert model["state"] == "fail" and "vLLM cannot read it" in model["found"]
