"""The copy engine of a GPU: on the simulated driver everywhere, on a real one where there is a GPU.

What a gather writes is compared with what the CPU's engine writes, and what it moves with the plain Python oracle.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.native import copying, cuda
from tests.harness.cuda_driver import Gpu, SimulatedGpu, on_gpu, simulated
from tests.oracles import copying as oracle
from tests.oracles import record as record_oracle

pytestmark = pytest.mark.integration

OK, STALE, CORRUPT, MISMATCH, UNVERIFIED, CANCELLED, FAILED = range(7)
ENGINES = ["dma", "kernel", "staged"]
KEY = b"k" * 32
WAIT_S = 60.0

NVCC = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
needs_kernels = pytest.mark.skipif(
    not Path(cuda.__file__).with_name("kvstrata_cuda.fatbin").exists()
    and (not NVCC or os.environ.get("KVSTRATA_CUDA") == "off"),
    reason="the kernels are not built: install the CUDA toolkit (nvcc), then `make cuda`",
)


def spec(key: bytes = KEY) -> copying.RecordSpec:
    return copying.RecordSpec(key, b"i" * 32, b"s" * 32, b"", 256, 1_700_000_000_000)


class Host:
    """Host memory for records, registered with the device or not."""

    def __init__(self, length: int) -> None:
        self.memory = mmap.mmap(-1, length)
        self.length = length
        self.address = copying.buffer_address(self.memory)

    def read(self, at: int, length: int) -> bytes:
        return self.memory[at : at + length]

    def pin(self, engine: cuda.CudaCopyEngine, pieces: int = 1) -> list[cuda.HostRegion]:
        """Registers it in so many pieces of whole pages."""
        step = max(4096, self.length // pieces // 4096 * 4096)
        starts = [*range(0, self.length - step + 1, step), self.length]
        regions = [
            cuda.HostRegion(0, self.address + start, end - start) for start, end in itertools.pairwise(starts)
        ]
        for region in regions:
            engine.pin(region)
        return regions


@dataclass
class Shape:
    """Blocks of a KV cache in one allocation on the device; `plan` has offsets, `device_plan` addresses."""

    plan: oracle.Plan
    length: int

    @classmethod
    def of(
        cls,
        sections: int,
        blocks: int,
        dims: tuple[tuple[int, int], ...],
        run: int,
        *,
        gap: int = 0,
        offset: int = 0,
    ) -> Shape:
        span = run + sum((count - 1) * stride for count, stride in dims)
        stride = span + gap
        bases = tuple(offset + section * blocks * stride for section in range(sections))
        plan = oracle.Plan(bases, blocks, (stride,) * sections, ((dims, run),) * sections)
        return cls(plan, offset + sections * blocks * stride)

    @classmethod
    def beside(cls, shapes: Sequence[Shape], times: int) -> Shape:
        """Sections of all the shapes, which have as many blocks, in turn: so often the first of each."""
        bases: list[int] = []
        end = 0
        for _ in range(times):
            for shape in shapes:
                bases.append(end + shape.plan.section_bases[0])
                end += shape.length
        strides = [shape.plan.block_stride[0] for shape in shapes] * times
        of_sections = [shape.plan.shapes[0] for shape in shapes] * times
        blocks = shapes[0].plan.num_blocks
        return cls(oracle.Plan(tuple(bases), blocks, tuple(strides), tuple(of_sections)), end)

    def host_plan(self, base: int) -> copying.CopyPlan:
        plan = self.plan
        bases = [base + at for at in plan.section_bases]
        shapes = sorted(set(plan.shapes))
        return copying.CopyPlan(
            bases,
            plan.num_blocks,
            list(plan.block_stride),
            shapes=shapes,
            section_shapes=[shapes.index(shape) for shape in plan.shapes],
        )


SHAPES = {
    "contiguous": Shape.of(3, 40, (), 4096),
    "strided": Shape.of(3, 40, (), 4096, gap=4096),
    "two-planes": Shape.of(2, 20, ((2, 40_960),), 2048, gap=16),
    "heads-major": Shape.of(2, 12, ((8, 16 * 128),), 128, gap=64),
    "three-dims": Shape.of(2, 9, ((2, 4096), (3, 512), (4, 100)), 36),
    "odd-runs": Shape.of(3, 11, ((5, 37),), 13, gap=7, offset=3),
    "two-byte-runs": Shape.of(2, 30, ((7, 10),), 6, offset=2),
    "long-runs": Shape.of(2, 5, (), 3 * 32_768 + 48, gap=16),
    "more-sections-than-one-launch": Shape.of(300, 6, (), 64),
    "more-blocks-than-one-launch": Shape.of(2, 1300, (), 48, gap=16),
    "latents-with-an-indexer": Shape.beside(
        [Shape.of(1, 20, (), 64 * 656), Shape.of(1, 20, (), 64 * 132)], 4
    ),
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


def record_of_cpu(
    shape: Shape, content: bytes, blocks: Sequence[int], what: copying.RecordSpec | None = None
) -> bytes:
    """The record of these blocks as the CPU's copies write it."""
    blocks_in_ram = mmap.mmap(-1, shape.length)
    blocks_in_ram.write(content)
    plan = shape.host_plan(copying.buffer_address(blocks_in_ram))
    record = mmap.mmap(-1, plan.record_bytes(len(blocks)))
    copying.gather_record(plan, blocks, copying.buffer_address(record), len(record), what or spec())
    return record[:]


