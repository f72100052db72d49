"""The requests of vLLM's scheduler, and how far the lookup of each has come.

`MACHINE` has the states of one request's lookup.  A lookup is sent when the request arrives if the queue is short,
otherwise when vLLM first asks.  In one step, all answers together are awaited for at most `WAIT_S`.

Invariant: a lease is in exactly one place: in `Tracked.hit`, in a `Load` handed to the workers, or released.  The lease
is claimed from the moment when vLLM is promised its chunks until the end of that step, and again from the allocation
on; at other times the server may revoke it.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from typing import Any

from kvstrata.client import AskedTails, CacheClient, Identity, LookupCall, LookupResult
from kvstrata.connectors.vllm.request_tenants import RequestTenants, TenantRefused
from kvstrata.keys import ChunkHasher, batch
from kvstrata.patience import patience
from kvstrata.states import Machine
from kvstrata.types import MissReason

WAIT_S = 0.0015
"""Longest wait for answers to lookups in one step."""
EARLY_LOOKUPS = 8
"""A lookup is sent before vLLM asks for it only while fewer lookups than this are unanswered; more would hold leases
for requests that still wait in vLLM's queue."""
REPEEK_S = 0.1
"""Time between two looks for a missed prefix while vLLM keeps asking.  If a lease is revoked within this time after the
last revocation, the request counts as a miss."""
SETTLE_S = 0.5
"""After the engine's start, requests wait this long for the first attachment, if a server seems to run."""
SKIP_REASONS = (
    "prompt_embeds",
    "resumable",
    "unnamed_media",
    "counted_media",
    "unreadable_adapter",
    "tenant_invalid",
    "tenant_refused",
    "error",
)
"""Why a request is computed without the cache; each is counted."""


class LookupState(enum.Enum):
    """How far a request's lookup has come."""

    NEW = enum.auto()
    """No lookup is sent: keys are being made, or no server is attached yet."""
    ASKED = enum.auto()
    """The lookup is sent and not answered."""
    HIT = enum.auto()
    """Chunks are leased; vLLM was promised them, or will be promised them when it asks."""
    TAKEN = enum.auto()
    """vLLM has allocated blocks; the lease went to the workers or back to the server."""
    MISS = enum.auto()
    """Nothing was found in L1 and L2 in time; L1 is looked at again while vLLM keeps asking."""


class LookupEvent(enum.Enum):
    """An event in the life of a request's lookup."""

    SENT = enum.auto()
    """The lookup is sent."""
    LEASED = enum.auto()
    """It is answered, with a lease."""
    MISSED = enum.auto()
    """It is answered without a lease, or took too long, or its lease was revoked twice in a short time."""
    ALLOCATED = enum.auto()
    """vLLM allocated blocks for the request."""
    FORGOTTEN = enum.auto()
    """The lookup begins anew or ends: its lease was revoked, vLLM's caches were reset, L1 has the prefix by now, or the
    request was preempted, is computed without the cache, or has ended."""


MACHINE = Machine(
    "Lookup of a request, in vLLM's scheduler",
    LookupState.NEW,
    {
        LookupState.NEW: {
            LookupEvent.SENT: LookupState.ASKED,
            LookupEvent.MISSED: LookupState.MISS,
            LookupEvent.FORGOTTEN: LookupState.NEW,
        },
        LookupState.ASKED: {
            LookupEvent.LEASED: LookupState.HIT,
            LookupEvent.MISSED: LookupState.MISS,
            LookupEvent.FORGOTTEN: LookupState.NEW,
        },
        LookupState.HIT: {
            LookupEvent.MISSED: LookupState.MISS,
            LookupEvent.ALLOCATED: LookupState.TAKEN,
            LookupEvent.FORGOTTEN: LookupState.NEW,
        },
        LookupState.TAKEN: {LookupEvent.FORGOTTEN: LookupState.NEW},
        LookupState.MISS: {LookupEvent.FORGOTTEN: LookupState.NEW},
    },
)
SKIP_LOAD = "lmcache.skip_load"
"""True in a request's `kv_transfer_params`: nothing is loaded for it, and what it computes is stored."""


