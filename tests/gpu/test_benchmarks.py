"""The benchmarks of GPUs work, and write down no figure of a simulated one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu, gpu_engine
from benchmarks.gpu import on_gpu
from kvstrata.cli.bench.serve import long_documents
from kvstrata.native.cuda import device_facts
from tests.harness.cuda_driver import ROOT, Gpu, environment, simulated
from tests.harness.gpu_kv import Device, Shape

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


@pytest.mark.integration
@simulated(delay_us=5)
def test_an_engines_traffic_is_timed_with_a_cache_and_without() -> None:
    device = Device()
    layers: list[int] = []
    workload = long_documents(2, 32, 8, 3, rounds=2, endpoints=1)
    found = gpu_engine.measure(
        device,
        "small",
        SMALL,
        workload,
        layers.append,
        pool_mb=256,
        chunk_tokens=16,
        num_blocks=32,
        block_tokens=8,
        budget_tokens=32,
        per_s=200.0,
        checks=True,
        more=on_gpu(device_facts(0)),
    )
    figures = {one["name"].removesuffix("_small").removeprefix("gpu_engine_"): one for one in found}
    assert {"ttft", "requests", "from_cache", "store_lag"} <= set(figures)
    assert figures["from_cache"]["value"] == pytest.approx(100 * 2 * 32 / (4 * 40))
    assert all(one["value"] > 0 for one in figures.values())
    assert figures["store_lag"]["stores"] > 0 and figures["ttft"]["gpu"] == "Simulated GPU 0"
    bare, cached = 4 * (40 + 2), 4 * (40 + 2) - 2 * 32
    assert sum(layers) == SMALL.layers * (bare + cached)


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
