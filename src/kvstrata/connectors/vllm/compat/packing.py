"""Names the arrangement of numbers inside a block that only vLLM's own code knows, for the facts of a slice.

CPU attention packs a block for the instructions of its CPU, in compiled code that any version may change.  So a worker
lets its vLLM pack numbers that are the same everywhere, and the arrangement is named by a digest of the bytes: engines
of unlike versions share records exactly if their versions pack alike.  Where vLLM cannot be asked, the arrangement is
named by vLLM's version, and only engines of this version share records.

torch is imported when the first arrangement is named.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.kvstrata")

ASKED = ("CPU_ATTN",)
"""Backends whose arrangement is found out by packing; those of a GPU would need the device before the first request."""


def arrangement_namer(version: str) -> Callable[[str, Any, Any], str]:
    """A function of (backend, spec, attention layer) that names the arrangement: `#DIGEST`, or `@VERSION`."""
    known: dict[tuple[Any, ...], str] = {}

    def name(backend: str, spec: Any, module: Any) -> str:
        if backend not in ASKED:
            return f"@{version}"
        # The scales of quantised KV have facts of their own, but the packed bytes depend on them.
        scales = tuple(getattr(module, each, None) for each in ("_k_scale_float", "_v_scale_float"))
        like = (
            spec.num_kv_heads,
            spec.block_size,
            spec.head_size,
            str(spec.dtype),
            getattr(module, "isa", ""),
            *scales,
        )
        if like not in known:
            known[like] = _name(spec, module, version)
        return known[like]

    return name


def _name(spec: Any, module: Any, version: str) -> str:
    try:
        packed = _packed(spec, module)
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        logger.info(
            "the arrangement of KV in a block could not be found out (%s): named by vLLM's version", error
        )
        return f"@{version}"
    return f"#{hashlib.sha256(packed).hexdigest()[:16]}"


def _packed(spec: Any, module: Any) -> bytes:
    """The bytes of a block that this layer's vLLM fills with the same numbers in every process."""
    import torch

    heads, tokens, size = spec.num_kv_heads, spec.block_size, spec.head_size
    # Thousands of unlike numbers between 2^-15 and 2^15, which float16 can hold, in no order.
    draw = torch.Generator().manual_seed(1)
    count = 2 * heads * tokens * size
    bits = torch.randint(0x3800, 0x4700, (count,), generator=draw, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).to(_dtype(spec)).view(2, tokens, heads, size)
    # Block 0 stands for "no block" in vLLM.
    cache = torch.zeros(2, heads, tokens, 2 * size, dtype=spec.dtype)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    module.impl.do_kv_cache_update(module, numbers[0], numbers[1], cache, slots)
    return bytes(cache[1].contiguous().view(torch.uint8).numpy().tobytes())


def _dtype(spec: Any) -> Any:
    """The dtype of the numbers that the model gives to this layer: that of its KV, unless KV is quantised."""
    import torch

    return spec.dtype if spec.dtype.is_floating_point and spec.dtype.itemsize > 1 else torch.bfloat16
