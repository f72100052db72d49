"""Measures how fast engines compute prompts: tokens a second, by how many requests run meanwhile.

A sample is a prompt, or several that shared steps: the tokens that were computed, the seconds from an empty queue to
the (last) first token, and the requests that ran meanwhile.  Loads fall into classes by powers of two: 0, 1, 2-3, 4-7,
and so on.  A sample with an answer that came *whole* has the time of that answer in it: such samples count only as long
as there are no others, of any engine.  Over all engines

    seconds = what any first token takes under the load + tokens / usual rate under the load

and the rate of one engine is the usual one times its *factor*:

1. Samples of a load are sorted into cells by powers of two of their tokens.  The line goes through the medians of the
   cells that have at least `FEWEST` samples, or of all until those tell a slope: outliers move it only if they are
   half of a cell.
2. A load that has only short prompts says little of a rate: each load's slope is drawn to that of all loads together,
   as if `COMMON` usual samples had it.  A load without samples has the line of the nearest that has some, the lower
   of two.  Without any sample the rate is `assumed_tokens_s`.
3. An engine's factor is 1 unless more of its samples are faster, or slower, than usual for their cell than chance
   explains, or `FEW` samples say that it is twice as fast or slow; then it is the median of these ratios.  Engines that
   are alike must not seem to differ, or the one that seems fastest gets every prompt: believing single samples cost a
   tenth of the 99th percentile of a real trace.
4. The newest `MAX_SAMPLES` are kept of an engine and of a cell, of at most `MAX_ENGINES` engines; those with whole
   answers apart from the others, so that neither displaces the other.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from typing import NamedTuple

MAX_SAMPLES = 64
MAX_CLASSES = 9
"""The last has 128 running requests or more."""
MAX_ENGINES = 4_096
FEWEST = 6
FEW = 3
TWICE = 2.0
COMMON = 16
DEVIATIONS = 2.0
"""Standard deviations from an even split of its samples beyond which an engine counts as different."""
MOVED = 0.1
"""Change of the common rate after which factors are found anew."""
SETTLED = 16
"""Samples of an engine after which its factor is found anew with every eighth only."""


class Sample:
    """See the module."""

    __slots__ = ("engine", "load", "seconds", "tokens", "whole")

    def __init__(self, engine: str, tokens: int, seconds: float, load: int, whole: bool) -> None:
        self.engine = engine
        self.tokens = tokens
        self.seconds = seconds
        self.load = load
        """Its class."""
        self.whole = whole
        """Whether some answer came whole."""


class Line(NamedTuple):
    """Seconds to a first token: `latency_s + tokens / tokens_s`."""

    latency_s: float
    tokens_s: float

    def seconds(self, tokens: int) -> float:
        """Return the seconds for a prompt of which so many tokens are computed."""
        return self.latency_s + tokens / self.tokens_s


class Point(NamedTuple):
    """The medians of a cell."""

    tokens: float
    seconds: float
    samples: int


class Cell:
    """The newest samples of all engines under one load and of about one size."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._point: Point | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self._samples.append(sample)
        self._point = None

    def remove(self, sample: Sample) -> None:
        """Forget a sample, if it is still kept."""
        if sample in self._samples:
            self._samples.remove(sample)
            self._point = None

    def point(self) -> Point:
        """Return the medians. There is at least one sample."""
        if self._point is None:
            tokens = statistics.median(one.tokens for one in self._samples)
            # Within a cell longer prompts take longer: the median rate stands for the cell, not the median time.
            rate = statistics.median(one.tokens / one.seconds for one in self._samples)
            self._point = Point(tokens, tokens / rate, len(self._samples))
        return self._point

    def rate(self) -> float:
        """Return the median rate."""
        point = self.point()
        return point.tokens / point.seconds


class Own:
    """The newest samples of one engine, and its factor."""

    def __init__(self) -> None:
        self.samples: dict[bool, deque[Sample]] = {
            whole: deque(maxlen=MAX_SAMPLES) for whole in (False, True)
        }
        """By whether they are of whole answers."""
        self.observed = 0
        self.factor = 1.0
        self.version = 0
        """Of the lines that the factor was found with."""


def load_class(running: float) -> int:
    """Return the class of a load."""
    return min(MAX_CLASSES - 1, int(max(0.0, running)).bit_length())


def lines_through(points_by_load: dict[int, list[Point]]) -> dict[int, Line]:
    """Return the line of each load, by rule 2; none if the points do not tell a slope."""
    spreads: dict[int, tuple[float, float, float, float]] = {}
    samples = squares = products = 0.0
    for load, points in points_by_load.items():
        n = float(sum(point.samples for point in points))
        mean_tokens = sum(point.samples * point.tokens for point in points) / n
        mean_s = sum(point.samples * point.seconds for point in points) / n
        square = sum(point.samples * (point.tokens - mean_tokens) ** 2 for point in points)
        product = sum(
            point.samples * (point.tokens - mean_tokens) * (point.seconds - mean_s) for point in points
        )
        spreads[load] = mean_tokens, mean_s, square, product
        samples, squares, products = samples + n, squares + square, products + product
    if squares <= 0.0 or products <= 0.0:
        return {}  # One size, or long prompts that seem to take less than short ones.
    common_square = COMMON * squares / samples
    common_product = common_square * products / squares
    lines = {}
    for load, (mean_tokens, mean_s, square, product) in spreads.items():
        slope = max(0.0, product + common_product) / (square + common_square)
        # No rate is lower than if the latency were nothing, and none more than four times the common one.
        slope = min(max(slope, 0.25 * products / squares), mean_s / mean_tokens)
        lines[load] = Line(mean_s - slope * mean_tokens, 1.0 / slope)
    return lines


