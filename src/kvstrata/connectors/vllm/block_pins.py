"""Keeps blocks of vLLM's pool from being freed while a store reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class BlockPins:
    """The blocks that stores have pinned in vLLM's scheduler, by store. Belongs to its thread."""

    def __init__(self, block_pool: Callable[[], Any] = lambda: None) -> None:
        """`block_pool()` is vLLM's BlockPool; None in an engine whose stores pin nothing."""
        self._block_pool = block_pool
        self._pinned: dict[int, tuple[Sequence[int], int]] = {}
        """Store → its blocks, and how many workers may still read them."""

    def pin(self, store_id: int, blocks: Sequence[int], n_workers: int) -> None:
        """Keep these blocks allocated, whether or not a request still has them, until no worker reads them."""
        pool = self._block_pool()
        pool.touch([pool.blocks[block] for block in blocks])
        self._pinned[store_id] = blocks, n_workers

    def read(self, store_id: int) -> None:
        """Note that one more worker does not read the store's blocks any more; after the last, vLLM may free them."""
        blocks, left = self._pinned.pop(store_id, ((), 0))
        if left > 1:
            self._pinned[store_id] = blocks, left - 1
        else:
            self._unpin(blocks)

    def never_sent(self, store_id: int) -> None:
        """Unpin the blocks of a store that no worker has got."""
        blocks, _ = self._pinned.pop(store_id, ((), 0))
        self._unpin(blocks)

    def _unpin(self, blocks: Sequence[int]) -> None:
        if blocks:
            pool = self._block_pool()
            pool.free_blocks([pool.blocks[block] for block in blocks])
