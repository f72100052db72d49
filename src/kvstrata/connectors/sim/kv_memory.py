"""The paged KV of a simulated engine: plain memory in which each block begins with a key of its content.

The key is the first 8 bytes of a block and depends on all tokens up to the block's end, so the engine can check that it
loaded the right block.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Sequence

from kvstrata.errors import ConfigError
from kvstrata.native.core import CopyPlan
from kvstrata.types import Slice, facts_digest

KEY_BYTES = 8
FORM = 1
"""Version of what blocks hold."""


class KvMemory:
    """`blocks` blocks of `block_bytes` bytes, numbered from 0. Owns the memory until `close`.

    Raises ConfigError if they need more memory than the machine has.
    """

    def __init__(self, blocks: int, block_bytes: int, chunk_blocks: int) -> None:
        size = blocks * block_bytes
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > most:
            raise ConfigError(
                f"--kv-token-bytes: {blocks:,} blocks of {block_bytes:,} bytes need {size >> 20:,} MiB, more than the "
                f"{most >> 20:,} MiB of this machine; lower it or --kv-blocks",
                field="kv-token-bytes",
            )
        self.block_bytes, self.chunk_blocks = block_bytes, chunk_blocks
        self._memory = mmap.mmap(-1, size)
        self._anchor = (ctypes.c_char * 1).from_buffer(self._memory)
        base = ctypes.addressof(self._anchor)
        self.plan = CopyPlan([base], blocks, [block_bytes], [], block_bytes)
        self._noise = random.Random(blocks).randbytes(block_bytes)
        self._written = bytearray(blocks)
        """Whether a block has ever been computed."""

    @property
    def facts(self) -> dict[str, int]:
        """The layout facts of these blocks, which no other engine has."""
        return {
            "simulated": FORM,
            "block_bytes": self.block_bytes,
            "sections": 1,
            "payload_bytes": self.block_bytes * self.chunk_blocks,
        }

    @property
    def slice(self) -> Slice:
        """The slice that the blocks hold: a whole chunk."""
        return Slice(layers=(0, 1), kv_heads=(0, 1), layout=facts_digest(self.facts))

    def compute(self, block: int, key: int) -> None:
        """Write what a model would have computed."""
        at = block * self.block_bytes
        if not self._written[block]:  # once is enough to have bytes that are no zeros, in pages that exist
            self._written[block] = 1
            self._memory[at : at + self.block_bytes] = self._noise
        self._memory[at : at + KEY_BYTES] = key.to_bytes(KEY_BYTES, "little")

    def right(self, blocks: Sequence[int], keys: Sequence[int]) -> int:
        """How many leading blocks begin with their keys."""
        for number, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            at = block * self.block_bytes
            if self._memory[at : at + KEY_BYTES] != key.to_bytes(KEY_BYTES, "little"):
                return number
        return len(keys)

    def close(self) -> None:
        """Unmap the memory. No copy may be running. Idempotent."""
        if not self._memory.closed:
            del self._anchor
            self._memory.close()
