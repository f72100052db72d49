"""The KV blocks of a simulated engine in plain Python: the twin of `engine_blocks.pyx`.

1. Every block is free or has users, never both.
2. A free block with a key can still be found until it is taken for something else; the least recently freed goes first.
   Free blocks without a key go before all others.
3. A key may lie in several blocks, when requests with one prefix were computed at once.  The first of them is found;
   each is announced when it is stored and when it is removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class OracleBlocks:
    """The blocks' states, and in `removed` all keys that were removed."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.removed: list[int] = []
        self._users = [0] * blocks
        self._keys: list[int | None] = [None] * blocks
        self._found: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks without users."""
        return len(self._free)

    def lookup(self, keys: Iterable[int]) -> list[int]:
        """The blocks of the longest prefix of `keys` that is there. They are not held."""
        found: list[int] = []
        for key in keys:
            block = self._found.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free now."""
        users = self._users
        return sum(not users[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Give each of these blocks one more user."""
        for block in blocks:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Give `count` free blocks a user, and forget what they held. REQUIRES: as many are free."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._users[block] = 1
            if self._keys[block] is not None:
                self._forget(block)
        return taken

    def store(self, block: int, key: int) -> None:
        """Let lookups of `key` find a block, or its older twin. REQUIRES: it has a user and no key."""
        self._keys[block] = key
        if self._found.setdefault(key, block) != block:
            self._twins.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each block of a request, given in the order of its tokens; the last is evicted first."""
        without_key: list[int] = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._keys[block] is None:
                without_key.append(block)
            else:
                self._free[block] = None
        for block in reversed(without_key):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Forget every key; returns False, and changes nothing, while a block has users."""
        if len(self._free) != self.blocks:
            return False
        self._found.clear()
        self._twins.clear()
        self._keys = [None] * self.blocks
        return True

    def stored_keys(self) -> dict[int, int]:
        """How many blocks hold each key."""
        return {key: 1 + len(self._twins.get(key, ())) for key in self._found}

    def free_order(self) -> list[int]:
        """The free blocks, the next victim first."""
        return list(self._free)

    def _forget(self, block: int) -> None:
        """Make a block's key lead elsewhere or nowhere."""
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        twins = self._twins.get(key)
        if self._found[key] != block:
            assert twins is not None
            twins.remove(block)
        elif twins:
            self._found[key] = twins.pop(0)
        else:
            del self._found[key]
        if twins is not None and not twins:
            del self._twins[key]
        self.removed.append(key)
