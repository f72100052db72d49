"""Stores under way; the test gives the server's answers, or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstrata.client.copies import Copier, CopyLedger
from kvstrata.client.handles import StoreJob, StoreOutcome
from kvstrata.client.identities import Declared, Identity
from kvstrata.client.stores import StoreQueue, StoreRequest
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.native.core import CopyEngine, record_bytes
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES, LayoutIdentity, RequestIdentity
from tests.unit.client.link_double import EPOCH, Link

CHUNKS = 2


class Stores:
    """A store queue over a link without a server, and an engine that stores."""

    def __init__(self) -> None:
        self.link = Link()
        self.copier = Copier(CopyEngine(threads=1))
        self.blocks = PagedBlocks(layers=1, num_blocks=CHUNKS, block_bytes=4096)
        self.identity = Identity(
            None, LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16), RequestIdentity()
        )
        self.identity.declared = Declared(EPOCH, 1)
        self.queue = StoreQueue(self.link, CopyLedger(), self.copier, self, bytes(32), 16)
        self.queue.ready(1 << 30)

    def declared(self, identity: Identity) -> Declared | None:
        return identity.declared

    def store(self, number: int = 0, chunks: int = CHUNKS) -> StoreJob:
        """Begin a store of `chunks` chunks."""
        job = StoreJob(chunks, lambda job: self.queue.cancel(job))
        payload = self.blocks.plan.payload_bytes(1)
        request = StoreRequest(
            job,
            self.identity,
            b"",
            bytes([number]) * chunks * KEY_BYTES,
            self.blocks.plan,
            [[chunk % CHUNKS] for chunk in range(chunks)],
            record_bytes(1, payload),
            payload,
            b"",
        )
        assert self.queue.admit(request)
        self.queue.add(request)
        return job

    def answer(self, seq: int, outcomes: bytes) -> None:
        """Answer a reserve with outcomes, whose extents are empty."""
        self.link.table.reply(wire.ReserveReply(seq, EPOCH, outcomes, bytes(len(outcomes) * EXTENT.size)))

    def ok(self, *messages: wire.AnyRequest) -> None:
        """Answer messages that give something back."""
        for message in messages:
            self.link.table.reply(wire.Ok(message.seq, EPOCH, 1))


@pytest.fixture
def stores() -> Iterator[Stores]:
    stores = Stores()
    yield stores
    stores.copier.close()
    stores.blocks.close()


def nothing_is_held(stores: Stores) -> bool:
    queue = stores.queue
    return queue.idle and queue.waiting_bytes == queue._reserved_bytes == len(stores.link.table) == 0


@pytest.mark.parametrize("outcomes", [b"\x01\x63", b"\x01", b"\x01\x01\x01"])
def test_an_invalid_reply_to_a_reserve_settles_every_chunk_and_cancels_the_reserve(stores, outcomes):
    job = stores.store()
    [reserve] = stores.link.said()
    stores.answer(reserve.seq, outcomes)
    assert job.gathered.is_set() and job.done.is_set()
    assert job.outcomes == [StoreOutcome.UNAVAILABLE] * CHUNKS
    undone = stores.link.said()
    assert [(type(message), message.target) for message in undone] == [(wire.Cancel, reserve.seq)]
    stores.ok(*undone)
    assert nothing_is_held(stores)


@pytest.mark.parametrize("present", [0, 1])
def test_after_a_refused_chunk_the_rest_of_its_job_is_skipped_and_the_next_job_is_sent(stores, present):
    payload = stores.blocks.plan.payload_bytes(1)
    stores.queue.ready(4 * record_bytes(1, payload))  # two batches of two chunks at a time
    job, following = stores.store(chunks=12), stores.store(1)
    first, second = stores.link.said()
    refused = wire.ReserveOutcome.CHAIN_EXCEEDS_POOL
    stores.answer(first.seq, bytes([wire.ReserveOutcome.PRESENT if present else refused, refused]))
    assert not job.done.is_set()  # the second batch is not answered
    stores.answer(second.seq, bytes([wire.ReserveOutcome.PARENT_ABSENT]) * 2)
    outcomes = ["chain_exceeds_pool"] * 2 + ["parent_absent"] * 2 + ["chain_exceeds_pool"] * 8
    outcomes[:present] = ["present"] * present
    assert job.done.is_set() and job.outcomes == outcomes
    [reserve] = stores.link.said()
    assert reserve.keys == bytes([1]) * CHUNKS * KEY_BYTES
    stores.answer(reserve.seq, bytes([wire.ReserveOutcome.PRESENT]) * CHUNKS)
    assert following.done.is_set() and nothing_is_held(stores)
