"""The identity of this engine: model, weights and layout, read from vLLM's configuration.

Everything that decides the meaning of KV bytes must be in the identity.  Where a name does not determine the meaning,
content is read: the files of a local model are sampled, and vLLM's configuration is hashed.  Weights that are neither
in files of the model's folder nor named by a commit of a hub are sampled after they are loaded, and the resulting mark
is part of each request's identity (`weights`).  vLLM's objects are read by attribute only; nothing here imports vLLM or
torch.

All of vLLM's configuration is part of the identity, except a closed list of settings known to be harmless.  A setting
that a new version of vLLM adds is therefore part of the identity until it is put on the list: engines that differ in it
share nothing, which costs misses, but no engine gets KV with another meaning.  While the new setting is off, engines
share KV with those of earlier versions.  A setting is harmless if it does not change what a prompt's KV means, or if
the identity, the keys or the layout's facts name its effect otherwise.  Choices between kernels of one computation
count as harmless, because their results differ as much between two GPUs, or between a request alone and in a batch.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.connectors.fingerprint import fingerprint, has_weights
from kvstrata.connectors.vllm.kv_view import ENCODING
from kvstrata.types import LayoutIdentity, canonical_json

if TYPE_CHECKING:
    from kvstrata.config.client_model import ClientSettings
import dataclasses
import enum
from collections.abc import Collection
from pathlib import Path

FOLDER_FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor")
"""Load formats that read only the weight files in the model's folder."""

