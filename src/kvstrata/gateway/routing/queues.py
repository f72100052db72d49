"""The gateway's model of one engine's queue: the requests that it sent there, and how fast the engine computes them.

    send ──▶ waiting ──first_token──▶ running ──end──▶ gone          end may come first
    send ──▶ held ──begin──▶ waiting      `Sending.held`: another engine computes the prompt, which takes no time here

The backlog of an engine is the uncached tokens of its waiting requests, less an estimate of those already computed: the
oldest first, at its measured rate.  A first token corrects the estimate: the backlog then consists of all tokens of the
requests that still wait, less those computed beyond the request with the first token, if that was not the oldest.

An engine that computes one prompt and has the next in its queue is never idle, and with continuous batching many short
prompts share its next step.  So it *has room* for a further prompt if, of the prompts that this gateway has sent it,

    fewer than `AT_HAND` wait for their first token, or
    the waiting ones take at most `most_s` seconds, by its rate and all their uncached tokens.

Before its rate is measured, an engine gets `UNMEASURED` prompts, and then none until all have their first token, which
gives the rate.  The estimated backlog does not make room; only first tokens and ends of requests do.  The exception are
answers without streaming, whose first byte does not show when their prompt was computed: such a prompt takes room until
the expected time of its first token.

Its speed is measured over *periods* in which some prompt waits, since prompts share steps: a short prompt whose step a
long one joined seems slow, and the long one behind it seems fast.  A long period is cut at a first token of the prompt
that waited longest, so that no long prompt is half computed beside it, and only if at least FIRST_TOKENS first tokens
came since the last cut, over GAPS times the longest time between two of them.  Each part that ends at a cut is a
sample, and so is a period without a cut; the part after the last cut is not, since some of it was computed before.

1. Each counter of an engine is the sum over its requests in flight; without requests all are zero, and so is the
   backlog, in whatever order the calls came.
2. Calls are idempotent: a repeated call changes nothing.
3. The backlog is at least 0 and at most `prefill_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstrata.gateway.routing.model import NEVER_S, EngineState
from kvstrata.gateway.routing.rates import ASSUMED, Decoded, Fit, Line, PrefillRates, Sample

AT_HAND = 2
UNMEASURED = 8
AGREES = 0.05
"""Relative difference between reported and expected computed tokens below which a sample stays as it is."""
FIRST_TOKENS = 16
GAPS = 16.0
SHARE_S, MOST_SHARE = 10.0, 0.9
"""Time constant of the average of an engine's share of time spent on prompts, and the share's maximum."""


@dataclass(slots=True)
class Period:
    """A part of the time in which some prompt waits, with the prompts whose first tokens came in it."""

    began_s: float
    running: int
    """Number of running requests at its start."""
    whole: bool
    """Whether a prompt waits whose answer is not streamed."""
    first_tokens: int = 0
    expected: int = 0
    """Sum of the uncached tokens of the prompts that were computed, as expected at the choice."""
    reported: int = 0
    computed: int = 0
    """Number of answers that reported how many tokens of their prompts were computed, and the sum of these."""
    last_s: float = 0.0
    gap_s: float = 0.0
    """Time of its last first token, and the longest time between two first tokens."""
    seconds: float = 0.0
    """Its length; 0: it has not ended."""
    is_excluded: bool = False
    """Whether it cannot be a sample: a prompt in it failed, or was loaded."""
    sample: tuple[Fit, Sample] | None = None

    def first_token(self, tokens: int, now_s: float) -> bool:
        """Count a first token; `tokens`: of its prompt. Returns whether the period may be cut here."""
        self.first_tokens += 1
        self.expected += tokens
        self.gap_s, self.last_s = max(self.gap_s, now_s - (self.last_s or self.began_s)), now_s
        return self.first_tokens >= FIRST_TOKENS and now_s - self.began_s >= GAPS * self.gap_s

    def exclude_sample(self) -> None:
        """Exclude the period from the samples, and retract its sample if it was one."""
        self.is_excluded = True
        self._retract()

    def end(self, now_s: float, rates: PrefillRates, engine: str) -> None:
        """End the period, and add it to the samples unless it is excluded."""
        self.seconds = now_s - self.began_s
        if not self.is_excluded:
            self._observe(self.expected, rates, engine)

    def report(self, computed_tokens: int, rates: PrefillRates, engine: str) -> None:
        """Count an answer's report of its prompt's computed tokens; when all have reported, correct the sample."""
        self.reported += 1
        self.computed += computed_tokens
        if self.is_excluded or not self.seconds or self.reported < self.first_tokens:
            return
        if abs(self.computed - self.expected) > AGREES * self.expected:
            self._retract()
            self._observe(self.computed, rates, engine)

    def _observe(self, tokens: int, rates: PrefillRates, engine: str) -> None:
        self.sample = rates.observe(
            engine, tokens, self.seconds, self.running, prompts=self.first_tokens, whole=self.whole
        )

    def _retract(self) -> None:
        if self.sample is not None:
            fit, sample = self.sample
            fit.retract(sample)
            self.sample = None


class Sending(NamedTuple):
    """Properties of a request that is sent."""

    streams: bool = True
    """Whether its first token comes when the prompt is computed; False: with the whole answer."""
    ours: bool = True
    """Whether this gateway sends it; False: another gateway has reported it."""
    until_s: float = math.inf
    """Time at which it ceases to take room even without a first token."""
    token_within_s: float = 0.0
    """Limit of its class on the time per token; 0: no limit."""
    held: bool = False
    """Whether it waits for another engine's prefill until `begin`."""


