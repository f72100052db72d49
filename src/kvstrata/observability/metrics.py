"""Counters and histograms of the server.

The hot path only increments plain numbers; names, help texts and labels are added during a scrape (exposition.py).
Every label has a closed set of values: operations, error codes and reasons come from enums, adapter names from the
configuration, and so do the tenants that have a label.  No label carries a request or a key.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.observability.load_line import LoadLine

SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds for waits on L1, L2 and the network."""
SHORT_BUCKETS = (0.00001, 0.000025, 0.00005, *SECONDS_BUCKETS)
"""Upper bounds for requests, the shortest of which take some 20 µs."""
LONG_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds for full syncs and snapshots."""
MAX_OUTCOME_WORDS = 32
"""Most outcomes of an adapter's operation that get a label of their own; plugins may invent any number of outcomes."""
OUTCOME_WORD = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
"""Outcomes that can be a label; any other counts as `other`."""


class TenantChunks:
    """What lookups of one tenant asked for, and where it was found."""

    __slots__ = ("asked", "in_l1", "in_l2", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.asked = self.in_l1 = self.in_l2 = 0


class Histogram:
    """Durations in fixed buckets."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float] = SECONDS_BUCKETS) -> None:
        """`bounds` are the upper bounds of the buckets, in seconds."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def add_counts(self, counts: Sequence[int], sum_s: float) -> None:
        """Count durations that were put into these buckets elsewhere. REQUIRES: the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count of each bucket, as Prometheus expects them."""
        bounds = (*map(str, self.bounds), "+Inf")
        return list(zip(bounds, map(float, itertools.accumulate(self.counts)), strict=True))


def count_word(counts: dict[str, int], word: str, count: int = 1) -> None:
    """Count a word that a plugin may have chosen; `other` if it cannot be a label, or would be one label too many."""
    if word not in counts and (len(counts) >= MAX_OUTCOME_WORDS or not OUTCOME_WORD.fullmatch(word)):
        word = "other"
    counts[word] = counts.get(word, 0) + count


class L2Operation:
    """One kind of operation on one adapter."""

    __slots__ = ("moved_bytes", "outcomes", "time")

    def __init__(self) -> None:
        self.time = Histogram()
        self.moved_bytes = 0
        self.outcomes: dict[str, int] = {}


class ServerCounters:
    """Counters and histograms of requests, L2 operations and the cluster."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.request_times: dict[str, Histogram] = {}
        """By operation."""
        self.errors: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.peeked_misses = 0
        """Lookups that engines answered themselves, from the shared index; they are in all other numbers of lookups."""
        self.lookup_chunks = 0
        self.l1_hit_chunks = 0
        self.l2_hit_chunks = 0
        self.tenants: dict[int, TenantChunks] = {}
        """By the tenant's number; only those that the settings or the tenants file named at the start."""
        self.revoked_leases = 0
        self.reserve_outcomes: dict[str, int] = {}
        self.committed_chunks = 0
        self.bad_records = 0
        self.put_skipped: dict[str, int] = {}
        self.retrieved_bytes = 0
        self.lookup = Histogram()
        self.store = Histogram()
        self.prefetch = Histogram()
        self.heartbeat = Histogram()
        self.sync = Histogram(LONG_BUCKETS)
        self.l2: dict[tuple[str, str], L2Operation] = {}
        self.load_lines: dict[str, LoadLine] = {}
        """How long loads take, by adapter."""

    def request_ended(self, op: str, seconds: float) -> None:
        """Count the time from a request's arrival to its reply."""
        times = self.request_times.get(op)
        if times is None:
            times = self.request_times[op] = Histogram(SHORT_BUCKETS)
        times.add(seconds)

    def l2_operation(
        self, adapter: str, operation: str, seconds: float, moved_bytes: int, outcomes: Mapping[str, int]
    ) -> None:
        """Count one batch that an adapter has ended; `outcomes` maps the word of an outcome to its number of items."""
        counted = self.l2.get((adapter, operation))
        if counted is None:
            counted = self.l2[(adapter, operation)] = L2Operation()
        counted.time.add(seconds)
        counted.moved_bytes += moved_bytes
        if operation == "load" and moved_bytes and seconds > 0:
            self.load_lines.setdefault(adapter, LoadLine()).add(moved_bytes, seconds)
        for word, count in outcomes.items():
            count_word(counted.outcomes, word, count)

    def as_dict(self) -> dict[str, Any]:
        """The counters by name, for the status document; histograms and L2 operations are not among them."""
        return {
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "first_miss_reasons": dict(self.misses),
            "peeked_misses": self.peeked_misses,
            "lookup_chunks": self.lookup_chunks,
            "l1_hit_chunks": self.l1_hit_chunks,
            "l2_hit_chunks": self.l2_hit_chunks,
            "revoked_leases": self.revoked_leases,
            "reserve_outcomes": dict(self.reserve_outcomes),
            "committed_chunks": self.committed_chunks,
            "bad_records": self.bad_records,
            "put_skipped": dict(self.put_skipped),
            "retrieved_bytes": self.retrieved_bytes,
        }
