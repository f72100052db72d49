"""A paged KV cache as vLLM lays it out, in device memory or in the host's, without torch; bytes that tell who they are.

The KV of a block follows from the tokens of its prompt up to its end, and from its layer: it is a piece of a fixed
random pattern, so right bytes can be told from those of any other block. A block that belongs to nobody is poisoned.
All numbers of the pattern have 8 bits as bfloat16, and each piece has the largest of them, so that an engine that
rounds KV to 8 bits loads the same bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import random
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from kvstrata.connectors.vllm.kv_view import Heads, KvView, build_view
from kvstrata.connectors.vllm.layer_kinds import LayerKind
from kvstrata.native import codec
from tests.harness.cuda_driver import SimulatedGpu

ELEMENT_BYTES = 2
POISON = 0xDE
PATTERN_BYTES = 1 << 20
BFLOAT16 = 1
"""As the codec numbers it."""
PIECE_BYTES = 16
"""Pieces of the pattern begin at multiples of it."""
ARENA_BYTES = 64 << 20
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC", "L2BNHD")
"""vLLM's, and the older (2, blocks, tokens, heads, dim): axes from the outermost, see docs/layouts.md."""


class Shape(NamedTuple):
    """What one worker holds of a model with grouped attention, in numbers of 16 bits."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def products(self) -> list[tuple[int, int]]:
        """Sizes of a layer's weights: queries, keys and values; their projection; gate and up; down."""
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
    """What `kv_view` reads of a torch tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "torch.bfloat16"

    def stride(self) -> tuple[int, ...]:
        """In elements."""
        return self.strides

    def element_size(self) -> int:
        """Bytes."""
        return ELEMENT_BYTES

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.address


def layer_tensors(
    base: int, shape: Shape, layout: str, block_tokens: int, num_blocks: int
) -> dict[str, Tensor]:
    """The tensors of all layers, dense in memory from `base` on."""
    sizes = {
        "L": shape.layers,
        "2": 2,
        "B": num_blocks,
        "N": block_tokens,
        "H": shape.kv_heads,
        "C": 2 * shape.head_dim,
        "D": shape.head_dim,
    }
    strides, stride = {}, 1
    for axis in reversed(layout):
        strides[axis] = stride
        stride *= sizes[axis]
    axes = "2BNHD" if "2" in layout else "BHNC"
    return {
        f"layers.{layer}": Tensor(
            base + layer * strides["L"] * ELEMENT_BYTES,
            tuple(sizes[axis] for axis in axes),
            tuple(strides[axis] for axis in axes),
        )
        for layer in range(shape.layers)
    }


def pattern() -> bytes:
    """What all KV is cut from."""
    return _pattern


def _make_pattern() -> bytes:
    count = PATTERN_BYTES // ELEMENT_BYTES
    codes = bytearray(random.Random(0).randbytes(count).translate(_NO_NAN))
    codes[:: PIECE_BYTES // ELEMENT_BYTES] = bytes([_LARGEST]) * (PATTERN_BYTES // PIECE_BYTES)
    numbers = bytearray(PATTERN_BYTES)
    codec.fp8_decode((1, 1, count, 1, 1), BFLOAT16, codes, struct.pack("<f", 1.0), numbers)
    return bytes(numbers)


_NO_NAN = bytes(code - 1 if code & 0x7F == 0x7F else code for code in range(256))
_LARGEST = 0x7E
_pattern = _make_pattern()


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """One for each block, the last may be partly filled: equal for equal prompts up to the block's end."""
    keys, last = [], b""
    for at in range(0, len(tokens), block_tokens):
        content = array("Q", tokens[at : at + block_tokens]).tobytes()
        last = hashlib.blake2b(last + content, digest_size=8).digest()
        keys.append(int.from_bytes(last, "little"))
    return keys


