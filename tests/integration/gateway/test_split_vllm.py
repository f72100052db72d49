"""A gateway hands prompts over between scripted engines by the fields of vLLM's NixlConnector and MooncakeConnector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvstrata.config.gateway_model import GatewaySettings, TimeoutSettings
from kvstrata.gateway.envoy.configuration import Place, configuration
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, delta
from tests.integration.gateway.conftest import Start

pytestmark = pytest.mark.integration

ANSWERS = 8
"""Answers beside which a long prompt is computed elsewhere."""
RETURNED = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e\u00e9\n\x7f\U0001f600",
    "remote_port": 5,
}
NOBODY = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
ASKED = {"model": "m", "prompt": list(range(6_000)), "max_tokens": 7, "stream": False}


@pytest.mark.parametrize(
    ("split", "status", "ends", "told"),
    [
        ("nixl", 200, "length", 200),
        ("nixl", 500, "length", 200),
        ("mooncake", 200, "length", 200),
        ("mooncake", 500, "length", 200),
        ("mooncake", 200, "stop", 200),
        ("mooncake", 200, "length", 404),
    ],
)
async def test_what_an_engine_returns_goes_to_the_one_that_answers_and_its_failure_leaves_the_request_as_it_was(
    start: Start, session: aiohttp.ClientSession, split: str, status: int, ends: str, told: int
) -> None:
    """`ends`: why the prefilling engine's answer ended; `told`: what its bootstrap server answers."""
    got: dict[str, Any] = {}

    async def prefills(request: Got, line: Line) -> None:
        if request.target == "/query":
            await line.answer({"0": {"engine_id": "e0", "worker_addr": {}}}, told)
            return
        got["prefill"] = request.document
        params = {"kv_transfer_params": RETURNED} if split == "nixl" else {}
        await line.answer({"choices": [{"finish_reason": ends}], **params}, status)

    async def decodes(request: Got, line: Line) -> None:
        if request.document["stream"]:
            await line.begin()
            await line.event(delta("a"))
            await line.gone()
        else:
            got["decode"] = request.document
            await line.answer({"choices": []})

    async with ScriptedEngine(behaviour=prefills) as prefill, ScriptedEngine(behaviour=decodes) as decode:
        bootstrap = prefill.url.removeprefix("http://")
        rows = [
            {"url": prefill.url, "role": "prefill", "bootstrap": bootstrap},
            {"url": decode.url, "role": "decode"},
        ]
        gateway = await start(split=split, engines=rows)
        url = f"{gateway.url}/v1/completions"
        others = []
        for _ in range(ANSWERS):
            body = {"model": "m", "prompt": [1, 2, 3], "stream": True}
            others.append(await session.post(url, json=body))
            await others[-1].content.readany()
        await gateway.until(
            session,
            "all have their first token",
            lambda page: not any(row["waiting"] for row in page["engines"]),
        )
        async with session.post(url, json=ASKED) as response:
            assert response.status == 200
        assert got["prefill"]["max_tokens"] == 1 and got["prefill"]["prompt"] == ASKED["prompt"]
        params = got["prefill"]["kv_transfer_params"]
        transfer = params.pop("transfer_id", "")
        nobody = dict.fromkeys(NOBODY) if split == "nixl" else {}
        assert params == {"do_remote_decode": True, "do_remote_prefill": False, **nobody}
        theirs = {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer,
            "remote_engine_id": "e0", "remote_bootstrap_addr": f"http://{bootstrap}",
        }  # fmt: skip
        more = {"kv_transfer_params": RETURNED if split == "nixl" else theirs}
        assert got["decode"] == ASKED | (more if (status, ends, told) == (200, "length", 200) else {})
        for other in others:
            other.close()


@pytest.mark.parametrize("split", ["nixl", "mooncake", "kvstrata"])
def test_envoy_waits_for_a_choice_as_long_as_for_an_engine_if_a_prompt_is_computed_before_it(
    split: Any,
) -> None:
    settings = GatewaySettings(split=split, timeouts=TimeoutSettings(silence_s=77.0))
    made = json.dumps(configuration(settings, Place(Path("/tmp"), "127.0.0.1", 1), -1))
    silences = made.count('"77s"')
    plain = GatewaySettings(timeouts=TimeoutSettings(silence_s=77.0))
    usual = json.dumps(configuration(plain, Place(Path("/tmp"), "127.0.0.1", 1), -1)).count('"77s"')
    assert (silences > usual) == (split != "kvstrata")
