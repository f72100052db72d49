"""What scheduler and worker side tell each other each step.  Plain picklable values: they may be processes.

A step's `StepPlan` goes from the scheduler to every worker; every worker that has something to say answers
with one `WorkerReport`.
"""

from __future__ import annotations

import dataclasses

from kvstrata.types import LeaseName, RequestIdentity

SKIP_BLOCK = -1
"""Stands for a block of a chunk that the engine already has: verified, not written."""


@dataclasses.dataclass(slots=True)
class Load:
    """Chunks to copy from L1 into blocks, under a lease that each worker gives back when its copies ended."""

    request_id: str
    lease: LeaseName | None
    """None: nothing can be loaded, though vLLM was promised it; the workers report the blocks as failed."""
    chain: bytes
    """Chain keys of the chunks, 32 bytes each."""
    extents: bytes
    """Packed extents, chunk-major over `slices`."""
    slices: tuple[bytes, ...]
    """Slice digests; a worker takes the extents of its own."""
    blocks: list[int]
    """Block ids, a chunk's worth per chunk, `SKIP_BLOCK` where nothing is to be written."""
    asynchronous: bool


@dataclasses.dataclass(slots=True)
class Store:
    """Chunks that this step completes, to be copied from blocks into L1 after the forward pass."""

    store_id: int
    """Unique in this engine; reports name it."""
    request_id: str
    identity: RequestIdentity
    parent: bytes
    """Chain key of the chunk before, empty at the start of a prompt."""
    chain: bytes
    blocks: list[int]
    probe: bytes
    """Of the request's first chunk; explains later misses."""


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step. Workers act on it in this order: preempted, loads, stores, awaited."""

    step: int
    loads: list[Load] = dataclasses.field(default_factory=list)
    stores: list[Store] = dataclasses.field(default_factory=list)
    preempted: set[str] = dataclasses.field(default_factory=set)
    """Requests whose blocks may be overwritten in this step: their copies must have ended before it."""
    awaited: set[str] = dataclasses.field(default_factory=set)
    """Finished requests whose blocks the scheduler keeps until the worker reports them."""
    failures_seen: int = 0
    """How many failing load steps the scheduler knew of when it planned this step."""
    weigh: int = 0
    """Number of the question which weights the worker has now; 0 for none."""


@dataclasses.dataclass(slots=True)
class WorkerReport:
    """What one worker has to say after a step."""

    step: int
    gathered: list[int] = dataclasses.field(default_factory=list)
    """Stores whose blocks are not read any more."""
    stored: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(store, bit mask of its chunks that are in L1 now)."""
    dropped: list[int] = dataclasses.field(default_factory=list)
    """Stores that were not made and may be asked for again."""
    failures: int = 0
    """Steps of this worker, since its start, in which a synchronous load failed."""

    broken: bool = False
    """This worker copies nothing any more, until it is started again."""

    weights: tuple[int, str, str] | None = None
    """(question, digest of the weights at the start, digest of them now), when asked; "" for what cannot be told."""

    def says_something(self) -> bool:
        """Whether the report is worth sending."""
        return bool(self.gathered or self.stored or self.dropped or self.broken or self.weights)
