"""The identity of this engine: model, weights, adapters and layout, read from vLLM's configuration.

Everything that decides the meaning of KV bytes must be in the identity.  Where a name does not determine the meaning,
content is read: the files of a local model or adapter are sampled, and the model's configuration is hashed.  vLLM's
objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.connectors.fingerprint import fingerprint
from kvstrata.connectors.vllm.kv_view import ENCODING
from kvstrata.errors import ConfigError
from kvstrata.types import LayoutIdentity, canonical_json

if TYPE_CHECKING:
    from kvstrata.config.client_model import ClientSettings

ADAPTERS_REMEMBERED = 1024
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that keep no KV of their own."""
_DRAFTS_WITHOUT_LOOKAHEAD = ("draft_model", "extract_hidden_states", "custom_class")
_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "_attn_implementation_autoset", "_commit_hash")


def fidelity_of(settings: ClientSettings) -> str:
    """The fidelity in this engine's identities: the lossy codec that may have changed its KV, if any.

    Records that a GPU has rounded (`gpu_fp8`) have a fidelity of their own, so engines without `gpu_fp8` never read
    them.
    """
    return ENCODING if settings.gpu_fp8 else settings.fidelity


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
    local = os.path.isdir(path) or os.path.isfile(path)
    config = getattr(model, "hf_config", None)
    described = config.to_dict() if config is not None else {}
    commit = str(getattr(config, "_commit_hash", None) or "")
    weights: dict[str, Any] = {
        "config": {key: value for key, value in _plain(described).items() if key not in _VOLATILE_CONFIG},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
    }
    if _has_long_rope(weights["config"]):
        # vLLM chooses the long or the short factors by its maximum model length, whatever the length of the prompt.
        weights["max_model_len"] = int(model.max_model_len)
    if local:
        weights["files"] = fingerprint(path)
    load_format = str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto"))
    if "dummy" in load_format:
        # Dummy weights depend on the seed, and no engine with real weights may share them.
        weights["dummy_seed"] = int(getattr(model, "seed", 0) or 0)
    draft = _draft(vllm_config)
    if draft is not None:
        weights["draft"] = draft
    scales = ""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        scales = f"calculated by engine {engine_group(vllm_config).hex()}"
    return LayoutIdentity(
        model=os.path.basename(path.rstrip("/")) if local else path,
        revision=commit or str(model.revision or ""),
        weights=hashlib.sha256(canonical_json(weights)).hexdigest(),
        tokenizer="" if local else str(getattr(model, "tokenizer", "") or ""),
        kv_dtype=kv_dtype,
        kv_scales=scales,
        fidelity=fidelity,
        chunk_tokens=chunk_tokens,
        lookahead_tokens=lookahead_tokens(vllm_config) or msgspec.UNSET,
    )


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


def _draft(vllm_config: Any) -> list[str] | None:
    """The facts that tell draft layers apart; None without such layers. Raises ConfigError if files cannot be read."""
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", ""))
    if speculative is None or method in _DRAFTS_WITHOUT_KV:
        return None
    path = str(getattr(speculative, "model", ""))
    if not (os.path.isdir(path) or os.path.isfile(path)):
        return [path, method, str(getattr(speculative, "revision", None) or "")]
    return [os.path.basename(path.rstrip("/")), method, fingerprint(path)]


def _plain(value: Any) -> Any:
    """A configuration as JSON types; values of any other type become their text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _has_long_rope(config: Any) -> bool:
    """Whether a configuration names long-context rotary embeddings anywhere."""
    if isinstance(config, dict):
        kinds = (config.get("rope_type"), config.get("type"))
        return "longrope" in kinds or "su" in kinds or any(map(_has_long_rope, config.values()))
    return isinstance(config, list) and any(map(_has_long_rope, config))


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


class AdapterUnreadable(Exception):
    """The files of a LoRA adapter cannot be read, so its KV must not be shared."""


class Adapters:
    """Content ids of LoRA adapters, found in the background because reading files may take long.

    Thread-safe.  Remembers the last 1,024 adapters.  When a request makes vLLM load an adapter again in place
    (`load_inplace`), its files are read again too, and later requests use the new content id.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvstrata-adapter")
        self._known: OrderedDict[tuple[str, int, str], tuple[Future[str], Any]] = OrderedDict()
        """(name, id, path) → the content id, and the LoRARequest that had the files read again in place, or None."""
        self._lock = threading.Lock()

    def name(self, lora: Any) -> str | None:
        """The adapter's part of a request identity: "" for no adapter, None while its files are being read.

        `lora` is vLLM's LoRARequest or None.  An adapter without files at its path is on a hub and named by that path.
        Raises AdapterUnreadable if the adapter has files that cannot be read, because its content is then unknown.
        """
        if lora is None:
            return ""
        key = (str(lora.lora_name), int(lora.lora_int_id), str(lora.lora_path))
        again = lora if getattr(lora, "load_inplace", False) else None
        with self._lock:
            known = self._known.get(key)
            if known is None or (again is not None and known[1] is not again):
                known = self._known[key] = self._pool.submit(_adapter_content, key[2]), again
            self._known.move_to_end(key)
            while len(self._known) > ADAPTERS_REMEMBERED:
                self._known.popitem(last=False)
        future = known[0]
        if not future.done():
            return None
        try:
            content = future.result()
        except AdapterUnreadable:
            with self._lock:
                self._known.pop(key, None)  # it is read again for the next request
            raise
        return canonical_json([key[0], content]).decode()

    def close(self) -> None:
        """Stop reading; may be called more than once."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _adapter_content(path: str) -> str:
    try:
        return fingerprint(path) or f"path:{path}"
    except ConfigError as error:
        raise AdapterUnreadable(str(error)) from None
