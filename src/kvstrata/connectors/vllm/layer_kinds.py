"""The kind of each layer: facts that vLLM tells about the bytes of its blocks beyond shape and strides.

See `docs/layouts.md`.  Shape and strides are enough to copy blocks.  They do not tell how bytes are arranged *inside* a
block (CPU attention packs them for the instructions that the CPU has), nor with which scales numbers were quantised.
Both decide the meaning of KV bytes, so both are facts of a slice.  When a record is recut for another geometry, only
axes known to be heads or tokens can be cut.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.errors import ConfigError

CELL_BACKENDS = (
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV",
)
"""Attention backends that keep, for each head and token, the numbers of K and then those of V."""
CELL_MODES = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")
"""Quantisations with which CELL_BACKENDS keep this order; with the last two, a scale follows the numbers of K or V."""
LATENT_BACKENDS = (
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "TRITON_MLA",
)
"""Backends that keep one latent per token, token after token."""
LATENT_MODES = ("NONE", "FP8_PER_TENSOR")
HEADS_APART_BACKENDS = ("CPU_ATTN",)
"""Backends with their own arrangement of a block's tokens, in which each head's bytes are contiguous."""


class LayerKind(NamedTuple):
    """vLLM's description of one layer, whose tensor is logically (blocks, heads, tokens, content)."""

    heads: int
    block_tokens: int
    page_bytes: int
    """Bytes of a block without padding."""
    axes: tuple[str, str, str]
    """Names of the axes heads, tokens and content.  `kv_heads` and `tokens` count heads and tokens, `k+v` is two
    halves; a name with `@` and vLLM's version, or with `#` and a digest, stands for an arrangement that only its writer
    knows (`compat/packing.py`)."""
    quantisation: str
    latent: bool
    """Whether every tensor-parallel rank holds all of the layer: one latent per token without a separate V, or a state
    that is not cut."""
    scales: tuple[str, ...]
    """Scales of K and of V, of the whole layer or of each head, as hexadecimal floats; () if none apply."""


NameArrangement = Callable[[str, Any, Any], str]
"""(backend, spec, attention layer) → what names an arrangement that only its writer knows."""


def layer_kinds(
    groups: Sequence[Any], modules: Mapping[str, Any], arrangement: NameArrangement
) -> dict[str, LayerKind]:
    """The kind of every layer that has blocks of its own, by name.

    `groups` are `KVCacheConfig.kv_cache_groups`, `modules` the attention layers by name
    (`CompilationConfig.static_forward_context`).  Raises ConfigError for a layer whose module is missing.
    """
    kinds = {}
    for group in groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            if name not in modules:
                raise ConfigError(
                    f"KV cache of layer {name!r}: vLLM has no attention layer of that name", field="kv_cache"
                )
            kinds[name] = _kind(each.get(name, group.kv_cache_spec), modules[name], arrangement)
    return kinds


def page_bytes(spec: Any) -> int:
    """Bytes of a layer's block without padding."""
    if hasattr(spec, "shapes"):  # of a state
        return int(spec.state_content_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def _state_kind(spec: Any, module: Any, arrangement: NameArrangement) -> LayerKind:
    """The kind of a layer whose block holds a state, bytes that only its writer knows how to cut."""
    states = ",".join(
        f"{str(dtype).removeprefix('torch.')}{list(shape)}".replace(" ", "")
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    backend = str(module.get_attn_backend().get_name())
    way = backend.lower() + arrangement(backend, spec, module)
    return LayerKind(
        heads=1,
        block_tokens=1,
        page_bytes=page_bytes(spec),
        axes=(f"{way}.heads", f"{way}.states", f"{way}/{states}"),
        quantisation="NONE",
        latent=bool(spec.tp_replicated),
        scales=(),
    )


def _kind(spec: Any, module: Any, arrangement: NameArrangement) -> LayerKind:
    if hasattr(spec, "shapes"):
        return _state_kind(spec, module, arrangement)
    backend = str(module.get_attn_backend().get_name())
    quantisation = _mode_name(spec.kv_quant_mode)
    packed = getattr(spec, "state_content_bytes", None)
    own_slots = getattr(spec, "num_head_slots", None) is not None
    axes = ("kv_heads", "tokens", "")
    if backend in CELL_BACKENDS and quantisation in CELL_MODES and not own_slots:
        same = spec.head_size == spec.head_size_v
        content = "k+v" if same else f"k{spec.head_size}+v{spec.head_size_v}"
    elif backend in LATENT_BACKENDS and quantisation in LATENT_MODES and not spec.head_size_v:
        # Packed latents hold their scales beside their numbers.
        content = "latent" if packed is None else f"latent/{spec.cache_dtype_str}"
    else:
        isa = getattr(module, "isa", None)
        way = backend.lower() + (f"/{isa}" if isa else "") + arrangement(backend, spec, module)
        content = f"{way}.content"
        axes = (
            "kv_heads" if backend in HEADS_APART_BACKENDS and not own_slots else f"{way}.heads",
            f"{way}.tokens",
            "",
        )
    return LayerKind(
        heads=int(spec.num_heads),
        block_tokens=int(spec.block_size),
        page_bytes=page_bytes(spec),
        axes=(axes[0], axes[1], content),
        quantisation=quantisation,
        latent=not spec.head_size_v,
        scales=() if quantisation == "NONE" else _scales(module),
    )


def _scales(module: Any) -> tuple[str, ...]:
    found: list[str] = []
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(module, name, None)
        if scale is not None:
            found += [float(number).hex() for number in scale.detach().cpu().reshape(-1).tolist()]
    return tuple(found)


def _mode_name(mode: Any) -> str:
    """All names of a quantisation mode: in vLLM 0.33 two modes share the number 12, and both show the first one's name.

    The KV dtype, which is in the facts as well, tells modes with several names apart.
    """
    members = getattr(type(mode), "__members__", {})
    return "/".join(name for name, member in members.items() if member is mode) or str(
        getattr(mode, "name", mode)
    )
