"""The benchmarks of GPUs work, and write down no figure of a simulated one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.gpu import on_gpu
from kvstrata.native.cuda import device_facts
from tests.harness.cuda_driver import ROOT, Gpu, environment, simulated
from tests.harness.gpu_kv import Shape

pytestmark = [pytest.mark.integration, pytest.mark.long]

RESULTS = ROOT / "build" / "bench.json"
SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)


@simulated()
def test_the_copies_are_measured_against_bare_ones() -> None:
    figures = gpu.measure_copies(
        Gpu(), "small", SMALL, 64, chunks=(1, 2, 4), repeats=2, **on_gpu(device_facts(0))
    )
    assert [one["name"] for one in figures] == [
        f"gpu_{what}_small_b64" for what in ("store", "retrieve", "both")
    ]
    for one in figures:
        assert one["value"] > 0 and one["ratio"] > 0
    assert set(figures[0]["ratio_by_chunks"]) == {1, 2, 4} and set(figures[2]["ratio_by_chunks"]) == {4}


@pytest.mark.integration
@simulated()
def test_a_pool_is_pinned_and_chunks_go_through_it() -> None:
    found = gpu.measure_pool(Gpu(), SMALL, pool_mb=256, n_chunks=4, repeats=2, **on_gpu(device_facts(0)))
    figures = {one["name"]: one for one in found}
    wanted = {"gpu_attach", "gpu_pin_pool", "gpu_pool_store", "gpu_pool_retrieve", "gpu_one_chunk"}
    assert set(figures) == wanted
    assert figures["gpu_pin_pool"]["pool_mb"] >= 200
    assert all(one["value"] > 0 for one in figures.values())


def test_without_a_gpu_the_command_says_so_and_writes_nothing() -> None:
    before = RESULTS.read_bytes() if RESULTS.exists() else None
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "gpu_copies"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    why = "not run: needs an NVIDIA GPU: 'Simulated GPU 0' is the driver of the tests"
    assert why in done.stdout, done.stdout + done.stderr
    assert (RESULTS.read_bytes() if RESULTS.exists() else None) == before
