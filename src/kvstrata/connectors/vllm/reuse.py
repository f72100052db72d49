"""What vLLM's configuration says about reusing KV: by which engines, and for which requests.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

from typing import Any


def no_reuse_reason(vllm_config: Any) -> str:
    """Why this engine must not load KV that was computed before; "" when it may.

    Pooling over all tokens (MEAN, CLS, STEP) needs the hidden states of the whole prompt; vLLM turns its own prefix
    cache off for it, and its pooler raises when tokens were not computed.
    """
    model = vllm_config.model_config
    if getattr(model, "is_prefix_caching_supported", True):
        return ""
    pooler = getattr(model, "pooler_config", None)
    kinds = [getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type")]
    named = "/".join(str(kind) for kind in kinds if kind)
    return f"vLLM supports no prefix caching for this model{f' with {named} pooling' if named else ''}"
