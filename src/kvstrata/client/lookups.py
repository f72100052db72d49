"""Lookups, which are answered with leases, and the release of those leases.

`Lookups` carries each lookup from its call to its reply or its end.  It records the lookups that this process still
needs: the process names them when it attaches again to the same server, which ends the leases of all others.  It also
keeps the callers' hints, and the misses that callers found without a lookup, until a ping has reported them to the
server.

`ReleaseQueue` releases leases, many in one message.  While a caller waits for a lookup or a reserve, releases are
delayed by up to `HOLD_S`: the server answers the caller first, and one message then releases the leases of several
requests.  A lease stays in the queue until its release is answered or its epoch ends; then `quiesced` ends the lease.
The scheduler may attach earlier than this process, so a release may name an epoch that this process has not attached to
yet; such a release waits for that epoch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from kvstrata.client.copies import CopyLedger
from kvstrata.client.handles import LookupCall, LookupResult, PromiseCall, miss
from kvstrata.client.identities import Identity, IdentityTable
from kvstrata.client.link import Kind, Link, Pending
from kvstrata.errors import DeadlineExceeded, KvstrataError, Unavailable, UnknownIdentity
from kvstrata.keys import batch
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES, LeaseName, MissReason

log = logging.getLogger(__name__)

LOOKUP_MARGIN_MS = 10
"""Difference between the caller's deadline and the server's, so that the answer arrives in time."""
MAX_PENDING_REPORTS = 256
"""Maximum number of misses and hints that wait for a ping; beyond it the oldest are dropped."""
LEASES_PER_MESSAGE = 1024
HOLD_S = 0.002
WAITING_LEASES = 65_536
"""Maximum number of waiting releases, more than any engine's leases.  Beyond it the oldest end with this process."""


