"""Lookups: sent in the background, answered with leases, and undone when no caller wants them.

`LiveLookups` holds the lookups that this process still wants; it names them when it attaches again to the same server,
which ends the leases of all others.  `Lookups` carries each lookup from its call to its answer or its end.  It also
keeps the misses that a caller saw without a lookup, until a ping has told the server of them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from kvstrata.client.handles import AskedTails, LookupCall, LookupResult, miss
from kvstrata.client.identities import Identity, IdentityTable
from kvstrata.client.link import Link
from kvstrata.client.requests import Kind, Pending
from kvstrata.errors import DeadlineExceeded, KvstrataError, Unavailable, UnknownIdentity
from kvstrata.keys import ChunkHasher, batch
from kvstrata.rpc import wire
from kvstrata.rpc.tail_wire import TailSet
from kvstrata.types import EXTENT, KEY_BYTES, LeaseName, MissReason

log = logging.getLogger(__name__)

LOOKUP_MARGIN_MS = 10
"""The server's deadline is this much shorter than the caller's, so that its answer arrives in time."""


MAX_UNTOLD = 256
"""Misses that wait for a ping; the oldest ones beyond are never told."""


class LiveLookups:
    """Lookups that are sent or hold a lease, by their numbers in the present epoch.  Belongs to the I/O thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._calls: dict[int, LookupCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def numbers(self) -> list[int]:
        """The numbers of these lookups."""
        return list(self._calls)

    def sent(self, call: LookupCall) -> None:
        """Add a lookup that is being sent, under `call.seq`."""
        self._calls[call.seq] = call

    def get(self, seq: int) -> LookupCall | None:
        """The lookup of this number, if it is still wanted."""
        return self._calls.get(seq)

    def end(self, seq: int) -> bool:
        """Remove a lookup that is not wanted any more. Returns whether it was wanted until now."""
        return self._calls.pop(seq, None) is not None

    def released(self, leases: Sequence[LeaseName]) -> None:
        """Remove the lookups whose leases the server has taken back; `leases` may include other processes' leases."""
        for lease in leases:
            if lease.session == self._link.session and lease.epoch == self._link.epoch:
                self._calls.pop(lease.seq, None)

    def restarted(self) -> None:
        """Forget all lookups: the server of the new epoch knows none of them."""
        self._calls.clear()


class Lookups:
    """All lookups of one process: `begin` from any thread, the rest in the I/O thread."""

    def __init__(self, link: Link, live: LiveLookups, identities: IdentityTable, timeout_ms: int) -> None:
        """`timeout_ms` is the deadline of a lookup that names none."""
        self._link = link
        self._live = live
        self._identities = identities
        self._timeout_ms = timeout_ms
        self._asking: dict[LookupCall, Pending] = {}
        self._untold: deque[tuple[Identity, wire.Miss]] = deque(maxlen=MAX_UNTOLD)
        self._told_of_unknown_reason = False
        self.begun = 0
        self.hit_chunks = 0
        self.revoked = 0

    def begin(
        self,
        identity: Identity,
        chain: bytes | ChunkHasher,
        request_id: str,
        probe: bytes,
        deadline_ms: int | None,
        tails: Sequence[AskedTails] = (),
    ) -> LookupCall:
        """See `CacheClient.lookup`."""
        if isinstance(chain, ChunkHasher):
            probe = probe or chain.probe
            chain = chain.chain
        if len(chain) % KEY_BYTES:
            raise ValueError(f"chain has {len(chain)} bytes, not a multiple of {KEY_BYTES}")
        call = LookupCall(self._cancel)
        self.begun += 1
        asks = bool(chain or tails)
        if not asks or not self._link.accepts:
            call.finish(miss(MissReason.BREAKER_OPEN if asks else MissReason.NEVER_STORED))
            return call
        limit_ms = self._timeout_ms if deadline_ms is None else deadline_ms
        deadline_s = time.monotonic() + min(limit_ms, wire.MAX_DEADLINE_MS) / 1000
        keys = chain[: wire.MAX_CHUNKS * KEY_BYTES]
        sets = [TailSet(*asked) for asked in tails]
        self._link.post(lambda: self._ask(call, identity, keys, sets, request_id[:256], probe, deadline_s))
        return call

    def missed(self, identity: Identity, chain: bytes, absent: int, request_id: str, probe: bytes) -> None:
        """See `CacheClient.missed`. `absent`: number of the absent chunk in `chain`."""
        chain = chain[: wire.MAX_CHUNKS * KEY_BYTES]
        seen = wire.Miss(
            0, request_id[:256], batch.count(chain), batch.nth(chain, absent), chain[-KEY_BYTES:], probe
        )
        self._link.post(lambda: self._untold.append((identity, seen)))

    def untold_misses(self) -> list[wire.Miss]:
        """What the next ping tells: misses of identities that the server knows, as far as one message takes them."""
        misses: list[wire.Miss] = []
        for identity, seen in list(self._untold)[: wire.MAX_MISSES]:
            try:
                declared = self._identities.declared(identity)
            except KvstrataError:
                self._untold.remove(
                    (identity, seen)
                )  # the server refuses the identity, so it counts nothing of it
                continue
            if declared is None:
                break
            misses.append(msgspec.structs.replace(seen, identity_id=declared.identity_id))
        return misses

    def misses_told(self, count: int) -> None:
        """Forget the first misses of `untold_misses`."""
        for _ in range(count):
            self._untold.popleft()

    def take_back(self, seqs: Sequence[int], spend: Callable[[LeaseName], bool]) -> list[LeaseName]:
        """Give up the leases of these lookups, as the server asks, unless claimed or in use; returns those given up.

        `spend` keeps loads from beginning under a lease, see `LookupCall.take_back`.
        """
        taken_back = []
        for seq in seqs:
            call = self._live.get(seq)
            if call is not None and call.take_back(spend):
                taken_back.append(LeaseName(self._link.session, seq, self._link.epoch))
        self.revoked += len(taken_back)
        return taken_back

    def _ask(
        self,
        call: LookupCall,
        identity: Identity,
        keys: bytes,
        tails: list[TailSet],
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
            self._live.sent(call)
            return wire.Lookup(
                seq,
                max(1, remaining_ms - LOOKUP_MARGIN_MS),
                declared.identity_id,
                request_id,
                [wire.KeyGroup(wire.Rule.PREFIX, keys)],
                probe,
                tails,
            )

        def failed(error: KvstrataError) -> None:
            self._asking.pop(call, None)
            if isinstance(error, UnknownIdentity) and not again:
                self._live.end(call.seq)
                identity.declared = None
                self._ask(call, identity, keys, tails, request_id, probe, deadline_s, again=True)
                return
            reason = MissReason.REFUSED
            if isinstance(error, Unavailable):
                reason = MissReason.BREAKER_OPEN
            elif isinstance(error, DeadlineExceeded):
                reason = MissReason.DEADLINE
            if call.finish(miss(reason)):
                self._undo(call)

        pending = Pending(Kind.ASK, message, partial(self._answered, call, keys, tails), failed, deadline_s)
        self._asking[call] = pending
        self._link.ask(pending)

    def _answered(
        self, call: LookupCall, keys: bytes, tails: Sequence[TailSet], reply: wire.AnyReply
    ) -> None:
        del self._asking[call]
        n = reply.n_chunks if isinstance(reply, wire.LookupReply) else -1
        if not isinstance(reply, wire.LookupReply) or not _sensible(reply, len(keys) // KEY_BYTES, tails):
            log.error("invalid reply to a lookup, which counts as a miss: %.200r", reply)
            call.finish(miss(MissReason.REFUSED))
            self._undo(call)
        elif n == 0 and not reply.tail_tokens:
            self._live.end(call.seq)
            call.finish(miss(self._reason(reply.reason)))
        else:
            lease = LeaseName(self._link.session, call.seq, reply.epoch)
            extents = reply.extents + reply.tail_extents
            slices = len(extents) // EXTENT.size // (n + bool(reply.tail_tokens))
            self.hit_chunks += n
            # If the caller has cancelled meanwhile, `_cancel` is already posted and will undo the lookup.
            more: MissReason | Literal[""] = "" if not reply.reason else self._reason(reply.reason)
            call.finish(LookupResult(n, lease, extents, slices, more, reply.l2_chunks, reply.tail_tokens))

    def _reason(self, word: str) -> MissReason:
        """The reason that a reply names; FORGOTTEN for a word that only the server knows, which may be newer."""
        try:
            return MissReason(word)
        except ValueError:
            if not self._told_of_unknown_reason:
                self._told_of_unknown_reason = True
                log.warning(
                    "a miss has a reason that only the server knows: %.80r; it is counted as %s; install the server's "
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
        if self._live.end(target) and call.epoch == self._link.epoch:
            self._link.tell(lambda seq, _: wire.Cancel(seq, target))


def _sensible(reply: wire.LookupReply, n_asked: int, tails: Sequence[TailSet]) -> bool:
    """Whether it is a miss with a reason, or hits that were asked for, each with its extents."""
    n, tokens = reply.n_chunks, reply.tail_tokens
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
