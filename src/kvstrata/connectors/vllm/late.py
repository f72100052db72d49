"""Late stores: a chunk is copied into L1 when its blocks are near the head of vLLM's free queue and about to be reused.

Until then vLLM's own cache serves the chunk, and a copy in L1 would displace a chunk that vLLM no longer has.

A complete chunk is *recorded*: its blocks, and the hash object that vLLM keeps on each of them.  vLLM removes the
object when it reuses the block, and a block that is filled again, even with the same tokens, gets a new one.  So a
record is *intact* as long as each of its blocks has the same object.  No block is pinned: a pinned block leaves the
queue and returns at its tail, and pins prevent vLLM from resetting its cache.

Each step looks at the first blocks of the queue, always from the head, and plans the stores of their chunks and of the
chunks before them.  A chunk whose blocks are reused before it is planned is lost for L1 and counted
(`late_missed_chunks`).  While other engines share L1, the chunks before a point where two prompts diverge are planned
at once, since another engine may get the next prompt with that prefix.

Invariants
1. A chunk is considered only when every synchronous load that its KV may depend on is confirmed.
2. A store that reads blocks of a record that is not intact any more is cancelled with the next plan, which workers get
   before the step that overwrites the blocks.
3. A chunk is planned only if each chunk before it is in L1 or on its way there, since a lookup counts from the first.
4. A chunk is planned again at the earliest RETRY_STEPS later, whatever the outcome, unless its store was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import is_
from typing import Any

import msgspec

from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.lookup_table import Tracked
from kvstrata.connectors.vllm.request_keys import RequestKeys
from kvstrata.connectors.vllm.tails import PromptTails
from kvstrata.keys import batch
from kvstrata.keys.chunking import Tail

AHEAD = 2.5
"""Depth of a scan in steps' worth of blocks: copies need one or two steps until they have read the blocks."""
SMOOTHING = 0.3
MAX_DEPTH = 4_096
"""Maximum number of blocks of a scan; twice as many while a hit waits for blocks."""
FLOOR_PART = 8
"""A scan covers at least the blocks that the next step may take, or 1/FLOOR_PART of all blocks if that is less."""
RECORDED_PER_CALL = 128
CHUNKS_PER_STEP = 64
CHUNKS_IN_FLIGHT = 128
CHUNKS_PER_STORE = 16
"""Maximum number of chunks of a store.  An overtaken store loses all chunks not copied yet, so stores are small."""
RETRY_STEPS = 64
LATE_BELOW, LATE_UNTIL = 2.0, 2.5
"""With `store: auto`, chunks are stored late when L1 is smaller than LATE_BELOW times the KV of all its engines, and at
once again when it is LATE_UNTIL times as large."""
DRAIN_S = 60.0
"""Maximum time of a drain: a report of a store may be lost, and an engine that drains keeps stepping."""
HELD_STEPS = 2
"""Maximum number of steps that a hit waits until the chunks in the blocks that it will take are copied."""


class LateWhileSmall:
    """`store: auto`: late while L1 adds little to the caches of the engines that share it; at once while unknown.

    The factor is 2, because an L1 of that size holds a copy of the engines' KV and as much other KV.
    """

    def __init__(self, sizes: Callable[[], tuple[int, int]]) -> None:
        """`sizes()`: bytes of L1, and bytes of KV in its engines' own caches; 0: unknown."""
        self._sizes, self._late = sizes, False

    def __call__(self) -> bool:
        l1_bytes, engine_bytes = self._sizes()
        if l1_bytes and engine_bytes:
            self._late = l1_bytes < engine_bytes * (LATE_UNTIL if self._late else LATE_BELOW)
        return self._late


class Record(msgspec.Struct, eq=False):
    """A chunk, or a tail, in vLLM's own cache."""

    tracked: Tracked
    chain: list[Record]
    """All chunks of the last prompt that includes it."""
    number: int
    key: bytes
    blocks: list[int]
    hashes: list[object]
    tail: Tail | None = None
    store_id: int = 0
    """The store that was planned last for it; 0: none."""
    not_before: int = 0
    """The first step in which the chunk may be planned again."""
    saved: bool = False
    """Whether the chunk has been in L1."""