def flat(points_by_load: dict[int, list[Point]]) -> dict[int, Line]:
    """Return one rate for all loads."""
    points = [point for points in points_by_load.values() for point in points]
    tokens = sum(point.samples * point.tokens for point in points)
    return dict.fromkeys(
        points_by_load, Line(0.0, tokens / sum(point.samples * point.seconds for point in points))
    )


class Rates:
    """See the module. Has no lock: it belongs to one event loop."""

    def __init__(self, assumed_tokens_s: float) -> None:
        if not (math.isfinite(assumed_tokens_s) and assumed_tokens_s > 0):
            raise ValueError(f"assumed_tokens_s: {assumed_tokens_s}; it must be a finite number above 0")
        self._assumed = Line(0.0, assumed_tokens_s)
        self._engines: OrderedDict[str, Own] = OrderedDict()
        """The least recently observed first."""
        self._cells: dict[bool, dict[int, dict[int, Cell]]] = {False: {}, True: {}}
        """By whether answers came whole, by load, then by size."""
        self._by_whole = True
        """Whether the samples of whole answers count: there are no others."""
        self._lines: dict[int, Line] = {}
        """By load; empty: to be found."""
        self._version = 0
        self._version_tokens_s = 0.0
        """A usual rate at this version."""

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
        sample = Sample(engine, tokens, seconds, load_class(running), whole)
        own.samples[whole].append(sample)
        own.observed += 1
        if own.observed <= SETTLED or not own.observed % 8:
            own.version = -1
        cells = self._cells[whole].setdefault(sample.load, {})
        cells.setdefault(tokens.bit_length(), Cell()).add(sample)
        self._changed()
        return sample

    def retract(self, sample: Sample) -> None:
        """Forget a sample that turned out to be wrong."""
        own = self._engines.get(sample.engine)
        if own is not None and sample in own.samples[sample.whole]:
            own.samples[sample.whole].remove(sample)
            own.version = -1
        self._cells[sample.whole][sample.load][sample.tokens.bit_length()].remove(sample)
        self._changed()

    def _changed(self) -> None:
        """Find lines and factors anew where samples have changed."""
        self._lines = {}
        by_whole = not any(len(cell) for cells in self._cells[False].values() for cell in cells.values())
        if by_whole != self._by_whole:
            self._by_whole = by_whole
            self._version += 1

    def forget(self, engine: str) -> None:
        """Drop an engine that has gone or was restarted."""
        self._engines.pop(engine, None)

    def samples(self, engine: str) -> int:
        """Return how many samples of the engine count."""
        own = self._engines.get(engine)
        return len(own.samples[self._by_whole]) if own is not None else 0

    def rate(self, engine: str, running: float) -> float:
        """Return the engine's rate under a load, in tokens a second."""
        usual = self._usual(load_class(running))
        own = self._engines.get(engine)
        if own is None:
            return usual.tokens_s
        if own.version != self._version:
            own.factor, own.version = self._factor(own.samples[self._by_whole]), self._version
        return usual.tokens_s * own.factor

    def _usual(self, load: int) -> Line:
        if not self._lines:
            self._lines = self._found_lines()
            if not self._lines:
                return self._assumed
            tokens_s = statistics.median(line.tokens_s for line in self._lines.values())
            if abs(tokens_s - self._version_tokens_s) > MOVED * self._version_tokens_s:
                self._version_tokens_s = tokens_s
                self._version += 1
        line = self._lines.get(load)
        return line or self._lines[min(self._lines, key=lambda each: (abs(each - load), each))]

    def _found_lines(self) -> dict[int, Line]:
        points = {
            load: [cell.point() for cell in cells.values() if len(cell)]
            for load, cells in self._cells[self._by_whole].items()
        }
        points = {load: found for load, found in points.items() if found}
        full = {load: [one for one in found if one.samples >= FEWEST] for load, found in points.items()}
        full = {load: found for load, found in full.items() if found}
        return lines_through(full) or lines_through(points) or (flat(points) if points else {})

    def _factor(self, samples: deque[Sample]) -> float:
        """By rule 3. A sample that is itself the usual says nothing."""
        ratios = [self._usual_seconds(one) / one.seconds for one in samples]
        slower, faster = sum(ratio < 1.0 for ratio in ratios), sum(ratio > 1.0 for ratio in ratios)
        if slower + faster < FEW:
            return 1.0
        factor = statistics.median(ratios)
        if 1.0 / TWICE < factor < TWICE and abs(slower - faster) <= DEVIATIONS * math.sqrt(slower + faster):
            return 1.0
        return factor

    def _usual_seconds(self, sample: Sample) -> float:
        cell = self._cells[sample.whole][sample.load][sample.tokens.bit_length()]
        if len(cell) >= FEWEST:
            return sample.tokens / cell.rate()
        return self._usual(sample.load).seconds(sample.tokens)
