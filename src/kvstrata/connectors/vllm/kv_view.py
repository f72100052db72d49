"""Where the bytes of a chunk lie in an engine's paged KV cache: from shapes, strides and its configuration.

vLLM registers one tensor per layer, logically (blocks, heads, tokens, content) for every attention backend, whose
strides tell the physical order: six of them exist (`docs/layouts.md`), kernel blocks may be smaller than blocks, and
pages may be padded.  Nothing here assumes one of them; where vLLM's description of a layer is not given, any shape is
taken whose block axis can be told by its size, as those of older backends: (2, blocks, tokens, heads, head) or
(blocks, 2, tokens, heads, head).  A record holds one section per layer; a section holds the blocks of the chunk in
order, each block its axes in physical order (outermost first), which may differ from layer to layer.  The facts name
those axes and what else decides the meaning of the bytes, so equal facts mean equal bytes, and a reader with other
facts has another slice digest.

No torch here: a tensor is anything with `shape`, `stride()`, `element_size()`, `data_ptr()` and `dtype`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvstrata.connectors.vllm.layer_kinds import LayerKind
from kvstrata.errors import ConfigError
from kvstrata.native.copying import CopyPlan
from kvstrata.types import Slice, facts_digest

MAX_DIMS = 3
"""Strided loops that one copy run may sit in (the copy plan's limit)."""
FORMAT = "paged-blocks/2"
"""Names the arrangement of blocks in a section; part of the facts."""
ENCODING = "fp8-e4m3/1"
"""Names what `gpu_fp8` makes of a section (docs/formats.md): fidelity of such engines and a fact of their slices."""


class TensorLike(Protocol):
    """The part of a torch tensor that is read here."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class Heads(NamedTuple):
    """Which KV heads and layers one worker holds, and how many distinct slices the whole engine has."""

    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    engine_slices: int
    replicas: int = 1
    """Tensor-parallel ranks that hold this very slice."""


class LayerRuns(NamedTuple):
    """One layer: `base` address of block 0, bytes between blocks, loops (count, stride in bytes) outermost
    first around one contiguous run, and the axes of a block in physical order as (axis, size)."""

    base: int
    block_stride_bytes: int
    dims: tuple[tuple[int, int], ...]
    run_bytes: int
    axes: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """As `CopyPlan` takes it."""
        return self.dims, self.run_bytes

    @property
    def block_bytes(self) -> int:
        return self.run_bytes * math.prod(count for count, _ in self.dims)


class KvView(NamedTuple):
    """Everything about one worker's KV cache that copies, identity and attach need.

    The addresses point into the engine's tensors and are valid as long as the engine keeps them.
    """

    layers: dict[str, LayerRuns]
    """By name, in the order of the record's sections."""
    num_blocks: int
    block_tokens: int
    chunk_blocks: int
    payload_bytes: int
    """Bytes of one chunk in this worker's slice."""
    facts: dict[str, int | str | list[Any]]
    slice: Slice
    rounding: tuple[int, int, int, int, int] | None = None
    """With `gpu_fp8`: dtype, groups, tokens, heads, dim of a block, as `CudaCopyPlan` takes them."""

    def plan(self) -> CopyPlan:
        """What copies between these blocks and records."""
        layers = self.layers.values()
        shapes = list(dict.fromkeys(layer.shape for layer in layers))
        return CopyPlan(
            [layer.base for layer in layers],
            self.num_blocks,
            [layer.block_stride_bytes for layer in layers],
            shapes=shapes,
            section_shapes=[shapes.index(layer.shape) for layer in layers],
        )


def check_chunk_size(chunk_tokens: int, block_tokens: int) -> int:
    """Blocks per chunk. Raises ConfigError naming both sizes when a chunk is no whole number of blocks."""
    blocks, rest = divmod(chunk_tokens, block_tokens)
    if rest or not blocks:
        better = max(block_tokens, -(-chunk_tokens // block_tokens) * block_tokens)
        raise ConfigError(
            f"chunk_size: {chunk_tokens} tokens is not a multiple of vLLM's block_size of {block_tokens} "
            f"tokens; set chunk_size to {better} or give vLLM a --block-size that divides {chunk_tokens}",
            field="chunk_size",
        )
    return blocks


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

    `layers` is the half-open range of this pipeline stage.  An MLA latent is the same on every
    tensor-parallel rank.
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


def find_block_axis(
    name: str, tensor: TensorLike, num_blocks: int, block_tokens: int, kind: LayerKind | None = None
) -> tuple[int, int]:
    """(axis, pieces): the axis that counts blocks, and how many equal pieces make a block of the block table.

    Some backends split a block of the block table into smaller kernel blocks; then the axis has a multiple of
    `num_blocks`.  A tensor of the shape that its `kind` announces has its blocks in front.  For others, where several
    axes fit by their size, it is the one that lies outermost or just inside the pair of
    K and V, and of those the one of exactly that size.  Raises ConfigError naming the shape when that leaves none
    or more than one.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if kind is not None and len(shape) == 4 and shape[1] == kind.heads:
        pieces, rest = divmod(shape[0], num_blocks)
        if pieces and not rest and shape[2] * pieces == kind.block_tokens:
            return 0, pieces
    fitting = [
        (axis, size // num_blocks)
        for axis, size in enumerate(shape)
        if size >= num_blocks and size % num_blocks == 0 and block_tokens % (size // num_blocks) == 0
    ]
    outside = [found for found in fitting if _elements_outside(found[0], shape, strides) <= 2]
    exact = [found for found in fitting if found[1] == 1]
    # The size of a head or of anything else may be that of the blocks by chance.
    candidates = [found for found in outside if found in exact] or outside or exact or fitting
    if len(candidates) != 1:
        found = "more than one axis" if candidates else "no axis"
        raise ConfigError(
            f"KV cache of layer {name!r}: shape {list(shape)} with strides {list(strides)} has {found} of "
            f"num_blocks {num_blocks}; "
            + (
                "change the number of blocks a little, e.g. by --num-gpu-blocks-override"
                if candidates
                else "this attention backend is not supported"
            ),
            field="kv_cache",
        )
    return candidates[0]


def _elements_outside(axis: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Product of the sizes of all axes with a larger stride."""
    product = 1
    for other, size in enumerate(shape):
        if other != axis and size > 1 and strides[other] > strides[axis]:
            product *= size
    return product


def layer_runs(
    name: str, tensor: TensorLike, num_blocks: int, block_tokens: int, kind: LayerKind | None = None
) -> LayerRuns:
    """How to walk the bytes of one block of one layer. Raises ConfigError naming layer and shape."""
    axis, pieces = find_block_axis(name, tensor, num_blocks, block_tokens, kind)
    element = tensor.element_size()
    strides = [stride * element for stride in tensor.stride()]
    loops = [
        (index, size, strides[index]) for index, size in enumerate(tensor.shape) if index != axis and size > 1
    ]
    if pieces > 1:
        loops.append((axis, pieces, strides[axis]))
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
            f"{list(tensor.stride())} is scattered over {len(dims)} nested loops, at most {MAX_DIMS} are "
            "supported",
            field="kv_cache",
        )
    runs = LayerRuns(
        base=tensor.data_ptr(),
        block_stride_bytes=strides[axis] * pieces,
        dims=tuple(dims),
        run_bytes=run,
        axes=tuple((index, size) for index, size, _ in loops),
    )
    if kind is not None and runs.block_bytes != kind.page_bytes:
        raise ConfigError(
            f"KV cache of layer {name!r}: a block of shape {list(tensor.shape)} has {runs.block_bytes} bytes, but vLLM "
            f"announces {kind.page_bytes}; this layout is not supported",
            field="kv_cache",
        )
    return runs


def axis_names(runs: LayerRuns, kind: LayerKind | None) -> list[list[Any]]:
    """The axes of a block in physical order as [name, size], for the facts; of two `tokens` the first is the outer.

    Names as in `LayerKind.axes`, but for the halves K and V of a content, which are an axis `kv` of their own.  Kernel
    blocks that are dense in tokens are not seen in the bytes, nor here.
    """
    named: list[list[Any]] = []
    for index, size in runs.axes:
        name = f"axis{index}" if kind is None else (kind.axes[1], *kind.axes)[index]
        if name == "k+v":
            named += [["kv", 2], ["dim", size // 2]]
        elif name == "tokens" and named and named[-1][0] == name:
            named[-1][1] *= size
        else:
            named.append([name, size])
    if kind is not None and kind.axes[1] == "tokens" and kind.block_tokens == 1:
        # Axes of one element are not seen in the bytes, but whether tokens are apart is a promise.
        named.insert(0, ["tokens", 1])
    return named


def layer_number(name: str) -> int | None:
    """The first number in a layer's name, as vLLM counts layers."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else None


def natural_order(name: str) -> tuple[Any, ...]:
    """Sort key of layer names that puts layer 10 after layer 9."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name))


FP8_DTYPES = {"bfloat16": 1, "float16": 2}


def fp8_shape(
    axes: Sequence[tuple[int, int]], *, chunk_blocks: int, block_tokens: int, head_size: int, dtype: str
) -> list[int]:
    """What the codec `fp8` needs to know of a section: dtype, blocks, groups, tokens, heads, dim (see fp8.h).

    Axes before that of the tokens are groups, those behind it heads, the last one is a head; where it is twice
    a head's size it holds K and V, which get scales of their own.  Without an axis of tokens alone the last one but
    the head is taken for it: the scales are coarser or finer then, and every bound holds as it is.  Raises
    ConfigError for numbers that are not of 16 bits.
    """
    if dtype not in FP8_DTYPES:
        raise ConfigError(
            f"fidelity: 'fp8' rounds KV of {' or '.join(FP8_DTYPES)}, this engine has {dtype}; use 'lossless'",
            field="fidelity",
        )
    sizes = [size for _, size in axes] or [1]
    outer, dim = sizes[:-1], sizes[-1]
    halves = 2 if head_size and dim == 2 * head_size else 1
    found = [i for i, size in enumerate(outer) if size == block_tokens]
    # K and V, or the heads, may be as many as a block has tokens: the axis further in is then taken.
    at = found[-1] if found else len(outer) - 1
    groups, heads = math.prod(outer[: max(at, 0)]), math.prod(outer[at + 1 :]) * halves
    return [FP8_DTYPES[dtype], chunk_blocks, groups, outer[at] if outer else 1, heads, dim // halves]


def build_view(
    tensors: Mapping[str, TensorLike],
    *,
    num_blocks: int,
    block_tokens: int,
    chunk_tokens: int,
    heads: Heads,
    dtype: str,
    fidelity: str = "lossless",
    head_size: int = 0,
    kinds: Mapping[str, LayerKind] | None = None,
    gpu_fp8: bool = False,
) -> KvView:
    """The view of all registered layers of one KV cache group. `head_size` is needed for the fidelity `fp8`.

    With `gpu_fp8`, for that fidelity only, sections hold what `fp8_encode` makes of the blocks, and the facts are those
    of such records.

    Layers that share one tensor with another layer are taken once.  What differs between layers is in the facts for
    each of them.  Without `kinds` the facts do not say what the axes mean, and such records cannot be recut.
    """
    if kinds is not None:
        tensors = _layers_of_groups(tensors, kinds)
    kinds = kinds or {}
    if not tensors:
        raise ConfigError("KV cache: vLLM registered no layer", field="kv_cache")
    chunk_blocks = check_chunk_size(chunk_tokens, block_tokens)
    runs: dict[str, LayerRuns] = {}
    seen: set[LayerRuns] = set()
    for name in sorted(tensors, key=natural_order):
        layer = layer_runs(name, tensors[name], num_blocks, block_tokens, kinds.get(name))
        if layer in seen:
            continue
        seen.add(layer)
        runs[name] = layer
    _check_replicas(runs, tensors, kinds, heads)
    numbers = [layer_number(name) for name in runs]
    makes: list[dict[str, int | str | list[Any]]] = [
        {
            "stored_dtype": str(tensors[name].dtype).removeprefix("torch."),
            "quantisation": kinds[name].quantisation if name in kinds else "",
            "element_bytes": tensors[name].element_size(),
            "axes": axis_names(layer, kinds.get(name)),
            "section_bytes": layer.block_bytes * chunk_blocks,
        }
        for name, layer in runs.items()
    ]
    # Facts of engines whose layers are alike must stay what they are: records are found by their digest.
    differing = {fact for fact, value in makes[0].items() if any(make[fact] != value for make in makes)}
    payload_bytes = sum(layer.block_bytes for layer in runs.values()) * chunk_blocks
    facts: dict[str, int | str | list[Any]] = {
        "format": FORMAT,
        "dtype": dtype,
        **{fact: value for fact, value in makes[0].items() if fact not in differing},
        "chunk_tokens": chunk_tokens,
        "block_tokens": block_tokens,
        # The layer that each section is of.
        "layers": [heads.layers[0] + i if number is None else number for i, number in enumerate(numbers)],
        "scales": [list(kinds[name].scales) for name in runs]
        if any(name in kinds and kinds[name].scales for name in runs)
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
                "fidelity: 'fp8' rounds layers of one make-up, and those of this model differ in their "
                f"{', '.join(sorted(differing))}; use 'lossless'",
                field="fidelity",
            )
        shape = fp8_shape(
            next(iter(runs.values())).axes,
            chunk_blocks=chunk_blocks,
            block_tokens=block_tokens,
            head_size=head_size,
            dtype=dtype,
        )
        if gpu_fp8:
            for name in runs:
                _check_numbers(name, tensors[name], kinds.get(name))
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
        else:
            facts["fp8"] = shape
    return KvView(
        layers=runs,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        chunk_blocks=chunk_blocks,
        payload_bytes=payload_bytes,
        facts=facts,
        slice=Slice(layers=heads.layers, kv_heads=heads.kv_heads, layout=facts_digest(facts)),
        rounding=rounding,
    )


def _check_numbers(name: str, tensor: TensorLike, kind: LayerKind | None) -> None:
    """Whether the blocks of a layer are arrays of 16-bit numbers and nothing else."""
    known = kind is None or (kind.quantisation == "NONE" and "." not in kind.axes[2])
    if tensor.element_size() != 2 or not known:
        raise ConfigError(
            f"gpu_fp8: KV cache of layer {name!r} ({_described(tensor, kind)}) is not known to hold 16-bit numbers "
            "alone; set gpu_fp8 to false",
            field="gpu_fp8",
        )


def _check_replicas(
    runs: Mapping[str, LayerRuns],
    tensors: Mapping[str, TensorLike],
    kinds: Mapping[str, LayerKind],
    heads: Heads,
) -> None:
    """Ranks that share records must hold the same of every layer, not of most.

    The number of heads is known for the model, not for each layer; where layers differ, only latents are sure to be
    the same on every rank.
    """
    if heads.replicas == 1 or all(name in kinds and kinds[name].latent for name in runs):
        return
    first_name, *names = runs
    first = _make_up(runs[first_name], tensors[first_name], kinds.get(first_name))
    for name in names:
        if _make_up(runs[name], tensors[name], kinds.get(name)) != first:
            raise ConfigError(
                f"KV cache: the blocks of layer {name!r} ({_described(tensors[name], kinds.get(name))}) differ from "
                f"those of layer {first_name!r} ({_described(tensors[first_name], kinds.get(first_name))}), while "
                f"{heads.replicas} tensor-parallel ranks count as holding the same KV heads; lower "
                "--tensor-parallel-size to the number of KV heads, or run this model without this connector",
                field="kv_cache",
            )


def _layers_of_groups(
    tensors: Mapping[str, TensorLike], kinds: Mapping[str, LayerKind]
) -> dict[str, TensorLike]:
    """The tensors that have a kind. Any other must be that of a layer which uses another one's blocks."""
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


def _make_up(layer: LayerRuns, tensor: TensorLike, kind: LayerKind | None) -> tuple[Any, ...]:
    return layer.dims, layer.run_bytes, layer.axes, str(tensor.dtype), kind and kind._replace(scales=())


def _described(tensor: TensorLike, kind: LayerKind | None) -> str:
    made = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
    return made if kind is None else f"{made}, {kind.axes[2]}"


FULL_ATTENTION_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's cache kinds that keep every block of a request until it ends."""


def check_groups(groups: Sequence[Any]) -> int:
    """Tokens in a block of the one KV cache group. Raises ConfigError when the model needs more than that.

    `groups` are vLLM's `KVCacheConfig.kv_cache_groups`.
    """
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ConfigError(
            f"kv_cache_groups: this model has {len(groups)} KV cache groups ({kinds}); only models with one "
            "group of full-attention layers are supported so far, so run it without this connector",
            field="kv_cache_groups",
        )
    spec = groups[0].kv_cache_spec
    for each in layer_specs(groups[0]):
        kind = type(each).__name__
        if kind not in FULL_ATTENTION_SPECS:
            raise ConfigError(
                f"kv_cache_groups[0]: {kind} is not supported so far (supported: "
                f"{', '.join(FULL_ATTENTION_SPECS)}), so run this model without this connector",
                field="kv_cache_groups",
            )
        if getattr(each, "non_causal", False):
            raise ConfigError(
                "kv_cache_groups[0]: attention is not causal (prefix-LM), so the KV of a token depends on later tokens "
                "and must not be reused; run this model without this connector",
                field="kv_cache_groups",
            )
        per_state = getattr(each, "tokens_per_state", 1)
        if per_state != 1:
            raise ConfigError(
                f"kv_cache_groups[0]: {per_state} tokens per stored state is not supported so far, only 1",
                field="kv_cache_groups",
            )
    return int(spec.block_size)


def layer_specs(group: Any) -> list[Any]:
    """The description of each layer of a group: vLLM gives one for all, or one for each."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(each.values()) if each else [group.kv_cache_spec] * len(group.layer_names)


def chunk_bytes(group: Any, chunk_blocks: int) -> int:
    """Bytes of one chunk of one worker, before any tensor exists."""
    return chunk_blocks * sum(int(spec.unpadded_page_size_bytes) for spec in layer_specs(group))
