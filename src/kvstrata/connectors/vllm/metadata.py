"""The messages between scheduler side and worker side in each step; picklable, for sides in separate processes.

A step's `StepPlan` goes from the scheduler to every worker; a worker with something to report answers with one
`WorkerReport`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvstrata.types import LeaseName, RequestIdentity

SKIP_BLOCK = -1
"""Block id for a block that the engine already has: its part of the chunk is verified, but not written."""


@dataclasses.dataclass(slots=True)
class Load:
    """Chunks to copy from L1 into blocks, under a lease that each worker releases when its copies have ended."""

    request_id: str
    lease: LeaseName | None
    """None: the promised chunks cannot be loaded, and the workers report the blocks as failed."""
    identity: RequestIdentity
    """Identity of the chunks; not used without a lease."""
    chain: bytes
    """Chain keys of the chunks, 32 bytes each."""
    extents: bytes
    """Packed extents, chunk-major over `slices`."""
    slices: tuple[bytes, ...]
    """Slice digests; a worker takes the extents of its own slice."""
    blocks: list[int]
    """Block ids, the blocks of chunk after chunk; `SKIP_BLOCK` for a block that is not written. The last chunk may be a
    tail, which has fewer blocks."""
    asynchronous: bool
    group: int = 0
    """Number of the KV cache group that the blocks belong to."""
    adapter: int = 0
    """Number of the question that named the request's LoRA adapter; 0 without adapter."""
    more: bool = False
    """A further part of the request's asynchronous load follows in a later plan: the load has not ended before that."""


@dataclasses.dataclass(slots=True)
class Store:
    """Chunks that are complete after this step, to be copied from blocks into L1 after the forward pass."""

    store_id: int
    """Unique in this engine; reports name it."""
    request_id: str
    """Empty for a late store (`late`), which belongs to no request."""
    identity: RequestIdentity
    parent: bytes
    """Chain key of the chunk before the first; empty at the start of a prompt."""
    chain: bytes
    blocks: list[int]
    probe: bytes
    """Probe of the request's first chunk, for explaining later misses."""
    tail_tokens: int = 0
    """Number of tokens if the only chunk is a tail; else 0."""
    replaces: bytes = b""
    """Chain keys of tails that these chunks replace."""
    traceparent: str = ""
    """As in `Tracked`."""
    group: int = 0
    """Number of the KV cache group that the blocks belong to."""
    adapter: int = 0
    """As in `Load`."""


@dataclasses.dataclass(slots=True)
class StepPlan:
    """The plan of one step. Workers act on its fields in this order: preempted and cancel, loads, stores, awaited."""

    step: int
    loads: list[Load] = dataclasses.field(default_factory=list)
    stores: list[Store] = dataclasses.field(default_factory=list)
    preempted: set[str] = dataclasses.field(default_factory=set)
    """Requests whose blocks this step may overwrite: copies of these blocks must end before the step."""
    cancel: set[int] = dataclasses.field(default_factory=set)
    """Stores whose blocks this step may overwrite, though their requests were not preempted."""
    awaited: set[str] = dataclasses.field(default_factory=set)
    """Finished requests whose blocks the scheduler keeps until the worker reports them."""
    failures_seen: int = 0
    """Number of steps with failed loads that the scheduler knew of when it planned this step."""
    weigh: int = 0
    """Number of the question about the worker's current weights; 0 without a question."""
    weigh_adapters: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    """(number of the question, vLLM's LoRARequest) for each adapter that the workers are asked about."""
    others_load: bool = False
    """Another connector loads before this step's forward pass, see `StoreTable.must_wait`: workers report the step."""
    timed: bool = False
    """The scheduler measures the step: workers report it."""
    computes: bool = True
    """Whether the step computes tokens. vLLM 0.30 does not call `wait_for_save` in other steps."""


@dataclasses.dataclass(slots=True)
class WorkerReport:
    """One worker's report after a step."""

    step: int
    gathered: list[int] = dataclasses.field(default_factory=list)
    """Stores whose blocks this worker has finished reading, or never read. Each store is reported once."""
    stored: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(store, bit mask of its chunks that are in L1 now)."""
    dropped: list[int] = dataclasses.field(default_factory=list)
    """Stores that were not made and may be planned again."""
    failures: int = 0
    """Number of this worker's steps, since its start, in which a synchronous load failed."""

    broken: bool = False
    """Whether this worker has stopped copying until it is started again."""

    weights: tuple[int, str, str] | None = None
    """(number of the question, digest of the weights at the start, digest of the weights now), if asked; a digest is ""
    if the worker could not compute it."""

    adapters: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """(number of the question, digest of the adapter); "" if it cannot be read, or was replaced meanwhile."""

    def says_something(self) -> bool:
        """Whether the report has any content to send."""
        return bool(
            self.gathered or self.stored or self.dropped or self.broken or self.weights or self.adapters
        )
