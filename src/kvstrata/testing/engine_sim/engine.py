"""The core of a simulated engine: continuous batching over paged blocks, as discrete events without clock or I/O.

The scheduler is that of vLLM 0.32 with its defaults (first come first served, chunked prefill, the whole prompt must
fit before a request is admitted):

1. A step first serves the requests that run, in the order of their admission, then admits waiting ones while the
   step's tokens, `max_num_seqs` and the free blocks allow.
2. If a running request gets no block, the one admitted last is preempted: it loses its blocks, waits before all others,
   and computes its prompt and its answer so far again, less the cached part.  Then this step admits no request.
3. Blocks can be found as soon as the step that fills them is scheduled, also by requests of that step.
4. At least the last known token is computed, so a lookup is for all tokens but that one.

Times are picoseconds from an origin that the caller chooses.  A step begins only once `advance` is called with a later
time, so it contains everything that arrived until its beginning, in whatever order the calls were made.  The state at a
time therefore depends on what was submitted when, and not on how often `advance` was called.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.testing.engine_sim.blocks import Blocks
from kvstrata.testing.engine_sim.engine_model import EngineModel, StepCosts
from kvstrata.testing.engine_sim.kv_events import (
    KIND,
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)
from kvstrata.testing.engine_sim.requests import End, SimRequest


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
        self.external_tokens = 0
        """Loaded by a connector, and so many of those about which it was asked."""
        self.external_lookup_tokens = 0
        self.answer_tokens = 0
        self.preemptions = 0
        self.ended: dict[End, int] = dict.fromkeys(End, 0)


class SimEngine:
    """One simulated engine. Every call gives a time, and none may give an earlier one than another before it."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.totals = Totals()
        self._costs = StepCosts(model)
        self._events: list[Event] | None = [] if model.kv_events else None
        self._batches: list[tuple[int, list[Event]]] = []
        self._blocks = Blocks(model.kv_blocks, model.block_tokens, finds=model.prefix_caching)
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
        return 1.0 - self._blocks.free / self._blocks.count

    def stored_keys(self) -> dict[int, int]:
        """How many blocks hold each key that can be found."""
        return self._blocks.stored_keys()

    def next_ps(self) -> int | None:
        """The end of the step in flight, else the time after which one begins; None for an idle engine."""
        if self._step is not None:
            return self._step.end_ps
        return self._free_ps if self._has_work() else None

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
        if not self._blocks.clear():
            return False
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        self._close_batch(at_ps)
        return True

    def advance(self, until_ps: int) -> None:
        """Begin the steps that begin before `until_ps`, and end those that end then or before."""
        while True:
            if self._step is not None:
                if self._step.end_ps > until_ps:
                    return
                self._complete(self._step)
            if self._free_ps >= until_ps or not self._has_work():
                return
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
        self._blocks.validate(block for request in self._running for block in request.sequence.blocks)
        assert all(not request.sequence.blocks for request in self._waiting)
        assert len(self._running) <= self.model.max_num_seqs
        assert len(self._requests) == len(self._running) + len(self._waiting)

    def close(self) -> None:
        """Let go of what the engine has outside of this process. Idempotent."""

    def _has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def _begin(self) -> None:
        work: list[tuple[SimRequest, int]] = []
        left, preempted = self._serve_running(work)
        if not preempted and self._waiting:
            self._admit(work, left)
        assert work, "the first request always gets tokens and blocks"
        self.totals.steps += 1
        start = self._free_ps
        self._step = Step(start, start + self._costs.step + self._duration(work), work)

    def _serve_running(self, work: list[tuple[SimRequest, int]]) -> tuple[int, bool]:
        """Schedule those that run; returns the tokens that are left, and whether a request was preempted."""
        left, at, preempted = self.model.max_num_batched_tokens, 0, False
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
            if not self._blocks.admit(request.sequence, request.known_tokens):
                return
            self._waiting.popleft()
            request.computed = len(request.sequence.blocks) * size
            self._count_lookup(request)
            tokens = min(request.known_tokens - request.computed, left)
            self._running.append(request)
            grown = self._grow(request, tokens)
            assert grown
            work.append((request, tokens))
            left -= tokens

    def _count_lookup(self, request: SimRequest) -> None:
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            request.scheduled_ps = self._free_ps
            self.totals.prompt_tokens += request.prompt_tokens
            self.totals.cached_tokens += request.computed
            self.totals.lookup_tokens += request.known_tokens

    def _grow(self, request: SimRequest, tokens: int) -> bool:
        """Give a request the blocks for more tokens, and let full ones be found; returns whether they were free."""
        sequence, size, end = request.sequence, self.model.block_tokens, request.computed + tokens
        if end // size == sequence.stored and end <= len(sequence.blocks) * size:
            return True
        grown = self._blocks.grow(sequence, end)
        if grown is None:
            return False
        stored, removed = grown
        self._tell_removed(removed)
        if stored and self._events is not None:
            self._events.append(_stored(request, stored, size))
        return True

    def _tell_removed(self, keys: list[int]) -> None:
        if self._events is not None:
            self._events += [BlockRemoved([key], MEDIUM, 0) for key in keys]

    def _preempt(self) -> SimRequest:
        """Send the request that was admitted last back to wait before all others."""
        request = self._running.pop()
        self._give_back(request)
        request.preemptions += 1
        self.totals.preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _give_back(self, request: SimRequest) -> None:
        self._blocks.release(request.sequence)
        request.computed = 0

    def _duration(self, work: list[tuple[SimRequest, int]]) -> int:
        """What requests add to a step."""
        total, sequences, context = 0, 0, 0
        for request, tokens in work:
            if tokens == 1 and request.produced:
                sequences += 1
                context += request.computed + 1
            else:
                total += self._costs.prefill(request.computed, tokens)
        return total + self._costs.decodes(sequences, context)

    def _complete(self, step: Step) -> None:
        """Count what a step has computed, hand out its tokens, and let go whoever is ready or was aborted."""
        self._step = None
        self._free_ps = step.end_ps
        ended: list[SimRequest] = []
        for request, tokens in step.work:
            request.computed += tokens
            if request.computed < request.known_tokens or request in self._aborted:
                continue
            request.token_times_ps.append(step.end_ps)
            request.produced += 1
            self.totals.answer_tokens += 1
            if request.produced == request.answer_tokens:
                ended.append(request)
                self._finish(request, request.planned_end, step.end_ps)
                continue
            self._note_change(request)
        for request in self._aborted:
            ended.append(request)
            self._finish(request, End.ABORT, step.end_ps)
        self._aborted.clear()
        for request in ended:
            self._running.remove(request)
        self._close_batch(step.end_ps)

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


def _stored(request: SimRequest, keys: list[int], size: int) -> BlockStored:
    adapter, end = request.adapter, request.sequence.stored
    first = end - len(keys)
    plain = adapter is None and request.salt is None
    return BlockStored(  # positions take less time than names
        keys,
        request.sequence.keys(first - 1, first, size)[0] if first else None,
        request.tokens[first * size : end * size].tolist(),
        size,
        None if adapter is None else 1,
        MEDIUM,
        adapter,
        [None] * len(keys) if plain else request.extra_keys(len(keys), first=not first),
        0,
        KIND,
    )
