"""Native copies against their oracles, for any shape of blocks."""

from __future__ import annotations

import mmap
import os
import random
import select
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native import core
from kvstrata.native.core import CopyEngine, CopyOutcome, CopyPlan, RecordSpec
from tests.harness.alone import alone
from tests.harness.waiting import HANG_S
from tests.oracles import copying as oracle
from tests.oracles import crc32c as crc_oracle
from tests.oracles import record as record_oracle

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
IDENTITY = b"i" * 32
SPEC = RecordSpec(KEY, IDENTITY, b"s" * 32, b"p" * 32, 256, 1_700_000_000_000)
ALONE = CopyEngine(threads=0)


@dataclass
class Engine:
    """Memory of an engine, with the native plan and the oracle's plan over it."""

    memory: bytearray
    plan: CopyPlan
    twin: oracle.Plan

    def record(self, block_ids: list[int]) -> mmap.mmap:
        """Gather blocks into a record in an extent of its own."""
        extent = mmap.mmap(-1, self.plan.record_bytes(len(block_ids)))
        address = core.buffer_address(extent, writable=True)
        assert ALONE.run("gather", self.plan, [(block_ids, address, len(extent), SPEC)]) == [0]
        return extent

    def scatter(
        self, block_ids: list[int], extent: mmap.mmap, key: bytes = KEY, identity: bytes = IDENTITY
    ) -> int:
        address = core.buffer_address(extent, writable=True)
        return ALONE.run("scatter", self.plan, [(block_ids, address, len(extent), (key, identity))])[0]


def block_shapes(max_run: int) -> st.SearchStrategy[tuple[tuple[tuple[int, int], ...], int]]:
    """Draw (dims, run_bytes) of a block whose runs do not overlap."""

    @st.composite
    def shape(draw: st.DrawFn) -> tuple[tuple[tuple[int, int], ...], int]:
        run = draw(st.integers(1, max_run))
        dims, span = [], run
        for _ in range(draw(st.integers(0, 3))):
            count = draw(st.integers(1, 4))
            stride = draw(st.sampled_from([span, span, span + 64, span + draw(st.integers(0, 100))]))
            dims.insert(0, (count, stride))
            span += (count - 1) * stride
        return tuple(dims), run

    return shape()


@st.composite
def engines(draw: st.DrawFn, max_run: int = 700) -> Engine:
    """Draw an engine whose sections have one shape or several, some of them equal."""
    shapes = draw(st.lists(block_shapes(max_run), min_size=1, max_size=3))
    blocks = draw(st.integers(1, 6))
    bases, strides, section_shapes, end = [], [], [], draw(st.integers(0, 70))
    for _ in range(draw(st.integers(1, 4))):
        section_shapes.append(draw(st.integers(0, len(shapes) - 1)))
        dims, run = shapes[section_shapes[-1]]
        span = run + sum((count - 1) * stride for count, stride in dims)
        stride = span + draw(st.sampled_from([0, 0, 64, 13]))
        bases.append(end)
        strides.append(stride)
        end += stride * (blocks - 1) + span + draw(st.integers(0, 70))
    memory = bytearray(random.Random(draw(st.integers(0, 1 << 30))).randbytes(end))
    start = core.buffer_address(memory, writable=True)
    places = [start + base for base in bases]
    if len(shapes) == 1:
        plan = CopyPlan(places, blocks, strides, *shapes[0])
    else:
        plan = CopyPlan(places, blocks, strides, shapes=shapes, section_shapes=section_shapes)
    of_sections = tuple(shapes[index] for index in section_shapes)
    return Engine(memory, plan, oracle.Plan(tuple(bases), blocks, tuple(strides), of_sections))


def small_engine(sections: int = 3, blocks: int = 8, block_bytes: int = 1024) -> Engine:
    memory = bytearray(random.Random(1).randbytes(sections * blocks * block_bytes))
    start = core.buffer_address(memory, writable=True)
    bases = [section * blocks * block_bytes for section in range(sections)]
    strides = [block_bytes] * sections
    plan = CopyPlan([start + base for base in bases], blocks, strides, [], block_bytes)
    twin = oracle.Plan(tuple(bases), blocks, tuple(strides), (((), block_bytes),) * sections)
    return Engine(memory, plan, twin)


@given(data=st.binary(max_size=700), more=st.binary(max_size=700), offset=st.integers(0, 63))
def test_the_checksum_is_that_of_the_definition(data: bytes, more: bytes, offset: int) -> None:
    expected = crc_oracle.crc32c(more, crc_oracle.crc32c(data))
    shifted = bytes(offset) + data + more
    address = core.buffer_address(shifted) + offset
    assert core.crc32c(more, core.crc32c(data)) == expected
    assert core.crc32c_at(address, len(data + more)) == expected