@needs_kernels
@pytest.mark.parametrize("name", list(SHAPES))
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
        # A staging buffer of two sections, so that a record takes several rounds.
        staging = 2 * max(map(len, oracle.gather(shape.plan, content, sources)))
        copies = cuda.CudaCopyEngine(0, engine=engine, staging_bytes=staging)  # type: ignore[arg-type]
        assert copies.engine == engine, copies.reason
        regions = host.pin(copies, pinned) if pinned else []

        gpu.write(base, content)
        assert copies.run("gather", plan, [(sources, host.address, length, spec())]) == [OK], case
        assert host.read(0, length) == record_of_cpu(shape, content, sources), case
        gpu.write(base, other)
        assert copies.run("scatter", plan, [(targets, host.address, length, KEY)]) == [OK], case
        expected = bytearray(other)
        oracle.scatter(shape.plan, expected, targets, oracle.gather(shape.plan, content, sources))
        assert gpu.read(base, shape.length) == bytes(expected), case
        copies.close()
        for region in regions:
            region.unregister()


def small(gpu: Gpu) -> tuple[Shape, cuda.CudaCopyPlan, int, bytes]:
    """Sixteen blocks of four sections with known content: shape, plan, base and content."""
    shape = Shape.of(4, 16, ((2, 512),), 256, gap=256)
    base = gpu.allocate(shape.length)
    content = random.Random(7).randbytes(shape.length)
    gpu.write(base, content)
    return shape, cuda.CudaCopyPlan(shape.host_plan(base), 0), base, content


def codes(copies: cuda.CudaCopyEngine, job: int) -> list[int]:
    """Outcomes of the one job that is unread."""
    assert copies.wait(job, WAIT_S)
    [(number, outcomes)] = copies.completions()
    assert number == job
    return outcomes


