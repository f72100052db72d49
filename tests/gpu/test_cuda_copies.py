"""The copy engine of a GPU: on the simulated driver everywhere, on a real one where there is a GPU."""

from __future__ import annotations

import itertools
import mmap
import random
from pathlib import Path

import pytest

from kvstrata.native import core, cuda
from tests.gpu.device_blocks import (
    CANCELLED,
    CORRUPT,
    ENGINES,
    FAILED,
    IDENTITY,
    KEY,
    MISMATCH,
    OK,
    STALE,
    WAIT_S,
    WANTED,
    Host,
    Shape,
    codes,
    needs_kernels,
    record_of_cpu,
    small,
    spec,
)
from tests.harness.cuda_driver import Gpu, SimulatedGpu, on_gpu, simulated
from tests.oracles import copying as oracle
from tests.oracles import record as record_oracle

pytestmark = pytest.mark.integration

GATE = ("heads-major", "odd-runs", "unlike-in-everything", "more-unlike-sections-than-one-launch")
"""The shapes that `make test` copies; `make test-all` copies all."""
SHAPES = {
    "contiguous": Shape.of(3, 40, (), 4096),
    "two-planes": Shape.of(2, 20, ((2, 40_960),), 2048, gap=16),
    "heads-major": Shape.of(2, 12, ((8, 16 * 128),), 128, gap=64),
    "odd-runs": Shape.of(3, 11, ((5, 37),), 13, gap=7, offset=3),
    "long-runs": Shape.of(2, 5, (), 3 * 32_768 + 48, gap=16),
    "more-blocks-than-one-launch": Shape.of(2, 1300, (), 48, gap=16),
    "unlike-in-everything": Shape.beside(
        [
            Shape.of(1, 30, ((7, 10),), 6, offset=2),
            Shape.of(1, 30, (), 4096),
            Shape.of(1, 30, ((5, 37),), 13, gap=7, offset=3),
            Shape.of(1, 30, ((2, 4096), (3, 512)), 128, gap=64),
        ],
        2,
    ),
    "more-unlike-sections-than-one-launch": Shape.beside(
        [Shape.of(1, 6, (), 64), Shape.of(1, 6, (), 36)], 150
    ),
}


def scattered(shape: Shape, randomness: random.Random) -> tuple[list[int], list[int]]:
    """Sources in runs of neighbours, and as many targets, some of them skipped."""
    count = shape.plan.num_blocks * 9 // 10
    first = randomness.randrange(shape.plan.num_blocks - count + 1)
    sources = list(range(first, first + count))
    for _ in range(count // 4):
        i, j = randomness.randrange(count), randomness.randrange(count)
        sources[i], sources[j] = sources[j], sources[i]
    targets = randomness.sample(range(shape.plan.num_blocks), count)
    return sources, [-1 if randomness.random() < 0.2 else target for target in targets]


@needs_kernels
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in GATE else pytest.mark.long) for name in SHAPES]
)
@on_gpu
def test_a_gather_writes_the_cpus_record_and_a_scatter_writes_exactly_its_blocks(name: str) -> None:
    shape = SHAPES[name]
    randomness = random.Random(name)
    gpu = Gpu()
    base = gpu.allocate(shape.length)
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0)
    for engine, pinned in itertools.product(ENGINES, (1, 5, 0)):
        case = f"{name} {engine}, registered in {pinned} pieces"
        content, other = randomness.randbytes(shape.length), randomness.randbytes(shape.length)
        sources, targets = scattered(shape, randomness)
        length = plan.record_bytes(len(sources))
        host = Host(length + 4096)
        copies = cuda.CudaCopyEngine(0, engine=engine)
        assert copies.engine == engine, copies.reason
        regions = host.pin(copies, pinned) if pinned else []

        gpu.write(base, content)
        assert copies.run("gather", plan, [(sources, host.address, length, spec())]) == [OK], case
        assert host.read(0, length) == record_of_cpu(shape, content, sources), case
        gpu.write(base, other)
        assert copies.run("scatter", plan, [(targets, host.address, length, WANTED)]) == [OK], case
        expected = bytearray(other)
        oracle.scatter(shape.plan, expected, targets, oracle.gather(shape.plan, content, sources))
        assert gpu.read(base, shape.length) == bytes(expected), case
        copies.close()
        for region in regions:
            region.unregister()


@pytest.mark.long
@needs_kernels
@on_gpu
def test_a_large_gather_is_sealed_part_by_part_and_a_part_that_fails_costs_the_whole() -> None:
    gpu = SimulatedGpu()
    simulated_driver = cuda.device_facts(0).name.startswith("Simulated")
    shape = Shape.of(20, 3, (), 1 << 20)
    base = gpu.allocate(shape.length)
    content = random.Random(11).randbytes(shape.length)
    gpu.write(base, content)
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0)
    host = Host(plan.record_bytes(2))
    store = [([2, 0], host.address, host.length, spec())]
    right = record_of_cpu(shape, content, [2, 0])
    for engine in ENGINES:
        copies = cuda.CudaCopyEngine(0, engine=engine)
        [region] = host.pin(copies)
        for _ in range(3):
            host.memory[:] = bytes(host.length)
            assert copies.run("gather", plan, store) == [OK]
            assert host.read(0, host.length) == right, engine
        # Only the simulated driver can be told to fail: at the end of the first part, of a later one, of the last.
        for part in (1, 2, 5) if simulated_driver else ():
            gpu.set("fail", f"cuEventRecord:{part}:2")
            assert copies.run("gather", plan, store) == [FAILED], (engine, part)
            assert host.read(0, 8) == bytes(8)
            gpu.set("fail", "")
            assert copies.run("gather", plan, store) == [OK]
            assert host.read(0, host.length) == right
        copies.close()
        region.unregister()


