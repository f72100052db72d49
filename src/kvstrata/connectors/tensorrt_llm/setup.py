"""What both sides of the connector read from TensorRT-LLM's arguments and from its KV tensor, checked.

TensorRT-LLM's objects are read by attribute only; nothing here imports it or torch.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from typing import Any, NamedTuple

from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.fingerprint import fingerprint
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from kvstrata.native.copying import CopyPlan
from kvstrata.types import LayoutIdentity, Slice, canonical_json, facts_digest

logger = logging.getLogger("kvstrata.connectors.tensorrt_llm")

FORMAT = "tensorrt-llm-blocks/1"
"""Names the arrangement of blocks in a section; part of the facts."""
ONLY_ONE = ("pipeline_parallel_size", "context_parallel_size")
DEFAULT_BLOCK_TOKENS = 32


class Setup(NamedTuple):
    """The part of the configuration that both sides need; the same in all processes of an engine."""

    settings: ClientSettings
    layout: LayoutIdentity
    block_tokens: int
    ranks: int
    """Tensor-parallel ranks. Each has a slice of its own."""
    version: str

    @property
    def chunk_blocks(self) -> int:
        """Blocks in a chunk."""
        return self.settings.chunk_size // self.block_tokens


class BlocksOfTensor(NamedTuple):
    """One rank's KV blocks. The address is valid as long as TensorRT-LLM keeps the tensor."""

    base: int
    num_blocks: int
    block_stride: int
    layer_stride: int
    """Bytes from one layer of a block to the next."""
    layers: int
    layer_bytes: int
    """Bytes of one layer of a block, in one piece."""
    record_blocks: int
    rounding: tuple[int, int, int, int, int] | None = None

    def plan(self) -> CopyPlan:
        """The plan of copies between these blocks and records."""
        bases = [self.base + layer * self.layer_stride for layer in range(self.layers)]
        return CopyPlan(bases, self.num_blocks, [self.block_stride] * self.layers, [], self.layer_bytes)


def read_setup(llm_args: Any, version: str) -> Setup:
    """Read and check TensorRT-LLM's arguments and our settings. Raises ConfigError."""
    settings, notes = load_settings({}, os.environ)
    for note in notes:
        logger.warning("%s", note)
    for name in ONLY_ONE:
        if (getattr(llm_args, name, 1) or 1) != 1:
            raise ConfigError(f"{name}: {getattr(llm_args, name)} is not supported, only 1", field=name)
    if getattr(llm_args, "enable_attention_dp", False):
        raise ConfigError(
            "enable_attention_dp: is not supported; set it to false", field="enable_attention_dp"
        )
    cache = getattr(llm_args, "kv_cache_config", None)
    block_tokens = int(getattr(cache, "tokens_per_block", 0) or DEFAULT_BLOCK_TOKENS)
    if settings.chunk_size % block_tokens:
        raise ConfigError(
            f"chunk_size: {settings.chunk_size} tokens are not whole blocks of {block_tokens} tokens "
            "(kv_cache_config.tokens_per_block); set chunk_size to a multiple",
            field="chunk_size",
        )
    if settings.fidelity != "lossless":
        logger.warning(
            "fidelity: %r has no effect with TensorRT-LLM, whose KV is kept as it is", settings.fidelity
        )
    layout = layout_identity(llm_args, settings.chunk_size, block_tokens, version)
    ranks = int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
    return Setup(settings, layout, block_tokens, ranks, version)


def layout_identity(llm_args: Any, chunk_tokens: int, block_tokens: int, version: str) -> LayoutIdentity:
    """The identity of an engine with these arguments. Raises ConfigError if its model's files cannot be read."""
    path = str(llm_args.model)
    local = os.path.exists(path)
    cache = getattr(llm_args, "kv_cache_config", None)
    weights = {
        "engine": f"tensorrt_llm {version}",
        "ranks": int(getattr(llm_args, "tensor_parallel_size", 1) or 1),
        "block_tokens": block_tokens,
        "load_format": str(getattr(llm_args, "load_format", "") or ""),
        "quantization": str(getattr(llm_args, "quant_config", "") or ""),
        "dtype": str(getattr(llm_args, "dtype", "") or ""),
        "files": fingerprint(path) if local else "",
    }
    return LayoutIdentity(
        model=os.path.basename(path.rstrip("/")) if local else path,
        revision=str(getattr(llm_args, "revision", "") or ""),
        weights=hashlib.sha256(canonical_json(weights)).hexdigest(),
        tokenizer="" if local else str(getattr(llm_args, "tokenizer", "") or ""),
        kv_dtype=str(getattr(cache, "dtype", "") or "auto"),
        chunk_tokens=chunk_tokens,
    )


def read_tensor(tensor: Any, setup: Setup, rank: int) -> tuple[BlocksOfTensor, Slice, dict[str, Any]]:
    """One rank's blocks, its slice and the slice's facts, from the tensor (blocks, layers, …) of its whole KV.

    Raises ConfigError for a tensor of another shape.
    """
    shape, strides = [int(n) for n in tensor.shape], [int(n) for n in tensor.stride()]
    inner = [math.prod(shape[i + 1 :]) for i in range(2, len(shape))]
    if len(shape) < 3 or strides[2:] != inner:
        raise ConfigError(
            f"KV cache: shape {shape}, strides {strides}: must be (blocks, layers, …) with each layer of a block in "
            "one piece; run this model without this connector",
            field="kv_cache",
        )
    element = int(tensor.element_size())
    view = BlocksOfTensor(
        int(tensor.data_ptr()),
        shape[0],
        strides[0] * element,
        strides[1] * element,
        shape[1],
        math.prod(shape[2:]) * element,
        setup.chunk_blocks,
    )
    facts: dict[str, Any] = {
        "format": FORMAT,
        "engine": f"tensorrt_llm {setup.version}",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "block_shape": shape[2:],
        "block_tokens": setup.block_tokens,
        "chunk_tokens": setup.settings.chunk_size,
        "tp": [rank, setup.ranks],
        "sections": view.layers,
        "payload_bytes": view.layers * view.layer_bytes * view.record_blocks,
    }
    part = Slice(layers=(0, view.layers), kv_heads=(rank, rank + 1), layout=facts_digest(facts))
    return view, part, facts
