"""A paged KV cache in vLLM's layouts, in device memory or the host's, without torch; its bytes tell blocks apart.

The KV of a block follows from the tokens of its prompt up to the block's end, and from its layer: the KV is a piece of
a fixed random pattern, so a test can tell the right bytes from those of any other block. Free blocks are poisoned. The
pattern holds bfloat16 numbers that fp8 can represent, and each piece holds the largest of them, so an engine that
rounds KV to fp8 loads the same bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from kvstrata.connectors.vllm.groups import whole_group
from kvstrata.connectors.vllm.kv_view import TOKENS, Heads, KvView, LayerKind, build_view
from tests.harness.cuda_driver import SimulatedGpu
from tests.oracles.codec import from_e4m3

ELEMENT_BYTES = 2
POISON = 0xDE
PATTERN_BYTES = 1 << 20
BFLOAT16 = 1
"""The codec's number for the type bfloat16."""
PIECE_BYTES = 16
"""Pieces of the pattern begin at multiples of this."""
ARENA_BYTES = 64 << 20


class Shape(NamedTuple):
    """One worker's part of a model with grouped-query attention, whose KV has 16-bit numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def products(self) -> list[tuple[int, int]]:
        """Shapes of a layer's weights: query, key and value together; output projection; gate and up; down."""
        width = self.head_dim * self.heads
        return [
            (self.hidden, width + 2 * self.kv_heads * self.head_dim),
            (width, self.hidden),
            (self.hidden, 2 * self.ffn),
            (self.ffn, self.hidden),
        ]


SHAPES = {
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336),
    "70b_tp8": Shape(layers=80, hidden=8192, heads=8, kv_heads=1, head_dim=128, ffn=3584),
}
"""Llama 8B, and one of eight workers of Llama 70B."""
TINY = Shape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128)


class Tensor(NamedTuple):
    """The part of a torch tensor that `kv_view` reads."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "torch.bfloat16"

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return ELEMENT_BYTES

    def data_ptr(self) -> int:
        return self.address


LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's layouts: the order of layers, blocks, heads, tokens and content in memory."""


