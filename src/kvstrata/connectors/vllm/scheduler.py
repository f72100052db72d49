"""The side of the connector that lives in vLLM's scheduler: which chunks to load, which to store.

Every call returns within two milliseconds, whatever the server does (promise P4): hashing is done in
pieces, everything else is queued for the client's I/O thread.  Lookups are waited for 1.5 ms, all of one
step together since vLLM asks about each request of its queue, and asked about again at the next step.

A request's lookup goes through these states; a preemption sends it back to NEW:

    NEW ──hash, peek──▶ ASKED ──reply──▶ HIT (n chunks, leased)   ──blocks allocated──▶ TAKEN
     ▲                    │                ├──nothing to load, or request gone: lease released
     │                    ├────────────────┴──lease revoked while the request waits──▶ NEW, or MISS if too often
     └─peek 0 and no L2───┴──n = 0, timeout, no server──▶ MISS (peeked again now and then)

Invariants
1. A lease is in exactly one place: in `Tracked.hit`, or in a `Load` handed to the workers, or released.
   It is claimed from the promise of its chunks to vLLM to the end of that step, and from the allocation on;
   at other times the server may revoke it.
2. A chunk is stored only from blocks whose tokens are known and whose KV the planned step completes, and
   never while a synchronous load it may rest on is unconfirmed (`_unconfirmed`), unless the only worker can
   tell itself.
3. Keys are made only while the weights are known (`WeightsVersion`), and nothing is stored under an identity of after
   a reset that rests on KV of before it (`Tracked.stale`), unless the weights are still the same.
4. Blocks of a finished request stay allocated until every worker said that no store reads them.

Not here: bytes.  This side maps no engine memory and copies nothing.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.config.model import ClientSettings
from kvstrata.connectors.vllm.announced import Announced, chunk_keys
from kvstrata.connectors.vllm.identity import Adapters, AdapterUnreadable
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan, Store, WorkerReport
from kvstrata.connectors.vllm.reuse import media_items
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.keys import ChunkHasher
from kvstrata.types import EXTENT, KEY_BYTES, RequestIdentity, canonical_json

if TYPE_CHECKING:
    from kvstrata.client import CacheClient, Identity, LookupCall, LookupResult

logger = logging.getLogger("vllm.kvstrata")

WAIT_S = 0.0015
"""Longest wait for lookups in one step."""
HASH_TOKENS_PER_CALL = 65_536
"""Tokens hashed in one call: about one millisecond."""
EARLY_LOOKUPS = 8
"""Lookups sent before vLLM asks; more would pin leases for requests that wait in the queue."""
REPEEK_S = 0.1
"""How often a missed prefix is looked for again while vLLM keeps asking, and a revoked one looked up again."""
SETTLE_S = 0.5
"""After the engine's start, requests wait this long for the first attachment to a server that seems to be there."""
SYNC_LOAD_BYTES = 256 << 20
"""In mode `auto`, hits up to this size are loaded before the forward pass: some 30 ms of a host's memory."""
REMEMBERED_STORES = 4096
UNCONFIRMED_STEPS = 64
"""After so many later steps a worker's report is lost: vLLM has a step or two more under way than pipeline stages."""
MAX_OFFLOAD = "lmcache.max_offload_tokens"
SKIP_REASONS = (
    "prompt_embeds",
    "resumable",
    "unnamed_media",
    "counted_media",
    "unreadable_adapter",
    "error",
)
"""Why a request is computed without the cache; each is counted."""


class LookupState(enum.Enum):
    """See the module's diagram."""

    NEW = enum.auto()
    ASKED = enum.auto()
    HIT = enum.auto()
    TAKEN = enum.auto()
    MISS = enum.auto()


