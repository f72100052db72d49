"""Plans which chunks are stored in which step, and follows each store to its outcome.

Invariants
1. A chunk is stored only from blocks whose tokens are known and whose KV the planned step completes.  With draft
   layers, the tokens that the KV of these layers depends on must be known as well (`lookahead_tokens`).  While any
   synchronous load is unconfirmed, nothing is stored, unless the load is ours and the engine has a single worker, which
   itself detects whether it failed.
2. A store that was dropped or not confirmed is planned again when its chunks are next complete.
3. For groups with a window, only the windows at the prompt's end and at the point where it diverges from another prompt
   are stored (and, with `save_decode_cache`, those of the answer); for groups with a state, only the states that vLLM
   offers.  vLLM frees their blocks while the request continues, so they are pinned until no store reads them.
4. While other engines use the server, this engine promises them the chunks of a prompt that it computes: from the
   request's first step on (or from its arrival if no other request waits), until the last store has its outcome or
   there will be none.
5. With late stores, complete chunks and tails are recorded instead of stored, and stored when vLLM is about to reuse
   their blocks (`late`).

Loads of other connectors, which share an engine with ours in vLLM's `MultiConnector`, are inferred: `MultiConnector`
asks every connector about a request, lets the first one that has tokens load, and tells the others only that they load
none.  Tokens that vLLM calls computed, and that come neither from its own cache nor from us, are from another
connector.

An asynchronous load of another connector has ended, as far as vLLM will use it, when vLLM schedules its request.  If a
load within a step fails, vLLM learns that only from the step's result, when the step has already computed on bad
blocks.  Until that result, nothing is stored (`StoreTable.must_wait`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from kvstrata.client import PromiseCall
from kvstrata.connectors.vllm.engine import Engine, MakeEvent
from kvstrata.connectors.vllm.groups import CacheGroup, Rule
from kvstrata.connectors.vllm.late import HELD_STEPS, LateStores, Record
from kvstrata.connectors.vllm.lookup_table import Tracked
from kvstrata.connectors.vllm.metadata import StepPlan, Store, WorkerReport
from kvstrata.connectors.vllm.request_keys import RequestKeys
from kvstrata.connectors.vllm.tails import PromptTails
from kvstrata.keys import batch
from kvstrata.keys.chunking import Tail
from kvstrata.patience import patience


class OtherLoads:
    """Loads of other connectors in one engine. Belongs to the scheduler's thread."""

    def __init__(self, tracked: Mapping[str, Tracked], keys: RequestKeys) -> None:
        """`tracked` are the lookup table's requests."""
        self._tracked = tracked
        self._keys = keys
        self._asked: set[str] = set()
        """Requests that vLLM has asked about since the last step was planned."""

    def asked(self, tracked: Tracked, computed_tokens: int) -> None:
        """vLLM asks about a request without blocks, of which its own cache has `computed_tokens` tokens."""
        # The request holds no blocks, so it depends only on KV that vLLM has just found, or that is loaded.
        tracked.stale = computed_tokens > 0 and self._keys.is_stale(tracked.request)
        tracked.known_tokens, tracked.scheduled, tracked.untrusted = computed_tokens, False, False
        self._asked.add(tracked.request.request_id)

    def in_step(self, output: Any) -> bool:
        """Whether another connector loads in the step that vLLM's SchedulerOutput describes, as part of it."""
        asked, self._asked = self._asked, set()
        found = False
        for request_id, computed in computed_before(output).items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.scheduled:
                continue
            tracked.scheduled = True
            if computed > tracked.known_tokens:
                tracked.untrusted = not self._keys.others_trusted
                found |= request_id in asked
        return found


