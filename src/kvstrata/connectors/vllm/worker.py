"""The side of the connector in a vLLM worker: copies between the engine's blocks and the pool.

Order within a step: `before_step` (copies of preempted blocks end), `start_loads`, the forward pass with `wait_layer`
before each layer, then `start_stores`, `finished`, `take_bad_blocks`, `report`.  With a draft model vLLM may call
`start_stores` last, after that model, when the step has already been reported.  The first of `start_stores` and
`finished` ends the synchronous loads.  Stores and asynchronous loads continue between steps, on the client's threads,
so they end even if vLLM stops stepping.

Invariants
1. A synchronous load writes blocks only until its step ends, an asynchronous one only until it is reported.
2. A store reads blocks only until the step after its request was preempted, or until its request is reported as sent;
   a late store, until the step whose plan cancels it.
3. Nothing is stored that was computed in a step whose synchronous load failed, or in steps planned before the
   scheduler knew of that (they may rest on the failed blocks).
4. A step is reported only after its synchronous loads have ended, so a failed load is never confirmed.
5. A step waits for copies for one second at most, then cancels them; after that it waits only for items that a copy
   thread has begun.
6. No block is read or written between `suspend` and `resume`: vLLM unmaps their memory.
7. If the model computed a layer before that layer's work was made to wait for the load, the load fails.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvstrata.client import CacheClient, Identity, LoadItem, LoadJob, StoreJob
from kvstrata.connectors.mover import Mover
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan, Store, WorkerReport
from kvstrata.connectors.vllm.weights import LoadedAdapters, LoadedWeights
from kvstrata.keys import batch
from kvstrata.patience import patience
from kvstrata.types import EXTENT, LeaseName, RequestIdentity

logger = logging.getLogger("vllm.kvstrata")

WAIT_S = 1.0
"""Maximum wait for copies in one step."""
SLEEP_WAIT_S = 30.0
"""Time for copies under way to end before vLLM unmaps the blocks' memory."""
CLOSE_WAIT_S = 2.0
"""Time for stores to end at shutdown."""
IDENTITIES_REMEMBERED = 1024


@dataclasses.dataclass(eq=False)
class GroupSide:
    """A worker's parts for one KV cache group: a client of its own, a mover of the group's blocks, and its slice.

    The caller starts `client`; the worker's side closes it.
    """

    client: CacheClient
    mover: Mover
    slice_digest: bytes
    """Digest of the slice that this worker holds."""
    record_blocks: int
    """Number of blocks in a chunk's record."""
    _identities: dict[RequestIdentity, Identity] = dataclasses.field(default_factory=dict)

    def identity(self, request: RequestIdentity) -> Identity:
        """The client's identity of such requests; the last IDENTITIES_REMEMBERED are kept."""
        identity = self._identities.get(request)
        if identity is None:
            while len(self._identities) >= IDENTITIES_REMEMBERED:
                del self._identities[next(iter(self._identities))]
            identity = self._identities[request] = self.client.identity(request)
        return identity


@dataclasses.dataclass(slots=True)
class _Stored:
    store: Store
    job: StoreJob
    read: bool = False
    """Whether a report has said that the blocks are not read any more."""


@dataclasses.dataclass(slots=True)
class _Loading:
    load: Load
    items: list[LoadItem]
    job: LoadJob
    begun_s: float
    late: bool = False
    """Whether the model computed on blocks of this load before they were copied."""


