"""The copy engine of a GPU when a copy fails, or when the driver, memory, the kernels or the GPU itself are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.native import cuda
from tests.gpu.device_blocks import (
    CANCELLED,
    ENGINES,
    FAILED,
    OK,
    WAIT_S,
    WANTED,
    Host,
    needs_kernels,
    record_of_cpu,
    small,
    spec,
)
from tests.harness.cuda_driver import SimulatedGpu, simulated

pytestmark = pytest.mark.integration


@simulated()
def test_a_copy_that_fails_costs_its_item_and_the_engine_goes_on() -> None:
    gpu = SimulatedGpu()
    shape, plan, base, content = small(gpu)
    length = plan.record_bytes(2)
    host = Host(4 * length)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    items = [([i, i + 4], host.address + i * length, length, spec()) for i in range(4)]
    gpu.set("fail", "cuMemcpyDtoHAsync:30:1")  # in the middle of the second record
    assert copies.run("gather", plan, items) == [OK, FAILED, OK, OK]
    assert host.read(length, 8) == bytes(8)  # no magic
    assert copies.failed is None
    loads = [(blocks, address, size, WANTED) for blocks, address, size, _ in items if address != items[1][1]]
    gpu.set("fail", "cuEventRecord:2:2")
    assert copies.run("scatter", plan, loads) == [OK, FAILED, OK]
    gpu.set("fail", "")
    assert copies.run("scatter", plan, loads) == [OK, OK, OK]
    assert gpu.read(base, shape.length) == content
    assert copies.failed is None


@simulated()
def test_await_section_says_no_for_a_load_that_is_late_cancelled_or_hit_by_an_error() -> None:
    gpu = SimulatedGpu()
    _, plan, _, _ = small(gpu)
    length = plan.record_bytes(8)
    host = Host(length)
    copies = cuda.CudaCopyEngine(0, engine="dma")  # unregistered: a copy blocks the thread that queues it
    stream = gpu.stream()
    assert copies.run("gather", plan, [(list(range(8)), host.address, length, spec())]) == [OK]
    load = [(list(range(8)), host.address, length, WANTED)]
    gpu.hold(True)
    assert copies.submit(1, "scatter", plan.layerwise(), load)
    assert copies.submit(2, "scatter", plan.layerwise(), load)
    assert not copies.await_section(1, 3, stream, 0.0)
    assert copies.cancel(2)
    assert not copies.await_section(2, 0, stream, WAIT_S)
    gpu.set("fail", "cuMemcpyHtoDAsync:3:1")
    gpu.hold(False)
    assert not copies.await_section(1, 3, stream, WAIT_S)
    copies.drain()
    assert sorted(copies.completions()) == [(1, [FAILED]), (2, [CANCELLED])]


@simulated(devices=2)
def test_memory_that_is_not_the_devices_is_named() -> None:
    gpu = SimulatedGpu()
    shape, plan, base, _ = small(gpu)
    ram = Host(shape.length)
    with pytest.raises(cuda.CudaError, match=r"section_bases\[0\]: not memory of a GPU") as refused:
        cuda.CudaCopyPlan(shape.host_plan(ram.address), 0)
    assert refused.value.field == "section_bases"
    gpu.adopt(ram.address, ram.length, device=1)
    with pytest.raises(cuda.CudaError, match=r"lies on device 1, the plan is for 0"):
        cuda.CudaCopyPlan(shape.host_plan(ram.address), 0)
    elsewhere = cuda.CudaCopyPlan(shape.host_plan(ram.address), 1)
    copies = cuda.CudaCopyEngine(0)
    with pytest.raises(ValueError, match="plan: is for another device"):
        copies.submit(1, "gather", elsewhere, [([1], ram.address, 1 << 20, spec())])
    with pytest.raises(ValueError, match=r"items\[0\].*block_ids"):
        copies.submit(1, "gather", plan, [([16], base, 1 << 20, spec())])
    with pytest.raises(cuda.CudaError, match="device: 2 is not one of this process's 2 GPUs"):
        cuda.CudaCopyEngine(2)


@simulated(register=1 << 20)
def test_a_refused_registration_says_which_limit_to_raise_and_copies_go_on_unpinned() -> None:
    gpu = SimulatedGpu()
    shape, plan, _, content = small(gpu)
    host = Host(2 << 20)
    with pytest.raises(cuda.CudaError, match=r"cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY.*ulimit -l"):
        cuda.HostRegion(0, host.address, host.length)
    region = cuda.HostRegion(0, host.address, 1 << 20)
    with pytest.raises(cuda.CudaError, match=r"ALREADY_REGISTERED.*pinned that memory already"):
        cuda.HostRegion(0, host.address + 4096, 4096)
    region.unregister()
    region.unregister()
    assert not region.registered
    for number in (800, 801):
        gpu.set("fail", f"cuMemHostRegister:1:{number}")
        with pytest.raises(cuda.CudaError, match="copies go on unpinned") as refused:
            cuda.HostRegion(0, host.address, 4096)
        assert (refused.value.number, refused.value.sticky) == (number, False)
    length = plan.record_bytes(3)
    for engine in ENGINES:
        copies = cuda.CudaCopyEngine(0, engine=engine)
        before = gpu.calls("pageable")
        assert copies.run("gather", plan, [([3, 1, 2], host.address, length, spec())]) == [OK]
        assert gpu.calls("pageable") > before
        assert host.read(0, length) == record_of_cpu(shape, content, [3, 1, 2])


@needs_kernels
@simulated(version=12_040)
def test_a_driver_without_batched_copies_copies_run_by_run() -> None:
    gpu = SimulatedGpu()
    shape, plan, _, content = small(gpu)
    assert not cuda.driver_facts().batched_copies
    dma = cuda.CudaCopyEngine(0, engine="dma")
    host = Host(plan.record_bytes(4))
    host.pin(dma)
    assert dma.run("gather", plan, [([3, 1, 2, 8], host.address, host.length, spec())]) == [OK]
    assert host.read(0, host.length) == record_of_cpu(shape, content, [3, 1, 2, 8])
    assert gpu.calls("cuMemcpyDtoHAsync") == 4 * 4 * 2
    assert gpu.calls("cuMemcpyBatchAsync") == 0


@pytest.mark.long
@needs_kernels
@simulated(fail="cuModuleLoadData:1:209")
def test_kernels_that_the_driver_cannot_load_leave_dma_with_the_reason() -> None:
    SimulatedGpu()
    copies = cuda.CudaCopyEngine(0, engine="kernel")
    assert copies.engine == "dma"
    assert "not kernel: cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU" in copies.reason
    assert "rebuild with this machine's nvcc" in copies.reason


@pytest.mark.long
@simulated(devices=0)
def test_a_machine_without_a_gpu_is_told_what_is_missing() -> None:
    for call in (cuda.driver_facts, lambda: cuda.device_facts(0), lambda: cuda.CudaCopyEngine(0)):
        with pytest.raises(cuda.CudaUnavailable, match="finds no GPU"):
            call()


def test_without_a_driver_the_module_loads_and_says_what_is_missing() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(cuda.CudaUnavailable, match=r"no NVIDIA driver: .*--gpus all"):
        cuda.driver_facts()
    with pytest.raises(cuda.CudaUnavailable):
        cuda.HostRegion(0, 4096, 4096)
