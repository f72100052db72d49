"""The core of a simulated engine: continuous batching over paged blocks, as discrete events without clock or I/O.

The scheduler is that of vLLM 0.32 with its defaults (first come first served, chunked prefill, the whole prompt must
fit before a request is admitted):

1. A step first serves the requests that run, in the order of their admission, then admits waiting ones while the
   step's tokens, `max_num_seqs` and the free blocks allow.
2. If a running request gets no block, the one admitted last is preempted: it loses its blocks, waits before all others,
   and computes its prompt and what it had answered again, less what it finds.  Then nobody is admitted in this step.
3. Blocks can be found from the moment in which the step that fills them is scheduled, also by requests of that step.
4. At least the last known token is computed, so a lookup is for all tokens but that one.

Times are picoseconds from an origin that the caller chooses.  A step begins only once `advance` is called with a later
time, so it contains everything that arrived until its beginning, in whatever order the calls were made.  The state at a
time therefore depends on what was submitted when, and not on how often `advance` was called.

With `fast`, steps in which all requests decode and none ends are computed together; the results are the same.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.testing.engine_sim.block_cache import BlockCache
from kvstrata.testing.engine_sim.engine_model import EngineModel, StepCosts
from kvstrata.testing.engine_sim.kv_events import KIND, MEDIUM, BlockStored, Event
from kvstrata.testing.engine_sim.requests import End, SimRequest, Span


class Step(NamedTuple):
    """A step in flight."""

    start_ps: int
    end_ps: int
    work: list[tuple[SimRequest, int]]
    """Requests, and how many tokens of each are computed."""


class Totals:
    """What an engine has done since it began."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.lookup_tokens = 0
        self.answer_tokens = 0
        self.preemptions = 0
        self.ended: dict[End, int] = dict.fromkeys(End, 0)