class LateStores:
    """The recorded chunks of an engine with one group of full attention. Belongs to the scheduler's thread."""

    def __init__(self, engine: Engine, keys: RequestKeys, tails: PromptTails) -> None:
        (self._group,) = engine.groups
        self._pins, self._keys, self._tails = engine.pins, keys, tails
        self._client = engine.client
        self._shared = engine.shares_l1
        self._step_blocks = -(-engine.step_tokens // self._group.block_tokens)
        self._by_block: dict[int, Record] = {}
        """Block → the chunk recorded last that includes it, intact or not."""
        self._unconfirmed: list[Record] = []
        """Chunks of ended requests that may depend on a load whose outcome is unknown."""
        self._branches: list[Record] = []
        """Chunks after which two prompts diverged, found since the last scan."""
        self._flying: dict[int, list[Record]] = {}
        """Store whose blocks a worker may be reading → its chunks."""
        self._generation = keys.generation
        self._step = 0
        self._taken = 0.0
        """Smoothed number of blocks that a step takes."""
        self._waiting_blocks = 0
        """The most blocks that a hit will take that waits or was promised to vLLM since the last scan."""
        self._now, self._drains_until_s = engine.now, 0.0
        self.counts = {"late_missed_chunks": 0, "late_overtaken_stores": 0, "late_held_hits": 0}

    @property
    def draining(self) -> bool:
        """Whether the whole queue is being copied, as fast as the limits allow."""
        return self._now() < self._drains_until_s

    def drain(self) -> None:
        """Copy the whole queue."""
        self._drains_until_s = self._now() + DRAIN_S

    # -- recording -------------------------------------------------------------------------------------------

    def record(self, tracked: Tracked, table: Sequence[int], last: int, *, confirmed: bool) -> None:
        """Record the request's chunks before `last` that are not recorded yet, as far as vLLM has hashed their blocks.

        Chunks that were loaded, or that vLLM had cached, are recorded too, since L1 may drop them first.
        """
        assert tracked.hasher is not None
        pool, size, keys = self._pool(), self._group.chunk_blocks, tracked.hasher.chain
        if len(tracked.recorded) > tracked.next_store:
            tracked.recorded = tracked.recorded[: tracked.next_store]
        chain = tracked.recorded  # shorter than `next_store` if chunks were stored at once before
        other: list[Record] = []
        """The chunks of another prompt that shares the previous chunk."""
        for number in range(len(chain), min(last, len(chain) + RECORDED_PER_CALL)):
            blocks = list(table[number * size : (number + 1) * size])
            key = batch.nth(keys, number)
            if number < len(other) and other[number].key != key and self._shared():
                self._branches.append(chain[-1])
            found = self._by_block.get(blocks[-1])
            if found is None or found.key != key or found.blocks != blocks or not _intact(pool, found):
                other = []
                hashes = [pool.blocks[block].block_hash for block in blocks]
                if None in hashes:
                    break
                found = Record(tracked, chain, number, key, blocks, hashes)
                self._add(pool, found, confirmed=confirmed)
            else:
                other, found.chain, found.tracked = found.chain, chain, tracked
            chain.append(found)
        tracked.next_store = len(chain)

    def record_tail(self, tracked: Tracked, tail: Tail, blocks: list[int], *, confirmed: bool) -> bool:
        """Record a tail after recorded chunks; returns False if vLLM has not hashed its blocks yet."""
        pool = self._pool()
        hashes = [pool.blocks[block].block_hash for block in blocks]
        if None in hashes:
            return False
        record = Record(tracked, tracked.recorded, tail.chunk, tail.key, blocks, hashes, tail)
        self._add(pool, record, confirmed=confirmed)
        return True

    def _add(self, pool: Any, record: Record, *, confirmed: bool) -> None:
        if self._generation != self._keys.generation:
            self._forget()
        if not confirmed:
            self._unconfirmed.append(record)
            return
        for block in record.blocks:
            old = self._by_block.get(block)
            self._by_block[block] = record
            if old is not None and old.blocks[0] == block and not _intact(pool, old):
                self.counts["late_missed_chunks"] += self._is_lost(old)

    def _is_lost(self, record: Record) -> bool:
        identity = record.tracked.identity
        if record.saved or identity is None:
            return False
        return not any(self._client.pool.present([(identity.root, record.key)]) or ())

    def confirm(self) -> None:
        """All loads have succeeded: consider the chunks that may depend on them."""
        waiting, self._unconfirmed = self._unconfirmed, []
        for record in waiting:
            self._add(self._pool(), record, confirmed=True)

    def forget_unconfirmed(self) -> None:
        """A load has failed: drop the chunks that may depend on it."""
        self._unconfirmed.clear()

    def _forget(self) -> None:
        """Drop all records: weights or adapters may have changed, or vLLM's blocks may be bad."""
        self._generation = self._keys.generation
        self._by_block.clear()
        self._unconfirmed.clear()
        self._branches.clear()

    # -- planning --------------------------------------------------------------------------------------------

    def overtaken(self) -> set[int]:
        """The stores whose blocks vLLM has reused since the last plan: workers must cancel them."""
        pool = self._pool()
        gone = {
            store_id
            for store_id, records in self._flying.items()
            if not all(_intact(pool, record) for record in records)
        }
        for store_id in gone:
            del self._flying[store_id]
        self.counts["late_overtaken_stores"] += len(gone)
        return gone

    def due(self, step: int, taken_blocks: int) -> Iterator[tuple[Tracked, list[Record]]]:
        """The chunks to store in this step, in their order: runs of chunks of a request's prompt, or its tail.

        `taken_blocks`: about how many blocks vLLM has taken for this step.  The caller plans a store of each run, and
        calls `planned` before it asks for the next run.
        """
        if self._generation != self._keys.generation:
            self._forget()
        self._step = step
        self._taken += SMOOTHING * (taken_blocks - self._taken)
        pool, waiting, self._waiting_blocks = self._pool(), self._waiting_blocks, 0
        floor = min(self._step_blocks, len(pool.blocks) // FLOOR_PART)
        depth = max(floor, int(AHEAD * max(self._taken, taken_blocks)) + 1)
        depth = min(depth + waiting, MAX_DEPTH * (2 if waiting else 1))
        left = min(CHUNKS_PER_STEP, CHUNKS_IN_FLIGHT - sum(map(len, self._flying.values())))
        if not self._client.connected:
            self._drains_until_s = 0.0
        if not self._client.connected or left <= 0:
            return
        near = self._near_head(pool, len(pool.blocks) if self.draining else depth)
        if not (near or self._flying):
            self._drains_until_s = 0.0
        branches, self._branches = self._branches, []
        for records in (*([branch] for branch in branches), *near.values()):
            for run in self._runs(pool, records):
                yield records[0].tracked, run[:left]
                left -= len(run)
                if left <= 0:
                    return

    def planned(self, store_id: int, records: list[Record]) -> None:
        """A store of these chunks was planned."""
        self._flying[store_id] = records
        for record in records:
            record.store_id, record.not_before = store_id, self._step + RETRY_STEPS

    def _near_head(self, pool: Any, depth: int) -> dict[int, list[Record]]:
        """The plannable intact chunks in the queue's first blocks, by prompt, in the order of their reuse."""
        found: dict[int, list[Record]] = {}
        for record in self._first(pool, depth):
            if record.not_before <= self._step and _intact(pool, record):
                found.setdefault(id(record.chain), []).append(record)
        return found

    def _first(self, pool: Any, depth: int) -> Iterator[Record]:
        """The chunks recorded for the first blocks of the queue, each named once."""
        seen, last = set(), None
        by_block = self._by_block
        for block in islice(pool.free_block_queue.iter_blocks_after(None), depth):
            record = by_block.get(block.block_id)
            if record is last or record is None:  # most neighbours in the queue belong to one chunk
                continue
            last = record
            if id(record) not in seen:
                seen.add(id(record))
                yield record

    def _runs(self, pool: Any, due: list[Record]) -> Iterator[list[Record]]:
        """The chunks of these records' prompt that L1 lacks, up to its last due chunk, and then its due tail."""
        tracked, chain = due[0].tracked, due[0].chain
        assert tracked.identity is not None and tracked.hasher is not None
        in_l1 = self._client.pool.peek(tracked.identity, tracked.hasher)
        tails = [record for record in due if record.tail is not None]
        end = max(record.number + (record.tail is None) for record in due)
        for record in due:
            if record.tail is None and record.number < in_l1:
                self._note_saved(record)
        run: list[Record] = []
        for record in chain[in_l1:end]:
            if record.not_before > self._step:
                if record.store_id not in self._flying:
                    end = record.number  # L1 has refused it
                    break
            elif not _intact(pool, record):
                end = record.number
                break
            else:
                if run and (len(run) == CHUNKS_PER_STORE or run[-1].number + 1 != record.number):
                    yield run
                    run = []
                run.append(record)
        if run:
            yield run
        for record in tails:
            assert record.tail is not None
            if self._tails.in_l1(tracked, record.tail):
                self._note_saved(record)
            elif record.number <= max(end, in_l1):
                yield [record]

    def _note_saved(self, record: Record) -> None:
        record.saved, record.not_before = True, self._step + RETRY_STEPS

    def must_hold(self, blocks: int) -> bool:
        """Whether a hit that will take `blocks` blocks should wait, since some of them hold chunks that L1 lacks.

        The next scan covers these blocks.
        """
        self._waiting_blocks = max(self._waiting_blocks, blocks)
        pool = self._pool()
        for record in self._first(pool, min(blocks, 2 * MAX_DEPTH)):
            may_be_saved = record.not_before <= self._step or record.store_id in self._flying
            if not record.saved and may_be_saved and _intact(pool, record):
                self.counts["late_held_hits"] += 1
                return True
        return False

    # -- reports ---------------------------------------------------------------------------------------------

    def read(self, store_id: int) -> None:
        """All workers have finished reading the blocks of this store."""
        self._flying.pop(store_id, None)

    @property
    def flying(self) -> set[int]:
        """Stores whose blocks a worker may be reading."""
        return set(self._flying)

    def _pool(self) -> Any:
        return self._pins.block_pool()


def _intact(pool: Any, record: Record) -> bool:
    blocks = pool.blocks
    return all(map(is_, [blocks[block].block_hash for block in record.blocks], record.hashes))
