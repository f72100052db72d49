"""An engine of two groups of layers: of the second, only the last chunks of a hit are needed (a sliding window)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from kvstrata.client import LookupResult
from kvstrata.types import unpack_extents
from tests.harness.cache_engine import CacheEngine, prompt
from tests.harness.server_process import ServerProcess

SPAN = 2
"""How many of a hit's last chunks the second group needs."""


class Groups(NamedTuple):
    """The two clients of the engine."""

    whole: CacheEngine
    windowed: CacheEngine

    def connect(self) -> None:
        for engine in self:
            engine.connect()

    def store(self, n_chunks: int, windows: list[tuple[int, int]], seed: int = 0) -> None:
        """Store a prompt, and of the second group these ranges of its chunks."""
        assert self.whole.stored(prompt(n_chunks, seed)) == ["stored"] * n_chunks
        for first, end in windows:
            assert self.windowed.stored(prompt(end, seed), first) == ["stored"] * (end - first)

    def peek(self, n_chunks: int, seed: int = 0) -> int:
        engine = self.whole
        return engine.client.peek(engine.identity(), engine.hasher(prompt(n_chunks, seed)))

    def load(self, n_chunks: int, result: LookupResult, seed: int = 0) -> None:
        """Load a lookup's result in both groups, checking each byte."""
        for engine in self:
            assert engine.check_load(prompt(n_chunks, seed), result, sync=True) == set()

    def windows_of(self, result: LookupResult) -> list[int]:
        """The chunks of the second group that were leased."""
        slices = self.whole.client.slices
        mine = unpack_extents(result.extents)[slices.index(self.windowed.client.slice_digest) :: len(slices)]
        return [chunk for chunk, extent in enumerate(mine) if extent.length_bytes]


@contextlib.contextmanager
def open_groups(server: ServerProcess, name: bytes = b"an engine of two") -> Iterator[Groups]:
    with (
        CacheEngine(server.socket_dir, rank=0, ranks=2, group=name) as whole,
        CacheEngine(server.socket_dir, rank=1, ranks=2, group=name, span=SPAN) as windowed,
    ):
        groups = Groups(whole, windowed)
        groups.connect()
        yield groups
