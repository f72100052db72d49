"""The router's own account of one engine: the requests that it sent there, and how fast the engine computes them.

    send ──▶ waiting ──first_token──▶ running ──end──▶ gone          end may come first
    hold ──▶ held ──begin──▶ waiting      another engine computes the prompt: it takes no time here yet

The backlog of an engine is the uncached tokens of its waiting requests, less an estimate of those computed since: the
oldest first, at its measured rate.  A first token corrects the estimate: the backlog then consists of all tokens of the
requests that still wait, less those computed beyond the request with the first token, if that was not the oldest.

An engine that computes one prompt and has the next in its queue is never idle, and with continuous batching many short
prompts share its next step.  So it *has room* for a further prompt as long as, of those that this router sent it,

    fewer than `AT_HAND` wait for their first token, or
    these take at most so many seconds, by its rate and by all their tokens that are not cached.

Before its rate is measured, an engine gets `UNMEASURED` prompts, and then none until all have their first token, which
gives the rate.  The estimated backlog does not make room: only first tokens and ends do.  The exception are answers
without streaming, whose first byte says nothing about their prompt: such a prompt takes room until its first token was
expected.

Its speed is measured over *periods* in which some prompt waits, since prompts share steps: a short prompt whose step a
long one joined seems slow, and the long one behind it seems fast.  A long period is cut at a first token of the prompt
that waited longest, so that no long prompt is half computed beside it, and only if at least FIRST_TOKENS first tokens
came since the last cut, over GAPS times the longest time between two of them.  Each part that ends at a cut is a
sample, and so is a period without a cut; the rest after the last cut is not, since it was partly computed before.

1. Each counter of an engine is the sum over its requests in flight; without requests all are zero, and so is the
   backlog, whatever the order of the calls.
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
"""A report of computed tokens that differs by less from what was expected changes nothing."""
FIRST_TOKENS = 16
GAPS = 16.0
SHARE_S, MOST_SHARE = 10.0, 0.9
"""Prompts of about the last seconds tell which share of its time an engine computes prompts."""


@dataclass(slots=True)
class Period:
    """A part of the time in which some prompt waits, with the prompts whose first tokens came in it."""

    began_s: float
    running: int
    """Requests that ran when it began."""
    whole: bool
    """A prompt waits whose answer comes whole."""
    first_tokens: int = 0
    expected: int = 0
    """Tokens of the prompts that were computed."""
    reported: int = 0
    computed: int = 0
    """Answers that told how many tokens of their prompts were computed, and these."""
    last_s: float = 0.0
    gap_s: float = 0.0
    """When its last first token came, and the longest time between two of them."""
    seconds: float = 0.0
    """Its length, once it is a sample."""
    spoiled: bool = False
    """Something in it is not known: a prompt failed, or was loaded."""
    sample: tuple[Fit, Sample] | None = None

    def first_token(self, tokens: int, now_s: float) -> bool:
        """A prompt has been computed; returns whether the period may be cut here."""
        self.first_tokens += 1
        self.expected += tokens
        self.gap_s, self.last_s = max(self.gap_s, now_s - (self.last_s or self.began_s)), now_s
        return self.first_tokens >= FIRST_TOKENS and now_s - self.began_s >= GAPS * self.gap_s

    def spoil(self) -> None:
        """It is no sample."""
        self.spoiled = True
        self._retract()

    def end(self, now_s: float, rates: PrefillRates, engine: str) -> None:
        """It is a sample."""
        self.seconds = now_s - self.began_s
        if not self.spoiled:
            self._observe(self.expected, rates, engine)

    def report(self, computed_tokens: int, rates: PrefillRates, engine: str) -> None:
        """An answer tells how many tokens of its prompt were computed; the sum counts once all have told."""
        self.reported += 1
        self.computed += computed_tokens
        if self.spoiled or not self.seconds or self.reported < self.first_tokens:
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
    """How a request is sent."""

    streams: bool = True
    """Whether its first token will be told when the prompt is computed, rather than with the whole answer."""
    ours: bool = True
    """Whether this router sends it, and not another one that told of it."""
    until_s: float = math.inf
    """When it ceases to take room in any case."""
    token_within_s: float = 0.0
    """In which its class demands each token; 0: in any time."""
    held: bool = False
    """Whether it waits for another engine until `begin`."""


SENT = Sending()


@dataclass(slots=True, eq=False)
class Flight:
    """A request that was sent to an engine. Belongs to who sent it."""

    queue: Queue
    tokens: int
    """Of the prompt, to be computed."""
    how: Sending
    held: bool = True
    running: bool = False
    ended: bool = False
    spoiled: bool = False
    period: Period | None = None
    """In which its first token came."""
    began_s: float = 0.0
    requests_s: float = 0.0
    computed_tokens: int = 0
    """When its first token came, and the engine's `requests_s` and `computed_tokens` then."""

    def spoil(self) -> None:
        """How long its prompt takes tells nothing: it failed, or was loaded."""
        self.spoiled = True
        period = self.period or (None if self.ended or self.held else self.queue.period)
        if period is not None:
            period.spoil()

    def report(self, computed_tokens: int) -> None:
        """Its answer told how many of its prompt's tokens were computed."""
        if self.period is not None:
            self.period.report(computed_tokens, self.queue.rates, self.queue.state.name)


