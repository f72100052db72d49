"""Groups of a model's layers: what a hit needs of each, which blocks a record holds, and which models are refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connectors.vllm.groups import CacheGroup, Rule, read_groups, whole_group
from kvstrata.errors import ConfigError

DEFAULT = 256


def layer(kind, block_size=16, **fields):
    """Stands for one of vLLM's descriptions of a layer."""
    return type(kind, (), {"block_size": block_size, **fields})()


def group(*layers):
    """Stands for vLLM's `KVCacheGroupSpec`; several layers are described one by one."""
    names = [f"model.layers.{i}.attn" for i in range(len(layers))]
    spec = layers[0]
    if len(layers) > 1:
        each = dict(zip(names, layers, strict=True))
        spec = layer("UniformTypeKVCacheSpecs", spec.block_size, kv_cache_specs=each)
    return SimpleNamespace(kv_cache_spec=spec, layer_names=names)


def full(**fields):
    return layer("FullAttentionSpec", **fields)


def window(tokens, **fields):
    return layer("SlidingWindowSpec", sliding_window=tokens, **fields)


def states(mode="align", **fields):
    return layer("MambaSpec", mamba_cache_mode=mode, **fields)


def read(*layers, chunk_tokens=DEFAULT):
    return read_groups([group(each) for each in layers], chunk_tokens, DEFAULT)


def test_of_full_attention_a_hit_needs_every_block_of_every_chunk():
    for kind in ("FullAttentionSpec", "MLAAttentionSpec"):
        [found] = read(layer(kind))
        assert found == whole_group(16, 256) == CacheGroup(0, Rule.PREFIX, 16, 16, 16, 0)
        assert list(found.blocks_of(2)) == list(range(32, 48)) and found.facts() == {}


def test_of_a_window_a_hit_needs_the_last_chunks_that_it_covers():
    for tokens, span, record_blocks in (
        (1, 1, 1),
        (16, 1, 1),
        (17, 1, 2),
        (255, 1, 16),
        (256, 1, 16),
        (257, 2, 16),
        (512, 2, 16),
        (1024, 4, 16),
        (1025, 5, 16),
    ):
        for kind in ("SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
            name = "sliding_window" if kind == "SlidingWindowSpec" else "attention_chunk_size"
            _, found = read(full(), layer(kind, **{name: tokens}))
            assert found == CacheGroup(1, Rule.LAST_WINDOW, 16, 16, record_blocks, span, tokens)
            assert list(found.blocks_of(1)) == list(range(32 - record_blocks, 32))
            assert found.facts() == {
                "rule": ["last_window", tokens],
                "record_blocks": record_blocks,
                "needed_chunks": span,
            }


@given(
    tokens=st.integers(1, 5000), block_tokens=st.sampled_from([1, 8, 16, 48]), chunk_blocks=st.integers(1, 20)
)
def test_the_last_records_hold_a_window_and_none_of_them_is_without_use(tokens, block_tokens, chunk_blocks):
    chunk_tokens = block_tokens * chunk_blocks
    [found] = read_groups([group(window(tokens, block_size=block_tokens))], chunk_tokens, 0)
    end = found.span + 3
    blocks = {block for chunk in range(end - found.span, end) for block in found.blocks_of(chunk)}
    first_token = end * chunk_tokens - tokens
    needed = range(first_token // block_tokens, end * chunk_blocks)
    assert set(needed) <= blocks
    assert len(blocks) - len(needed) < found.record_blocks, "a whole record would not be needed"
    assert found.record_blocks == chunk_blocks or blocks == set(needed)


def test_of_states_a_hit_needs_the_one_after_its_last_token():
    whole, found = read(full(), states(block_size=528), chunk_tokens=DEFAULT)
    chunk_tokens = math.lcm(16, 528)
    assert whole == whole_group(16, chunk_tokens)
    assert found == CacheGroup(1, Rule.STATE_AT, 528, chunk_tokens // 528, 1, 1)
    assert list(found.blocks_of(4)) == [4]
    assert found.facts() == {"rule": ["state_at"], "record_blocks": 1, "needed_chunks": 1}


def test_a_configured_chunk_size_that_does_not_suit_is_refused_with_one_that_does():
    for sizes, chunk_tokens, says in (
        (
            (128,),
            100,
            "100 tokens is not a multiple of vLLM's block_size of 128 tokens; set chunk_size to 128",
        ),
        (
            (128, 128),
            129,
            "129 tokens is not a multiple of vLLM's block_size of 128 .* set chunk_size to 256",
        ),
        ((32, 48), 64, r"64 tokens is not a multiple of vLLM's block sizes \[32, 48\]; set chunk_size to 96"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            read(*(full(block_size=size) for size in sizes), chunk_tokens=chunk_tokens)
        assert caught.value.field == "chunk_size"


def test_chunks_end_where_vllm_keeps_states():
    for chunk_tokens in (1056, 500):
        with pytest.raises(
            ConfigError, match="states of this model every 528 tokens; set chunk_size to 528, or"
        ) as caught:
            read(full(), states(block_size=528), chunk_tokens=chunk_tokens)
        assert caught.value.field == "chunk_size"
        assert [each.chunk_tokens for each in read(states(block_size=528), chunk_tokens=528)] == [528]


def test_layers_that_cannot_be_served_are_refused_with_their_group():
    for bad, says in (
        (layer("CrossAttentionSpec"), r"kv_cache_groups\[1\]: CrossAttentionSpec is not supported so far"),
        (full(non_causal=True), r"kv_cache_groups\[1\]: attention is not causal"),
        (window(64, non_causal=True), r"kv_cache_groups\[1\]: attention is not causal"),
        (layer("MLAAttentionSpec", tokens_per_state=4), "4 tokens per stored state"),
        (
            states("none"),
            r"\[1\]: .* \(mamba_cache_mode is 'none'\); start vLLM with --enable-prefix-caching",
        ),
        (states("all"), "mamba_cache_mode is 'all'"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            read(full(), bad)
        assert caught.value.field == "kv_cache_groups"


def test_layers_of_one_group_follow_one_rule():
    with pytest.raises(
        ConfigError, match=r"\[0\]: its layers follow different rules \(last_window 64, last_window 80\)"
    ):
        read_groups([group(window(64), window(64), window(80))], DEFAULT, DEFAULT)
    with pytest.raises(ConfigError, match=r"\(last_window 64, prefix\)"):
        read_groups([group(full(), window(64))], DEFAULT, DEFAULT)
    [found] = read_groups([group(window(64), window(60, extra_retained_tokens=4))], DEFAULT, DEFAULT)
    assert found.window_tokens == 64


def test_an_engine_without_kv_cache_is_refused():
    with pytest.raises(ConfigError, match="vLLM announces no KV cache"):
        read_groups([], DEFAULT, DEFAULT)
