"""Measures how fast engines compute prompts: tokens a second, by how many requests run meanwhile.

A sample is a prompt, or several that shared steps: the tokens that were computed, the seconds from an empty queue to
the (last) first token, and the requests that ran meanwhile.  Loads fall into classes by powers of two: 0, 1, 2-3, 4-7,
and so on.  A sample with an answer that came *whole* has the time of that answer in it: such samples count only as long
as there are no others, of any engine.  Over all engines

    seconds = what any first token takes under the load + tokens / usual rate under the load

and the rate of one engine is the usual one times its *factor*:

1. The line of a load goes through the medians of the shorter and of the longer half of its samples, so outliers move it
   only if they are half of a half.  A load that has only short prompts says little of a rate: it has the slope of all
   samples.  A load with fewer than `FEWEST` samples has the line of the nearest that has as many, the lower of two; if
   none has, all samples make one line.  Without any the rate is `assumed_tokens_s`.
2. An engine's factor is 1 unless more of its samples are faster, or slower, than those of all engines of about their
   size than chance explains, or `FEW` samples say that it is twice as fast or slow; then it is the median of these
   ratios.  Engines that are alike must not seem to differ, or the one that seems fastest gets every prompt: believing
   single samples cost a tenth of the 99th percentile of a real trace.
3. The newest `MAX_SAMPLES` of an engine and `MAX_ALL` of a load are kept; those with whole answers apart from the
   others, so that neither displaces the other.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import NamedTuple

MAX_SAMPLES = 64
MAX_ALL = 256
MAX_CLASSES = 9
"""The last has 128 running requests or more."""
MAX_ENGINES = 4_096
FEWEST = 12
FEW, FEW_ALIKE = 3, 6
TWICE = 2.0
DEVIATIONS = 2.0
"""Standard deviations from an even split of its samples beyond which an engine counts as different."""
SPREAD, TOLD = 1.5, 0.5
"""A load tells a slope if its halves' tokens have this ratio, and the longer one this share of that of all loads."""


class Sample(NamedTuple):
    """See the module."""

    engine: str
    tokens: int
    seconds: float
    load: int
    """Its class."""
    whole: bool
    """Whether some answer came whole."""
    number: int
    """Differs from all others'."""


class Line(NamedTuple):
    """Seconds to a first token: `latency_s + tokens / tokens_s`."""

    latency_s: float
    tokens_s: float
    long: float = 0.0
    """The median tokens of the longer half of its samples."""

    def seconds(self, tokens: int) -> float:
        """Return the seconds for a prompt of which so many tokens are computed."""
        return self.latency_s + tokens / self.tokens_s


class Own:
    """The newest samples of one engine, and its factor."""

    def __init__(self) -> None:
        self.samples: dict[bool, deque[Sample]] = {
            whole: deque(maxlen=MAX_SAMPLES) for whole in (False, True)
        }
        """By whether they are of whole answers."""
        self.factor = 1.0
        self.by_whole: bool | None = None
        """Of which samples the factor is; None: it must be found."""


def load_class(running: float) -> int:
    """Return the class of a load."""
    return min(MAX_CLASSES - 1, int(max(0.0, running)).bit_length())


def line_through(samples: Collection[Sample], common: Line | None = None) -> Line:
    """Return the line of some samples, by rule 1. There is at least one. `common`: that of all loads."""
    ordered = sorted(samples, key=lambda one: one.tokens)
    half = (len(ordered) + 1) // 2
    points = []
    for part in (ordered[:half], ordered[-half:]):
        tokens = statistics.median(one.tokens for one in part)
        # Within a half longer prompts take longer: the median rate stands for it, not the median time.
        points.append((tokens, tokens / statistics.median(one.tokens / one.seconds for one in part)))
    (short, short_s), (long, long_s) = points
    slope = most = long_s / long  # as if the latency were nothing
    if common is not None and long < TOLD * common.long:
        slope = 1.0 / common.tokens_s
    elif long >= SPREAD * short and long_s > short_s:
        slope = max((long_s - short_s) / (long - short), 0.25 * most)
    slope = min(slope, most)
    return Line(long_s - slope * long, 1.0 / slope, long)


