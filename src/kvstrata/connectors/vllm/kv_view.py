"""Where the bytes of a chunk lie in an engine's paged KV cache, derived from shapes, strides and configuration.

See `docs/internals/layouts.md`.  The *kind* of a layer says what shape and strides do not: how bytes are arranged
inside a block (CPU attention packs them for the CPU's instructions), and with which scales numbers were quantised. Both
decide the meaning of KV bytes, so both are facts of a slice.  When a record is recut for another geometry, only axes
known to be heads or tokens can be cut.

The *runs* of a layer are the contiguous byte ranges of one of its blocks, in order.  vLLM registers one tensor per
layer, logically (blocks, heads, tokens, content) for every attention backend.  Its strides tell the physical order: six
orders exist, kernel blocks may be smaller than blocks, and pages may be padded.  Nothing here assumes one order.  A
tensor of another shape than vLLM announces for its layer is refused.

The *view* puts the layers of one worker together.  A record holds one section per layer; a section holds the blocks of
the chunk in order, and each block has its axes in physical order (outermost first), which may differ from layer to
layer.  The facts name those axes and everything else that decides the meaning of the bytes, so equal facts mean equal
bytes, and a reader with other facts has another slice digest.

Neither vLLM nor torch is imported: vLLM's objects are read by attribute only, and a tensor is any object with `shape`,
`stride()`, `element_size()`, `data_ptr()` and `dtype`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvstrata.connectors.vllm.groups import CacheGroup, layer_specs
from kvstrata.errors import ConfigError
from kvstrata.native.core import CopyPlan
from kvstrata.types import Slice, facts_digest

CELL_BACKENDS = (
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV",
)
"""Attention backends that store, for each head and token, the numbers of K and then those of V."""
CELL_MODES = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")
"""Quantisations in which CELL_BACKENDS have this order; in the last two, a scale follows the numbers of K or V."""
LATENT_BACKENDS = (
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "TRITON_MLA",
)
"""Backends that store one latent per token, token after token."""
LATENT_MODES = ("NONE", "FP8_PER_TENSOR")
HEADS_APART_BACKENDS = ("CPU_ATTN",)
"""Backends with a packing of their own for a block's tokens, in which each head's bytes are contiguous."""


class LayerKind(NamedTuple):
    """vLLM's description of one layer, whose tensor is logically (blocks, heads, tokens, content)."""

    heads: int
    block_tokens: int
    page_bytes: int
    """Bytes of a block without padding."""
    axes: tuple[str, str, str]
    """Names of the axes heads, tokens and content.  `kv_heads` and `tokens` count heads and tokens, `k+v` is two
    halves; a name with `@` and vLLM's version, or with `#` and a digest, stands for a packing that only its writer can
    interpret (`compat/packing.py`)."""
    quantisation: str
    latent: bool
    """Whether every tensor-parallel rank holds the whole layer: one latent per token without a separate V, or a state
    that is not split."""
    scales: tuple[str, ...]
    """Scales of K and of V, of the whole layer or of each head, as hexadecimal floats; () if none apply."""


NameArrangement = Callable[[str, Any, Any], str]
"""(backend, spec, attention layer) → name of a packing that only its writer can interpret."""


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
    """The kind of a layer whose block holds a state, whose bytes cannot be split by us."""
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
        # Packed latents include their scales.
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

    The KV dtype, which is in the facts as well, distinguishes modes with several names.
    """
    members = getattr(type(mode), "__members__", {})
    return "/".join(name for name, member in members.items() if member is mode) or str(
        getattr(mode, "name", mode)
    )


AXES = BLOCKS, HEADS, TOKENS, CONTENT = range(4)
"""Axes of a layer's tensor; in `LayerRuns.axes`, BLOCKS stands for the kernel blocks of a block."""
MAX_DIMS = 3
"""Maximum number of nested strided loops around one run (the copy plan's limit)."""


