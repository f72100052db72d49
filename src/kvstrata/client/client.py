"""The cache client of one engine process: what a connector calls.

No method blocks on the server: it changes shared state, hands a closure to the I/O thread and returns.  Whatever is
wrong with the server, a lookup is a miss, a store is refused and a load fails its items, each within its time; when
the server is back, so is the cache, with no call needed.

Threads: callers (any) · one I/O thread (`kvstrata.client.link`) · native copy threads · short-lived ones that attach
and that map the pool's pages.  In a forked child the client is dead: it refuses everything and touches nothing of the
parent.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvstrata.client.calls import (
    Identity,
    LoadItem,
    LoadJob,
    LookupCall,
    LookupResult,
    StoreJob,
    StoreOutcome,
    miss,
)
from kvstrata.client.copies import (
    Copier,
    CopyLedger,
    DeviceEngine,
    Engine,
    Mapping,
    Pages,
    Plan,
    ScatterItem,
)
from kvstrata.client.identities import IdentityTable
from kvstrata.client.link import Link
from kvstrata.client.releases import ReleaseQueue
from kvstrata.client.requests import Kind, Pending
from kvstrata.client.stores import StoreQueue, StoreRequest
from kvstrata.client.warmup import PageWarmer
from kvstrata.config.model import GB, ClientSettings
from kvstrata.config.private_file import read_token_file
from kvstrata.errors import DeadlineExceeded, KvstrataError, Unavailable, UnknownIdentity
from kvstrata.keys import ChunkHasher
from kvstrata.memory.attach.client import Attachment
from kvstrata.memory.paths import socket_dir
from kvstrata.native.copying import CopyEngine, record_bytes
from kvstrata.native.hashing import storage_keys
from kvstrata.native.pool import IndexReader
from kvstrata.rpc import wire
from kvstrata.types import (
    EXTENT,
    KEY_BYTES,
    LayoutIdentity,
    LeaseName,
    MissReason,
    RequestIdentity,
    Role,
    Slice,
)

log = logging.getLogger(__name__)

SYNC_LOAD_S = 1.0
"""A synchronous load begins no further group of chunks after this long."""
GROUP_BYTES = 128 << 20
"""A load is copied in groups of this size; between two of them it can be stopped."""
LOOKUP_MARGIN_MS = 10
"""The server is given a little less than the caller's deadline, so that its answer still counts."""
KEPT_CHAINS = 64
PEEK_HEARTBEAT_S = 0.9
"""An absence seen in the index counts while the server's heartbeat is younger than this."""
CLOSE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0


