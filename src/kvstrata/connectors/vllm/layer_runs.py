"""Derives how to walk the bytes of one block of one layer from the shape and strides of the tensor that vLLM registers.

vLLM registers one tensor per layer, logically (blocks, heads, tokens, content) for every attention backend.  Its
strides tell the physical order: six orders exist (`docs/layouts.md`), kernel blocks may be smaller than blocks, and
pages may be padded.  Nothing here assumes one order.  Without vLLM's description of a layer, any shape is accepted
whose block axis can be identified by its size, such as those of older backends: (2, blocks, tokens, heads, head) or
(blocks, 2, tokens, heads, head).

This module does not import torch: a tensor is any object with `shape`, `stride()`, `element_size()`, `data_ptr()` and
`dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvstrata.connectors.vllm.layer_kinds import LayerKind
from kvstrata.errors import ConfigError

MAX_DIMS = 3
"""Maximum number of nested strided loops around one run (the copy plan's limit)."""


class TensorLike(Protocol):
    """The part of a torch tensor that is read here."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class LayerRuns(NamedTuple):
    """How to walk the blocks of one layer: `base` address of block 0, bytes between blocks, loops (count, stride in
    bytes), outermost first, around one contiguous run, and the axes of a block in physical order as (axis, size)."""

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


def find_block_axis(
    name: str, tensor: TensorLike, num_blocks: int, block_tokens: int, kind: LayerKind | None = None
) -> tuple[int, int]:
    """(axis, pieces): the axis that counts blocks, and how many equal pieces make a block of the block table.

    Some backends split a block of the block table into smaller kernel blocks; then the axis has a multiple of
    `num_blocks`.  In a tensor of the shape that its `kind` announces, the block axis comes first.  In other tensors, it
    is an axis of fitting size that lies outermost or just inside the pair of K and V; of several such axes, the one
    whose size is exactly `num_blocks`.  Raises ConfigError naming the shape when no axis or more than one is left.
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
    # The size of another axis may equal the number of blocks by chance.
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
            f"{list(tensor.stride())} is scattered over {len(dims)} nested loops; at most {MAX_DIMS} are "
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
    """The axes of a block in physical order as [name, size], for the facts; of two `tokens` axes the outer comes first.

    The names are those of `LayerKind.axes`, except that the halves K and V of a content are an axis `kv` of their own.
    Kernel blocks whose tokens are contiguous leave no trace in the bytes, so they have no axis here.
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
        # An axis of one element leaves no trace in the bytes, but the facts must tell that tokens can be cut.
        named.insert(0, ["tokens", 1])
    return named
