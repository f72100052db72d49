"""The KV blocks of a simulated engine (ext/core/src/sim/engine_blocks.h). Not for use by several threads at once."""

from array import array
from collections.abc import Iterable

StoredParts = tuple[list[int], int | None, list[int]]
"""Of blocks that can newly be found: their keys, the key of the block before them, and their tokens."""

class Sequence:
    """What one request has in an engine: the keys of its full blocks and the blocks that it uses."""

    def __init__(self, tokens: array[int], root: int = 0) -> None:
        """`tokens` is an array of type "I" that cannot change its length while the sequence lives; `root` is what keys
        depend on besides tokens."""

    @property
    def blocks(self) -> list[int]: ...
    @property
    def stored(self) -> int:
        """How many of its blocks can be found."""

    def keys(self, first: int, end: int, block_tokens: int) -> list[int]:
        """The keys of the blocks [first, end). Raises ValueError if the tokens do not fill them."""

    def stored_parts(self, first: int, end: int, block_tokens: int) -> StoredParts:
        """What tells of the blocks [first, end). Raises ValueError if the tokens do not fill them."""

    def copy(self) -> Sequence:
        """The same tokens and blocks, for a copy of the engine. The copy is no decoder."""

class EngineBlocks:
    """Owns the blocks' states. A sequence belongs to one engine while it has blocks."""

    def __init__(self, count: int, block_tokens: int, *, finds: bool) -> None:
        """`finds` is False for an engine without prefix caching."""

    @property
    def count(self) -> int: ...
    @property
    def free(self) -> int:
        """Blocks without users."""

    def admit(self, sequence: Sequence, known: int) -> int:
        """Give a sequence without blocks the longest prefix of its first `known` tokens that is there, without the last
        token's block. Returns how many blocks that were, or -1, with nothing changed, if too few blocks are free for
        the known tokens."""

    def find(self, sequence: Sequence, known: int) -> int:
        """How many blocks `admit` would find now. Takes none. Raises ValueError for 0 known tokens."""

    def reserve(self, sequence: Sequence, tokens: int) -> tuple[int, ...] | None:
        """Give a sequence blocks for its first `tokens` tokens, without letting more of them be found. Returns the keys
        that were removed; None, with nothing changed, if too few blocks are free."""

    def grow(self, sequence: Sequence, tokens: int) -> tuple[int, tuple[int, ...]] | None:
        """Give a sequence blocks for its first `tokens` tokens, and let the full ones be found. Returns how many blocks
        can newly be found, and the keys that were removed; None, with nothing changed, if too few blocks are free."""

    def join(self, sequence: Sequence, computed: int) -> None:
        """Let `decode` grow a sequence of which so many tokens are computed. It becomes the last of the decoders."""

    def leave(self, number: int) -> None:
        """Let `decode` no longer grow a decoder. Raises IndexError."""

    def fits(self, steps: int) -> bool:
        """Whether the decoders have the tokens for so many steps, and the free blocks suffice."""

    def decode(self, steps: int, *, tell: bool) -> list[tuple[int, int, tuple[int, ...], StoredParts | None]]:
        """Let all decoders grow by one token in each step. Returns, if told to, the changes in the order in which they
        happen: step, number of the decoder, the keys that were removed for it, and then the block of it that can newly
        be found, if one can. Raises ValueError, with nothing changed, if the steps do not fit."""

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; the last is evicted first. Raises ValueError while it is a decoder."""

    def copy(self) -> EngineBlocks:
        """The blocks in the same states, without decoders: these must join again, by copies of their sequences."""

    def clear(self) -> bool:
        """Forget every key; returns False, and changes nothing, while a block has users."""

    def stored_keys(self) -> dict[int, int]:
        """How many blocks hold each key that can be found."""

    def free_order(self) -> list[int]:
        """The free blocks, the next victim first."""

    def validate(self, held: Iterable[int]) -> None:
        """Check the invariants, given every block of every sequence once for each that uses it."""