DEFAULT_SENDING = Sending()


@dataclass(slots=True, eq=False)
class Flight:
    """A request at an engine; owned by the caller of `Queue.send`."""

    queue: Queue
    tokens: int
    """Tokens of the prompt to compute."""
    how: Sending
    held: bool = True
    running: bool = False
    ended: bool = False
    is_excluded: bool = False
    period: Period | None = None
    """The period in which its first token came."""
    began_s: float = 0.0
    requests_s: float = 0.0
    computed_tokens: int = 0
    """Time of its first token, and the queue's `_requests_s` and `_computed_tokens` at that time."""

    def exclude_sample(self) -> None:
        """Exclude the period of its prompt from the samples, since the prompt failed or was loaded."""
        self.is_excluded = True
        period = self.period or (None if self.ended or self.held else self.queue.period)
        if period is not None:
            period.exclude_sample()

    def report(self, computed_tokens: int) -> None:
        """Correct the sample by the number of the prompt's computed tokens that the answer reported."""
        if self.period is not None:
            self.period.report(computed_tokens, self.queue.rates, self.queue.state.name)


class Queue:
    """One engine's queue. Belongs to the event loop; nothing else changes the counters of its `state`."""

    def __init__(self, state: EngineState, rates: PrefillRates) -> None:
        self.state, self.rates = state, rates
        self.line, self.answer_tokens = ASSUMED, 0.0
        """Time per token of answers here, and the mean length of all engines' answers."""
        self._limits_s = 0.0
        """Sum of the limits per token of the requests in flight that have one."""
        self._prompt_s = self._prompt_size_s = self._prompted_s = 0.0
        """Decaying sum of prompts' seconds (time constant SHARE_S); mean seconds of a prompt, weighted by its seconds;
        time of the last update."""
        self.waiting: dict[Flight, None] = {}
        """Ordered set, the oldest first."""
        self.period: Period | None = None
        """None: no prompt waits."""
        self._cut = False
        """Whether the period follows a cut."""
        self.ours = self.sent = 0
        """Number of this gateway's requests in flight, and of all that it has ever sent."""
        self._whole = self._waiting_ours = 0
        """Number of waiting requests that are not streamed, and of those that this gateway sent."""
        self._full = False
        """Whether `_waiting_ours` has reached UNMEASURED since it was 0."""
        self._at_s = self._moved_s = 0.0
        """Time of the last change; time of the last first token, or of the first request in an empty queue if later."""
        self._requests_s = 0.0
        """Integral of the number of requests in flight over time."""
        self._computed_tokens = 0
        """Sum over all prompts whose first token has come."""

    def send(self, tokens: int, now_s: float, how: Sending = DEFAULT_SENDING) -> Flight:
        """Count a request that is sent, with `tokens` tokens to compute."""
        state, flight = self.state, Flight(self, tokens, how)
        self._pass(now_s)
        state.requests += 1
        self.ours += how.ours
        self.sent += how.ours
        state.limited += how.token_within_s > 0
        self._limits_s += how.token_within_s
        if how.held:
            self._have(self.backlog_tokens(now_s), now_s)
        else:
            self.begin(flight, tokens, now_s)
        return flight

    def begin(self, flight: Flight, tokens: int, now_s: float) -> None:
        """Let a held request wait for its first token, with `tokens` tokens to compute."""
        if not flight.held or flight.ended:
            return
        state, flight.held, flight.tokens = self.state, False, tokens
        if self.period is None:
            self.period, self._cut = Period(now_s, state.running, False), False
        if not self.waiting:
            self._moved_s = now_s
        self.period.whole |= not flight.how.streams
        self.waiting[flight] = None
        self._whole += not flight.how.streams
        self._waiting_ours += flight.how.ours
        self._full = self._full or self._waiting_ours >= UNMEASURED
        state.waiting += 1
        state.prefill_tokens += tokens
        state.inflight_tokens += tokens
        seconds, left_s = tokens / state.prefill_tokens_s, SHARE_S * self.prompt_share(now_s)
        self._prompt_s, self._prompted_s = left_s + seconds, now_s
        if self._prompt_s > 0:
            self._prompt_size_s = (left_s * self._prompt_size_s + seconds * seconds) / self._prompt_s
        self._have(self.backlog_tokens(now_s) + tokens, now_s)

    def first_token(self, flight: Flight, now_s: float) -> None:
        """Record a request's first token."""
        if flight.running or flight.ended:
            return
        self._pass(now_s)
        self.begin(flight, flight.tokens, now_s)
        oldest = next(iter(self.waiting)) is flight
        flight.running, flight.period = True, self.period
        self.state.running += 1
        self._computed_tokens += flight.tokens
        flight.began_s, flight.requests_s = now_s, self._requests_s
        flight.computed_tokens = self._computed_tokens
        self._moved_s = now_s
        self._stop_waiting(flight, now_s, computed=True)
        assert self.period is not None
        if flight.is_excluded:
            self.period.exclude_sample()
        if self.period.first_token(flight.tokens, now_s) and oldest:
            self.period.end(now_s, self.rates, self.state.name)
            self.period, self._cut = Period(now_s, self.state.running, self._whole > 0), True
        self._rest(now_s)

    def end(self, flight: Flight, now_s: float) -> Decoded | None:
        """Record a request's end, whatever its outcome. Returns measurements of its answer; None: it had none."""
        if flight.ended:
            return None
        state = self.state
        self._pass(now_s)
        flight.ended = True
        if flight in self.waiting:
            if self.period is not None:
                self.period.exclude_sample()
            self._stop_waiting(flight, now_s, computed=False)
        state.running -= flight.running
        state.requests -= 1
        state.inflight_tokens -= 0 if flight.held else flight.tokens
        self.ours -= flight.how.ours
        state.limited -= flight.how.token_within_s > 0
        self._limits_s = self._limits_s - flight.how.token_within_s if state.limited else 0.0
        self._have(self.backlog_tokens(now_s), now_s)
        self._rest(now_s)
        seconds = now_s - flight.began_s
        if not flight.running or seconds <= 0:
            return None
        requests = (self._requests_s - flight.requests_s) / seconds
        return Decoded(seconds, requests, self._computed_tokens - flight.computed_tokens)

    def rate(self, line: Line | None, answer_tokens: float, now_s: float) -> None:
        """Update the prefill rate from the samples, the time per token (`line`), and the mean length of answers.

        An engine that needs more than twice the expected time for the current period's prompts counts as that slow.
        """
        # A sample has the load of its period's start, so a rate for another load would be wrong.
        state, period = self.state, self.period
        running = period.running if period is not None else state.running
        tokens = self.backlog_tokens(now_s)
        self.line, self.answer_tokens = line or ASSUMED, answer_tokens
        state.prefill_tokens_s = self.rates.rate(state.name, running)
        if period is not None and not (period.is_excluded or period.whole):
            prompts, sent = period.first_tokens + state.waiting, period.expected + state.prefill_tokens
            seconds = now_s - period.began_s
            state.prefill_tokens_s /= self.rates.slowness(state.name, prompts, sent, running, seconds)
        self._have(tokens, now_s)

    def backlog_tokens(self, now_s: float) -> float:
        """The estimated number of waiting tokens that are not computed yet."""
        return max(0.0, self.state.drained_s - now_s) * self.state.prefill_tokens_s

    def has_room(self, most_s: float, now_s: float, *, measured: bool) -> bool:
        """Whether the engine has room for a further prompt (see the module).

        `most_s`: maximum seconds of the waiting prompts. `measured`: the engine's rate has been measured.
        """
        if not measured and not self._full:
            return True
        taking = [one.tokens for one in self._taking(now_s)]
        if not measured:
            return not taking
        return len(taking) < AT_HAND or sum(taking) <= most_s * self.state.prefill_tokens_s

    def next_room_s(self, now_s: float) -> float:
        """The next time at which a non-streamed prompt ceases to take room by itself; infinite: none will."""
        return (
            min((one.how.until_s for one in self._taking(now_s)), default=math.inf)
            if self._whole
            else math.inf
        )

    def _taking(self, now_s: float) -> Iterator[Flight]:
        return (one for one in self.waiting if one.how.ours and one.how.until_s > now_s)

    def _pass(self, now_s: float) -> None:
        """Integrate the number of requests up to now."""
        self._requests_s += self.state.requests * (now_s - self._at_s)
        self._at_s = now_s

    def _stop_waiting(self, flight: Flight, now_s: float, *, computed: bool) -> None:
        """Remove a waiting request; `computed`: its first token has come."""
        state, tokens = self.state, flight.tokens
        oldest = next(iter(self.waiting)) is flight
        done = state.prefill_tokens - self.backlog_tokens(now_s)
        del self.waiting[flight]
        self._whole -= not flight.how.streams
        self._waiting_ours -= flight.how.ours
        self._full = self._full and self._waiting_ours > 0
        state.prefill_tokens -= tokens
        state.waiting -= 1
        # The oldest is computed first: work beyond its tokens is only estimated, and its first token corrects that.
        if oldest:
            beyond = 0.0 if computed else done - tokens
        else:
            beyond = done - tokens if computed else done
        self._have(state.prefill_tokens - max(0.0, beyond), now_s)

    def _have(self, backlog_tokens: float, now_s: float) -> None:
        """Set the backlog, within its bounds, and all values of `state` that depend on it."""
        state = self.state
        rate, oldest = state.prefill_tokens_s, next(iter(self.waiting), None)
        state.drained_s = now_s + min(max(0.0, backlog_tokens), state.prefill_tokens) / rate
        state.behind_s = (state.prefill_tokens - oldest.tokens) / rate if oldest is not None else 0.0
        late = oldest is not None and not self._whole
        state.late_s = self._moved_s + state.prefill_tokens / rate if late else NEVER_S
        state.token_s = self.line.alone_s + self.line.each_s * (state.requests + 1)
        share, limit_s = self.prompt_share(now_s), self._limits_s / max(1, state.limited)
        state.expect(
            self.line.each_s, share / (1.0 - share), self._prompt_size_s, limit_s, self.answer_tokens
        )

    def prompt_share(self, now_s: float) -> float:
        """Return the share of its recent time that the engine spent on prompts, at most MOST_SHARE."""
        left_s = self._prompt_s * math.exp(min(0.0, self._prompted_s - now_s) / SHARE_S)
        return min(MOST_SHARE, left_s / SHARE_S)

    def _rest(self, now_s: float) -> None:
        """End the period if no prompt waits."""
        if self.period is not None and not self.waiting:
            if not self._cut:
                self.period.end(now_s, self.rates, self.state.name)
            self.period = None
