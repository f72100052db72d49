"""The scheduler of the simulated engine (`engine.py`): decides which requests run in a step, and gives them blocks.

As in vLLM's `v1/core/sched/scheduler.py`, running requests come first, one token each or the next piece of their
prompt; the rest of a step's budget goes to waiting requests, in their order.  When blocks run out, the newest running
request is preempted and computed again later.

Invariants
1. A block belongs to one request or is free.
2. The scheduler keeps the blocks of an ended request while the cache reads or writes them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.harness.gpu_engine.connector import NoCache, Request


class Preempted(NamedTuple):
    """A request that lost its blocks in this step, with the blocks and computed tokens that it had."""

    request: Request
    blocks: list[int]
    computed_tokens: int


class Scheduler:
    """Queues and block tables of one engine."""

    def __init__(
        self,
        cache: NoCache,
        *,
        block_tokens: int,
        num_blocks: int,
        budget_tokens: int,
        max_running: int,
        counts: collections.Counter[str],
        before_free: Callable[[Request, Sequence[int], int], None],
    ) -> None:
        """`before_free(request, blocks, computed_tokens)` is called before an ended request's blocks become free."""
        self.free = list(range(1, num_blocks))  # block 0 is vLLM's null block
        self.running: list[Request] = []
        self.skipped: list[Request] = []
        """Requests that wait for their lookup or their load; they come before `waiting`."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.requests: dict[str, Request] = {}
        """Requests that have blocks or may still get some, by id."""
        self.received: set[str] = set()
        """Requests whose asynchronous load has ended and that have not run since."""
        self.preempted: list[Preempted] = []
        """Preemptions of the last `schedule`."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._budget_tokens = budget_tokens
        self._max_running = max_running
        self._counts = counts
        self._before_free = before_free

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._cache.arrived(request)

    def abort(self, request: Request) -> None:
        for queue in (self.running, self.skipped, self.waiting):
            if request in queue:
                queue.remove(request)
        self._end(request)

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        request.ended = True
        received = request.request_id in self.received
        self.received.discard(request.request_id)
        keep = self._cache.finished(request)
        if not keep and (not request.receiving or received):
            self.give_back(request)

    def give_back(self, request: Request) -> None:
        """Free the blocks of an ended request, which the cache needs no longer."""
        del self.requests[request.request_id]
        computed_tokens = 0 if request.receiving else request.num_computed_tokens
        self._before_free(request, request.blocks, computed_tokens)
        assert not set(self.free) & set(request.blocks), "blocks were given back twice"
        self.free += request.blocks

    def schedule(self, victim: int | None = None) -> dict[Request, int]:
        """Choose the tokens of each request for a step and give the requests their blocks.

        With `victim`, the running request of that index is preempted first, even if blocks are free.
        """
        self.preempted = []
        budget = self._budget_tokens
        scheduled: dict[Request, int] = {}
        at = 0
        if victim is not None:
            self._preempt(self.running.pop(victim))
        while at < len(self.running) and budget:
            request = self.running[at]
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._allocate(request, request.num_computed_tokens + tokens):
                newest = self.running.pop()
                self._preempt(newest)
                if newest is request:
                    break
            else:
                scheduled[request] = tokens
                budget -= tokens
                at += 1
        if not self.preempted:
            self._admit(scheduled, budget)
        return scheduled

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Give a request blocks for its first `tokens` tokens. False, and nothing has changed, if too few are free."""
        missing = -(-tokens // self._block_tokens) - len(request.blocks)
        if missing > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(missing)]
        return True

    def _preempt(self, request: Request) -> None:
        self._counts["preempted"] += 1
        self.preempted.append(Preempted(request, request.blocks, request.num_computed_tokens))
        self.free += request.blocks
        request.blocks = []
        request.num_computed_tokens = request.external_tokens = 0
        self.waiting.appendleft(request)

    def _admit(self, scheduled: dict[Request, int], budget: int) -> None:
        """Begin waiting requests, in their order, until the budget or the blocks run out."""
        queue = collections.deque([*self.skipped, *self.waiting])
        skipped: list[Request] = []
        while queue and budget and len(self.running) < self._max_running:
            request = queue[0]
            name = request.request_id
            if request.receiving:
                if name not in self.received:
                    skipped.append(queue.popleft())
                    continue
                self.received.remove(name)
                request.receiving = False
                # The last token is computed even when its KV was loaded: sampling needs its output.
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            external, is_async = 0, False
            if not request.num_computed_tokens:
                found, is_async = self._cache.matched(request)
                if found is None:
                    skipped.append(queue.popleft())
                    continue
                external = found
            computed = request.num_computed_tokens + external
            tokens = 0 if is_async else min(request.num_tokens - computed, budget)
            fits = not is_async or -(-request.num_tokens // self._block_tokens) <= len(self.free)
            if not fits or not self._allocate(request, computed + tokens):
                break
            queue.popleft()
            request.external_tokens = external
            self._cache.allocated(request)
            request.num_computed_tokens = computed
            if request.first_token_s is None:
                request.cached_tokens = max(request.cached_tokens, external)
            if is_async:
                request.receiving = True
                skipped.append(request)
                continue
            self.running.append(request)
            scheduled[request] = tokens
            budget -= tokens
        self.skipped = skipped + [one for one in queue if one in self.skipped]
        self.waiting = collections.deque(one for one in queue if one not in self.skipped)
        self._unblock()

    def _unblock(self) -> None:
        """Preempt one loaded request when nothing runs and the loaded requests together hold too many blocks."""
        holding = [one for one in self.skipped if one.blocks]
        loading = any(one.receiving and one.request_id not in self.received for one in holding)
        if holding and not self.running and not loading:
            victim = holding[-1]
            self.skipped.remove(victim)
            self.received.discard(victim.request_id)
            victim.receiving = False
            self._preempt(victim)

    def roll_back(self, bad_blocks: set[int]) -> set[Request]:
        """Set requests back to before the first of their blocks that was not loaded; return these requests."""
        failed = set()
        if bad_blocks:
            for request in self.requests.values():
                at = next((at for at, block in enumerate(request.blocks) if block in bad_blocks), None)
                if at is not None and not request.ended:
                    failed.add(request)
                    request.num_computed_tokens = min(request.num_computed_tokens, at * self._block_tokens)
        return failed
