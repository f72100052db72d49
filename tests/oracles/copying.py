"""Gather and scatter of paged blocks in plain Python: the twin of `kvstrata.native.core`.

Memory is one bytearray; addresses are offsets in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A `CopyPlan` with offsets in place of addresses."""

    section_bases: tuple[int, ...]
    num_blocks: int
    block_stride: tuple[int, ...]
    shapes: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    """(dims, run_bytes) of each section."""

    def runs(self, section: int, block: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the runs of one block, in the order in which they are stored."""
        dims, run_bytes = self.shapes[section]
        for at in self._runs(self.section_bases[section] + block * self.block_stride[section], dims):
            yield at, at + run_bytes

    def _runs(self, at: int, dims: tuple[tuple[int, int], ...]) -> Iterator[int]:
        if not dims:
            yield at
            return
        (count, stride), inner = dims[0], dims[1:]
        for i in range(count):
            yield from self._runs(at + i * stride, inner)


def gather(plan: Plan, memory: bytes | bytearray, block_ids: Sequence[int]) -> list[bytes]:
    """Return the bytes that each section stores."""
    return [
        b"".join(bytes(memory[at:end]) for block in block_ids for at, end in plan.runs(section, block))
        for section in range(len(plan.section_bases))
    ]


def scatter(plan: Plan, memory: bytearray, block_ids: Sequence[int], sections: Sequence[bytes]) -> None:
    """Write the sections into the blocks; a negative block id skips that block."""
    for section, stored in enumerate(sections):
        per_block = len(stored) // len(block_ids)
        for position, block in enumerate(block_ids):
            if block < 0:
                continue
            at_stored = position * per_block
            for at, end in plan.runs(section, block):
                memory[at:end] = stored[at_stored : at_stored + end - at]
                at_stored += end - at


def copy_strided(
    target: bytearray,
    sources: Sequence[bytes | bytearray],
    copies: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]], int]],
) -> None:
    """Copy as `copying.copy_strided` does, on buffers."""
    for source, source_offset, target_offset, loops, run_bytes in copies:
        for index in itertools.product(*(range(count) for count, _, _ in loops)):
            here = source_offset + sum(i * stride for i, (_, stride, _) in zip(index, loops, strict=True))
            there = target_offset + sum(i * stride for i, (_, _, stride) in zip(index, loops, strict=True))
            target[there : there + run_bytes] = sources[source][here : here + run_bytes]
