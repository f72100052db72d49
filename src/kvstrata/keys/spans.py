"""Prompts whose KV has several groups of layers: which chunks of each slice a hit needs, and their storage keys.

A slice with span 0 is needed in every chunk of a hit.  A slice with span k is needed in the last k chunks of a hit
only: they hold the tokens inside a sliding window, or the one state after the last token.  `spans` has a number for
each slice; () stands for 0 in all of them.  Storage keys are derived from the prompt's chain when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstrata.keys.batch import count, nth, part
from kvstrata.native.core import storage_keys
from kvstrata.types import KEY_BYTES

PIECE_CHUNKS = 32
"""Ends of hits that `peek_end` tries at a time."""


class Peeks(Protocol):
    """A pool, or the index of one."""

    def peek(self, keys: bytes, n_slices: int = 1) -> int:
        """Leading chunks that are there in all slices."""

    def peek_windows(self, keys: bytes, spans: Sequence[int]) -> int:
        """The most leading chunks whose last `span` chunks are there in each slice."""


def longest(n_chunks: int, spans: Sequence[int], there: Callable[[int, int], bool]) -> int:
    """The most chunks, up to `n_chunks`, for which each slice with a span has what it needs.

    `there(chunk, slice)` tells whether a chunk is there; slices of span 0 are not asked for, and each chunk of a slice
    at most once.
    """
    n = n_chunks
    open_slices = [number for number, span in enumerate(spans) if span]
    known = dict.fromkeys(open_slices, n)  # of each slice the chunks from this one up to n are there
    agreed = at = 0
    while n and agreed < len(open_slices):
        number = open_slices[at]
        first, chunk = max(0, n - spans[number]), min(known[number], n)
        while chunk > first and there(chunk - 1, number):
            chunk -= 1
        known[number] = chunk
        if chunk <= first:
            agreed += 1
        else:
            n, agreed = chunk - 1, 0  # every longer hit would need this absent chunk as well
        at = (at + 1) % len(open_slices)
    return n


def peek(index: Peeks, keys: bytes, n_slices: int, spans: Sequence[int]) -> int:
    """How many leading chunks of `keys` (chunk-major) can be served by what `index` has."""
    if not any(spans):
        return index.peek(keys, n_slices)
    whole = [number for number, span in enumerate(spans) if not span]
    windows = [number for number, span in enumerate(spans) if span]
    n = index.peek(of_slices(keys, n_slices, whole), len(whole)) if whole else count(keys, n_slices)
    return peek_end(
        index,
        n,
        [spans[number] for number in windows],
        lambda first, end: of_slices(part(keys, first, end, n_slices), n_slices, windows),
    )


def peek_end(index: Peeks, n_chunks: int, spans: Sequence[int], keys_of: Callable[[int, int], bytes]) -> int:
    """The most chunks, up to `n_chunks`, whose windows `index` has; all `spans` are above 0.

    `keys_of(first, end)` gives the keys of these chunks, chunk-major.  They are asked for from the end, in pieces,
    since most hits end where the prefix does.
    """
    longest_span = max(spans)
    end = n_chunks
    while True:
        first = max(0, end - longest_span - PIECE_CHUNKS)
        found = index.peek_windows(keys_of(first, end), spans) if end else 0
        if not first or found >= longest_span:
            return first + found
        end = (
            first + found
        )  # a longer hit lacks a chunk; whether this one has what it needs before `first` is not known


def of_slices(keys: bytes, n_slices: int, numbers: Sequence[int]) -> bytes:
    """The keys of some of the slices, chunk-major."""
    row = n_slices * KEY_BYTES
    return b"".join(
        keys[at + number * KEY_BYTES : at + (number + 1) * KEY_BYTES]
        for at in range(0, len(keys), row)
        for number in numbers
    )


class PromptKeys:
    """The keys of one prompt in the slices of one engine. A key's number: `chunk * n_slices + slice`."""

    __slots__ = ("all", "chain", "n_chunks", "n_slices", "root", "slices", "spans")

    def __init__(self, root: bytes, chain: bytes, slices: bytes, spans: Sequence[int]) -> None:
        """`chain`, `slices`: concatenated chain keys and slice digests; `spans` as in keys/spans.py."""
        self.root = root
        self.chain = chain
        self.slices = slices
        self.spans = spans
        self.n_chunks = count(chain)
        self.n_slices = count(slices)
        self.all = b""
        """All keys, chunk-major; b"" until they are derived."""

    def derive(self) -> bytes:
        """All keys, chunk-major; from now on, nothing is derived any more. Any thread."""
        if not self.all:
            self.all = storage_keys(self.root, self.chain, self.slices)
        return self.all

    def know(self, whole: bytes) -> None:
        """Take over the keys of the slices of span 0, which somebody else has derived."""
        if len(whole) == len(self.chain) * self.n_slices:
            self.all = whole

    def part(self, first: int, end: int) -> bytes:
        """The keys of the chunks [first, end), chunk-major."""
        if self.all:
            return part(self.all, first, end, self.n_slices)
        return storage_keys(self.root, part(self.chain, first, end), self.slices)

    def nth(self, number: int) -> bytes:
        """The key with this number."""
        if self.all:
            return nth(self.all, number)
        chunk, index = divmod(number, self.n_slices)
        return storage_keys(self.root, nth(self.chain, chunk), nth(self.slices, index))

    def of(self, numbers: Sequence[int], first: int = 0, end: int | None = None) -> bytes:
        """The keys of the chunks [first, end) in these slices only, chunk-major."""
        end = self.n_chunks if end is None else end
        if self.all:
            return of_slices(part(self.all, first, end, self.n_slices), self.n_slices, numbers)
        digests = b"".join(nth(self.slices, number) for number in numbers)
        return storage_keys(self.root, part(self.chain, first, end), digests)

    def peek_whole(self, index: Peeks) -> int:
        """How many leading chunks `index` has in the slices of span 0; all, if there are none of these."""
        whole = [number for number, span in enumerate(self.spans) if not span]
        return index.peek(self.of(whole), len(whole)) if whole else self.n_chunks

    def peek_windows(self, index: Peeks, n_chunks: int) -> int:
        """The most leading chunks, up to `n_chunks`, whose windows `index` has in the other slices; there is one."""
        windows = [number for number, span in enumerate(self.spans) if span]
        each = [self.spans[number] for number in windows]
        return peek_end(index, n_chunks, each, lambda first, end: self.of(windows, first, end))