@pytest.mark.parametrize("engine", ENGINES)
@simulated()
def test_a_bad_record_ends_as_on_the_cpu_and_touches_no_block_unless_its_payload_is_bad(engine: str) -> None:
    gpu = SimulatedGpu()
    shape, plan, base, content = small(gpu)
    copies = cuda.CudaCopyEngine(0, engine=engine)  # type: ignore[arg-type]
    length = plan.record_bytes(3)
    host, ram = Host(length), mmap.mmap(-1, shape.length)
    host_plan = shape.host_plan(copying.buffer_address(ram))
    assert copies.run("gather", plan, [([0, 1, 2], host.address, length, spec())]) == [OK]
    sound = host.read(0, length)
    header = copying.record_header(host.address, length).header_bytes
    seen = set()
    flips = [(at, KEY) for at in [*range(0, header + 40, 7), length - 1]]
    for at, key in [*flips, (length, KEY), (length, b"x" * 32)]:
        bad = bytearray(sound)
        if at < length:
            bad[at] ^= 0x10
        host.memory[:length] = bytes(bad)
        expected = copying.scatter_record(host_plan, [5, -1, 6], host.address, length, key)
        assert copies.run("scatter", plan, [([5, -1, 6], host.address, length, key)]) == [expected], at
        seen.add(expected)
        touched = gpu.read(base, shape.length) != content
        assert touched == ((at >= header and at < length) or expected == OK), at
        gpu.write(base, content)
    assert {STALE, CORRUPT, OK} <= seen
    pending = record_oracle.Record(
        KEY, b"i" * 32, b"s" * 32, bytes(32), 256, 1, oracle.gather(shape.plan, content, [0, 1, 2])
    )
    host.memory[:length] = record_oracle.build(pending, inner_flags=1)
    assert copies.run("scatter", plan, [([5, 6, 7], host.address, length, KEY)]) == [UNVERIFIED]
    assert gpu.read(base, shape.length) == content
    other = cuda.CudaCopyPlan(copying.CopyPlan([base], 16, [1280], [], 512), 0)
    host.memory[:length] = sound
    assert copies.run("scatter", other, [([1], host.address, length, KEY)]) == [MISMATCH]


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
    loads = [(blocks, address, size, KEY) for blocks, address, size, _ in items if address != items[1][1]]
    gpu.set("fail", "cuEventRecord:2:2")
    assert copies.run("scatter", plan, loads) == [OK, FAILED, OK]
    gpu.set("fail", "")
    assert copies.run("scatter", plan, loads) == [OK, OK, OK]
    assert gpu.read(base, shape.length) == content
    assert copies.failed is None


@needs_kernels
@pytest.mark.parametrize("engine", ENGINES)
@simulated(delay_us=200)
def test_after_a_sticky_error_every_job_fails_at_once_and_the_engine_says_why(engine: str) -> None:
    gpu = SimulatedGpu()
    _, plan, _, _ = small(gpu)
    length = plan.record_bytes(2)
    host = Host(64 * length)
    copies = cuda.CudaCopyEngine(0, engine=engine)  # type: ignore[arg-type]
    host.pin(copies)
    gpu.set("fail", "kernel:3:719" if engine == "kernel" else "copy:40:719")
    for job in range(8):
        place = host.address + 8 * job * length
        items = [([i, 15 - i], place + i * length, length, spec()) for i in range(7)]
        assert copies.submit(job, "gather", plan, items)
    copies.drain()
    outcomes = [code for _, result in copies.completions() for code in result]
    assert len(outcomes) == 56
    assert set(outcomes) <= {OK, FAILED}
    assert outcomes[-1] == FAILED
    failed = copies.failed
    assert failed is not None
    assert (failed.number, failed.name, failed.sticky) == (719, "CUDA_ERROR_LAUNCH_FAILED", True)
    assert "restart the process" in failed.message
    assert copies.submit(99, "scatter", plan, [([1, 2], host.address, length, KEY)])
    assert codes(copies, 99) == [FAILED]
    with pytest.raises(cuda.CudaError, match="cuCtxPushCurrent: CUDA_ERROR_LAUNCH_FAILED"):
        copies.moment(0)
    copies.close()


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
    loads = [(half, host.address + i * length, length, KEY) for i, half in enumerate(halves)]
    gpu.hold(True)
    assert copies.submit(1, "scatter", plan.layerwise(), loads)
    compute = gpu.stream()
    for section in range(4):
        assert copies.await_section(1, section, compute, WAIT_S)
    assert not copies.wait(1, 0.0)
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
def test_await_section_says_no_for_a_load_that_is_late_cancelled_or_hit_by_an_error() -> None:
    gpu = SimulatedGpu()
    _, plan, _, _ = small(gpu)
    length = plan.record_bytes(8)
    host = Host(length)
    copies = cuda.CudaCopyEngine(0, engine="dma")  # unregistered: a copy blocks the thread that queues it
    stream = gpu.stream()
    assert copies.run("gather", plan, [(list(range(8)), host.address, length, spec())]) == [OK]
    load = [(list(range(8)), host.address, length, KEY)]
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
        copies = cuda.CudaCopyEngine(0, engine=engine)  # type: ignore[arg-type]
        before = gpu.calls("pageable")
        assert copies.run("gather", plan, [([3, 1, 2], host.address, length, spec())]) == [OK]
        assert gpu.calls("pageable") > before
        assert host.read(0, length) == record_of_cpu(shape, content, [3, 1, 2])


