"""Which bytes of the pool this process may touch now, and the native threads that touch them.

Invariants
1. A copy begins only in an epoch that is open here, and an epoch is open from its attach until `quiesce` closed it:
   what the server leased or reserved to this process stays ours until then, also while the server is dead, and also
   after the next server adopted the pool (design: leases end with their process or its word, not with a clock).
2. `quiesce` closes epochs only when no copy of them runs, and no copy of them begins afterwards.
3. A mapping lives as long as an open epoch or a running copy refers to it, so a server with a new pool takes no memory
   away from under a copy.
4. A lease serves one load of this process; a revoked or released one serves none.
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
from kvstrata.native.copying import RecordSpec
from kvstrata.native.pool import ExtentsMap, IndexReader
from kvstrata.types import LeaseName

log = logging.getLogger(__name__)

REMEMBERED_LEASES = 8192
REFUSED = -1
"""Code of an item that the engine did not take."""

Kind = Literal["gather", "scatter"]

GatherItem = tuple[Sequence[int], int, int, RecordSpec]
"""(block ids, extent address, extent length, what to write into the record's header)"""
ScatterItem = tuple[Sequence[int], int, int, bytes]
"""(block ids, extent address, extent length, expected storage key)"""


class Plan(Protocol):
    """Describes an engine's blocks for the copy engine that goes with it; to the client only sizes."""

    @property
    def section_count(self) -> int: ...
    def payload_bytes(self, n_blocks: int) -> int: ...


class Engine(Protocol):
    """What copies between blocks and records: `native.copying.CopyEngine`, or one for blocks on a device."""

    @property
    def event_fd(self) -> int: ...
    def submit(self, job_id: int, kind: Kind, plan: Any, items: Any) -> bool: ...
    def completions(self) -> list[tuple[int, list[int]]]: ...
    def run(self, kind: Kind, plan: Any, items: Any) -> list[int]: ...
    def cancel(self, job_id: int) -> bool: ...
    def close(self) -> None: ...


@runtime_checkable
class DeviceEngine(Engine, Protocol):
    """One for blocks on a device, `native.cuda.CudaCopyEngine`: it tells which of its ways of copying it took."""

    @property
    def engine(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def measured(self) -> dict[str, float]: ...


class Mapping:
    """One pool as this process sees it. Unmapped when nobody refers to it any more."""

    __slots__ = ("__weakref__", "extents", "index", "pool_id")

    def __init__(self, pool_id: bytes, index_fd: int, extents_fd: int, extents_bytes: int) -> None:
        """The descriptors stay the caller's. Raises SegmentError or OSError."""
        self.pool_id = pool_id
        self.index = IndexReader(index_fd)
        if self.index.pool_id != pool_id:
            raise SegmentError(
                f"the index belongs to pool {self.index.pool_id.hex()}, the server said {pool_id.hex()}",
                field="pool_id",
            )
        self.extents = ExtentsMap(extents_fd, extents_bytes)

    def address(self, offset_bytes: int, length_bytes: int) -> int:
        """Where an extent lies here. Raises ValueError for one that is not inside the pool."""
        if offset_bytes < 0 or length_bytes <= 0 or offset_bytes + length_bytes > self.extents.length:
            raise ValueError(
                f"extent [{offset_bytes}, {offset_bytes + length_bytes}) is not inside the pool of "
                f"{self.extents.length} bytes"
            )
        return self.extents.address + offset_bytes


class Pages(Protocol):
    """What prepares a mapping's pages for copies, in the background: `PageWarmer`, or `Pinner` for a device."""

    def warm(self, mapping: Mapping) -> None: ...
    def forget(self, mapping: Mapping) -> None: ...
    def stop(self) -> None: ...
    def close(self, timeout_s: float) -> None: ...
    def stats(self) -> dict[str, int | float | str]: ...


class CopyLedger:
    """Who may touch what. Any thread; each method is one short critical section."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Mapping] = {}
        self._running: Counter[int] = Counter()
        self._lease_running: set[LeaseName] = set()
        self._spent: OrderedDict[LeaseName, None] = OrderedDict()

    def attached(self, epoch: int, pool_id: bytes, mapping: Callable[[], Mapping]) -> Mapping:
        """Open an epoch, with the mapping of that pool if there is one, else with `mapping()`."""
        with self._lock:
            known = next((m for m in self._open.values() if m.pool_id == pool_id), None)
        opened = known or mapping()
        with self._lock:
            self._open[epoch] = opened
        return opened

    def begin_gather(self, epoch: int) -> Mapping | None:
        """Account for a copy into reserved extents of `epoch`; None when it may not begin. Then `end`."""
        with self._lock:
            mapping = self._open.get(epoch)
            if mapping is not None:
                self._running[epoch] += 1
            return mapping

    def end_gather(self, epoch: int) -> None:
        """A copy of `begin_gather` has ended."""
        with self._lock:
            self._running[epoch] -= 1

    def begin_load(self, lease: LeaseName) -> Mapping | None:
        """Account for copies out of leased extents; None when they may not begin. Then `end_load`."""
        with self._lock:
            mapping = self._open.get(lease.epoch)
            if mapping is None or lease in self._spent:
                return None
            self._spend(lease)
            self._running[lease.epoch] += 1
            self._lease_running.add(lease)
            return mapping

    def end_load(self, lease: LeaseName) -> None:
        """The copies of `begin_load` have ended."""
        with self._lock:
            self._running[lease.epoch] -= 1
            self._lease_running.discard(lease)

    def spend(self, leases: Iterable[LeaseName]) -> list[LeaseName]:
        """No load begins under these any more; those under which none runs now, whose share can be released."""
        with self._lock:
            idle = []
            for lease in leases:
                self._spend(lease)
                if lease not in self._lease_running:
                    idle.append(lease)
            return idle

    def take_back(self, lease: LeaseName) -> bool:
        """No load begins under it any more; False, and nothing changes, where one has begun or it was released."""
        with self._lock:
            if lease in self._spent or lease in self._lease_running:
                return False
            self._spend(lease)
            return True

    def quiesce(self, epoch: int) -> set[Mapping] | None:
        """Close all epochs but this one if no copy of them runs, else None.

        Returns the mappings that no copy will touch any more.
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
        """No epoch is open any more, and what no copy uses is unmapped."""
        with self._lock:
            self._open.clear()

    @property
    def n_running(self) -> int:
        """Copies accounted for."""
        with self._lock:
            return self._running.total()

    def _spend(self, lease: LeaseName) -> None:
        self._spent[lease] = None
        if len(self._spent) > REMEMBERED_LEASES:
            self._spent.popitem(last=False)


class Copier:
    """Jobs for a copy engine: begun from any thread, their ends are told in the I/O thread.

    The engine is this object's from now on.  Plans must be of its kind, and are only handed through.

    A job that the engine's queue has no room for waits here and begins when another one ends, unless it was cancelled
    by then.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._ended: dict[int, Callable[[list[int]], None]] = {}
        self._waiting: dict[int, tuple[Kind, Plan, Sequence[GatherItem] | Sequence[ScatterItem]]] = {}
        self._refused: dict[int, int] = {}
        """Jobs that ended without the engine, and how many items they had; not told yet."""
        self.event_fd = self._engine.event_fd
        """Readable when `collect` has something to do."""

    @property
    def n_jobs(self) -> int:
        """Jobs that have not ended, or whose end was not told yet."""
        return len(self._ended)

    def begin(
        self,
        kind: Kind,
        plan: Plan,
        items: Sequence[GatherItem] | Sequence[ScatterItem],
        ended: Callable[[list[int]], None],
        *,
        may_wait: bool = True,
    ) -> int:
        """Copy in the background; `ended(codes)` is called in the I/O thread, 0 for each item that was copied.

        A job that may not wait for room in the engine's queue ends uncopied where there is none.  Returns the job's
        number.  Raises ValueError when the engine refuses the items; nothing is copied then.
        """
        job = next(self._ids)
        self._ended[job] = ended
        try:
            with self._lock:
                if (may_wait and self._waiting) or not self._engine.submit(job, kind, plan, items):
                    self._waiting[job] = (kind, plan, items)
        except ValueError:
            del self._ended[job]
            raise
        if not may_wait and job in self._waiting:
            self.cancel(job)
        return job

    def cancel(self, job: int) -> None:
        """Items not begun are not copied and end with a code other than 0. The job's end is told as ever."""
        with self._lock:
            waiting = self._waiting.pop(job, None)
            if waiting is None:
                self._engine.cancel(job)
                return
            _, _, items = waiting
            self._refused[job] = len(items)
        os.eventfd_write(self.event_fd, 1)

    def collect(self) -> None:
        """Tell the ends of jobs, then begin waiting ones. I/O thread only."""
        for job, codes in self._engine.completions():
            self._ended.pop(job)(codes)
        with self._lock:
            self._begin_waiting()
            refused, self._refused = self._refused, {}
        for job, n_items in refused.items():
            self._ended.pop(job)([REFUSED] * n_items)

    def _begin_waiting(self) -> None:
        while self._waiting:
            job, (kind, plan, items) = next(iter(self._waiting.items()))
            try:
                if not self._engine.submit(job, kind, plan, items):
                    return
            except ValueError as error:
                log.error("the copy engine refused a job: %s", error)
                self._refused[job] = len(items)
            del self._waiting[job]

    def run_scatter(self, plan: Plan, items: Sequence[ScatterItem]) -> list[int]:
        """Copy now, in this thread and the engine's; one code per item. Raises ValueError as `begin`."""
        return self._engine.run("scatter", plan, items)

    def close(self) -> None:
        """Ends the engine's threads after the items they are at; jobs still running are not told."""
        self._engine.close()
