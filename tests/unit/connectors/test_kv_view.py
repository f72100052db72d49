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
    heads_of,
    layer_runs,
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


def kind_of(tensor, num_blocks=40, block_tokens=None, **changes):
    """vLLM's description of the layer with this tensor."""
    return LayerKind(
        heads=tensor.shape[1],
        block_tokens=block_tokens or tensor.shape[2] * (tensor.shape[0] // num_blocks),
        page_bytes=math.prod(tensor.shape) // num_blocks * tensor.element_size(),
        axes=("kv_heads", "tokens", "k+v"),
        quantisation="NONE",
        latent=False,
        scales=(),
    )._replace(**changes)


def expected_addresses(tensor, pieces, block):
    """The byte addresses of one block by the definition of strides."""
    addresses = set()
    ranges = [range(size) for size in tensor.shape]
    ranges[0] = range(block * pieces, (block + 1) * pieces)
    for index in itertools.product(*ranges):
        element = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        start = tensor.data_ptr() + element * tensor.element_size()
        addresses.update(range(start, start + tensor.element_size()))
    return addresses


@given(
    st.sampled_from([(5, 2, 3, 4), (5, 5, 5, 2), (10, 2, 3, 4), (5, 1, 4, 3), (15, 3, 1, 2)]),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 3]),
)
def test_a_block_is_exactly_its_elements_in_any_physical_order(shape, random, element, pad):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = FakeTensor(shape, order, element=element, pad=pad)
    try:
        runs = layer_runs("x", tensor, 5, kind_of(tensor, 5))
    except ConfigError as error:
        assert "nested loops" in str(error)
        return
    for block in range(5):
        visited = offsets_of_block(runs, block)
        assert len(visited) == len(set(visited)) == math.prod(shape) // 5 * element
        assert set(visited) == expected_addresses(tensor, shape[0] // 5, block)


def test_a_shape_that_vllm_has_not_announced_is_refused_by_name():
    announced = kind_of(FakeTensor((40, 4, 128, 64)))
    name = "model.layers.0.self_attn.attn"
    for shape in ((2, 40, 128, 4, 32), (40, 128, 4, 64), (41, 4, 128, 64), (80, 4, 128, 64), (7, 4, 128, 64)):
        with pytest.raises(ConfigError, match="not the one that vLLM announces: 40 blocks") as caught:
            layer_runs(name, FakeTensor(shape), 40, announced)
        assert str(list(shape)) in str(caught.value) and name in str(caught.value)


def test_an_expanded_tensor_is_refused():
    tensor = FakeTensor((5, 4, 8, 2))
    tensor._strides[1] = 0
    with pytest.raises(ConfigError, match="overlaps itself"):
        layer_runs("x", tensor, 5, kind_of(tensor, 5))


def layers(count, **kwargs):
    shape = kwargs.pop("shape", (40, 4, 128, 64))
    size = math.prod(shape) * 2
    return {
        f"model.layers.{i}.self_attn.attn": FakeTensor(shape, base=(1 << 20) + i * size, **kwargs)
        for i in range(count)
    }


def view(tensors, **changes):
    options = {"num_blocks": 40, "group": whole_group(128, 256), "heads": HEADS, "dtype": "bfloat16"}
    options["kinds"] = {name: kind_of(tensor) for name, tensor in tensors.items()}
    return build_view(tensors, **(options | changes))


def test_facts_of_rounded_kv_describe_the_rounded_records():
    for shape, order, fp8 in (
        ((40, 4, 128, 128), None, [1, 2, 4, 128, 2, 64]),  # K and V of a head lie together
        ((40, 8, 16, 64), (0, 2, 1, 3), [1, 16, 1, 16, 8, 64]),  # tokens outside heads
        ((40, 1, 64, 576), None, [1, 4, 1, 64, 1, 576]),  # MLA
        ((40, 16, 16, 64), None, [1, 16, 16, 16, 1, 64]),  # as many heads as tokens
    ):
        tensors = layers(2, shape=shape, order=order)
        options = {"group": whole_group(shape[2], 256)}
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
    for change in ({"axes": ("kv_heads", "tokens", "turbo.content")}, {"quantisation": "FP8_PER_TENSOR"}):
        tensors = {"layers.0": FakeTensor((40, 2, 16, 128))}
        kinds = {"layers.0": kind_of(tensors["layers.0"], **change)}
        with pytest.raises(ConfigError, match=r"fidelity: .* KV cache of layer 'layers.0' .* use 'lossless'"):
            view(tensors, kinds=kinds, group=whole_group(16, 256), fidelity="fp8", head_size=64)


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
        {"axes": [["kv_heads", heads], ["tokens", 128], ["kv", 2], ["dim", 32]], "section_bytes": 2 * block}
        for heads, block in ((4, wide), (2, narrow))
    ]
    assert made.facts["section_makes"] == [0, 1, 0, 1]
    assert made.facts["element_bytes"] == 2
    assert not {"axes", "section_bytes"} & made.facts.keys()
    assert made.payload_bytes == made.facts["payload_bytes"] == 4 * (wide + narrow)
    plan = made.plan()
    assert [plan.section_bytes(section, 2) for section in range(4)] == [2 * wide, 2 * narrow] * 2
    assert plan.payload_bytes(2) == made.payload_bytes