def computed_before(output: Any) -> dict[str, int]:
    """Request → tokens of which vLLM has KV before the step that its SchedulerOutput describes."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed


logger = logging.getLogger("vllm.kvstrata")

REMEMBERED_STORES = 4096
AWAITED_S = 10.0
"""Maximum time that an engine without requests waits for the outcome of its last store: a report may be lost."""
UNCONFIRMED_STEPS = 64
"""Number of later steps after which a report counts as lost; vLLM has at most 2 more steps under way than stages."""
MAX_OFFLOAD = "lmcache.max_offload_tokens"
MAX_ANNOUNCED = 65_536
"""Maximum number of watched chunks; beyond that, the chunk checked longest ago is reported as removed."""
LOOKED_AT_PER_STEP = 32
ROUND_S = 0.1
"""Minimum time between two checks of a chunk."""
ARRIVES_WITHIN_S = 10.0
"""Time for a chunk to reach L1 if another process is still storing it when events name it."""


class Announced:
    """Chunks that KV events named as stored, watched until they leave L1, so that events can name them as removed.

    The server does not notify its clients of evictions, but the index in shared memory shows them.  Each step of vLLM
    checks a few chunks, those checked longest ago first: a busy engine reports a removal after at most about
    MAX_ANNOUNCED / LOOKED_AT_PER_STEP = 2,048 steps, and an idle engine never.  Belongs to the scheduler's thread.
    """

    def __init__(
        self,
        present: Callable[[Sequence[tuple[bytes, bytes]]], list[bool] | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`present` returns for each (identity root, chain key) whether L1 has the chunk; None while unknown."""
        self._present = present
        self._now = now
        self._chunks: OrderedDict[bytes, tuple[bytes, float, float]] = OrderedDict()
        """Key → (root, time of the last check, time until which it may still arrive); the oldest check first."""

    def add(self, root: bytes, keys: Iterable[bytes]) -> list[bytes]:
        """Watch these chunks of an identity, which events now name as stored.

        Returns the chunks that are dropped to stay within MAX_ANNOUNCED; the caller reports them as removed.
        """
        now = self._now()
        for key in keys:
            self._chunks[key] = (root, now, now + patience(ARRIVES_WITHIN_S))
            self._chunks.move_to_end(key)
        dropped = []
        while len(self._chunks) > MAX_ANNOUNCED:
            dropped.append(self._chunks.popitem(last=False)[0])
        return dropped

    def left(self) -> list[bytes]:
        """Check a few chunks. Returns those that have left L1, and stops watching them."""
        now = self._now()
        due: list[tuple[bytes, bytes]] = []
        for key, (root, looked_s, _) in self._chunks.items():
            if len(due) == LOOKED_AT_PER_STEP or now - looked_s < ROUND_S:
                break
            due.append((root, key))
        present = self._present(due) if due else None
        if present is None:
            return []
        gone = []
        for (root, key), there in zip(due, present, strict=True):
            arrives_s = self._chunks[key][2]
            if there or now < arrives_s:
                self._chunks[key] = (root, now, 0.0 if there else arrives_s)
                self._chunks.move_to_end(key)
            else:
                del self._chunks[key]
                gone.append(key)
        return gone


