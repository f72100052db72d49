"""Two engines with a server each and a controller: what one computed the other one hits through its memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.vllm_run import VllmProcess
from tests.vllm.conftest import EXACT, Rig, until
from tests.vllm.test_degraded import check_calls

pytestmark = pytest.mark.vllm

PROMPT, CACHED = 1_400, 1_280


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "5000"}
    with Cluster(tmp_path_factory.mktemp("cluster"), l1_mb=64, settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def rigs(
    cluster: Cluster, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Rig]]:
    with contextlib.ExitStack() as stack:
        rigs = []
        for server in cluster.servers:
            vllm = VllmProcess(
                small_model,
                tmp_path_factory.mktemp("p2p") / "vllm",
                # What is loaded by then is a hit; a slow machine gets the time for all of it.
                extra=server.connector_config(**{"kvstrata.lookup_timeout_ms": 30_000}),
                options={"dtype": EXACT, "max_num_batched_tokens": 2048, "max_model_len": 4096},
            )
            rigs.append(Rig(server, stack.enter_context(vllm)))
        yield rigs


def test_the_other_engine_hits_with_the_same_tokens(cluster: Cluster, rigs: list[Rig]) -> None:
    one, other = rigs
    prompt = one.fresh_prompt(PROMPT)
    cold = one.stored(prompt)
    cluster.until_known(0)
    read = other.vllm.generate(prompt)
    assert (read["cached_tokens"], read["tokens"]) == (CACHED, cold["tokens"])
    assert cluster.peer_records(1) == CACHED // 256
    in_l1 = other.again(prompt)
    assert (in_l1["cached_tokens"], in_l1["tokens"]) == (CACHED, cold["tokens"])
    assert cluster.peer_records(1) == CACHED // 256


def test_an_owner_killed_while_it_is_read_is_computed_with_the_same_tokens(
    cluster: Cluster, rigs: list[Rig]
) -> None:
    one, other = rigs
    prompts = [one.fresh_prompt(PROMPT) for _ in range(6)]
    cold = [one.stored(prompt)["tokens"] for prompt in prompts]
    cluster.until_known(0)
    other.vllm.ask("take_calls")
    before = cluster.peer_records(1)
    results: list[dict[str, Any]] = []

    def ask() -> None:
        results.extend(other.vllm.generate(prompt) for prompt in prompts)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: cluster.peer_records(1) > before or not asking.is_alive(), "reading the owner")
    cluster.servers[0].kill()
    asking.join()
    assert [result["tokens"] for result in results] == cold
    check_calls(other)