def piece_of(key: int, layer: int) -> int:
    """Where in the pattern the KV of a block begins."""
    return (key + layer * 7919) % (PATTERN_BYTES // PIECE_BYTES) * PIECE_BYTES


class PagedKv:
    """Where the blocks of all layers lie; the memory is the caller's."""

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
        """`rounded`: as the setting `gpu_fp8`."""
        tensors = layer_tensors(base, shape, layout, block_tokens, num_blocks)
        self.base = base
        self.shape = shape
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.image_bytes = block_tokens * shape.token_bytes
        """A block of one layer, packed as in a record."""
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
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            heads=Heads((0, shape.layers), (0, shape.kv_heads), 1),
            dtype="bfloat16",
            fidelity="fp8" if rounded else "lossless",
            head_size=shape.head_dim,
            gpu_fp8=rounded,
            kinds=None if "2" in layout else dict.fromkeys(tensors, kind),
        )
        self.layers = list(self.view.layers.values())
        first = self.layers[0]
        self.sections = {name: number for number, name in enumerate(self.view.layers)}
        self.host_plan = self.view.plan()
        token_axis = layout.replace("L", "").index("N") if "2" in layout else 2
        at = [axis for axis, _ in first.axes].index(token_axis)
        self._outer = math.prod(size for _, size in first.axes[:at])
        self._token_bytes = math.prod(size for _, size in first.axes[at + 1 :]) * ELEMENT_BYTES
        self._runs = [
            sum(where) for where in itertools.product(*([i * n for i in range(c)] for c, n in first.dims))
        ]
        self.places = cache(self._places)

    @staticmethod
    def memory_bytes(shape: Shape, block_tokens: int, num_blocks: int) -> int:
        """Bytes of memory."""
        return shape.layers * num_blocks * block_tokens * shape.token_bytes

    def address(self, layer: int, block: int) -> int:
        """Of a block."""
        return self.layers[layer].base + block * self.layers[layer].block_stride_bytes

    def _places(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Tokens of a block as (from the block's address, from its image's start, bytes)."""
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
        """The bytes of tokens of a block, in the order of `places`."""
        begin = piece_of(key, layer)
        image = _pattern[begin : begin + self.image_bytes]
        image += _pattern[: self.image_bytes - len(image)]
        return b"".join(image[at : at + n] for _, at, n in self.places(first, last))


class Later(NamedTuple):
    """Bytes in the arena that are there after `Device.finish`, until something else is queued."""

    address: int
    length: int

    @property
    def raw(self) -> bytes:
        """What is there now."""
        return ctypes.string_at(self.address, self.length)


class Device(SimulatedGpu):
    """The device (a real one has none of the controls), and the stream on which the engine computes."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = self.stream()
        arena = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(arena), ctypes.c_size_t(ARENA_BYTES), 0)
        assert arena.value is not None
        self._arena = arena.value
        self._used = 0

    def copy(self, target: int, source: int, length: int) -> None:
        """Within the device, or between it and pinned memory, on the engine's stream."""
        where = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(length))
        self.call("cuMemcpyAsync", *where, ctypes.c_void_p(self.computes))

    def read_later(self, address: int, length: int) -> Later:
        """On the engine's stream, into pinned memory: a copy into any other would be waited for by the driver."""
        self._used += length
        assert self._used <= ARENA_BYTES, "too much is read at once"
        target = self._arena + self._used - length
        self.copy(target, address, length)
        return Later(target, length)

    @property
    def is_full(self) -> bool:
        """Whether what was read should be looked at now."""
        return self._used > ARENA_BYTES // 2

    def finish(self) -> None:
        """Wait for the engine's stream; what was read is looked at before more is."""
        self.synchronize(self.computes)
        self._used = 0


class DeviceKv(PagedKv):
    """Blocks in device memory; writes and reads go on the engine's stream, behind one another."""

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
        """The KV of tokens `first` to `last` of a block."""
        self._fill(self._pattern + piece_of(key, layer), layer, block, first, last)

    def poison(self, blocks: Sequence[int]) -> None:
        """They belong to nobody any more, so somebody may write anything into them."""
        for layer in range(self.shape.layers):
            for block in blocks:
                self._fill(self._poison, layer, block, 0, self.block_tokens)

    def _fill(self, source: int, layer: int, block: int, first: int, last: int) -> None:
        address = self.address(layer, block)
        for offset, at, length in self.places(first, last):
            self.device.copy(address + offset, source + at, length)

    def read(self, layer: int, block: int, first: int, last: int) -> list[Later]:
        """Buffers that are filled by the engine's stream."""
        address = self.address(layer, block)
        return [
            self.device.read_later(address + offset, length) for offset, _, length in self.places(first, last)
        ]

    def close(self) -> None:
        """Free the memory; no copy may run."""
        self.device.free(self.base)
        self.device.free(self._pattern)
