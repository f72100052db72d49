"""Facts of layers from vLLM's descriptions: an axis is named only if its backend is known to give it that meaning."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.groups import read_groups, whole_group
from kvstrata.connectors.vllm.kv_view import Heads, build_view, chunk_bytes, layer_kinds, layers_of_groups
from kvstrata.errors import ConfigError
from tests.unit.connectors.test_kv_view import FakeTensor

NAME = "model.layers.7.self_attn.attn"


class FakeScale:
    """A scale: the methods of a torch tensor that are called on it."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def detach(self):
        return self

    def cpu(self):
        return self

    def reshape(self, size):
        assert size == -1
        return self

    def tolist(self):
        return list(self.numbers)


def spec(**changes):
    """Stands for vLLM's `FullAttentionSpec`."""
    fields = {
        "block_size": 16,
        "num_heads": 4,
        "head_size": 64,
        "head_size_v": 64,
        "kv_quant_mode": SimpleNamespace(name="NONE"),
        "num_head_slots": None,
        "state_content_bytes": None,
        "unpadded_page_size_bytes": 4 * 16 * 128 * 2,
        "tokens_per_state": 1,
    }
    return type("FullAttentionSpec", (), fields | changes)()


def module(backend="FLASH_ATTN", **attributes):
    """Stands for vLLM's `Attention`."""
    return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), **attributes)


def written_by(version):
    """Names each arrangement after this version of vLLM."""
    return lambda backend, spec, module: f"@{version}"


class Modes(enum.IntEnum):
    """Stands for vLLM 0.33's `KVQuantMode`, whose last mode shares its number with another."""

    NONE = 0
    OCTAVE_K3V4 = 12
    CUSTOM = 12


@pytest.mark.parametrize(("mode", "named"), [(Modes.NONE, "NONE"), (Modes.CUSTOM, "OCTAVE_K3V4/CUSTOM")])
def test_a_mode_that_shares_its_number_is_not_taken_for_the_other_one(mode, named):
    kinds = layer_kinds([group(spec(kv_quant_mode=mode))], {NAME: module()}, written_by("0.33.0"))
    assert kinds[NAME].quantisation == named


def group(layer_spec, names=(NAME,)):
    return SimpleNamespace(kv_cache_spec=layer_spec, layer_names=list(names))


def kind_of(layer_spec, layer_module):
    return layer_kinds([group(layer_spec)], {NAME: layer_module}, written_by("0.32.0"))[NAME]


QUANTISED = {
    "kv_quant_mode": SimpleNamespace(name="FP8_PER_TENSOR"),
    "unpadded_page_size_bytes": 4 * 16 * 128,
}


def view(kinds, tensors=None, **changes):
    options = {"num_blocks": 40, "group": whole_group(16, 64), "heads": Heads((7, 8), (0, 4), 1)}
    tensors = tensors or {NAME: FakeTensor((40, 4, 16, 128))}
    return build_view(layers_of_groups(tensors, kinds), dtype="bfloat16", kinds=kinds, **(options | changes))


def test_an_arrangement_that_only_its_writer_knows_is_shared_where_it_has_the_same_name():
    for backend, opaque in (
        ("CPU_ATTN", True),
        ("SOMETHING", True),
        ("FLASH_ATTN", False),
        ("FLASHINFER", False),
    ):
        one, other, again = (
            view(layer_kinds([group(spec())], {NAME: module(backend)}, written_by(version)))
            for version in ("0.32.0", "0.33.0", "0.32.0")
        )
        assert one.slice == again.slice and (one.slice != other.slice) is opaque, backend


def test_scales_are_facts_of_quantised_layers_alone():
    scales = {"_k_scale": FakeScale(0.25), "_v_scale": FakeScale(1.0, 2.0)}
    assert kind_of(spec(), module(**scales)).scales == ()
    found = kind_of(spec(**QUANTISED), module(**scales))
    assert [float.fromhex(scale) for scale in found.scales] == [0.25, 1.0, 2.0]
    tensors = {NAME: FakeTensor((40, 4, 16, 128), element=1)}
    made = view({NAME: found}, tensors)
    assert made.facts["scales"] == [list(found.scales)] and made.facts["layers"] == [7]
    assert view({NAME: found._replace(scales=("0x1p+0",))}, tensors).slice != made.slice


