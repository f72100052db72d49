"""The side of the connector in vLLM's scheduler: decides which chunks to load and which to store.

Every call returns within two milliseconds, whatever the server does: hashing is done in pieces, and everything else is
queued for the client's I/O thread.  One call takes longer: when a request with a tenant of its own arrives, vLLM hashes
the blocks of its prompt again (`request_tenants`).  vLLM asks about each request of its queue; all lookups of one step
together are awaited for 1.5 ms, and vLLM asks again in the next step about the requests that have no answer by then.

`SchedulerSide` has the methods in the order in which vLLM calls them.  `lookup_table` follows each request's lookup and
lease, `request_keys` makes its keys, and `store_table` plans and follows the stores; each module lists its invariants.
Blocks of a finished request stay allocated until every worker has said that no store reads them.

This side maps no engine memory and copies no bytes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from kvstrata.client import LookupResult
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.groups import CacheGroup
from kvstrata.connectors.vllm.lookup_table import LookupState, LookupTable, RequestTenants, Tracked
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan, WorkerReport
from kvstrata.connectors.vllm.parts import Parts
from kvstrata.connectors.vllm.request_keys import RequestKeys
from kvstrata.connectors.vllm.step_times import StepTimes
from kvstrata.connectors.vllm.store_table import OtherLoads, StoreTable
from kvstrata.connectors.vllm.tails import PromptTails
from kvstrata.keys import batch
from kvstrata.observability.logging import Thinning
from kvstrata.types import EXTENT, LeaseName, MissReason, RequestIdentity, next_of

logger = logging.getLogger("vllm.kvstrata")

DRAIN = "kvstrata.drain"
"""Key in `kv_transfer_params`: if true, an engine with late stores stores all chunks that L1 lacks at once."""


NEXT = "kvstrata.next"
"""Key in `kv_transfer_params`, or type of one of the `kv_hints`: what follows the request, see `next_of`."""


class SchedulerSide:
    """Decisions for all requests of one engine. Belongs to the scheduler's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._client, self._settings = engine.client, engine.settings
        self._groups, self._now = engine.groups, engine.now
        self._chunk_tokens, self._exact = engine.chunk_tokens, engine.exact
        self._weights = engine.weights
        self._tails = PromptTails(engine)
        tenants = RequestTenants(engine.settings.tenant, engine.settings.request_tenants)
        self._lookups = LookupTable(engine, tenants, self._tails.to_ask if self._tails.enabled else None)
        self._keys = RequestKeys(engine, self._lookups, tenants)
        self.stores = StoreTable(engine, self._lookups.tracked, self._keys, self._tails)
        self._other_loads = OtherLoads(self._lookups.tracked, self._keys)
        self._parts = Parts(engine.client, self._lookups, engine.chunk_tokens, self._load_of)
        self._thinning = Thinning()
        self._times = StepTimes(engine, self._lookups.tracked)
        self._step = itertools.count(1)
        self._planned: StepPlan | None = None
        """The plan that is being made, for `turn_off`."""
        self._loads: list[Load] = []
        """Loads for the next plan."""
        self._loading: dict[bytes, Tracked] = {}
        """Requests whose asynchronous loads are under way, by the first chunk of each load."""
        self._awaited: set[str] = set()
        """Finished requests for the next plan; their blocks are kept until the workers report them."""
        self._counts = {"lookup_hit_tokens": 0, "lookups_left_out": 0, "loads_sync": 0, "loads_async": 0}
        """Totals since the last `take_counts`."""

    # -- vLLM's calls, in their order ------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin to hash a new request and, if the queue is short, look it up already."""
        tracked = self._lookups.track(request)
        params = request.kv_transfer_params
        if isinstance(params, dict) and params.get(DRAIN) is True:
            self.stores.drain()
        if tracked.skipped:
            return
        # With `max_load_tokens`, the tokens to load depend on the tokens in vLLM's cache.
        loads = self._engine.may_load and not (tracked.no_load or tracked.load_tokens)
        if loads and request.skip_reading_prefix_cache:
            # It needs the activations of its whole prompt (prompt logprobs).
            self._counts["lookups_left_out"] += 1
        elif (loads or self._engine.may_store) and self._keys.prepare(tracked):
            if loads:
                self._lookups.ask_early(tracked)
            if self._engine.may_store:
                self.stores.arrived(tracked)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` can be loaded, and whether asynchronously.

        None: unknown yet, vLLM asks again.  However often vLLM asks about a request, the request has at most one lookup
        and one lease at a time.
        """
        tracked = self._lookups.track(request)
        self._other_loads.asked(tracked, computed_tokens)
        now = self._now()
        if (self._engine.may_load or self._engine.may_store) and not (
            tracked.skipped or self._keys.know_weights()
        ):
            # Without keys the request can be neither looked up nor stored.
            if tracked.waits_s < 0:
                tracked.waits_s = now
            if (now - tracked.waits_s) * 1000 < self._settings.lookup_timeout_ms:
                return None, False
            self._lookups.count_miss(tracked, MissReason.DEADLINE)
            return 0, False
        if (
            tracked.skipped
            or tracked.no_load
            or not self._engine.may_load
            or request.skip_reading_prefix_cache
        ):
            return 0, False
        tracked.computed_tokens = computed_tokens
        self._lookups.begin_round(tracked, now)
        if tracked.state is LookupState.NEW:
            if self._usable(tracked, computed_tokens) <= 0:
                return 0, False
            if self._keys.prepare(tracked):
                self._lookups.ask(tracked)
            if tracked.skipped:
                return 0, False
        if not self._lookups.await_answer(tracked, now):
            return None, False
        if self._exact:
            tracked.junction = self._lookups.whole_in_l1(tracked)
        if tracked.state is not LookupState.HIT:
            return 0, False
        assert tracked.hit is not None
        in_parts = tracked.hit.promised > tracked.hit.n_chunks
        hit_tokens = (
            max(tracked.hit.n_chunks, tracked.hit.promised) * self._chunk_tokens + tracked.hit.tail_tokens
        )
        # At least one token must be computed: the model samples from it.
        tokens = min(hit_tokens, request.num_tokens - 1) - computed_tokens
        if tokens <= 0:
            return 0, False
        if self.stores.hold(tracked, tokens) or self._loads_for(tracked, hit_tokens):
            return None, False
        promised = self._lookups.promise(tracked, now)
        if not promised:
            return (None if promised is None else 0), False
        tracked.asynchronous = in_parts or self._asynchronous(tokens)
        return tokens, tracked.asynchronous

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has allocated blocks: plan the load that it accepted, or release the lease.

        `tables` are the request's whole block tables so far, one for each group.
        """
        tracked = self._lookups.tracked.get(request.request_id)
        if tracked is None or tracked.hit is None:
            return
        hit = tracked.hit
        assert hit.lease is not None
        # Chunks that were found in L1, or that another engine stores, need not be stored again.
        n_chunks = max(hit.n_chunks, hit.promised)
        self.stores.took_hit(tracked, n_chunks, n_chunks * self._chunk_tokens + hit.tail_tokens)
        whole = True
        if external_tokens <= 0:
            self._client.release([hit.lease], group=True)
        else:
            # vLLM may have accepted a shorter hit, for which this hit's windows and states are useless: that load
            # fails.
            end = tracked.computed_tokens + external_tokens
            there = hit.n_chunks * self._chunk_tokens
            whole = not self._exact or end == there
            lease = hit.lease if whole else None
            tracked.loaded_chunks = {}
            more = hit.promised > hit.n_chunks and there < end
            self._loads += [
                self._load_of(
                    tracked, hit, lease, tables[group.number], tracked.computed_tokens, there if more else end,
                    more=more, group=group,
                )
                for group in self._groups
            ]  # fmt: skip
            if more:
                self._parts.park(tracked, tables[self._groups[0].number], hit.n_chunks, end)
            tracked.loading = tracked.asynchronous
            if tracked.loading:
                self._loading[_chunk_at(tracked, tracked.computed_tokens // self._chunk_tokens)] = tracked
            self._counts["loads_async" if tracked.asynchronous else "loads_sync"] += 1
            self._counts["lookup_hit_tokens"] += external_tokens
            tracked.known_tokens += external_tokens
        self._lookups.taken(tracked)
        if external_tokens > 0:
            self._client.release([hit.lease], group=not whole)

    def plan_step(self, output: Any) -> StepPlan:
        """The plan for the step that vLLM's SchedulerOutput describes."""
        plan = self._planned = StepPlan(step=next(self._step), failures_seen=self.stores.failures_seen)
        plan.preempted = set(output.preempted_req_ids or ())
        plan.computes = bool(output.num_scheduled_tokens)
        plan.weigh = self._weights.take_question()
        plan.weigh_adapters += self._keys.adapters.take_questions()
        self._loads += self._parts.next_loads()
        plan.loads, self._loads = self._loads, []
        plan.others_load = self._other_loads.in_step(output)
        self._times.planned(plan, output)
        self.stores.await_reports(plan)
        self._lookups.next_step()
        # After a reset of vLLM's cache, a preempted request may get new blocks and a load into them in the same step.
        reloaded = {load.request_id for load in plan.loads}
        for request_id in plan.preempted:
            tracked = self._lookups.tracked.get(request_id)
            if tracked is None:
                continue
            self.stores.preempted(tracked)
            if request_id not in reloaded:
                tracked.loaded_chunks = {}
                self._lookups.forget(tracked)
        plan.cancel = self.stores.overtaken()
        if self._engine.may_store:
            self.stores.plan(output, plan)
        # A worker that has no store of an awaited request reports the request as sent at once.  So a request whose
        # deferred stores are not planned yet is awaited only from a later step on.
        later = {store.request_id for store in self.stores.of_finished}
        plan.awaited, self._awaited = self._awaited - later, self._awaited & later
        self._planned = None
        return plan

    def heard(
        self,
        reports: Sequence[WorkerReport],
        received: Iterable[str],
        invalid_blocks: Iterable[int],
        not_loaded: Iterable[str] = (),
    ) -> None:
        """Apply the workers' news after a step: reports, requests whose asynchronous loads have ended, blocks whose
        loads have failed, and, where a hit is useful only as a whole, requests of which a load has failed."""
        self._client.prompt_tokens_s = self._times.heard(reports)
        # First, before anything that can fail: a report must be counted exactly once.
        for report in reports:
            self.stores.confirm(report)
            self._hear_weights(report)
        # The load may have been that of another connector.
        ours = [each for each in map(self._lookups.tracked.get, not_loaded) if each and each.loading]
        self._ended_loads(received)
        for tracked in ours:
            tracked.next_store = tracked.windows_next = tracked.tail_end = 0
            tracked.loaded_chunks = {}
            tracked.no_load = True
        failed = set(invalid_blocks)
        if failed:
            for tracked in self._lookups.tracked.values():
                chunks = [chunk for block, chunk in tracked.loaded_chunks.items() if block in failed]
                if chunks:
                    # The tokens are recomputed, and stored again in place of the bad chunks.
                    tracked.next_store = min(tracked.next_store, *chunks)
                    tracked.windows_next = min(tracked.windows_next, *chunks)
                    tracked.tail_end = 0
                    tracked.loaded_chunks = {}
                    tracked.no_load = True
            # KV of requests that ended in the failing step may be computed from the bad blocks.
            self.stores.forget_deferred()
        for report in reports:
            if report.broken and (self._engine.may_load or self._engine.may_store):
                logger.error(
                    "the cache is off for this engine until it is started again: a worker has stopped copying, see "
                    "its log"
                )
                self._engine.may_load = self._engine.may_store = False
            self.stores.heard(report)

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """End a request. Returns whether its blocks must be kept until the workers report it as sent."""
        tracked = self._lookups.tracked.get(request.request_id)
        if tracked is None:
            return False
        self._lookups.forget(tracked)
        del self._lookups.tracked[request.request_id]
        self._tell_next(tracked)
        if tracked.loading:
            # vLLM keeps the blocks by itself until the load is reported.
            self._end_load(tracked)
            self._loads += self._parts.end(request.request_id)
            return False
        if self._engine.may_store:
            self.stores.finish(tracked, tables)
        self.stores.settle(request.request_id)
        if not tracked.stores:
            return False
        # An in-process engine may make no further step, which alone could free the blocks.
        unsent = tracked.stores.intersection(store.store_id for store in self.stores.of_finished)
        if not unsent and self._engine.read_here(request.request_id):
            self.stores.unpin(tracked.stores)
            return False
        self._awaited.add(request.request_id)
        return True

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        tables = (self._lookups.counts, self._counts, self.stores.counts)
        counts = {name: count for table in tables for name, count in table.items()}
        for table in tables:
            table.update(dict.fromkeys(table, 0))
        return {name: count for name, count in counts.items() if count}

    def reset(self, *, engine_empty: bool) -> None:
        """Handle a reset of caches: weights may have changed, so the workers are asked before the next request begins.

        `engine_empty`: no request holds blocks, so vLLM has emptied its own cache as well.  If False, requests continue
        with their KV, which reaches other requests through vLLM's cache.  KV computed from it is not stored until a
        reset finds the engine empty or the weights turn out to be the same.
        """
        self._keys.reset(engine_empty=engine_empty)

    def take_events(self) -> list[Any]:
        """KV events about chunks stored and removed since the last call."""
        return self.stores.take_events()

    @property
    def awaits_news(self) -> bool:
        """See `StoreTable.awaits_news`."""
        return self.stores.awaits_news

    def close(self) -> None:
        """Release all leases that no worker has, and end the client within half a second."""
        for tracked in self._lookups.tracked.values():
            self._lookups.forget(tracked)
        self._lookups.tracked.clear()
        self._client.close(0.5)

    # -- after an error of ours ------------------------------------------------------------------------------

    def give_up(self, request: Any) -> None:
        """After an error in `on_new_request` or `matched_tokens`: compute the request without the cache."""
        tracked = self._lookups.tracked.get(request.request_id)
        if tracked is None:
            tracked = self._lookups.tracked[request.request_id] = Tracked(request)
        self._lookups.skip(tracked, "error")

    def turn_off(self) -> SchedulerOff:
        """After an error in any other call: the object that replaces this side until the engine is started again."""
        return SchedulerOff(self)

    # -- inside ----------------------------------------------------------------------------------------------

    def _load_of(
        self,
        tracked: Tracked,
        found: LookupResult,
        lease: LeaseName | None,
        table: Sequence[int],
        start: int,
        end: int,
        more: bool = False,
        group: CacheGroup | None = None,
    ) -> Load:
        """The load of a hit's chunks of one group, the first one by default, into the blocks that vLLM allocated."""
        group = group or self._groups[0]
        first, last = start // self._chunk_tokens, -(-end // self._chunk_tokens)
        if group.span:
            first = max(first, last - group.span)
        tail = self._tails.of_hit(tracked, found) if found.tail_tokens and last > found.n_chunks else None
        blocks = []
        for chunk in range(first, last):
            for index in group.blocks_of(chunk, tail.tokens if tail and chunk == tail.chunk else 0):
                inside = start < (index + 1) * group.block_tokens and index * group.block_tokens < end
                # Block 0 stands for "no block": vLLM keeps none before a window, or before a state.
                block = table[index] if inside and table[index] else SKIP_BLOCK
                blocks.append(block)
                if block != SKIP_BLOCK:
                    tracked.loaded_chunks[block] = chunk
        chain, identity = b"", RequestIdentity()
        if (
            tracked.hasher is not None and tracked.identity is not None
        ):  # dropped by a reset: then the load fails
            chain, identity = tracked.hasher.chain, tracked.identity.request
        row = found.n_slices * EXTENT.size
        return Load(
            request_id=tracked.request.request_id,
            lease=lease,
            identity=identity,
            chain=batch.part(chain, first, min(last, found.n_chunks)) + (tail.key if tail else b""),
            extents=found.extents[first * row : last * row],
            slices=tracked.identity.slices if tracked.identity is not None else (),
            blocks=blocks,
            # vLLM may take fewer tokens than promised; whether it waits for the load follows from the promise.
            asynchronous=tracked.asynchronous,
            group=group.number,
            adapter=tracked.adapter,
            more=more,
        )

    def _tell_next(self, tracked: Tracked) -> None:
        """Tell the server what follows a request that has ended, if the request says so."""
        request, params = tracked.request, tracked.request.kv_transfer_params
        said = params.get(NEXT) if isinstance(params, dict) else None
        for action in getattr(getattr(request, "kv_hints", None), "actions", ()):
            if action.action_type == NEXT:
                said = action.payload.get("next", "")
        if said is None or tracked.skipped or tracked.identity is None or tracked.hasher is None:
            return
        try:
            next_ = next_of(said)
        except ValueError as error:
            self._thinning.log(
                logger,
                logging.WARNING,
                NEXT,
                "request %r: %r is ignored: it %s",
                request.request_id,
                NEXT,
                error,
            )
            return
        last = batch.nth(
            tracked.hasher.chain, tracked.next_store - 1
        )  # empty if nothing was stored or loaded
        if next_ and last:
            self._client.hint(tracked.identity, last, next_)

    def _ended_loads(self, received: Iterable[str]) -> None:
        """The asynchronous loads of these requests have ended."""
        for request_id in received:
            tracked = self._lookups.tracked.get(request_id)
            if tracked is not None and tracked.loading:
                self._end_load(tracked)

    def _end_load(self, tracked: Tracked) -> None:
        tracked.loading = False
        if self._loading.get(_chunk_at(tracked, tracked.computed_tokens // self._chunk_tokens)) is tracked:
            del self._loading[_chunk_at(tracked, tracked.computed_tokens // self._chunk_tokens)]

    def _loads_for(self, tracked: Tracked, hit_tokens: int) -> bool:
        """Whether another request loads most of the same chunks now: this one will find them in vLLM's own cache."""
        first, end = tracked.computed_tokens // self._chunk_tokens, hit_tokens // self._chunk_tokens
        other, middle = self._loading.get(_chunk_at(tracked, first)), (first + end) // 2
        return (
            other is not None
            and other.loading
            and other.next_store > middle
            and _chunk_at(other, middle) == _chunk_at(tracked, middle)
        )

    def _hear_weights(self, report: WorkerReport) -> None:
        if report.weights is not None and self._weights.heard(*report.weights):
            self._tell_weights()
        for number, digest in report.adapters:
            self._keys.heard_adapter(number, digest)

    def _tell_weights(self) -> None:
        """Log the workers' reports on the weights."""
        if not self._weights.can_tell:
            logger.warning(
                "some workers cannot fingerprint their weights: after each reset of vLLM's caches%s this engine finds "
                "no chunk stored before, and shares none with other engines",
                "" if self._weights.named else ", and after each start,",
            )
        elif self._weights.named:
            mark = self._weights.mark
            logger.info("weights: %s", f"changed since the start, {mark[:12]}" if mark else "as at the start")
        else:
            logger.info("weights: named by samples of their content, %s", self._weights.mark[:12])

    def _usable(self, tracked: Tracked, computed_tokens: int) -> int:
        """Maximum number of tokens that a lookup could bring."""
        tokens = tracked.request.num_tokens
        if self._exact:
            return int((tokens - 1) // self._chunk_tokens * self._chunk_tokens) - computed_tokens
        step = self._tails.step_tokens
        return int(min((tokens - self._engine.lookahead_tokens) // step * step, tokens - 1)) - computed_tokens

    def _asynchronous(self, tokens: int) -> bool:
        if self._exact:
            return True
        if self._settings.load_mode != "auto":
            return self._settings.load_mode == "async"
        return -(-tokens // self._chunk_tokens) * self._engine.chunk_bytes > self._engine.sync_load_bytes


def _chunk_at(tracked: Tracked, chunk: int) -> bytes:
    """The key of a chunk of the prompt; empty after the last one."""
    return batch.nth(tracked.hasher.chain, chunk) if tracked.hasher is not None else b""


class SchedulerOff:
    """Answers vLLM in place of a `SchedulerSide` after an error of ours, until the engine is started again.

    The error may have left any table wrong.  So nothing is loaded or stored any more, and the tables are used only to
    end what vLLM or the server waits for: promised loads, blocks that workers may still read, and leases.
    """

    awaits_news = False

    def __init__(self, side: SchedulerSide) -> None:
        plan = side._planned or StepPlan(0)
        self._client, self._lookups, self._pins = side._client, side._lookups, side.stores.pins
        self._group, self._steps = side._groups[0], side._step
        self._tracked = self._lookups.tracked
        self._loads = [*plan.loads, *side._loads, *side._parts.end_all()]
        self._awaited = plan.awaited | side._awaited
        self._unsent = [store.store_id for store in (*plan.stores, *side.stores.of_finished)]
        """Planned stores that are not sent to workers."""
        self._cancel = plan.cancel | side.stores.unprotected
        self._promised = side.stores.promised
        self._leased = list(self._tracked.values())
        """Requests whose leases are not released yet."""

    def on_new_request(self, request: Any) -> None:
        """Record the request, of which no store reads blocks."""
        self._tracked.setdefault(request.request_id, Tracked(request))

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing can be loaded."""
        return 0, False

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Plan a load that fails in the workers if vLLM was promised one that is not planned."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or external_tokens <= 0:
            return
        tracked.loading = tracked.asynchronous
        planned = next((load for load in self._loads if load.request_id == request.request_id), None)
        if planned is not None:
            tracked.hit = tracked.call = None
            if planned.lease is not None:
                self._client.release([planned.lease])  # our share; the workers release theirs
            return
        size, number = self._group.block_tokens, self._group.number
        first = tracked.computed_tokens // size
        last = -(-(tracked.computed_tokens + external_tokens) // size)
        blocks = list(tables[number][first:last])
        self._loads.append(
            Load(request.request_id, None, RequestIdentity(), b"", b"", (), blocks, tracked.asynchronous)
        )

    def plan_step(self, output: Any) -> StepPlan:
        """A plan without stores."""
        plan = StepPlan(next(self._steps), self._loads, cancel=self._cancel, awaited=self._awaited)
        self._loads, self._cancel, self._awaited = [], set(), set()
        plan.preempted = set(output.preempted_req_ids or ())
        plan.computes = bool(output.num_scheduled_tokens)
        return plan

    def heard(self, reports: Sequence[WorkerReport], received: Iterable[str], *_: Any) -> None:
        """Record ended loads, and blocks that workers have finished reading."""
        for request_id in received:
            if request_id in self._tracked:
                self._tracked[request_id].loading = False
        for report in reports:
            while report.gathered:
                self._pins.read(report.gathered.pop())

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Whether the request's blocks must be kept until the workers report it as sent."""
        tracked = self._tracked.pop(request.request_id, None)
        # vLLM keeps the blocks of a load by itself. The record of a request may be gone while a store reads its blocks.
        if tracked is not None and (tracked.loading or not tracked.stores):
            return False
        self._awaited.add(request.request_id)
        return True

    def take_events(self) -> list[Any]:
        """Release pins and leases that no worker has, some with each call if that raises exceptions; no events."""
        while self._promised:
            self._promised.popitem()[1][0].withdraw()
        while self._unsent:
            self._pins.never_sent(self._unsent.pop())
        while self._leased:
            self._lookups.forget(self._leased.pop())
        return []

    def take_counts(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def reset(self, *, engine_empty: bool) -> None:
        """Nothing depends on the weights."""

    def close(self) -> None:
        """Release what `take_events` has not released yet, and end the client within half a second."""
        try:
            self.take_events()
        finally:
            self._client.close(0.5)
