"""Medians, percentiles, a description of the machine, and fresh chain keys."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path


def median_spread(values: Sequence[float]) -> tuple[float, list[float]]:
    """Median, and [least, greatest]."""
    return statistics.median(values), [min(values), max(values)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie. Raises IndexError without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@functools.cache
def machine() -> str:
    """Processor, cores and memory of this machine, in words."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {gib:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def chain_of(root: bytes, prompt: int, n_chunks: int) -> bytes:
    """Chain keys for `n_chunks` chunks of prompt number `prompt`, without hashing tokens.

    The server accepts any 32 bytes as a chain key; no real prompt has these.
    """
    return hashlib.shake_256(root + prompt.to_bytes(8, "little")).digest(n_chunks * 32)
