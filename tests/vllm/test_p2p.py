"""Two engines with a server each on two hosts and a controller: what one computed the other one hits through its L1.

The hosts are network namespaces, with tcp between them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import network
from tests.harness.cluster import Cluster
from tests.harness.network import Network
from tests.harness.vllm_run import VllmProcess
from tests.vllm.conftest import EXACT, Rig, until
from tests.vllm.test_degraded import check_calls

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "-"),
]

PROMPT, CACHED = 1_400, 1_280
SETTINGS = {
    "UCX_TLS": "tcp",
    "KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "5000",
    "KVSTRATA_P2P_LOAD_TIMEOUT_MS": "30000",
}
READ_S = 8
"""How long a prompt takes over the slowed link."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, l1_mb=64, settings=SETTINGS, network=hosts) as made:
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
                # Chunks loaded by the deadline are hits; so long a slow machine may take for all of them.
                extra=server.connector_config(**{"kvstrata.lookup_timeout_ms": 30_000}),
                options={"dtype": EXACT, "max_num_batched_tokens": 2048, "max_model_len": 4096},
            )
            rigs.append(Rig(server, stack.enter_context(vllm)))
        yield rigs


def test_the_other_engine_hits_and_gives_the_same_tokens(cluster: Cluster, rigs: list[Rig]) -> None:
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


def test_a_prompt_whose_owner_is_killed_in_mid_read_is_computed_with_the_same_tokens(
    hosts: Network, cluster: Cluster, rigs: list[Rig]
) -> None:
    one, other = rigs
    prompt = one.fresh_prompt(PROMPT)
    cold = one.stored(prompt)
    cluster.until_known(0)
    pool = cluster.servers[0].get("/v1/status")["pool"]
    whole_bytes = CACHED // 256 * pool["bytes"]["ready"] // pool["entries"]["ready"]
    owner = hosts.hosts[0]
    owner.slow(whole_bytes // READ_S)
    other.vllm.ask("take_calls")
    before, results = owner.sent_bytes(), []
    asking = threading.Thread(target=lambda: results.append(other.vllm.generate(prompt)))
    asking.start()
    until(lambda: owner.sent_bytes() - before > whole_bytes // 2, "the first half of the prompt")
    cluster.servers[0].kill()
    assert owner.sent_bytes() - before < whole_bytes
    asking.join()
    assert results[0]["cached_tokens"] < CACHED
    assert results[0]["tokens"] == cold["tokens"]
    check_calls(other)