def strides_of(layout: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return for each axis of a layout how many numbers lie between its elements."""
    strides, step = {}, 1
    for axis in reversed(layout):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def layer_tensors(base: int, layout: str, sizes: Mapping[str, int], first: int = 0) -> dict[str, Tensor]:
    """Return the tensors of all layers from number `first` on, which fill the memory from `base` on without gaps."""
    strides = strides_of(layout, sizes)
    return {
        f"layers.{first + layer}": Tensor(
            base + layer * strides["L"] * ELEMENT_BYTES,
            tuple(sizes[axis] for axis in "BHNC"),
            tuple(strides[axis] for axis in "BHNC"),
        )
        for layer in range(sizes["L"])
    }


def pattern() -> bytes:
    """Return the pattern from which all KV is cut."""
    return _pattern


def _make_pattern() -> bytes:
    count = PATTERN_BYTES // ELEMENT_BYTES
    codes = bytearray(random.Random(0).randbytes(count).translate(_NO_NAN))
    codes[:: PIECE_BYTES // ELEMENT_BYTES] = bytes([_LARGEST]) * (PATTERN_BYTES // PIECE_BYTES)
    numbers = {code: struct.pack("<H", from_e4m3(code, 1.0, BFLOAT16)) for code in set(codes)}
    return b"".join([numbers[code] for code in codes])


_NO_NAN = bytes(code - 1 if code & 0x7F == 0x7F else code for code in range(256))
_LARGEST = 0x7E
_pattern = _make_pattern()


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """Return a key for each block, the last of which may be partly filled.

    The keys of two blocks are equal if their prompts are equal up to the block's end.
    """
    keys, last = [], b""
    for at in range(0, len(tokens), block_tokens):
        content = array("Q", tokens[at : at + block_tokens]).tobytes()
        last = hashlib.blake2b(last + content, digest_size=8).digest()
        keys.append(int.from_bytes(last, "little"))
    return keys


def piece_of(key: int, layer: int) -> int:
    """Return the offset in the pattern at which the KV of a block begins."""
    return (key + layer * 7919) % (PATTERN_BYTES // PIECE_BYTES) * PIECE_BYTES


class PagedKv:
    """The layout of the blocks of all layers, in memory of the caller."""

    def __init__(
        self,
        base: int,
        shape: Shape,
        *,
        layout: str = "LBNHC",
        block_tokens: int,
        num_blocks: int,
        chunk_tokens: int,
        rounded: bool = False,
    ) -> None:
        """`rounded` stands for the setting `fidelity: fp8`."""
        sizes = (shape.layers, num_blocks, shape.kv_heads, block_tokens, 2 * shape.head_dim)
        tensors = layer_tensors(base, layout, dict(zip("LBHNC", sizes, strict=True)))
        self.base = base
        self.shape = shape
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.image_bytes = block_tokens * shape.token_bytes
        """Bytes of a block of one layer as a record packs them."""
        kind = LayerKind(
            heads=shape.kv_heads,
            block_tokens=block_tokens,
            page_bytes=self.image_bytes,
            axes=("kv_heads", "tokens", "k+v"),
            quantisation="NONE",
            latent=False,
            scales=(),
        )
        self.view: KvView = build_view(
            tensors,
            num_blocks=num_blocks,
            group=whole_group(block_tokens, chunk_tokens),
            heads=Heads((0, shape.layers), (0, shape.kv_heads), 1),
            dtype="bfloat16",
            fidelity="fp8" if rounded else "lossless",
            head_size=shape.head_dim,
            kinds=dict.fromkeys(tensors, kind),
        )
        self.layers = list(self.view.layers.values())
        first = self.layers[0]
        self.sections = {name: number for number, name in enumerate(self.view.layers)}
        self.host_plan = self.view.plan()
        at = [axis for axis, _ in first.axes].index(TOKENS)
        self._outer = math.prod(size for _, size in first.axes[:at])
        self._token_bytes = math.prod(size for _, size in first.axes[at + 1 :]) * ELEMENT_BYTES
        self._runs = [
            sum(where) for where in itertools.product(*([i * n for i in range(c)] for c, n in first.dims))
        ]
        self.places = cache(self._places)

    @staticmethod
    def memory_bytes(shape: Shape, block_tokens: int, num_blocks: int) -> int:
        return shape.layers * num_blocks * block_tokens * shape.token_bytes

    def address(self, layer: int, block: int) -> int:
        return self.layers[layer].base + block * self.layers[layer].block_stride_bytes

    def _places(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return where tokens `first` to `last` of a block lie, as contiguous runs.

        A run is (offset from the block's address, offset in the block's image, bytes).
        """
        found = []
        whole = (last - first) == self.block_tokens
        spans = (
            [(0, self.image_bytes)]
            if whole
            else [
                ((group * self.block_tokens + first) * self._token_bytes, (last - first) * self._token_bytes)
                for group in range(self._outer)
            ]
        )
        run_bytes = self.layers[0].run_bytes
        for begin, length in spans:
            while length:
                run, inside = divmod(begin, run_bytes)
                part = min(length, run_bytes - inside)
                found.append((self._runs[run] + inside, begin, part))
                begin, length = begin + part, length - part
        return found

    def expected(self, key: int, layer: int, first: int, last: int) -> bytes:
        """Return the bytes that tokens of a block must have, in the order of `places`."""
        begin = piece_of(key, layer)
        image = _pattern[begin : begin + self.image_bytes]
        image += _pattern[: self.image_bytes - len(image)]
        return b"".join(image[at : at + n] for _, at, n in self.places(first, last))


class Later(NamedTuple):
    """Bytes in the arena; valid from the next `Device.finish` until the next read is queued."""

    address: int
    length: int

    @property
    def raw(self) -> bytes:
        return ctypes.string_at(self.address, self.length)


class Device(SimulatedGpu):
    """The device and the engine's stream. A real device has none of the simulator's controls."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = self.stream()
        arena = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(arena), ctypes.c_size_t(ARENA_BYTES), 0)
        assert arena.value is not None
        self._arena = arena.value
        self._used = 0

    def copy(self, target: int, source: int, length: int) -> None:
        """Queue a copy within the device, or between it and pinned memory, on the engine's stream."""
        where = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(length))
        self.call("cuMemcpyAsync", *where, ctypes.c_void_p(self.computes))

    def read_later(self, address: int, length: int) -> Later:
        """Queue a read on the engine's stream, into pinned memory: for other memory the driver would wait."""
        self._used += length
        assert self._used <= ARENA_BYTES, "too much is read at once"
        target = self._arena + self._used - length
        self.copy(target, address, length)
        return Later(target, length)

    @property
    def is_full(self) -> bool:
        """Whether the arena should be compared and emptied now."""
        return self._used > ARENA_BYTES // 2

    def finish(self) -> None:
        """Wait for the engine's stream. The caller must look at the bytes read before it queues more reads."""
        self.synchronize(self.computes)
        self._used = 0


class DeviceKv(PagedKv):
    """Blocks in device memory; writes and reads are queued on the engine's stream."""

    def __init__(
        self, device: Device, shape: Shape, *, block_tokens: int, num_blocks: int, **more: object
    ) -> None:
        length = self.memory_bytes(shape, block_tokens, num_blocks)
        base = device.allocate(length)
        super().__init__(base, shape, block_tokens=block_tokens, num_blocks=num_blocks, **more)  # type: ignore[arg-type]
        self.device = device
        content = pattern() + pattern()[: self.image_bytes] + bytes([POISON]) * self.image_bytes
        self._pattern = device.allocate(len(content))
        self._poison = self._pattern + len(content) - self.image_bytes
        device.write(self._pattern, content)

    def write(self, key: int, layer: int, block: int, first: int, last: int) -> None:
        """Write the KV of tokens `first` to `last` of a block."""
        self._fill(self._pattern + piece_of(key, layer), layer, block, first, last)

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite free blocks, which no request may read any more."""
        for layer in range(self.shape.layers):
            for block in blocks:
                self._fill(self._poison, layer, block, 0, self.block_tokens)

    def _fill(self, source: int, layer: int, block: int, first: int, last: int) -> None:
        address = self.address(layer, block)
        for offset, at, length in self.places(first, last):
            self.device.copy(address + offset, source + at, length)

    def read(self, layer: int, block: int, first: int, last: int) -> list[Later]:
        """Queue reads of tokens `first` to `last` of a block; return the buffers that they fill."""
        address = self.address(layer, block)
        return [
            self.device.read_later(address + offset, length) for offset, _, length in self.places(first, last)
        ]

    def close(self) -> None:
        self.device.free(self.base)
        self.device.free(self._pattern)
