"""What lookups found in the last minute, the last hour and since the start: differences of samples of the counters.

A sample is taken every SAMPLE_S and kept for a minute, and every twelfth one for an hour, so that the memory is small.
A window reaches back to the first sample that is old enough, or to the start; `seconds` is its exact length.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

from kvstrata.clock import Clock
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.savings import Savings

SAMPLE_S = 5.0
MINUTE_S, HOUR_S = 60.0, 3_600.0
EVERY = 12
"""One of so many samples is kept for an hour."""


class Sample(NamedTuple):
    """Totals at one time."""

    at_s: float
    lookups: int
    chunks: int
    l1_chunks: int
    l2_chunks: int
    lookup_s: float
    avoided_s: float
    misses: dict[str, int]
    """Lookups by the reason of their first miss."""


class Trend:
    """The samples of one instance. Belongs to the event loop."""

    def __init__(self, counters: ServerCounters, savings: Savings, clock: Clock) -> None:
        self._counters = counters
        self._savings = savings
        self._clock = clock
        self._start = self._now()
        self._minute: deque[Sample] = deque([self._start], maxlen=int(MINUTE_S / SAMPLE_S) + 1)
        self._hour: deque[Sample] = deque([self._start], maxlen=int(HOUR_S / SAMPLE_S / EVERY) + 1)
        self._taken = 0

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Take one sample."""
        self._taken += 1
        self._minute.append(self._now())
        if self._taken % EVERY == 0:
            self._hour.append(self._minute[-1])

    def section(self) -> dict[str, Any]:
        """The section `trend` of the status document."""
        now = self._now()
        return {
            "minute": _window(_before(self._minute, now.at_s - MINUTE_S), now),
            "hour": _window(_before(self._hour, now.at_s - HOUR_S), now),
            "start": _window(self._start, now),
            "computed_chunks": self._savings.computed.chunks,
            "computed_s": round(self._savings.computed.seconds, 3),
        }

    def _now(self) -> Sample:
        counters = self._counters
        return Sample(
            self._clock.monotonic_s(),
            sum(counters.lookup.counts) + counters.peeked_misses,
            counters.lookup_chunks,
            counters.l1_hit_chunks,
            counters.l2_hit_chunks,
            counters.lookup.sum_s,
            self._savings.avoided_s,
            dict(counters.misses),
        )


def _before(samples: deque[Sample], at_s: float) -> Sample:
    """The last sample that is not after a time, or the oldest."""
    found = samples[0]
    for sample in samples:
        if sample.at_s > at_s:
            break
        found = sample
    return found


def _window(before: Sample, now: Sample) -> dict[str, Any]:
    return {
        "seconds": round(now.at_s - before.at_s, 3),
        "lookups": now.lookups - before.lookups,
        "lookup_chunks": now.chunks - before.chunks,
        "l1_hit_chunks": now.l1_chunks - before.l1_chunks,
        "l2_hit_chunks": now.l2_chunks - before.l2_chunks,
        "lookup_s": round(now.lookup_s - before.lookup_s, 3),
        "avoided_s": round(now.avoided_s - before.avoided_s, 3),
        "first_misses": {
            reason: count - before.misses.get(reason, 0)
            for reason, count in sorted(now.misses.items())
            if count > before.misses.get(reason, 0)
        },
    }
