"""The identity of this engine: model, weights and layout, read from vLLM's configuration.

Everything that decides the meaning of KV bytes must be in the identity.  Where a name does not determine the meaning,
content is read: the files of a local model are sampled, and vLLM's configuration is hashed (`engine_facts`).  Weights
that are neither in files of the model's folder nor named by a commit of a hub are sampled once they are loaded, and
their mark is part of each request's identity (`weights`).  vLLM's objects are read by attribute only; nothing here
imports vLLM or torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.connectors.fingerprint import fingerprint, has_weights
from kvstrata.connectors.vllm.engine_facts import FOLDER_FORMATS, engine_facts, model_facts, section_facts
from kvstrata.connectors.vllm.kv_view import ENCODING
from kvstrata.types import LayoutIdentity, canonical_json

if TYPE_CHECKING:
    from kvstrata.config.client_model import ClientSettings

_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that keep no KV of their own."""
_DRAFTS_WITHOUT_LOOKAHEAD = ("draft_model", "extract_hidden_states", "custom_class")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def fidelity_of(settings: ClientSettings) -> str:
    """The fidelity in this engine's identities: the encoding that its KV was rounded to, if any."""
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
    """What is known of the version of a model's files on a hub."""
    config: Any = getattr(model, "hf_config", None)
    return _commit(model) or str(getattr(config, "_commit_hash", None) or model.revision or "")


def _is_local(path: str) -> bool:
    return os.path.isdir(path) or os.path.isfile(path)


def _weights_of(model: Any) -> dict[str, Any]:
    """The facts that tell a model from others. Raises ConfigError if its files cannot be read."""
    path = str(model.model)
    return model_facts(model) | ({"files": fingerprint(path)} if _is_local(path) else {})


def lookahead_tokens(vllm_config: Any) -> int:
    """How many tokens behind a position the draft layers' KV at this position depends on; 0 without such layers.

    EAGLE and MTP layers are given, with the hidden state of each position, the token that follows it.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return 0
    told = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if told is not None:
        return int(told)
    # Versions of vLLM that do not tell it have no chains of draft layers.
    return 0 if speculative.method in (*_DRAFTS_WITHOUT_KV, *_DRAFTS_WITHOUT_LOOKAHEAD) else 1


def _draft(vllm_config: Any) -> dict[str, Any] | None:
    """The facts that tell draft layers apart; None without such layers. Raises ConfigError if files cannot be read."""
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

    vLLM makes `instance_id` and `engine_id` in the parent process and hands them to all its processes.  A user may have
    set a fixed `engine_id`, so both are used.
    """
    parallel = vllm_config.parallel_config
    name = [
        str(vllm_config.kv_transfer_config.engine_id),
        str(getattr(vllm_config, "instance_id", "")),
        int(getattr(parallel, "data_parallel_rank", 0) or 0),
    ]
    return hashlib.sha256(canonical_json(name)).digest()[:16]
