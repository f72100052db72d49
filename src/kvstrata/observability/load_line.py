"""Fits a line to the time of work, a latency plus size over rate, by least squares over batches.

The size is bytes to load, or tokens that an engine computes, deep ones converted to the number of tokens at a prompt's
start that would take as long.  Each new batch reduces the weight of the earlier ones a little.
"""

from __future__ import annotations

import math

KEPT = 0.98
"""How much a batch counts after the next one."""
DRIFT = 0.4
"""How much the last load counts for the present speed."""
MAX_SURPRISE = math.log(8)
"""A load counts as at most so much slower or faster than expected, by its logarithm."""
LEAST_BATCHES = 8
TOKENS_DEPTH = 3.3 / 100_000
"""By how much each token of a prompt makes the tokens behind it dearer, as a share of the first one's cost: that of a
model with 8 B parameters."""


def prompt_work(first: int, end: int) -> float:
    """How many tokens at a prompt's start take as long to compute as its tokens `first` to `end`."""
    return (end - first) * (1.0 + TOKENS_DEPTH * (first + end) / 2)


class LoadLine:
    """See the module. Belongs to one thread."""

    __slots__ = ("_bb", "_bs", "_bytes", "_n", "_s", "batches")

    def __init__(self) -> None:
        self._n = self._bytes = self._s = self._bb = self._bs = 0.0
        self.batches = 0
        """Number of batches so far."""

    def add(self, n_bytes: float, seconds: float) -> None:
        """A batch of so many bytes, or tokens, more than 0, took so long."""
        self._n = KEPT * self._n + 1.0
        self._bytes = KEPT * self._bytes + n_bytes
        self._s = KEPT * self._s + seconds
        self._bb = KEPT * self._bb + float(n_bytes) * n_bytes
        self._bs = KEPT * self._bs + n_bytes * seconds
        self.batches += 1

    def fitted(self) -> tuple[float, float] | None:
        """Latency in seconds, at least 0, and bytes a second; None after fewer than LEAST_BATCHES.

        A line that no load can follow (a negative latency or rate) gives way to the rate alone.
        """
        if self.batches < LEAST_BATCHES or self._s <= 0.0:
            return None
        mean_bytes, mean_s = self._bytes / self._n, self._s / self._n
        spread = self._bb / self._n - mean_bytes * mean_bytes
        slope = (
            (self._bs / self._n - mean_bytes * mean_s) / spread if spread > 1e-6 * self._bb / self._n else 0.0
        )
        latency_s = mean_s - slope * mean_bytes
        if slope <= 0.0 or latency_s < 0.0:
            return 0.0, mean_bytes / mean_s
        return latency_s, 1.0 / slope


class LoadTimes(LoadLine):
    """How long loads from one tier take now: a line over many loads, times how much slower the last few were.

    The line is over the loads as if they had not been slower, so that it keeps its shape when the tier's speed changes.
    """

    __slots__ = ("_drift", "measured_s")

    def __init__(self) -> None:
        super().__init__()
        self._drift = 0.0
        """Logarithm of how much slower they were."""
        self.measured_s = -math.inf
        """When a load was last measured, or begun to be."""

    def fitted(self) -> tuple[float, float] | None:
        """As of LoadLine, at the present speed."""
        if (line := LoadLine.fitted(self)) is None:
            return None
        slower = math.exp(self._drift)
        return line[0] * slower, line[1] / slower

    def expected_s(self, n_bytes: int) -> float | None:
        """Seconds until so many bytes are loaded, those before them in the queue included; None: not known yet."""
        if (line := LoadLine.fitted(self)) is None:
            return None
        return (line[0] + n_bytes / line[1]) * math.exp(self._drift)

    def measured(self, n_bytes: int, seconds: float, now_s: float) -> None:
        """So many bytes, those before them in the queue included, took so long."""
        if seconds <= 0 or n_bytes <= 0:
            return
        if expected_s := self.expected_s(n_bytes):
            surprise = math.log(seconds / expected_s)
            self._drift += DRIFT * max(-MAX_SURPRISE, min(MAX_SURPRISE, surprise))
        self.add(n_bytes, seconds / math.exp(self._drift))
        self.measured_s = now_s
