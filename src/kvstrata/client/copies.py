"""Tracks which bytes of the pool this process may touch now, and submits copies of them to native threads.

Invariants
1. A copy begins only in an epoch that is open here.  An epoch is open from its attach until `quiesce` closes it: until
   then the bytes that the server leased or reserved for this process stay ours, even while that server is dead, and
   even after the next server has adopted the pool (only its process's release or death ends a lease, never a clock).
2. `quiesce` closes an epoch only when no copy of it runs, and no copy of it begins afterwards.
3. A mapping lives as long as an open epoch or a running copy refers to it, so a copy never loses its memory to a new
   server's pool.
4. A lease serves one load of this process; a revoked or released lease serves none.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from kvstrata.errors import SegmentError
from kvstrata.native.core import ExtentsMap, IndexReader, RecordSpec
from kvstrata.rpc.wire import MAX_SHORT_TEXT, DeviceCopies
from kvstrata.types import LeaseName

log = logging.getLogger(__name__)

REMEMBERED_LEASES = 8192
REFUSED = -1
"""Code of an item that the copy engine did not accept."""

Direction = Literal["gather", "scatter"]
"""Blocks into extents, or extents into blocks."""

GatherItem = tuple[Sequence[int], int, int, RecordSpec]
"""(block ids, extent address, extent length, fields of the record's header)"""
ScatterItem = tuple[Sequence[int], int, int, tuple[bytes, bytes]]
"""(block ids, extent address, extent length, (expected storage key, expected identity root))"""


class Plan(Protocol):
    """Describes an engine's blocks to its copy engine; the client itself reads only the sizes."""

    @property
    def section_count(self) -> int: ...
    def payload_bytes(self, n_blocks: int) -> int: ...


class BlockCopyEngine(Protocol):
    """Copies between blocks and records: `native.copying.CopyEngine`, or one for blocks on a device."""

    @property
    def event_fd(self) -> int: ...
    def submit(self, job_id: int, direction: Direction, plan: Any, items: Any) -> bool: ...
    def completions(self) -> list[tuple[int, list[int]]]: ...
    def run(self, direction: Direction, plan: Any, items: Any) -> list[int]: ...
    def cancel(self, job_id: int) -> bool: ...
    def close(self) -> None: ...


@runtime_checkable
class DeviceCopyEngine(BlockCopyEngine, Protocol):
    """A copy engine for blocks on a device (`native.cuda.CudaCopyEngine`), and its way of copying."""

    @property
    def engine(self) -> str: ...
    @property
    def reason(self) -> str: ...


class Mapping:
    """This process's mapping of one pool. Unmapped when nothing refers to it any more."""

    __slots__ = ("__weakref__", "extents", "index", "pool_id")

    def __init__(
        self, pool_id: bytes, index_fd: int, extents_fd: int, extents_bytes: int, *, writable: bool
    ) -> None:
        """The descriptors stay the caller's. `writable`: this process stores. Raises SegmentError or OSError."""
        self.pool_id = pool_id
        self.index = IndexReader(index_fd)
        if self.index.pool_id != pool_id:
            raise SegmentError(
                f"the index belongs to pool {self.index.pool_id.hex()}, the server said {pool_id.hex()}",
                field="pool_id",
            )
        self.extents = ExtentsMap(extents_fd, extents_bytes, writable)

    def address(self, offset_bytes: int, length_bytes: int) -> int:
        """Address of an extent in this process. Raises ValueError for one that is not inside the pool."""
        if offset_bytes < 0 or length_bytes <= 0 or offset_bytes + length_bytes > self.extents.length:
            raise ValueError(
                f"extent [{offset_bytes}, {offset_bytes + length_bytes}) is not inside the pool of "
                f"{self.extents.length} bytes"
            )
        return self.extents.address + offset_bytes


class Pages(Protocol):
    """Prepares a mapping's pages for copies, in the background: `PageWarmer`, or `Pinner` for a device."""

    def warm(self, mapping: Mapping) -> None: ...
    def forget(self, mapping: Mapping) -> None: ...
    def stop(self) -> None: ...
    def close(self, timeout_s: float) -> None: ...
    def stats(self) -> dict[str, int | float | str]: ...


def device_copies(device: DeviceCopyEngine, pages: Pages) -> DeviceCopies:
    """The message to the server: how blocks on a device are copied, and how much of the pool is pinned for that."""
    stats = pages.stats()
    return DeviceCopies(
        device.engine,
        int(stats.get("pinned_bytes", 0)),
        str(stats.get("pin_refusal", ""))[:MAX_SHORT_TEXT],
    )


class CopyLedger:
    """Tracks which copies may begin and which are running. Any thread; each method is one short critical section."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Mapping] = {}
        self._running: Counter[int] = Counter()
        self._lease_running: set[LeaseName] = set()
        self._spent: OrderedDict[LeaseName, None] = OrderedDict()

    def attached(self, epoch: int, pool_id: bytes, mapping: Callable[[], Mapping]) -> Mapping:
        """Open an epoch, with the mapping of that pool if an open epoch has it, else with `mapping()`."""
        with self._lock:
            known = next((m for m in self._open.values() if m.pool_id == pool_id), None)
        opened = known or mapping()
        with self._lock:
            self._open[epoch] = opened
        return opened

    def begin_gather(self, epoch: int) -> Mapping | None:
        """Count a copy into reserved extents of `epoch` as running, until `end_gather`; None when it may not begin."""
        with self._lock:
            mapping = self._open.get(epoch)
            if mapping is not None:
                self._running[epoch] += 1
            return mapping

    def end_gather(self, epoch: int) -> None:
        """End a copy of `begin_gather`."""
        with self._lock:
            self._running[epoch] -= 1

    def begin_load(self, lease: LeaseName) -> Mapping | None:
        """Count copies out of leased extents as running, until `end_load`; None when they may not begin."""
        with self._lock:
            mapping = self._open.get(lease.epoch)
            if mapping is None or lease in self._spent:
                return None
            self._spend(lease)
            self._running[lease.epoch] += 1
            self._lease_running.add(lease)
            return mapping

    def end_load(self, lease: LeaseName) -> None:
        """End the copies of `begin_load`."""
        with self._lock:
            self._running[lease.epoch] -= 1
            self._lease_running.discard(lease)

    def spend(self, leases: Iterable[LeaseName]) -> list[LeaseName]:
        """Prevent further loads under these leases. Returns the leases that no load uses; the caller releases them."""
        with self._lock:
            idle = []
            for lease in leases:
                self._spend(lease)
                if lease not in self._lease_running:
                    idle.append(lease)
            return idle

    def take_back(self, lease: LeaseName) -> bool:
        """Prevent loads under this lease. Returns False, unchanged, if one has begun or the lease was released."""
        with self._lock:
            if lease in self._spent or lease in self._lease_running:
                return False
            self._spend(lease)
            return True

    def quiesce(self, epoch: int) -> set[Mapping] | None:
        """Close all epochs but this one, and return the mappings that no copy will touch any more.

        Returns None, and closes nothing, if a copy of those epochs runs.
        """
        with self._lock:
            older = [e for e in self._open if e != epoch]
            if any(self._running[e] for e in older):
                return None
            closed = set()
            for e in older:
                closed.add(self._open.pop(e))
                del self._running[e]
            return closed - set(self._open.values())

    def close(self) -> None:
        """Close all epochs, which unmaps every mapping that no copy uses."""
        with self._lock:
            self._open.clear()

    @property
    def n_running(self) -> int:
        """Number of running copies."""
        with self._lock:
            return self._running.total()

    def _spend(self, lease: LeaseName) -> None:
        self._spent[lease] = None
        if len(self._spent) > REMEMBERED_LEASES:
            self._spent.popitem(last=False)


class Copier:
    """Submits jobs to a copy engine. Any thread may begin a job; the I/O thread handles its end.

    This object owns the copy engine.  Plans must be of the engine's kind; they are passed on unread.

    A job that finds the copy engine's queue full waits here until another job ends or the waiting job is cancelled.
    """

    def __init__(self, engine: BlockCopyEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._ended: dict[int, Callable[[list[int]], None]] = {}
        self._waiting: dict[int, tuple[Direction, Plan, Sequence[GatherItem] | Sequence[ScatterItem]]] = {}
        self._refused: dict[int, int] = {}
        """Jobs that ended without reaching the copy engine and are not reported yet, with their number of items."""
        self.event_fd = self._engine.event_fd
        """Readable when `collect` has something to do."""

    def begin(
        self,
        direction: Direction,
        plan: Plan,
        items: Sequence[GatherItem] | Sequence[ScatterItem],
        ended: Callable[[list[int]], None],
        *,
        may_wait: bool = True,
    ) -> int:
        """Copy in the background; the I/O thread calls `ended(codes)`, with 0 for each item that was copied.

        Without `may_wait`, a job that finds the copy engine's queue full ends uncopied.  Returns the job's number.
        Raises ValueError when the copy engine refuses the items; nothing is copied then.
        """
        job = next(self._ids)
        self._ended[job] = ended
        try:
            with self._lock:
                if (may_wait and self._waiting) or not self._engine.submit(job, direction, plan, items):
                    self._waiting[job] = (direction, plan, items)
        except ValueError:
            del self._ended[job]
            raise
        if not may_wait and job in self._waiting:
            self.cancel(job)
        return job

    def cancel(self, job: int) -> None:
        """Copy no further items; skipped items end with a code other than 0. The job's end is reported as usual."""
        with self._lock:
            waiting = self._waiting.pop(job, None)
            if waiting is None:
                self._engine.cancel(job)
                return
            _, _, items = waiting
            self._refused[job] = len(items)
        os.eventfd_write(self.event_fd, 1)

    def collect(self) -> None:
        """Report the jobs that have ended, then begin waiting ones. I/O thread only."""
        for job, codes in self._engine.completions():
            self._ended.pop(job)(codes)
        with self._lock:
            self._begin_waiting()
            refused, self._refused = self._refused, {}
        for job, n_items in refused.items():
            self._ended.pop(job)([REFUSED] * n_items)

    def _begin_waiting(self) -> None:
        while self._waiting:
            job, (direction, plan, items) = next(iter(self._waiting.items()))
            try:
                if not self._engine.submit(job, direction, plan, items):
                    return
            except ValueError as error:
                log.error("the copy engine refused a job: %s", error)
                self._refused[job] = len(items)
            del self._waiting[job]

    def run_scatter(self, plan: Plan, items: Sequence[ScatterItem]) -> list[int]:
        """Copy now, in this thread and the copy engine's. Returns a code per item; raises ValueError like `begin`."""
        return self._engine.run("scatter", plan, items)

    def close(self) -> None:
        """End the copy engine's threads after the items that they are copying; jobs still running are not reported."""
        self._engine.close()
