"""Fits a line to the time of work, a latency plus size over rate, by least squares over batches.

The size is bytes to load, or tokens that an engine computes, deep ones converted to the number of tokens at a prompt's
start that would take as long.  Each new batch reduces the weight of the earlier ones a little.
"""

from __future__ import annotations

import math

KEPT = 0.98
"""Weight of a batch relative to the next one."""
DRIFT = 0.4
"""Weight of the last load in the estimate of the current speed."""
MAX_SURPRISE = math.log(8)
"""Limit of the logarithm of measured over expected time of a load."""
LEAST_BATCHES = 8
TOKENS_DEPTH = 3.3 / 100_000
"""Increase of a token's cost per token before it, as a share of the first token's cost: that of a model with 8 B
parameters."""


def prompt_work(first: int, end: int) -> float:
    """The number of tokens at a prompt's start that take as long to compute as its tokens `first` to `end`."""
    return (end - first) * (1.0 + TOKENS_DEPTH * (first + end) / 2)


class LoadLine:
    """The fitted line. Belongs to one thread."""

    __slots__ = ("_bb", "_bs", "_bytes", "_n", "_s", "batches")

    def __init__(self) -> None:
        self._n = self._bytes = self._s = self._bb = self._bs = 0.0
        self.batches = 0
        """Number of batches so far."""

    def add(self, n_bytes: float, seconds: float) -> None:
        """Add a batch: its bytes or tokens (more than 0), and its time."""
        self._n = KEPT * self._n + 1.0
        self._bytes = KEPT * self._bytes + n_bytes
        self._s = KEPT * self._s + seconds
        self._bb = KEPT * self._bb + float(n_bytes) * n_bytes
        self._bs = KEPT * self._bs + n_bytes * seconds
        self.batches += 1

    def fitted(self) -> tuple[float, float] | None:
        """Latency in seconds, at least 0, and bytes per second; None after fewer than LEAST_BATCHES.

        An impossible line (a negative latency or rate) is replaced by the rate alone.
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
    """Estimates the time of loads from one tier: a line over many loads, times the slowdown of the last few.

    The line is fitted to the loads without their slowdown, so that it keeps its shape when the tier's speed changes.
    """

    __slots__ = ("_drift", "measured_s")

    def __init__(self) -> None:
        super().__init__()
        self._drift = 0.0
        """Logarithm of the current slowdown."""
        self.measured_s = -math.inf
        """Time at which the last measurement of a load ended or began."""

    def fitted(self) -> tuple[float, float] | None:
        """As `LoadLine.fitted`, at the current speed."""
        if (line := LoadLine.fitted(self)) is None:
            return None
        slower = math.exp(self._drift)
        return line[0] * slower, line[1] / slower

    def expected_s(self, n_bytes: int) -> float | None:
        """Seconds until `n_bytes` are loaded, which include those queued before them; None: unknown yet."""
        if (line := LoadLine.fitted(self)) is None:
            return None
        return (line[0] + n_bytes / line[1]) * math.exp(self._drift)

    def measured(self, n_bytes: int, seconds: float, now_s: float) -> None:
        """Add a measured load: its bytes, with those queued before them, and its time."""
        if seconds <= 0 or n_bytes <= 0:
            return
        if expected_s := self.expected_s(n_bytes):
            surprise = math.log(seconds / expected_s)
            self._drift += DRIFT * max(-MAX_SURPRISE, min(MAX_SURPRISE, surprise))
        self.add(n_bytes, seconds / math.exp(self._drift))
        self.measured_s = now_s