class StoreTable:
    """The stores of one engine. Belongs to the scheduler's thread."""

    def __init__(
        self, engine: Engine, tracked: dict[str, Tracked], keys: RequestKeys, tails: PromptTails
    ) -> None:
        """`tracked` are the lookup table's requests."""
        groups = engine.groups
        self._tracked = tracked
        self._keys = keys
        self._announced = Announced(engine.client.pool.present, engine.now)
        self._whole = [group for group in groups if group.rule is Rule.PREFIX]
        self._windows = [group for group in groups if group.rule is Rule.LAST_WINDOW]
        self._states = {group.number: group for group in groups if group.rule is Rule.STATE_AT}
        self._chunk_tokens = engine.chunk_tokens
        self._whole_of_events = next(iter(self._whole), None)
        """The group whose stores are announced as vLLM's events."""
        self._tails = tails
        self._store_late = engine.store_late
        self._late = LateStores(engine, keys, tails) if engine.store_late is not None else None
        self._block_tokens = groups[0].block_tokens
        self.pins = engine.pins
        self._world_size, self._now = engine.world_size, engine.now
        self._save_decode_cache = engine.settings.save_decode_cache
        self._lookahead_tokens = engine.lookahead_tokens
        self._make_event, self._make_removal = engine.events, engine.removal
        self._awaited_until_s = 0.0
        self._store_ids = itertools.count(1)
        self._in_flight: OrderedDict[int, _StoreRecord] = OrderedDict()
        self._unconfirmed: dict[int, int] = {}
        """Step with synchronous loads of unknown outcome → number of workers that have not reported the step."""
        self._others_load: set[int] = set()
        """Those of these steps in which another connector loads."""
        self.failures_seen = 0
        """Number of steps with failed loads that the workers have reported."""
        self.of_finished: list[Store] = []
        """Stores of requests that ended while their chunks were deferred."""
        self._events: deque[Any] = deque(maxlen=REMEMBERED_STORES)
        self._client, self._shares_l1 = engine.client, engine.shares_l1
        self._promises = engine.settings.await_siblings
        self.promised: dict[str, tuple[PromiseCall, int]] = {}
        """Request → the promise of its chunks, and the index of the chunk after the last of them."""
        self.counts = self._late.counts if self._late is not None else {}
        """Totals since the scheduler side last took them."""

    # -- steps whose synchronous loads are not confirmed -----------------------------------------------------

    @property
    def must_wait(self) -> bool:
        """Whether stores wait for loads: a worker cannot know whether a load of another worker or connector failed."""
        return bool(self._unconfirmed) and (self._world_size > 1 or bool(self._others_load))

    @property
    def awaits_news(self) -> bool:
        """Whether vLLM should continue stepping without requests, since only a step brings outcomes of stores."""
        draining = self._late is not None and self._late.draining
        return draining or (bool(self._in_flight) and self._now() < self._awaited_until_s)

    def await_reports(self, plan: StepPlan) -> None:
        """Remember the step if it has synchronous loads; give up on steps whose reports are lost.

        A worker that fails in a step and is brought back by vLLM's fault tolerance may never report the step's outcome.
        """
        lost = [step for step in self._unconfirmed if plan.step - step > UNCONFIRMED_STEPS]
        if lost:
            logger.warning(
                "workers did not report the outcome of loads in %d steps, so these loads count as failed: KV computed "
                "from vLLM's present blocks is not stored until the cache is reset with no request running",
                len(lost),
            )
            for step in lost:
                self._forget_step(step)
            # vLLM got no report of bad blocks, so it may keep them and share them with other requests.
            self._keys.distrust_engine()
            self.forget_deferred()
            for request_id in list(self.promised):
                self.withdraw(request_id)
        if plan.others_load:
            self._others_load.add(plan.step)
        if plan.others_load or any(not load.asynchronous for load in plan.loads):
            self._unconfirmed[plan.step] = self._world_size

    def confirm(self, report: WorkerReport) -> None:
        """Apply one worker's report of how the synchronous loads of a step ended."""
        self.failures_seen = max(self.failures_seen, report.failures)
        missing = self._unconfirmed.get(report.step, 0)
        if missing > 1:
            self._unconfirmed[report.step] = missing - 1
        elif missing:
            self._forget_step(report.step)

    def _forget_step(self, step: int) -> None:
        del self._unconfirmed[step]
        self._others_load.discard(step)

    # -- planning --------------------------------------------------------------------------------------------

    def plan(self, output: Any, plan: StepPlan) -> None:
        """Add the stores of the step that vLLM's SchedulerOutput describes."""
        # No report of workers says whether a record may be considered, so records wait for any load.
        waits = self.must_wait or (bool(self._unconfirmed) and self._is_late)
        if not self.must_wait:
            plan.stores, self.of_finished = self.of_finished, []
        scheduled, computed = output.num_scheduled_tokens, computed_before(output)
        for request_id, tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if not _may_store(tracked) or request_id not in computed:
                self.withdraw(request_id)
                continue
            if not tracked.has_promised:
                self._promise(tracked)
            end = self._complete_tokens(tracked, computed[request_id] + tokens)
            chunks = end // self._chunk_tokens
            done = tracked.next_store if self._whole else tracked.windows_next
            # The tail of the prompt; that of the answer is stored when it has ended.
            tail_end = min(end, tracked.request.num_prompt_tokens)
            more_tail = computed[
                request_id
            ] + tokens >= tracked.request.num_prompt_tokens and self._tail_is_due(tracked, tail_end)
            if chunks <= done and not more_tail and not (self._windows and chunks > tracked.windows_next):
                continue
            if waits:
                tracked.deferred = True
                continue
            tracked.deferred = False
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            if tables:
                self._add_stores(tracked, tables, chunks, plan.stores)
                if more_tail:
                    self._add_tail(tracked, tables, tail_end, plan.stores)
        if self._states and not self.must_wait:
            self._plan_states(output, plan)
        if self._late is not None:
            if not self._unconfirmed:
                self._late.confirm()
            self._plan_late(self._late, sum(scheduled.values()), plan)

    @property
    def _is_late(self) -> bool:
        return self._store_late is not None and self._store_late()

    def _records(self, tracked: Tracked) -> LateStores | None:
        """The late stores that record a request's complete chunks; None while chunks are stored at once."""
        return self._late if self._is_late and not tracked.stores_at_once else None

    def overtaken(self) -> set[int]:
        """Late stores whose blocks vLLM has reused since the last plan."""
        return self._late.overtaken() if self._late is not None else set()

    @property
    def unprotected(self) -> set[int]:
        """Late stores under way: they must be cancelled if no later plan asks for `overtaken`."""
        return self._late.flying if self._late is not None else set()

    def hold(self, tracked: Tracked, tokens: int) -> bool:
        """Whether a hit of `tokens` tokens waits for stores of the chunks in the blocks that it will take."""
        late, blocks = self._late, -(-tokens // self._block_tokens)
        if late is None or tracked.held_steps >= HELD_STEPS or not late.must_hold(blocks):
            return False
        tracked.held_steps += 1
        return True

    def drain(self) -> None:
        """Store all chunks that L1 lacks, however far from reuse their blocks are."""
        if self._late is not None:
            self._late.drain()

    def took_hit(self, tracked: Tracked, n_chunks: int, tokens: int) -> None:
        """vLLM has allocated blocks for a request whose hit has `n_chunks` chunks and, with a tail, `tokens` tokens."""
        tracked.windows_next = max(tracked.windows_next, n_chunks)
        if self._records(tracked) is None:  # late stores record such chunks too
            tracked.next_store = max(tracked.next_store, n_chunks)
            tracked.tail_end = max(tracked.tail_end, tokens)

    def preempted(self, tracked: Tracked) -> None:
        """The request has lost its blocks."""
        tracked.stores.clear()
        tracked.deferred = tracked.has_promised = False
        self.withdraw(tracked.request.request_id)
        if self._late is not None:
            tracked.next_store = tracked.tail_end = tracked.held_steps = 0

    def forget_deferred(self) -> None:
        """Drop the deferred chunks of ended requests: a load that they may depend on has failed."""
        for store in self.of_finished:
            self.withdraw(store.request_id)
        self.of_finished.clear()
        if self._late is not None:
            self._late.forget_unconfirmed()

    def arrived(self, tracked: Tracked) -> None:
        """A request has arrived: if no other waits, it is computed in the next step, so promise its chunks.

        Its lookup was sent before, so it does not wait for a request that waits for this promise.
        """
        before = next(itertools.islice(reversed(self._tracked.values()), 1, None), None)
        if _may_store(tracked) and not tracked.expects_ms and (before is None or before.scheduled):
            self._promise(tracked)

    def _promise(self, tracked: Tracked) -> None:
        """Promise the other engines the chunks of a prompt that is computed from now on."""
        tracked.has_promised = True
        stores_late = self._records(tracked) is not None
        shared = self._shares_l1() or self._client.has_promises
        if not (self._promises and shared) or stores_late or not self._keys_known(tracked, 1):
            return
        assert tracked.hasher is not None and tracked.identity is not None
        last = min(self._complete_chunks(tracked, tracked.request.num_prompt_tokens), tracked.hasher.n_chunks)
        if last > tracked.next_store:
            chain = batch.part(tracked.hasher.chain, tracked.next_store, last)
            self.promised[tracked.request.request_id] = self._client.promise(tracked.identity, chain), last

    def withdraw(self, request_id: str) -> None:
        """Withdraw the promise of a request's chunks, if there is one."""
        if self.promised and (promised := self.promised.pop(request_id, None)) is not None:
            promised[0].withdraw()

    def settle(self, request_id: str) -> None:
        """Withdraw the promise of a request whose last store has ended, or that makes no further one."""
        if request_id not in self.promised:
            return
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.next_store < self.promised[request_id][1]:
            return
        under_way = any(record.request_id == request_id for record in self._in_flight.values())
        if not under_way and not any(store.request_id == request_id for store in self.of_finished):
            self.withdraw(request_id)

    def _plan_late(self, late: LateStores, tokens: int, plan: StepPlan) -> None:
        """Add the stores of chunks whose blocks vLLM is about to reuse."""
        (group,) = self._whole
        loaded = sum(len(load.blocks) for load in plan.loads)
        for tracked, records in late.due(plan.step, -(-tokens // group.block_tokens) + loaded):
            first, tail = records[0].number, records[0].tail
            last = first + (len(records) if tail is None else 0)
            replaces = (
                self._tails.replaced_by(tracked, first, last)
                if tail is None
                else self._tails.replaced_by_tail(tracked, tail)
            )
            blocks = [block for record in records for block in record.blocks]
            if self._add_store(
                tracked, group, first, last, blocks, plan.stores, tail=tail, replaces=replaces, late=records
            ):
                late.planned(plan.stores[-1].store_id, records)

    def finish(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> None:
        """Keep a finished request's deferred chunks and tail, to store them with a later step. `tables`: one per
        group."""
        if not tables or not tables[0] or not _may_store(tracked):
            return
        if not tracked.scheduled:
            return  # another connector may still be loading into the blocks
        request = tracked.request
        # The last token was sampled, not computed.
        end = self._complete_tokens(tracked, min(request.num_computed_tokens, request.num_tokens - 1))
        if tracked.deferred or self._lookahead_tokens or self._records(tracked) is not None:
            # The token after the last chunk may have been sampled only now.
            chunks = self._complete_chunks(tracked, request.num_computed_tokens)
            self._add_stores(tracked, tables, chunks, self.of_finished)
        if request.num_computed_tokens >= request.num_prompt_tokens and self._tail_is_due(tracked, end):
            self._add_tail(tracked, tables, end, self.of_finished)

    def _complete_chunks(self, tracked: Tracked, computed_tokens: int) -> int:
        """Number of chunks whose tokens are known and whose KV is complete after `computed_tokens` tokens."""
        return self._complete_tokens(tracked, computed_tokens) // self._chunk_tokens

    def _complete_tokens(self, tracked: Tracked, computed_tokens: int) -> int:
        """Number of tokens that may be stored after `computed_tokens` tokens."""
        request, ahead = tracked.request, self._lookahead_tokens
        # A chain of draft layers has not processed the last tokens completely: it gets these tokens again.
        tokens = min(computed_tokens - max(0, ahead - 1), request.num_tokens - ahead)
        if not self._save_decode_cache:
            tokens = min(tokens, request.num_prompt_tokens)
        params = request.kv_transfer_params
        limit = params.get(MAX_OFFLOAD) if isinstance(params, dict) else None
        if isinstance(limit, int) and not isinstance(limit, bool):
            tokens = min(tokens, max(0, limit))
        return int(tokens)

    def _plan_states(self, output: Any, plan: StepPlan) -> None:
        """Add stores of the states that vLLM offers in this step."""
        gone = output.finished_req_ids | (output.preempted_req_ids or set())
        for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            tracked = self._tracked.get(request_id)
            if not _may_store(tracked) or request_id in gone:
                continue
            for number, block, tokens in offers:
                chunks, rest = divmod(tokens, self._chunk_tokens)
                group = self._states.get(number)
                if group is None or rest or not 0 < chunks <= self._complete_chunks(tracked, tokens):
                    continue
                if self._keys_known(tracked, chunks):
                    self._add_store(tracked, group, chunks - 1, chunks, [block], plan.stores)

    def _add_stores(
        self, tracked: Tracked, tables: Sequence[Sequence[int]], chunks: int, stores: list[Store]
    ) -> None:
        """Add stores of all chunks before `chunks` that were not stored yet, as far as their keys are known.

        Stores added before an exception stay in `stores`, so that its owner can give them up.
        """
        if not self._keys_known(tracked, 1):
            return
        assert tracked.hasher is not None
        last = min(chunks, tracked.hasher.n_chunks)
        first = tracked.next_store
        if (late := self._records(tracked)) is not None:
            late.record(tracked, tables[0], last, confirmed=not self._unconfirmed)
        elif last > first:
            for group in self._whole:
                blocks = tables[group.number][first * group.chunk_blocks : last * group.chunk_blocks]
                if len(blocks) < (last - first) * group.chunk_blocks:
                    return
                replaces = self._tails.replaced_by(tracked, first, last)
                if not self._add_store(tracked, group, first, last, list(blocks), stores, replaces=replaces):
                    return
            tracked.next_store = last
        if self._windows and last > tracked.windows_next:
            for group in self._windows:
                table = tables[group.number]
                for begin, end in self._wanted(tracked, group, table, tracked.windows_next, last):
                    blocks = [table[i] for chunk in range(begin, end) for i in group.blocks_of(chunk)]
                    self._add_store(tracked, group, begin, end, blocks, stores)
            tracked.windows_next = last

    def _tail_is_due(self, tracked: Tracked, end: int) -> bool:
        """Whether the first `end` tokens end with a tail that is not stored or loaded yet, itself or in a chunk."""
        step, chunk = self._tails.step_tokens, end // self._chunk_tokens
        if not self._tails.enabled or chunk < tracked.next_store:
            return False
        return end // step * step > max(tracked.tail_end, chunk * self._chunk_tokens)

    def _add_tail(
        self, tracked: Tracked, tables: Sequence[Sequence[int]], end: int, stores: list[Store]
    ) -> None:
        """Add the store of the tail of these tokens, unless L1 has it; the chunks before it are stored."""
        if not self._keys_known(tracked, end // self._chunk_tokens):
            return
        tail = self._tails.of(tracked, end)
        (group,) = self._whole
        assert tail is not None and tracked.hasher is not None
        table, indices = tables[group.number], group.blocks_of(tail.chunk, tail.tokens)
        blocks = list(table[indices.start : indices.stop])
        if tracked.next_store < tail.chunk or len(blocks) * group.block_tokens < tail.tokens:
            return
        late = self._records(tracked)
        if late is not None and not late.record_tail(tracked, tail, blocks, confirmed=not self._unconfirmed):
            return
        tracked.tail_end = tail.chunk * self._chunk_tokens + tail.tokens
        if late is None and not self._tails.in_l1(tracked, tail):
            replaces = self._tails.replaced_by_tail(tracked, tail)
            self._add_store(
                tracked, group, tail.chunk, tail.chunk, blocks, stores, tail=tail, replaces=replaces
            )

    def _wanted(
        self, tracked: Tracked, group: CacheGroup, table: Sequence[int], first: int, last: int
    ) -> list[tuple[int, int]]:
        """The runs of chunks in [first, last) whose windows a later hit can use, and whose blocks are allocated."""
        prompt = tracked.request.num_prompt_tokens
        # A later request with the same prompt may hit up to the token before its last one.
        ends = {prompt // self._chunk_tokens, (prompt - 1) // self._chunk_tokens, tracked.junction}
        runs: list[tuple[int, int]] = []
        for chunk in range(first, last):
            in_answer = self._save_decode_cache and chunk >= prompt // self._chunk_tokens
            if not in_answer and not any(end - group.span <= chunk < end for end in ends):
                continue
            if not all(table[index] for index in group.blocks_of(chunk)):
                continue
            if runs and runs[-1][1] == chunk:
                runs[-1] = runs[-1][0], chunk + 1
            else:
                runs.append((chunk, chunk + 1))
        return runs

    def _keys_known(self, tracked: Tracked, chunks: int) -> bool:
        self._keys.prepare(tracked)
        return (
            tracked.identity is not None and tracked.hasher is not None and tracked.hasher.n_chunks >= chunks
        )

    def _add_store(
        self,
        tracked: Tracked,
        group: CacheGroup,
        first: int,
        last: int,
        blocks: list[int],
        stores: list[Store],
        *,
        tail: Tail | None = None,
        replaces: bytes = b"",
        late: Sequence[Record] = (),
    ) -> bool:
        """Add the store of chunks [first, last) of a group, or of a tail; False if one of its blocks is not allocated.

        Block 0 stands for "no block" in vLLM's tables.
        """
        assert tracked.hasher is not None and tracked.identity is not None
        if 0 in blocks:
            return False
        chain = tracked.hasher.chain
        store = Store(
            store_id=next(self._store_ids),
            request_id="" if late else tracked.request.request_id,
            identity=tracked.identity.request,
            parent=batch.before(chain, first),
            chain=batch.part(chain, first, last) if tail is None else tail.key,
            blocks=blocks,
            probe=tracked.hasher.probe,
            tail_tokens=0 if tail is None else tail.tokens,
            replaces=replaces,
            traceparent=tracked.traceparent,
            group=group.number,
            adapter=tracked.adapter,
        )
        if not late:
            tracked.stores.add(store.store_id)
        record = _StoreRecord(
            store.request_id, first, last - first, self._world_size, self._world_size, late=late
        )
        if group.rule is not Rule.PREFIX:
            self.pins.pin(store.store_id, blocks, self._world_size)
        if self._make_event is not None and group is self._whole_of_events and tail is None:
            record.keep_for_events(tracked.request, tracked.identity.root, store, self._chunk_tokens)
        self._in_flight[store.store_id] = record
        self._awaited_until_s = self._now() + patience(AWAITED_S)
        while len(self._in_flight) > REMEMBERED_STORES:
            self.withdraw(self._in_flight.popitem(last=False)[1].request_id)
        stores.append(store)
        return True

    # -- reports ---------------------------------------------------------------------------------------------

    def heard(self, report: WorkerReport) -> None:
        """Apply one worker's report about stores."""
        while report.gathered:  # each store counts once, whatever fails here
            self._gathered(report.gathered.pop())
        for store_id in report.dropped:
            self._dropped(store_id)
        for store_id, mask in report.stored:
            self._stored(store_id, mask)

    def _dropped(self, store_id: int) -> None:
        """A store was not made: its chunks may be planned again."""
        record = self._in_flight.pop(store_id, None)
        if record is not None:
            self.withdraw(record.request_id)
        for chunk in record.late if record is not None else ():
            chunk.not_before = 0
        tracked = self._tracked.get(record.request_id) if record is not None else None
        if record is not None and tracked is not None:
            tracked.stores.discard(store_id)
            tracked.next_store = min(tracked.next_store, record.first_chunk)
            tracked.tail_end = 0
            tracked.windows_next = min(tracked.windows_next, record.first_chunk)

    def unpin(self, store_ids: Iterable[int]) -> None:
        """Unpin the blocks of stores that the only worker has read, before its report says so."""
        for store_id in store_ids:
            self.pins.read(store_id)

    def _gathered(self, store_id: int) -> None:
        self.pins.read(store_id)
        record = self._in_flight.get(store_id)
        if record is None:
            return
        record.not_gathered -= 1
        if record.not_gathered == 0:
            if self._late is not None:
                self._late.read(store_id)
            tracked = self._tracked.get(record.request_id)
            if tracked is not None:
                tracked.stores.discard(store_id)

    def _stored(self, store_id: int, mask: int) -> None:
        record = self._in_flight.get(store_id)
        if record is None:
            return
        record.not_stored -= 1
        record.mask &= mask
        if record.not_stored == 0:
            del self._in_flight[store_id]
            if ~record.mask & (1 << record.n_chunks) - 1:
                self.withdraw(record.request_id)
            self.settle(record.request_id)
            for at, chunk in enumerate(record.late):
                chunk.saved = bool(record.mask >> at & 1)
            if self._make_event is not None and record.chain:
                self._events.extend(record.events(self._make_event, self._chunk_tokens))
                keys = batch.split(record.chain)
                stored = [key for i, key in enumerate(keys) if record.mask >> i & 1]
                self._removed(self._announced.add(record.root, stored))

    # -- events ----------------------------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """Events about chunks stored and removed since the last call."""
        if self._make_event is not None:
            self._removed(self._announced.left())
        events = list(self._events)
        self._events.clear()
        return events

    def _removed(self, keys: Sequence[bytes]) -> None:
        if keys and self._make_removal is not None:
            self._events.append(self._make_removal(keys))


def _may_store(tracked: Tracked | None) -> TypeGuard[Tracked]:
    return tracked is not None and not (tracked.skipped or tracked.stale or tracked.untrusted)


class _StoreRecord(msgspec.Struct, eq=False):
    """A store, kept until all workers have reported its outcome."""

    request_id: str
    first_chunk: int
    n_chunks: int
    """Number of chunks; 0 for a tail."""
    not_gathered: int
    not_stored: int
    late: Sequence[Record] = ()
    """The chunks of a late store."""
    mask: int = -1
    """Chunks that are in L1 according to all reports so far, one bit each."""
    tokens: list[int] = []
    root: bytes = b""
    chain: bytes = b""
    parent: bytes = b""
    request: Any = None

    def keep_for_events(self, request: Any, root: bytes, store: Store, chunk_tokens: int) -> None:
        """Keep the tokens that the events will carry, their request, and the root of the identity."""
        first = self.first_chunk * chunk_tokens
        self.tokens = list(request.all_token_ids[first : first + batch.count(store.chain) * chunk_tokens])
        self.root = root
        self.chain, self.parent, self.request = store.chain, store.parent, request

    def events(self, make: MakeEvent, chunk_tokens: int) -> list[Any]:
        """One event per run of chunks that are in L1 in all slices."""
        keys = batch.split(self.chain)
        made, start = [], 0
        for end in range(len(keys) + 1):
            if end == len(keys) or not self.mask >> end & 1:
                if end > start:
                    parent = keys[start - 1] if start else self.parent
                    tokens = self.tokens[start * chunk_tokens : end * chunk_tokens]
                    place = (self.first_chunk + start) * chunk_tokens
                    made.append(make(tokens, parent, keys[start:end], self.request, place))
                start = end + 1
        return made
