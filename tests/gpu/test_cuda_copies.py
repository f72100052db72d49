"""The copy engine of a GPU: on the simulated driver everywhere, on a real one where there is a GPU.

What a gather writes is compared with what the CPU's engine writes, and what it moves with the plain Python oracle.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.native import copying, cuda
from tests.harness.cuda_driver import Gpu, on_gpu
from tests.oracles import copying as oracle

OK, STALE, CORRUPT, MISMATCH, UNVERIFIED, CANCELLED, FAILED = range(7)
ENGINES = ["dma", "kernel", "staged"]
KEY = b"k" * 32

needs_kernels = pytest.mark.skipif(
    not Path(cuda.__file__).with_name("kvstrata_cuda.fatbin").exists() and not os.environ.get("CI"),
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
        plan = oracle.Plan(bases, blocks, (stride,) * sections, dims, run)
        return cls(plan, offset + sections * blocks * stride)

    def host_plan(self, base: int) -> copying.CopyPlan:
        plan = self.plan
        bases = [base + at for at in plan.section_bases]
        return copying.CopyPlan(
            bases, plan.num_blocks, list(plan.block_stride), list(plan.dims), plan.run_bytes
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
        staging = 2 * plan.section_bytes(len(sources))
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