class Rates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self, assumed_tokens_s: float) -> None:
        if not (math.isfinite(assumed_tokens_s) and assumed_tokens_s > 0):
            raise ValueError(f"assumed_tokens_s: {assumed_tokens_s}; it must be a finite number above 0")
        self._assumed = Line(0.0, assumed_tokens_s)
        self._engines: OrderedDict[str, Own] = OrderedDict()
        """The least recently observed first."""
        self._samples: dict[bool, dict[int, deque[Sample]]] = {False: {}, True: {}}
        """By whether answers came whole, then by load."""
        self._observed = 0
        self._lines: dict[int, Line] = {}
        """By load; empty: to be found."""
        self._cells: dict[tuple[int, int], float] = {}
        """The median rate of `FEW_ALIKE` samples or more, by load and by the power of two of their tokens."""

    @property
    def _by_whole(self) -> bool:
        """Whether the samples of whole answers count: there are no others."""
        return not any(self._samples[False].values())

    def observe(
        self, engine: str, tokens: int, seconds: float, running: float, *, whole: bool = False
    ) -> Sample | None:
        """Add a sample, and return it; None if it says nothing: a prompt without computed tokens or time.

        `whole`: some answer came whole, so the seconds include those of the answer.
        """
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return None
        own = self._engines.setdefault(engine, Own())
        self._engines.move_to_end(engine)
        if len(self._engines) > MAX_ENGINES:
            self._engines.popitem(last=False)
        self._observed += 1
        sample = Sample(engine, tokens, seconds, load_class(running), whole, self._observed)
        own.samples[whole].append(sample)
        self._samples[whole].setdefault(sample.load, deque(maxlen=MAX_ALL)).append(sample)
        own.by_whole, self._lines = None, {}
        return sample

    def retract(self, sample: Sample) -> None:
        """Forget a sample that turned out to be wrong."""
        own = self._engines.get(sample.engine)
        kept = [self._samples[sample.whole][sample.load]]
        if own is not None:
            own.by_whole = None
            kept.append(own.samples[sample.whole])
        for samples in kept:
            if sample in samples:
                samples.remove(sample)
        self._lines = {}

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone or was restarted."""
        self._engines.pop(engine, None)

    def samples(self, engine: str) -> int:
        """Return how many samples of the engine count."""
        own = self._engines.get(engine)
        return len(own.samples[self._by_whole]) if own is not None else 0

    def rate(self, engine: str, running: float) -> float:
        """Return the engine's rate under a load, in tokens a second."""
        own = self._engines.get(engine)
        if own is None:
            return self._usual(load_class(running)).tokens_s
        if own.by_whole is not (by_whole := self._by_whole):
            own.factor, own.by_whole = self._factor(own.samples[by_whole]), by_whole
        return self._usual(load_class(running)).tokens_s * own.factor

    def _usual(self, load: int) -> Line:
        if not self._lines:
            by_load = {at: found for at, found in self._samples[self._by_whole].items() if found}
            if not by_load:
                return self._assumed
            common = line_through([one for found in by_load.values() for one in found])
            full = {at: found for at, found in by_load.items() if len(found) >= FEWEST}
            self._lines = {at: line_through(found, common) for at, found in full.items()} or {0: common}
            cells: dict[tuple[int, int], list[float]] = {}
            for found in by_load.values():
                for one in found:
                    cells.setdefault((one.load, one.tokens.bit_length()), []).append(one.tokens / one.seconds)
            self._cells = {
                at: statistics.median(found) for at, found in cells.items() if len(found) >= FEW_ALIKE
            }
        return self._lines.get(load) or self._lines[min(self._lines, key=lambda at: (abs(at - load), at))]

    def _factor(self, samples: Collection[Sample]) -> float:
        """By rule 2. A sample that is itself the usual says nothing."""
        ratios = [self._usual_seconds(one) / one.seconds for one in samples]
        slower, faster = sum(ratio < 1.0 for ratio in ratios), sum(ratio > 1.0 for ratio in ratios)
        if slower + faster < FEW:
            return 1.0
        factor = statistics.median(ratios)
        if 1.0 / TWICE < factor < TWICE and abs(slower - faster) <= DEVIATIONS * math.sqrt(slower + faster):
            return 1.0
        return factor

    def _usual_seconds(self, sample: Sample) -> float:
        usual = self._usual(sample.load)
        rate = self._cells.get((sample.load, sample.tokens.bit_length()))
        return sample.tokens / rate if rate else usual.seconds(sample.tokens)