class TensorLike(Protocol):
    """The attributes of a torch tensor that this module reads."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class LayerRuns(NamedTuple):
    """The positions of one layer's blocks and their bytes: `base` address of block 0, stride between blocks in bytes,
    loops (count, stride in bytes), outermost first, around one contiguous run, and the axes of a block in physical
    order as (axis, size)."""

    base: int
    block_stride_bytes: int
    dims: tuple[tuple[int, int], ...]
    run_bytes: int
    axes: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """(dims, run bytes), as `CopyPlan` takes the shape of a block."""
        return self.dims, self.run_bytes

    @property
    def block_bytes(self) -> int:
        return self.run_bytes * math.prod(count for count, _ in self.dims)


def layer_runs(name: str, tensor: TensorLike, num_blocks: int, kind: LayerKind) -> LayerRuns:
    """The positions of one layer's blocks and their bytes. Raises ConfigError naming layer and shape.

    Some backends split a block of the block table into smaller kernel blocks; then the axis of blocks is a multiple of
    `num_blocks` long, and the axis of tokens a fraction of a block's tokens.
    """
    shape = tuple(tensor.shape)
    pieces, rest = divmod(shape[0], num_blocks) if len(shape) == len(AXES) else (0, 0)
    if not pieces or rest or (shape[1], shape[2] * pieces) != (kind.heads, kind.block_tokens):
        raise ConfigError(
            f"KV cache of layer {name!r}: shape {list(shape)} is not the one that vLLM announces: {num_blocks} blocks "
            f"with {kind.heads} heads and {kind.block_tokens} tokens; this attention backend is not supported",
            field="kv_cache",
        )
    element = tensor.element_size()
    strides = [stride * element for stride in tensor.stride()]
    loops = [(index, size, strides[index]) for index, size in enumerate((pieces, *shape[1:])) if size > 1]
    loops.sort(key=lambda loop: (-loop[2], loop[0]))
    run = element
    dims: list[tuple[int, int]] = []
    covered = element
    for _, size, stride in reversed(loops):
        if stride < covered:
            raise ConfigError(
                f"KV cache of layer {name!r}: shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} overlaps itself",
                field="kv_cache",
            )
        if not dims and stride == run:
            run *= size
        elif dims and stride == dims[0][0] * dims[0][1]:
            dims[0] = (dims[0][0] * size, dims[0][1])
        else:
            dims.insert(0, (size, stride))
        covered = stride * (size - 1) + covered
    if len(dims) > MAX_DIMS:
        raise ConfigError(
            f"KV cache of layer {name!r}: a block of shape {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} is scattered over {len(dims)} nested loops; at most {MAX_DIMS} are "
            "supported",
            field="kv_cache",
        )
    runs = LayerRuns(
        base=tensor.data_ptr(),
        block_stride_bytes=strides[0] * pieces,
        dims=tuple(dims),
        run_bytes=run,
        axes=tuple((index, size) for index, size, _ in loops),
    )
    if runs.block_bytes != kind.page_bytes:
        raise ConfigError(
            f"KV cache of layer {name!r}: a block of shape {list(tensor.shape)} has {runs.block_bytes} bytes, but vLLM "
            f"announces {kind.page_bytes}; this layout is not supported",
            field="kv_cache",
        )
    return runs


def axis_names(runs: LayerRuns, kind: LayerKind) -> list[list[Any]]:
    """The axes of a block in physical order as [name, size], for the facts; of two `tokens` axes the outer comes first.

    The names are those of `LayerKind.axes`, except that the halves K and V of a content are an axis `kv` of their own.
    Kernel blocks whose tokens are contiguous do not change the order of bytes, so they have no axis here.
    """
    named: list[list[Any]] = []
    for index, size in runs.axes:
        name = (kind.axes[1], *kind.axes)[index]
        if name == "k+v":
            named += [["kv", 2], ["dim", size // 2]]
        elif name == "tokens" and named and named[-1][0] == name:
            named[-1][1] *= size
        else:
            named.append([name, size])
    if kind.axes[1] == "tokens" and kind.block_tokens == 1:
        # An axis of one element does not change the order of bytes, but the facts must say that tokens can be cut.
        named.insert(0, ["tokens", 1])
    return named


FORMAT = "paged-blocks/2"
"""Name of the arrangement of blocks in a section; part of the facts."""
ENCODING = "fp8-e4m3/1"
"""Name of the encoding of sections with the fidelity `fp8` (docs/internals/formats.md).  It is the fidelity in such
engines' identities and a fact of their slices."""