class SimEngine:
    """One simulated engine. Every call gives a time, and none may give an earlier one than another before it."""

    def __init__(self, model: EngineModel, *, fast: bool = True) -> None:
        self.model = model
        self.totals = Totals()
        self._costs = StepCosts(model)
        self._fast = fast
        self._events: list[Event] | None = [] if model.kv_events else None
        self._batches: list[tuple[int, list[Event]]] = []
        self._cache = BlockCache(model.kv_blocks, self._events)
        self._waiting: deque[SimRequest] = deque()
        self._running: list[SimRequest] = []
        self._requests: dict[str, SimRequest] = {}
        self._changed: list[SimRequest] = []
        self._aborted: list[SimRequest] = []
        self._step: Step | None = None
        self._free_ps = 0
        """When the last step ended, or work came to an idle engine: the next step begins then."""

    @property
    def running(self) -> int:
        """Requests that were admitted."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that were not."""
        return len(self._waiting)

    @property
    def used_share(self) -> float:
        """Share of the blocks that requests use."""
        return self._cache.used_share

    def stored_keys(self) -> dict[int, int]:
        """How many blocks hold each key that can be found."""
        return self._cache.stored_keys()

    def next_ps(self) -> int | None:
        """The end of the step in flight, else the time after which one begins; None for an idle engine."""
        if self._step is not None:
            return self._step.end_ps
        return self._free_ps if self._running or self._waiting else None

    def check(self, request: SimRequest) -> None:
        """Raise BadRequest unless the request fits into the engine."""
        most = self.model.max_model_tokens
        if request.prompt_tokens + request.answer_tokens > most:
            raise BadRequest(
                f"the prompt has {request.prompt_tokens} tokens and the answer {request.answer_tokens}, together more "
                f"than the {most} of max_model_tokens; shorten the prompt or lower max_tokens",
                field="max_tokens",
            )
        if request.name in self._requests:
            raise BadRequest(
                f"request {request.name!r} is there already; give each its own id", field="request_id"
            )

    def submit(self, request: SimRequest, at_ps: int) -> None:
        """A request arrives. Raises BadRequest, with nothing changed, for one that cannot be served."""
        self.check(request)
        self.advance(at_ps)
        if self.next_ps() is None:
            self._free_ps = max(self._free_ps, at_ps)
        request.arrived_ps = at_ps
        self._requests[request.name] = request
        self._waiting.append(request)

    def abort(self, name: str, at_ps: int) -> bool:
        """End a request; a step in flight goes on, and what it computes for the request is lost.

        Returns False if there is no such request (any more).
        """
        self.advance(at_ps)
        request = self._requests.get(name)
        if request is None or request in self._aborted:
            return False
        if self._step is not None and request in self._running:
            self._aborted.append(request)
            return True
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._finish(request, End.ABORT, at_ps)
        return True

    def clear_cache(self, at_ps: int) -> bool:
        """Forget all stored blocks; returns False, and changes nothing, while requests run."""
        self.advance(at_ps)
        if not self._cache.clear():
            return False
        self._close_batch(at_ps)
        return True

    def advance(self, until_ps: int) -> None:
        """Begin the steps that begin before `until_ps`, and end those that end then or before."""
        while True:
            if self._step is not None:
                if self._step.end_ps > until_ps:
                    return
                self._complete(self._step)
            if self._free_ps >= until_ps or not (self._running or self._waiting):
                return
            if self._fast:
                self._run_decodes(until_ps)
            if self._free_ps < until_ps:
                self._begin()

    def take_changed(self) -> list[SimRequest]:
        """Requests that got tokens or ended since the last call."""
        changed, self._changed = self._changed, []
        for request in changed:
            request.changed = False
        return changed

    def take_events(self) -> list[tuple[int, list[Event]]]:
        """KV events since the last call, with the time of the step's end at which they are told."""
        batches, self._batches = self._batches, []
        return batches

    def validate(self) -> None:
        """Check the invariants between requests and blocks."""
        self._cache.validate(block for request in self._running for block in request.blocks)
        assert all(not request.blocks for request in self._waiting)
        assert len(self._running) <= self.model.max_num_seqs
        assert len(self._requests) == len(self._running) + len(self._waiting)

    def _begin(self) -> None:
        work: list[tuple[SimRequest, int]] = []
        left, preempted = self._serve_running(work)
        if not preempted:
            self._admit(work, left)
        assert work, "the first request always gets tokens and blocks"
        self.totals.steps += 1
        start = self._free_ps
        self._step = Step(start, start + self._duration(work), work)

    def _serve_running(self, work: list[tuple[SimRequest, int]]) -> tuple[int, bool]:
        """Schedule those that run; returns the tokens that the step has left, and whether a request was preempted."""
        left = self.model.max_num_batched_tokens
        preempted = False
        at = 0
        while at < len(self._running) and left:
            request = self._running[at]
            tokens = min(request.known_tokens - request.computed, left)
            while not self._grow(request, tokens):
                preempted = True
                if self._preempt() is request:
                    return left, preempted
            work.append((request, tokens))
            left -= tokens
            at += 1
        return left, preempted

    def _admit(self, work: list[tuple[SimRequest, int]], left: int) -> None:
        size = self.model.block_tokens
        while left and self._waiting and len(self._running) < self.model.max_num_seqs:
            request = self._waiting[0]
            found = self._find(request)
            needed = -(-request.known_tokens // size) - len(found) + self._cache.unused(found)
            if needed > self._cache.free_blocks:
                return
            self._waiting.popleft()
            self._cache.hold(found)
            request.blocks = found
            request.stored_blocks = len(found)
            request.computed = len(found) * size
            self._count_lookup(request)
            tokens = min(request.known_tokens - request.computed, left)
            self._running.append(request)
            grown = self._grow(request, tokens)
            assert grown
            work.append((request, tokens))
            left -= tokens

    def _find(self, request: SimRequest) -> list[int]:
        if not self.model.prefix_caching:
            return []
        size = self.model.block_tokens
        most = (request.known_tokens - 1) // size
        return self._cache.lookup(request.block_keys(most, size)[:most])

    def _count_lookup(self, request: SimRequest) -> None:
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            request.scheduled_ps = self._free_ps
            self.totals.prompt_tokens += request.prompt_tokens
            self.totals.cached_tokens += request.computed
            self.totals.lookup_tokens += request.known_tokens

    def _grow(self, request: SimRequest, tokens: int) -> bool:
        """Give a request the blocks for more tokens, and let full ones be found; returns whether they were free."""
        end = request.computed + tokens
        missing = -(-end // self.model.block_tokens) - len(request.blocks)
        if missing > 0:
            if missing > self._cache.free_blocks:
                return False
            request.blocks += self._cache.take(missing)
        if self.model.prefix_caching:
            self._store(request, end // self.model.block_tokens)
        return True

    def _store(self, request: SimRequest, full: int) -> None:
        first = request.stored_blocks
        if full <= first:
            return
        size = self.model.block_tokens
        keys = request.block_keys(full, size)[first:full]
        for number, key in zip(range(first, full), keys, strict=True):
            self._cache.store(request.blocks[number], key)
        request.stored_blocks = full
        if self._events is not None:
            self._events.append(
                BlockStored(
                    block_hashes=keys,
                    parent_block_hash=request.keys[first - 1] if first else None,
                    token_ids=request.tokens[first * size : full * size].tolist(),
                    block_size=size,
                    lora_id=None if request.adapter is None else 1,
                    medium=MEDIUM,
                    lora_name=request.adapter,
                    extra_keys=request.extra_keys(range(first, full)),
                    group_idx=0,
                    kv_cache_spec_kind=KIND,
                )
            )

    def _preempt(self) -> SimRequest:
        """Send the request that was admitted last back to wait before all others."""
        request = self._running.pop()
        self._give_back(request)
        request.preemptions += 1
        self.totals.preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _give_back(self, request: SimRequest) -> None:
        self._cache.release(request.blocks)
        request.blocks = []
        request.stored_blocks = request.computed = 0

    def _duration(self, work: list[tuple[SimRequest, int]]) -> int:
        costs, total = self._costs, self._costs.step
        decodes = context = 0
        for request, tokens in work:
            if tokens == 1 and request.produced:
                decodes += 1
                context += request.computed + 1
            else:
                total += costs.prefill(request.computed, tokens)
        return total + costs.decodes(decodes, context)

    def _complete(self, step: Step) -> None:
        """Count what a step has computed, hand out its tokens, and let go whoever is ready or was aborted."""
        self._step = None
        self._free_ps = step.end_ps
        ended = set()
        for request, tokens in step.work:
            request.computed += tokens
            if request in self._aborted or request.computed < request.known_tokens:
                continue
            request.spans.append(Span(1, step.start_ps, step.end_ps - step.start_ps, 0))
            self._produce(request, 1)
            if request.produced == request.answer_tokens:
                ended.add(request)
                self._finish(request, request.planned_end, step.end_ps)
        for request in self._aborted:
            ended.add(request)
            self._finish(request, End.ABORT, step.end_ps)
        self._aborted = []
        if ended:
            self._running = [request for request in self._running if request not in ended]
        self._close_batch(step.end_ps)

    def _produce(self, request: SimRequest, tokens: int) -> None:
        request.produced += tokens
        self.totals.answer_tokens += tokens
        self._note_change(request)

    def _finish(self, request: SimRequest, end: End, at_ps: int) -> None:
        self._give_back(request)
        request.end = end
        request.ended_ps = at_ps
        self.totals.ended[end] += 1
        del self._requests[request.name]
        self._note_change(request)

    def _note_change(self, request: SimRequest) -> None:
        if not request.changed:
            request.changed = True
            self._changed.append(request)

    def _close_batch(self, at_ps: int) -> None:
        if self._events:
            self._batches.append((at_ps, self._events[:]))
            self._events.clear()

    def _run_decodes(self, until_ps: int) -> None:
        """Compute the next steps together, as long as all that run decode, none ends, and blocks suffice.

        Every such step ends by `until_ps`.
        """
        running = self._running
        sequences = len(running)
        if not running or sequences > self.model.max_num_batched_tokens:
            return
        if self._waiting and sequences < self.model.max_num_seqs:
            return
        context, steps = 0, 1 << 62
        for request in running:
            if request.known_tokens - request.computed != 1 or not request.produced:
                return
            context += request.known_tokens
            steps = min(steps, request.answer_tokens - request.produced - 1)
        steps = min(steps, self._cache.free_blocks // sequences * self.model.block_tokens)
        growth = self._costs.decodes(0, sequences)
        whole = Span(steps, self._free_ps, self._costs.step + self._costs.decodes(sequences, context), growth)
        steps = _steps_until(whole, until_ps)
        if steps < 2:
            return
        span = whole._replace(tokens=steps)
        self._fill_blocks(span)
        for request in running:
            request.computed += steps
            request.spans.append(span)
            self._produce(request, steps)
        self.totals.steps += steps
        self._free_ps = span.end_ps(steps)

    def _fill_blocks(self, span: Span) -> None:
        """Take and store the blocks of decode steps in the order in which the steps would have, one after the other."""
        size = self.model.block_tokens
        changes: list[tuple[int, int]] = []
        for number, request in enumerate(self._running):
            first = request.computed
            opened = set(range(-first % size, span.tokens, size))
            opened.update(range((-first - 1) % size, span.tokens, size))
            changes += [(step, number) for step in opened]
        changes.sort()
        last = 0
        for step, number in changes:
            if step != last:
                self._close_batch(span.end_ps(last + 1))
                last = step
            request = self._running[number]
            end = request.computed + step + 1
            if -(-end // size) > len(request.blocks):
                request.blocks += self._cache.take(1)
            if self.model.prefix_caching:
                self._store(request, end // size)
        self._close_batch(span.end_ps(last + 1))


def _steps_until(span: Span, until_ps: int) -> int:
    """How many of a span's steps end by a time."""
    low, high = 0, span.tokens
    while low < high:
        middle = (low + high + 1) // 2
        if span.end_ps(middle) <= until_ps:
            low = middle
        else:
            high = middle - 1
    return low
