"""Each benchmark works: it runs at its smallest size, in a process of its own, and gives the figures that it names.

The ones that start real vLLM are in tests/vllm/test_benchmarks.py, those of GPUs in tests/gpu/test_benchmarks.py.
"""

from __future__ import annotations

import pytest

from benchmarks.run import modules
from tests.harness import bench
from tests.vllm.test_benchmarks import WITH_VLLM

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", sorted(set(modules()) - set(WITH_VLLM) - bench.OF_GPUS))
def test_a_benchmark_gives_its_figures(name: str) -> None:
    assert bench.small(name)
