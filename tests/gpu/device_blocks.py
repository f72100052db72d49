"""Blocks of a KV cache on a device, host memory for their records, and what the CPU's copies make of both."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import select
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from kvstrata.native import core, cuda
from tests.harness.cuda_driver import Gpu
from tests.oracles import copying as oracle

OK, STALE, CORRUPT, MISMATCH, CANCELLED, FAILED = range(6)
ENGINES: list[Literal["dma", "kernel"]] = ["dma", "kernel"]
KEY, IDENTITY = b"k" * 32, b"i" * 32
WANTED = KEY, IDENTITY
WAIT_S = 60.0

NVCC = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
needs_kernels = pytest.mark.skipif(
    not Path(cuda.__file__).with_name("kvstrata_cuda.fatbin").exists()
    and (not NVCC or os.environ.get("KVSTRATA_CUDA") == "off"),
    reason="the kernels are not built: install the CUDA toolkit (nvcc), then `make cuda`",
)


def spec(key: bytes = KEY) -> core.RecordSpec:
    return core.RecordSpec(key, IDENTITY, b"s" * 32, b"", 256, 1_700_000_000_000)


class Host:
    """Host memory for records, registered with the device or not."""

    def __init__(self, length: int) -> None:
        self.memory = mmap.mmap(-1, length)
        self.length = length
        self.address = core.buffer_address(self.memory)

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

    def host_plan(self, base: int) -> core.CopyPlan:
        plan = self.plan
        bases = [base + at for at in plan.section_bases]
        shapes = sorted(set(plan.shapes))
        return core.CopyPlan(
            bases,
            plan.num_blocks,
            list(plan.block_stride),
            shapes=shapes,
            section_shapes=[shapes.index(shape) for shape in plan.shapes],
        )


def record_of_cpu(
    shape: Shape, content: bytes, blocks: Sequence[int], what: core.RecordSpec | None = None
) -> bytes:
    """The record of these blocks as the CPU's copies write it."""
    blocks_in_ram = mmap.mmap(-1, shape.length)
    blocks_in_ram.write(content)
    plan = shape.host_plan(core.buffer_address(blocks_in_ram))
    record = mmap.mmap(-1, plan.record_bytes(len(blocks)))
    item = (blocks, core.buffer_address(record), len(record), what or spec())
    assert core.CopyEngine(threads=0).run("gather", plan, [item]) == [0]
    return record[:]


def small(gpu: Gpu) -> tuple[Shape, cuda.CudaCopyPlan, int, bytes]:
    """Sixteen blocks of four sections with known content: shape, plan, base and content."""
    shape = Shape.of(4, 16, ((2, 512),), 256, gap=256)
    base = gpu.allocate(shape.length)
    content = random.Random(7).randbytes(shape.length)
    gpu.write(base, content)
    return shape, cuda.CudaCopyPlan(shape.host_plan(base), 0), base, content


def codes(copies: cuda.CudaCopyEngine, job: int) -> list[int]:
    """Outcomes of the one job that is unread."""
    assert select.select([copies.event_fd], [], [], WAIT_S)[0]
    [(number, outcomes)] = copies.completions()
    assert number == job
    return outcomes