@needs_kernels
@simulated(memory=1 << 20)
def test_without_room_for_staging_the_engine_is_dma_and_says_so() -> None:
    gpu = SimulatedGpu()
    shape, plan, _, content = small(gpu)
    copies = cuda.CudaCopyEngine(0, engine="staged")
    assert copies.engine == "dma"
    assert copies.reason.startswith("not staged: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
    host = Host(plan.record_bytes(1))
    assert copies.run("gather", plan, [([9], host.address, host.length, spec())]) == [OK]
    assert host.read(0, plan.record_bytes(1)) == record_of_cpu(shape, content, [9])


@needs_kernels
@simulated(version=12_040)
def test_a_driver_without_batched_copies_copies_run_by_run_and_the_choice_prefers_the_kernel() -> None:
    gpu = SimulatedGpu()
    shape, plan, _, content = small(gpu)
    assert not cuda.driver_facts().batched_copies
    copies = cuda.CudaCopyEngine(0)
    assert (copies.engine, "no batched copies" in copies.reason) == ("kernel", True)
    dma = cuda.CudaCopyEngine(0, engine="dma")
    host = Host(plan.record_bytes(4))
    host.pin(dma)
    assert dma.run("gather", plan, [([3, 1, 2, 8], host.address, host.length, spec())]) == [OK]
    assert host.read(0, host.length) == record_of_cpu(shape, content, [3, 1, 2, 8])
    assert gpu.calls("cuMemcpyDtoHAsync") == 4 * 4 * 2
    assert gpu.calls("cuMemcpyBatchAsync") == 0


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


@needs_kernels
@simulated()
def test_layers_of_several_shapes_in_turn_take_a_launch_for_each_shape() -> None:
    gpu = SimulatedGpu()
    shape = SHAPES["latents-with-an-indexer"]
    base = gpu.allocate(shape.length)
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0)
    copies = cuda.CudaCopyEngine(0, engine="kernel")
    host = Host(plan.record_bytes(2))
    host.pin(copies)
    before = gpu.calls("cuLaunchKernel")
    assert copies.run("gather", plan, [([3, 1], host.address, host.length, spec())]) == [OK]
    assert gpu.calls("cuLaunchKernel") - before == 2


@needs_kernels
@simulated(fail="cuModuleLoadData:1:209")
def test_kernels_that_the_driver_cannot_load_leave_dma_with_the_reason() -> None:
    SimulatedGpu()
    copies = cuda.CudaCopyEngine(0, engine="kernel")
    assert copies.engine == "dma"
    assert "not kernel: cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU" in copies.reason
    assert "rebuild with this machine's nvcc" in copies.reason


