"""Recutting gives the record that an engine of the target's geometry would have stored of the same KV."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.keys.recut import CannotRecut, Part, Recut, RecutReason, plan_recut
from kvstrata.native import core
from kvstrata.native.core import CopyOutcome, RecordSpec
from kvstrata.server.recuts.recuts import Place, record_length, recut_records
from tests.harness.geometry import CHUNK, DIM, Cache, Geometry, view_of
from tests.harness.gpu_kv import LAYOUTS

KEY = b"k" * 32


@dataclass
class Stored:
    """The record that a worker of some geometry stores of a model's KV, and the facts about the record."""

    part: Part
    record: bytearray

    @property
    def place(self) -> tuple[int, int, bytes]:
        return core.buffer_address(self.record, writable=True), len(self.record), KEY


SPEC = RecordSpec(KEY, b"i" * 32, b"s" * 32, b"", CHUNK, 1)


KV = dict[tuple[int, int, int], bytes]
"""(Layer, head, token) → its K and its V."""


def store(kv: KV, geometry: Geometry, seed: int) -> Stored:
    """Write the KV of a chunk as an engine's attention would, and store it."""
    draw = random.Random(seed)
    used = CHUNK // geometry.block_tokens
    cache = Cache(geometry, used + 3, seed)
    table = draw.sample(range(cache.blocks), used)
    for layer, head, token in itertools.product(
        range(*geometry.layers), range(*geometry.heads), range(CHUNK)
    ):
        block, rest = divmod(token, geometry.block_tokens)
        cache.memory[cache.place(layer, table[block], head, rest)] = kv[layer, head, token]
    view = view_of(geometry, cache.tensors, cache.blocks)
    plan = view.plan()
    record = bytearray(plan.record_bytes(used))
    item = (table, core.buffer_address(record, writable=True), len(record), SPEC)
    assert core.CopyEngine(threads=0).run("gather", plan, [item]) == [0]
    return Stored(Part(view.slice, view.facts), record)


def kv_of(layers: int, heads: int) -> KV:
    """Make KV whose numbers differ as far as 16 bits reach."""
    places = itertools.product(range(layers), range(heads), range(CHUNK))
    return {
        place: struct.pack(f"<{2 * DIM}H", *((i * 2 * DIM + j) & 0xFFFF for j in range(2 * DIM)))
        for i, place in enumerate(places)
    }


def recut(sources: Sequence[Stored], target: Part) -> tuple[Recut, bytearray]:
    made = plan_recut([source.part for source in sources], target)
    record = bytearray(record_length(made.target_sections))
    place = Place(made, core.buffer_address(record, writable=True), len(record), SPEC)
    outcome = recut_records([source.place for source in sources], [place])
    assert outcome is CopyOutcome.OK
    return made, record


BLOCK_TOKENS = [size for size in range(1, CHUNK + 1) if CHUNK % size == 0]


@st.composite
def cuts(draw: st.DrawFn, end: int) -> list[tuple[int, int]]:
    """Draw ranges that cover 0..end, some parts of it twice."""
    at = sorted({0, end, *draw(st.lists(st.integers(0, end), max_size=3))})
    extra = draw(st.lists(st.tuples(st.integers(0, end - 1), st.integers(1, end)), max_size=1))
    return draw(st.permutations([*itertools.pairwise(at), *((a, b) for a, b in extra if a < b)]))


@st.composite
def looks(draw: st.DrawFn) -> dict[str, object]:
    """Draw the layout of a worker's blocks."""
    block_tokens = draw(st.sampled_from(BLOCK_TOKENS))
    layout = draw(st.sampled_from(LAYOUTS))
    kernel = block_tokens
    if layout in ("LBHNC", "LBNHC"):
        kernel = draw(st.sampled_from([size for size in BLOCK_TOKENS if block_tokens % size == 0]))
    return {"block_tokens": block_tokens, "kernel_tokens": kernel, "layout": layout}


@given(data=st.data(), layers=st.integers(1, 4), heads=st.integers(1, 6), seed=st.integers(0, 1 << 20))
def test_a_recut_record_is_the_one_that_the_target_would_have_stored(data, layers, heads, seed):
    kv = kv_of(layers, heads)
    sources = []
    for layer_range in data.draw(cuts(layers)):
        look = data.draw(looks())
        for head_range in data.draw(cuts(heads)):
            sources.append(store(kv, Geometry(layer_range, head_range, **look), seed + len(sources)))  # type: ignore[arg-type]
    first, low = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, heads - 1))
    wanted = Geometry(
        (first, data.draw(st.integers(first + 1, layers))),
        (low, data.draw(st.integers(low + 1, heads))),
        **data.draw(looks()),  # type: ignore[arg-type]
    )
    expected = store(kv, wanted, seed - 1)
    made, record = recut(sources, expected.part)
    assert record == expected.record
    written = [copy.run_bytes * math.prod(count for count, _, _ in copy.loops) for copy in made.copies]
    assert sum(written) == sum(made.target_sections)
    # A recut into the same layout copies the payload in one run.
    back, again = recut([Stored(expected.part, record)], expected.part)
    assert again == record and [copy.loops for copy in back.copies] == [()]


