"""Loads: leased chunks on their way from the pool into the engine's blocks, each verified while it is copied.

A synchronous load copies in the calling thread, group after group of `GROUP_BYTES`.  A load in the background begins
one native copy for each group, so that a cancel can stop the copies that are still queued; with `whole` it begins a
single native copy, whose sections the caller can await.  When the last copy has ended, this process's share of the
lease ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from kvstrata.client.copies import Copier, CopyLedger, Mapping, Plan, ScatterItem
from kvstrata.client.handles import LoadItem, LoadJob
from kvstrata.client.identities import Identity, IdentityTable
from kvstrata.client.link import Link
from kvstrata.client.lookups import ReleaseQueue
from kvstrata.keys import batch
from kvstrata.native.core import storage_keys
from kvstrata.observability.load_line import LoadLine
from kvstrata.patience import patience
from kvstrata.rpc import wire
from kvstrata.rpc.wire import LoadRate
from kvstrata.types import LeaseName

log = logging.getLogger(__name__)

SYNC_LOAD_S = 1.0
"""Time after which a synchronous load begins no further group of chunks."""
GROUP_BYTES = 128 << 20
"""Size of a group; a load can be stopped between two groups."""
BAD_CODES = (1, 2)
"""Codes of a copy whose record is damaged, or belongs to another chunk or identity."""
NOT_BEGUN = -2


class Loads(msgspec.Struct, eq=False):
    """All loads of one process.  `begin` from any thread; a load ends in the thread that copied it."""

    _link: Link
    _identities: IdentityTable
    _ledger: CopyLedger
    _copier: Copier
    _releases: ReleaseQueue
    _slice_digest: bytes
    """Digest of the slice that this process reads; b"" for a scheduler, which reads none."""
    loaded_bytes: int = 0
    corrupt_chunks: int = 0
    _line: LoadLine = msgspec.field(default_factory=LoadLine)
    """Fits the time of loads. For the I/O thread only."""
    _rate: LoadRate | None = None

    def begin(
        self,
        identity: Identity,
        lease: LeaseName,
        items: Sequence[LoadItem],
        plan: Plan,
        *,
        sync: bool,
        whole: bool,
    ) -> LoadJob:
        """See `CacheClient.load`."""
        if not self._slice_digest:
            raise ValueError("a scheduler has no slice and cannot load")
        job = LoadJob(self._cancel)
        mapping = None if self._link.closing or not items else self._ledger.begin_load(lease)
        if mapping is None:
            job.finish(range(len(items)), 0)
            self._releases.end([lease], group=False)
            return job
        load = _Load(job, identity, lease, items, plan)
        try:
            chain = b"".join(item.key for item in items)
            load.prepare(mapping, storage_keys(identity.root, chain, self._slice_digest))
            if sync:
                load.codes.extend(self._scatter_now(load))
                self._link.post(partial(self._tell, load, self._loaded(load)))
            else:
                self._scatter_later(load, whole)
        except ValueError:
            self._ledger.end_load(lease)
            self._link.post(lambda: self._releases.add([lease], group=False))
            raise
        return job

    def rate(self) -> LoadRate | None:
        """The process's load rate; updated only when it has changed by more than a tenth. In the I/O thread."""
        fitted = self._line.fitted()
        if fitted is not None:
            now = LoadRate.of(*fitted)
            if self._rate is None or now.differs(self._rate):
                self._rate = now
        return self._rate

    def _cancel(self, job: LoadJob) -> None:
        """Called by `LoadJob.cancel` in any thread."""
        if not self._link.forked:
            for copy_job in job.copy_jobs:
                self._copier.cancel(copy_job)

    def _scatter_now(self, load: _Load) -> list[int]:
        """Copy group after group, until all are copied, `SYNC_LOAD_S` has passed or the load is cancelled."""
        items = load.scatter
        codes: list[int] = []
        ends_s = time.monotonic() + patience(SYNC_LOAD_S)
        for group in _groups(items):
            if codes and (time.monotonic() > ends_s or load.job.cancelled):
                return codes + [NOT_BEGUN] * (len(items) - len(codes))
            codes += self._copier.run_scatter(load.plan, group)
        return codes

    def _scatter_later(self, load: _Load, whole: bool) -> None:
        """Begin the native copies."""
        if not load.scatter:
            self._link.post(partial(self._tell, load, self._loaded(load)))
            return
        groups = [load.scatter] if whole else list(_groups(load.scatter))
        load.groups_left = len(groups)
        load.codes = [NOT_BEGUN] * len(load.scatter)
        position = 0
        for group in groups:
            ended = partial(self._group_loaded, load, position)
            position += len(group)
            try:
                job = self._copier.begin("scatter", load.plan, group, ended, may_wait=not whole)
                load.job.copy_jobs.append(job)
            except ValueError as error:
                if group is groups[0]:
                    raise
                log.error("chunks of a load cannot be copied: %s", error)
                self._link.post(partial(ended, [NOT_BEGUN] * len(group)))

    def _group_loaded(self, load: _Load, position: int, codes: list[int]) -> None:
        """Handle the end of one native copy. In the I/O thread."""
        load.codes[position : position + len(codes)] = codes
        load.groups_left -= 1
        if load.groups_left == 0:
            self._tell(load, self._loaded(load))

    def _loaded(self, load: _Load) -> list[bytes]:
        """All copies have ended: finish the job, and return the keys of chunks that failed their checksum.

        In the calling thread of a synchronous or empty load, else in the I/O thread.
        """
        items, lease = load.items, load.lease
        self._ledger.end_load(lease)
        whole = {i for i, code in zip(load.copied, load.codes, strict=True) if code == 0}
        bad = [items[i].key for i, code in zip(load.copied, load.codes, strict=True) if code in BAD_CODES]
        size = sum(load.plan.payload_bytes(len(items[i].block_ids)) for i in whole)
        self.loaded_bytes += size
        load.job.finish((i for i in range(len(items)) if i not in whole), size)
        load.took = size, time.monotonic() - load.began_s
        return bad

    def _tell(self, load: _Load, bad: Sequence[bytes]) -> None:
        """Report chunks that failed their checksum, and release the lease. In the I/O thread."""
        if load.took[0] and not load.job.cancelled:
            self._line.add(*load.took)
        if bad:
            self.corrupt_chunks += len(bad)
            log.error(
                "%d chunks in the cache failed their checksum; their tokens are computed instead", len(bad)
            )
            self._link.tell(partial(self._corrupt, load.identity, b"".join(bad)))
        self._releases.add([load.lease], group=False)

    def _corrupt(self, identity: Identity, keys: bytes, seq: int, remaining_ms: int) -> wire.Corrupt | None:
        """The message about bad chunks; None until the server knows the identity. Raises Refused."""
        declared = self._identities.declared(identity)
        if declared is None:
            return None
        return wire.Corrupt(seq, declared.identity_id, keys)