class Tracked:
    """One request of vLLM, from its arrival to its end."""

    __slots__ = (
        "adapter",
        "asked_s",
        "asynchronous",
        "call",
        "computed_tokens",
        "deferred",
        "hasher",
        "hit",
        "identity",
        "junction",
        "known_tokens",
        "loaded_chunks",
        "loading",
        "miss",
        "missed_s",
        "next_store",
        "no_load",
        "request",
        "revoked_s",
        "salt",
        "scheduled",
        "skipped",
        "stale",
        "state",
        "stores",
        "tail_end",
        "tail_keys",
        "tails_after",
        "tails_asked",
        "tenant",
        "untrusted",
        "waits_s",
        "windows_next",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.tenant = ""
        """The request's tenant; means nothing while it is computed without the cache."""
        self.salt: str = request.cache_salt or ""
        """The salt that the request came with."""
        self.waits_s = -1.0
        """Time since which the request waits for the workers to tell their weights; -1 before."""
        self.skipped = False
        """The request is computed without the cache from now on, for one of SKIP_REASONS."""
        self.identity: Identity | None = None
        self.hasher: ChunkHasher | None = None
        self.adapter = 0
        """The question to the workers that named the LoRA adapter in `identity`; 0 without adapter."""
        self.state = MACHINE.first
        self.call: LookupCall | None = None
        """The lookup while its outcome is awaited (ASKED) or its lease is held here (HIT)."""
        self.hit: LookupResult | None = None
        self.asked_s = -1.0
        """Time when vLLM first asked in this round; -1 before."""
        self.miss: MissReason | None = None
        """Why the last round found nothing, or not all chunks."""
        self.missed_s = 0.0
        self.revoked_s = -math.inf
        """Time when the request's lease was last revoked while it waited."""
        self.computed_tokens = 0
        """Tokens that vLLM's own cache had when vLLM last asked."""
        self.known_tokens = 0
        """Tokens of which vLLM has KV since it last asked: from its own cache and from us."""
        self.scheduled = False
        """Whether a step has computed tokens of this request since vLLM last asked."""
        self.untrusted = False
        """The request builds on KV from another connector that may be of earlier weights: none of it is stored."""
        self.asynchronous = False
        """Whether vLLM was promised an asynchronous load."""
        self.loading = False
        """An asynchronous load is under way: vLLM itself keeps the blocks until the load is reported."""
        self.loaded_chunks: dict[int, int] = {}
        """Block id → chunk of the last load, to find the chunks of blocks that failed."""
        params = request.kv_transfer_params
        self.no_load = isinstance(params, dict) and params.get(SKIP_LOAD) is True
        """The request asks for no load, or a load of it failed: the rest of it is computed."""
        self.next_store = 0
        """All chunks before this one are stored, being stored, or were loaded."""
        self.windows_next = 0
        """As `next_store`, for groups of which only windows are stored."""
        self.tail_end = 0
        """The tail that ends after so many tokens is stored, being stored, or was loaded."""
        self.tail_keys: tuple[int, list[bytes]] = (-1, [])
        """A chunk, and the keys of its tails that were made last."""
        self.tails_asked: list[int] = []
        """The chunks whose tails the last lookup named."""
        self.tails_after = -1
        """The lookup ended after so many chunks, which L2 had, and is asked again for their tails; -1: it is not."""
        self.junction = 0
        """How many leading chunks the groups of full attention had in L1.  If the hit is shorter, another prompt shares
        these chunks, and this request stores the windows that were missing for a hit of that length."""
        self.stores: set[int] = set()
        """Stores that may still read this request's blocks."""
        self.deferred = False
        """Complete chunks wait until a load is confirmed."""
        self.stale = False
        """The request's blocks may hold bad KV, or KV from before a reset: nothing computed from them is stored."""

    def move(self, event: LookupEvent) -> None:
        """Enter the state that `MACHINE` gives."""
        self.state = MACHINE.after(self.state, event)


class LookupTable:
    """All requests and their lookups. Belongs to the scheduler's thread."""

    def __init__(
        self,
        client: CacheClient,
        *,
        timeout_ms: int,
        exact_chunk_tokens: int = 0,
        media_are_counted: bool,
        server_seen: Callable[[], bool],
        tails: Callable[[Tracked], list[AskedTails]] | None = None,
        tenants: RequestTenants,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tails(tracked)` are the tails that a lookup names; None in an engine that has none.  `timeout_ms` is the
        deadline of a lookup; see `SchedulerSide` for the other arguments.

        With `exact_chunk_tokens`, the size of a chunk, a hit must leave a token to compute and end with a chunk: no
        lookup asks for more chunks.
        """
        self._client = client
        self._timeout_ms = timeout_ms
        self._tails = tails or (lambda tracked: [])
        self._asks_tails = tails is not None
        self._exact_chunk_tokens = exact_chunk_tokens
        self._media_are_counted = media_are_counted
        self._server_seen = server_seen
        self._tenants = tenants
        self._now = now
        self._begun_s = now()
        self.tracked: dict[str, Tracked] = {}
        """By request id."""
        self._early = 0
        """Lookups sent and not answered."""
        self._may_wait_s = WAIT_S
        """The part of `WAIT_S` that is left in this step."""
        self._claimed: dict[LookupCall, None] = {}
        """Lookups whose chunks vLLM was promised in this step and has not taken yet."""
        self.counts = {
            "lookups": 0,
            "lookup_timeouts": 0,
            "leases_revoked": 0,
            **{f"skipped_{reason}": 0 for reason in SKIP_REASONS},
            **{f"miss_{reason}": 0 for reason in MissReason},
        }
        """Totals since the scheduler side last took them."""

    def track(self, request: Any) -> Tracked:
        """The record of a request; made when vLLM first names it."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            tracked = self.tracked[request.request_id] = Tracked(request)
            self._find_tenant(tracked)
            if request.prompt_embeds is not None:
                self.skip(tracked, "prompt_embeds")
            elif request.resumable:
                self.skip(tracked, "resumable")
            elif not all(feature.identifier for feature in request.mm_features):
                self.skip(tracked, "unnamed_media")
            elif request.mm_features and self._media_are_counted:
                self.skip(tracked, "counted_media")
        return tracked

    def skip(self, tracked: Tracked, reason: str) -> None:
        """Compute the rest of this request without the cache: give its lease back; stores go on."""
        if not tracked.skipped:
            tracked.skipped = True
            self.counts[f"skipped_{reason}"] += 1
        self.forget(tracked)

    def _find_tenant(self, tracked: Tracked) -> None:
        """Set the request's tenant, or compute it without the cache; keep it apart in vLLM's own cache either way."""
        try:
            tracked.tenant = self._tenants.of(tracked.request)
        except TenantRefused as refused:
            self.skip(tracked, refused.reason)
        self._tenants.separate(tracked.request, None if tracked.skipped else tracked.tenant)

    def next_step(self) -> None:
        """End a step: the server may again revoke leases whose chunks vLLM was promised and has not taken.

        The requests of these leases wait in vLLM's queue, and other requests may need the room meanwhile.
        """
        self._may_wait_s = WAIT_S
        for call in self._claimed:
            call.unclaim()
        self._claimed.clear()

    def in_l1(self, tracked: Tracked) -> bool:
        """Whether L1 has the request's first chunk, or a tail of it; read from shared memory in microseconds."""
        if not self._client.connected or tracked.identity is None or tracked.hasher is None:
            return False
        return self._client.peek(tracked.identity, self._chain(tracked)) > 0 or bool(self._tails(tracked))

    def whole_in_l1(self, tracked: Tracked) -> int:
        """How many leading chunks L1 has in the slices that are needed in every chunk.

        A hit of all chunks tells; only otherwise the index is looked at, which takes 45 µs for 128k tokens.
        """
        if not self._client.connected or tracked.identity is None:
            return 0
        chain = self._chain(tracked)
        n_chunks = chain.n_chunks if isinstance(chain, ChunkHasher) else batch.count(chain)
        if tracked.hit is not None and tracked.hit.n_chunks == n_chunks:
            return n_chunks
        return int(self._client.pool.peek_whole(tracked.identity, chain)) if chain else 0

    def ask_early(self, tracked: Tracked) -> None:
        """Send the lookup of a request that has just arrived, if few are under way."""
        if self._early < EARLY_LOOKUPS:
            self.ask(tracked)

    def begin_round(self, tracked: Tracked, now: float) -> None:
        """Drop the outcome of an earlier round if it is void, and note when vLLM first asked."""
        if tracked.state is LookupState.TAKEN:
            # vLLM asks only while nothing is computed: the request was preempted.
            self.forget(tracked)
        if tracked.call is not None and tracked.call.revoked:
            self._revoked(tracked, now)
        if tracked.state is LookupState.MISS and now - tracked.missed_s >= REPEEK_S:
            tracked.missed_s = now
            if self.in_l1(tracked):
                self.forget(tracked)
        if tracked.asked_s < 0:
            tracked.asked_s = now

    def ask(self, tracked: Tracked) -> None:
        """Send the lookup if it can hit, otherwise count a miss; do nothing while no server is attached."""
        if tracked.state is not LookupState.NEW or not self._client.connected:
            return
        identity, hasher = tracked.identity, tracked.hasher
        assert identity is not None and hasher is not None
        if not identity.slices:
            if not self._settling():
                # Not all workers are attached, or the identity is refused.
                self._missed(tracked, MissReason.REFUSED)
            return
        chain, tails = self._chain(tracked), self._tails(tracked)
        if not (chain or tails):
            self._missed(tracked, MissReason.NOT_IN_L1)
            return
        if not tails and not self._client.has_l2 and not self._client.peek(identity, chain):
            self._client.missed(identity, chain, request_id=tracked.request.request_id, probe=hasher.probe)
            self._missed(tracked, MissReason.NOT_IN_L1)
            return
        tracked.call = self._client.lookup(
            identity,
            chain,
            request_id=tracked.request.request_id,
            probe=hasher.probe,
            deadline_ms=self._timeout_ms,
            tails=tails,
        )
        tracked.tails_asked = [asked.chunk for asked in tails]
        tracked.move(LookupEvent.SENT)
        self._early += 1
        self.counts["lookups"] += 1

    def await_answer(self, tracked: Tracked, now: float) -> bool:
        """Wait for the answer, for what is left of `WAIT_S` in this step. False: not known yet, vLLM asks again."""
        if tracked.state is LookupState.NEW and not self._client.connected and not self._settling():
            self._missed(tracked, MissReason.BREAKER_OPEN)
        if tracked.state is LookupState.ASKED:
            assert tracked.call is not None
            begun_s = self._now()
            answered = tracked.call.wait(self._may_wait_s)
            self._may_wait_s = max(0.0, self._may_wait_s - (self._now() - begun_s))
            if answered:
                self._answered(tracked)
        if tracked.state in (LookupState.NEW, LookupState.ASKED):
            if (now - tracked.asked_s) * 1000 < self._timeout_ms:
                return False
            self.counts["lookup_timeouts"] += 1
            self._missed(tracked, MissReason.DEADLINE)
        return True

    def promise(self, tracked: Tracked, now: float) -> bool | None:
        """Claim the lease of a hit. If it was revoked: None to look up again, False for a miss."""
        assert tracked.call is not None
        if tracked.call.claim():
            self._claimed[tracked.call] = None
            return True
        return None if self._revoked(tracked, now) else False

    def taken(self, tracked: Tracked, *, loads: bool) -> None:
        """Note that vLLM has allocated blocks for a hit; with `loads` the lease now belongs to the workers."""
        if loads and tracked.call is not None:
            # The lease stays claimed: the workers hold shares of their own.
            self._claimed.pop(tracked.call, None)
        tracked.hit = tracked.call = None
        tracked.tails_after = -1
        tracked.move(LookupEvent.ALLOCATED)

    def forget(self, tracked: Tracked) -> None:
        """Begin anew; a lease that the lookup has or will get is given back."""
        self._give_back(tracked)
        tracked.move(LookupEvent.FORGOTTEN)

    def _chain(self, tracked: Tracked) -> ChunkHasher | bytes:
        """The keys to look up; empty if no hit is possible."""
        assert tracked.hasher is not None
        if tracked.tails_after >= 0:
            return batch.part(tracked.hasher.chain, 0, tracked.tails_after)
        if not self._exact_chunk_tokens:
            return tracked.hasher if tracked.hasher.n_chunks else b""
        return batch.part(
            tracked.hasher.chain, 0, (tracked.request.num_tokens - 1) // self._exact_chunk_tokens
        )

    def _answered(self, tracked: Tracked) -> None:
        assert tracked.call is not None
        result = tracked.call.result
        self._early -= 1
        if result.lease is None:
            tracked.call = None  # a lookup without a lease needs no release
            assert result.reason, "a lookup that found nothing has a reason"
            self._missed(tracked, result.reason)
            return
        if result.reason:
            self.count_miss(tracked, result.reason)
        if self._wants_tail_of(tracked, result):
            self._client.release([result.lease], group=True)
            tracked.call = None
            tracked.tails_after = result.n_chunks
            tracked.move(LookupEvent.FORGOTTEN)
            self.ask(tracked)
            return
        tracked.hit = result
        tracked.move(LookupEvent.LEASED)

    def _wants_tail_of(self, tracked: Tracked, result: LookupResult) -> bool:
        """Whether to ask once more, for the tails of the first chunk that L2 lacked: the lookup could not know it."""
        assert tracked.hasher is not None
        return (
            self._asks_tails
            and result.l2_chunks > 0
            and result.n_chunks < tracked.hasher.n_chunks
            and result.n_chunks not in tracked.tails_asked
            and tracked.tails_after < 0
        )

    def _revoked(self, tracked: Tracked, now: float) -> bool:
        """The lease was revoked while the request waited: True to look up again, False to count a miss."""
        self.counts["leases_revoked"] += 1
        often = now - tracked.revoked_s < REPEEK_S
        tracked.revoked_s = now
        if often:
            self._missed(tracked, MissReason.REFUSED)
        else:
            self.forget(tracked)
        return not often

    def count_miss(self, tracked: Tracked, reason: MissReason) -> None:
        """Count the reason why the request is not served all its chunks, unless it is that of its last round."""
        if tracked.miss != reason:
            tracked.miss = reason
            self.counts[f"miss_{reason}"] += 1

    def _missed(self, tracked: Tracked, reason: MissReason) -> None:
        self.count_miss(tracked, reason)
        tracked.tails_after = -1
        self._give_back(tracked)
        tracked.move(LookupEvent.MISSED)
        tracked.missed_s = self._now()

    def _give_back(self, tracked: Tracked) -> None:
        if tracked.hit is not None:
            assert tracked.hit.lease is not None
            self._client.release([tracked.hit.lease], group=True)
            tracked.hit = None
        elif tracked.call is not None:
            tracked.call.cancel()
            self._early -= 1
        tracked.call = None
        tracked.asked_s = -1.0

    def _settling(self) -> bool:
        """Whether this engine has just started and may be attached in a moment."""
        return self._now() - self._begun_s < patience(SETTLE_S) and self._server_seen()
