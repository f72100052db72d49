"""The part of `versions_run` that checks groups of layers: what vLLM makes of layers of several kinds."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstrata.connectors.vllm.groups import read_groups
from kvstrata.errors import ConfigError
from tests.vllm.versions_engine import BLOCK, CHUNK, LAYER_NAMES, Client, DryEngine, vllm_config

UNIFORM, WHOLE, WINDOW = "UniformTypeKVCacheSpecs", ["prefix", 128, 2, 0], ["last_window", 128, 2, 2]


def check_each_group_that_vllm_makes_has_the_rule_of_its_layers(folder: Path) -> None:
    module = "planning" if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") else "utils"
    grouping = importlib.import_module(f"vllm.v1.core.kv_cache_{module}")
    config = vllm_config(folder)
    config.cache_config.kv_cache_layout = "LBNHC"  # vLLM's engine core decides it
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
    size = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**size), SlidingWindowSpec(sliding_window=512, **size)
    large = FullAttentionSpec(**size | {"head_size": 64})
    latent = MLAAttentionSpec(**size | {"num_kv_heads": 1, "head_size": 576})
    indexer = MLAAttentionSpec(**size | {"num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8})
    chunked = ChunkedLocalAttentionSpec(attention_chunk_size=256, **size)
    states, states_not_kept = (
        MambaSpec(block_size=BLOCK, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode)
        for mode in ("align", "none")
    )
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([full] * 4, {"FullAttentionSpec": WHOLE}),
        ([latent] * 4, {"MLAAttentionSpec": WHOLE}),
        ([latent, indexer] * 2, {UNIFORM: WHOLE}),
        ([full, large] * 2, {UNIFORM: WHOLE}),
        ([window] * 4, {"SlidingWindowSpec": WINDOW}),
        ([window, window, window, full], {"FullAttentionSpec": WHOLE, "SlidingWindowSpec": WINDOW}),
        ([chunked] * 4, {"ChunkedLocalAttentionSpec": ["last_window", 128, 2, 1]}),
        ([states] * 4, {"MambaSpec": "set chunk_size to 128"}),
        ([states_not_kept] * 4, {"MambaSpec": "mamba_cache_mode is 'none'"}),
    ]
    for specs, expected in cases:
        groups = grouping.get_kv_cache_groups(config, dict(zip(LAYER_NAMES, specs, strict=True)))
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        assert set(kinds) == expected.keys(), kinds
        try:
            found = [
                [group.rule, group.block_tokens, group.record_blocks, group.span]
                for group in read_groups(groups, CHUNK, 0)
            ]
            assert found == [expected[kind] for kind in kinds], kinds
        except ConfigError as error:
            assert expected[kinds[0]] in str(error)


def check_windows_are_stored_loaded_and_recovered_step_by_step(folder: Path) -> None:
    """vLLM's own scheduler keeps the blocks of full attention and of windows in tables of their own."""
    for v2 in (False, True):
        Client.hits = 0
        engine = DryEngine(vllm_config(folder), v2=v2, windows=True)
        engine.add(1000)
        stores = [[name, chunks] for step in engine.run() for name, chunks, _ in step.get("stores", ())]
        assert stores == [["r1", 2], ["r1", 1], ["r1", 1]], (
            "three chunks, and the window before the prompt's end"
        )
        Client.hits = 100
        engine.add(1000, first=2000)
        hit, after, *_ = engine.run()
        assert [load[:3] for load in hit["loads"]] == [["r2", 3, True], ["r2", 1, True]]
        assert hit["received"] == ["r2"] and after == {"scheduled": {"r2": 232}}
        engine.copies.fails = 1
        engine.add(1000, first=4000)
        failed, again, *_ = engine.run()
        assert (failed["received"], failed["not_loaded"]) == (["r3"], ["r3"]) and "bad" not in failed
        assert again["scheduled"] == {"r3": 512} and again["stores"][0][1] == 2
        assert not any(engine.left().values())
