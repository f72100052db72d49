"""The part of `versions_run` that checks groups of layers: what vLLM makes of layers of several kinds."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
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


def check_groups_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The groups that vLLM makes of layers of several kinds, and what `read_groups` says about them."""
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
    for case, specs in {
        "full": [full] * 4,
        "latents": [latent] * 4,
        "latents and indexer": [latent, indexer] * 2,
        "full of two sizes": [full, large] * 2,
        "windows": [window] * 4,
        "windows and full": [window, window, window, full],
        "attention in chunks": [chunked] * 4,
        "states": [states] * 4,
        "states without prefix caching": [states_not_kept] * 4,
    }.items():
        groups = grouping.get_kv_cache_groups(config, dict(zip(LAYER_NAMES, specs, strict=True)))
        try:
            verdict: Any = [
                [group.rule, group.block_tokens, group.record_blocks, group.span]
                for group in read_groups(groups, CHUNK, 0)
            ]
        except ConfigError as error:
            verdict = str(error)
        yield {
            "check": "groups",
            "case": case,
            "kinds": [type(group.kv_cache_spec).__name__ for group in groups],
            "verdict": verdict,
        }


def check_group_traces(folder: Path) -> Iterator[dict[str, Any]]:
    """Traces of an engine with full attention and windows: a prompt in pieces, a hit, a hit that cannot be loaded."""
    for v2 in (False, True):
        Client.hits = 0
        engine = DryEngine(vllm_config(folder), v2=v2, windows=True)
        trace = {}
        engine.add(1000)
        trace["fresh"] = engine.run()
        Client.hits = 100
        engine.add(1000, first=2000)
        trace["hit"] = engine.run()
        engine.copies.fails = 1
        engine.add(1000, first=4000)
        trace["failed"] = engine.run()
        yield {"check": "group trace", "runner": "v2" if v2 else "v1", **trace, "left": engine.left()}