class _Copies:
    """The copies of a worker, and the blocks that they failed to fill."""

    def __init__(self, groups: Sequence[GroupSide], *, by_request: bool, now: Callable[[], float]) -> None:
        self._groups, self._by_request, self._now = groups, by_request, now
        self._stores: list[_Stored] = []
        self._loads: list[_Loading] = []
        self._open: set[str] = set()
        """Requests with an asynchronous load of which further parts follow."""
        self._bad_blocks: set[int] = set()
        """Blocks whose load failed, unless `by_request`."""
        self._bad_requests: set[str] = set()
        """Requests with a failed load, with `by_request`."""

    def take_bad_requests(self, received: Iterable[str]) -> set[str]:
        """Those of these requests with a failed load, which must be computed from the start."""
        bad = self._bad_requests.intersection(received)
        self._bad_requests -= bad
        return bad

    def take_bad_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call, and which must be computed."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        """Stop all copies, and detach from the server."""
        for loading in self._loads:
            loading.job.cancel()
        for loading in self._loads:
            loading.job.wait(WAIT_S)
        for group in self._groups:
            group.mover.close()
        for group in self._groups:
            group.client.close(0.5)

    def _await_copies(self) -> None:
        """Wait until no copy touches the engine's blocks. Raises RuntimeError if one does after SLEEP_WAIT_S."""
        deadline = self._now() + SLEEP_WAIT_S
        ends = [(entry.job.wait_gathered, entry.store.request_id) for entry in self._stores]
        ends += [(loading.job.wait, loading.load.request_id) for loading in self._loads]
        for wait, request_id in ends:
            if not wait(max(0.0, deadline - self._now())):
                raise RuntimeError(
                    f"a copy of KV of request {request_id} still runs after {SLEEP_WAIT_S:.0f} s, so the memory of "
                    "the KV cache cannot be freed; try to sleep again"
                )

    def _note_part(self, load: Load) -> None:
        """Record whether a further part of a load follows."""
        (self._open.add if load.more else self._open.discard)(load.request_id)

    def _still_loading(self) -> set[str]:
        """Requests with an asynchronous load that has not ended."""
        return {loading.load.request_id for loading in self._loads} | self._open

    def _failed(self, load: Load, blocks: Iterable[int]) -> None:
        """Record that these blocks of a load were not filled."""
        if self._by_request:
            self._bad_requests.add(load.request_id)
        else:
            self._bad_blocks.update(block for block in blocks if block != SKIP_BLOCK)