class _Load(msgspec.Struct, eq=False):
    """A load under way."""

    job: LoadJob
    identity: Identity
    lease: LeaseName
    items: Sequence[LoadItem]
    plan: Plan
    copied: list[int] = []
    """Indices of the items that are copied, in the order of `scatter` and `codes`."""
    scatter: list[ScatterItem] = []
    codes: list[int] = []
    groups_left: int = 0
    began_s: float = msgspec.field(default_factory=lambda: time.monotonic())
    took: tuple[int, float] = 0, 0.0
    """Loaded bytes, and the seconds that they took; set when all copies have ended."""

    def prepare(self, mapping: Mapping, own_keys: bytes) -> None:
        """Fill `scatter`, without items that are not inside the pool."""
        for i, item in enumerate(self.items):
            try:
                address = mapping.address(item.offset_bytes, item.length_bytes)
            except ValueError as error:
                log.error("a leased chunk cannot be loaded: %s", error)
                continue
            self.copied.append(i)
            wanted = batch.nth(own_keys, i), self.identity.root
            self.scatter.append((item.block_ids, address, item.length_bytes, wanted))


def _groups(items: Sequence[ScatterItem]) -> Iterator[Sequence[ScatterItem]]:
    """Runs of items that have at most `GROUP_BYTES` together; a larger item is a run of its own."""
    first = 0
    while first < len(items):
        end = first + 1
        size = items[first][2]
        while end < len(items) and size + items[end][2] <= GROUP_BYTES:
            size += items[end][2]
            end += 1
        yield items[first:end]
        first = end
