"""A real gateway splits requests between two real engines, by vLLM's own connectors."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.harness import mooncake
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.http_read import read
from tests.harness.tokenizer_folder import chatml
from tests.harness.vllm_api import VllmApi
from tests.tools import fetch_wheels
from tests.tools.provision import ROOT
from tests.vllm.conftest import API_FLAGS, make_prompt, until

pytestmark = [pytest.mark.vllm, pytest.mark.long]

LONG, SHORT, ANSWERS = 1_500, 40, 8
FLAGS = (*API_FLAGS, "--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "2048")
LOADED = re.compile(r"^vllm:external_prefix_cache_hits_total\{[^}]*\} (\S+)", re.MULTILINE)
TRANSFER: dict[str, dict[str, Any]] = {
    "nixl": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
    "mooncake": {
        "kv_connector": "HostMooncake",
        "kv_connector_module_path": "tests.vllm.other_connectors",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    },
}


@pytest.fixture(params=TRANSFER)
def engines(
    request: pytest.FixtureRequest, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, list[dict[str, Any]], VllmApi]]:
    """The contract, the rows of a prefilling and a decoding engine, and the latter."""
    contract = request.param
    if contract == "nixl":
        wheels = fetch_wheels.environment(fetch_wheels.NIXL)
    else:
        wheels = mooncake.environment()
        monkeypatch.setattr(VllmApi, "fork_server", None)  # its libraries are found when a process starts
    words = chatml(tmp_path / "tokenizer", 32_000)  # first tokens are told by their text
    rows, started = [], []
    with contextlib.ExitStack() as stack:
        for role in ("prefill", "decode"):
            bootstrap = free_port()
            environment = {name: value for name, value in wheels.items() if name == "LD_LIBRARY_PATH"} | {
                "PYTHONPATH": f"{wheels['PYTHONPATH']}:{ROOT}",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
            }
            transfer = json.dumps(
                {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **TRANSFER[contract]}
            )
            api = VllmApi(
                small_model, tmp_path / role, extra=None, flags=(*FLAGS, "--kv-transfer-config", transfer),
                tokenizer=words, environment=environment,
            )  # fmt: skip
            started.append(stack.enter_context(api))
            rows.append({"url": api.url, "name": role, "role": role, "bootstrap": f"127.0.0.1:{bootstrap}"})
        yield contract, rows, started[-1]


def body(model: Path, prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": str(model), "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}


def ask(url: str, model: Path, prompt: list[int], **more: Any) -> list[int]:
    """The tokens of a completion."""
    wanted = body(model, prompt, max_tokens=4, return_token_ids=True, **more)
    raw = read(f"{url}/v1/completions", body=wanted, token="", timeout_s=240.0)
    return list(json.loads(raw)["choices"][0]["token_ids"])


def loaded(api: VllmApi) -> float:
    """Tokens that an engine has got from another one."""
    return sum(float(one) for one in LOADED.findall(api.get("/metrics")))


def test_a_long_prompt_is_computed_by_the_other_engine(
    engines: tuple[str, list[dict[str, Any]], VllmApi], small_model: Path, tmp_path: Path
) -> None:
    contract, rows, decode = engines
    long = iter(range(100, 200))
    with GatewayProcess(tmp_path / "gateway", [], split=contract, engines=rows) as gateway:

        def handed_over() -> Any:
            """Ask for a new long prompt; the prompt and the answer if the other engine has computed it."""
            prompt, before = make_prompt(next(long), LONG), loaded(decode)
            answer = ask(gateway.url, small_model, prompt)
            return (prompt, answer) if loaded(decode) >= before + LONG - 1 else None

        with contextlib.ExitStack() as stack:
            for seed in range(ANSWERS):  # answers that the prompt would delay
                line = HTTPConnection("127.0.0.1", gateway.port, timeout=240.0)
                stack.callback(line.close)
                endless = body(small_model, make_prompt(seed, SHORT), max_tokens=3_000, stream=True)
                head = {"content-type": "application/json"}
                line.request("POST", "/v1/completions", json.dumps(endless), head)
                assert line.getresponse().status == 200
            prompt, answer = until(handed_over, "a prompt that was handed over")
        assert answer == ask(decode.url, small_model, prompt, cache_salt="alone")
