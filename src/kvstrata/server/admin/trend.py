"""What lookups found in the last minute, the last hour and since the start: differences of samples of the counters.

A sample is taken every SAMPLE_S and kept for a minute, and every twelfth one for an hour, so that the memory is small.
A window reaches back to the first sample that is old enough, or to the start; `seconds` is its exact length.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvstrata.clock import Clock
from kvstrata.observability.explain import Explainer
from kvstrata.observability.server_numbers import ServerNumbers

SAMPLE_S = 5.0
MINUTE_S, HOUR_S = 60.0, 3_600.0
EVERY = 12
"""One of so many samples is kept for an hour."""


class Sample(NamedTuple):
    """Totals at one time."""

    totals: dict[str, float]
    """`seconds` is the time."""
    first_misses: Counter[str]


class Trend:
    """The samples of one instance. Belongs to the event loop."""

    def __init__(self, counters: ServerNumbers, explainer: Explainer, clock: Clock) -> None:
        self._counters = counters
        self._explainer = explainer
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
        now, computed = self._now(), self._explainer.computed
        return {
            "minute": _window(self._minute, now, MINUTE_S),
            "hour": _window(self._hour, now, HOUR_S),
            "start": _window([self._start], now, 0.0),
            "computed_chunks": computed.chunks,
            "computed_s": round(computed.seconds, 3),
        }

    def _now(self) -> Sample:
        counters = self._counters
        totals = {
            "seconds": self._clock.monotonic_s(),
            "lookups": sum(counters.lookup.counts) + counters.peeked_misses,
            "lookup_chunks": counters.lookup_chunks,
            "l1_hit_chunks": counters.l1_hit_chunks,
            "l2_hit_chunks": counters.l2_hit_chunks,
            "lookup_s": counters.lookup.sum_s,
            "avoided_s": self._explainer.avoided_s,
        }
        return Sample(totals, Counter(counters.first_miss_reasons))


def _window(samples: Iterable[Sample], now: Sample, length_s: float) -> dict[str, Any]:
    """What happened between now and the last sample that is old enough, or the oldest."""
    begin_s = now.totals["seconds"] - length_s
    before, *later = samples
    for sample in later:
        if sample.totals["seconds"] <= begin_s:
            before = sample
    return {
        **{name: round(total - before.totals[name], 3) for name, total in now.totals.items()},
        "first_misses": dict(sorted((now.first_misses - before.first_misses).items())),
    }
