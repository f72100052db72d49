"""vLLM's configuration as facts of the identity: all of it but for a closed list of settings known to be harmless.

A setting that a version of vLLM adds is therefore part of the identity until somebody puts it on the list: engines that
differ in it share nothing, which costs misses, and no engine gets KV that means something else.  While it is off by
default, engines share KV with those of earlier versions.

A setting is harmless if it does not change what a prompt's KV means, or if the identity, the keys or the layout's facts
name its effect otherwise.  Choices between kernels of one computation count as harmless, because their results differ
as much between two GPUs, or between a request alone and in a batch.  vLLM's objects are read by attribute only.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvstrata.types import canonical_json

FOLDER_FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor")
"""Load formats that read the weight files which lie in the model's folder, and nothing else."""

_MODEL = (
    # Named by the identity otherwise, or read: the files, and the configuration of the model.
    *("model", "revision", "hf_config", "hf_text_config", "hf_config_path", "config_format"),
    *("is_submodel_config", "word_embeddings_untied_by_checkpoint", "multimodal_config"),
    # Decide which tokens a request has, and the tokens are in the keys.
    *("tokenizer", "tokenizer_revision", "skip_tokenizer_init"),
    # Decide what is done with the model's output.
    *("max_logprobs", "logprobs_mode", "return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay"),
    *("generation_config", "override_generation_config", "logits_processors", "pooler_config", "seed"),
    "enable_return_routed_experts",
    # How much is served, to whom, and how memory is managed. `max_model_len`: see `has_long_rope`.
    *("max_model_len", "spec_target_max_model_len", "served_model_name", "hf_token"),
    *("allowed_local_media_path", "allowed_media_domains", "renderer_num_workers", "enable_prompt_embeds"),
    *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend"),
    *("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator"),
    # Kernels of one computation, and what vLLM warns of.
    *("enforce_eager", "disable_cascade_attn", "allow_deprecated_quantization"),
)
HARMLESS: dict[str, Collection[str]] = {
    "model_config": _MODEL,
    "draft_model_config": _MODEL,
    "multimodal_config": (
        # Admission and caches of processed media, which other keys name by content.
        *("limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm"),
        *("mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "skip_mm_profiling"),
        "interleave_mm_strings",  # decides which tokens a request has
        *("mm_encoder_tp_mode", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
    ),
    "load_config": (
        *("download_dir", "device", "pt_load_map_location", "use_tqdm_on_load", "safetensors_load_strategy"),
        *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
    ),
    "model_loader_extra_config": (
        *("concurrency", "memory_limit", "distributed", "num_readers", "limit_cpu_mem", "verify_hash"),
        *("enable_multithread_load", "num_threads"),
        *("s3_access_key_id", "s3_secret_access_key", "s3_endpoint", "encryption_keyfile"),
    ),
    "attention_config": (
        *("backend", "backend_per_kind", "mla_prefill_backend", "minimax_m3_msa_decode_backend"),
        *("use_trtllm_attention", "trtllm_ragged_backend", "flash_attn_version", "sparse_mla_force_mqa"),
        *("flash_attn_max_num_splits_for_cuda_graph", "tq_max_kv_splits_for_cuda_graph"),
        *("tokenspeed_mla_min_split_kv", "indexer_tp_shard_min_rows", "minimax_m3_indexer_cp"),
        "sparse_mla_prefill_workspace_factor",
        *("flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size", "flex_attn_kv_block_size"),
    ),
    "mamba_config": ("backend", "ssu_algorithm"),
}
"""Section of vLLM's configuration → its harmless settings."""
_VOLATILE = (
    "transformers_version",
    "_name_or_path",
    "_attn_implementation_autoset",
    "_commit_hash",
    "tie_word_embeddings",
)
"""Parts of a model's own configuration that differ without meaning: versions, places, the layer behind the last KV."""


def engine_facts(vllm_config: Any) -> dict[str, Any]:
    """What decides an engine's KV beside its model: the same in all processes of the engine and after each start."""
    return {
        name: section_facts(name, getattr(vllm_config, name, None))
        for name in ("load_config", "attention_config", "mamba_config")
    }


def model_facts(model_config: Any) -> dict[str, Any]:
    """What vLLM's ModelConfig says of a model, without its files: its own configuration and the engine's settings."""
    described: dict[str, Any] = getattr(getattr(model_config, "hf_config", None), "to_dict", dict)()
    facts = {
        "config": _without_volatile(_plain(described)),
        "settings": section_facts("model_config", model_config),
        "media": section_facts("multimodal_config", getattr(model_config, "multimodal_config", None)),
        "image_processor": _plain(getattr(model_config, "hf_image_processor_config", None)),
    }
    if has_long_rope(facts["config"]):
        # vLLM chooses the long or the short factors by its maximum model length, whatever the length of the prompt.
        facts["max_model_len"] = int(model_config.max_model_len)
    return facts


def section_facts(name: str, section: Any) -> Any:
    """The settings of one section of vLLM's configuration, but for the harmless ones, as JSON types."""
    facts = _plain(section, name)
    if name == "load_config" and facts and facts.get("load_format") in FOLDER_FORMATS:
        facts["load_format"] = "folder"
    return facts


def has_long_rope(config: Any) -> bool:
    """Whether a configuration names long-context rotary embeddings anywhere."""
    if isinstance(config, dict):
        kinds = (config.get("rope_type"), config.get("type"))
        return "longrope" in kinds or "su" in kinds or any(map(has_long_rope, config.values()))
    return isinstance(config, list) and any(map(has_long_rope, config))


def _plain(value: Any, name: str = "") -> Any:
    """A value of the setting `name` as JSON types that have no address in them; an empty collection is None."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str) and name == "mm_encoder_fp8_scale_path" and Path(value).is_file():
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        left_out = HARMLESS.get(name, ())
        return {
            str(key): _plain(inner, str(key)) for key, inner in value.items() if key not in left_out
        } or None
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value] or None
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(inner) for inner in value), key=canonical_json) or None
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict(), name)
    if dataclasses.is_dataclass(value):
        used = [
            each for each in dataclasses.fields(value) if not _is_off(each, getattr(value, each.name, None))
        ]
        return _plain({each.name: getattr(value, each.name) for each in used}, name)
    return _plain(vars(value), name) if hasattr(value, "__dict__") else str(value)


def _is_off(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a setting does nothing: it is None or empty, or its default, which is false or 0.

    So engines share KV with those of a version of vLLM that does not have the setting yet.
    """
    default: Any = field.default
    if hasattr(default, "get_default"):  # pydantic's description of a default
        default = default.get_default(call_default_factory=True)
    empty = value is None or (isinstance(value, (dict, list, tuple, set, str)) and not value)
    return empty or (type(value) is type(default) and not value and not default)


def _without_volatile(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_volatile(inner) for key, inner in config.items() if key not in _VOLATILE}
    return [_without_volatile(inner) for inner in config] if isinstance(config, list) else config
