"""A gateway that begins to listen late learns what a real engine's own cache has from before its kept batches."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.residency.sources import Source
from tests.harness.daemon import free_port
from tests.harness.vllm_api import VllmApi
from tests.vllm.conftest import API_FLAGS, make_prompt, until, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.long]

KEPT = 12
"""Batches that the engine sends again."""


@pytest.fixture
def place() -> Source:
    """Where the engine publishes."""
    return Source(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")


@pytest.fixture
def api(server, small_model, tmp_path, vllm_python, place) -> Iterator[VllmApi]:
    """An engine with our connector that keeps its last few batches only."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": place.endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": place.replay.replace("127.0.0.1", "*"),
        "buffer_steps": KEPT,
    }
    flags = (*API_FLAGS, "--enable-prefix-caching", "--kv-events-config", json.dumps(events))
    with VllmApi(small_model, tmp_path / "vllm", extra=server.connector_config(), flags=flags) as api:
        yield api


def heard(place: Source, prompts: list[list[int]]) -> tuple[list[int], dict[str, Any]]:
    """The tokens of each prompt that a gateway, which begins to listen now, takes for cached; and what it heard."""
    residency = Residency(time.monotonic)
    try:
        residency.watch("engine", place)
        until(lambda: residency.page()["engine"]["phase"] == "in_order", "hearing what is sent again")
        found = [residency.known(Prompt(array("I", prompt))).get("engine", 0) for prompt in prompts]
        return found, residency.page()["engine"]
    finally:
        residency.close()


def test_a_late_gateway_learns_what_was_stored_before_the_kept_batches(api, place):
    common = make_prompt(1, 300)
    prompts = [common + make_prompt(seed, 200 * seed) for seed in (2, 3, 4)]
    for prompt in prompts:
        api.complete(prompt, max_tokens=1)
    for seed in range(5, 9):
        api.complete(make_prompt(seed, 20), max_tokens=40)  # nothing of it is stored, but time goes by
    for seed in range(9, 20):
        api.complete(make_prompt(seed, 150), max_tokens=2)
    found, page = heard(place, [*prompts, make_prompt(99, 500)])
    assert not page["whole"], "the engine has kept everything"
    assert found == [*map(whole_blocks, map(len, prompts)), 0]
    assert page["malformed"] == page["gaps"] == 0
