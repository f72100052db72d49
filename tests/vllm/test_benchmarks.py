"""The benchmarks that start real vLLM work, at their smallest size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import bench
from tests.harness.vllm_run import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.long]

WITH_VLLM = (
    "p2p_serve",
    "vllm_hit_ttft",
    "vllm_miss_overhead",
)


@pytest.mark.parametrize("name", WITH_VLLM)
def test_a_benchmark_gives_its_figures(name: str, vllm_python: Path) -> None:
    assert bench.small(name, VllmProcess.fork_server)
