"""Decides which loads are safe in an engine, by the order of vLLM's steps, which follows from its configuration.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

from typing import Any

from kvstrata.connectors.vllm.compat.routed_experts import returns_routed_experts
from kvstrata.errors import ConfigError


def check_steps(vllm_config: Any, load_mode: str) -> None:
    """Raises ConfigError for an engine whose steps this connector cannot follow, or whose `load_mode` is not safe."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and vllm_config.speculative_config is not None and not vllm_config.use_v2_model_runner:
        # In all stages but the last, that runner does not call wait_for_save in steps that compute: nothing would be
        # stored, and the blocks of finished requests would stay allocated forever.
        raise ConfigError(
            f"speculative_config: speculative decoding with pipeline_parallel_size {stages} on vLLM's V1 model runner "
            "is not supported; set pipeline_parallel_size to 1, turn speculative decoding off, or use the V2 model "
            "runner (VLLM_USE_V2_MODEL_RUNNER=1)",
            field="speculative_config",
        )
    if load_mode == "sync" and not may_load_synchronously(vllm_config):
        why = f"pipeline_parallel_size {stages}" if stages > 1 else "asynchronous scheduling"
        what = "set pipeline_parallel_size to 1" if stages > 1 else "start vLLM with --no-async-scheduling"
        raise ConfigError(
            f"load_mode: 'sync' is not safe in this engine: with {why} vLLM plans a step before it knows whether the "
            "loads of the previous step have failed, and would emit tokens computed on bad KV; set load_mode to 'auto' "
            f"or 'async', or {what}",
            field="load_mode",
        )


def may_load_synchronously(vllm_config: Any) -> bool:
    """Whether vLLM knows the outcome of each step's loads before it plans the next step.

    vLLM does not know it when several steps are under way at once, by asynchronous scheduling or pipeline parallelism.
    An asynchronous load always ends before vLLM plans a step that uses its blocks.
    """
    return bool(vllm_config.max_concurrent_batches == 1)


def no_load_reason(vllm_config: Any) -> str:
    """Why this engine must load nothing, though it may store; "" if it may load.

    Routed experts are returned for each token of the prompt; only the engine that computed a token knows its experts.
    """
    if returns_routed_experts(vllm_config):
        return "it returns the routed experts of all tokens (--enable-return-routed-experts), which are not stored"
    return ""
