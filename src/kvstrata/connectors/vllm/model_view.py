"""How this connector sees a model in an engine with default options (`kvstrata doctor --model`). Loads no weights."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvstrata.connectors.settings import load_settings
from kvstrata.connectors.vllm.build import kv_dtype_of
from kvstrata.connectors.vllm.engine_limits import (
    check_steps,
    media_are_counted,
    no_load_reason,
    no_reuse_reason,
)
from kvstrata.connectors.vllm.identity import layout_identity
from kvstrata.types import RequestIdentity, identity_root

MODULE = "kvstrata.connectors.vllm"


class ModelView(NamedTuple):
    """One model in an engine with one rank."""

    architecture: str
    layers: int
    kv_heads: int
    """1 for MLA, whose latent counts as one head."""
    head_size: int
    kv_dtype: str
    chunk_tokens: int
    chunk_bytes: int
    """Bytes of a chunk's KV, all layers; without the record's header."""
    identity: str
    """Begins the identity root of its requests: engines that show the same may share chunks."""
    warnings: list[str]
    """Why the connector loads or stores less than it could."""


def view_model(path: str) -> ModelView:
    """Read a model's configuration as vLLM does. Raises ConfigError if the connector refuses it, and vLLM's errors."""
    transfer = KVTransferConfig(
        kv_connector="LMCacheConnectorV1", kv_connector_module_path=MODULE, kv_role="kv_both"
    )
    config = EngineArgs(model=path, kv_transfer_config=transfer).create_engine_config()
    settings, notes = load_settings({}, os.environ)
    check_steps(config, settings.load_mode)
    kv_dtype = kv_dtype_of(config)
    layout = layout_identity(config, kv_dtype=kv_dtype, chunk_tokens=settings.chunk_size)
    model = config.model_config
    mla = bool(model.use_mla)
    first, end = model.get_layers_start_end_indices(config.parallel_config)
    heads = 1 if mla else model.get_total_num_kv_heads()
    element_bytes = 1 if kv_dtype.startswith("fp8") else model.dtype.itemsize
    token_bytes = (end - first) * heads * model.get_head_size() * element_bytes * (1 if mla else 2)
    return ModelView(
        architecture=", ".join(model.architectures),
        layers=end - first,
        kv_heads=heads,
        head_size=model.get_head_size(),
        kv_dtype=kv_dtype,
        chunk_tokens=settings.chunk_size,
        chunk_bytes=token_bytes * settings.chunk_size,
        identity=identity_root(layout, RequestIdentity()).hex()[:12],
        warnings=[*notes, *_warnings(config)],
    )


def _warnings(config: Any) -> list[str]:
    found = [no_reuse_reason(config), no_load_reason(config)]
    if media_are_counted(config):
        found.append("requests with images or other media are computed without the cache")
    text = config.model_config.hf_text_config
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        found.append(
            f"it has layers of other kinds than full attention ({', '.join(kinds)}); if vLLM keeps them in groups of "
            "their own, chunks take less room than this, and their size may follow vLLM's blocks: docs/models.md"
        )
    return [text for text in found if text]