class CacheClient:
    """See the module. One per engine process (or several, with sessions of their own)."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        role: Role,
        layout: LayoutIdentity,
        group: bytes,
        engine_slices: int,
        slice: Slice | None = None,
        facts: dict[str, Any] | None = None,
        engine: Engine | None = None,
        pages: Pages | None = None,
        registers_memory: bool = False,
    ) -> None:
        """`group` are 16 bytes that all processes of one engine share, `engine_slices` how many slices they hold.

        `slice` is what this process reads and writes, None for a scheduler.  `engine` copies and
        `pages` prepares the pool's pages for it (the client closes both); by default blocks are in host memory.
        With `registers_memory` a device may access the pool on behalf of this process, see `wire.AttachRequest`.
        Raises ValueError for senseless arguments and ConfigError for unusable settings; never because of the server.
        """
        if len(group) != wire.SESSION_BYTES:
            raise ValueError(f"group has {len(group)} bytes, must have {wire.SESSION_BYTES}")
        if not 1 <= engine_slices <= wire.MAX_SLICES:
            raise ValueError(f"engine_slices is {engine_slices}, must be 1 to {wire.MAX_SLICES}")
        if slice is None and role is not Role.SCHEDULER:
            raise ValueError(f"a {role.value} needs the slice that it reads and writes")
        _token(settings)  # it is read at every attach, so that it can be changed; what is wrong now shows now
        self._settings = settings
        self._layout = layout
        self._role = role
        self._group = group
        self._engine_slices = engine_slices
        self._slice = slice
        self._facts = facts
        self._registers_memory = registers_memory
        self.session = secrets.token_bytes(wire.SESSION_BYTES)
        self.slice_digest = slice.digest() if slice is not None else b""
        """Of the own slice; b"" for a scheduler."""
        self._index: IndexReader | None = None
        self._chains: OrderedDict[bytes, bytes] = OrderedDict()
        self._chains_lock = threading.Lock()
        self._closing = False
        self._forked = False
        self._drained = threading.Event()
        self._must_quiesce = False
        self._live: dict[int, LookupCall] = {}
        self._asking: dict[LookupCall, Pending] = {}
        self._lookups = self._hits = self._revoked = self._loaded_bytes = self._corrupt = 0
        self._ledger = CopyLedger()
        self._device = engine if isinstance(engine, DeviceEngine) else None
        self._copier = Copier(engine or CopyEngine(threads=settings.copy_threads))
        self._pages: Pages = pages or PageWarmer()
        self._warmed_pool = b""
        self._link = Link(socket_dir(settings.socket_dir, settings.port), self.session, self)
        only = (self.slice_digest,) if slice is not None and engine_slices == 1 else ()
        self._identities = IdentityTable(self._link, only)
        self._releases = ReleaseQueue(self._link, self._released)
        self._stores = StoreQueue(
            self._link,
            self._ledger,
            self._copier,
            slice_digest=self.slice_digest,
            chunk_tokens=layout.chunk_tokens,
            backlog_bytes=int(settings.max_store_backlog_gb * GB),
            declared=self._identities.declared,
        )
        _clients.add(self)

    # Life.

    def start(self) -> None:
        """Begin to attach, in the background. Returns at once, whether or not there is a server."""
        self._link.start({self._copier.event_fd: self._copier.collect})

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End in order: running copies end, commits are answered, the server forgets this process. Idempotent.

        Takes at most about `timeout_s`.  What cannot be ended in that time is left to the end of the process.
        """
        if self._forked or self._closing:
            return
        self._closing = True
        self._index = None
        if not self._link.alive:
            self._link.close()
            self._end_copies(timeout_s)
            return
        ends_s = time.monotonic() + timeout_s
        self._pages.stop()
        self._link.post(self._close_asking)
        self._drained.wait(0.8 * timeout_s)
        quiet = self._ledger.n_running == 0
        self._link.stop(bye=quiet)
        if not self._link.join(max(0.1, ends_s - time.monotonic())) or not quiet:
            log.warning(
                "the cache client did not end within %.1f s; its threads end with the process", timeout_s
            )
            return
        self._end_copies(max(0.1, ends_s - time.monotonic()))

    def _end_copies(self, timeout_s: float) -> None:
        self._ledger.close()
        self._pages.close(timeout_s)
        self._copier.close()

    @property
    def connected(self) -> bool:
        """A server is attached and answers."""
        return self._link.usable

    @property
    def error(self) -> str:
        """Why it is not connected, for the log; empty when it is."""
        return self._link.error

    @property
    def epoch(self) -> int:
        """Of the server attached last; 0 before the first."""
        return self._link.epoch

    @property
    def has_l2(self) -> bool:
        """Whether a miss in L1 may still be a hit."""
        index = self._index
        return index is not None and index.has_l2

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk of this engine."""
        return self._layout.chunk_tokens

    @property
    def slices(self) -> tuple[bytes, ...]:
        """Digests of the engine's slices, sorted; empty until all workers have attached."""
        return self._identities.slices

    # Requests.

    def identity(self, request: RequestIdentity) -> Identity:
        """The identity of requests like this one; the same object for equal requests. Never blocks."""
        known = self._identities.get(request)
        if known is not None:
            return known
        identity = self._identities.put(Identity(self, self._layout, request))
        self._link.post(lambda: self._identities.declare(identity))
        return identity

    def peek(self, identity: Identity, chain: bytes | ChunkHasher) -> int:
        """Leading chunks of the chain that are in L1 now, in all slices: a guess that promises nothing.

        Reads shared memory only; 0 while slices or server are not known, or the server's heartbeat is old.
        Give the request's hasher rather than its chain: then storage keys are derived once per chunk.
        """
        index, slices = self._index, self.slices
        if index is None or not slices:
            return 0
        keys = chain.storage_keys(slices) if isinstance(chain, ChunkHasher) else self._derived(chain, slices)
        return index.peek(keys, len(slices)) if keys else 0

    def present(self, chain: bytes) -> list[bool] | None:
        """For each chain key by itself whether its chunk is in L1 now, in all slices; None when that cannot be told.

        Reads shared memory only, and promises nothing.
        """
        index, slices = self._index, self.slices
        if index is None or not slices or not self._link.usable or index.heartbeat_age_s > PEEK_HEARTBEAT_S:
            return None
        keys, row = storage_keys(chain, b"".join(slices)), KEY_BYTES * len(slices)
        there = [index.peek(keys[at : at + row], len(slices)) == 1 for at in range(0, len(keys), row)]
        # A peek answers 0 as soon as the heartbeat is older than a second.
        return there if index.heartbeat_age_s <= PEEK_HEARTBEAT_S else None

    def lookup(
        self,
        identity: Identity,
        chain: bytes | ChunkHasher,
        *,
        request_id: str,
        probe: bytes = b"",
        deadline_ms: int | None = None,
    ) -> LookupCall:
        """Ask how many leading chunks there are, and lease them for the whole engine group. Never blocks.

        Without a server that answers, the call is done at once: a miss.  The lease belongs to all processes of the
        group; each ends its share by a load or by `release`.  Until it is claimed (`LookupCall.claim`) or a load of
        this process begins under it, the server may revoke it: claim it before it is promised to anybody.
        """
        if isinstance(chain, ChunkHasher):
            probe = probe or chain.probe
            chain = chain.chain
        if len(chain) % KEY_BYTES:
            raise ValueError(f"chain has {len(chain)} bytes, not a multiple of {KEY_BYTES}")
        call = LookupCall(self._cancel_lookup)
        self._lookups += 1
        if not chain or not self._link.usable or self._closing:
            call.finish(miss(MissReason.BREAKER_OPEN if chain else MissReason.NEVER_STORED))
            return call
        limit_ms = self._settings.lookup_timeout_ms if deadline_ms is None else deadline_ms
        deadline_s = time.monotonic() + min(limit_ms, wire.MAX_DEADLINE_MS) / 1000
        keys = chain[: wire.MAX_CHUNKS * KEY_BYTES]
        self._link.post(lambda: self._ask_lookup(call, identity, keys, request_id[:256], probe, deadline_s))
        return call

    def release(self, leases: Sequence[LeaseName], *, group: bool = False) -> None:
        """End this process's share of leases; with `group` everybody's, for leases never handed on. Never blocks.

        Repeated until the server has answered.  No load of this process may begin under them afterwards; one that
        runs goes on, and its share ends with it.
        """
        if leases and not self._forked:
            idle = self._ledger.spend(leases)
            self._link.post(lambda: self._releases.add(idle, group=group))

    def store(
        self,
        identity: Identity,
        parent_chain: bytes,
        chain: bytes,
        plan: Plan,
        blocks: Sequence[Sequence[int]],
        *,
        on_done: Callable[[StoreJob], Any] | None = None,
        probe: bytes = b"",
    ) -> StoreJob:
        """Copy chunks out of the engine's blocks into L1, in the background. Never blocks.

        `chain` are their chain keys, `parent_chain` the key before the first (b"" at the start of a prompt),
        `blocks[i]` the blocks of chunk i in order, as many for each.  The blocks' bytes must be written and stay
        unchanged until `gathered`.  `on_done` runs in the I/O thread (in the calling one if the store is refused at
        once): it must be quick and never block.
        Raises ValueError when the arguments do not fit together.
        """
        n = len(blocks)
        if self._slice is None:
            raise ValueError("a scheduler has no slice and cannot store")
        if len(chain) != n * KEY_BYTES:
            raise ValueError(f"chain has {len(chain)} bytes for {n} chunks, must have {n * KEY_BYTES}")
        if len(parent_chain) not in (0, KEY_BYTES):
            raise ValueError(f"parent_chain has {len(parent_chain)} bytes, must have 0 or {KEY_BYTES}")
        if len({len(ids) for ids in blocks}) > 1:
            raise ValueError("all chunks of one store must have the same number of blocks")
        job = StoreJob(n, self._cancel_store, partial(_call_back, on_done) if on_done is not None else None)
        if n == 0 or self._closing or not self._link.usable:
            job.refuse(StoreOutcome.UNAVAILABLE)
            return job
        payload = plan.payload_bytes(len(blocks[0]))
        request = StoreRequest(
            job,
            identity,
            parent_chain,
            chain,
            plan,
            blocks,
            record_bytes(plan.section_count, payload),
            payload,
            probe,
        )
        if self._stores.admit(request):
            self._link.post(lambda: self._stores.add(request))
        else:
            job.refuse(StoreOutcome.BACKLOG)
        return job

    def load(
        self,
        lease: LeaseName,
        items: Sequence[LoadItem],
        plan: Plan,
        *,
        sync: bool = False,
        whole: bool = False,
    ) -> LoadJob:
        """Copy leased chunks into the engine's blocks, each verified; then this process's share of the lease ends.

        `sync`: in the calling thread (and the copy threads), done on return; no further chunks are begun after
        1 s.  Otherwise in the background, with `whole` as one native copy, so that its sections can be awaited
        (it fails where the engine's queue is full).  Items that could not be copied whole are in `failed`; their
        blocks may hold anything.  A lease serves one load; without one (released, revoked, of a server that is gone for
        good) all items fail.  Raises ValueError when plan and blocks do not fit; nothing is written then.
        """
        job = LoadJob(self._cancel_load)
        if self._slice is None:
            raise ValueError("a scheduler has no slice and cannot load")
        mapping = None if self._closing or not items else self._ledger.begin_load(lease)
        if mapping is None:
            job.finish(range(len(items)), 0)
            self.release([lease])
            return job
        work = _LoadWork(job, lease, items, plan)
        try:
            work.prepare(mapping, storage_keys(b"".join(item.key for item in items), self.slice_digest))
            if sync:
                work.codes.extend(self._scatter_now(job, plan, work.scatter))
                self._loaded(work)
            else:
                self._scatter_later(work, whole)
        except ValueError:
            self._ledger.end_load(lease)
            self._link.post(lambda: self._releases.add([lease], group=False))
            raise
        return job

    def stats(self) -> dict[str, int | float | str]:
        """Counters and present state, for metrics and logs."""
        stores = {f"store_{outcome}_chunks": count for outcome, count in self._stores.counts.items()}
        return {
            "connected": int(self.connected),
            "epoch": self.epoch,
            "breaker_trips": self._link.breaker.trips,
            "lookups": self._lookups,
            "lookup_hit_chunks": self._hits,
            "revoked_leases": self._revoked,
            "loaded_bytes": self._loaded_bytes,
            "corrupt_chunks": self._corrupt,
            "copies_running": self._ledger.n_running,
            "requests_under_way": len(self._link.table),
            "store_backlog_bytes": self._stores.waiting_bytes,
            "error": self.error,
            **self._pages.stats(),
            **self._device_stats(),
            **stores,
        }

    def _device_stats(self) -> dict[str, int | float | str]:
        device = self._device
        if device is None:
            return {}
        measured = {f"copy_{way}_gb_per_s": round(rate, 3) for way, rate in device.measured.items()}
        return {"copy_engine": device.engine, "copy_reason": device.reason, **measured}

    # What the link calls, in the I/O thread.

    def attach_request(self, old_epoch: int) -> wire.AttachRequest:
        """See LinkOwner."""
        return wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=self.session,
            group=self._group,
            role=self._role,
            layout=self._layout,
            engine_slices=self._engine_slices,
            slice=self._slice,
            facts=self._facts,
            old_epoch=old_epoch,
            registers_memory=self._registers_memory,
            token=_token(self._settings),
        )

    def link_attached(self, attachment: Attachment, old_epoch: int) -> None:
        """See LinkOwner."""
        seen = attachment
        mapping = self._ledger.attached(
            seen.epoch,
            seen.pool_id,
            lambda: Mapping(seen.pool_id, seen.index_fd, seen.extents_fd, seen.extents_bytes),
        )
        if seen.epoch != old_epoch:
            self._must_quiesce = old_epoch != 0
            self._live.clear()
            self._releases.restarted(old_epoch, seen.epoch)
        if self._closing:
            return
        self._index = mapping.index
        if self._slice is not None and self._warmed_pool != seen.pool_id:
            self._warmed_pool = seen.pool_id
            self._pages.warm(mapping)

    def link_ready(self, hello: wire.HelloReply) -> None:
        """See LinkOwner."""
        self._stores.max_reserved_bytes = hello.max_reserved_bytes
        self._identities.replay()
        self._releases.pump()

    def link_silent(self) -> None:
        """See LinkOwner."""
        self._stores.give_up()

    def link_revoked(self, lookups: list[int]) -> None:
        """See LinkOwner."""
        taken_back = []
        for seq in lookups:
            call = self._live.get(seq)
            if call is not None and call.take_back(self._ledger.take_back):
                taken_back.append(LeaseName(self.session, seq, self._link.epoch))
        self._revoked += len(taken_back)
        self._releases.add(taken_back, group=True)

    def link_orphaned(self, leases: list[tuple[bytes, int]]) -> None:
        """See LinkOwner."""
        idle = self._ledger.spend([LeaseName(session, seq, self._link.epoch) for session, seq in leases])
        self._releases.add(idle, group=False)

    def live_lookups(self) -> list[int]:
        """See LinkOwner."""
        return list(self._live)

    def device_copies(self) -> wire.DeviceCopies | None:
        """See LinkOwner; any thread may ask."""
        device = self._device
        if device is None:
            return None
        pages = self._pages.stats()
        return wire.DeviceCopies(
            device.engine,
            device.reason[: wire.MAX_SHORT_TEXT],
            {way: round(1000 * rate) for way, rate in device.measured.items()},
            int(pages.get("pinned_bytes", 0)),
            str(pages.get("pin_refusal", ""))[: wire.MAX_SHORT_TEXT],
        )

    def link_due_s(self) -> float:
        """See LinkOwner."""
        return min(self._identities.due_s(), self._releases.due_s())

    def link_pass(self, now_s: float) -> None:
        """See LinkOwner."""
        self._releases.tick(now_s)
        if self._link.connected:
            self._identities.tick(now_s)
            closed = self._ledger.quiesce(self._link.epoch) if self._must_quiesce else None
            if closed is not None:
                self._must_quiesce = False
                for mapping in closed:
                    self._pages.forget(mapping)
                self._settle(lambda seq, _: wire.Quiesced(self.session, seq))
        unsaid = len(self._link.table) or self._releases.due_s() < math.inf
        answered = not self._link.usable or not unsaid
        if self._closing and answered and self._ledger.n_running == 0 and self._stores.idle:
            self._drained.set()

    def link_died(self) -> None:
        """See LinkOwner."""
        self._index = None
        self._link.table.fail_all(Unavailable("the client has failed"), *Kind)
        self._stores.give_up()
        self._drained.set()

    # The rest of each request, in the I/O thread.

    def _close_asking(self) -> None:
        """Stores first: a reserve that fails would make way for the next one."""
        self._stores.close()
        self._link.table.fail_all(Unavailable("the client closes"), Kind.ASK)

    def _settle(self, message: Callable[[int, int], wire.AnyRequest]) -> None:
        self._link.ask(Pending(Kind.SETTLE, message, lambda reply: None, lambda error: None))

    def _ask_lookup(
        self,
        call: LookupCall,
        identity: Identity,
        keys: bytes,
        request_id: str,
        probe: bytes,
        deadline_s: float,
        again: bool = False,
    ) -> None:
        if call.done:
            return

        def message(seq: int, remaining_ms: int) -> wire.Lookup | None:
            declared = self._identities.declared(identity)
            if declared is None:
                return None
            call.seq, call.epoch = seq, declared.epoch
            self._live[seq] = call
            return wire.Lookup(
                self.session,
                seq,
                max(1, remaining_ms - LOOKUP_MARGIN_MS),
                declared.identity_id,
                request_id,
                [wire.Group(wire.Rule.PREFIX, keys)],
                probe,
            )

        def failed(error: KvstrataError) -> None:
            self._asking.pop(call, None)
            if isinstance(error, UnknownIdentity) and not again:
                self._live.pop(call.seq, None)
                identity.declared = None
                self._ask_lookup(call, identity, keys, request_id, probe, deadline_s, again=True)
                return
            reason = MissReason.REFUSED
            if isinstance(error, Unavailable):
                reason = MissReason.BREAKER_OPEN
            elif isinstance(error, DeadlineExceeded):
                reason = MissReason.DEADLINE
            if call.finish(miss(reason)):
                self._undo_lookup(call)

        pending = Pending(Kind.ASK, message, partial(self._looked_up, call, keys), failed, deadline_s)
        self._asking[call] = pending
        self._link.ask(pending)

    def _looked_up(self, call: LookupCall, keys: bytes, reply: wire.AnyReply) -> None:
        del self._asking[call]
        n = reply.n_chunks if isinstance(reply, wire.LookupReply) else -1
        if not isinstance(reply, wire.LookupReply) or not _sensible(reply, len(keys) // KEY_BYTES):
            log.error("the server's answer to a lookup makes no sense: %r", type(reply))
            call.finish(miss(MissReason.REFUSED))
            self._undo_lookup(call)
        elif n == 0:
            self._live.pop(call.seq, None)
            call.finish(LookupResult(0, None, b"", 0, reply.reason))
        else:
            lease = LeaseName(self.session, call.seq, reply.epoch)
            slices = len(reply.extents) // EXTENT.size // n
            self._hits += n
            # When the caller cancelled it meanwhile, `_cancel_lookup` is on its way here and undoes it.
            call.finish(LookupResult(n, lease, reply.extents, slices, reply.reason))

    def _cancel_lookup(self, call: LookupCall) -> None:
        """From any thread."""

        def cancel() -> None:
            pending = self._asking.pop(call, None)
            if pending is not None:
                self._link.table.remove(pending)
            self._undo_lookup(call)

        if not self._forked:
            self._link.post(cancel)

    def _undo_lookup(self, call: LookupCall) -> None:
        """Take it back, unless it was never sent, found nothing, or is over already."""
        target = call.seq
        if self._live.pop(target, None) is not None and call.epoch == self._link.epoch:
            self._settle(lambda seq, _: wire.Cancel(self.session, seq, target))

    def _released(self, leases: Sequence[LeaseName]) -> None:
        for lease in leases:
            if lease.session == self.session and lease.epoch == self._link.epoch:
                self._live.pop(lease.seq, None)

    def _cancel_store(self, job: StoreJob) -> None:
        """From any thread."""
        if not self._forked:
            self._link.post(lambda: self._stores.cancel(job))

    def _cancel_load(self, job: LoadJob) -> None:
        """From any thread."""
        if not self._forked:
            for copy_job in job.copy_jobs:
                self._copier.cancel(copy_job)

    def _scatter_now(self, job: LoadJob, plan: Plan, items: Sequence[ScatterItem]) -> list[int]:
        """Group after group, until all are copied or the time is over."""
        codes: list[int] = []
        ends_s = time.monotonic() + SYNC_LOAD_S
        for group in _groups(items):
            if codes and (time.monotonic() > ends_s or job.cancelled):
                return codes + [NOT_BEGUN] * (len(items) - len(codes))
            codes += self._copier.run_scatter(plan, group)
        return codes

    def _scatter_later(self, work: _LoadWork, whole: bool) -> None:
        """One native job for each group, so that a cancel finds some that have not begun; or one for all."""
        if not work.scatter:
            self._loaded(work)
            return
        groups = [work.scatter] if whole else list(_groups(work.scatter))
        work.groups_left = len(groups)
        work.codes = [NOT_BEGUN] * len(work.scatter)
        position = 0
        for group in groups:
            ended = partial(self._group_loaded, work, position)
            position += len(group)
            try:
                job = self._copier.begin("scatter", work.plan, group, ended, may_wait=not whole)
                work.job.copy_jobs.append(job)
            except ValueError as error:
                if group is groups[0]:
                    raise
                log.error("chunks of a load cannot be copied: %s", error)
                self._link.post(partial(ended, [NOT_BEGUN] * len(group)))

    def _group_loaded(self, work: _LoadWork, position: int, codes: list[int]) -> None:
        """In the I/O thread."""
        work.codes[position : position + len(codes)] = codes
        work.groups_left -= 1
        if work.groups_left == 0:
            self._loaded(work)

    def _loaded(self, work: _LoadWork) -> None:
        """All copies have ended. In the calling thread of a synchronous load, else in the I/O thread."""
        items, lease = work.items, work.lease
        self._ledger.end_load(lease)
        whole = {i for i, code in zip(work.copied, work.codes, strict=True) if code == 0}
        bad = [items[i].key for i, code in zip(work.copied, work.codes, strict=True) if code in BAD_CODES]
        size = sum(work.plan.payload_bytes(len(items[i].block_ids)) for i in whole)
        self._loaded_bytes += size
        work.job.finish((i for i in range(len(items)) if i not in whole), size)

        def tell() -> None:
            if bad:
                self._corrupt += len(bad)
                log.error("%d chunks in the cache failed their checksum; they are computed instead", len(bad))
                self._settle(lambda seq, _: wire.Corrupt(self.session, seq, b"".join(bad)))
            self._releases.add([lease], group=False)

        self._link.post(tell)

    def _derived(self, chain: bytes, slices: tuple[bytes, ...]) -> bytes:
        """Storage keys of a chain; kept by its last key, which stands for the whole of it."""
        name = chain[-KEY_BYTES:] + len(chain).to_bytes(8, "little")
        with self._chains_lock:
            keys = self._chains.get(name)
            if keys is None:
                keys = self._chains[name] = storage_keys(chain, b"".join(slices))
                if len(self._chains) > KEPT_CHAINS:
                    self._chains.popitem(last=False)
        return keys

    def _abandon(self) -> None:
        """This is a forked child."""
        self._forked = self._closing = True
        self._index = None
        self._link.abandon()
        self._identities.abandon()
        _kept_in_child.append(self)


class _LoadWork:
    """A load on its way."""

    __slots__ = ("codes", "copied", "groups_left", "items", "job", "lease", "plan", "scatter")

    def __init__(self, job: LoadJob, lease: LeaseName, items: Sequence[LoadItem], plan: Plan) -> None:
        self.job = job
        self.lease = lease
        self.items = items
        self.plan = plan
        self.copied: list[int] = []
        """Indices of the items that are copied, in the order of `scatter` and `codes`."""
        self.scatter: list[ScatterItem] = []
        self.codes: list[int] = []
        self.groups_left = 0

    def prepare(self, mapping: Mapping, own_keys: bytes) -> None:
        """Fill in what is to be copied. Items that are not inside the pool are left out."""
        for i, item in enumerate(self.items):
            try:
                address = mapping.address(item.offset_bytes, item.length_bytes)
            except ValueError as error:
                log.error("a leased chunk cannot be loaded: %s", error)
                continue
            self.copied.append(i)
            expected = own_keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            self.scatter.append((item.block_ids, address, item.length_bytes, expected))


BAD_CODES = (1, 2)
"""The record is another chunk's, or damaged."""
NOT_BEGUN = -2

_clients: weakref.WeakSet[CacheClient] = weakref.WeakSet()
_kept_in_child: list[CacheClient] = []
"""Native objects of the parent, whose threads and mappings do not exist here, are never destroyed."""


def _token(settings: ClientSettings) -> str:
    """What opens this engine's tenants, empty without one. Raises ConfigError."""
    return read_token_file(settings.token_file, "token_file") if settings.token_file else ""


def _sensible(reply: wire.LookupReply, n_asked: int) -> bool:
    n = reply.n_chunks
    if not 0 <= n <= n_asked:
        return False
    return n == 0 or (len(reply.extents) > 0 and len(reply.extents) % (n * EXTENT.size) == 0)


def _groups(items: Sequence[ScatterItem]) -> Iterator[Sequence[ScatterItem]]:
    """Runs of items of at most `GROUP_BYTES` together, or one."""
    first = 0
    while first < len(items):
        end = first + 1
        size = items[first][2]
        while end < len(items) and size + items[end][2] <= GROUP_BYTES:
            size += items[end][2]
            end += 1
        yield items[first:end]
        first = end


def _call_back(on_done: Callable[[StoreJob], Any], job: StoreJob) -> None:
    try:
        on_done(job)
    except Exception:
        # Boundary to the caller's code: its mistake must not end the I/O thread.
        log.exception("on_done of a store failed")


def _forget_in_child() -> None:
    for client in list(_clients):
        client._abandon()


def _close_at_exit() -> None:
    for client in list(_clients):
        client.close(EXIT_TIMEOUT_S)


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_close_at_exit)
