"""Counts what was sent to each engine: the router's own picture of the queues, exact at once and never polled.

    dispatched ──▶ waiting ──first_token──▶ running ──ended──▶ gone        ended may come first, and gone() at any time

`Queues` owns the counters in the `EngineState`s of a fleet and changes them in place; `choose` only reads them.

The backlog of an engine is the uncached tokens of its waiting requests, less what it has computed of them since: it
computes the oldest first, at its measured rate.  A first token corrects the guess: the backlog then has all tokens of
the requests that still wait, less what was computed beyond the request that came, if that was not the oldest.

An engine that computes one prompt and has the next at hand is never idle, and with continuous batching many short
prompts share its next step.  So it *has room* for a further prompt as long as, of those that this router sent it,

    fewer than `AT_HAND` wait for their first token, or
    these take at most so many seconds, by its rate and by all their tokens that are not cached.

Before any rate is measured it gets `UNMEASURED` prompts, and then none until all have their first token, which measures
it.  The estimated backlog does not make room: room comes with first tokens and ends.  The exception are answers that
come whole, whose first byte tells nothing of their prompt: such a prompt takes room until its first token was expected.

1. Each counter of an engine is the sum over its requests in flight; without requests all are zero, and so is the
   backlog, whatever the order of the calls.
2. A call for a request that is not in flight, or that repeats what was said before, changes nothing and returns False.
3. 0 <= backlog_tokens <= prefill_tokens.
4. At most `limit` requests are in flight; `dispatched` refuses further ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvstrata.gateway.routing.decode import Decoded
from kvstrata.gateway.routing.model import EngineState

LIMIT = 1 << 20
AT_HAND = 2
UNMEASURED = 8


class Waiting(NamedTuple):
    """A prompt that was sent and has no first token yet."""

    tokens: int
    """Not cached."""
    streams: bool
    """Whether its first token will be told when the prompt is computed, rather than with the whole answer."""
    ours: bool
    """Whether this router sent it, and not another one that told of it."""
    until_s: float
    """When it ceases to take room in any case."""


class InFlight:
    """A request that was dispatched and has not ended."""

    __slots__ = (
        "began_s",
        "computed_tokens",
        "context_tokens",
        "engine",
        "requests_s",
        "running",
        "uncached_tokens",
    )

    def __init__(self, engine: EngineQueue, uncached_tokens: int, context_tokens: int) -> None:
        self.engine = engine
        self.uncached_tokens = uncached_tokens
        self.context_tokens = context_tokens
        self.running = False
        self.began_s = self.requests_s = 0.0
        """When its first token came, and the engine's `requests_s` and `computed_tokens` then."""
        self.computed_tokens = 0


