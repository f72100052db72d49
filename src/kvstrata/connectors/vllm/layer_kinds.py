"""What vLLM says about the bytes of each layer's blocks, beyond shape and strides: `docs/layouts.md` lists it all.

Shape and strides are enough to copy blocks.  They do not tell whose bytes lie where *inside* a block (CPU attention
packs them for the instructions that the CPU has), nor with which scales numbers were quantised.  Both decide the
meaning of KV bytes, so both are facts of a slice; and only an axis that is known to mean one head or one token can be
cut when a record is recut for another geometry.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Quantisations under which they do; the last two put a scale behind the numbers of each half."""
LATENT_BACKENDS = (
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "TRITON_MLA",
)
"""Backends that keep one latent a token, one token behind the other."""
LATENT_MODES = ("NONE", "FP8_PER_TENSOR")
HEADS_APART_BACKENDS = ("CPU_ATTN",)
"""Backends that arrange the tokens of a block in a way of their own, but each head by itself."""


class LayerKind(NamedTuple):
    """One layer as vLLM describes it, whose tensor is logically (blocks, heads, tokens, content)."""

    heads: int
    block_tokens: int
    page_bytes: int
    """Bytes of a block without padding."""
    axes: tuple[str, str, str]
    """Names of the axes heads, tokens and content: `kv_heads`, `tokens` and `k+v` (two halves) mean just that; any
    other name stands for an arrangement that is only known to whoever wrote it, and holds vLLM's version."""
    quantisation: str
    latent: bool
    """One state a token, which every tensor-parallel rank holds, without a V of its own."""
    scales: tuple[str, ...]
    """Scales of K and of V that hold for the whole layer or each head, as hexadecimal floats; () where none apply."""


def layer_kinds(groups: Sequence[Any], modules: Mapping[str, Any], version: str) -> dict[str, LayerKind]:
    """The kind of every layer that has blocks of its own, by name.

    `version` is vLLM's: an arrangement that only its writer knows may change with any version.  `groups` are
    `KVCacheConfig.kv_cache_groups`, `modules` the attention layers by name
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
            kinds[name] = _kind(each.get(name, group.kv_cache_spec), modules[name], version)
    return kinds


def _kind(spec: Any, module: Any, version: str) -> LayerKind:
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
        way = backend.lower() + (f"/{isa}" if isa else "") + f"@{version}"
        content = f"{way}.content"
        axes = (
            "kv_heads" if backend in HEADS_APART_BACKENDS and not own_slots else f"{way}.heads",
            f"{way}.tokens",
            "",
        )
    return LayerKind(
        heads=int(spec.num_heads),
        block_tokens=int(spec.block_size),
        page_bytes=int(spec.unpadded_page_size_bytes),
        axes=(axes[0], axes[1], content),
        quantisation=quantisation,
        latent=not spec.head_size_v,
        scales=() if quantisation == "NONE" else _scales(module),
    )


def _mode_name(mode: Any) -> str:
    """All names of a quantisation mode: in vLLM 0.33 two modes have the number 12 and read as the first of them.

    The KV dtype, which is in the facts as well, tells them apart.
    """
    members = getattr(type(mode), "__members__", {})
    return "/".join(name for name, member in members.items() if member is mode) or str(
        getattr(mode, "name", mode)
    )


def _scales(module: Any) -> tuple[str, ...]:
    found: list[str] = []
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(module, name, None)
        if scale is not None:
            found += [float(number).hex() for number in scale.detach().cpu().reshape(-1).tolist()]
    return tuple(found)
