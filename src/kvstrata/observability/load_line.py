"""How long loads take over one way: a latency, and a rate beyond it, by least squares over batches.

Each batch makes those before it count a little less.  Batches overlap, so several of one lookup are faster together
than the line says.
"""

from __future__ import annotations

KEPT = 0.98
"""How much a batch counts after the next one."""
LEAST_BATCHES = 8


class LoadLine:
    """See the module. Belongs to one thread."""

    __slots__ = ("_bb", "_bs", "_bytes", "_n", "_s", "batches")

    def __init__(self) -> None:
        self._n = self._bytes = self._s = self._bb = self._bs = 0.0
        self.batches = 0
        """Number of batches so far."""

    def add(self, n_bytes: int, seconds: float) -> None:
        """A batch has loaded so many bytes, more than 0."""
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
