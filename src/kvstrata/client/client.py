"""The cache client of one engine process: the interface that a connector calls.

Only `close` waits for the server: every other method changes shared state, hands a closure to the I/O thread and
returns.  Whatever is wrong with the server, a lookup becomes a miss, a store is refused and a load fails its items,
each within its time limit.  When the server comes back, the client uses it again without help.

The client notifies its parts, in a fixed order, when a server is attached, heard from or lost.  It decides when an old
epoch has ended, and sends `quiesced` to tell the server that no copy of that epoch is running any more.

Threads: callers (any) · one I/O thread (`kvstrata.client.link`) · native copy threads · short-lived threads that attach
or map the pool's pages.  In a forked child the client is dead: it refuses every call and touches nothing of the
parent.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import shlex
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from kvstrata.client.copies import (
    BlockCopyEngine,
    Copier,
    CopyLedger,
    DeviceCopyEngine,
    Pages,
    Plan,
    device_copies,
)
from kvstrata.client.handles import LoadItem, LoadJob, LookupCall, PromiseCall, StoreJob
from kvstrata.client.identities import Identity, IdentityTable
from kvstrata.client.link import Kind, Link, Pending
from kvstrata.client.loads import Loads
from kvstrata.client.lookups import Lookups, ReleaseQueue
from kvstrata.client.pool_view import PoolView
from kvstrata.client.stores import StoreQueue
from kvstrata.client.warmup import PageWarmer
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.private_file import read_token_file
from kvstrata.errors import KvstrataError, Unavailable
from kvstrata.keys import ChunkHasher
from kvstrata.memory.paths import socket_dirs
from kvstrata.native.core import CopyEngine
from kvstrata.patience import patience
from kvstrata.rpc import wire
from kvstrata.session.attach import Attachment
from kvstrata.types import KEY_BYTES, LayoutIdentity, LeaseName, RequestIdentity, Role, Slice

log = logging.getLogger(__name__)

COPY_THREADS = 2
"""Native threads that copy between the engine's blocks and the pool."""
CLOSE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0


