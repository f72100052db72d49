"""Blocks in device memory: chunks go through a buffer in host memory, plain torch on both sides of it.

    store   blocks ──index_select, device stream──▶ slots in pinned memory ──native gather, CRC──▶ pool
    load    pool ──native verified scatter──▶ host buffer ──copy, device stream──▶ blocks

Each direction has one thread and one stream, so neither the engine's thread nor its stream waits.  Both begin behind
what the engine's stream had to do at the call (an event there): a store behind the forward pass that computed it, the
device part of a load behind whatever still reads, writes or zeroes the blocks it was given.  In a slot, a block is laid
out in the physical order of its axes, exactly as the host path stores it: records are the same on both paths.

Invariants
1. Device blocks are read by a store until `gathered`: all its copies to the host have ended, or it never began.
2. Device blocks are written by a load until `done`: its stream was synchronised.
3. A slot is free again when the job that copies it into the pool is done, or was never begun.
4. What was read after `StagedStore.cancel` may be foreign bytes, so it is never stored.
5. Every job ends, also when the device or the host's memory fails it; the thread goes on with the next one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.client import LoadItem, StoreOutcome
from kvstrata.connectors.vllm.kv_view import KvView, find_block_axis
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Store
from kvstrata.native.copying import CopyPlan
from kvstrata.types import KEY_BYTES, LeaseName

if TYPE_CHECKING:
    from kvstrata.client import CacheClient, Identity, LoadJob, StoreJob

logger = logging.getLogger("vllm.kvstrata")

STORE_SLOT_BYTES = 256 << 20
"""Pinned memory for stores; at least two chunks."""
MAX_STAGED_BYTES = 4 << 30
"""Largest load in one go; the scheduler promises no more."""
QUEUED_JOBS = 1024
CLOSE_S = 2.0


class StagedStore:
    """A store on its way through the slots; the same to look at as a client's StoreJob."""

    def __init__(self, n_chunks: int) -> None:
        self.outcomes: list[StoreOutcome] = [StoreOutcome.UNAVAILABLE] * n_chunks
        self.bytes = 0
        self.gathered = threading.Event()
        self.done = threading.Event()
        self.cancelled = False

    def wait_gathered(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no device block is read any more."""
        return self.gathered.wait(timeout_s)

    def cancel(self) -> None:
        """Read no further chunks, store none that was not read by now. Never blocks."""
        self.cancelled = True


class StagedLoad:
    """A load on its way through the host buffer; the same to look at as a client's LoadJob."""

    def __init__(self) -> None:
        self.failed: set[int] = set()
        self.bytes = 0
        self.done = threading.Event()
        self.cancelled = False

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of all copies."""
        return self.done.wait(timeout_s)

    def cancel(self) -> None:
        """Write no further blocks. Never blocks."""
        self.cancelled = True


class StagingMover:
    """See the module. `tensors` are the engine's, by layer name; they must outlive the mover."""

    def __init__(self, client: CacheClient, view: KvView, tensors: Mapping[str, torch.Tensor]) -> None:
        self._client = client
        self._chunk_blocks = view.chunk_blocks
        self._layers = [_blocks_first(name, tensors[name], view) for name in view.layer_names]
        self._device = self._layers[0].device
        self._pinned = self._device.type == "cuda"
        self._block_bytes = view.payload_bytes // len(self._layers) // view.chunk_blocks
        chunks = max(2, STORE_SLOT_BYTES // view.payload_bytes)
        self._slots = self._host_blocks(chunks * view.chunk_blocks)
        self._slots_plan = self._plan_of(self._slots)
        self._free_slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(chunks):
            self._free_slots.put(slot)
        self._load_blocks: torch.Tensor | None = None
        self._load_plan: CopyPlan | None = None
        self._closing = threading.Event()
        self._queues: list[queue.Queue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._store_queue = self._start_lane("kvstrata-stage-store")
        self._load_queue = self._start_lane("kvstrata-stage-load")

    # -- Mover -----------------------------------------------------------------------------------------------

    def store(self, identity: Identity, store: Store, blocks: Sequence[Sequence[int]]) -> StoreJob:
        """See `worker.Mover`. Reads the blocks behind what is on the current stream now."""
        job = StagedStore(len(blocks))
        computed = self._now_on_device()
        try:
            self._store_queue.put_nowait(lambda: self._run_store(job, identity, store, blocks, computed))
        except queue.Full:
            job.outcomes = [StoreOutcome.BACKLOG] * len(blocks)
            job.gathered.set()
            job.done.set()
        return job  # type: ignore[return-value]

    def load(self, lease: LeaseName, items: Sequence[LoadItem], *, sync: bool) -> LoadJob:
        """See `worker.Mover`. Writes the blocks behind what is on the current stream now.

        `sync` makes no difference: the caller waits for the job.
        """
        job = StagedLoad()
        free = self._now_on_device()
        try:
            self._load_queue.put_nowait(lambda: self._run_load(job, lease, items, free))
        except queue.Full:
            self._client.release([lease])
            job.failed.update(range(len(items)))
            job.done.set()
        return job  # type: ignore[return-value]

    def close(self) -> None:
        """End both threads after the job each is at; what is queued is given up."""
        self._closing.set()
        for lane in self._queues:
            try:
                lane.put(None, timeout=CLOSE_S)
            except queue.Full:
                pass  # its thread hangs with a full queue: it ends with the process
        for thread in self._threads:
            thread.join(CLOSE_S)

    # -- stores ----------------------------------------------------------------------------------------------

    def _run_store(
        self,
        job: StagedStore,
        identity: Identity,
        store: Store,
        blocks: Sequence[Sequence[int]],
        computed: Any,
    ) -> None:
        waiting: list[tuple[int, int, StoreJob]] = []
        at = 0
        rest = StoreOutcome.FAILED
        try:
            stream = self._stream_behind(computed)
            while at < len(blocks) and not job.cancelled and not self._closing.is_set():
                slots = self._take_slots(len(blocks) - at)
                if not slots:
                    continue
                count = len(slots)
                inner = self._store_part(job, identity, store, blocks[at : at + count], at, slots, stream)
                if inner is None:
                    break
                waiting.append((at, count, inner))
                at += count
            rest = StoreOutcome.CANCELLED
        finally:
            job.outcomes[at:] = [rest] * (len(blocks) - at)
            job.gathered.set()
            for first, count, inner in waiting:
                inner.done.wait()
                job.outcomes[first : first + count] = inner.outcomes
                job.bytes += inner.bytes
            job.done.set()

    def _store_part(
        self,
        job: StagedStore,
        identity: Identity,
        store: Store,
        blocks: Sequence[Sequence[int]],
        at: int,
        slots: Sequence[int],
        stream: Any,
    ) -> StoreJob | None:
        """Copy chunks from number `at` on into slots and hand them to the client; None if cancelled meanwhile."""
        inner = None
        try:
            self._to_host(slots, blocks, stream)
            if not job.cancelled:
                key = at * KEY_BYTES
                inner = self._client.store(
                    identity,
                    store.chain[key - KEY_BYTES : key] if at else store.parent,
                    store.chain[key : key + len(blocks) * KEY_BYTES],
                    self._slots_plan,
                    [self._slot_blocks(slot) for slot in slots],
                    on_done=partial(self._give_back, slots),
                    probe=store.probe,
                )
        finally:
            if inner is None:
                self._give_back(slots)
        return inner

    def _give_back(self, slots: Sequence[int], _: StoreJob | None = None) -> None:
        for slot in slots:
            self._free_slots.put(slot)

    def _take_slots(self, wanted: int) -> list[int]:
        """At least one slot, at most `wanted`; empty when none came free for a while."""
        taken: list[int] = []
        try:
            taken.append(self._free_slots.get(timeout=0.1))
            while len(taken) < wanted:
                taken.append(self._free_slots.get_nowait())
        except queue.Empty:
            pass
        return taken

    def _to_host(self, slots: Sequence[int], blocks: Sequence[Sequence[int]], stream: Any) -> None:
        """Copy whole chunks into slots. On return, also by an exception, no block is read any more."""
        index = torch.tensor([block for chunk in blocks for block in chunk], device=self._device)
        into = torch.tensor([block for slot in slots for block in self._slot_blocks(slot)])
        consecutive = bool((into == torch.arange(int(into[0]), int(into[0]) + len(into))).all())
        try:
            with _on(stream):
                for layer, host in zip(self._layers, self._slots, strict=True):
                    picked = layer.index_select(0, index).reshape(len(into), -1).view(torch.uint8)
                    if consecutive:
                        host[int(into[0]) : int(into[0]) + len(into)].copy_(picked, non_blocking=True)
                    else:
                        for row, target in enumerate(into.tolist()):
                            host[target].copy_(picked[row], non_blocking=True)
        finally:
            # `index` belongs to another stream: its memory must not be given away before the kernels have read it.
            if stream is not None:
                stream.synchronize()

    # -- loads -----------------------------------------------------------------------------------------------

    def _run_load(self, job: StagedLoad, lease: LeaseName, items: Sequence[LoadItem], free: Any) -> None:
        failed = set(range(len(items)))
        try:
            n_bytes = len(items) * self._chunk_blocks * self._block_bytes * len(self._layers)
            if not (job.cancelled or self._closing.is_set() or n_bytes > MAX_STAGED_BYTES):
                failed = self._load(job, lease, items, free)
        finally:
            # After a load of the client's there is nothing left to release, and saying so is harmless.
            if len(failed) == len(items):
                self._client.release([lease])
            job.failed.update(failed)
            job.done.set()

    def _load(self, job: StagedLoad, lease: LeaseName, items: Sequence[LoadItem], free: Any) -> set[int]:
        """Load and write the blocks; the numbers of the items that were not written whole."""
        n_blocks = len(items) * self._chunk_blocks
        if self._load_blocks is None or self._load_blocks.shape[1] < n_blocks:
            self._load_plan, self._load_blocks = None, None  # the old buffer is freed first
            self._load_blocks = self._host_blocks(n_blocks)
            self._load_plan = self._plan_of(self._load_blocks)
        staged = [item._replace(block_ids=self._slot_blocks(position)) for position, item in enumerate(items)]
        assert self._load_plan is not None
        inner = self._client.load(lease, staged, self._load_plan, sync=False)
        while not inner.wait(0.05):
            if job.cancelled:
                inner.cancel()
        if job.cancelled:
            return set(range(len(items)))
        pairs = [
            (position * self._chunk_blocks + offset, block)
            for position, item in enumerate(items)
            if position not in inner.failed
            for offset, block in enumerate(item.block_ids)
            if block != SKIP_BLOCK
        ]
        if pairs:
            self._to_device([host for host, _ in pairs], [block for _, block in pairs], free)
            job.bytes = inner.bytes
        return set(inner.failed)

    def _to_device(self, rows: Sequence[int], blocks: Sequence[int], free: Any) -> None:
        """Copy host rows into device blocks, once `free` has come. On return no block is written any more."""
        assert self._load_blocks is not None
        index = torch.tensor(blocks, device=self._device)
        picked = torch.tensor(rows)
        stream = self._stream_behind(free)
        try:
            with _on(stream):
                for layer, host in zip(self._layers, self._load_blocks, strict=True):
                    data = host.index_select(0, picked).view(layer.dtype).reshape(len(rows), *layer.shape[1:])
                    layer.index_copy_(0, index, data.to(self._device))
        finally:
            if stream is not None:
                stream.synchronize()

    # -- both ------------------------------------------------------------------------------------------------

    def _now_on_device(self) -> Any:
        """An event that comes when the device has done what the engine has given it so far; None on the host."""
        return torch.cuda.current_stream(self._device).record_event() if self._pinned else None

    def _stream_behind(self, event: Any) -> Any:
        """A stream whose work begins after the event; None on the host."""
        if event is None:
            return None
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(event)
        return stream

    def _host_blocks(self, n_blocks: int) -> torch.Tensor:
        return torch.empty(
            (len(self._layers), n_blocks, self._block_bytes), dtype=torch.uint8, pin_memory=self._pinned
        )

    def _plan_of(self, host: torch.Tensor) -> CopyPlan:
        return CopyPlan(
            [layer.data_ptr() for layer in host],
            host.shape[1],
            [self._block_bytes] * len(self._layers),
            [],
            self._block_bytes,
        )

    def _slot_blocks(self, slot: int) -> list[int]:
        return list(range(slot * self._chunk_blocks, (slot + 1) * self._chunk_blocks))

    def _start_lane(self, name: str) -> queue.Queue[Callable[[], None] | None]:
        lane: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED_JOBS)

        def run() -> None:
            while (work := lane.get()) is not None:
                try:
                    work()
                except Exception:
                    # Supervisor of this thread: the job has ended as failed, the engine computes instead.
                    logger.exception("%s: a copy failed", name)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._queues.append(lane)
        self._threads.append(thread)
        return lane


def _blocks_first(name: str, tensor: torch.Tensor, view: KvView) -> torch.Tensor:
    """A view of one layer as (blocks, axes of a block in physical order)."""
    axis, pieces = find_block_axis(name, tensor, view.num_blocks, view.block_tokens)
    order = [int(index) for index, _ in view.axes]
    if pieces > 1:
        # Kernel blocks: the split part becomes one more axis, at the end for now.
        tensor = tensor.unflatten(axis, (view.num_blocks, pieces)).movedim(axis + 1, -1)
        order = [tensor.dim() - 1 if index == axis else index for index in order]
    rest = [index for index in range(tensor.dim()) if index != axis and index not in order]
    return tensor.permute(axis, *order, *rest)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


__all__ = ["MAX_STAGED_BYTES", "StagedLoad", "StagedStore", "StagingMover"]
