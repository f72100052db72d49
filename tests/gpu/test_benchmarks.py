"""The benchmarks of GPUs work, and write down no figure of a simulated one."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from benchmarks import gpu_copies, gpu_pool
from benchmarks.common import NotHere
from benchmarks.gpu import Shape
from tests.harness.cuda_driver import ROOT, Gpu, environment, simulated

RESULTS = ROOT / "build" / "bench.json"
SMALL = Shape(layers=2, token_bytes=64)


@simulated()
def test_the_copies_are_measured_against_bare_ones() -> None:
    figures = gpu_copies.measure(Gpu(), "small", SMALL, 64, chunks=(1, 2, 4), repeats=2)
    assert [one["name"] for one in figures] == [
        f"gpu_{what}_small_b64" for what in ("store", "retrieve", "both")
    ]
    for one in figures:
        assert one["value"] > 0 and one["ratio"] > 0
    assert set(figures[0]["ratio_by_chunks"]) == {1, 2, 4} and set(figures[2]["ratio_by_chunks"]) == {4}


@simulated(delay_us=200)
def test_a_load_is_timed_against_the_layers_that_wait_for_it() -> None:
    gpu = Gpu()
    stream, target, source = gpu.stream(), gpu.allocate(4096), ctypes.c_void_p()
    gpu.call("cuMemHostAlloc", ctypes.byref(source), ctypes.c_size_t(4096), 0)
    copies = gpu_copies.Copies(gpu, SMALL, 64, 4)
    layers = []

    def layer() -> None:
        assert source.value is not None
        gpu.copy_later(target, source.value, 4096, stream)
        layers.append(stream)

    shares, parts = gpu_copies.hidden(copies, stream, layer, lambda: gpu.synchronize(stream), 4, 3)
    assert len(shares) == 3
    assert set(parts) == {"load_ms", "forward_ms", "both_ms"} and min(parts.values()) > 0
    assert len(layers) == (1 + 3) * 2 * SMALL.layers
    copies.close()


@pytest.mark.integration
@simulated()
def test_a_pool_is_pinned_and_chunks_go_through_it() -> None:
    found = gpu_pool.measure(Gpu(), SMALL, pool_mb=256, n_chunks=4, repeats=2)
    figures = {one["name"]: one for one in found}
    wanted = {"gpu_attach", "gpu_pin_pool", "gpu_pool_store", "gpu_pool_retrieve", "gpu_one_chunk"}
    assert set(figures) == wanted
    assert figures["gpu_pin_pool"]["pool_mb"] >= 200
    assert all(one["value"] > 0 for one in figures.values())


def test_without_cupy_the_benchmark_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotHere, match=r"needs CuPy, .* pip install 'kvstrata\[gpu\]'"):
        gpu_copies.require_cupy()


@pytest.mark.parametrize("name", ["gpu_copies", "gpu_pool"])
@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "'Simulated GPU 0' is the driver of the tests"), ({"devices": 0}, "the driver finds no GPU")],
)
def test_without_a_gpu_the_command_says_so_and_writes_nothing(
    name: str, options: dict[str, object], why: str
) -> None:
    before = RESULTS.read_bytes() if RESULTS.exists() else None
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", name],
        cwd=ROOT,
        env=environment(**options),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "not run: needs an NVIDIA GPU: " in done.stdout and why in done.stdout, done.stdout + done.stderr
    assert (RESULTS.read_bytes() if RESULTS.exists() else None) == before
