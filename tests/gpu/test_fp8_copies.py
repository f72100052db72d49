"""KV that is rounded to 8 bits on its way into a record and back, against the oracle."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.native import core, cuda
from tests.gpu.device_blocks import FAILED, KEY, OK, WANTED, Host, Shape, needs_kernels, spec
from tests.harness.amount import amount
from tests.harness.cuda_driver import Gpu, SimulatedGpu, on_gpu, simulated
from tests.oracles import copying as oracle
from tests.oracles.codec import fp8_decode, fp8_encode

pytestmark = [needs_kernels, pytest.mark.integration]
DTYPES = {"bfloat16": (1, 0x7F80), "float16": (2, 0x7C00)}
Array = tuple[int, int, int, int]
"""Groups, tokens, heads, dim of a block."""

LAYOUTS: dict[str, tuple[Array, Shape]] = {
    "tokens-outside-heads": ((2, 16, 2, 8), Shape.of(3, 16, ((2, 576),), 512)),
    "heads-apart": ((1, 4, 3, 24), Shape.of(2, 12, ((12, 64),), 48)),
    "latent": ((1, 16, 1, 12), Shape.of(5, 12, (), 384, gap=16)),
    "odd-heads": ((2, 5, 3, 7), Shape.of(3, 11, ((30, 16),), 14, gap=2)),
    "more-sections-than-one-launch": ((1, 16, 1, 1), Shape.of(260, 3, (), 32)),
    "more-blocks-than-one-launch": ((1, 4, 1, 4), Shape.of(2, 800, (), 32)),
}
"""The array of a block, and how blocks lie in memory."""
GATE = {("heads-apart", "bfloat16"), ("odd-heads", "float16"), ("more-blocks-than-one-launch", "bfloat16")}
"""The cases that `make test` takes; `make test-all` takes all."""
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in GATE else pytest.mark.long)
    for name, dtype in itertools.product(LAYOUTS, DTYPES)
]


def numbers(count: int, infinity: int, randomness: random.Random) -> bytes:
    """Finite numbers: of all sizes, of a few, subnormal, zero, or zeros beside one that is huge."""
    kind = randomness.randrange(5)
    most = (infinity, 0x4000, 0x80, 1, 1)[kind]
    found = [
        (number & 0x8000) | (number & 0x7FFF) % most
        for (number,) in struct.iter_unpack("<H", randomness.randbytes(2 * count))
    ]
    if kind == 4:
        found[randomness.randrange(count)] = infinity - 1
    return struct.pack(f"<{count}H", *found)


def fill(shape: Shape, infinity: int, randomness: random.Random) -> bytes:
    """The memory of all blocks, gaps too."""
    return b"".join(
        numbers(min(512, shape.length // 2 - at), infinity, randomness)
        for at in range(0, shape.length // 2, 512)
    )


def encoded(shape: Shape, array: Array, dtype: int, content: bytes, blocks: list[int]) -> list[bytes]:
    """The sections of the record, by the oracle: scales, then codes."""
    sections = []
    for section in oracle.gather(shape.plan, content, blocks):
        scales, codes = fp8_encode(section, dtype, (len(blocks), *array))
        sections.append(struct.pack(f"<{len(scales)}f", *scales) + codes)
    return sections


def decoded(array: Array, dtype: int, sections: list[bytes], n_blocks: int) -> list[bytes]:
    n = array[0] * array[2]
    return [
        fp8_decode(struct.unpack_from(f"<{n}f", section), section[4 * n :], dtype, (n_blocks, *array))
        for section in sections
    ]


def payload(host: Host, plan: cuda.CudaCopyPlan, n_blocks: int) -> bytes:
    length = plan.record_bytes(n_blocks)
    header = core.record_header(host.address, length).header_bytes
    assert core.verify_record(host.address, length, KEY) == OK
    return host.read(header, plan.payload_bytes(n_blocks))


@pytest.mark.parametrize(("name", "dtype"), CASES)
@on_gpu
def test_a_record_is_the_codecs_and_a_load_is_what_the_codec_decodes(name: str, dtype: str) -> None:
    array, shape = LAYOUTS[name]
    kind, infinity = DTYPES[dtype]
    randomness = random.Random(name + dtype)
    gpu = Gpu()
    base = gpu.allocate(shape.length)
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0, fp8=(kind, *array))
    total = shape.plan.num_blocks
    for pieces in (1, 5, 0):
        case = f"{name}, registered in {pieces} pieces"
        sources = randomness.sample(range(total), total * 2 // 3)
        targets = [
            -1 if randomness.random() < 0.2 else block
            for block in randomness.sample(range(total), len(sources))
        ]
        length = plan.record_bytes(len(sources))
        host = Host(length + 4096)
        # A staging buffer of two sections, so that a record takes several rounds.
        copies = cuda.CudaCopyEngine(0, fp8=True, staging_bytes=2 * plan.section_bytes(0, len(sources)))
        regions = host.pin(copies, pieces) if pieces else []
        content, other = fill(shape, infinity, randomness), fill(shape, infinity, randomness)
        gpu.write(base, content)
        assert copies.run("gather", plan, [(sources, host.address, length, spec())]) == [OK], case
        sections = encoded(shape, array, kind, content, sources)
        assert [len(section) for section in sections] == [
            plan.section_bytes(at, len(sources)) for at in range(plan.section_count)
        ]
        assert payload(host, plan, len(sources)) == b"".join(sections), case
        gpu.write(base, other)
        assert copies.run("scatter", plan, [(targets, host.address, length, WANTED)]) == [OK], case
        expected = bytearray(other)
        oracle.scatter(shape.plan, expected, targets, decoded(array, kind, sections, len(sources)))
        assert gpu.read(base, shape.length) == bytes(expected), case
        copies.close()
        for region in regions:
            region.unregister()


@simulated()
def test_any_array_is_rounded_as_the_codec_rounds_it() -> None:
    gpu = SimulatedGpu()
    engines = [cuda.CudaCopyEngine(0, fp8=True, staging_bytes=1 << 20) for _ in range(2)]
    host = Host(1 << 20)
    host.pin(engines[0])  # the other goes through its buffer

    @settings(
        max_examples=amount(15, 60), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        kind, infinity = data.draw(st.sampled_from(list(DTYPES.values())))
        groups, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        tokens, dim = data.draw(st.integers(4, 17)), data.draw(st.integers(4, 40))
        array = (groups, tokens, heads, dim)
        gap = 2 * data.draw(st.integers(0, 9))
        dims = data.draw(st.sampled_from([(), ((groups * tokens * heads, 2 * dim + gap),)]))
        run = 2 * dim if dims else 2 * dim * groups * tokens * heads
        blocks = data.draw(st.integers(1, 4))
        offset = 2 * data.draw(st.integers(0, 8))
        shape = Shape.of(data.draw(st.integers(1, 3)), blocks, dims, run, gap=gap, offset=offset)
        content = fill(shape, infinity, random.Random(data.draw(st.integers(0, 1 << 32))))
        base = gpu.allocate(shape.length)
        gpu.write(base, content)
        plan = cuda.CudaCopyPlan(shape.host_plan(base), 0, fp8=(kind, *array))
        order = data.draw(st.permutations(range(blocks)))
        length = plan.record_bytes(blocks)
        sections = encoded(shape, array, kind, content, order)
        for engine in engines:
            assert engine.run("gather", plan, [(order, host.address, length, spec())]) == [OK]
            assert payload(host, plan, blocks) == b"".join(sections)
            gpu.write(base, bytes(shape.length))
            assert engine.run("scatter", plan, [(order, host.address, length, WANTED)]) == [OK]
            expected = bytearray(shape.length)
            oracle.scatter(shape.plan, expected, order, decoded(array, kind, sections, blocks))
            assert gpu.read(base, shape.length) == bytes(expected)
            gpu.write(base, content)
        gpu.free(base)

    check()


def small(gpu: Gpu) -> tuple[Shape, cuda.CudaCopyPlan, int, cuda.CudaCopyEngine]:
    array, shape = LAYOUTS["tokens-outside-heads"]
    base = gpu.allocate(shape.length)
    gpu.write(base, fill(shape, 0x7F80, random.Random(5)))
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0, fp8=(1, *array))
    copies = cuda.CudaCopyEngine(0, fp8=True)
    return shape, plan, base, copies


@on_gpu
def test_a_number_that_is_none_costs_its_record_alone() -> None:
    gpu = Gpu()
    shape, plan, base, copies = small(gpu)
    length = plan.record_bytes(4)
    host = Host(3 * length + 4096)
    host.pin(copies)
    number = base + 6 * shape.plan.block_stride[1] + shape.plan.section_bases[1] + 98
    gpu.write(number, struct.pack("<H", 0x7F80))
    items = [(list(range(at, at + 4)), host.address + at // 4 * length, length, spec()) for at in (0, 4, 8)]
    assert copies.run("gather", plan, items) == [OK, FAILED, OK]
    assert host.read(length, 8) == bytes(8)  # no magic
    gpu.write(number, struct.pack("<H", 0x3F80))
    assert copies.run("gather", plan, items) == [OK, OK, OK]
    assert copies.failed is None


@simulated()
def test_an_error_of_a_kernel_fails_its_record_and_a_sticky_one_all() -> None:
    gpu = SimulatedGpu()
    _, plan, _, copies = small(gpu)
    length = plan.record_bytes(4)
    host = Host(3 * length + 4096)
    host.pin(copies)
    items = [(list(range(at, at + 4)), host.address + at // 4 * length, length, spec()) for at in (0, 4, 8)]
    for fault in ("cuMemsetD32Async:2:1", "cuLaunchKernel:4:1"):
        gpu.set("fail", fault)
        assert copies.run("gather", plan, items) == [OK, FAILED, OK], fault
        gpu.set("fail", "")
    gpu.set("fail", "kernel:3:719")
    assert copies.run("gather", plan, items)[1:] == [FAILED, FAILED]
    assert copies.failed is not None and copies.failed.sticky


@simulated(memory=32 << 20)
def test_what_cannot_round_is_named() -> None:
    gpu = SimulatedGpu()
    array, shape = LAYOUTS["tokens-outside-heads"]
    base = gpu.allocate(shape.length)
    host_plan = shape.host_plan(base)
    with pytest.raises(cuda.CudaError, match="engine: 'dma' cannot round KV; use 'kernel'"):
        cuda.CudaCopyEngine(0, engine="dma", fp8=True)
    with pytest.raises(cuda.CudaError, match=r"staging_bytes: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        cuda.CudaCopyEngine(0, fp8=True, staging_bytes=20 << 20)
    for bad, said in (
        ((3, *array), "fp8: must be"),
        ((1, 2, 16, 4), "fp8: must be"),
        ((1, 2, 16, 2, 9), "rounding: a block's size differs"),
        ((1, 512, 1, 1, 1), "a scale needs at least 16 numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            cuda.CudaCopyPlan(host_plan, 0, fp8=bad)  # type: ignore[arg-type]
    odd = core.CopyPlan([base + 1], 4, [4096], [], 1024)
    with pytest.raises(ValueError, match="rounding: the numbers of 16 bits do not lie at even addresses"):
        cuda.CudaCopyPlan(odd, 0, fp8=(1, 1, 16, 1, 32))
    several = core.CopyPlan(
        [base, base], 4, [4096, 4096], shapes=[([], 1024), ([], 512)], section_shapes=[0, 1]
    )
    with pytest.raises(ValueError, match="rounding: the sections have blocks of several shapes"):
        cuda.CudaCopyPlan(several, 0, fp8=(1, 1, 16, 1, 32))
    plan = cuda.CudaCopyPlan(host_plan, 0, fp8=(1, *array))
    host = Host(plan.record_bytes(4))
    items = [([1, 2, 3, 4], host.address, host.length, spec())]
    with pytest.raises(ValueError, match="plan: rounds KV, and the engine was not made for that"):
        cuda.CudaCopyEngine(0, engine="dma").run("gather", plan, items)
    copies = cuda.CudaCopyEngine(0, fp8=True, staging_bytes=plan.section_bytes(0, 4) - 1)
    with pytest.raises(ValueError, match="a rounded section is larger than the staging buffer"):
        copies.run("gather", plan, items)


@simulated(fail="cuModuleLoadData:1:209")
def test_an_engine_that_is_to_round_does_not_start_without_kernels() -> None:
    SimulatedGpu()
    with pytest.raises(cuda.CudaError, match="kernels: needed to round KV, and cuModuleLoadData"):
        cuda.CudaCopyEngine(0, fp8=True)


@pytest.mark.long
@on_gpu
def test_an_engine_that_rounds_copies_other_plans_as_they_are() -> None:
    gpu = Gpu()
    _, shape = LAYOUTS["latent"]
    base = gpu.allocate(shape.length)
    content = random.Random(1).randbytes(shape.length)
    gpu.write(base, content)
    copies = cuda.CudaCopyEngine(0, fp8=True)
    plan = cuda.CudaCopyPlan(shape.host_plan(base), 0)
    host = Host(plan.record_bytes(3))
    assert copies.run("gather", plan, [([3, 9, 1], host.address, host.length, spec())]) == [OK]
    assert payload(host, plan, 3) == b"".join(oracle.gather(shape.plan, content, [3, 9, 1]))
