"""Each benchmark works: it runs at its smallest size, in a process of its own, and gives the figures that it names.

tests/vllm/test_benchmarks.py has the benchmarks that start real vLLM, tests/gpu/test_benchmarks.py those of GPUs.
"""

from __future__ import annotations

import importlib
import os

import pytest

from benchmarks.gateway import _cpu_s
from benchmarks.run import benchmarks
from tests.harness import bench
from tests.vllm.test_benchmarks import WITH_VLLM

pytestmark = pytest.mark.integration

OF_GPUS = {"gpu_copies", "gpu_pool"}
"""These need a GPU; tests/gpu/test_benchmarks.py tests their parts on a simulated driver."""
SMOKE = "lookup_rpc"
"""The only one that the gate runs: it starts a server, attaches, and writes figures as most of them do."""


def test_every_benchmark_can_be_imported() -> None:
    for module, function in benchmarks().values():
        assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))


def test_the_cpu_time_of_a_process_grows_with_the_least_work() -> None:
    before_s = _cpu_s(os.getpid())
    assert _cpu_s(os.getpid()) > before_s, "a benchmark divides by what a process has used meanwhile"


@pytest.mark.parametrize(
    "name",
    [
        name if name == SMOKE else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(set(benchmarks()) - set(WITH_VLLM) - OF_GPUS)
    ],
)
def test_a_benchmark_gives_its_figures(name: str) -> None:
    assert bench.small(name)