def parts(
    tensor_parallel: int, block_tokens: int, layout: str, layers: int = 32, heads: int = 8
) -> list[Part]:
    """Return the parts of a model's workers, whose addresses do not matter."""
    per_rank = heads // tensor_parallel
    found = []
    for rank in range(tensor_parallel):
        look = Geometry(
            (0, layers), (rank * per_rank, (rank + 1) * per_rank), block_tokens, block_tokens, layout
        )
        cache = Cache(look, 3, 0)
        view = view_of(look, cache.tensors, 3)
        found.append(Part(view.slice, view.facts))
    return found


def refused(sources: Sequence[Part], target: Part) -> tuple[RecutReason, str]:
    with pytest.raises(CannotRecut) as caught:
        plan_recut(sources, target)
    assert caught.value.field in caught.value.message
    return caught.value.reason, caught.value.field


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("format", "paged-blocks/1", RecutReason.DIFFERS),
        ("dtype", "float16", RecutReason.DIFFERS),
        ("stored_dtype", "uint8", RecutReason.DIFFERS),
        ("quantisation", "FP8_PER_TENSOR", RecutReason.DIFFERS),
        ("chunk_tokens", 48, RecutReason.FACTS),
        ("scales", [["0x1p+0", "0x1p+1"]] * 32, RecutReason.SCALES),
        ("encoding", "fp8-e4m3/1", RecutReason.LOSSY),
        ("makes", [{"section_bytes": 5}, {"section_bytes": 6}], RecutReason.ARRANGEMENT),
        ("block_tokens", 0, RecutReason.FACTS),
        ("section_bytes", 5, RecutReason.FACTS),
        ("axes", [["tokens", 16]], RecutReason.FACTS),
        ("axes", "much", RecutReason.FACTS),
        ("layers", [], RecutReason.FACTS),
    ],
)
def test_sources_that_cannot_be_recut_are_refused_with_a_reason(name, value, reason):
    [source], [target] = parts(1, 16, "LBHNC"), parts(1, 48, "LBNHC")
    plan_recut([source], target)
    spoilt = source._replace(facts={**source.facts, name: value})
    found, field = refused([spoilt], target)
    assert found is reason
    assert field == name or reason is RecutReason.FACTS


