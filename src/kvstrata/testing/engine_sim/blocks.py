"""The KV blocks of a simulated engine: which are free, which can be found, which is evicted next.

1. Every block is free or has users, never both.
2. A free block with a key can still be found until it is taken for something else; the least recently freed goes first.
   Free blocks without a key go before all others.
3. A key may lie in several blocks, when requests with one prefix were computed at once.  The first of them is found;
   each is announced when it is stored and when it is removed.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

KEY_BYTES = 8


class Sequence:
    """What one request has in an engine: the keys of its full blocks and the blocks that it uses."""

    def __init__(self, tokens: array[int], root: bytes = b"") -> None:
        """`root`: what the keys depend on besides tokens."""
        self.blocks: list[int] = []
        self.stored = 0
        """How many of them can be found."""
        self._tokens = tokens
        self._root = root
        self._keys: list[int] = []

    def keys(self, first: int, end: int, block_tokens: int) -> list[int]:
        """The keys of the blocks [first, end). Raises ValueError if the tokens do not fill them."""
        if end * block_tokens > len(self._tokens):
            raise ValueError(f"end: {end} blocks of {block_tokens}, of {len(self._tokens)} tokens")
        known = self._keys
        key = known[-1].to_bytes(KEY_BYTES, "big") if known else self._root
        for at in range(len(known), end):
            tokens = self._tokens[at * block_tokens : (at + 1) * block_tokens]
            key = blake2b(key + tokens.tobytes(), digest_size=KEY_BYTES).digest()
            known.append(int.from_bytes(key, "big"))
        return known[first:end]


class Blocks:
    """Owns the blocks' states. A sequence belongs to one engine while it has blocks."""

    def __init__(self, count: int, block_tokens: int, *, finds: bool) -> None:
        """`finds` is False for an engine without prefix caching."""
        self.count = count
        self._size = block_tokens
        self._finds = finds
        self._users = [0] * count
        self._keys: list[int | None] = [None] * count
        self._found: dict[int, tuple[int, ...]] = {}
        """The blocks with a key, in the order in which they were stored."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        """The next victim first."""

    @property
    def free(self) -> int:
        """Blocks without users."""
        return len(self._free)

    def find(self, sequence: Sequence, known: int) -> list[int]:
        """The blocks of the longest prefix of its first `known` tokens that is here, without the last token's block."""
        found: list[int] = []
        if self._finds:
            for key in sequence.keys(0, (known - 1) // self._size, self._size):
                blocks = self._found.get(key)
                if blocks is None:
                    break
                found.append(blocks[0])
        return found

    def admit(self, sequence: Sequence, known: int) -> bool:
        """Give a sequence without blocks those that `find` finds; False: too few are free for all known tokens."""
        found, users = self.find(sequence, known), self._users
        unused = sum(not users[block] for block in found)
        if -(-known // self._size) - len(found) + unused > len(self._free):
            return False
        for block in found:
            if not users[block]:
                del self._free[block]
            users[block] += 1
        sequence.blocks, sequence.stored = found, len(found)
        return True

    def reserve(self, sequence: Sequence, tokens: int) -> list[int] | None:
        """Give a sequence blocks for its first tokens; returns the keys that were removed, None: too few are free."""
        more = -(-tokens // self._size) - len(sequence.blocks)
        if more > len(self._free):
            return None
        removed = []
        for _ in range(more):
            block, _ = self._free.popitem(last=False)
            self._users[block] = 1
            sequence.blocks.append(block)
            key = self._keys[block]
            if key is not None:
                removed.append(key)
                self._keys[block] = None
                left = tuple(other for other in self._found[key] if other != block)
                if left:
                    self._found[key] = left
                else:
                    del self._found[key]
        return removed

    def grow(self, sequence: Sequence, tokens: int) -> tuple[list[int], list[int]] | None:
        """As `reserve`, and let the full blocks be found; returns their keys too, before those that were removed."""
        removed = self.reserve(sequence, tokens)
        if removed is None:
            return None
        stored: list[int] = []
        if self._finds:
            stored = sequence.keys(sequence.stored, tokens // self._size, self._size)
            for block, key in zip(sequence.blocks[sequence.stored :], stored, strict=False):
                self._keys[block] = key
                self._found[key] = (*self._found.get(key, ()), block)
            sequence.stored += len(stored)
        return stored, removed

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; the last is evicted first."""
        for block in reversed(sequence.blocks):
            self._users[block] -= 1
            if not self._users[block] and self._keys[block] is not None:
                self._free[block] = None
        for block in sequence.blocks:
            if not self._users[block] and self._keys[block] is None:
                self._free[block] = None
                self._free.move_to_end(block, last=False)
        sequence.blocks, sequence.stored = [], 0

    def clear(self) -> bool:
        """Forget every key; returns False, and changes nothing, while a block has users."""
        if len(self._free) != self.count:
            return False
        self._found.clear()
        self._keys = [None] * self.count
        return True

    def stored_keys(self) -> dict[int, int]:
        """How many blocks hold each key that can be found."""
        return {key: len(blocks) for key, blocks in self._found.items()}

    def validate(self, held: Iterable[int]) -> None:
        """Check the invariants, given every block of every sequence once for each that uses it."""
        users = Counter(held)
        assert all(users[block] == count for block, count in enumerate(self._users))
        assert set(self._free) == {block for block, count in enumerate(self._users) if not count}
        stored = {block: key for key, blocks in self._found.items() for block in blocks}
        assert stored == {block: key for block, key in enumerate(self._keys) if key is not None}
