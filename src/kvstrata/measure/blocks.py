"""A stand-in for an engine's paged KV cache: plain memory and a copy plan, without an engine or a model."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Sequence

from kvstrata.native.core import CopyPlan
from kvstrata.types import Slice, facts_digest


class PagedBlocks:
    """`num_blocks` blocks of `block_bytes` bytes in each of `layers` layers; each block is one contiguous run.

    A chunk has `chunk_blocks` blocks.  Owns the memory until `close`.
    """

    def __init__(self, *, layers: int, num_blocks: int, block_bytes: int, chunk_blocks: int = 1) -> None:
        self.layers = layers
        self.chunk_blocks = chunk_blocks
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._memory = mmap.mmap(-1, layers * num_blocks * block_bytes)
        self._anchor = (ctypes.c_char * 1).from_buffer(self._memory)
        base = ctypes.addressof(self._anchor)
        self.bases = [base + layer * num_blocks * block_bytes for layer in range(layers)]
        self.plan = CopyPlan(self.bases, num_blocks, [block_bytes] * layers, [], block_bytes)

    def slice(self, first_layer: int = 0, kv_heads: tuple[int, int] = (0, 1)) -> Slice:
        """The slice that these blocks hold."""
        layout = facts_digest(self.facts)
        return Slice(layers=(first_layer, first_layer + self.layers), kv_heads=kv_heads, layout=layout)

    @property
    def facts(self) -> dict[str, int]:
        """The layout facts from which `slice().layout` is derived."""
        payload_bytes = self.layers * self.block_bytes * self.chunk_blocks
        return {"sections": self.layers, "payload_bytes": payload_bytes, "block_bytes": self.block_bytes}

    def fill(self, block_ids: Sequence[int], seed: object) -> None:
        """Fill these blocks with bytes that the seed determines."""
        source = random.Random(repr(seed))
        for layer in range(self.layers):
            for block in block_ids:
                begin = (layer * self.num_blocks + block) * self.block_bytes
                self._memory[begin : begin + self.block_bytes] = source.randbytes(self.block_bytes)

    def read(self, block_ids: Sequence[int]) -> bytes:
        """All bytes of these blocks, layer by layer."""
        parts = []
        for layer in range(self.layers):
            for block in block_ids:
                begin = (layer * self.num_blocks + block) * self.block_bytes
                parts.append(self._memory[begin : begin + self.block_bytes])
        return b"".join(parts)

    def touch(self, first: int = 0) -> None:
        """Fault in the pages of all blocks from block `first` on."""
        page = bytes(mmap.PAGESIZE)
        for layer in range(self.layers):
            begin = (layer * self.num_blocks + first) * self.block_bytes
            for at in range(begin, (layer + 1) * self.num_blocks * self.block_bytes, mmap.PAGESIZE):
                self._memory[at : at + 1] = page[:1]

    def close(self) -> None:
        """Unmap the memory. No copy may be running."""
        del self._anchor
        self._memory.close()
