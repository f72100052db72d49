"""Groups with windows and states for tests of the scheduler's side, and the blocks of vLLM that stores pin."""

from __future__ import annotations

from kvstrata.connectors.vllm.engine import BlockPins
from kvstrata.connectors.vllm.groups import CacheGroup, Rule, whole_group
from tests.harness.scheduler_side import BLOCK, CHUNK, FakeClient, make_side

FULL = whole_group(BLOCK, CHUNK)
STATES = CacheGroup(1, Rule.STATE_AT, CHUNK, 1, 1, 1)


def window_group(tokens, number=1):
    """A group of sliding windows of this size."""
    short = tokens < CHUNK
    record_blocks = -(-tokens // BLOCK) if short else CHUNK // BLOCK
    span = 1 if short else -(-tokens // CHUNK)
    return CacheGroup(number, Rule.LAST_WINDOW, BLOCK, CHUNK // BLOCK, record_blocks, span, tokens)


class Pool:
    """Stands for vLLM's BlockPool: counts how often each block is pinned. `broken`: blocks that cannot be pinned."""

    def __init__(self):
        self.blocks = range(10_000)
        self.pinned, self.pins, self.broken = {}, 0, set()

    hash_block_size = 1

    def get_cached_block(self, block_hash, groups):
        return None

    def touch(self, blocks):
        assert 0 not in blocks
        if self.broken.intersection(blocks):
            raise RuntimeError("planted in touch")
        self.pins += 1
        for block in blocks:
            self.pinned[block] = self.pinned.get(block, 0) + 1

    def free_blocks(self, blocks):
        for block in blocks:
            self.pinned[block] -= 1  # a KeyError: it was not pinned
            if not self.pinned[block]:
                del self.pinned[block]


def make_grouped(*groups, client=None, **changes):
    """(The scheduler's side of an engine with these groups, the pool of its blocks)"""
    pool = Pool()
    side = make_side(client or FakeClient(), groups=list(groups), pins=BlockPins(lambda: pool), **changes)
    return side, pool


def table_of(tokens, first_block, gone=0):
    """The block table of a request of so many tokens; blocks of the first `gone` tokens are not there."""
    return [0 if (at + 1) * BLOCK <= gone else first_block + at for at in range(-(-tokens // BLOCK))]
