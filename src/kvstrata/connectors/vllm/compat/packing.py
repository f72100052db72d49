"""Names the order in which vLLM's CPU attention packs numbers inside a block, for the facts of a slice.

CPU attention packs a block for the instructions of its CPU, in compiled code that any version may change.  So a worker
lets its vLLM pack a fixed sequence of numbers, and a digest of the resulting bytes names the order: engines of
different versions share records exactly if their versions pack alike.  Where vLLM's packing cannot be called, the name
is vLLM's version, and only engines of that version share records.

torch is imported when the first arrangement is named.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("vllm.kvstrata")

ASKED = ("CPU_ATTN",)
"""Backends whose packing is determined by a trial; those of a GPU would need the device before the first request."""


def arrangement_namer(version: str) -> Callable[[str, Any, Any], str]:
    """A function of (backend, spec, attention layer) that returns the packing's name: `#DIGEST`, or `@VERSION`."""
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
    """The bytes of a block that vLLM has packed from numbers that are the same in every process.

    If heads are packed independently of each other, only the first head's bytes: ranks with other numbers of heads then
    get the same name, and their records can be recut.
    """
    last = spec.num_kv_heads - 1
    packed = _pack(spec, module, range(last + 1))
    try:
        alone = [_pack(spec, module, [head])[0] for head in (0, last)]
    except (RuntimeError, TypeError, ValueError):
        return b"".join(packed)
    return alone[0] if [packed[0], packed[last]] == alone else b"".join(packed)


def _pack(spec: Any, module: Any, heads: Sequence[int]) -> list[bytes]:
    """The bytes of each of these heads in a block that has only these heads."""
    import torch

    tokens, size = spec.block_size, spec.head_size
    numbers = torch.stack([_numbers(head, 2 * tokens * size) for head in heads])
    numbers = numbers.to(_dtype(spec)).view(len(heads), 2, tokens, size).permute(1, 2, 0, 3).contiguous()
    # Block 0 stands for "no block" in vLLM.
    cache = torch.zeros(2, len(heads), tokens, 2 * size, dtype=spec.dtype)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    module.impl.do_kv_cache_update(module, numbers[0], numbers[1], cache, slots)
    return [bytes(head.contiguous().view(torch.uint8).numpy().tobytes()) for head in cache[1]]


def _numbers(seed: int, count: int) -> Any:
    """`count` pseudo-random numbers between 2^-15 and 2^15, which float16 can hold."""
    import torch

    draw = torch.Generator().manual_seed(1 + seed)
    bits = torch.randint(0x3800, 0x4700, (count,), generator=draw, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16)


def _dtype(spec: Any) -> Any:
    """The dtype of this layer's inputs: that of its KV, unless KV is quantised."""
    import torch

    return spec.dtype if spec.dtype.is_floating_point and spec.dtype.itemsize > 1 else torch.bfloat16
