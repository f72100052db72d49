"""The requests of vLLM's scheduler, and the state of each request's lookup.

The states of one request's lookup:

    NEW ──sent──▶ ASKED ──leased──▶ HIT ──vLLM allocates blocks──▶ TAKEN
     └───────────────┴── not found, too late, or revoked twice ───▶ MISS

Each state returns to NEW when the lease was revoked, vLLM's caches were reset, L1 has got the prefix meanwhile, or the
request was preempted, is computed without the cache, or has ended.  A lookup is sent when the request arrives if the
queue is short, otherwise when vLLM first asks.  In one step, all answers together are awaited for at most `WAIT_S`.

Invariant: a lease is in exactly one place: in `Tracked.hit`, in a `Load` handed to the workers, or released.  The lease
is claimed from the moment when vLLM is promised its chunks until the end of that step, before which it is released if
vLLM allocates blocks; at other times the server may revoke it.

The tenant of each request is the engine's own, or one that the request names in
`kv_transfer_params["kvstrata.tenant"]`.  It gets the named tenant if the settings allow this engine to name it
(`request_tenants`); the server checks again, by the engine's token.  A request that names any other tenant, or
something that is not a name, is computed without the cache and never as a request of another tenant.

vLLM's own prefix cache has no tenants.  So a request that does not belong to the engine's own tenant gets a cache salt
that only this engine can make: one for each tenant and salt of the request, and a fresh one for each refused request.
Without it, the time to the first token would reveal to one tenant which prompts another has sent.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvstrata.client import Identity, LookupCall, LookupResult
from kvstrata.config.lmcache.fates import is_on
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.keys import ChunkHasher, batch
from kvstrata.observability.load_line import prompt_work
from kvstrata.observability.logging import Thinning
from kvstrata.patience import patience
from kvstrata.rpc.wire import INSTANCE_OR_NONE, MAX_DEADLINE_MS, TRACEPARENT_CHARS, TailSet
from kvstrata.types import MissReason, canonical_json

logger = logging.getLogger("vllm.kvstrata")

TENANT = "kvstrata.tenant"
"""Key of the tenant's name in `kv_transfer_params`."""
MAX_TENANT_CHARS = 256


class TenantRefused(Exception):
    """The request is computed without the cache; `reason` is one of lookup_table.SKIP_REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestTenants:
    """The tenants that requests of one engine may name. Belongs to the scheduler's thread."""

    def __init__(self, own: str, others: Iterable[str]) -> None:
        self.own = own
        """The tenant of requests that name none."""
        self._may_name = dict.fromkeys((own, *others))
        self._secret = secrets.token_bytes(32)
        self._thinning = Thinning()

    @property
    def first(self) -> list[str]:
        """The engine's own tenant, and one that requests may name: the engine's token may allow the latter alone."""
        return list(self._may_name)[:2]

    def of(self, request: Any) -> str:
        """The request's tenant. Raises TenantRefused, and logs each reason from time to time."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or TENANT not in params:
            return self.own
        named = params[TENANT]
        if not isinstance(named, str) or len(named) > MAX_TENANT_CHARS:
            kind = f"{len(named)} characters" if isinstance(named, str) else type(named).__name__
            self._thinning.log(
                logger,
                logging.WARNING,
                "tenant_invalid",
                "request %r is computed without the cache: kv_transfer_params[%r] must be a text of at most %d "
                "characters, found %s",
                request.request_id,
                TENANT,
                MAX_TENANT_CHARS,
                kind,
            )
            raise TenantRefused("tenant_invalid")
        if named not in self._may_name:
            self._thinning.log(
                logger,
                logging.WARNING,
                "tenant_refused",
                "request %r is computed without the cache: this engine may not name its tenant %a; list the tenant in "
                "the engine's setting request_tenants if it may",
                request.request_id,
                named,
            )
            raise TenantRefused("tenant_refused")
        return named

    def separate(self, request: Any, tenant: str | None) -> None:
        """Make a request share blocks of vLLM's own cache only with requests of its tenant; None: with no request.

        Call it before vLLM has looked for the request's blocks.  vLLM hashes the blocks of the prompt once more.
        """
        if tenant == self.own:
            return
        shares = (
            [tenant, request.cache_salt] if tenant is not None else ["refused", secrets.token_hex(16), None]
        )
        salt = hmac.digest(self._secret, canonical_json(shares), hashlib.sha256).hex()
        request.cache_salt = f"kvstrata-{salt}"
        request.block_hashes.clear()
        request.update_block_hashes()


WAIT_S = 0.0015
"""Maximum wait for answers to lookups in one step."""
SOON_S = 0.01
"""Time after vLLM first asked from which an unanswered lookup is not awaited any more, only checked in each step."""
WAIT_SHARE = 1.5
"""Maximum wait for promised chunks, as a multiple of the time in which this engine would compute them.  More than 1,
since the other engine may have other work and its chunks are copied twice.  A broken promise ends the wait at once."""
EARLY_LOOKUPS = 8
"""Maximum number of unanswered lookups that are sent before vLLM asks; more would hold leases for requests that still
wait in vLLM's queue."""
REPEEK_S = 0.1
"""Interval of checks for a missed prefix while vLLM keeps asking.  If a lease is revoked within this time after the
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
"""Reasons why a request is computed without the cache; each is counted."""


class LookupState(enum.Enum):
    """The progress of a request's lookup."""

    NEW = enum.auto()
    """No lookup is sent: keys are being made, or no server is attached yet."""
    ASKED = enum.auto()
    """The lookup is sent and not answered."""
    HIT = enum.auto()
    """Chunks are leased and promised to vLLM, or will be promised when it asks."""
    TAKEN = enum.auto()
    """vLLM has allocated blocks; the lease was passed to the workers or released."""
    MISS = enum.auto()
    """No chunk was found in L1 and L2 in time; L1 is checked again while vLLM keeps asking."""