class Queue:
    """See the module. Has no lock: it belongs to one event loop, and alone changes its state's counters."""

    def __init__(self, state: EngineState, rates: PrefillRates) -> None:
        self.state, self.rates = state, rates
        self.line, self.answer_tokens = ASSUMED, 0.0
        """Of all engines' answers, the expected length."""
        self._limits_s = 0.0
        """The sum of the limits of the requests that have one."""
        self._prompt_s = self._prompt_size_s = self._prompted_s = 0.0
        """Seconds that prompts take, those sent at `_prompted_s` whole, earlier ones less; the mean seconds of one,
        weighted by its seconds."""
        self.waiting: dict[Flight, None] = {}
        """The oldest first."""
        self.period: Period | None = None
        """As long as a prompt waits."""
        self._cut = False
        """Whether the period follows a cut."""
        self.ours = self.sent = 0
        """Requests in flight that this router sent, and all that it ever sent."""
        self._whole = self._waiting_ours = 0
        """The waiting ones that do not stream, and those that this router sent."""
        self._full = False
        """Whether `_waiting_ours` was UNMEASURED since it was 0."""
        self._at_s = self._moved_s = 0.0
        """When something changed last; when a first token came last, or a request found none waiting."""
        self._requests_s = 0.0
        """Integral of the requests in flight over time."""
        self._computed_tokens = 0
        """Of prompts whose first token has come."""

    def send(self, tokens: int, now_s: float, how: Sending = SENT) -> Flight:
        """A request is sent, with so many tokens to compute."""
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
        """A request that was held waits for its first token, with so many tokens to compute."""
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
        """A request's prompt has been computed."""
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
        if flight.spoiled:
            self.period.spoil()
        if self.period.first_token(flight.tokens, now_s) and oldest:
            self.period.end(now_s, self.rates, self.state.name)
            self.period, self._cut = Period(now_s, self.state.running, self._whole > 0), True
        self._rest(now_s)

    def end(self, flight: Flight, now_s: float) -> Decoded | None:
        """A request has ended, however. Returns what is known of its answer; None: it had none."""
        if flight.ended:
            return None
        state = self.state
        self._pass(now_s)
        flight.ended = True
        if flight in self.waiting:
            if self.period is not None:
                self.period.spoil()
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
        """Take the rates that were measured by now, these seconds of an answer's token, and answers' mean length.

        An engine that has not computed all prompts of the present period in twice the expected time is that slow.
        """
        # Samples are of the load under which a period began, so a rate under another load would be wrong.
        state, period = self.state, self.period
        running = period.running if period is not None else state.running
        tokens = self.backlog_tokens(now_s)
        self.line, self.answer_tokens = line or ASSUMED, answer_tokens
        state.prefill_tokens_s = self.rates.rate(state.name, running)
        if period is not None and not (period.spoiled or period.whole):
            prompts, sent = period.first_tokens + state.waiting, period.expected + state.prefill_tokens
            seconds = now_s - period.began_s
            state.prefill_tokens_s /= self.rates.slowness(state.name, prompts, sent, running, seconds)
        self._have(tokens, now_s)

    def backlog_tokens(self, now_s: float) -> float:
        """See the module."""
        return max(0.0, self.state.drained_s - now_s) * self.state.prefill_tokens_s

    def has_room(self, most_s: float, now_s: float, *, measured: bool) -> bool:
        """Whether a further prompt would be computed soon: see the module.

        `most_s`: the seconds that the prompts before it may take. `measured`: the engine's rate is more than a guess.
        """
        if not measured and not self._full:
            return True
        taking = [one.tokens for one in self._taking(now_s)]
        if not measured:
            return not taking
        return len(taking) < AT_HAND or sum(taking) <= most_s * self.state.prefill_tokens_s

    def next_room_s(self, now_s: float) -> float:
        """When a prompt will cease to take room without being told; infinite: none will."""
        return (
            min((one.how.until_s for one in self._taking(now_s)), default=math.inf)
            if self._whole
            else math.inf
        )

    def _taking(self, now_s: float) -> Iterator[Flight]:
        return (one for one in self.waiting if one.how.ours and one.how.until_s > now_s)

    def _pass(self, now_s: float) -> None:
        """Time has passed."""
        self._requests_s += self.state.requests * (now_s - self._at_s)
        self._at_s = now_s

    def _stop_waiting(self, flight: Flight, now_s: float, *, computed: bool) -> None:
        """Take a request out of those that wait; `computed`: because its first token came."""
        state, tokens = self.state, flight.tokens
        oldest = next(iter(self.waiting)) is flight
        done = state.prefill_tokens - self.backlog_tokens(now_s)
        del self.waiting[flight]
        self._whole -= not flight.how.streams
        self._waiting_ours -= flight.how.ours
        self._full = self._full and self._waiting_ours > 0
        state.prefill_tokens -= tokens
        state.waiting -= 1
        # The oldest is computed first: what was done beyond its tokens is a guess, which its first token corrects.
        if oldest:
            beyond = 0.0 if computed else done - tokens
        else:
            beyond = done - tokens if computed else done
        self._have(state.prefill_tokens - max(0.0, beyond), now_s)

    def _have(self, backlog_tokens: float, now_s: float) -> None:
        """The backlog is this, within its bounds; what the choice goes by follows."""
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
        """Return the share of its time that the engine computes prompts, at most MOST_SHARE."""
        left_s = self._prompt_s * math.exp(min(0.0, self._prompted_s - now_s) / SHARE_S)
        return min(MOST_SHARE, left_s / SHARE_S)

    def _rest(self, now_s: float) -> None:
        """End the period if no prompt waits any more."""
        if self.period is not None and not self.waiting:
            if not self._cut:
                self.period.end(now_s, self.rates, self.state.name)
            self.period = None