@given(data=st.data(), engine=engines())
def test_a_gathered_record_is_what_the_format_says(data: st.DataObject, engine: Engine) -> None:
    ids = data.draw(st.lists(st.integers(0, engine.twin.num_blocks - 1), min_size=1, max_size=6))
    extent = engine.record(ids)
    sections = oracle.gather(engine.twin, engine.memory, ids)
    twin = record_oracle.Record(KEY, b"i" * 32, b"s" * 32, b"p" * 32, 256, 1_700_000_000_000, sections)
    assert bytes(extent) == record_oracle.build(twin)
    assert engine.plan.payload_bytes(len(ids)) == sum(map(len, sections))
    for section, stored in enumerate(sections):
        assert engine.plan.section_bytes(section, len(ids)) == len(stored)


@given(data=st.data(), engine=engines())
def test_a_scatter_writes_its_blocks_and_nothing_else(data: st.DataObject, engine: Engine) -> None:
    blocks = range(engine.twin.num_blocks)
    stored = data.draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=6))
    targets = data.draw(st.permutations(blocks))
    targets = [data.draw(st.sampled_from([block, block, -1])) for block in targets][: len(stored)]
    stored = stored[: len(targets)]
    extent = engine.record(stored)
    sections = oracle.gather(engine.twin, engine.memory, stored)
    expected = bytearray(engine.memory)
    oracle.scatter(engine.twin, expected, targets, sections)
    assert engine.scatter(targets, extent) == CopyOutcome.OK
    assert engine.memory == expected


@given(engine=engines(), bit=st.integers(0, 1 << 40))
def test_no_flipped_bit_passes(engine: Engine, bit: int) -> None:
    extent = engine.record([0])
    at = bit // 8 % len(extent)
    extent[at] ^= 1 << bit % 8
    before = bytes(engine.memory)
    header = record_oracle.header_bytes(engine.plan.section_count)
    assert engine.scatter([0], extent) != CopyOutcome.OK
    if at < header:
        assert engine.memory == before
    assert engine.scatter([-1], extent) != CopyOutcome.OK
    address = core.buffer_address(extent, writable=True)
    assert core.verify_record(address, len(extent), KEY) != CopyOutcome.OK
    assert core.explain_record(address, len(extent), KEY)


def test_a_record_of_another_chunk_or_identity_is_stale_and_touches_no_block() -> None:
    engine = small_engine()
    extent = engine.record([1, 2])
    before = bytes(engine.memory)
    assert engine.scatter([3, 4], extent, OTHER_KEY) == CopyOutcome.STALE
    assert engine.scatter([3, 4], extent, KEY, OTHER_KEY) == CopyOutcome.STALE
    assert engine.memory == before


def test_a_record_of_another_shape_is_a_mismatch_and_touches_no_block() -> None:
    engine, other = small_engine(sections=3), small_engine(sections=6, block_bytes=512)
    extent = other.record([1, 2])
    before = bytes(engine.memory)
    assert engine.scatter([1, 2], extent) == CopyOutcome.MISMATCH
    assert engine.memory == before


@pytest.mark.parametrize(
    ("shapes", "section_shapes", "message"),
    [
        ([([], 64)], [0], "section_shapes: must have one entry per section, 2, not 1"),
        ([([], 64)], [0, 1], r"section_shapes: not one of the shapes \(got 1, limit 1, at index 1\)"),
        ([([], 64), ([], 0)], [0, 1], r"shapes\[1\]\.run_bytes: must be positive"),
        ([([(0, 64)], 64)], [0, 0], r"shapes\[0\]\.dims: a count must be positive"),
        ([([(1, -1)], 64)], [0, 0], r"shapes\[0\]\.dims: must be between 0"),
    ],
)
def test_an_impossible_shape_is_refused_with_its_place_among_the_shapes(shapes, section_shapes, message):
    with pytest.raises(ValueError, match=message):
        CopyPlan([4096, 8192], 8, [64, 64], shapes=shapes, section_shapes=section_shapes)


