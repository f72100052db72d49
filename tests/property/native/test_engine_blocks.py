"""The blocks of a simulated engine do what their twin in plain Python does."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.engine_blocks import EngineBlocks, Sequence
from tests.oracles.engine_blocks import OracleBlocks

BLOCKS, TOKENS, SEQUENCES = 14, 24, 5
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "reserve", "grow", "decode", "decode", "release", "clear"]),
        st.integers(0, SEQUENCES - 1),
        st.integers(1, TOKENS),
    ),
    max_size=50,
)


def tokens_of(number: int) -> array[int]:
    """Sequences of two families, which differ after some tokens."""
    return array("I", [number % 2] * (6 + 3 * number) + [number] * (TOKENS - 6 - 3 * number))


class Pair:
    """An engine's blocks and their twin, which get the same calls."""

    def __init__(self, block_tokens: int, finds: bool) -> None:
        self.size, self.finds = block_tokens, finds
        self.blocks = EngineBlocks(BLOCKS, block_tokens, finds=finds)
        self.twin = OracleBlocks(BLOCKS)
        self.sequences = [Sequence(tokens_of(number)) for number in range(SEQUENCES)]
        self.held: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.stored = [0] * SEQUENCES
        self.decoders: dict[int, int] = {}
        """Computed tokens by sequence."""

    def keys(self, number: int, end: int) -> list[int]:
        return self.sequences[number].keys(0, end, self.size)

    def admit(self, number: int, known: int) -> None:
        if self.held[number]:
            return
        most = (known - 1) // self.size if self.finds else 0
        found = self.twin.lookup(self.keys(number, most))
        fits = -(-known // self.size) - len(found) + self.twin.unused(found) <= self.twin.free_blocks
        assert self.blocks.find(self.sequences[number], known) == len(found)
        assert self.blocks.admit(self.sequences[number], known) == (len(found) if fits else -1)
        if fits:
            self.twin.hold(found)
            self.held[number] = found
            self.stored[number] = len(found)

    def reserve(self, number: int, tokens: int) -> None:
        if number in self.decoders:
            return
        before, missing = len(self.twin.removed), -(-tokens // self.size) - len(self.held[number])
        reserved = self.blocks.reserve(self.sequences[number], tokens)
        if missing > self.twin.free_blocks:
            assert reserved is None
            return
        self.held[number] = self.held[number] + self.twin.take(max(0, missing))
        assert reserved == tuple(self.twin.removed[before:])

    def grow(self, number: int, tokens: int) -> None:
        tokens = max(tokens, len(self.held[number]) * self.size)
        if number in self.decoders or tokens > TOKENS:
            return
        before = self.stored[number], len(self.twin.removed)
        grown = self.blocks.grow(self.sequences[number], tokens)
        if not self.grow_twin(number, tokens):
            assert grown is None
            return
        assert grown == (self.stored[number] - before[0], tuple(self.twin.removed[before[1] :]))
        if tokens < TOKENS:
            self.decoders[number] = tokens
            self.blocks.join(self.sequences[number], tokens)

    def grow_twin(self, number: int, tokens: int) -> bool:
        missing = -(-tokens // self.size) - len(self.held[number])
        if missing > self.twin.free_blocks:
            return False
        self.held[number] = self.held[number] + self.twin.take(max(0, missing))
        full = tokens // self.size if self.finds else 0
        for at in range(self.stored[number], full):
            self.twin.store(self.held[number][at], self.keys(number, full)[at])
        self.stored[number] = max(self.stored[number], full)
        return True

    def decode(self, _: int, steps: int) -> None:
        needed = sum(
            max(0, -(-(at + steps) // self.size) - len(self.held[number]))
            for number, at in self.decoders.items()
        )
        fits = needed <= self.twin.free_blocks and all(at + steps <= TOKENS for at in self.decoders.values())
        assert self.blocks.fits(steps) == fits
        if not fits:
            with pytest.raises(ValueError, match=f"{steps} steps"):
                self.blocks.decode(steps, tell=True)
            return
        expected = []
        for step in range(steps):
            for place, number in enumerate(self.decoders):
                self.decoders[number] += 1
                stored, removed = self.stored[number], len(self.twin.removed)
                assert self.grow_twin(number, self.decoders[number])
                parts = None
                if self.stored[number] > stored:
                    parts = self.sequences[number].stored_parts(stored, stored + 1, self.size)
                gone = tuple(self.twin.removed[removed:])
                if parts is not None or gone:
                    expected.append((step, place, gone, parts))
        assert self.blocks.decode(steps, tell=True) == expected

    def release(self, number: int, _: int) -> None:
        if number in self.decoders:
            self.blocks.leave(list(self.decoders).index(number))
            del self.decoders[number]
        self.blocks.release(self.sequences[number])
        self.twin.release(self.held[number])
        self.held[number], self.stored[number] = [], 0

    def clear(self, *_: int) -> None:
        assert self.blocks.clear() == self.twin.clear()

    def check(self) -> None:
        assert [each.blocks for each in self.sequences] == self.held
        assert self.blocks.free_order() == self.twin.free_order()
        assert self.blocks.stored_keys() == self.twin.stored_keys()
        self.blocks.validate(block for held in self.held for block in held)


@given(st.integers(1, 5), st.booleans(), CALLS)
def test_blocks_go_the_way_of_their_twins(
    block_tokens: int, finds: bool, calls: list[tuple[str, int, int]]
) -> None:
    pair = Pair(block_tokens, finds)
    for name, number, tokens in calls:
        getattr(pair, name)(number, tokens)
        pair.check()


@given(st.integers(1, 9), st.integers(0, TOKENS - 1), st.integers(0, 2**64 - 1))
def test_keys_depend_on_the_tokens_before_and_on_the_root(size: int, at: int, root: int) -> None:
    tokens = tokens_of(0)
    blocks = TOKENS // size
    keys = Sequence(tokens, root).keys(0, blocks, size)
    assert Counter(keys).most_common(1)[0][1] == 1
    assert Sequence(tokens, root ^ 1).keys(0, 1, size) != keys[:1]
    other = tokens[:]
    other[at] += 1
    changed = Sequence(other, root).keys(0, blocks, size)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [n < at // size for n in range(blocks)]


def test_wrong_calls_are_refused() -> None:
    blocks, sequence = EngineBlocks(4, 4, finds=True), Sequence(tokens_of(0))
    with pytest.raises(ValueError, match="25 tokens of a sequence that has 24"):
        blocks.grow(sequence, 25)
    with pytest.raises(ValueError, match="25 tokens of a sequence that has 24"):
        blocks.reserve(sequence, 25)
    with pytest.raises(ValueError, match="without known tokens"):
        blocks.find(sequence, 0)
    with pytest.raises(ValueError, match="not all are full"):
        sequence.keys(0, 7, 4)
    with pytest.raises(TypeError, match="type 'I'"):
        Sequence(array("Q", [1]))
    with pytest.raises(ValueError, match="0 blocks"):
        EngineBlocks(0, 4, finds=True)
    blocks.grow(sequence, 4)
    blocks.join(sequence, 4)
    with pytest.raises(ValueError, match="must leave"):
        blocks.release(sequence)
    with pytest.raises(ValueError, match="decodes already"):
        blocks.join(sequence, 4)
    with pytest.raises(IndexError, match="no decoder 1"):
        blocks.leave(1)