@simulated()
def test_a_bad_record_ends_as_on_the_cpu_and_touches_no_block_unless_its_payload_is_bad() -> None:
    gpu = SimulatedGpu()
    shape, plan, base, content = small(gpu)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    length = plan.record_bytes(3)
    host, ram = Host(length), mmap.mmap(-1, shape.length)
    host_plan = shape.host_plan(core.buffer_address(ram))
    assert copies.run("gather", plan, [([0, 1, 2], host.address, length, spec())]) == [OK]
    sound = host.read(0, length)
    header = core.record_header(host.address, length).header_bytes
    seen = set()
    flips = [(at, WANTED) for at in [*range(0, header + 40, 7), length - 1]]
    foreign = [(length, (b"x" * 32, IDENTITY)), (length, (KEY, b"x" * 32))]
    for at, wanted in [*flips, (length, WANTED), *foreign]:
        bad = bytearray(sound)
        if at < length:
            bad[at] ^= 0x10
        host.memory[:length] = bytes(bad)
        items = [([5, -1, 6], host.address, length, wanted)]
        [expected] = core.CopyEngine(threads=0).run("scatter", host_plan, items)
        assert copies.run("scatter", plan, items) == [expected], at
        seen.add(expected)
        touched = gpu.read(base, shape.length) != content
        assert touched == ((at >= header and at < length) or expected == OK), at
        gpu.write(base, content)
    assert {STALE, CORRUPT, OK} <= seen
    flagged = record_oracle.Record(
        KEY, b"i" * 32, b"s" * 32, bytes(32), 256, 1, oracle.gather(shape.plan, content, [0, 1, 2])
    )
    host.memory[:length] = record_oracle.build(flagged, inner_flags=1)
    assert copies.run("scatter", plan, [([5, 6, 7], host.address, length, WANTED)]) == [MISMATCH]
    assert gpu.read(base, shape.length) == content
    other = cuda.CudaCopyPlan(core.CopyPlan([base], 16, [1280], [], 512), 0)
    host.memory[:length] = sound
    assert copies.run("scatter", other, [([1], host.address, length, WANTED)]) == [MISMATCH]


@simulated()
def test_a_layerwise_load_lets_a_stream_wait_for_one_section() -> None:
    gpu = SimulatedGpu()
    shape, plan, base, content = small(gpu)
    length = plan.record_bytes(8)
    host = Host(2 * length)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    host.pin(copies)
    halves = [list(range(8)), list(range(8, 16))]
    stores = [(half, host.address + i * length, length, spec()) for i, half in enumerate(halves)]
    assert copies.run("gather", plan, stores) == [OK, OK]
    gpu.write(base, bytes(shape.length))
    loads = [(half, host.address + i * length, length, WANTED) for i, half in enumerate(halves)]
    gpu.hold(True)
    assert copies.submit(1, "scatter", plan.layerwise(), loads)
    compute = gpu.stream()
    for section in range(4):
        assert copies.await_section(1, section, compute, WAIT_S)
    assert copies.completions() == []
    gpu.hold(False)
    gpu.synchronize(compute)  # nothing but what was awaited lets it end
    expected = bytearray(shape.length)
    blocks = list(range(16))
    oracle.scatter(shape.plan, expected, blocks, oracle.gather(shape.plan, content, blocks))
    assert gpu.read(base, shape.length) == bytes(expected)
    assert codes(copies, 1) == [OK, OK]
    assert copies.await_section(1, 0, compute, 0.0)
    assert copies.submit(2, "scatter", plan.layerwise(), loads)
    with pytest.raises(cuda.CudaError, match="section: 4 of a plan with 4"):
        copies.await_section(2, 4, compute, WAIT_S)


@simulated()
def test_copies_begin_after_the_moment_that_they_are_behind() -> None:
    gpu = SimulatedGpu()
    shape, plan, base, content = small(gpu)
    length = plan.record_bytes(16)
    host, source = Host(length), Host(shape.length)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    host.pin(copies)
    source.pin(copies)
    model = random.Random(8).randbytes(shape.length)
    source.memory[:] = model
    compute = gpu.stream()
    for _ in range(20):
        gpu.write(base, content)
        gpu.set("delay_us", 500)
        gpu.copy_later(base, source.address, shape.length, compute)  # the model writes its KV
        behind = plan.behind(copies.moment(compute))
        assert copies.run("gather", behind, [(list(range(16)), host.address, length, spec())]) == [OK]
        assert host.read(0, length) == record_of_cpu(shape, model, list(range(16)))


@simulated()
def test_many_runs_go_in_one_call_and_neighbours_in_one_copy() -> None:
    gpu = SimulatedGpu()
    shape = Shape.of(4, 16, (), 512)
    base = gpu.allocate(shape.length)
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    host = Host(plan.record_bytes(8))
    host.pin(copies)
    assert copies.run("gather", plan, [([0, 1, 2, 3, 9, 8, 10, 11], host.address, host.length, spec())]) == [
        OK
    ]
    assert (gpu.calls("cuMemcpyBatchAsync"), gpu.calls("copy")) == (1, 4 * 4)


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
    copies.close()
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
    cuda.HostRegion(0, host.address, 1 << 20).unregister()
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


def test_without_a_driver_the_module_loads_and_says_what_is_missing() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(cuda.CudaUnavailable, match=r"no NVIDIA driver: .*--gpus all"):
        cuda.driver_facts()
    with pytest.raises(cuda.CudaUnavailable):
        cuda.HostRegion(0, 4096, 4096)