_MODEL = (
    # The identity has these in another form, or has the content of the files and of the model's configuration.
    *("model", "revision", "hf_config", "hf_text_config", "hf_config_path", "config_format"),
    *("is_submodel_config", "word_embeddings_untied_by_checkpoint", "multimodal_config"),
    # These decide which tokens a request has, and the tokens are in the keys.
    *("tokenizer", "tokenizer_revision", "skip_tokenizer_init"),
    # These decide how the model's output is used.
    *("max_logprobs", "logprobs_mode", "return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay"),
    *("generation_config", "override_generation_config", "logits_processors", "pooler_config", "seed"),
    "enable_return_routed_experts",
    # These are limits, names, access, and memory management. `max_model_len`: see `has_long_rope`.
    *("max_model_len", "spec_target_max_model_len", "served_model_name", "hf_token"),
    *("allowed_local_media_path", "allowed_media_domains", "renderer_num_workers", "enable_prompt_embeds"),
    *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend"),
    *("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator"),
    # These choose kernels of one computation, or only cause warnings.
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
"""Fields of a model's configuration that do not affect KV: versions, places, the layer after the last KV."""


def engine_facts(vllm_config: Any) -> dict[str, Any]:
    """The facts, besides the model, that decide an engine's KV; equal in all its processes and after each start."""
    return {
        name: section_facts(name, getattr(vllm_config, name, None))
        for name in ("load_config", "attention_config", "mamba_config")
    }


def model_facts(model_config: Any) -> dict[str, Any]:
    """The facts of a model in vLLM's ModelConfig, without its files: its configuration and the engine's settings."""
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
    """The settings of one section of vLLM's configuration, except the harmless ones, as JSON types."""
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
    """A value of the setting `name` as JSON types, without memory addresses; an empty collection becomes None."""
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
    """Whether a setting is off: it is None or empty, or its default, which is false or 0.

    Such a setting is ignored, so engines share KV with those of a vLLM version that does not have it yet.
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


_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that keep no KV of their own."""
_DRAFTS_WITHOUT_LOOKAHEAD = ("draft_model", "extract_hidden_states", "custom_class")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def fidelity_of(settings: ClientSettings) -> str:
    """The fidelity in this engine's identities: `lossless`, or the encoding to which its KV is rounded."""
    return ENCODING if settings.fidelity == "fp8" else settings.fidelity


def layout_identity(
    vllm_config: Any, *, kv_dtype: str, chunk_tokens: int, fidelity: str = "lossless"
) -> LayoutIdentity:
    """The layout identity of an engine; the same in its scheduler and all its workers, and after each start.

    A local model is named by the last part of its path (its content is in `weights`), so moving the model does not
    change the identity.  KV scales that are computed at run time make the identity of this engine unique.  Raises
    ConfigError if the model's files cannot be read.
    """
    model = vllm_config.model_config
    path = str(model.model)
    local = _is_local(path)
    weights = _weights_of(model) | engine_facts(vllm_config)
    draft = _draft(vllm_config)
    if draft is not None:
        weights["draft"] = draft
    scales = ""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        scales = f"calculated by engine {engine_group(vllm_config).hex()}"
    return LayoutIdentity(
        model=os.path.basename(path.rstrip("/")) if local else path,
        revision=_revision(model),
        weights=hashlib.sha256(canonical_json(weights)).hexdigest(),
        tokenizer="" if local else str(getattr(model, "tokenizer", "") or ""),
        kv_dtype=kv_dtype,
        kv_scales=scales,
        fidelity=fidelity,
        chunk_tokens=chunk_tokens,
        lookahead_tokens=lookahead_tokens(vllm_config) or msgspec.UNSET,
    )


def weights_are_named(vllm_config: Any) -> bool:
    """Whether the layout identity determines the weights that this engine loads at its start, and those of its drafts.

    It does so if vLLM reads them from files in a folder, which are sampled, or from a commit of a hub.
    """
    load = vllm_config.load_config
    if not _is_named(vllm_config.model_config, load):
        return False
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return True
    draft: Any = getattr(speculative, "draft_model_config", None)
    draft_load: Any = getattr(speculative, "draft_load_config", None)
    return draft is not None and _is_named(draft, draft_load or load)


def _is_named(model: Any, load: Any) -> bool:
    if str(load.load_format) not in FOLDER_FORMATS or getattr(model, "model_weights", None):
        return False
    path = str(model.model)
    return has_weights(path) if _is_local(path) else bool(_commit(model))


def _commit(model: Any) -> str:
    """The commit of the hub that a model's files come from; "" if it is not known."""
    found = str(model.revision or "")
    if getattr(model, "hf_config_path", None) in (None, model.model):
        config: Any = getattr(model, "hf_config", None)
        found = str(getattr(config, "_commit_hash", None) or found)
    return found if _COMMIT.fullmatch(found) else ""


def _revision(model: Any) -> str:
    """The version of a model's files on a hub, as far as it is known."""
    config: Any = getattr(model, "hf_config", None)
    return _commit(model) or str(getattr(config, "_commit_hash", None) or model.revision or "")


def _is_local(path: str) -> bool:
    return os.path.isdir(path) or os.path.isfile(path)


def _weights_of(model: Any) -> dict[str, Any]:
    """The facts that distinguish a model from others. Raises ConfigError if its files cannot be read."""
    path = str(model.model)
    return model_facts(model) | ({"files": fingerprint(path)} if _is_local(path) else {})


def lookahead_tokens(vllm_config: Any) -> int:
    """The number of tokens after a position on which the draft layers' KV at that position depends; 0 without drafts.

    EAGLE and MTP layers get, with the hidden state of each position, the token that follows it.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return 0
    told = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if told is not None:
        return int(told)
    # Versions of vLLM without this field have no chains of draft layers.
    return 0 if speculative.method in (*_DRAFTS_WITHOUT_KV, *_DRAFTS_WITHOUT_LOOKAHEAD) else 1


def _draft(vllm_config: Any) -> dict[str, Any] | None:
    """The facts that distinguish draft layers; None without such layers. Raises ConfigError if files cannot be read."""
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", ""))
    if speculative is None or method in _DRAFTS_WITHOUT_KV:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return {"method": method}
    path = str(draft.model)
    name = os.path.basename(path.rstrip("/")) if _is_local(path) else path
    load = section_facts("load_config", getattr(speculative, "draft_load_config", None))
    return {"method": method, "model": name, "revision": _revision(draft), "load": load, **_weights_of(draft)}


def engine_group(vllm_config: Any) -> bytes:
    """16 bytes that name this engine's group of processes: scheduler and workers of one start.

    vLLM makes `instance_id` and `engine_id` in the parent process and passes them to all its processes.  Both are used,
    since a user may have set a fixed `engine_id`.
    """
    parallel = vllm_config.parallel_config
    name = [
        str(vllm_config.kv_transfer_config.engine_id),
        str(getattr(vllm_config, "instance_id", "")),
        int(getattr(parallel, "data_parallel_rank", 0) or 0),
    ]
    return hashlib.sha256(canonical_json(name)).digest()[:16]
