"""Decides from vLLM's configuration whether an engine may reuse KV, and how the media of its requests are named.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

import re
from typing import Any

from kvstrata.keys import MediaItem

CONTENT_HASH = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""The form of vLLM's hash of a medium's content; the name of a LoRA adapter may precede it."""


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


def media_items(features: Any, engine: str) -> list[MediaItem]:
    """The media that a request's placeholder tokens stand for, from vLLM's `Request.mm_features`.

    A name that the requester gave (`uuid`) is not a hash of content.  Like vLLM we trust such a name while this engine
    runs, so its content id is valid only for this start of the engine, which `engine` names.
    """
    return [
        MediaItem(
            feature.mm_position.offset,
            feature.mm_position.length,
            feature.identifier
            if CONTENT_HASH.fullmatch(feature.identifier)
            else f"{feature.identifier}\nnamed for {engine}",
        )
        for feature in features
    ]
