"""Counters of the server and their Prometheus text.

The hot path adds to plain integers; names, help texts and labels are put on when somebody scrapes.  Every
label has a closed set of values: operations, error codes and reasons come from enums, adapters from the
configuration.  There is no label for tenants, requests or keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SECONDS_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
MAX_OUTCOME_WORDS = 32
"""Outcomes of an adapter's operation that get a label of their own (plugins choose their words)."""


class Histogram:
    """Durations in fixed buckets."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated, as Prometheus wants them."""
        total = 0
        result = []
        for bound, count in zip((*map(str, SECONDS_BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


class L2Operation:
    """One kind of operation on one adapter."""

    __slots__ = ("moved_bytes", "outcomes", "time")

    def __init__(self) -> None:
        self.time = Histogram()
        self.moved_bytes = 0
        self.outcomes: dict[str, int] = {}


class ServerCounters:
    """What the request path counts."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.lookup_chunks = 0
        self.l1_hit_chunks = 0
        self.l2_hit_chunks = 0
        self.reserve_outcomes: dict[str, int] = {}
        self.committed_chunks = 0
        self.bad_records = 0
        self.put_skipped: dict[str, int] = {}
        self.retrieved_bytes = 0
        self.lookup = Histogram()
        self.l2: dict[tuple[str, str], L2Operation] = {}

    def l2_operation(
        self, adapter: str, operation: str, seconds: float, moved_bytes: int, outcomes: Mapping[str, int]
    ) -> None:
        """One batch on an adapter ended; `outcomes`: items by outcome's word."""
        counted = self.l2.get((adapter, operation))
        if counted is None:
            counted = self.l2[(adapter, operation)] = L2Operation()
        counted.time.add(seconds)
        counted.moved_bytes += moved_bytes
        for word, count in outcomes.items():
            known = word if word in counted.outcomes or len(counted.outcomes) < MAX_OUTCOME_WORDS else "other"
            counted.outcomes[known] = counted.outcomes.get(known, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """For the status document."""
        return {
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "first_miss_reasons": dict(self.misses),
            "lookup_chunks": self.lookup_chunks,
            "l1_hit_chunks": self.l1_hit_chunks,
            "l2_hit_chunks": self.l2_hit_chunks,
            "reserve_outcomes": dict(self.reserve_outcomes),
            "committed_chunks": self.committed_chunks,
            "bad_records": self.bad_records,
            "put_skipped": dict(self.put_skipped),
            "retrieved_bytes": self.retrieved_bytes,
        }


class ServerCollector:
    """Registered with a CollectorRegistry; asks the engine at each scrape."""

    def __init__(
        self, instance_id: str, counters: ServerCounters, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`numbers`: gives sections of the status document. Every number in them becomes a gauge named after
        its path; lists and texts are left out."""
        self._instance_id = instance_id
        self._counters = counters
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        """All metric families now."""
        return families(self._instance_id, self._counters, self._numbers())


def families(instance_id: str, counters: ServerCounters, numbers: Mapping[str, Any]) -> Iterator[Metric]:
    """All metric families, in a fixed order."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    information = GaugeMetricFamily("kvstrata_instance", "This instance.", labels=["instance_id"])
    information.add_metric([instance_id], 1.0)
    yield information
    labelled = (
        ("kvstrata_requests", "Requests by operation.", "op", counters.requests),
        ("kvstrata_errors", "Error replies by code.", "code", counters.errors),
        ("kvstrata_first_misses", "Lookups by the reason of their first miss.", "reason", counters.misses),
        ("kvstrata_reserve_outcomes", "Chunks of reserves by outcome.", "outcome", counters.reserve_outcomes),
        ("kvstrata_put_skipped", "Chunks not put to L2, by reason.", "reason", counters.put_skipped),
    )
    for name, text, label, values in labelled:
        counter = CounterMetricFamily(name, text, labels=[label])
        for value, count in sorted(values.items()):
            counter.add_metric([value], count)
        yield counter
    for name, text, count in (
        ("kvstrata_lookup_chunks", "Chunks asked for.", counters.lookup_chunks),
        ("kvstrata_l1_hit_chunks", "Chunks served that were in L1.", counters.l1_hit_chunks),
        ("kvstrata_l2_hit_chunks", "Chunks served after a load from L2.", counters.l2_hit_chunks),
        ("kvstrata_committed_chunks", "Chunks that became visible.", counters.committed_chunks),
        ("kvstrata_bad_records", "Commits refused because the record was wrong.", counters.bad_records),
        ("kvstrata_retrieved_bytes", "Bytes sent by retrieve.", counters.retrieved_bytes),
    ):
        yield CounterMetricFamily(name, text, value=count)
    histogram = HistogramMetricFamily("kvstrata_lookup_seconds", "Time from a lookup's arrival to its reply.")
    histogram.add_metric([], buckets=counters.lookup.buckets(), sum_value=counters.lookup.sum_s)
    yield histogram
    seconds = HistogramMetricFamily(
        "kvstrata_l2_seconds", "Time of one batch on an adapter.", labels=["adapter", "operation"]
    )
    moved = CounterMetricFamily(
        "kvstrata_l2_bytes", "Record bytes moved by an adapter.", labels=["adapter", "operation"]
    )
    items = CounterMetricFamily(
        "kvstrata_l2_items", "Chunks by outcome.", labels=["adapter", "operation", "outcome"]
    )
    for (adapter, operation), counted in sorted(counters.l2.items()):
        seconds.add_metric([adapter, operation], buckets=counted.time.buckets(), sum_value=counted.time.sum_s)
        moved.add_metric([adapter, operation], counted.moved_bytes)
        for word, count in sorted(counted.outcomes.items()):
            items.add_metric([adapter, operation, word], count)
    yield from (seconds, moved, items)
    for name, number in numbers_in(numbers, "kvstrata"):
        yield GaugeMetricFamily(name, "From the status document.", value=number)


def numbers_in(document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """(metric name, value) of every number in a nested document."""
    for key, value in document.items():
        name = prefix + "_" + "".join(character if character.isalnum() else "_" for character in str(key))
        if isinstance(value, Mapping):
            yield from numbers_in(value, name)
        elif isinstance(value, bool | int | float):
            yield name, float(value)
