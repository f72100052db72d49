"""Whether an engine returns the routed experts of all tokens: the option moved to `aux_output_config` in vLLM 0.31.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

from typing import Any


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether --enable-return-routed-experts is on."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is not None:
        return bool(outputs.enabled)
    return bool(getattr(vllm_config.model_config, "enable_return_routed_experts", False))
