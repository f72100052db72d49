"""The message from the scheduler's side to every worker in each step. It is pickled; it holds plain values only."""

from __future__ import annotations

import dataclasses

from kvstrata.types import LeaseName, RequestIdentity

SKIP_BLOCK = -1
"""Stands for a block that is not written: its part of the chunk is verified only."""


@dataclasses.dataclass(slots=True)
class Load:
    """Chunks to copy from L1 into blocks before the step."""

    lease: LeaseName
    identity: RequestIdentity
    chain: bytes
    """Chain keys of the chunks."""
    extents: bytes
    """Packed extents, chunk-major over `slices`."""
    slices: tuple[bytes, ...]
    blocks: list[list[int]]
    """The blocks of each chunk."""


@dataclasses.dataclass(slots=True)
class Store:
    """Chunks that the step completes, to be copied out of blocks after it."""

    request_id: int
    identity: RequestIdentity
    parent: bytes
    """Chain key of the chunk before the first; empty at the start of a prompt."""
    chain: bytes
    probe: bytes
    blocks: list[list[int]]
    tail_tokens: int = 0
    """Always 0: only whole chunks are stored."""
    replaces: bytes = b""
    """Always empty."""


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What a worker does around one forward pass."""

    group: bytes
    """16 bytes that name the engine; a worker attaches to the server when it first hears them."""
    loads: list[Load] = dataclasses.field(default_factory=list)
    stores: list[Store] = dataclasses.field(default_factory=list)