class Heads(NamedTuple):
    """The KV heads and layers that one worker holds, and the number of distinct slices of the whole engine."""

    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    engine_slices: int
    replicas: int = 1
    """Number of tensor-parallel ranks that hold this same slice."""


class KvView(NamedTuple):
    """The facts about one worker's KV cache that copies, identity and attach need.

    The addresses point into the engine's tensors and are valid as long as the engine keeps them.
    """

    layers: dict[str, LayerRuns]
    """Layers by name, in the order of the record's sections."""
    num_blocks: int
    group: CacheGroup
    payload_bytes: int
    """Bytes of one chunk's record in this worker's slice."""
    facts: dict[str, int | str | list[Any]]
    slice: Slice
    rounding: tuple[int, int, int, int, int] | None = None
    """With the fidelity `fp8`: dtype, groups, tokens, heads, dim of a block, for `CudaCopyPlan`; else None."""

    @property
    def record_blocks(self) -> int:
        """Number of blocks in a record."""
        return self.group.record_blocks

    def plan(self) -> CopyPlan:
        """The copy plan between these blocks and records."""
        layers = self.layers.values()
        shapes = list(dict.fromkeys(layer.shape for layer in layers))
        return CopyPlan(
            [layer.base for layer in layers],
            self.num_blocks,
            [layer.block_stride_bytes for layer in layers],
            shapes=shapes,
            section_shapes=[shapes.index(layer.shape) for layer in layers],
        )


def heads_of(
    *,
    total_kv_heads: int,
    mla: bool,
    layers: tuple[int, int],
    tp_rank: int,
    tp_size: int,
    pp_size: int,
) -> Heads:
    """The slice that one rank holds. Ranks that hold replicas of the same heads get the same slice.

    `layers` is the half-open range of this pipeline stage.  An MLA latent is the same on every tensor-parallel rank.
    Raises ConfigError if `tp_size` is below the number of heads and does not divide it.
    """
    if mla:
        return Heads(layers, (0, 1), pp_size, tp_size)
    if tp_size <= total_kv_heads:
        if total_kv_heads % tp_size:
            raise ConfigError(
                f"tensor_parallel_size: {tp_size} does not divide {total_kv_heads} KV heads",
                field="tensor_parallel_size",
            )
        per_rank = total_kv_heads // tp_size
        return Heads(layers, (tp_rank * per_rank, (tp_rank + 1) * per_rank), tp_size * pp_size)
    replicas = tp_size // total_kv_heads
    head = tp_rank // replicas
    return Heads(layers, (head, head + 1), total_kv_heads * pp_size, replicas)


def layer_number(name: str) -> int | None:
    """The first number in a layer's name, which is the layer's number in vLLM."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else None


def natural_order(name: str) -> tuple[Any, ...]:
    """Sort key of layer names that puts layer 10 after layer 9."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name))


FP8_DTYPES = {"bfloat16": 1, "float16": 2}