@simulated()
def test_a_forked_child_is_told_that_cuda_does_not_survive_a_fork_and_the_parent_goes_on() -> None:
    gpu = SimulatedGpu()
    shape, plan, _, content = small(gpu)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    host = Host(plan.record_bytes(1))
    region = host.pin(copies)[0]
    items = [([9], host.address, host.length, spec())]
    for job in range(20):  # some while threads of the engine and of the driver have locks
        copies.submit(job, "gather", plan, items)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            with pytest.raises(cuda.CudaError, match=r"NOT_INITIALIZED.*does not survive a fork"):
                cuda.HostRegion(0, host.address, 4096)
            region.unregister()
            copies.close()
            del copies, region, plan
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert copies.wait(job, WAIT_S)
    assert region.registered
    copies.completions()
    assert copies.run("gather", plan, items) == [OK]
    assert host.read(0, host.length) == record_of_cpu(shape, content, [9])


@simulated()
def test_records_of_a_layerwise_load_share_a_call_for_each_section() -> None:
    gpu = SimulatedGpu()
    _, plan, _, _ = small(gpu)
    length = plan.record_bytes(2)
    host = Host(8 * length)
    copies = cuda.CudaCopyEngine(0, engine="dma")
    host.pin(copies)
    places = [([i, i + 8], host.address + i * length, length) for i in range(8)]
    assert copies.run("gather", plan, [(*place, spec()) for place in places]) == [OK] * 8
    before = gpu.calls("cuMemcpyBatchAsync")
    assert copies.run("scatter", plan.layerwise(), [(*place, KEY) for place in places]) == [OK] * 8
    assert gpu.calls("cuMemcpyBatchAsync") - before == 4


@simulated(devices=0)
def test_a_machine_without_a_gpu_is_told_what_is_missing() -> None:
    for call in (cuda.driver_facts, lambda: cuda.device_facts(0), lambda: cuda.CudaCopyEngine(0)):
        with pytest.raises(cuda.CudaUnavailable, match="finds no GPU"):
            call()


@simulated(version=11_080)
def test_a_driver_that_is_too_old_is_told_to_be_updated() -> None:
    with pytest.raises(cuda.CudaUnavailable, match=r"supports CUDA 11\.8; update it to CUDA 12\.0"):
        cuda.driver_facts()


def test_without_a_driver_the_module_loads_and_says_what_is_missing() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(cuda.CudaUnavailable, match=r"no NVIDIA driver: .*--gpus all"):
        cuda.driver_facts()
    with pytest.raises(cuda.CudaUnavailable):
        cuda.HostRegion(0, 4096, 4096)


@needs_kernels
@pytest.mark.parametrize("name", ["heads-major", "latents-with-an-indexer"])
@on_gpu
def test_choose_measures_on_memory_of_its_own_and_takes_the_fastest_or_dma(name: str) -> None:
    gpu = Gpu()
    shape = SHAPES[name]
    base = gpu.allocate(shape.length)
    content = random.Random(3).randbytes(shape.length)
    gpu.write(base, content)
    host_plan = shape.host_plan(base)
    plan = cuda.CudaCopyPlan(host_plan, 0)
    copies = cuda.CudaCopyEngine(0)
    assert copies.measured == {}
    copies.choose(host_plan, 0, 0, [1, 2, 5, 7])
    best = max(copies.measured, key=lambda name: copies.measured[name])
    fast_enough = copies.measured["dma"] >= 0.9 * copies.measured[best]
    assert copies.engine == ("dma" if fast_enough else best)
    assert copies.reason.startswith("measured: ")
    assert set(copies.measured) == set(ENGINES)
    assert gpu.read(base, shape.length) == content
    host = Host(plan.record_bytes(4))
    copies.choose(host_plan, host.address, host.length, [1, 2, 5, 7])  # not registered
    assert "kernel" not in copies.measured
    assert "not kernel: the host memory is not registered" in copies.reason
    with pytest.raises(cuda.CudaError, match="length: 64 bytes"):
        copies.choose(host_plan, host.address, 64, [1, 2, 5, 7])
    assert copies.run("gather", plan, [([1, 2, 5, 7], host.address, host.length, spec())]) == [OK]
    assert host.read(0, host.length) == record_of_cpu(shape, content, [1, 2, 5, 7])