def test_blocks_are_in_front_where_the_shape_is_as_announced_though_other_axes_fit():
    # Heads outermost in memory, as many as there are blocks: by size alone the heads would be taken for the blocks.
    kind = kind_of(spec(num_heads=4), module())
    tensors = {NAME: FakeTensor((4, 4, 16, 128), order=(1, 0, 2, 3))}
    made = view({NAME: kind}, tensors, num_blocks=4)
    [layer] = made.layers.values()
    assert layer.block_stride_bytes == 16 * 128 * 2 and layer.dims == ((4, 4 * 16 * 128 * 2),)


def test_a_block_of_another_size_than_announced_is_refused():
    kinds = {NAME: kind_of(spec(unpadded_page_size_bytes=999), module())}
    with pytest.raises(ConfigError, match=r"layers\.7.* 16384 bytes, but vLLM announces 999"):
        view(kinds)


def test_a_group_may_describe_each_layer():
    names = [f"model.layers.{i}.attn" for i in range(3)]
    # As two descriptions that differ in nothing that the bytes show.
    each = type(
        "UniformTypeKVCacheSpecs", (), {"block_size": 16, "kv_cache_specs": {n: spec() for n in names}}
    )()
    both = [group(each, names), group(spec(), names)]
    assert read_groups(both[:1], 64, 256) == read_groups(both[1:], 64, 256) == [whole_group(16, 64)]
    assert [chunk_bytes(one, 4) for one in both] == [3 * 4 * 16384] * 2
    modules = dict.fromkeys(names, module())
    assert layer_kinds(both[:1], modules, written_by("0.32.0")) == layer_kinds(
        both[1:], modules, written_by("0.32.0")
    )
    each.kv_cache_specs[names[1]] = type("CrossAttentionSpec", (), {})()
    with pytest.raises(ConfigError, match="CrossAttentionSpec is not supported"):
        read_groups(both[:1], 64, 256)


def test_a_tensor_of_no_group_is_refused_unless_it_is_another_layers():
    kinds = layer_kinds([group(spec())], {NAME: module()}, written_by("0.32.0"))
    blocks = FakeTensor((40, 4, 16, 128))
    shared = "model.layers.8.self_attn.attn"
    assert view(kinds, {NAME: blocks, shared: blocks}).layers.keys() == {NAME}
    scales = FakeTensor((40, 4, 16), base=1 << 30, element=4)
    with pytest.raises(ConfigError, match=r"'model.layers.7.scales' .*40, 4, 16.* in no cache group"):
        view(kinds, {NAME: blocks, "model.layers.7.scales": scales})


INDEXER = "model.layers.7.self_attn.indexer.k_cache"


def latents_with_an_indexer():
    """(kinds, tensors) of one layer that has latents and an indexer."""
    latent = {"block_size": 64, "num_heads": 1, "head_size_v": 0, "unpadded_page_size_bytes": 64 * 656}
    specs = {
        NAME: spec(head_size=576, state_content_bytes=656, cache_dtype_str="fp8_ds_mla", **latent),
        INDEXER: spec(head_size=132, **latent | {"unpadded_page_size_bytes": 64 * 132}),
    }
    each = type("UniformTypeKVCacheSpecs", (), {"block_size": 64, "kv_cache_specs": specs})()
    modules = {NAME: module("FLASHMLA_SPARSE"), INDEXER: module("DEEPSEEK_V32_INDEXER")}
    tensors = {
        NAME: FakeTensor((40, 1, 64, 656), element=1),
        INDEXER: FakeTensor((40, 1, 64, 132), element=1, base=1 << 30),
    }
    return layer_kinds([group(each, tuple(specs))], modules, written_by("0.32.0")), tensors


def test_a_layer_with_heads_beside_latents_is_refused_where_ranks_share_records():
    kinds, tensors = latents_with_an_indexer()
    draft = "model.layers.8.self_attn.attn"
    kinds[draft] = kind_of(spec(block_size=64, num_heads=1, unpadded_page_size_bytes=64 * 256), module())
    tensors[draft] = FakeTensor((40, 1, 64, 128), base=1 << 32)
    assert len(view(kinds, tensors, group=whole_group(64, 64), heads=Heads((0, 9), (0, 1), 1)).layers) == 3
    with pytest.raises(ConfigError, match="8 tensor-parallel ranks count as holding the same KV heads"):
        view(kinds, tensors, group=whole_group(64, 64), heads=Heads((0, 9), (0, 1), 1, replicas=8))
