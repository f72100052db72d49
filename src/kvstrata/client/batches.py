"""One batch of a store: the chunks that are reserved, gathered and committed together, and its states.

Nothing here sends a message or looks at other batches; `kvstrata.client.stores` does.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.client.copies import Plan
from kvstrata.client.handles import StoreJob
from kvstrata.client.identities import Identity
from kvstrata.client.requests import Pending
from kvstrata.keys import batch as keys
from kvstrata.rpc import wire
from kvstrata.states import Machine
from kvstrata.types import EXTENT, Extent, unpack_extents


class BatchState(enum.Enum):
    """How far a batch has come."""

    RESERVING = enum.auto()
    """Its reserve is not sent yet, or not answered yet."""
    GATHERING = enum.auto()
    """Extents are reserved, and the copies into them run."""
    COMMITTING = enum.auto()
    """All copies have ended, and the commit of the whole records is not answered yet."""
    UNDOING = enum.auto()
    """None of its chunks will be stored; the cancel or abort of its reserve is not answered yet."""
    LEFT = enum.auto()
    """The server has no reservation of it any more, and its bytes are free for other batches."""


class BatchEvent(enum.Enum):
    """An event in the life of a batch."""

    RESERVED = enum.auto()
    """The reserve is answered, with an extent for at least one chunk."""
    REFUSED = enum.auto()
    """The reserve is answered, with no extent."""
    UNSENT = enum.auto()
    """The store was cancelled, or the reserve has failed, before it was sent."""
    WITHDRAWN = enum.auto()
    """The store was cancelled, or the reserve has failed, after it was sent."""
    COPIED = enum.auto()
    """The copies have ended, and at least one record is whole."""
    TORN = enum.auto()
    """The copies have ended, and no record is whole."""
    RESTARTED = enum.auto()
    """The copies have ended, but the server that gave the extents is gone."""
    SETTLED = enum.auto()
    """The commit, abort or cancel is answered, or its server is gone."""


MACHINE = Machine(
    "Batch of a store",
    BatchState.RESERVING,
    {
        BatchState.RESERVING: {
            BatchEvent.RESERVED: BatchState.GATHERING,
            BatchEvent.REFUSED: BatchState.LEFT,
            BatchEvent.UNSENT: BatchState.LEFT,
            BatchEvent.WITHDRAWN: BatchState.UNDOING,
        },
        BatchState.GATHERING: {
            BatchEvent.COPIED: BatchState.COMMITTING,
            BatchEvent.TORN: BatchState.UNDOING,
            BatchEvent.RESTARTED: BatchState.LEFT,
        },
        BatchState.COMMITTING: {BatchEvent.SETTLED: BatchState.LEFT},
        BatchState.UNDOING: {BatchEvent.SETTLED: BatchState.LEFT},
    },
)


class StoreRequest(NamedTuple):
    """The checked arguments of `CacheClient.store`."""

    job: StoreJob
    identity: Identity
    parent: bytes
    """Chain key of the chunk before the first; b"" at the start of a prompt."""
    chain: bytes
    plan: Plan
    blocks: Sequence[Sequence[int]]
    record_bytes: int
    payload_bytes: int
    probe: bytes
    tail_tokens: int = 0
    """0, or the only chunk is a tail with so many tokens."""
    replaces: bytes = b""
    """Chain keys of tails that these chunks replace."""

    @property
    def n_chunks(self) -> int:
        """Chunks to store."""
        return len(self.blocks)


class Batch:
    """Chunks [first, first + n_chunks) of one request."""

    __slots__ = (
        "asked",
        "copy_job",
        "epoch",
        "first",
        "n_chunks",
        "request",
        "reserved",
        "seq",
        "state",
        "unsettled",
    )

    def __init__(self, request: StoreRequest, first: int, n_chunks: int) -> None:
        self.request = request
        self.first = first
        self.n_chunks = n_chunks
        self.state = MACHINE.first
        self.asked: Pending | None = None
        """The reserve, until it is answered."""
        self.seq = 0
        """Number of the reserve; 0 until it is sent."""
        self.epoch = 0
        """Epoch of the server that the reserve went to."""
        self.reserved: list[int] = []
        """Indices within the batch that got an extent."""
        self.copy_job = 0
        """Number of the native copy; 0 while none runs."""
        self.unsettled: list[int] = []
        """Chunks of the job that wait for the commit's outcome."""

    def move(self, event: BatchEvent) -> None:
        """Enter the state that `MACHINE` gives for `event`."""
        self.state = MACHINE.after(self.state, event)

    @property
    def keys(self) -> bytes:
        """Chain keys of the batch."""
        return keys.part(self.request.chain, self.first, self.first + self.n_chunks)

    @property
    def parent(self) -> bytes:
        """Chain key of the chunk before the batch; b"" at the start of a prompt."""
        return keys.before(self.request.chain, self.first, self.request.parent)

    @property
    def held_bytes(self) -> int:
        """Bytes that the server has reserved for the batch or, until the server answers, was asked to reserve."""
        return (len(self.reserved) or self.n_chunks) * self.request.record_bytes

    def chunks(self, indices: Sequence[int]) -> list[int]:
        """Indices within the job, from indices within the batch."""
        return [self.first + index for index in indices]


def reserve_outcomes(reply: wire.AnyReply, n_chunks: int) -> tuple[bytes, list[Extent]]:
    """(outcome, extent) of each chunk. Raises ValueError unless the reply has both for all `n_chunks` chunks."""
    if not isinstance(reply, wire.ReserveReply):
        raise ValueError(f"reply {type(reply).__name__}")
    if len(reply.outcomes) != n_chunks or len(reply.extents) != n_chunks * EXTENT.size:
        raise ValueError(
            f"{len(reply.outcomes)} outcomes and {len(reply.extents)} bytes of extents for {n_chunks} chunks"
        )
    unknown = set(reply.outcomes) - set(wire.ReserveOutcome)
    if unknown:
        raise ValueError(f"unknown outcomes {sorted(unknown)}")
    return reply.outcomes, unpack_extents(reply.extents)