def test_layers_that_are_alike_keep_the_facts_by_which_their_records_are_found():
    made = view(layers(2))
    assert made.facts == {
        "format": "paged-blocks/2",
        "dtype": "bfloat16",
        "stored_dtype": "bfloat16",
        "quantisation": "NONE",
        "element_bytes": 2,
        "chunk_tokens": 256,
        "block_tokens": 128,
        "axes": [["kv_heads", 4], ["tokens", 128], ["kv", 2], ["dim", 32]],
        "layers": [0, 1],
        "scales": [],
        "sections": 2,
        "section_bytes": 131072,
        "payload_bytes": 262144,
    }
    assert made.slice.layout == "525e8ab5187ebbb9c1a5b20dec237526f68a5d6cf0ad94ab2e54f8d185f864d0"
    digest = "54f23b8838248e09df67d1c8db1d334bfd87f880f75febb91cc4a638234bf1e5"
    assert made.slice.digest().hex() == digest, (
        "records of one group of full attention would not be found again"
    )


def test_a_state_is_one_block_of_bytes_in_a_record():
    shape = (40, 1, 1, 3 * 64 + 5)
    axes = ("gdn@V.heads", "gdn@V.states", "gdn@V/bfloat16[3,64],bfloat16[5]")
    kind = kind_of(FakeTensor(shape), axes=axes)
    tensors = layers(2, shape=shape)
    made = view(tensors, group=CacheGroup(1, Rule.STATE_AT, 528, 1, 1, 1), kinds=dict.fromkeys(tensors, kind))
    assert made.payload_bytes == made.plan().payload_bytes(1) == 2 * shape[3] * 2
    assert (made.facts["rule"], made.facts["needed_chunks"]) == (["state_at"], 1)
    assert made.facts["axes"] == [["gdn@V/bfloat16[3,64],bfloat16[5]", shape[3]]]
    other = kind._replace(axes=(*kind.axes[:2], "gdn@V/bfloat16[64,3],bfloat16[5]"))
    differs = view(tensors, group=made.group, kinds=dict.fromkeys(tensors, other))
    assert differs.slice.digest() != made.slice.digest()


def test_fp8_of_layers_that_differ_is_refused_with_what_differs():
    with pytest.raises(ConfigError, match=r"fidelity: 'fp8' .* axes, section_bytes; use 'lossless'"):
        view(unlike_layers(), fidelity="fp8", head_size=64)


def test_whatever_changes_the_meaning_of_a_record_changes_the_slice():
    for changes in (
        {"group": whole_group(64, 256)},
        {"group": whole_group(128, 512)},
        {"dtype": "float16"},
        {"heads": Heads((0, 2), (4, 8), 2)},
        {"heads": Heads((2, 4), (0, 4), 2)},
    ):
        assert view(layers(2), **changes).slice.digest() != view(layers(2)).slice.digest()


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