def test_chunks_of_another_length_are_refused() -> None:
    [source], [target] = parts(1, 16, "LBHNC"), parts(1, 48, "LBNHC")
    half = {**source.facts, "chunk_tokens": 48, "section_bytes": int(source.facts["section_bytes"]) // 2}
    assert refused([source._replace(facts=half)], target) == (RecutReason.DIFFERS, "chunk_tokens")


def test_a_layer_or_head_that_no_source_has_is_named() -> None:
    sources, [target] = parts(4, 16, "LBHNC"), parts(1, 16, "LBNHC")
    with pytest.raises(CannotRecut, match="no source has KV head 4 of layer 0") as caught:
        plan_recut([sources[0], sources[1], sources[3]], target)
    assert caught.value.reason is RecutReason.MISSING
    with pytest.raises(CannotRecut, match="no source has layer 2") as caught:
        plan_recut(parts(1, 16, "LBHNC", layers=2), target)
    assert caught.value.reason is RecutReason.MISSING


def packed(part: Part, axes: list[tuple[str, int]]) -> Part:
    return part._replace(facts={**part.facts, "axes": [list(axis) for axis in axes]})


def test_an_unknown_arrangement_is_moved_whole_or_refused() -> None:
    # As in CPU attention: heads apart, the tokens of a block packed.
    cpu = [("kv_heads", 2), ("cpu_attn/amx@0.32.0.tokens", 16), ("cpu_attn/amx@0.32.0.content", 8)]
    sources = [packed(part, cpu) for part in parts(4, 16, "LBHNC")]
    target = packed(parts(2, 16, "LBHNC")[0], [("kv_heads", 4), *cpu[1:]])
    assert len(plan_recut(sources, target).copies) == 2
    for axes, block_tokens in (
        ([("kv_heads", 4), ("cpu_attn/vec@0.32.0.tokens", 16), ("cpu_attn/vec@0.32.0.content", 8)], 16),
        ([("cpu_attn/amx@0.32.0.tokens", 16), ("cpu_attn/amx@0.32.0.content", 8), ("kv_heads", 4)], 16),
        ([("kv_heads", 4), ("cpu_attn/amx@0.32.0.tokens", 48), ("cpu_attn/amx@0.32.0.content", 8)], 48),
        ([("kv_heads", 4), ("cpu_attn/amx@0.32.0.content", 8), ("cpu_attn/amx@0.32.0.tokens", 16)], 16),
        ([("kv_heads", 4), ("tokens", 16), ("cpu_attn/amx@0.32.0.content", 8)], 16),
    ):
        other = packed(parts(2, block_tokens, "LBHNC")[0], axes)
        if axes[-1] == ("kv_heads", 4):
            # Heads may lie in any order: only the tokens of one head must stay together.
            assert len(plan_recut(sources, other).copies) == 2
        else:
            assert refused(sources, other) == (RecutReason.ARRANGEMENT, "axes")
    # K and V in separate planes, with the heads inside.
    planes = [("b12x@0.32.0.heads", 2), ("b12x@0.32.0.tokens", 16), ("b12x@0.32.0.content", 8)]
    sources = [packed(part, planes) for part in parts(4, 16, "LBHNC")]
    assert plan_recut(sources[:1], sources[0]).copies[0].loops == ()
    wider = packed(parts(2, 16, "LBHNC")[0], [planes[0], planes[1], ("b12x@0.32.0.content", 16)])
    assert refused(sources, wider)[0] is RecutReason.ARRANGEMENT
    assert refused(sources[:1], sources[1]) == (RecutReason.ARRANGEMENT, "kv_heads")
    unnamed = [("axis1", 2), ("axis2", 16), ("axis3", 8)]
    assert refused([packed(parts(4, 16, "LBHNC")[0], unnamed)], sources[0])[0] is RecutReason.ARRANGEMENT


def test_a_slice_with_scales_per_head_is_not_cut() -> None:
    scales = tuple(float(n).hex() for n in range(1, 5))
    kv = kv_of(1, 4)
    whole = store(kv, Geometry((0, 1), (0, 4), 16, 16, "LBHNC", scales=scales), 1)
    turned = store(kv, Geometry((0, 1), (0, 4), 48, 48, "LBNHC", scales=scales), 2)
    assert recut([whole], turned.part)[1] == turned.record
    half = store(kv, Geometry((0, 1), (0, 2), 16, 16, "LBHNC", scales=scales), 3)
    assert refused([whole.part], half.part) == (RecutReason.SCALES, "scales")


def test_a_corrupt_source_is_not_recut() -> None:
    kv = kv_of(2, 4)
    looks_alike = Geometry((0, 2), (0, 2), 16, 16, "LBHNC")
    sources = [store(kv, looks_alike, 1), store(kv, replace(looks_alike, heads=(2, 4)), 2)]
    target = store(kv, Geometry((0, 2), (0, 4), 48, 48, "LBNHC"), 3)
    made = plan_recut([source.part for source in sources], target.part)

    def outcome(key: bytes = KEY) -> CopyOutcome:
        record = bytearray(b"\xa5" * record_length(made.target_sections))
        address = core.buffer_address(record, writable=True)
        places = [(*source.place[:2], key) for source in sources]
        found = recut_records(places, [Place(made, address, len(record), SPEC)])
        assert (record == target.record) if found is CopyOutcome.OK else set(record) == {0xA5}
        return found

    assert outcome() is CopyOutcome.OK
    assert outcome(b"o" * 32) is CopyOutcome.STALE
    sources[1].record[-1] ^= 1
    assert outcome() is CopyOutcome.CORRUPT
    sources[1].record[-1] ^= 1
    kept, sources[1] = sources[1], store(kv, replace(looks_alike, layers=(0, 1)), 4)
    assert outcome() is CopyOutcome.MISMATCH
    sources[1] = kept
    with pytest.raises(ValueError, match=r"length: .* too few"):
        place = Place(made, sources[0].place[0], 8, SPEC)
        recut_records([source.place for source in sources], [place])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((1, 0, 0, (), 8), "no such source"),
        ((0, 57, 0, (), 8), "leave the source"),
        ((0, 0, 57, (), 8), "leave the target"),
        ((0, 0, 0, ((8, 8, 9),), 8), "leave the target"),
        # Sizes that would wrap in 64 bits.
        ((0, 0, 0, ((1 << 62, 8, 8),), 8), "leave the source"),
        ((0, (1 << 63) - 1, 0, ((2, (1 << 63) - 1, 0),), 8), "leave the source"),
        ((0, 0, 8, ((1 << 61, 0, 8), (2, 0, (1 << 63) - 8)), 8), "leave the target"),
        ((0, 0, 0, ((0, 8, 8),), 8), "count must be positive"),
        ((0, 0, 0, (), 0), "run_bytes must be positive"),
        ((0, 0, 0, ((1, 0, 0),) * 9, 8), "at most 8 loops"),
        ((0, -1, 0, (), 8), "copies: must be between"),
    ],
)
def test_a_copy_that_leaves_its_memory_is_refused(change: tuple[object, ...], says: str) -> None:
    source, target = bytearray(64), bytearray(64)
    where = [(core.buffer_address(source), 64)]
    with pytest.raises(ValueError, match=says):
        core.copy_strided(core.buffer_address(target, writable=True), 64, where, [change])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="may not be 0"):
        core.copy_strided(0, 64, where, [])
