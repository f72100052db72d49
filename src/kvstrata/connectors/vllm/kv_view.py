"""Where the bytes of a chunk lie in an engine's paged KV cache, derived from shapes, strides and configuration.

`layer_runs` tells how to walk one block of one layer; this module puts the layers of one worker together.  A record
holds one section per layer; a section holds the blocks of the chunk in order, and each block has its axes in physical
order (outermost first), which may differ from layer to layer.  The facts name those axes and everything else that
decides the meaning of the bytes, so equal facts mean equal bytes, and a reader with other facts has another slice
digest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.connectors.vllm.groups import CacheGroup, layer_specs
from kvstrata.connectors.vllm.layer_kinds import LayerKind, page_bytes
from kvstrata.connectors.vllm.layer_runs import LayerRuns, TensorLike, axis_names, layer_runs
from kvstrata.errors import ConfigError
from kvstrata.native.core import CopyPlan
from kvstrata.types import Slice, facts_digest

FORMAT = "paged-blocks/2"
"""Names the arrangement of blocks in a section; part of the facts."""
ENCODING = "fp8-e4m3/1"
"""Names the encoding that the fidelity `fp8` gives to sections (docs/formats.md).  The name is the fidelity of such
engines and a fact of their slices."""


class Heads(NamedTuple):
    """The KV heads and layers that one worker holds, and the number of distinct slices of the whole engine."""

    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    engine_slices: int
    replicas: int = 1
    """Number of tensor-parallel ranks that hold this same slice."""


class KvView(NamedTuple):
    """Everything about one worker's KV cache that copies, identity and attach need.

    The addresses point into the engine's tensors and are valid as long as the engine keeps them.
    """

    layers: dict[str, LayerRuns]
    """By name, in the order of the record's sections."""
    num_blocks: int
    group: CacheGroup
    payload_bytes: int
    """Bytes of one chunk's record in this worker's slice."""
    facts: dict[str, int | str | list[Any]]
    slice: Slice
    rounding: tuple[int, int, int, int, int] | None = None
    """With the fidelity `fp8`: dtype, groups, tokens, heads, dim of a block, as `CudaCopyPlan` takes them."""

    @property
    def record_blocks(self) -> int:
        """Blocks in a record."""
        return self.group.record_blocks

    def plan(self) -> CopyPlan:
        """The plan of copies between these blocks and records."""
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


def fp8_shape(
    axes: Sequence[tuple[int, int]], *, chunk_blocks: int, block_tokens: int, head_size: int, dtype: str
) -> list[int]:
    """The shape of a section for rounding: dtype, blocks, groups, tokens, heads, dim (see fp8.h).

    Axes before the token axis are groups, axes after it are heads, and the last axis is one head.  If the last axis has
    twice a head's size, it holds K and V, which get separate scales.  If no axis is known to be the token axis, the
    last one before the head is used: the scales are then coarser or finer, and every error bound still holds.  Raises
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
    found = [i for i, size in enumerate(outer) if size == block_tokens]
    # The axis of K and V or of the heads may have the size of the token axis: then the innermost one is taken.
    at = found[-1] if found else len(outer) - 1
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
    kinds: Mapping[str, LayerKind] | None = None,
) -> KvView:
    """The view of all registered layers of `group`, one KV cache group. `head_size` is needed for the fidelity `fp8`.

    With the fidelity `fp8`, sections hold the output of `fp8_encode`, and the facts say so.

    Layers that share one tensor are taken once.  Facts that differ between layers are listed for each layer.  Without
    `kinds` the facts do not say what the axes mean, and such records cannot be recut.  Raises ConfigError for layers
    that are not supported.
    """
    if kinds is not None:
        tensors = layers_of_groups(tensors, kinds)
    kinds = kinds or {}
    if not tensors:
        raise ConfigError("KV cache: vLLM registered no layer", field="kv_cache")
    record_blocks = group.record_blocks
    runs: dict[str, LayerRuns] = {}
    seen: set[LayerRuns] = set()
    for name in sorted(tensors, key=natural_order):
        layer = layer_runs(name, tensors[name], num_blocks, group.block_tokens, kinds.get(name))
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
                "fidelity: 'fp8' needs layers of equal shape, and those of this model differ in their "
                f"{', '.join(sorted(differing))}; use 'lossless'",
                field="fidelity",
            )
        shape = fp8_shape(
            next(iter(runs.values())).axes,
            chunk_blocks=record_blocks,
            block_tokens=group.block_tokens,
            head_size=head_size,
            dtype=dtype,
        )
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


def _check_numbers(name: str, tensor: TensorLike, kind: LayerKind | None) -> None:
    """Raises ConfigError unless the blocks of a layer are known to be plain arrays of 16-bit numbers."""
    known = kind is None or (kind.quantisation == "NONE" and "." not in kind.axes[2])
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
    if heads.replicas == 1 or all(name in kinds and kinds[name].latent for name in runs):
        return
    first_name, *names = runs
    first = _shape_and_kind(runs[first_name], tensors[first_name], kinds.get(first_name))
    for name in names:
        if _shape_and_kind(runs[name], tensors[name], kinds.get(name)) != first:
            raise ConfigError(
                f"KV cache: the blocks of layer {name!r} ({_described(tensors[name], kinds.get(name))}) differ from "
                f"those of layer {first_name!r} ({_described(tensors[first_name], kinds.get(first_name))}), while "
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


def _shape_and_kind(layer: LayerRuns, tensor: TensorLike, kind: LayerKind | None) -> tuple[Any, ...]:
    return layer.dims, layer.run_bytes, layer.axes, str(tensor.dtype), kind and kind._replace(scales=())


def _described(tensor: TensorLike, kind: LayerKind | None) -> str:
    made = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
    return made if kind is None else f"{made}, {kind.axes[2]}"


def chunk_bytes(group: Any, record_blocks: int) -> int:
    """Bytes of one chunk's record of one worker, before any tensor exists. `group` is vLLM's."""
    return record_blocks * sum(int(page_bytes(spec)) for spec in layer_specs(group))