def fp8_shape(axes: Sequence[tuple[int, int]], *, chunk_blocks: int, head_size: int, dtype: str) -> list[int]:
    """The shape of a section for rounding: dtype, blocks, groups, tokens, heads, dim (see fp8.h).

    Axes before the token axis are groups, axes after it are heads, and the last axis is one head.  If the last axis has
    twice a head's size, it holds K and V, which get separate scales.  Where a block has one token, the last axis before
    the head takes the place of the token axis: the scales are then coarser, and every error bound still holds.  Raises
    ConfigError for numbers that do not have 16 bits.
    """
    if dtype not in FP8_DTYPES:
        raise ConfigError(
            f"fidelity: 'fp8' rounds KV of {' or '.join(FP8_DTYPES)}, but this engine's is {dtype}; use 'lossless'",
            field="fidelity",
        )
    sizes = [size for _, size in axes] or [1]
    outer, dim = sizes[:-1], sizes[-1]
    halves = 2 if head_size and dim == 2 * head_size else 1
    at = next((i for i, (axis, _) in enumerate(axes[:-1]) if axis == TOKENS), len(outer) - 1)
    groups, heads = math.prod(outer[: max(at, 0)]), math.prod(outer[at + 1 :]) * halves
    return [FP8_DTYPES[dtype], chunk_blocks, groups, outer[at] if outer else 1, heads, dim // halves]


def build_view(
    tensors: Mapping[str, TensorLike],
    *,
    num_blocks: int,
    group: CacheGroup,
    heads: Heads,
    dtype: str,
    fidelity: str = "lossless",
    head_size: int = 0,
    kinds: Mapping[str, LayerKind],
) -> KvView:
    """The view of all registered layers of `group`, one KV cache group. `head_size` is needed for the fidelity `fp8`.

    With the fidelity `fp8`, sections hold scales and codes (docs/internals/formats.md), and the facts say so.

    Layers that share one tensor are included once.  Facts that differ between layers are listed for each layer.  Raises
    ConfigError for layers that are not supported.
    """
    if not tensors:
        raise ConfigError("KV cache: vLLM registered no layer", field="kv_cache")
    record_blocks = group.record_blocks
    runs: dict[str, LayerRuns] = {}
    seen: set[LayerRuns] = set()
    for name in sorted(tensors, key=natural_order):
        layer = layer_runs(name, tensors[name], num_blocks, kinds[name])
        if layer in seen:
            continue
        seen.add(layer)
        runs[name] = layer
    _check_replicas(runs, tensors, kinds, heads)
    numbers = [layer_number(name) for name in runs]
    makes: list[dict[str, int | str | list[Any]]] = [
        {
            "stored_dtype": str(tensors[name].dtype).removeprefix("torch."),
            "quantisation": kinds[name].quantisation,
            "element_bytes": tensors[name].element_size(),
            "axes": axis_names(layer, kinds[name]),
            "section_bytes": layer.block_bytes * record_blocks,
        }
        for name, layer in runs.items()
    ]
    # If all layers are alike, the facts must keep this form: their digest is part of the keys of stored records.
    differing = {fact for fact, value in makes[0].items() if any(make[fact] != value for make in makes)}
    payload_bytes = sum(layer.block_bytes for layer in runs.values()) * record_blocks
    facts: dict[str, int | str | list[Any]] = {
        "format": FORMAT,
        "dtype": dtype,
        **{fact: value for fact, value in makes[0].items() if fact not in differing},
        "chunk_tokens": group.chunk_tokens,
        "block_tokens": group.block_tokens,
        **group.facts(),
        # The layer of each section.
        "layers": [heads.layers[0] + i if number is None else number for i, number in enumerate(numbers)],
        "scales": [list(kinds[name].scales) for name in runs]
        if any(kinds[name].scales for name in runs)
        else [],
        "sections": len(runs),
        "payload_bytes": payload_bytes,
    }
    if differing:
        of_sections = [{fact: make[fact] for fact in sorted(differing)} for make in makes]
        unlike = [make for i, make in enumerate(of_sections) if make not in of_sections[:i]]
        facts["makes"] = unlike
        facts["section_makes"] = [unlike.index(make) for make in of_sections]
    rounding = None
    if fidelity == "fp8":
        if differing:
            raise ConfigError(
                "fidelity: 'fp8' needs layers of equal shape, and those of this model differ in their "
                f"{', '.join(sorted(differing))}; use 'lossless'",
                field="fidelity",
            )
        shape = fp8_shape(
            next(iter(runs.values())).axes,
            chunk_blocks=record_blocks,
            head_size=head_size,
            dtype=dtype,
        )
        for name in runs:
            _check_numbers(name, tensors[name], kinds[name])
        kind, _, groups, tokens, per_token, dim = shape
        rounding = (kind, groups, tokens, per_token, dim)
        section_bytes = 4 * groups * per_token + math.prod(shape[1:])
        payload_bytes = section_bytes * len(runs)
        facts |= {
            "element_bytes": 1,
            "encoding": ENCODING,
            "encoded": list(shape),
            "section_bytes": section_bytes,
            "payload_bytes": payload_bytes,
        }
    return KvView(
        layers=runs,
        num_blocks=num_blocks,
        group=group,
        payload_bytes=payload_bytes,
        facts=facts,
        slice=Slice(
            layers=heads.layers, kv_heads=heads.kv_heads, group=group.number, layout=facts_digest(facts)
        ),
        rounding=rounding,
    )


def _check_numbers(name: str, tensor: TensorLike, kind: LayerKind) -> None:
    """Raises ConfigError unless a layer's blocks are known to be plain arrays of 16-bit numbers."""
    known = kind.quantisation == "NONE" and "." not in kind.axes[2]
    if tensor.element_size() != 2 or not known:
        raise ConfigError(
            f"fidelity: 'fp8' rounds 16-bit numbers, and KV cache of layer {name!r} ({_described(tensor, kind)}) is "
            "not known to hold these alone; use 'lossless'",
            field="fidelity",
        )


def _check_replicas(
    runs: Mapping[str, LayerRuns],
    tensors: Mapping[str, TensorLike],
    kinds: Mapping[str, LayerKind],
    heads: Heads,
) -> None:
    """Raises ConfigError if ranks that share records might hold different bytes of some layer.

    The number of heads is known for the model, not for each layer; if layers differ, only latents are certain to be the
    same on every rank.
    """
    if heads.replicas == 1 or all(kinds[name].latent for name in runs):
        return
    first_name, *names = runs
    first = _shape_and_kind(runs[first_name], tensors[first_name], kinds[first_name])
    for name in names:
        if _shape_and_kind(runs[name], tensors[name], kinds[name]) != first:
            raise ConfigError(
                f"KV cache: the blocks of layer {name!r} ({_described(tensors[name], kinds[name])}) differ from "
                f"those of layer {first_name!r} ({_described(tensors[first_name], kinds[first_name])}), while "
                f"{heads.replicas} tensor-parallel ranks count as holding the same KV heads; lower "
                "--tensor-parallel-size to the number of KV heads, or run this model without this connector",
                field="kv_cache",
            )


def layers_of_groups(
    tensors: Mapping[str, TensorLike], kinds: Mapping[str, LayerKind]
) -> dict[str, TensorLike]:
    """The tensors that have a kind. Raises ConfigError for any other tensor that does not share their memory."""
    known = {name: tensors[name] for name in kinds if name in tensors}
    places = {_place(tensor) for tensor in known.values()}
    for name, tensor in tensors.items():
        if name not in kinds and _place(tensor) not in places:
            raise ConfigError(
                f"KV cache of {name!r} ({_described(tensor, None)}): vLLM names it in no cache group, so what it holds "
                "is not known; run this model without this connector",
                field="kv_cache",
            )
    return known


def _place(tensor: TensorLike) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _shape_and_kind(layer: LayerRuns, tensor: TensorLike, kind: LayerKind) -> tuple[Any, ...]:
    return layer.dims, layer.run_bytes, layer.axes, str(tensor.dtype), kind._replace(scales=())


def _described(tensor: TensorLike, kind: LayerKind | None) -> str:
    made = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
    return made if kind is None else f"{made}, {kind.axes[2]}"


def chunk_bytes(group: Any, record_blocks: int) -> int:
    """Bytes of one chunk's record of one worker, before any tensor exists. `group` is vLLM's."""
    return record_blocks * sum(int(page_bytes(spec)) for spec in layer_specs(group))
