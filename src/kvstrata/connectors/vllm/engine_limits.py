"""Decides from vLLM's configuration what an engine may load and store, and which loads are safe.

The order of vLLM's steps, which decides the latter, follows from its configuration.  vLLM's objects are read by
attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

from typing import Any

from kvstrata.errors import ConfigError


def no_reuse_reason(vllm_config: Any) -> str:
    """Why this engine must not load KV that was computed earlier; "" if it may.

    Pooling over all tokens (MEAN, CLS, STEP) needs the hidden states of the whole prompt.  With such pooling, vLLM
    turns its own prefix cache off, and its pooler raises an exception if tokens were not computed.
    """
    model = vllm_config.model_config
    if getattr(model, "is_prefix_caching_supported", True):
        return ""
    pooler = getattr(model, "pooler_config", None)
    kinds = [getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type")]
    named = "/".join(str(kind) for kind in kinds if kind)
    return f"vLLM supports no prefix caching for this model{f' with {named} pooling' if named else ''}"


def media_are_counted(vllm_config: Any) -> bool:
    """Whether vLLM numbers images and the like instead of hashing their content.

    vLLM does so when both its processor cache and its prefix cache are off.  The numbers begin anew with each process.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is not None
        and getattr(multimodal, "mm_processor_cache_gb", None) == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


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
    if _returns_routed_experts(vllm_config):
        return "it returns the routed experts of all tokens (--enable-return-routed-experts), which are not stored"
    return ""


def _returns_routed_experts(vllm_config: Any) -> bool:
    """Whether --enable-return-routed-experts is on: vLLM 0.31 moved the option to `aux_output_config`."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is not None:
        return bool(outputs.enabled)
    return bool(getattr(vllm_config.model_config, "enable_return_routed_experts", False))