SKIP_LOAD = "lmcache.skip_load"
"""Key in `kv_transfer_params`: if true, nothing is loaded for the request, and its chunks are stored."""
MAX_LOAD = "max_load_tokens"
"""vLLM's own key there: the maximum number of tokens to load beyond those in vLLM's cache."""
STORE = "kvstrata.store"
"""Key there: with the value `commit`, the request's chunks are stored at once, even if the engine stores late."""
WAIT = "kvstrata.wait_ms"
"""Key there: a number of milliseconds, if the sender has given the prompt to another engine of the server too.  The
request waits at most that long for that engine to promise and store the prompt's chunks, and makes no promise
itself."""
FROM = "kvstrata.from"
"""Key there: the id of the instance that serves that other engine, if it is not this engine's."""
_thinning = Thinning()


class Tracked(msgspec.Struct, eq=False):
    """One request of vLLM, from its arrival to its end."""

    request: Any
    tenant: str = ""
    """The request's tenant; undefined while the request is computed without the cache."""
    salt: str = ""
    """The salt that the request came with."""
    traceparent: str = ""
    """The span of the request's client or of vLLM, the parent of the server's spans."""
    waits_s: float = -1.0
    """Time since which the request waits for the workers to report their weights; -1 before."""
    skipped: bool = False
    """The request is computed without the cache from now on, for one of SKIP_REASONS."""
    identity: Identity | None = None
    hasher: ChunkHasher | None = None
    adapter: int = 0
    """Number of the question to the workers whose answer is the LoRA adapter in `identity`; 0 without adapter."""
    state: LookupState = LookupState.NEW
    call: LookupCall | None = None
    """The lookup while its outcome is awaited (ASKED) or its lease is held here (HIT)."""
    hit: LookupResult | None = None
    asked_s: float = -1.0
    """Time when vLLM first asked in this round; -1 before."""
    wait_ms: int = 0
    """Time beyond the lookup's deadline for which it may wait for chunks that other engines compute now."""
    miss: MissReason | None = None
    """Why the last round did not find all chunks."""
    missed_s: float = 0.0
    revoked_s: float = -math.inf
    """Time when the request's lease was last revoked while it waited."""
    computed_tokens: int = 0
    """Number of tokens in vLLM's own cache when vLLM last asked."""
    known_tokens: int = 0
    """Number of tokens whose KV vLLM has since it last asked: from its own cache and from us."""
    scheduled: bool = False
    """Whether a step has computed tokens of this request since vLLM last asked."""
    untrusted: bool = False
    """The request depends on KV from another connector that may be of earlier weights: none of it is stored."""
    asynchronous: bool = False
    """Whether vLLM was promised an asynchronous load."""
    loading: bool = False
    """An asynchronous load is under way: vLLM itself keeps the blocks until the load is reported."""
    loaded_chunks: dict[int, int] = {}
    """Block id → chunk of the last load, to find the chunks of blocks that failed."""
    expects_ms: int = 0
    """See WAIT."""
    source: str = ""
    """See FROM."""
    load_tokens: int = 0
    """Maximum number of tokens that are loaded for the request; 0: any."""
    stores_at_once: bool = False
    """The request's chunks are stored at once; see STORE."""
    no_load: bool = False
    """The request asks for no load, or one of its loads failed: the rest of it is computed."""
    has_promised: bool = False
    """The promise of the prompt's chunks was sent, or was found to be unnecessary."""
    next_store: int = 0
    """Index of the first chunk that is not stored, being stored, or loaded; with late stores, not recorded."""
    windows_next: int = 0
    """Like `next_store`, for groups of which only windows are stored."""
    tail_end: int = 0
    """Number of tokens at the end of the tail that is stored, being stored, or was loaded."""
    tail_keys: tuple[int, list[bytes]] = -1, []
    """The chunk whose tail keys were derived last, and these keys."""
    tails_asked: list[int] = []
    """The chunks whose tails the last lookup named."""
    tails_after: int = -1
    """Number of chunks after which the lookup ended in L2, if it is repeated for the tails there; -1: it is not."""
    junction: int = 0
    """Number of leading chunks that L1 had of the groups with full attention.  If the hit is shorter, another prompt
    shares these chunks, and this request stores the windows that were missing for a hit of that length."""
    recorded: list[Any] = []
    """With late stores, the records of the chunks before `next_store`."""
    held_steps: int = 0
    """Number of steps that the request's hit has waited for stores of the blocks that it will take."""
    stores: set[int] = set()
    """Stores that may still read this request's blocks."""
    deferred: bool = False
    """Complete chunks wait until a load is confirmed."""
    stale: bool = False
    """The request's blocks may hold bad KV, or KV from before a reset: KV computed from them is not stored."""

    def __post_init__(self) -> None:
        self.salt = self.request.cache_salt or ""
        traceparent = (getattr(self.request, "trace_headers", None) or {}).get("traceparent", "")
        self.traceparent = traceparent if len(traceparent) == TRACEPARENT_CHARS else ""
        params = self.request.kv_transfer_params
        params = params if isinstance(params, dict) else {}
        most, store = params.get(MAX_LOAD), params.get(STORE)
        if type(most) is int and most >= 0:
            self.load_tokens = most
        elif most is not None:
            self._ignored(MAX_LOAD, "an integer of 0 or more", most)
        wait_ms = params.get(WAIT)
        if type(wait_ms) is int and 0 <= wait_ms <= MAX_DEADLINE_MS:
            self.expects_ms = wait_ms
        elif wait_ms is not None:
            self._ignored(WAIT, f"an integer from 0 to {MAX_DEADLINE_MS}", wait_ms)
        source = params.get(FROM)
        if isinstance(source, str) and re.fullmatch(INSTANCE_OR_NONE, source):
            self.source = source
        elif source is not None:
            self._ignored(FROM, "the id of an instance", source)
        self.stores_at_once = store == "commit"
        if store is not None and not self.stores_at_once:
            self._ignored(STORE, "`commit`", store)
        self.no_load = is_on(params.get(SKIP_LOAD)) or most == 0

    def _ignored(self, name: str, must: str, found: Any) -> None:
        _thinning.log(
            logger, logging.WARNING, name,
            "request %r: kv_transfer_params[%r] has no effect: it must be %s, found %.80r",
            self.request.request_id, name, must, found,
        )  # fmt: skip


