"""The identity of an SGLang engine, and the slices of its host pools.

Pages have SGLang's own names: the hash of a page covers its tokens, all tokens before it, and the LoRA adapter and salt
of the request.  The model and the layout of its KV are not in that hash; they are in the identity and the slice.
SGLang's objects are read by attribute only.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from kvstrata.connectors.fingerprint import fingerprint, has_weights
from kvstrata.connectors.sglang.pages import PageRuns
from kvstrata.errors import ConfigError
from kvstrata.types import LayoutIdentity, Slice, canonical_json, facts_digest

FORMAT = "sglang-pages/1"
"""Names the arrangement of a page's bytes in a record; part of the facts."""
KV_POOL = "kv"
RANK_POOLS = ("mamba",)
"""Pools of which each tensor-parallel rank has its own part even if all ranks hold the same KV."""
MODEL_ARGUMENTS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "weight_version",
    "model_loader_extra_config",
    "torchao_config",
    "modelopt_quant",
    "custom_weight_loader",
    "decrypted_config_file",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
)
"""Arguments of SGLang that decide, beside the model's files, what its KV means."""
FOLDER_FORMATS = ("auto", "safetensors", "pt", "npcache", "gguf", "mistral", "fastsafetensors", "dummy")
"""Load formats that read weight files in the model's folder and nothing else, or draw weights from the seed."""
NO_VERSION = ("", "default")


def layout_identity(arguments: Any, facts: dict[str, Any]) -> LayoutIdentity:
    """The layout identity of one pool of an engine started with these arguments (SGLang's `ServerArgs`).

    `facts` are the pool's, and are part of it: engines whose pages are laid out in another way, or cut for another
    number of ranks, can use one server at the same time.

    A local model is named by the last part of its path, and its files are sampled; a model of a hub is named by its
    name and revision, and its files in the hub's cache are sampled.  Raises ConfigError if files of the model cannot be
    read, or if neither files nor a `weight_version` name its weights.
    """
    path = str(arguments.model_path)
    local = os.path.exists(path)
    load_format = str(getattr(arguments, "load_format", None) or "auto")
    weights: dict[str, Any] = {"engine": "sglang", "pages": facts}
    for name in MODEL_ARGUMENTS:
        weights[name] = str(getattr(arguments, name, None) or "")
    scales = str(getattr(arguments, "quantization_param_path", None) or "")
    if scales:
        try:
            weights["kv_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(
                f"quantization_param_path: {scales} cannot be read: {error}", field="quantization_param_path"
            ) from None
    weights["files"] = _files(arguments, "model_path", "revision", load_format)
    draft_format = str(getattr(arguments, "speculative_draft_load_format", None) or load_format)
    if getattr(arguments, "speculative_draft_model_path", None):
        weights["draft_files"] = _files(
            arguments, "speculative_draft_model_path", "speculative_draft_model_revision", draft_format
        )
    if "dummy" in (load_format, draft_format):
        weights["dummy_seed"] = str(getattr(arguments, "random_seed", None))
    return LayoutIdentity(
        model=os.path.basename(path.rstrip("/")) if local else path,
        revision=str(getattr(arguments, "revision", None) or ""),
        weights=hashlib.sha256(canonical_json(weights)).hexdigest(),
        tokenizer="" if local else str(getattr(arguments, "tokenizer_path", None) or ""),
        kv_dtype=str(facts["dtype"]),
        chunk_tokens=int(facts["page_tokens"]),
    )


def _files(arguments: Any, model: str, revision: str, load_format: str) -> str:
    """The digest of a model's files; "" if only the `weight_version` names its weights. Raises ConfigError.

    `model` and `revision` are the names of the arguments that say where the files are.
    """
    path = str(getattr(arguments, model))
    folder = path if os.path.exists(path) else _hub_folder(path, getattr(arguments, revision, None))
    if folder and load_format in FOLDER_FORMATS and (load_format == "dummy" or has_weights(folder)):
        return fingerprint(folder)
    if str(getattr(arguments, "weight_version", None) or "") in NO_VERSION:
        raise ConfigError(
            f"weight_version: nothing names the weights of {model} {path!r} with load_format {load_format!r}, so KV of "
            "other weights could be served; give --weight-version, and another one whenever the weights change",
            field="weight_version",
        )
    return fingerprint(folder) if folder else ""


def _hub_folder(name: str, revision: str | None) -> str:
    """Where the hub's cache has the files of a model; "" if it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError, OSError):  # ValueError: no name of a model on a hub
        return ""
    return os.path.dirname(found) if isinstance(found, str) else ""


def pool_slice(
    name: str, pool: Any, runs: PageRuns, config: Any, version: str
) -> tuple[Slice, dict[str, Any]]:
    """The slice that one rank's pool holds, and its facts. `config` is SGLang's `HiCacheStorageConfig`.

    The ranks of a model with latents (MLA) hold the same KV: they have one slice, of which SGLang lets one rank write.
    """
    replicated = bool(config.is_mla_model) and name not in RANK_POOLS
    heads = max(1, int(getattr(pool, "head_num", 1)))
    rank, ranks = (0, 1) if replicated else (int(config.tp_rank), int(config.tp_size))
    first = int(getattr(pool, "start_layer", None) or 0)
    end = int(getattr(pool, "end_layer", None) or 0)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "engine": f"sglang {version}",
        "pool": name,
        "pool_class": type(pool).__name__,
        "pool_layout": str(pool.layout),
        "pool_format": str(getattr(pool, "storage_format_tag", None) or ""),
        "dtype": str(getattr(pool, "dtype", "")).removeprefix("torch."),
        "page_tokens": runs.page_tokens,
        "is_mla": replicated,
        "tp": [rank, ranks],
        "pp": [int(config.pp_rank), int(config.pp_size)],
        "attn_cp": [int(config.attn_cp_rank), int(config.attn_cp_size)],
        "section_bytes": list(runs.run_bytes),
        "sections": len(runs.run_bytes),
        "payload_bytes": runs.page_bytes,
    }
    part = Slice(
        layers=(first, max(end, first + 1)),
        kv_heads=(rank * heads, (rank + 1) * heads) if not replicated else (0, 1),
        layout=facts_digest(facts),
    )
    return part, facts