class EngineQueue:
    """The requests of one engine, and its counters."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.requests: set[str] = set()
        self.waiting: dict[str, Waiting] = {}
        """By request, the oldest first."""
        self.whole = 0
        """The waiting ones that do not stream."""
        self.ours = 0
        """The waiting ones that this router sent."""
        self.full = False
        """Whether `ours` was `UNMEASURED` since it was 0."""
        self.requests_s = 0.0
        """Integral of the requests in flight over time."""
        self.computed_tokens = 0
        """Of prompts whose first token has come."""
        self._clear()

    def _clear(self) -> None:
        state = self.state
        state.backlog_tokens = 0.0
        state.prefill_tokens = state.inflight_tokens = state.context_tokens = 0
        state.requests = state.waiting = state.running = 0

    def drain(self, now_s: float) -> None:
        """Count as computed what the engine should have computed since the last call. A clock that steps back waits."""
        state = self.state
        if now_s > state.at_s:
            self.requests_s += state.requests * (now_s - state.at_s)
            if state.backlog_tokens:
                computed = (now_s - state.at_s) * state.prefill_tokens_s
                state.backlog_tokens = max(0.0, state.backlog_tokens - computed)
            state.at_s = now_s

    def add(self, request: str, flight: InFlight, prompt: Waiting, now_s: float) -> None:
        """Reserve for a new request."""
        state = self.state
        if not state.waiting:
            state.moved_s = now_s
        if not prompt.streams:
            self.whole += 1
            state.moved_s = None
        self.ours += prompt.ours
        self.full = self.full or self.ours >= UNMEASURED
        self.requests.add(request)
        self.waiting[request] = prompt
        state.requests += 1
        state.waiting += 1
        state.prefill_tokens += flight.uncached_tokens
        state.inflight_tokens += flight.uncached_tokens
        state.context_tokens += flight.context_tokens
        state.backlog_tokens += flight.uncached_tokens
        self._count_behind()

    def _count_behind(self) -> None:
        oldest = next(iter(self.waiting.values()), None)
        self.state.behind_tokens = self.state.prefill_tokens - (oldest.tokens if oldest is not None else 0)

    def stop_waiting(self, request: str, computed: bool) -> None:
        """Take a request out of those that wait; `computed`: because its first token came."""
        state = self.state
        oldest = next(iter(self.waiting)) == request
        prompt = self.waiting.pop(request)
        self.whole -= not prompt.streams
        self.ours -= prompt.ours
        self.full = self.full and self.ours > 0
        tokens = prompt.tokens
        done = state.prefill_tokens - state.backlog_tokens
        state.prefill_tokens -= tokens
        state.waiting -= 1
        # The oldest is computed first: what was done beyond its tokens is a guess, which its first token corrects.
        if oldest:
            beyond = 0.0 if computed else done - tokens
        else:
            beyond = done - tokens if computed else done
        state.backlog_tokens = min(max(0.0, state.prefill_tokens - max(0.0, beyond)), state.prefill_tokens)
        self._count_behind()

    def taking(self, now_s: float) -> list[int]:
        """The uncached tokens of the prompts that take room."""
        return [one.tokens for one in self.waiting.values() if one.ours and one.until_s > now_s]

    def remove(self, request: str, flight: InFlight) -> None:
        """Release all that is left of a request."""
        state = self.state
        if request in self.waiting:
            self.stop_waiting(request, computed=False)
        state.running -= flight.running
        self.requests.discard(request)
        state.requests -= 1
        state.inflight_tokens -= flight.uncached_tokens
        state.context_tokens -= flight.context_tokens


class Queues:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._engines: dict[str, EngineQueue] = {}
        self._flights: dict[str, InFlight] = {}

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._flights)

    def add(self, state: EngineState) -> None:
        """Begin to count for an engine, from zero. One of the same name that was known before is dropped first."""
        self.gone(state.name)
        self._engines[state.name] = EngineQueue(state)

    def gone(self, engine: str) -> list[str]:
        """Drop an engine that was killed or restarted; return its requests in flight, which are forgotten."""
        queue = self._engines.pop(engine, None)
        if queue is None:
            return []
        lost = sorted(queue.requests)
        for request in lost:
            queue.remove(request, self._flights.pop(request))
        return lost

    def dispatched(
        self,
        request: str,
        engine: str,
        uncached_tokens: int,
        context_tokens: int,
        now_s: float,
        *,
        streams: bool = True,
        ours: bool = True,
        until_s: float = math.inf,
    ) -> bool:
        """Reserve for a request that is sent: the tokens to compute and the KV it needs.

        `streams`, `ours` and `until_s`: see Waiting.

        Returns False, and reserves nothing, if the request is in flight already, the engine unknown, or the limit
        reached.  Raises ValueError for a negative number of tokens.
        """
        for name, tokens in (("uncached_tokens", uncached_tokens), ("context_tokens", context_tokens)):
            if tokens < 0:
                raise ValueError(f"{name}: {tokens} of request {request!r}; it must be at least 0")
        queue = self._engines.get(engine)
        if queue is None or request in self._flights or len(self._flights) >= self._limit:
            return False
        queue.drain(now_s)
        flight = self._flights[request] = InFlight(queue, uncached_tokens, context_tokens)
        queue.add(request, flight, Waiting(uncached_tokens, streams, ours, until_s), now_s)
        return True

    def waits_longest(self, request: str) -> bool:
        """Whether a request waits, and none at its engine was dispatched before it and waits too."""
        flight = self._flights.get(request)
        return flight is not None and next(iter(flight.engine.waiting), None) == request

    def has_room(self, engine: str, most_s: float, now_s: float, *, measured: bool) -> bool:
        """Whether a further prompt would be computed soon: see the module. An engine that is not known has none.

        `most_s`: the seconds that the prompts before it may take. `measured`: the engine's rate is more than a guess.
        """
        queue = self._engines.get(engine)
        if queue is None:
            return False
        if not measured and not queue.full:
            return True
        taking = queue.taking(now_s)
        if not measured:
            return not taking
        return len(taking) < AT_HAND or sum(taking) <= most_s * queue.state.prefill_tokens_s

    def next_room_s(self, now_s: float) -> float:
        """When a prompt will cease to take room without being told; infinite: none will."""
        times = (
            one.until_s
            for queue in self._engines.values()
            if queue.whole
            for one in queue.waiting.values()
            if one.ours and one.until_s > now_s
        )
        return min(times, default=math.inf)

    def first_token(self, request: str, now_s: float) -> bool:
        """Note that a request's prompt has been computed."""
        flight = self._flights.get(request)
        if flight is None or flight.running:
            return False
        flight.running = True
        flight.engine.drain(now_s)
        flight.engine.stop_waiting(request, computed=True)
        flight.engine.state.moved_s = None if flight.engine.whole else now_s
        flight.engine.state.running += 1
        flight.engine.computed_tokens += flight.uncached_tokens
        flight.began_s, flight.requests_s = now_s, flight.engine.requests_s
        flight.computed_tokens = flight.engine.computed_tokens
        return True

    def decoded(self, request: str, now_s: float) -> Decoded | None:
        """What is known of the answer of a running request until now; None: it has none, or no time has passed."""
        flight = self._flights.get(request)
        if flight is None or not flight.running or now_s <= flight.began_s:
            return None
        flight.engine.drain(now_s)
        seconds = now_s - flight.began_s
        return Decoded(
            seconds,
            (flight.engine.requests_s - flight.requests_s) / seconds,
            flight.engine.computed_tokens - flight.computed_tokens,
        )

    def ended(self, request: str, now_s: float) -> bool:
        """Release a request: answered, failed, refused or cancelled."""
        flight = self._flights.pop(request, None)
        if flight is None:
            return False
        flight.engine.drain(now_s)
        flight.engine.remove(request, flight)
        return True

    def rate(self, engine: str, tokens_s: float, now_s: float) -> bool:
        """Drain an engine at another rate from now on. Raises ValueError unless the rate is finite and above 0."""
        if not (math.isfinite(tokens_s) and tokens_s > 0):
            raise ValueError(f"tokens_s: {tokens_s} of engine {engine!r}; it must be a finite number above 0")
        queue = self._engines.get(engine)
        if queue is None:
            return False
        queue.drain(now_s)
        queue.state.prefill_tokens_s = tokens_s
        return True