class WorkerSide(_Copies):
    """One worker. vLLM's worker thread calls all methods; jobs end on other threads.

    `close` closes the clients of `groups`.  With `by_request` (see `groups.whole_hits`) all loads are asynchronous, and
    failures are reported to vLLM by request instead of by block.
    """

    def __init__(
        self,
        groups: Sequence[GroupSide],
        *,
        by_request: bool = False,
        weights: LoadedWeights | None = None,
        adapters: LoadedAdapters | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert by_request or len(groups) == 1, "vLLM cannot tell the blocks of several groups apart"
        super().__init__(groups, by_request=by_request, now=now)
        self._mover = groups[0].mover
        """The mover of synchronous loads, which only an engine with one group has."""
        self._weights = weights
        self._adapters = adapters
        self._awaited: set[str] = set()
        self._synchronous: list[_Loading] = []
        """The step's synchronous loads, until `end_loads`."""
        self._waits_end_s = 0.0
        self._unordered: set[int] = set()
        """Sections for whose copies the forward pass does not wait yet."""
        self._failed_unbegun = False
        """Whether a synchronous load of the step never began."""
        self._failures = 0
        self._suspended = False
        self._report = WorkerReport(0)
        """The next report."""
        self._step = StepPlan(0)
        self._to_begin: deque[Load] = deque()
        """Loads of the step that have not begun."""
        self._to_store: deque[Store] = deque()
        self._to_await: set[str] = set()
        """The step's awaited requests, until its stores have begun."""
        self._not_loaded: set[str] = set()
        """Requests whose asynchronous load failed before it began, until `finished` reports them."""
        self.counts: dict[str, int | float] = {}

    # -- one step --------------------------------------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Called before any work of the step: end the copies from blocks that the step may overwrite."""
        self._take_up(plan)
        if plan.weigh and self._weights is not None:
            self._report.weights = (plan.weigh, self._weights.initial, self._weights.digest())
        for number, lora in plan.weigh_adapters:
            digest = self._adapters.digest(number, lora) if self._adapters is not None else ""
            self._report.adapters.append((number, digest))
        lost = [
            entry
            for entry in self._stores
            if entry.store.request_id in plan.preempted or entry.store.store_id in plan.cancel
        ]
        for entry in lost:
            entry.job.cancel()
        deadline = self._now() + patience(WAIT_S)
        for entry in lost:
            if not entry.job.wait_gathered(max(0.0, deadline - self._now())):
                # Its job is cancelled and never commits, so a torn copy is never visible.
                logger.warning("a copy from blocks that vLLM reuses is slow (store %d)", entry.store.store_id)
            self._count("stores_preempted", entry.store.request_id in plan.preempted)

    def start_loads(self, *, layerwise: bool = False) -> None:
        """Begin the step's loads and make the forward pass wait for the synchronous ones.

        With `layerwise` each layer waits only for its own section: vLLM calls `wait_layer` before each layer.
        """
        started = self._now()
        self._waits_end_s = started + patience(WAIT_S)
        while self._to_begin:
            load = self._to_begin[0]
            in_time = load.asynchronous or self._now() < self._waits_end_s
            if load.lease is None or self._suspended or not in_time or not self._has_adapter(load.adapter):
                self._cannot_load(load)
            else:
                begun = self._begin_load(load, load.lease)
                (self._loads if load.asynchronous else self._synchronous).append(begun)
            self._note_part(load)
            self._to_begin.popleft()
        if not self._synchronous:
            return
        if not self._mover.sections:
            self.end_loads()
        elif layerwise:
            self._unordered = set(self._mover.sections.values())
        else:
            self._order(None)
        self._count("load_wait_s", self._now() - started)

    def wait_layer(self, name: str) -> None:
        """Make the model, which is about to compute this layer, wait for the layer's section.

        May be called several times for a layer.
        """
        section = self._mover.sections.get(name) if self._synchronous else None
        if section is not None:
            self._order(section)
            self._unordered.discard(section)

    def end_loads(self) -> None:
        """Called once the forward pass is on the device: determine how the synchronous loads ended. Idempotent."""
        failed, self._failed_unbegun = self._failed_unbegun, False
        if self._unordered:
            logger.error(
                "the model computed layers without waiting for their KV to be loaded; the tokens are computed again"
            )
        for loading in self._synchronous:
            if not loading.job.wait(max(0.0, self._waits_end_s - self._now())):
                loading.job.cancel()
        for loading in self._synchronous:
            # A load that has begun must end before its blocks are recomputed; each of its copies has only a few chunks.
            while not loading.job.wait(WAIT_S):
                logger.warning("a copy into blocks of request %s is slow", loading.load.request_id)
            if loading.late or self._unordered:
                loading.job.failed.update(range(len(loading.items)))
            failed |= self._ended_load(loading)
        self._synchronous, self._unordered = [], set()
        self._failures += failed

    def start_stores(self) -> None:
        """Called after the forward pass: begin the step's stores."""
        self.end_loads()
        while self._to_store:
            store = self._to_store[0]
            failed = self._suspended or self._step.failures_seen < self._failures
            if failed or not self._has_adapter(store.adapter):
                self._report.gathered.append(store.store_id)
                self._report.dropped.append(store.store_id)
                self._count("stores_dropped")
            else:
                group = self._groups[store.group]
                blocks = [
                    store.blocks[at : at + group.record_blocks]
                    for at in range(0, len(store.blocks), group.record_blocks)
                ]
                job = group.mover.store(group.identity(store.identity), store, blocks)
                self._stores.append(_Stored(store, job))
            self._to_store.popleft()
        self._awaited |= self._to_await
        self._to_await = set()

    def finished(self) -> tuple[set[str], set[str]]:
        """(requests whose blocks may be freed, requests whose asynchronous load has ended), each named once."""
        if self._step.computes:
            # A report of this step may follow before `start_stores`, and it confirms the synchronous loads.
            self.end_loads()
        else:
            self.start_stores()  # vLLM 0.30 ends such a step without it
        received = set(self._not_loaded)
        running = []
        for loading in self._loads:
            if loading.job.done.is_set():  # checked only once, since the job may end at any time
                self._ended_load(loading)
                received.add(loading.load.request_id)
            else:
                running.append(loading)
        sent = self._awaited - self._settle_stores()
        # State changes only from here on, so that an error above loses no news.
        self._loads = running
        received -= self._still_loading()
        self._not_loaded -= received
        self._awaited -= sent
        return sent, received

    def has_read(self, request_id: str, timeout_s: float) -> bool:
        """Wait until no store reads blocks of this request; returns whether that is so within `timeout_s`."""
        deadline = self._now() + timeout_s
        return not any(store.request_id == request_id for store in self._to_store) and all(
            entry.job.wait_gathered(max(0.0, deadline - self._now()))
            for entry in self._stores
            if entry.store.request_id == request_id
        )

    def report(self) -> WorkerReport | None:
        """The step's report; None if it has no news for the scheduler.

        If stores begin only after a draft model, their news is in the next report.
        """
        report = self._report
        report.failures = self._failures
        report.broken = any(group.mover.broken for group in self._groups)
        step = self._step
        awaited = step.timed or step.others_load or any(not load.asynchronous for load in step.loads)
        if not awaited and not report.says_something():
            return None
        self._report = WorkerReport(report.step)
        return report

    def take_counts(self) -> dict[str, int | float]:
        """Counts since the last call."""
        for group in self._groups:
            for name, amount in group.mover.take_counts().items():
                self._count(name, amount)
        counts, self.counts = self.counts, {}
        return counts

    def suspend(self) -> None:
        """Called before vLLM unmaps the blocks' memory: end all copies, begin none until `resume`. Idempotent.

        Copies that have not begun are dropped; their stores are reported as dropped, their loads as failed.  Raises
        RuntimeError when a copy does not end in time; copying then continues, and the memory must stay mapped.
        """
        self._suspended = True
        self.end_loads()
        for entry in self._stores:
            entry.job.cancel()
        for loading in self._loads:
            loading.job.cancel()
        try:
            self._await_copies()
        except RuntimeError:
            self._suspended = False
            raise

    def resume(self) -> None:
        """Allow copies again: the blocks' memory is back, at the same addresses. Idempotent."""
        self._suspended = False

    def close(self) -> None:
        """Wait up to CLOSE_WAIT_S for stores, stop all copies, and detach from the server."""
        deadline = self._now() + patience(CLOSE_WAIT_S)
        for entry in self._stores:
            if not entry.job.done.wait(max(0.0, deadline - self._now())):
                entry.job.cancel()
        super().close()

    def turn_off(self) -> WorkerOff:
        """After an error of ours: the object that replaces this side until the engine is started again."""
        return WorkerOff(self)

    # -- inside ----------------------------------------------------------------------------------------------

    def _take_up(self, plan: StepPlan) -> None:
        # Asynchronous loads begin first, because a synchronous load may copy in this thread until it has ended.
        loads = deque(sorted(plan.loads, key=lambda load: not load.asynchronous))
        stores, awaited = deque(plan.stores), set(plan.awaited)
        # No state changes before this, so that after an error the plan is accepted either as a whole or not at all.
        self._step, self._to_begin, self._to_store, self._to_await = plan, loads, stores, awaited
        self._report.step = plan.step
        if plan.weigh:
            self._report.weights = (plan.weigh, "", "")  # until the digests are known

    def _has_adapter(self, number: int) -> bool:
        """Whether this worker still has the LoRA adapter that it was asked about; reports the number if not."""
        if not number or (self._adapters is not None and self._adapters.still(number)):
            return True
        if (number, "") not in self._report.adapters:
            self._report.adapters.append((number, ""))
        return False

    def _order(self, section: int | None) -> None:
        """Make the model's subsequent work wait for this section of the synchronous loads; None: for all sections."""
        for loading in self._synchronous:
            left_s = max(0.0, self._waits_end_s - self._now())
            loading.late |= not self._mover.await_section(loading.job, section, left_s)

    def _cannot_load(self, load: Load) -> None:
        """Fail a load that never begins: its blocks are computed."""
        if load.lease is not None:
            self._groups[load.group].client.release([load.lease])
        self._failed(load, load.blocks)
        self._count("load_failed_chunks", batch.count(load.chain))
        if load.asynchronous:
            self._not_loaded.add(load.request_id)
        else:
            self._failed_unbegun = True

    def _begin_load(self, load: Load, lease: LeaseName) -> _Loading:
        begun = self._now()
        group = self._groups[load.group]
        row = EXTENT.size * len(load.slices)
        mine = load.slices.index(group.slice_digest) if group.slice_digest in load.slices else -1
        items = []
        for index in range(batch.count(load.chain)):
            # If the scheduler does not know this slice, it names no extent for it, and the whole load fails.
            offset, length, _, _, _ = (
                EXTENT.unpack_from(load.extents, index * row + mine * EXTENT.size) if mine >= 0 else (0,) * 5
            )
            items.append(
                LoadItem(
                    batch.nth(load.chain, index),
                    offset,
                    length,
                    load.blocks[index * group.record_blocks : (index + 1) * group.record_blocks],
                )
            )
        identity = group.identity(load.identity)
        job = group.mover.load(identity, lease, items, sync=not load.asynchronous)
        return _Loading(load, items, job, begun)

    def _ended_load(self, loading: _Loading) -> bool:
        """Count a load that has ended. Returns whether part of it failed."""
        job = loading.job
        for index in job.failed:
            self._failed(loading.load, loading.items[index].block_ids)
        self._count("loaded_chunks", len(loading.items) - len(job.failed))
        self._count("loaded_bytes", job.bytes)
        self._count("load_s", self._now() - loading.begun_s)
        if job.failed:
            self._count("load_failed_chunks", len(job.failed))
            logger.warning(
                "%d of %d chunks of request %s could not be loaded; their tokens are computed",
                len(job.failed),
                len(loading.items),
                loading.load.request_id,
            )
        return bool(job.failed)

    def _settle_stores(self) -> set[str]:
        """Add the outcomes of stores to the report. Returns the requests whose blocks are still being read."""
        reading = set()
        left = []
        for entry in self._stores:
            if entry.job.gathered.is_set():
                self._report_read(entry)
                if entry.job.done.is_set():
                    self._settle(entry)
                    continue
            else:
                reading.add(entry.store.request_id)
            left.append(entry)
        self._stores = left
        return reading

    def _report_read(self, entry: _Stored) -> None:
        """Report, once, that the store's blocks are not read any more."""
        if not entry.read:
            entry.read = True
            self._report.gathered.append(entry.store.store_id)

    def _settle(self, entry: _Stored) -> None:
        store, outcomes = entry.store, [str(outcome) for outcome in entry.job.outcomes]
        if "cancelled" in outcomes:
            self._report.dropped.append(store.store_id)
        else:
            mask = sum(1 << at for at, outcome in enumerate(outcomes) if outcome in IN_L1)
            self._report.stored.append((store.store_id, mask))
        for outcome in outcomes:
            self._count("store_" + outcome + "_chunks")
        self._count("stored_bytes", entry.job.bytes)

    def _count(self, name: str, amount: int | float = 1) -> None:
        if amount:
            self.counts[name] = self.counts.get(name, 0) + amount


IN_L1 = ("stored", "present", "in_flight")
"""Outcomes of a store after which the chunk is in L1, or will soon be because another process is storing it."""


class WorkerOff(_Copies):
    """Answers vLLM in place of a `WorkerSide` after an error of ours, until the engine is started again.

    All copies under way are cancelled, and no copy begins: loads fail, and stores are dropped.  vLLM gets the blocks of
    a copy back only once the copy has ended.
    """

    def __init__(self, side: WorkerSide) -> None:
        super().__init__(side._groups, by_request=side._by_request, now=side._now)
        self._step = side._step
        self._failures = side._failures + 1
        self._bad_blocks, self._bad_requests = side._bad_blocks, side._bad_requests
        self._awaited = side._awaited | side._to_await
        self._not_loaded, self._open = side._not_loaded, side._open
        self._stores, self._loads = side._stores, [*side._loads, *side._synchronous]
        self._gathered = [*side._report.gathered, *(store.store_id for store in side._to_store)]
        self._unreleased: list[tuple[int, LeaseName]] = []
        """The group and lease of each load that never began and whose lease is not released yet."""
        for load in side._to_begin:
            self._refuse(load)
        for entry in self._stores:
            entry.job.cancel()
        for loading in self._loads:
            loading.job.cancel()

    def before_step(self, plan: StepPlan) -> None:
        """Refuse the step's loads and stores."""
        if plan is self._step:
            return  # the error came after the plan was accepted
        self._step = plan
        self._awaited |= plan.awaited
        self._gathered += [store.store_id for store in plan.stores]
        for load in plan.loads:
            self._refuse(load)

    def start_loads(self, *, layerwise: bool = False) -> None:
        """Release leases."""
        while self._unreleased:
            group, lease = self._unreleased.pop()
            self._groups[group].client.release([lease])

    def wait_layer(self, name: str) -> None:
        """Nothing is loaded."""

    def start_stores(self) -> None:
        """Nothing is stored."""

    def finished(self) -> tuple[set[str], set[str]]:
        """See `WorkerSide.finished`."""
        received, running = set(self._not_loaded), []
        for loading in self._loads:
            load = loading.load
            while not load.asynchronous and not loading.job.wait(WAIT_S):
                logger.warning("a copy into blocks of request %s is slow", load.request_id)
            if not loading.job.done.is_set():
                running.append(loading)
                continue
            self._failed(load, load.blocks)
            if load.asynchronous:
                received.add(load.request_id)
        self._loads = running
        received -= self._still_loading()
        self._not_loaded -= received
        self._gathered += [
            entry.store.store_id for entry in self._stores if entry.job.gathered.is_set() and not entry.read
        ]
        self._stores = [entry for entry in self._stores if not entry.job.gathered.is_set()]
        sent = self._awaited - {entry.store.request_id for entry in self._stores}
        self._awaited -= sent
        return sent, received

    def report(self) -> WorkerReport:
        """The step's report, which turns the scheduler's side off too."""
        gathered, self._gathered = self._gathered, []
        return WorkerReport(self._step.step, gathered, failures=self._failures, broken=True)

    def take_counts(self) -> dict[str, int | float]:
        """Nothing is counted."""
        return {}

    def suspend(self) -> None:
        """See `WorkerSide.suspend`."""
        self._await_copies()

    def resume(self) -> None:
        """Nothing is copied."""

    def _refuse(self, load: Load) -> None:
        self._note_part(load)
        self._failed(load, load.blocks)
        if load.asynchronous:
            self._not_loaded.add(load.request_id)
        if load.lease is not None:
            self._unreleased.append((load.group, load.lease))