class CacheClient:
    """One session of this process with the server, as the module describes. A process may have several clients."""

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
        engine: BlockCopyEngine | None = None,
        pages: Pages | None = None,
        registers_memory: bool = False,
        kv_bytes: int = 0,
    ) -> None:
        """`group`: 16 bytes that all processes of one engine share; `engine_slices`: number of slices of that engine.

        `slice` is the part that this process reads and writes, None for a scheduler.  `engine` is the copy engine, and
        `pages` prepares the pool's pages for it (the client closes both); by default blocks are in host memory. With
        `registers_memory` a device may access the pool on behalf of this process, see `wire.AttachRequest`. `kv_bytes`:
        bytes that the engine's own cache would take in L1; reported by a scheduler. Raises ValueError for invalid
        arguments and ConfigError for unusable settings; never because of the server.
        """
        if len(group) != wire.SESSION_BYTES:
            raise ValueError(f"group has {len(group)} bytes, must have {wire.SESSION_BYTES}")
        if not 1 <= engine_slices <= wire.MAX_SLICES:
            raise ValueError(f"engine_slices is {engine_slices}, must be 1 to {wire.MAX_SLICES}")
        if slice is None and role is not Role.SCHEDULER:
            raise ValueError(f"a {role.value} needs the slice that it reads and writes")
        _token(settings)  # refuses a bad file now; each attach reads it again, so that it can be changed
        self.prompt_tokens_s = 0.0
        """Tokens at a prompt's start that the engine computes per second, as measured by a scheduler; 0: unknown. The
        next ping reports it."""
        self.session = secrets.token_bytes(wire.SESSION_BYTES)
        self.slice_digest = slice.digest() if slice is not None else b""
        """Digest of the slice that this process reads and writes; b"" for a scheduler."""
        self._settings, self._layout = settings, layout
        self._link = link = Link(
            socket_dirs(settings.socket_dir, settings.port),
            self.session,
            _start_command(settings),
            speaks=role is not Role.WORKER,
        )
        self._ledger = ledger = CopyLedger()
        self._copier = copier = Copier(engine or CopyEngine(threads=COPY_THREADS))
        self._device = engine if isinstance(engine, DeviceCopyEngine) else None
        self._pages: Pages = pages or PageWarmer()
        only = (self.slice_digest,) if slice is not None and engine_slices == 1 else ()
        self._identities = IdentityTable(link, layout, only)
        self.lookups = Lookups(link, self._identities, settings.lookup_timeout_ms)
        self._releases = ReleaseQueue(link, ledger, self.lookups)
        self.loads = Loads(link, self._identities, ledger, copier, self._releases, self.slice_digest)
        self._stores = StoreQueue(
            link,
            ledger,
            copier,
            self._identities,
            self.slice_digest,
            layout.chunk_tokens,
        )
        self.pool = PoolView(link, ledger, self._identities, self._pages if slice is not None else None)
        """Reads which chunks L1 holds now."""
        self._request = wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=self.session,
            group=group,
            role=role,
            layout=layout,
            engine_slices=engine_slices,
            slice=slice,
            facts=facts,
            registers_memory=registers_memory,
            kv_bytes=kv_bytes,
            engine_url="" if role is Role.WORKER else settings.engine_url,
        )
        """The attach request, without the old epoch and the token."""
        self._must_quiesce = False
        self.drained = threading.Event()
        """Set once a closing client has no message left to send and no running copy, or once the link has failed."""
        _clients.add(self)

    # Life.

    def start(self) -> None:
        """Begin to attach, in the background. Returns at once, also without a server."""
        self._link.start(self, {self._copier.event_fd: self._copier.collect})

    def close(self, timeout_s: float | None = None) -> None:
        """End in order: running copies end, commits are answered, the server forgets this process. Idempotent.

        Blocks for about `timeout_s` at most (None: CLOSE_TIMEOUT_S).  Threads that do not end in that time end with the
        process.
        """
        if self._link.closing:
            return
        if timeout_s is None:
            timeout_s = patience(CLOSE_TIMEOUT_S)
        self._link.closing = True
        self.pool.forget()
        if not self._link.alive:
            self._link.close()
            self._end_copies(timeout_s)
            return
        ends_s = time.monotonic() + timeout_s
        self._pages.stop()
        self._link.post(self._close_asking)
        self.drained.wait(0.8 * timeout_s)
        quiet = self._ledger.n_running == 0
        self._link.stop(bye=quiet)
        if not self._link.join(max(0.1, ends_s - time.monotonic())) or not quiet:
            log.warning(
                "the cache client did not end within %.1f s; its threads end with the process", timeout_s
            )
            return
        self._end_copies(max(0.1, ends_s - time.monotonic()))

    @property
    def connected(self) -> bool:
        """Whether a server is attached and answers."""
        return self._link.usable

    @property
    def error(self) -> str:
        """Why the client is not connected, for the log; empty while it is."""
        return self._link.error

    @property
    def epoch(self) -> int:
        """Epoch of the server attached last; 0 before the first attachment."""
        return self._link.epoch

    def sizes(self) -> tuple[int, int]:
        """(Bytes of L1, bytes that the own caches of all its engines would take in it); 0: unknown yet."""
        return self.pool.l1_bytes, self._link.engines_kv_bytes

    @property
    def has_l2(self) -> bool:
        """Whether the server has an L2, where a chunk that L1 lacks may be found."""
        return self.pool.has_l2

    @property
    def has_promises(self) -> bool:
        """Whether any engine of the server promises chunks now."""
        return self.pool.has_promises

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
        return self._identities.identity(request)

    def peek(self, identity: Identity, chain: bytes | ChunkHasher) -> int:
        """The number of leading chunks of the chain that are in L1 now, in all slices; they may be evicted at any time.

        Reads shared memory only; 0 while slices or server are unknown, or the server's heartbeat is old.  Pass the
        request's hasher rather than its chain: then storage keys are derived once per chunk.
        """
        return self.pool.peek(identity, chain)

    def lookup(
        self,
        identity: Identity,
        chain: bytes | ChunkHasher,
        *,
        request_id: str,
        probe: bytes = b"",
        deadline_ms: int | None = None,
        tails: Sequence[wire.TailSet] = (),
        traceparent: str = "",
        own_chunks: int = 0,
        stores_late: bool = False,
        wait_ms: int = 0,
        expects: bool = False,
        source: str = "",
        in_parts: bool = False,
        follows: int = 0,
    ) -> LookupCall:
        """Ask how many leading chunks are present, and lease them for the whole engine group. Never blocks.

        While no server answers, the call is done at once, as a miss.  The lease belongs to all processes of the group;
        each ends its share by a load or by `release`.  Until the lease is claimed (`LookupCall.claim`) or a load of
        this process begins under it, the server may revoke it: claim it before you promise its chunks to the engine.
        The first of `tails` that is present and follows the last chunk found is leased too.  The engine's own cache has
        the first `own_chunks` chunks; with `stores_late` a hit of these does not count as a use of L1's copies. The
        answer may wait `wait_ms` beyond the deadline for chunks that other engines have promised, and with `expects`
        for their promise too; these are engines of the instance `source` (empty: of this one).  With `in_parts` the
        answer may come before all promised chunks are in L1: `LookupResult.promised` is then the expected number of
        chunks, and a lookup that `follows` the received ones asks for the rest. Raises ValueError if `chain` is not a
        whole number of keys.
        """
        if isinstance(chain, ChunkHasher):
            probe = probe or chain.probe
            chain = chain.chain
        if len(chain) % KEY_BYTES:
            raise ValueError(f"chain has {len(chain)} bytes, not a multiple of {KEY_BYTES}")
        keys = chain[: wire.MAX_CHUNKS * KEY_BYTES]
        asked = wire.Lookup(
            0, 1, 0, request_id[:256], keys, probe, list(tails), traceparent, own_chunks, stores_late,
            wait_ms, expects, source, in_parts, follows,
        )  # fmt: skip
        return self.lookups.begin(identity, asked, deadline_ms)

    def promise(self, identity: Identity, chain: bytes) -> PromiseCall:
        """Promise that this engine computes and stores these chunks; others' lookups may wait for them. Never blocks.

        `chain`: the chain keys of chunks that follow each other in one prompt.  Withdraw the promise when the outcome
        of the stores is known.  While no server answers, the promise has no effect.
        """
        return self.lookups.promise(identity, chain)

    def missed(
        self, identity: Identity, chain: bytes | ChunkHasher, *, request_id: str, probe: bytes = b""
    ) -> None:
        """Report to the server, with the next ping, a prompt for which `peek` found nothing, instead of looking it up.

        `chain` is the part of the prompt's chain that is absent; the other arguments are those of `lookup`.  The server
        then counts and explains the miss like one of a lookup.  Never blocks.
        """
        if isinstance(chain, ChunkHasher):
            probe = probe or chain.probe
            chain = chain.chain
        # If some slices need only the end of a hit, the others may have chunks of which those slices lack the end.
        end = self.pool.peek_whole(identity, chain) if identity.spans else 0
        self.lookups.missed(identity, chain, max(0, end - 1), request_id, probe)

    def hint(self, identity: Identity, last: bytes, next_: int) -> None:
        """Report to the server, with the next ping, what follows a request (`types.Next`). Never blocks.

        `last`: chain key of the last chunk of the request that was stored or loaded.
        """
        self.lookups.hint(identity, last, next_)

    def release(self, leases: Sequence[LeaseName], *, group: bool = False) -> None:
        """End this process's share of these leases. Never blocks.

        With `group` the shares of all processes end; use it only for leases that were never handed to other processes.
        The message is repeated until the server answers.  No load of this process begins under the leases afterwards; a
        running load continues, and this process's share ends with it.
        """
        self._releases.end(leases, group=group)

    def store(
        self,
        identity: Identity,
        parent_chain: bytes,
        chain: bytes,
        plan: Plan,
        blocks: Sequence[Sequence[int]],
        *,
        probe: bytes = b"",
        tail_tokens: int = 0,
        replaces: bytes = b"",
        traceparent: str = "",
    ) -> StoreJob:
        """Copy chunks out of the engine's blocks into L1, in the background. Never blocks.

        `chain` are the chunks' chain keys, `parent_chain` the key before the first (b"" at the start of a prompt),
        `blocks[i]` the blocks of chunk i in order, equally many for each chunk.  The blocks' bytes must be written
        before the call and stay unchanged until `StoreJob.gathered`.  With `tail_tokens` the only chunk is a tail of so
        many tokens (`keys.chunking`), with as many blocks as these fill.  `replaces` are the keys of tails that leave
        L1 when the chunks are stored. Raises ValueError when the arguments do not fit together.
        """
        return self._stores.begin(
            identity, parent_chain, chain, plan, blocks, probe, tail_tokens, replaces, traceparent
        )

    def load(
        self,
        identity: Identity,
        lease: LeaseName,
        items: Sequence[LoadItem],
        plan: Plan,
        *,
        sync: bool = False,
        whole: bool = False,
    ) -> LoadJob:
        """Copy leased chunks into the engine's blocks, each verified; then this process's share of the lease ends.

        `identity` is the one under which the chunks were looked up; a record of another identity is not copied.
        With `sync` the calling thread (and the copy threads) copy; the load is done on return, and begins no further
        chunks after 1 s.  Otherwise the copies run in the background; with `whole` they are one native copy, whose
        sections can be awaited, and which fails if the copy engine's queue is full.  Items that could not be copied
        whole are in `failed`; their blocks may hold anything.  A lease serves one load.  If the lease was used,
        released or revoked, or its epoch has been closed here (`CopyLedger.quiesce`), all items fail.  Raises
        ValueError when plan and blocks do not fit together; nothing is written then.
        """
        return self.loads.begin(identity, lease, items, plan, sync=sync, whole=whole)

    def stats(self) -> dict[str, int | float | str]:
        """Counters and current state, for metrics and logs."""
        stores = {f"store_{outcome}_chunks": count for outcome, count in self._stores.counts.items()}
        return {
            "connected": int(self.connected),
            "epoch": self.epoch,
            "breaker_trips": self._link.silence.spells,
            "lookups": self.lookups.begun,
            "lookup_hit_chunks": self.lookups.hit_chunks,
            "revoked_leases": self.lookups.revoked,
            "loaded_bytes": self.loads.loaded_bytes,
            "corrupt_chunks": self.loads.corrupt_chunks,
            "copies_running": self._ledger.n_running,
            "requests_under_way": len(self._link.table),
            "store_backlog_bytes": self._stores.waiting_bytes,
            "error": self.error,
            **self._pages.stats(),
            **self._device_stats(),
            **stores,
        }

    # Callbacks of the link, all in the I/O thread except `attach_request`.

    def attach_request(self, old_epoch: int) -> wire.AttachRequest:
        """The request to attach with. Called in the attaching thread. Raises ConfigError for a bad token file."""
        return msgspec.structs.replace(self._request, old_epoch=old_epoch, token=_token(self._settings))

    def link_attached(self, attachment: Attachment, old_epoch: int) -> None:
        """Map the pool, before any message. May raise KvstrataError or OSError, which ends this attachment.

        If the epoch is not `old_epoch`, requests under way to the old server fail right afterwards.
        """
        self.pool.attached(attachment)
        if attachment.epoch != old_epoch:
            self._must_quiesce = old_epoch != 0
            self.lookups.promised.clear()
            self.lookups.live.clear()  # the server of the new epoch has none of these lookups
            self._releases.restarted(old_epoch, attachment.epoch)

    def link_ready(self, attachment: Attachment, old_epoch: int) -> None:
        """Requests may be sent from now on. If the epoch is `old_epoch`, it is the same server as before."""
        if attachment.epoch == old_epoch:
            self._link.tell(self._resume)
        self._stores.ready(attachment.max_reserved_bytes)
        self._identities.replay()
        self._releases.pump()

    def link_silent(self) -> None:
        """The server is silent or lost, so no caller may wait for it. ASK requests have failed already."""
        self._stores.give_up()

    def link_revoked(self, lookups: list[int]) -> None:
        """The server asks this process to release the leases of these lookups."""
        self._releases.add(self.lookups.take_back(lookups, self._ledger.take_back), group=True)

    def link_orphaned(self, leases: list[tuple[bytes, int]]) -> None:
        """The process whose lookups these leases come from has ended: end this process's shares of them."""
        idle = self._ledger.spend([LeaseName(session, seq, self._link.epoch) for session, seq in leases])
        self._releases.add(idle, group=False)

    def device_copies(self) -> wire.DeviceCopies | None:
        """The report to the server on copies to and from a device; None if blocks are in host memory."""
        return None if self._device is None else device_copies(self._device, self._pages)

    def link_due_s(self) -> float:
        """The time at which `link_pass` must run even if nothing is received."""
        return min(self._identities.due_s(), self._releases.due_s())

    def link_pass(self, now_s: float) -> None:
        """Called once per pass of the loop, after all received messages were handled."""
        self._releases.tick(now_s)
        if self._link.connected:
            self._identities.tick(now_s)
            if self._must_quiesce:
                self._quiesce()
        unsaid = len(self._link.table) or self._releases.due_s() < math.inf
        answered = not self._link.usable or not unsaid
        if self._link.closing and answered and self._ledger.n_running == 0 and self._stores.idle:
            self.drained.set()

    def link_died(self) -> None:
        """The I/O thread ends because of a bug: finish all calls that callers wait for."""
        self.pool.forget()
        self._link.table.fail_all(Unavailable("the client has failed"), *Kind)
        self._stores.give_up()
        self.drained.set()

    def _close_asking(self) -> None:
        """Fail the requests that callers wait for, because the client closes.

        The store queue closes first: otherwise each reserve that fails would make room for the next one.
        """
        self._stores.close()
        self._link.table.fail_all(Unavailable("the client closes"), Kind.ASK)

    def _quiesce(self) -> None:
        """Close the older epochs if no copy of them runs, and send `quiesced`."""
        closed = self._ledger.quiesce(self._link.epoch)
        if closed is None:
            return
        self._must_quiesce = False
        for mapping in closed:
            self._pages.forget(mapping)

        def failed(error: KvstrataError) -> None:
            self._must_quiesce |= isinstance(error, Unavailable)  # the connection is lost

        self._link.ask(Pending(Kind.TELL, lambda seq, _: wire.Quiesced(seq), lambda reply: None, failed))

    def _resume(self, seq: int, remaining_ms: int) -> wire.Resume:
        """The message that names the server's grants that this process still has, after a lost connection."""
        return wire.Resume(
            seq, sorted({*self.lookups.live, *self.lookups.promised, *self._stores.reserves()})
        )

    # Inside.

    def _device_stats(self) -> dict[str, int | float | str]:
        device = self._device
        if device is None:
            return {}
        return {"copy_engine": device.engine, "copy_reason": device.reason}

    def _end_copies(self, timeout_s: float) -> None:
        self._ledger.close()
        self._pages.close(timeout_s)
        self._copier.close()

    def _abandon(self) -> None:
        """Called in a forked child: refuse every call from now on."""
        self.pool.forget()
        self._link.abandon()
        self._identities.abandon()
        _kept_in_child.append(self)


_clients: weakref.WeakSet[CacheClient] = weakref.WeakSet()
_kept_in_child: list[CacheClient] = []
"""In a forked child, the parent's clients, kept alive: a destructor would wait for threads that the child lacks."""


def _token(settings: ClientSettings) -> str:
    """The token that gives this engine access to its tenants, or "" if none is set. Raises ConfigError."""
    return read_token_file(settings.token_file, "token_file") if settings.token_file else ""


def _start_command(settings: ClientSettings) -> str:
    """The command that starts a server which these settings find."""
    words = ["lmcache-server"]
    if settings.port != ClientSettings().port:
        words += ["--port", str(settings.port)]
    if settings.socket_dir:
        words += ["--socket-dir", settings.socket_dir]
    return shlex.join(words)


def _forget_in_child() -> None:
    for client in list(_clients):
        client._abandon()


def _close_at_exit() -> None:
    for client in list(_clients):
        client.close(patience(EXIT_TIMEOUT_S))


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_close_at_exit)