class Tracked:
    """One request of vLLM's, from its arrival to its end."""

    __slots__ = (
        "asked_s",
        "asynchronous",
        "call",
        "computed_tokens",
        "deferred",
        "hasher",
        "hit",
        "identity",
        "loaded_chunks",
        "loading",
        "missed_s",
        "next_store",
        "no_load",
        "request",
        "revoked_s",
        "skipped",
        "stale",
        "state",
        "stores",
        "waits_s",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.waits_s = -1.0
        """Since when it waits for the workers to tell their weights; -1 before."""
        self.skipped = False
        """Nothing more is looked up, loaded or stored for it: its tokens do not decide its KV, or an error of ours."""
        self.identity: Identity | None = None
        self.hasher: ChunkHasher | None = None
        self.state = LookupState.NEW
        self.call: LookupCall | None = None
        """The lookup while its outcome is awaited (ASKED) or its lease is here (HIT)."""
        self.hit: LookupResult | None = None
        self.asked_s = -1.0
        """When vLLM first asked in this round; -1 before."""
        self.missed_s = 0.0
        self.revoked_s = -math.inf
        """When it last lost its lease while it waited."""
        self.computed_tokens = 0
        """Local hit that vLLM named in its last question."""
        self.asynchronous = False
        """How vLLM was told that the promised tokens are loaded."""
        self.loading = False
        """An asynchronous load is under way: vLLM itself keeps the blocks until it is reported."""
        self.loaded_chunks: dict[int, int] = {}
        """Block id → chunk of the last load, to find what failed."""
        self.no_load = False
        """A load of this request failed: the rest of it is computed."""
        self.next_store = 0
        """Chunks before this one are stored, being stored, or were loaded."""
        self.stores: set[int] = set()
        """Stores that may still read this request's blocks."""
        self.deferred = False
        """Chunks are complete but wait for a load to be confirmed."""
        self.stale = False
        """Its blocks may hold KV of before a reset, or bad KV: nothing that it computes on them is stored."""


class SchedulerSide:
    """Decisions for all requests of one engine. Belongs to the scheduler's thread.

    `client` is started by the caller and closed by `close`.  `chunk_bytes` is what one worker moves per
    chunk, `world_size` how many workers report.  `may_load` and `may_store` follow vLLM's kv_role.  `engine`
    names this start of the engine; with `media_are_counted` vLLM's identifiers of media are no hashes of their
    content.  `prefix_cache` gives an object that vLLM replaces when it empties its own cache.  `server_seen` tells
    whether a server left traces.
    """

    def __init__(
        self,
        client: CacheClient,
        settings: ClientSettings,
        *,
        block_tokens: int,
        chunk_blocks: int,
        chunk_bytes: int,
        world_size: int,
        weights: WeightsVersion,
        prefix_cache: Callable[[], object] = lambda: None,
        may_load: bool = True,
        may_store: bool = True,
        engine: str = "",
        media_are_counted: bool = False,
        sync_load_bytes: int = SYNC_LOAD_BYTES,
        events: Callable[[Sequence[int], bytes, Sequence[bytes], Any], Any] | None = None,
        removal: Callable[[Sequence[bytes]], Any] | None = None,
        server_seen: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._block_tokens = block_tokens
        self._chunk_blocks = chunk_blocks
        self._chunk_tokens = block_tokens * chunk_blocks
        self._chunk_bytes = chunk_bytes
        self._world_size = world_size
        self._may_load = may_load
        self._may_store = may_store
        self._engine = engine
        self._media_are_counted = media_are_counted
        self._sync_load_bytes = sync_load_bytes
        self._make_event = events
        self._make_removal = removal
        self._announced = Announced(client.present, now)
        self._now = now
        self._server_seen = server_seen
        self._begun_s = now()
        self._adapters = Adapters()
        self._tracked: dict[str, Tracked] = {}
        self._identities: OrderedDict[RequestIdentity, Identity] = OrderedDict()
        self._weights = weights
        self._mark = ""
        """Of the weights that identities were made for last."""
        self._prefix_cache = prefix_cache
        self._prefix_cache_seen = prefix_cache()
        self._stale_before: bool | None = None
        """What `_engine_stale` was before the resets after which the weights are not known yet."""
        self._engine_stale = False
        """vLLM's own cache may still have KV of before the last reset, or of a load whose outcome is unknown."""
        self._step = itertools.count(1)
        self._planned: StepPlan | None = None
        """The plan while it is being made."""
        self._storing: Tracked | None = None
        """The request whose stores are being planned."""
        self._store_ids = itertools.count(1)
        self._early = 0
        self._loads: list[Load] = []
        self._may_wait_s = WAIT_S
        """What is left of it in this step."""
        self._claimed: dict[LookupCall, None] = {}
        """Lookups whose chunks were promised to vLLM in this step and not taken yet."""
        self._awaited: set[str] = set()
        self._unconfirmed: dict[int, int] = {}
        """Steps with synchronous loads whose outcome is not known yet, and how many workers have not told it."""
        self._failures_seen = 0
        self._finished_stores: list[Store] = []
        """Stores of requests that ended while their chunks were deferred."""
        self._in_flight: OrderedDict[int, _StoreRecord] = OrderedDict()
        self._events: deque[Any] = deque(maxlen=REMEMBERED_STORES)
        self.counts = {
            "lookups": 0,
            "lookup_hit_tokens": 0,
            "lookup_timeouts": 0,
            "leases_revoked": 0,
            "loads_sync": 0,
            "loads_async": 0,
            **{f"skipped_{reason}": 0 for reason in SKIP_REASONS},
        }
        """Totals since the last `take_counts`."""
        # Declared now, so that the engine's slices are known before the first request asks.
        self._identity(RequestIdentity(tenant=settings.tenant))

    # -- vLLM's calls, in their order ------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """vLLM knows a request: hash what fits and, when the queue is short, look it up already."""
        tracked = self._track(request)
        if tracked.skipped or not self._may_load or _skips_reading(request):
            return
        if self._prepare(tracked) and self._early < EARLY_LOOKUPS:
            self._ask(tracked)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` can be loaded, and whether asynchronously.

        None: not known yet, ask again.  Asked any number of times for one request, it keeps one lookup and
        one lease.
        """
        tracked = self._track(request)
        # vLLM asks for a request that holds no blocks yet, or none any more: all it will rest on is named here.
        tracked.stale = self._engine_stale and computed_tokens > 0
        now = self._now()
        if (self._may_load or self._may_store) and not (tracked.skipped or self._know_weights()):
            # Without keys it can neither be looked up nor stored.
            if tracked.waits_s < 0:
                tracked.waits_s = now
            late = (now - tracked.waits_s) * 1000 >= self._settings.lookup_timeout_ms
            return (0 if late else None), False
        if tracked.skipped or tracked.no_load or not self._may_load or _skips_reading(request):
            return 0, False
        tracked.computed_tokens = computed_tokens
        if tracked.state is LookupState.TAKEN:
            # vLLM asks only while nothing is computed: the request was preempted.
            self._forget_lookup(tracked)
        if tracked.call is not None and tracked.call.revoked:
            self._revoked(tracked, now)
        if tracked.state is LookupState.MISS and now - tracked.missed_s >= REPEEK_S:
            tracked.missed_s = now
            if self._in_l1(tracked):
                self._forget_lookup(tracked)
        if tracked.asked_s < 0:
            tracked.asked_s = now
        if tracked.state is LookupState.NEW:
            if self._usable(tracked, computed_tokens) <= 0:
                return 0, False
            if self._prepare(tracked):
                self._ask(tracked)
            if tracked.skipped:
                return 0, False
            if tracked.state is LookupState.NEW and not self._client.connected and not self._settling():
                self._missed(tracked)
        if tracked.state is LookupState.ASKED:
            assert tracked.call is not None
            begun_s = self._now()
            answered = tracked.call.wait(self._may_wait_s)
            self._may_wait_s = max(0.0, self._may_wait_s - (self._now() - begun_s))
            if answered:
                self._answered(tracked)
        if tracked.state in (LookupState.NEW, LookupState.ASKED):
            if (now - tracked.asked_s) * 1000 < self._settings.lookup_timeout_ms:
                return None, False
            self.counts["lookup_timeouts"] += 1
            self._missed(tracked)
        if tracked.state is not LookupState.HIT:
            return 0, False
        assert tracked.hit is not None
        hit_tokens = tracked.hit.n_chunks * self._chunk_tokens
        # At least one token must be computed, or there is nothing to sample from.
        tokens = min(hit_tokens, request.num_tokens - 1) - computed_tokens
        if tokens <= 0 or tokens < self._settings.min_retrieve_tokens:
            return 0, False
        assert tracked.call is not None
        if not tracked.call.claim():
            return (None if self._revoked(tracked, now) else 0), False
        self._claimed[tracked.call] = None
        tracked.asynchronous = self._asynchronous(tokens)
        return tokens, tracked.asynchronous

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM allocated blocks: plan the load it agreed to, or give the lease back.

        `block_ids` is the request's whole block table so far.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.hit is None:
            return
        hit, call = tracked.hit, tracked.call
        assert hit.lease is not None and call is not None
        # Whatever was found in L1 need not be stored again.
        tracked.next_store = max(tracked.next_store, hit.n_chunks)
        if external_tokens <= 0:
            self._client.release([hit.lease], group=True)
        else:
            load = self._load_of(tracked, hit, block_ids, external_tokens)
            self._loads.append(load)
            tracked.loading = load.asynchronous
            # It stays claimed: the workers hold shares of their own from here on.
            self._claimed.pop(call, None)
            self.counts["loads_async" if load.asynchronous else "loads_sync"] += 1
            self.counts["lookup_hit_tokens"] += external_tokens
        tracked.hit = tracked.call = None
        tracked.state = LookupState.TAKEN
        if external_tokens > 0:
            self._client.release([hit.lease])

    def _load_of(
        self, tracked: Tracked, hit: LookupResult, block_ids: Sequence[int], external_tokens: int
    ) -> Load:
        """The load of a hit into the blocks that vLLM allocated for it."""
        start, end = tracked.computed_tokens, tracked.computed_tokens + external_tokens
        first, last = start // self._chunk_tokens, -(-end // self._chunk_tokens)
        blocks = []
        for index in range(first * self._chunk_blocks, last * self._chunk_blocks):
            inside = start < (index + 1) * self._block_tokens and index * self._block_tokens < end
            blocks.append(block_ids[index] if inside else SKIP_BLOCK)
        tracked.loaded_chunks = {
            block: first + position // self._chunk_blocks
            for position, block in enumerate(blocks)
            if block != SKIP_BLOCK
        }
        assert tracked.hasher is not None and tracked.identity is not None
        row = hit.n_slices * EXTENT.size
        return Load(
            request_id=tracked.request.request_id,
            lease=hit.lease,
            chain=tracked.hasher.chain[first * KEY_BYTES : last * KEY_BYTES],
            extents=hit.extents[first * row : last * row],
            slices=tracked.identity.slices,
            blocks=blocks,
            # vLLM may take fewer tokens than were promised; it waits for the load, or does not, as it was told then.
            asynchronous=tracked.asynchronous,
        )

    def plan_step(self, output: Any) -> StepPlan:
        """The plan for the step that vLLM's SchedulerOutput describes."""
        self._may_wait_s = WAIT_S
        plan = self._planned = StepPlan(step=next(self._step), failures_seen=self._failures_seen)
        plan.preempted = set(output.preempted_req_ids or ())
        plan.weigh = self._weights.take_question()
        plan.loads, self._loads = self._loads, []
        self._await_reports(plan)
        # What vLLM was promised and has not taken waits in its queue: others may need the room meanwhile.
        for call in self._claimed:
            call.unclaim()
        self._claimed.clear()
        # A reset of vLLM's cache preempts requests that get new blocks, and a load into them, in the same step.
        reloaded = {load.request_id for load in plan.loads}
        for request_id in plan.preempted:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.stores.clear()
            tracked.deferred = False
            if request_id not in reloaded:
                tracked.loaded_chunks = {}
                self._forget_lookup(tracked)
        if self._may_store:
            if not self._must_wait():
                plan.stores, self._finished_stores = self._finished_stores, []
            self._plan_stores(output, plan)
        # A worker that has no store of an awaited request reports it at once, so its stores go first.
        later = {store.request_id for store in self._finished_stores}
        plan.awaited, self._awaited = self._awaited - later, self._awaited & later
        self._planned = None
        return plan

    def heard(
        self, reports: Sequence[WorkerReport], received: Iterable[str], invalid_blocks: Iterable[int]
    ) -> None:
        """What the workers said after a step: all their reports, ended asynchronous loads, blocks that
        failed.
        """
        # Before anything that can fail: a report counts once.
        for report in reports:
            self._confirm(report)
            self._hear_weights(report)
        for request_id in received:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
        failed = set(invalid_blocks)
        if failed:
            for tracked in self._tracked.values():
                chunks = [chunk for block, chunk in tracked.loaded_chunks.items() if block in failed]
                if chunks:
                    # They are recomputed, and stored again in place of what was bad.
                    tracked.next_store = min(tracked.next_store, *chunks)
                    tracked.loaded_chunks = {}
                    tracked.no_load = True
            # What ended in the failing step may rest on the bad blocks.
            self._finished_stores.clear()
        for report in reports:
            if report.broken and (self._may_load or self._may_store):
                logger.error("the cache is off for this engine: a worker copies nothing any more")
                self._may_load = self._may_store = False
            for store_id in report.gathered:
                self._gathered(store_id)
            for store_id in report.dropped:
                self._dropped(store_id)
            for store_id, mask in report.stored:
                self._stored(store_id, mask)

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """The request ended. Whether its blocks must be kept until the workers report it as sent."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        self._forget_lookup(tracked)
        del self._tracked[request.request_id]
        if tracked.loading:
            # vLLM keeps the blocks by itself until the load is reported.
            return False
        if tracked.deferred and block_ids and not (tracked.skipped or tracked.stale):
            store = self._store_of(
                tracked, block_ids, self._complete_chunks(tracked, request.num_computed_tokens)
            )
            if store is not None:
                self._finished_stores.append(store)
        if not tracked.stores:
            return False
        self._awaited.add(request.request_id)
        return True

    # -- after an error of ours in one of these calls: the answer, and what keeps blocks and leases in order ------

    def give_up(self, request: Any) -> None:
        """After `on_new_request` or `matched_tokens`: the request is computed without the cache."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = Tracked(request)
        self._skip(tracked, "error")

    def allocated_failed(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """After `allocated`: vLLM waits for a load of these tokens, so there is one, and it fails."""
        planned = next((load for load in self._loads if load.request_id == request.request_id), None)
        if planned is not None:
            tracked = self._tracked[request.request_id]
            tracked.hit = tracked.call = None  # its lease is the load's now
            self.give_up(request)
            assert planned.lease is not None
            self._client.release([planned.lease])  # the own share; the workers have theirs
            return
        self.give_up(request)
        if external_tokens > 0:
            tracked = self._tracked[request.request_id]
            first = tracked.computed_tokens // self._block_tokens
            last = -(-(tracked.computed_tokens + external_tokens) // self._block_tokens)
            asynchronous = tracked.loading = tracked.asynchronous
            blocks = list(block_ids[first:last])
            self._loads.append(Load(request.request_id, None, b"", b"", (), blocks, asynchronous))

    def plan_failed(self, output: Any) -> StepPlan:
        """After `plan_step`: a plan with all that the engine's blocks depend on, and no stores."""
        plan, self._planned = self._planned, None
        if plan is None:
            plan = StepPlan(step=next(self._step), failures_seen=self._failures_seen)
            plan.preempted = set(output.preempted_req_ids or ())
        plan.weigh = plan.weigh or self._weights.take_question()
        plan.loads += self._loads
        self._loads = []
        self._await_reports(plan)
        for store in (*plan.stores, *self._finished_stores):
            self._dropped(store.store_id)
        plan.stores, self._finished_stores = [], []
        if self._storing is not None:
            self._skip(self._storing, "error")  # or it would be in the way of all others' stores at each step
            self._storing = None
        plan.awaited |= self._awaited
        self._awaited = set()
        for request_id in plan.preempted:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.stores.clear()
                self._skip(tracked, "error")
        return plan

    def heard_failed(self, reports: Iterable[WorkerReport], received: Iterable[str]) -> None:
        """After `heard`: loads are over all the same. Reports of stores are lost, which costs events."""
        for request_id in received:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
        self._finished_stores.clear()  # they may rest on blocks that failed
        for report in reports:
            self._hear_weights(report)

    def finished_failed(self, request: Any) -> bool:
        """After `finished`: the blocks stay until the workers say that no store reads them."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and tracked.loading:
            return False
        self._awaited.add(request.request_id)
        if tracked is not None:
            self._skip(tracked, "error")
        return True

    def turn_off(self) -> None:
        """After `reset`: what older KV means is not known any more, so nothing is loaded or stored again."""
        self._may_load = self._may_store = False
        self._finished_stores.clear()
        for tracked in self._tracked.values():
            self._skip(tracked, "error")

    def take_events(self) -> list[Any]:
        """Events about chunks stored and removed since the last call."""
        if self._make_event is not None:
            self._removed(self._announced.left())
        events = list(self._events)
        self._events.clear()
        return events

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts = {name: count for name, count in self.counts.items() if count}
        self.counts = dict.fromkeys(self.counts, 0)
        return counts

    def reset(self, *, engine_empty: bool) -> None:
        """Caches were reset, so weights may have changed: the workers are asked before the next request begins.

        `engine_empty`: no request holds blocks, so vLLM has emptied its own cache as well.  If not, requests go on
        with what they have, and what they leave in vLLM's cache reaches others: none of that is stored, until a
        reset finds the engine empty or the weights prove to be the same.
        """
        if not engine_empty:
            logger.warning(
                "the cache was reset while vLLM held blocks of its own: what is computed on these is not stored until "
                "the cache is reset with no request running, or the weights prove to be the same"
            )
        self._weights.may_have_changed()
        self._prefix_cache_seen = self._prefix_cache()
        if self._stale_before is None:
            self._stale_before = self._engine_stale
        self._engine_stale = not engine_empty
        if engine_empty:
            self._stale_before = False
        for tracked in self._tracked.values():
            self._forget_lookup(tracked)
            tracked.identity = tracked.hasher = None
            tracked.next_store = 0
            tracked.deferred = False
            tracked.stale = not engine_empty

    def _know_weights(self) -> bool:
        """Whether the weights are known; if not, the workers are asked.

        Only for a request that vLLM wants to begin: others arrive while the engine pauses for new weights.
        """
        return self._weights_settled() or (self._weights.wanted() and self._weights_settled())

    def _weights_settled(self) -> bool:
        """Whether the weights are known, without asking; identities are then for these.

        vLLM does not tell its connector that its prefix cache was emptied, as it is after new weights were loaded; but
        it puts another object in the cache's place.
        """
        if self._prefix_cache() is not self._prefix_cache_seen:
            self.reset(engine_empty=True)  # vLLM empties its cache only while no block is in use
        if not self._weights.known:
            return False
        if self._weights.mark != self._mark:
            self._mark = self._weights.mark
            self._identities.clear()
        elif self._stale_before is False:
            # Nothing has changed since a time when nothing was stale.
            self._engine_stale = False
            for tracked in self._tracked.values():
                tracked.stale = False
        self._stale_before = None
        return True

    def close(self) -> None:
        """Give back all leases that no worker has, and end the client within half a second."""
        for tracked in self._tracked.values():
            self._forget_lookup(tracked)
        self._tracked.clear()
        self._adapters.close()
        self._client.close(0.5)

    # -- lookups ---------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        """The request's record, made when vLLM first names it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = Tracked(request)
            if request.prompt_embeds is not None:
                self._skip(tracked, "prompt_embeds")
            elif request.resumable:
                self._skip(tracked, "resumable")
            elif not all(feature.identifier for feature in request.mm_features):
                self._skip(tracked, "unnamed_media")
            elif request.mm_features and self._media_are_counted:
                self._skip(tracked, "counted_media")
        return tracked

    def _skip(self, tracked: Tracked, reason: str) -> None:
        """Compute the rest of this request without the cache. What its lookup got is given back; stores go on."""
        if not tracked.skipped:
            tracked.skipped = True
            self.counts[f"skipped_{reason}"] += 1
        self._forget_lookup(tracked)

    def _usable(self, tracked: Tracked, computed_tokens: int) -> int:
        """Tokens that a lookup could bring at best."""
        tokens = tracked.request.num_tokens
        return int(min(tokens // self._chunk_tokens * self._chunk_tokens, tokens - 1)) - computed_tokens

    def _prepare(self, tracked: Tracked) -> bool:
        """Bring identity and keys up to date; whether all keys are there."""
        request = tracked.request
        if tracked.identity is None:
            if not self._weights_settled():
                return False
            try:
                adapter = self._adapters.name(request.lora_request)
            except AdapterUnreadable as error:
                logger.debug("request %s is computed without the cache: %s", request.request_id, error)
                self._skip(tracked, "unreadable_adapter")
                return False
            if adapter is None:
                return False
            wanted = RequestIdentity(
                # An adapter alone is a list of two.
                adapter=canonical_json(["weights", self._mark, adapter]).decode() if self._mark else adapter,
                tenant=self._settings.tenant,
                salt=request.cache_salt or "",
            )
            tracked.identity = self._identity(wanted)
            tracked.hasher = tracked.identity.hasher(media_items(request.mm_features, self._engine))
        assert tracked.hasher is not None
        start = tracked.hasher.n_chunks * self._chunk_tokens
        if request.num_tokens - start >= self._chunk_tokens:
            end = start + max(HASH_TOKENS_PER_CALL, self._chunk_tokens)
            tracked.hasher.feed(request.all_token_ids[start:end], start)
        return bool(request.num_tokens // self._chunk_tokens <= tracked.hasher.n_chunks)

    def _identity(self, wanted: RequestIdentity) -> Identity:
        identity = self._identities.get(wanted)
        if identity is None:
            identity = self._identities[wanted] = self._client.identity(wanted)
            while len(self._identities) > REMEMBERED_STORES:
                self._identities.popitem(last=False)
        else:
            self._identities.move_to_end(wanted)
        return identity

    def _settling(self) -> bool:
        """Whether this engine has just started and may be attached in a moment."""
        return self._now() - self._begun_s < SETTLE_S and self._server_seen()

    def _in_l1(self, tracked: Tracked) -> bool:
        """Whether L1 has the first chunk; read from shared memory in microseconds."""
        if not self._client.connected or tracked.identity is None or tracked.hasher is None:
            return False
        return bool(self._client.peek(tracked.identity, tracked.hasher) > 0)

    def _ask(self, tracked: Tracked) -> None:
        """Send the lookup if it can hit; NEW → ASKED or MISS."""
        if tracked.state is not LookupState.NEW or not self._client.connected:
            return
        identity, hasher = tracked.identity, tracked.hasher
        assert identity is not None and hasher is not None
        if not hasher.n_chunks or not (identity.slices or self._settling()):
            self._missed(tracked)
            return
        if not identity.slices:
            return
        if not self._client.has_l2 and not self._in_l1(tracked):
            self._missed(tracked)
            return
        tracked.call = self._client.lookup(
            identity,
            hasher,
            request_id=tracked.request.request_id,
            deadline_ms=self._settings.lookup_timeout_ms,
        )
        tracked.state = LookupState.ASKED
        self._early += 1
        self.counts["lookups"] += 1

    def _answered(self, tracked: Tracked) -> None:
        """ASKED → HIT or MISS."""
        assert tracked.call is not None
        result = tracked.call.result
        self._early -= 1
        if result.lease is None:
            tracked.call = None  # there is nothing to take back
            self._missed(tracked)
            return
        tracked.hit = result
        tracked.state = LookupState.HIT

    def _revoked(self, tracked: Tracked, now: float) -> bool:
        """The lease went back to the server while the request waited: whether to look up again, or miss."""
        self.counts["leases_revoked"] += 1
        often = now - tracked.revoked_s < REPEEK_S
        tracked.revoked_s = now
        if often:
            self._missed(tracked)
        else:
            self._forget_lookup(tracked)
        return not often

    def _missed(self, tracked: Tracked) -> None:
        self._forget_lookup(tracked)
        tracked.state = LookupState.MISS
        tracked.missed_s = self._now()

    def _forget_lookup(self, tracked: Tracked) -> None:
        """Back to NEW; whatever the lookup got or will get is given back."""
        if tracked.hit is not None:
            assert tracked.hit.lease is not None
            self._client.release([tracked.hit.lease], group=True)
            tracked.hit = None
        elif tracked.call is not None:
            tracked.call.cancel()
            self._early -= 1
        tracked.call = None
        tracked.state = LookupState.NEW
        tracked.asked_s = -1.0

    def _asynchronous(self, tokens: int) -> bool:
        if self._settings.load_mode != "auto":
            return self._settings.load_mode == "async"
        return -(-tokens // self._chunk_tokens) * self._chunk_bytes > self._sync_load_bytes

    # -- stores ----------------------------------------------------------------------------------------------

    def _must_wait(self) -> bool:
        """Whether stores wait for loads: one worker of several cannot tell that another one's load failed."""
        return self._world_size > 1 and bool(self._unconfirmed)

    def _await_reports(self, plan: StepPlan) -> None:
        """Remember the step if it has synchronous loads; give up on those whose reports are lost.

        A worker that fails in a step, and is taken back by vLLM's fault tolerance, may never tell the step's outcome.
        """
        lost = [step for step in self._unconfirmed if plan.step - step > UNCONFIRMED_STEPS]
        if lost:
            logger.warning(
                "workers did not report how loads of %d steps ended, so these count as failed: what was computed on "
                "blocks that vLLM has now is not stored until the cache is reset with no request running",
                len(lost),
            )
            for step in lost:
                del self._unconfirmed[step]
            # vLLM was told of no bad block, so it may keep them, and give them to others.
            self._distrust_engine()
        if any(not load.asynchronous for load in plan.loads):
            self._unconfirmed[plan.step] = self._world_size

    def _distrust_engine(self) -> None:
        self._engine_stale = True
        if self._stale_before is not None:
            self._stale_before = True
        self._finished_stores.clear()
        for tracked in self._tracked.values():
            tracked.stale = True

    def _hear_weights(self, report: WorkerReport) -> None:
        told, report.weights = report.weights, None  # counts once
        if told is not None:
            self._weights.heard(*told)

    def _confirm(self, report: WorkerReport) -> None:
        """One worker has told how the synchronous loads of a step ended."""
        self._failures_seen = max(self._failures_seen, report.failures)
        missing = self._unconfirmed.get(report.step, 0)
        if missing > 1:
            self._unconfirmed[report.step] = missing - 1
        elif missing:
            del self._unconfirmed[report.step]

    def _plan_stores(self, output: Any, plan: StepPlan) -> None:
        scheduled = output.num_scheduled_tokens
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in scheduled.items():
            tracked = self._storing = self._tracked.get(request_id)
            if tracked is None or tracked.skipped or tracked.stale or request_id not in computed:
                continue
            chunks = self._complete_chunks(tracked, computed[request_id] + tokens)
            if chunks <= tracked.next_store:
                continue
            if self._must_wait():
                tracked.deferred = True
                continue
            tracked.deferred = False
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            store = self._store_of(tracked, tables[0], chunks) if tables else None
            if store is not None:
                plan.stores.append(store)
        self._storing = None

    def _complete_chunks(self, tracked: Tracked, computed_tokens: int) -> int:
        """Chunks whose tokens are known and whose KV is computed once `computed_tokens` are."""
        request = tracked.request
        tokens = min(computed_tokens, request.num_tokens)
        if not self._settings.save_decode_cache:
            tokens = min(tokens, request.num_prompt_tokens)
        params = request.kv_transfer_params
        limit = params.get(MAX_OFFLOAD) if isinstance(params, dict) else None
        if isinstance(limit, int) and not isinstance(limit, bool):
            tokens = min(tokens, max(0, limit))
        return int(tokens) // self._chunk_tokens

    def _store_of(self, tracked: Tracked, table: Sequence[int], chunks: int) -> Store | None:
        """The store of all chunks up to `chunks` that were not stored yet; None when their keys are not
        known.
        """
        self._prepare(tracked)
        if tracked.hasher is None or tracked.identity is None:
            return None
        first, last = tracked.next_store, min(chunks, tracked.hasher.n_chunks)
        blocks = list(table[first * self._chunk_blocks : last * self._chunk_blocks])
        if last <= first or len(blocks) < (last - first) * self._chunk_blocks or 0 in blocks:
            # Block 0 stands for "no block" in vLLM's tables.
            return None
        chain = tracked.hasher.chain
        store = Store(
            store_id=next(self._store_ids),
            request_id=tracked.request.request_id,
            identity=tracked.identity.request,
            parent=chain[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else b"",
            chain=chain[first * KEY_BYTES : last * KEY_BYTES],
            blocks=blocks,
            probe=tracked.hasher.probe,
        )
        tracked.next_store = last
        tracked.stores.add(store.store_id)
        record = _StoreRecord(store.request_id, first, self._world_size)
        if self._make_event is not None:
            record.keep_for_events(tracked.request, store, self._chunk_tokens)
        self._in_flight[store.store_id] = record
        while len(self._in_flight) > REMEMBERED_STORES:
            self._in_flight.popitem(last=False)
        return store

    def _gathered(self, store_id: int) -> None:
        record = self._in_flight.get(store_id)
        if record is None:
            return
        record.not_gathered -= 1
        if record.not_gathered == 0:
            tracked = self._tracked.get(record.request_id)
            if tracked is not None:
                tracked.stores.discard(store_id)

    def _dropped(self, store_id: int) -> None:
        record = self._in_flight.pop(store_id, None)
        tracked = self._tracked.get(record.request_id) if record is not None else None
        if record is not None and tracked is not None:
            tracked.stores.discard(store_id)
            tracked.next_store = min(tracked.next_store, record.first_chunk)

    def _stored(self, store_id: int, mask: int) -> None:
        record = self._in_flight.get(store_id)
        if record is None:
            return
        record.not_stored -= 1
        record.mask &= mask
        if record.not_stored == 0:
            del self._in_flight[store_id]
            if self._make_event is not None:
                self._events.extend(record.events(self._make_event, self._chunk_tokens))
                keys = chunk_keys(record.chain)
                self._removed(self._announced.add(key for i, key in enumerate(keys) if record.mask >> i & 1))

    def _removed(self, keys: Sequence[bytes]) -> None:
        if keys and self._make_removal is not None:
            self._events.append(self._make_removal(keys))


class _StoreRecord:
    """What the scheduler remembers of a store until all workers have told its outcome."""

    __slots__ = (
        "chain",
        "first_chunk",
        "lora",
        "mask",
        "not_gathered",
        "not_stored",
        "parent",
        "request_id",
        "tokens",
    )

    def __init__(self, request_id: str, first_chunk: int, world_size: int) -> None:
        self.request_id = request_id
        self.first_chunk = first_chunk
        self.not_gathered = self.not_stored = world_size
        self.mask = -1
        self.tokens: list[int] = []
        self.chain = self.parent = b""
        self.lora: Any = None

    def keep_for_events(self, request: Any, store: Store, chunk_tokens: int) -> None:
        """Remember the tokens that the events will carry."""
        chunks = len(store.chain) // KEY_BYTES
        first = self.first_chunk * chunk_tokens
        self.tokens = list(request.all_token_ids[first : first + chunks * chunk_tokens])
        self.chain, self.parent, self.lora = store.chain, store.parent, request.lora_request

    def events(
        self, make: Callable[[Sequence[int], bytes, Sequence[bytes], Any], Any], chunk_tokens: int
    ) -> list[Any]:
        """One event per run of chunks that are in L1 in all slices."""
        keys = chunk_keys(self.chain)
        made, start = [], 0
        for end in range(len(keys) + 1):
            if end == len(keys) or not self.mask >> end & 1:
                if end > start:
                    parent = keys[start - 1] if start else self.parent
                    tokens = self.tokens[start * chunk_tokens : end * chunk_tokens]
                    made.append(make(tokens, parent, keys[start:end], self.lora))
                start = end + 1
        return made


def _skips_reading(request: Any) -> bool:
    """Requests that need all their prompt's activations (prompt logprobs) read no cache."""
    return bool(request.skip_reading_prefix_cache)
