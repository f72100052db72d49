"""The storage keys of a prompt, derived from its chain when they are needed."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.keys.batch import count, nth, part
from kvstrata.keys.spans import Peeks, of_slices, peek_end
from kvstrata.native.core import storage_keys


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
