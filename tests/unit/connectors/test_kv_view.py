"""kv_view finds blocks in any layout by shapes and strides, and refuses ambiguous layouts by name."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connectors.vllm.groups import CacheGroup, Rule, whole_group
from kvstrata.connectors.vllm.kv_view import (
    Heads,
    LayerKind,
    build_view,
    find_block_axis,
    heads_of,
    layer_runs,
    natural_order,
)
from kvstrata.errors import ConfigError

HEADS = Heads((0, 2), (0, 4), 1)


class FakeTensor:
    """Shape, strides and place of a tensor; `order` lists the axes from the outermost in memory inwards."""

    dtype = "bfloat16"

    def __init__(self, shape, order=None, base=1 << 20, element=2, pad=0):
        self.shape, self._element, self._base = tuple(shape), element, base
        order = list(range(len(shape))) if order is None else list(order)
        self._strides = [0] * len(shape)
        step = 1
        for position, axis in enumerate(reversed(order)):
            self._strides[axis] = step
            step *= shape[axis]
            if position == len(order) - 2:
                step += pad

    def stride(self):
        return tuple(self._strides)

    def element_size(self):
        return self._element

    def data_ptr(self):
        return self._base


def offsets_of_block(runs, block):
    """Byte addresses of one block, in the order in which a copy visits them."""
    found = []
    for index in itertools.product(*(range(count) for count, _ in runs.dims)):
        start = runs.base + block * runs.block_stride_bytes
        start += sum(i * stride for i, (_, stride) in zip(index, runs.dims, strict=True))
        found.extend(range(start, start + runs.run_bytes))
    return found


def expected_addresses(tensor, axis, pieces, block):
    """The byte addresses of one block by the definition of strides."""
    addresses = set()
    ranges = [range(size) for size in tensor.shape]
    ranges[axis] = range(block * pieces, (block + 1) * pieces)
    for index in itertools.product(*ranges):
        element = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        start = tensor.data_ptr() + element * tensor.element_size()
        addresses.update(range(start, start + tensor.element_size()))
    return addresses


def test_known_layouts_are_walked_with_the_fewest_runs():
    for shape, order, axis, dims, run_elements in (
        ((40, 4, 128, 64), None, 0, 0, 4 * 128 * 64),  # CPU
        ((2, 40, 16, 4, 32), None, 1, 1, 16 * 4 * 32),  # FlashAttention, tokens before heads
        ((2, 40, 16, 4, 32), (0, 1, 3, 2, 4), 1, 1, 4 * 16 * 32),  # the same, heads before tokens
        ((40, 2, 16, 4, 32), None, 0, 0, 2 * 16 * 4 * 32),  # FlashInfer
        ((40, 16, 576), None, 0, 0, 16 * 576),  # MLA
        ((40, 4, 16, 64), (1, 0, 2, 3), 0, 1, 16 * 64),  # heads outside blocks
    ):
        tensor = FakeTensor(shape, order)
        assert find_block_axis("x", tensor, 40, 16) == (axis, 1)
        runs = layer_runs("x", tensor, 40, 16)
        assert (len(runs.dims), runs.run_bytes) == (dims, run_elements * 2)


@given(
    st.sampled_from([(5, 2, 3, 4), (2, 5, 3, 2, 4), (5, 2, 3, 2, 4), (5, 3, 7), (10, 2, 3, 4), (5, 1, 4, 3)]),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 3]),
)
def test_a_block_is_exactly_its_elements_in_any_physical_order(shape, random, element, pad):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = FakeTensor(shape, order, element=element, pad=pad)
    try:
        runs = layer_runs("x", tensor, 5, 4)
    except ConfigError as error:
        assert "nested loops" in str(error) or "more than one axis" in str(error)
        return
    axis, pieces = find_block_axis("x", tensor, 5, 4)
    for block in range(5):
        visited = offsets_of_block(runs, block)
        assert len(visited) == len(set(visited)) == math.prod(shape) // 5 * element
        assert set(visited) == expected_addresses(tensor, axis, pieces, block)


def test_blocks_split_into_kernel_blocks_are_put_together():
    tensor = FakeTensor((80, 4, 64, 64))
    assert find_block_axis("x", tensor, 40, 128) == (0, 2)
    runs = layer_runs("x", tensor, 40, 128)
    assert runs.dims == () and runs.run_bytes == 2 * 4 * 64 * 64 * 2
    assert runs.block_stride_bytes == runs.run_bytes


def test_an_axis_of_the_same_size_by_chance_is_told_apart_by_its_stride():
    assert find_block_axis("x", FakeTensor((128, 4, 128, 64)), 128, 128) == (0, 1)
    assert find_block_axis("x", FakeTensor((4, 4, 128, 64)), 4, 128) == (0, 1)
    # Kernel blocks have half the size of blocks, and the number of blocks equals the elements of a head.
    assert find_block_axis("x", FakeTensor((128, 4, 8, 64)), 64, 16) == (0, 2)


def test_a_shape_that_does_not_tell_its_blocks_is_refused_by_name():
    for shape, says in (
        ((2, 2, 16, 4, 32), "more than one axis"),
        ((7, 4, 128, 64), "no axis"),
        ((4, 128, 64), "no axis"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_block_axis(
                "model.layers.0.self_attn.attn", FakeTensor(shape), 2 if shape[0] == 2 else 40, 16
            )
        message = str(caught.value)
        assert says in message and str(list(shape)) in message and "model.layers.0.self_attn.attn" in message


def test_an_expanded_tensor_is_refused():
    tensor = FakeTensor((5, 4, 8))
    tensor._strides[1] = 0
    with pytest.raises(ConfigError, match="overlaps itself"):
        layer_runs("x", tensor, 5, 8)


def layers(count, **kwargs):
    shape = kwargs.pop("shape", (40, 4, 128, 64))
    size = math.prod(shape) * 2
    return {
        f"model.layers.{i}.self_attn.attn": FakeTensor(shape, base=(1 << 20) + i * size, **kwargs)
        for i in range(count)
    }


def view(tensors, **changes):
    options = {"num_blocks": 40, "group": whole_group(128, 256), "heads": HEADS, "dtype": "bfloat16"}
    return build_view(tensors, **(options | changes))


def test_facts_of_rounded_kv_describe_the_rounded_records():
    for shape, blocks, block_tokens, fp8 in (
        ((40, 4, 128, 128), 40, 128, [1, 2, 4, 128, 2, 64]),  # CPU: K and V of a head lie together
        ((2, 40, 16, 8, 64), 40, 16, [1, 16, 2, 16, 8, 64]),  # FlashAttention
        ((40, 2, 16, 8, 64), 40, 16, [1, 16, 2, 16, 8, 64]),  # FlashInfer
        ((40, 64, 576), 40, 64, [1, 4, 1, 64, 1, 576]),  # MLA
        ((40, 16, 16, 64), 40, 16, [1, 16, 16, 16, 1, 64]),  # as many heads as tokens
    ):
        tensors = layers(2, shape=shape)
        options = {"num_blocks": blocks, "group": whole_group(block_tokens, 256)}
        plain = view(tensors, **options)
        made = view(tensors, fidelity="fp8", head_size=64, **options)
        assert math.prod(fp8[1:]) * 2 == plain.facts["section_bytes"]
        section_bytes = 4 * fp8[2] * fp8[4] + math.prod(fp8[1:])
        assert made.facts == {
            **plain.facts,
            "element_bytes": 1,
            "encoding": "fp8-e4m3/1",
            "encoded": fp8,
            "section_bytes": section_bytes,
            "payload_bytes": 2 * section_bytes,
        }
        assert made.slice.layout != plain.slice.layout
        assert made.payload_bytes == 2 * section_bytes
        assert (made.rounding, plain.rounding) == ((fp8[0], *fp8[2:]), None)


def test_fp8_is_refused_for_kv_that_is_not_of_16_bits():
    with pytest.raises(
        ConfigError, match=r"fidelity: 'fp8' rounds KV of bfloat16 or float16, .* is fp8_e4m3"
    ):
        view(layers(1), fidelity="fp8", head_size=64, dtype="fp8_e4m3")


def test_fp8_is_refused_for_layers_not_known_to_hold_16_bit_numbers():
    for name, kind in (("packed", ("kv_heads", "tokens", "turbo.content")), ("quantised", None)):
        quantisation = "NONE" if kind else "FP8_PER_TENSOR"
        tensors = {"layers.0": FakeTensor((20, 2, 16, 128))}
        kinds = {
            "layers.0": LayerKind(
                heads=2,
                block_tokens=16,
                page_bytes=2 * 16 * 128 * 2,
                axes=kind or ("kv_heads", "tokens", "k+v"),
                quantisation=quantisation,
                scales=(),
                latent=False,
            )
        }
        with pytest.raises(ConfigError, match=r"fidelity: .* KV cache of layer 'layers.0' .* use 'lossless'"):
            view(tensors, kinds=kinds, num_blocks=20, fidelity="fp8", head_size=64), name


def test_sections_follow_layer_numbers_not_names():
    tensors = layers(12)
    shuffled = dict(reversed(tensors.items()))
    made = view(shuffled)
    assert list(made.layers) == list(tensors)
    bases = [layer.base for layer in made.layers.values()]
    assert bases == sorted(bases)
    assert made.payload_bytes == 12 * 2 * 4 * 128 * 64 * 2
    assert made.facts["payload_bytes"] == made.payload_bytes
    assert sorted(["l10", "l9"], key=natural_order) == ["l9", "l10"]


def unlike_layers():
    """Every second layer with half the heads."""
    tensors = layers(4)
    for i in (1, 3):
        name = f"model.layers.{i}.self_attn.attn"
        tensors[name] = FakeTensor((40, 2, 128, 64), base=tensors[name].data_ptr())
    return tensors


def test_layers_that_differ_have_facts_and_a_shape_of_their_own():
    made = view(unlike_layers())
    wide, narrow = (heads * 128 * 64 * 2 for heads in (4, 2))
    assert made.facts["makes"] == [
        {"axes": [["axis1", heads], ["axis2", 128], ["axis3", 64]], "section_bytes": 2 * block}
        for heads, block in ((4, wide), (2, narrow))
    ]
    assert made.facts["section_makes"] == [0, 1, 0, 1]
    assert made.facts["element_bytes"] == 2
    assert not {"axes", "section_bytes"} & made.facts.keys()
    assert made.payload_bytes == made.facts["payload_bytes"] == 4 * (wide + narrow)
    plan = made.plan()
    assert [plan.section_bytes(section, 2) for section in range(4)] == [2 * wide, 2 * narrow] * 2
    assert plan.payload_bytes(2) == made.payload_bytes


def test_which_layers_differ_changes_the_slice():
    tensors = unlike_layers()
    turned = dict(
        zip(tensors, [*list(tensors.values())[1:], tensors["model.layers.0.self_attn.attn"]], strict=True)
    )
    assert view(turned).slice.digest() != view(tensors).slice.digest()


def test_layers_that_are_alike_keep_the_facts_by_which_their_records_are_found():
    made = view(layers(2))
    assert made.facts == {
        "format": "paged-blocks/2",
        "dtype": "bfloat16",
        "stored_dtype": "bfloat16",
        "quantisation": "",
        "element_bytes": 2,
        "chunk_tokens": 256,
        "block_tokens": 128,
        "axes": [["axis1", 4], ["axis2", 128], ["axis3", 64]],
        "layers": [0, 1],
        "scales": [],
        "sections": 2,
        "section_bytes": 131072,
        "payload_bytes": 262144,
    }
    assert made.slice.layout == "62546b1c2ed46ad54616478242e9936f3cb23428920022fc8a1459a554a6f517"
    digest = "bd5b462ba7bbe6100df91e1326dd55b3cb292a0e128a5233a779ab72be3610f8"
    assert made.slice.digest().hex() == digest, (
        "records of one group of full attention would not be found again"
    )


def test_a_record_of_a_window_holds_its_blocks_alone_and_its_facts_say_which():
    whole = view(layers(2), group=whole_group(64, 256), num_blocks=40)
    short = CacheGroup(3, Rule.LAST_WINDOW, 64, 4, 2, 1, window_tokens=100)
    made = view(layers(2), group=short)
    changed = {
        "rule": ["last_window", 100],
        "record_blocks": 2,
        "needed_chunks": 1,
        "section_bytes": whole.facts["section_bytes"] // 2,
        "payload_bytes": whole.facts["payload_bytes"] // 2,
    }
    assert made.facts == {**whole.facts, **changed}
    assert made.payload_bytes == made.plan().payload_bytes(2) == whole.payload_bytes // 2
    assert (made.slice.group, whole.slice.group) == (3, 0) and made.group == short


def test_each_group_and_each_window_has_a_slice_of_its_own():
    window = CacheGroup(1, Rule.LAST_WINDOW, 128, 2, 2, 1, window_tokens=256)
    groups = [
        whole_group(128, 256),
        whole_group(128, 256, number=1),
        window,
        window._replace(number=2),
        window._replace(window_tokens=200),
        window._replace(window_tokens=512, span=2),
        CacheGroup(1, Rule.STATE_AT, 128, 2, 1, 1),
    ]
    digests = {view(layers(2), group=group).slice.digest() for group in groups}
    assert len(digests) == len(groups)


def test_a_state_is_one_block_of_bytes_in_a_record():
    shape = (40, 1, 1, 3 * 64 + 5)
    kind = LayerKind(
        heads=1,
        block_tokens=1,
        page_bytes=shape[3] * 2,
        axes=("gdn@V.heads", "gdn@V.states", "gdn@V/bfloat16[3,64],bfloat16[5]"),
        quantisation="NONE",
        latent=False,
        scales=(),
    )
    tensors = layers(2, shape=shape)
    made = view(tensors, group=CacheGroup(1, Rule.STATE_AT, 528, 1, 1, 1), kinds=dict.fromkeys(tensors, kind))
    assert made.payload_bytes == made.plan().payload_bytes(1) == 2 * shape[3] * 2
    assert (made.facts["rule"], made.facts["needed_chunks"]) == (["state_at"], 1)
    assert made.facts["axes"] == [["gdn@V/bfloat16[3,64],bfloat16[5]", shape[3]]]
    other = kind._replace(axes=(*kind.axes[:2], "gdn@V/bfloat16[64,3],bfloat16[5]"))
    differs = view(tensors, group=made.group, kinds=dict.fromkeys(tensors, other))
    assert differs.slice.digest() != made.slice.digest()


def test_layers_that_differ_only_in_their_address_count_as_alike():
    tensors = layers(2)
    spread = FakeTensor((40, 4, 128, 64), order=(1, 0, 2, 3), base=1 << 30)
    tensors["model.layers.1.self_attn.attn"] = spread
    made = view(tensors)
    assert made.slice == view(layers(2)).slice
    assert len({layer.shape for layer in made.layers.values()}) == 2


def test_fp8_of_layers_that_differ_is_refused_with_what_differs():
    with pytest.raises(ConfigError, match=r"fidelity: 'fp8' .* axes, section_bytes; use 'lossless'"):
        view(unlike_layers(), fidelity="fp8", head_size=64)


def test_ranks_that_share_records_must_hold_alike_layers():
    shared = HEADS._replace(replicas=2)
    assert view(layers(2), heads=shared).slice == view(layers(2)).slice
    with pytest.raises(ConfigError, match=r"layers\.1.*layers\.0.*2 tensor-parallel ranks"):
        view(unlike_layers(), heads=shared)


def test_whatever_changes_the_meaning_of_a_record_changes_the_slice():
    for changes in (
        {"group": whole_group(64, 256)},
        {"group": whole_group(128, 512)},
        {"dtype": "float16"},
        {"heads": Heads((0, 2), (4, 8), 2)},
        {"heads": Heads((2, 4), (0, 4), 2)},
    ):
        assert view(layers(2), **changes).slice.digest() != view(layers(2)).slice.digest()


def test_physical_order_changes_the_slice_and_place_does_not():
    shape = (40, 16, 4, 32)
    straight = view(layers(2, shape=shape), group=whole_group(16, 256))
    turned = view(layers(2, shape=shape, order=(0, 2, 1, 3)), group=whole_group(16, 256))
    assert straight.slice.digest() != turned.slice.digest()
    moved = {name: FakeTensor(shape, base=t.data_ptr() + 4096) for name, t in layers(2, shape=shape).items()}
    assert view(moved, group=whole_group(16, 256)).slice.digest() == straight.slice.digest()


def test_tensor_parallel_ranks_split_the_heads_and_replicas_share_a_slice():
    options = {"layers": (0, 32), "mla": False, "pp_size": 1}
    assert heads_of(total_kv_heads=8, tp_rank=1, tp_size=2, **options) == Heads((0, 32), (4, 8), 2)
    replicas = [heads_of(total_kv_heads=2, tp_rank=rank, tp_size=4, **options) for rank in range(4)]
    assert [r.kv_heads for r in replicas] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert {(r.engine_slices, r.replicas) for r in replicas} == {(2, 2)}
    latent = heads_of(total_kv_heads=1, tp_rank=3, tp_size=4, layers=(0, 30), mla=True, pp_size=2)
    assert latent == Heads((0, 30), (0, 1), 2, replicas=4)
    with pytest.raises(ConfigError, match="3 does not divide 8"):
        heads_of(total_kv_heads=8, tp_rank=0, tp_size=3, **options)