class LookupTable:
    """All requests and their lookups. Belongs to the scheduler's thread."""

    def __init__(
        self,
        engine: Engine,
        tenants: RequestTenants,
        tails: Callable[[Tracked], list[TailSet]] | None = None,
    ) -> None:
        """`tails(tracked)` returns the tails that a lookup names; None in an engine without tails."""
        self._client, self._now = engine.client, engine.now
        self._engine = engine
        self._timeout_ms = engine.settings.lookup_timeout_ms
        self._tails = tails or (lambda tracked: [])
        self._asks_tails = tails is not None
        self._exact_chunk_tokens = engine.chunk_tokens if engine.exact else 0
        """If not 0, a hit must leave a token to compute and end with a chunk: no lookup asks for more chunks."""
        self._tenants = tenants
        self._begun_s = engine.now()
        self.tracked: dict[str, Tracked] = {}
        """Requests by id."""
        self.may_park = True
        """Whether one more request may hold blocks for chunks that are still computed elsewhere."""
        self._in_parts = engine.recomputes and not engine.exact and engine.settings.load_mode != "sync"
        self._early = 0
        """Number of lookups sent and not answered."""
        self._may_wait_s = WAIT_S
        """The rest of `WAIT_S` in this step."""
        self._claimed: dict[LookupCall, None] = {}
        """Lookups whose chunks were promised to vLLM in this step, before it has allocated blocks for them."""
        self.counts = {
            "lookups": 0,
            "lookup_timeouts": 0,
            "leases_revoked": 0,
            **{f"skipped_{reason}": 0 for reason in SKIP_REASONS},
            **{f"miss_{reason}": 0 for reason in MissReason},
        }
        """Totals since the scheduler side last took them."""

    def track(self, request: Any) -> Tracked:
        """The state of a request; made when vLLM first names the request."""
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
            elif request.mm_features and self._engine.media_are_counted:
                self.skip(tracked, "counted_media")
        return tracked

    def skip(self, tracked: Tracked, reason: str) -> None:
        """Compute the rest of this request without the cache: release its lease; stores continue."""
        if not tracked.skipped:
            tracked.skipped = True
            self.counts[f"skipped_{reason}"] += 1
        self.forget(tracked)

    def _find_tenant(self, tracked: Tracked) -> None:
        """Set the request's tenant, or compute it without the cache; separate it in vLLM's own cache in both cases."""
        try:
            tracked.tenant = self._tenants.of(tracked.request)
        except TenantRefused as refused:
            self.skip(tracked, refused.reason)
        self._tenants.separate(tracked.request, None if tracked.skipped else tracked.tenant)

    def next_step(self) -> None:
        """End a step: allow the server again to revoke leases whose chunks vLLM was promised but has not taken.

        The requests of these leases wait in vLLM's queue, and other requests may need the space meanwhile.
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
        """How many leading chunks L1 has in the slices that every chunk of a hit needs.

        After a hit of all chunks that is known; otherwise the index is read, which takes 45 µs for 128k tokens.
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
        """Drop the outcome of an earlier round if it is void, and record when vLLM first asked."""
        if tracked.state is LookupState.TAKEN:
            # vLLM asks only before it computes a request, so the request was preempted.
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
        own_tokens = tracked.computed_tokens
        if tracked.asked_s < 0 and len(self._engine.groups) == 1:
            own_tokens = self._engine.pins.cached_tokens(tracked.request, self._engine.groups[0].number)
        tracked.wait_ms = self._wait_ms(tracked, own_tokens)
        if not (tails or self._client.has_l2 or tracked.wait_ms or self._client.peek(identity, chain)):
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
            traceparent=tracked.traceparent,
            own_chunks=own_tokens // self._engine.chunk_tokens,
            stores_late=self._engine.store_late is not None and self._engine.store_late(),
            wait_ms=tracked.wait_ms,
            expects=tracked.expects_ms > 0,
            source=tracked.source if tracked.expects_ms else "",
            in_parts=self._in_parts and self.may_park and tracked.wait_ms > 0,
        )
        tracked.tails_asked = [asked.chunk for asked in tails]
        tracked.state = LookupState.ASKED
        self._early += 1
        self.counts["lookups"] += 1

    def ask_for_more(self, tracked: Tracked, n_chunks: int) -> LookupCall:
        """Look up the promised chunks after `n_chunks`, for a request that holds blocks for all of them."""
        assert tracked.identity is not None and tracked.hasher is not None
        return self._client.lookup(
            tracked.identity,
            self._chain(tracked),
            request_id=tracked.request.request_id,
            probe=tracked.hasher.probe,
            deadline_ms=self._timeout_ms,
            traceparent=tracked.traceparent,
            wait_ms=max(1, tracked.wait_ms - int((self._now() - tracked.asked_s) * 1000)),
            in_parts=True,
            follows=n_chunks,
        )

    def _wait_ms(self, tracked: Tracked, own_tokens: int) -> int:
        """Time that the lookup may wait for chunks of other engines, by the tokens that vLLM lacks; 0 if unknown."""
        if tracked.expects_ms:
            return tracked.expects_ms
        tokens_s = self._client.prompt_tokens_s
        if not (self._engine.settings.await_siblings and tokens_s and self._client.has_promises):
            return 0
        compute_s = prompt_work(own_tokens, tracked.request.num_tokens) / tokens_s
        return min(MAX_DEADLINE_MS, int(1000 * WAIT_SHARE * compute_s))

    def await_answer(self, tracked: Tracked, now: float) -> bool:
        """Wait for the answer, for the rest of `WAIT_S` in this step. False: unknown yet, vLLM asks again."""
        if tracked.state is LookupState.NEW and not self._client.connected and not self._settling():
            self._missed(tracked, MissReason.BREAKER_OPEN)
        if tracked.state is LookupState.ASKED:
            assert tracked.call is not None
            begun_s = self._now()
            soon = begun_s - tracked.asked_s < SOON_S
            answered = tracked.call.wait(self._may_wait_s if soon else 0.0)
            self._may_wait_s = max(0.0, self._may_wait_s - (self._now() - begun_s))
            if answered:
                self._answered(tracked)
        if tracked.state in (LookupState.NEW, LookupState.ASKED):
            if (now - tracked.asked_s) * 1000 < self._timeout_ms + tracked.wait_ms:
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

    def taken(self, tracked: Tracked) -> None:
        """vLLM has allocated blocks for a hit. The lease, which is claimed, leaves this side in this step."""
        tracked.hit = tracked.call = None
        tracked.tails_after = -1
        tracked.state = LookupState.TAKEN

    def forget(self, tracked: Tracked) -> None:
        """Return to NEW; a lease that the lookup has or will get is released."""
        self._give_back(tracked)
        tracked.state = LookupState.NEW

    def _chain(self, tracked: Tracked) -> ChunkHasher | bytes:
        """The keys to look up; empty if no hit is possible."""
        assert tracked.hasher is not None
        if tracked.tails_after >= 0:
            return batch.part(tracked.hasher.chain, 0, tracked.tails_after)
        end = tracked.hasher.n_chunks
        if self._exact_chunk_tokens:
            end = min(end, (tracked.request.num_tokens - 1) // self._exact_chunk_tokens)
        if tracked.load_tokens:
            end = min(end, (tracked.computed_tokens + tracked.load_tokens) // self._engine.chunk_tokens)
        if end < tracked.hasher.n_chunks:
            return batch.part(tracked.hasher.chain, 0, end)
        return tracked.hasher if end else b""

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
            tracked.state = LookupState.NEW
            self.ask(tracked)
            return
        tracked.hit = result
        tracked.state = LookupState.HIT

    def _wants_tail_of(self, tracked: Tracked, result: LookupResult) -> bool:
        """Whether to look up once more, for the tails of the first chunk that L2 lacked, which was unknown before."""
        assert tracked.hasher is not None
        return (
            self._asks_tails
            and result.l2_chunks > 0
            and result.n_chunks < tracked.hasher.n_chunks
            and result.n_chunks not in tracked.tails_asked
            and tracked.tails_after < 0
            and not tracked.load_tokens
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
        tracked.state = LookupState.MISS
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
        return self._now() - self._begun_s < patience(SETTLE_S) and self._engine.server_seen()