@pytest.mark.parametrize(
    ("block_ids", "change", "message"),
    [
        ([], {}, "block_ids: must not be empty"),
        ([8], {}, r"block_ids: not a block of the plan \(got 8, limit 8"),
        ([0, 1 << 70], {}, "block_ids: not a block of the plan"),
        ([0, 1], {"shorter": 1}, "extent_len: too small"),
        ([0], {"moved": 1}, "address: must be a multiple of 8"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_written(block_ids, change, message):
    engine = small_engine()
    extent = mmap.mmap(-1, 1 << 16)
    address = core.buffer_address(extent, writable=True) + change.get("moved", 0)
    length = len(extent) - 8
    if change.get("shorter"):
        length = engine.plan.record_bytes(len(block_ids)) - 1
    with pytest.raises(ValueError, match=message):
        ALONE.run("gather", engine.plan, [(block_ids, address, length, SPEC)])
    with pytest.raises(ValueError, match=message):
        ALONE.run("scatter", engine.plan, [(block_ids, address, length, (KEY, IDENTITY))])
    with CopyEngineScope() as copies, pytest.raises(ValueError, match=r"items\[1\]\."):
        good = ([0], core.buffer_address(extent, writable=True), len(extent), SPEC)
        copies.run("gather", engine.plan, [good, (block_ids, address, length, SPEC)])
    assert not any(extent[:])


class CopyEngineScope:
    """A copy engine that is closed at the end of the block."""

    def __init__(self, threads: int = 2, queue: int = 16) -> None:
        self.engine = CopyEngine(threads, queue)

    def __enter__(self) -> CopyEngine:
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.close()


@given(data=st.data(), engine=engines(max_run=5000), threads=st.integers(0, 3))
def test_copy_threads_do_what_a_single_copy_does(data: st.DataObject, engine: Engine, threads: int) -> None:
    chunks = data.draw(
        st.lists(
            st.lists(st.integers(0, engine.twin.num_blocks - 1), min_size=1, max_size=4),
            min_size=1,
            max_size=5,
        )
    )
    alone = [bytes(engine.record(ids)) for ids in chunks]
    extents = [mmap.mmap(-1, len(record)) for record in alone]
    addresses = [core.buffer_address(extent, writable=True) for extent in extents]
    with CopyEngineScope(threads) as copies:
        items = [(ids, a, len(e), SPEC) for ids, a, e in zip(chunks, addresses, extents, strict=True)]
        if threads == 0:
            assert copies.run("gather", engine.plan, items) == [0] * len(chunks)
        else:
            assert copies.submit(1, "gather", engine.plan, items)
            assert select.select([copies.event_fd], [], [], 60.0)[0]
            assert copies.completions() == [(1, [0] * len(chunks))]
        assert [bytes(extent) for extent in extents] == alone
        extents[0][-1] ^= 1
        before = bytes(engine.memory)
        skipped = [
            ([-1] * len(ids), a, len(e), (KEY, IDENTITY))
            for ids, a, e in zip(chunks, addresses, extents, strict=True)
        ]
        codes = copies.run("scatter", engine.plan, skipped)
        assert codes == [CopyOutcome.CORRUPT] + [CopyOutcome.OK] * (len(chunks) - 1)
        assert engine.memory == before


@alone
def test_a_dropped_engine_leaves_no_thread_and_no_descriptor_behind() -> None:
    threads, descriptors = set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    copies = CopyEngine(3, 8)
    its_own = set(os.listdir("/proc/self/task")) - threads
    assert len(its_own) == 3
    del copies
    assert len(os.listdir("/proc/self/fd")) == descriptors
    ends_s = time.monotonic() + HANG_S
    while its_own.intersection(os.listdir("/proc/self/task")):  # a joined thread is listed a moment longer
        assert time.monotonic() < ends_s
        time.sleep(0.001)


@alone
def test_a_forked_child_with_an_engine_ends_normally() -> None:
    copies = CopyEngine(2, 8)
    child = os.fork()
    if child == 0:
        copies.close()
        del copies
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    copies.close()


@st.composite
def strided_copies(
    draw: st.DrawFn,
) -> tuple[list[bytearray], list[tuple[int, int, int, list[tuple[int, int, int]], int]]]:
    """Draw sources and copies out of them; where copies overlap in the target, the last one counts."""
    sources = [bytearray(random.Random(i).randbytes(draw(st.integers(1, 400)))) for i in range(3)]
    copies = []
    for _ in range(draw(st.integers(0, 4))):
        source = draw(st.integers(0, 2))
        run = draw(st.integers(1, len(sources[source])))
        left = [len(sources[source]) - run, 600 - run]
        loops = []
        for _ in range(draw(st.integers(0, 8))):
            count = draw(st.integers(1, 3))
            strides = [draw(st.integers(0, space // max(1, count - 1))) for space in left]
            left = [space - (count - 1) * stride for space, stride in zip(left, strides, strict=True)]
            loops.append((count, strides[0], strides[1]))
        copies.append((source, draw(st.integers(0, left[0])), draw(st.integers(0, left[1])), loops, run))
    return sources, copies


@given(strided_copies())
def test_strided_copies_are_those_of_the_oracle(drawn):
    sources, copies = drawn
    target, expected = bytearray(600), bytearray(600)
    oracle.copy_strided(expected, sources, copies)
    places = [(core.buffer_address(source, writable=True), len(source)) for source in sources]
    core.copy_strided(core.buffer_address(target, writable=True), len(target), places, copies)
    assert target == expected