class Lookups(msgspec.Struct, eq=False):
    """All lookups of one process: `begin` from any thread, the rest in the I/O thread."""

    _link: Link
    _identities: IdentityTable
    _timeout_ms: int
    """Default deadline of a lookup."""
    live: dict[int, LookupCall] = {}
    """Lookups that are sent or hold a lease, by their numbers in the current epoch. For the I/O thread only."""
    promised: dict[int, PromiseCall] = {}
    """Promises sent to the current server and not withdrawn, by their numbers. For the I/O thread only."""
    begun: int = 0
    hit_chunks: int = 0
    revoked: int = 0
    _asking: dict[LookupCall, Pending] = {}
    _pending_reports: deque[tuple[Identity, wire.Miss | wire.Hint]] = msgspec.field(
        default_factory=lambda: deque(maxlen=MAX_PENDING_REPORTS)
    )
    _unknown_reason_logged: bool = False

    def begin(self, identity: Identity, asked: wire.Lookup, deadline_ms: int | None) -> LookupCall:
        """See `CacheClient.lookup`. `asked` lacks its numbers, and its times are bounded here."""
        call = LookupCall(self._cancel)
        self.begun += 1
        asks = bool(asked.keys or asked.tails)
        if not asks or not self._link.accepts:
            call.finish(miss(MissReason.BREAKER_OPEN if asks else MissReason.NEVER_STORED))
            return call
        limit_ms = min(self._timeout_ms if deadline_ms is None else deadline_ms, wire.MAX_DEADLINE_MS)
        # Deadline and waiting time together are limited; even a long deadline leaves some time to wait.
        wait_ms = min(asked.wait_ms, wire.MAX_DEADLINE_MS - min(limit_ms, wire.MAX_DEADLINE_MS // 4))
        limit_ms = min(limit_ms, wire.MAX_DEADLINE_MS - wait_ms)
        deadline_s = time.monotonic() + (limit_ms + wait_ms) / 1000
        if wait_ms != asked.wait_ms:
            asked = msgspec.structs.replace(asked, wait_ms=wait_ms)
        self._link.post(lambda: self._ask(call, identity, asked, deadline_s))
        return call

    def promise(self, identity: Identity, chain: bytes) -> PromiseCall:
        """See `CacheClient.promise`."""
        call = PromiseCall(self._withdraw)

        def message(seq: int, _: int) -> wire.Promise | None:
            declared = self._identities.declared(identity)
            if declared is None:
                return None
            call.seq, call.epoch = seq, declared.epoch
            self.promised[seq] = call
            return wire.Promise(seq, declared.identity_id, chain[: wire.MAX_RESERVE_CHUNKS * KEY_BYTES])

        def failed(_: KvstrataError) -> None:
            self.promised.pop(call.seq, None)

        call.pending = Pending(Kind.TELL, message, lambda reply: None, failed)
        self._link.post(lambda: self._link.ask(call.pending))
        return call

    def _withdraw(self, call: PromiseCall) -> None:
        """Called by `PromiseCall.withdraw` in any thread."""

        def withdraw() -> None:
            self._link.table.remove(call.pending)
            if self.promised.pop(call.seq, None) is not None and call.epoch == self._link.epoch:
                self._link.tell(lambda seq, _: wire.Cancel(seq, call.seq))

        self._link.post(withdraw)

    def missed(self, identity: Identity, chain: bytes, absent: int, request_id: str, probe: bytes) -> None:
        """See `CacheClient.missed`. `absent`: number of the absent chunk in `chain`."""
        chain = chain[: wire.MAX_CHUNKS * KEY_BYTES]
        seen = wire.Miss(
            0, request_id[:256], batch.count(chain), batch.nth(chain, absent), chain[-KEY_BYTES:], probe,
            chain[: wire.MAX_MISSED_CHUNKS * KEY_BYTES],
        )  # fmt: skip
        self._link.post(lambda: self._pending_reports.append((identity, seen)))

    def hint(self, identity: Identity, last: bytes, next_: int) -> None:
        """See `CacheClient.hint`."""
        self._link.post(lambda: self._pending_reports.append((identity, wire.Hint(0, last, next_))))

    def pending_reports(self) -> list[wire.Miss | wire.Hint]:
        """The misses and hints for the next ping, of identities that the server knows, as many as fit into it."""
        news: list[wire.Miss | wire.Hint] = []
        for identity, seen in list(self._pending_reports)[: wire.MAX_MISSES]:
            try:
                declared = self._identities.declared(identity)
            except KvstrataError:
                self._pending_reports.remove(
                    (identity, seen)
                )  # the server refuses the identity, so it cannot count them
                continue
            if declared is None:
                break
            news.append(msgspec.structs.replace(seen, identity_id=declared.identity_id))
        return news

    def drop_reported(self, count: int) -> None:
        """Forget the first `count` items of `pending_reports`."""
        for _ in range(count):
            self._pending_reports.popleft()

    def released(self, leases: Sequence[LeaseName]) -> None:
        """Forget the lookups whose leases the server has taken back; `leases` may include other processes' leases."""
        for lease in leases:
            if lease.session == self._link.session and lease.epoch == self._link.epoch:
                self.live.pop(lease.seq, None)

    def take_back(self, seqs: Sequence[int], spend: Callable[[LeaseName], bool]) -> list[LeaseName]:
        """Release the leases of these lookups, as the server asks, unless claimed or in use. Returns the released ones.

        `spend` keeps loads from beginning under a lease, see `LookupCall.take_back`.
        """
        taken_back = []
        for seq in seqs:
            call = self.live.get(seq)
            if call is not None and call.take_back(spend):
                taken_back.append(LeaseName(self._link.session, seq, self._link.epoch))
        self.revoked += len(taken_back)
        return taken_back

    def _ask(
        self,
        call: LookupCall,
        identity: Identity,
        asked: wire.Lookup,
        deadline_s: float,
        again: bool = False,
    ) -> None:
        """Send `asked`; its numbers and deadline are set at sending."""
        if call.done:
            return

        def message(seq: int, remaining_ms: int) -> wire.Lookup | None:
            declared = self._identities.declared(identity)
            if declared is None:
                return None
            call.seq, call.epoch = seq, declared.epoch
            self.live[seq] = call
            left_ms = max(1, remaining_ms - asked.wait_ms - LOOKUP_MARGIN_MS)
            return msgspec.structs.replace(
                asked, seq=seq, deadline_ms=left_ms, identity_id=declared.identity_id
            )

        def failed(error: KvstrataError) -> None:
            self._asking.pop(call, None)
            if isinstance(error, UnknownIdentity) and not again:
                self.live.pop(call.seq, None)
                identity.declared = None
                self._ask(call, identity, asked, deadline_s, again=True)
                return
            reason = MissReason.REFUSED
            if isinstance(error, Unavailable):
                reason = MissReason.BREAKER_OPEN
            elif isinstance(error, DeadlineExceeded):
                reason = MissReason.DEADLINE
            if call.finish(miss(reason)):
                self._undo(call)

        pending = Pending(Kind.ASK, message, partial(self._answered, call, asked), failed, deadline_s)
        self._asking[call] = pending
        self._link.ask(pending)

    def _answered(self, call: LookupCall, asked: wire.Lookup, reply: wire.AnyReply) -> None:
        del self._asking[call]
        n_asked = len(asked.keys) // KEY_BYTES
        n = reply.n_chunks if isinstance(reply, wire.LookupReply) else -1
        if not isinstance(reply, wire.LookupReply) or not _sensible(reply, n_asked, asked.tails):
            log.error("invalid reply to a lookup, which counts as a miss: %.200r", reply)
            call.finish(miss(MissReason.REFUSED))
            self._undo(call)
        elif n == 0 and not reply.tail_tokens:
            self.live.pop(call.seq, None)
            call.finish(miss(self._reason(reply.reason)))
        else:
            lease = LeaseName(self._link.session, call.seq, reply.epoch)
            extents = reply.extents + reply.tail_extents
            slices = len(extents) // EXTENT.size // (n + bool(reply.tail_tokens))
            self.hit_chunks += n
            # If the caller has cancelled meanwhile, `_cancel` is already posted and will undo the lookup.
            more: MissReason | Literal[""] = "" if not reply.reason else self._reason(reply.reason)
            call.finish(
                LookupResult(
                    n,
                    lease,
                    extents,
                    slices,
                    more,
                    reply.l2_chunks,
                    reply.tail_tokens,
                    max(n, reply.promised),
                )
            )

    def _reason(self, word: str) -> MissReason:
        """The reason that a reply names; FORGOTTEN for a word that only the server knows, which may be newer."""
        try:
            return MissReason(word)
        except ValueError:
            if not self._unknown_reason_logged:
                self._unknown_reason_logged = True
                log.warning(
                    "unknown reason of a miss from the server: %.80r; it is counted as %s; install the server's "
                    "version of kvstrata in the engine",
                    word,
                    MissReason.FORGOTTEN,
                )
            return MissReason.FORGOTTEN

    def _cancel(self, call: LookupCall) -> None:
        """Called by `LookupCall.cancel` in any thread."""

        def cancel() -> None:
            pending = self._asking.pop(call, None)
            if pending is not None:
                self._link.table.remove(pending)
            self._undo(call)

        self._link.post(cancel)

    def _undo(self, call: LookupCall) -> None:
        """Cancel a lookup at the server, unless it was never sent, found nothing, or has ended."""
        target = call.seq
        if self.live.pop(target, None) is not None and call.epoch == self._link.epoch:
            self._link.tell(lambda seq, _: wire.Cancel(seq, target))


def _sensible(reply: wire.LookupReply, n_asked: int, tails: Sequence[wire.TailSet]) -> bool:
    """Whether the reply is a miss with a reason, or has hits that were asked for, each with its extents."""
    n, tokens = reply.n_chunks, reply.tail_tokens
    if reply.promised > (n_asked if n and not tokens else 0):
        return False
    if tokens:
        asked = any(each.chunk == n and tokens in each.tokens for each in tails)
        row = len(reply.tail_extents)
        if not asked or not row or row % EXTENT.size or len(reply.extents) != n * row:
            return False
        return 0 <= n <= n_asked
    if reply.tail_extents:
        return False
    if n == 0:
        return bool(reply.reason)
    return 0 < n <= n_asked and len(reply.extents) > 0 and len(reply.extents) % (n * EXTENT.size) == 0


class ReleaseQueue(msgspec.Struct, eq=False):
    """The leases to release: this process's shares, and those of the whole group.

    All methods but `end` belong to the I/O thread.
    """

    _link: Link
    _ledger: CopyLedger
    _lookups: Lookups
    _waiting: dict[bool, dict[LeaseName, None]] = msgspec.field(default_factory=lambda: {False: {}, True: {}})
    _sending: dict[bool, bool] = msgspec.field(default_factory=lambda: {False: False, True: False})
    _past_epochs: set[int] = set()
    _held_until_s: float = math.inf
    _added: bool = False

    def end(self, leases: Sequence[LeaseName], *, group: bool) -> None:
        """Prevent further loads under these leases, and release those that no load uses. Any thread.

        A running load releases its lease when it ends.
        """
        if leases and not self._link.forked:
            idle = self._ledger.spend(leases)
            self._link.post(lambda: self.add(idle, group=group))

    def add(self, leases: Sequence[LeaseName], *, group: bool) -> None:
        """Release these leases; with `group` for every process of the engine."""
        waiting = self._waiting[group]
        for lease in leases:
            if lease.epoch not in self._past_epochs:
                waiting[lease] = None
        while len(waiting) > WAITING_LEASES:
            del waiting[next(iter(waiting))]
        self._added = True

    def restarted(self, old_epoch: int, epoch: int) -> None:
        """Forget the leases of the old epoch, which have ended: a server of another epoch is attached."""
        self._past_epochs.add(old_epoch)
        self._past_epochs.discard(epoch)
        for waiting in self._waiting.values():
            for lease in [lease for lease in waiting if lease.epoch in self._past_epochs]:
                del waiting[lease]

    def due_s(self) -> float:
        """The time (`time.monotonic`) at which `tick` must run even if no message arrives; inf: never."""
        return self._held_until_s

    def tick(self, now_s: float) -> None:
        """Send the leases that were added, unless they may still wait. Called once per pass of the link."""
        added, self._added = self._added, False
        if added and self._link.table.n_asks:
            self._held_until_s = min(self._held_until_s, now_s + HOLD_S)
        elif added or self._held_until_s <= now_s:
            self.pump()

    def pump(self) -> None:
        """Send waiting leases; one message of each kind (own share, whole group) is under way at a time."""
        self._held_until_s = math.inf
        for group in (False, True):
            if not self._sending[group]:
                self._send(group)

    def _send(self, group: bool) -> None:
        waiting = self._waiting[group]
        leases = [lease for lease in waiting if lease.epoch == self._link.epoch][:LEASES_PER_MESSAGE]
        if not leases:
            return
        for lease in leases:
            del waiting[lease]
        self._sending[group] = True
        names = [(lease.session, lease.seq) for lease in leases]

        def ended(_: object) -> None:
            self._sending[group] = False
            self._lookups.released(leases)
            self.pump()

        def failed(error: KvstrataError) -> None:
            self._sending[group] = False
            if isinstance(error, Unavailable):  # the connection is lost
                self.add(leases, group=group)
            else:
                ended(error)

        self._link.ask(Pending(Kind.TELL, lambda seq, _: wire.Release(seq, names, group), ended, failed))
