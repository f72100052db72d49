"""The page /metrics of the server: its families as prometheus_client's objects, and as text.

The page is made anew at most every FRESH_S, however many readers it has; under test for each reader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvstrata.failpoints import is_testing
from kvstrata.observability.families import COUNTED, FAMILIES, Family, place_of
from kvstrata.observability.metrics import ServerCounters

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FRESH_S = 0.25
"""Age up to which a page is given to further readers."""
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_PLACES = 4_096

Values = list[tuple[list[str], Any]]
"""Samples of a family: values of its labels, and a number or a Histogram."""


class Collects(Protocol):
    """What a page is made of."""

    def collect(self) -> Iterable[Metric]:
        """All metric families now."""
        ...


class Pages:
    """Makes /metrics, of MEDIA_TYPE."""

    def __init__(self, collector: Collects, now_s: Callable[[], float] = time.monotonic) -> None:
        # Imported here, since the apps are made on a thread; a page is made on the event loop.
        from prometheus_client import CollectorRegistry, generate_latest

        self._generate = generate_latest
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._now_s = now_s
        self._fresh_s = 0.0 if is_testing(os.environ) else FRESH_S
        self._made_s, self._page = float("-inf"), b""

    def page(self) -> bytes:
        """The page."""
        now_s = self._now_s()
        if now_s - self._made_s >= self._fresh_s:
            self._page, self._made_s = self._generate(self._registry), now_s
        return self._page


class ServerCollector:
    """A collector for a prometheus_client CollectorRegistry: reads counters and status document at each scrape."""

    def __init__(
        self, instance_id: str, counters: ServerCounters, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`numbers` returns sections of the status document. A number in them is served if `FAMILIES` has its path."""
        self._instance_id = instance_id
        self._counters = counters
        self._numbers = numbers
        self._places: dict[tuple[str, ...], tuple[str, list[str]] | None] = {}

    def collect(self) -> Iterable[Metric]:
        """All metric families now, in the order of `FAMILIES`."""
        numbers = self._numbers()
        samples: dict[str, Values] = {name: [] for name in FAMILIES}
        samples |= _counted(self._instance_id, self._counters, numbers)
        for path, value in numbers_in(numbers):
            if (place := self._place(path)) is not None:
                samples[place[0]].append((place[1], value))
        for name, values in samples.items():
            if values or name in COUNTED:
                yield metric_of(name, FAMILIES[name], values)

    def _place(self, path: tuple[str, ...]) -> tuple[str, list[str]] | None:
        if path not in self._places:
            if len(self._places) >= _MAX_PLACES:  # names of adapters that came and went
                self._places.clear()
            self._places[path] = place_of(path)
        return self._places[path]


def metric_of(name: str, family: Family, values: Iterable[tuple[list[str], Any]]) -> Metric:
    """A family with its samples: label values, and a number or a Histogram each."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.meaning, labels=family.labels)
        for labels, times in values:
            histogram.add_metric(labels, buckets=times.buckets(), sum_value=times.sum_s)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(name, family.meaning, labels=family.labels)
    for labels, count in values:
        metric.add_metric(labels, count)
    return metric


def _counted(instance_id: str, counters: ServerCounters, numbers: Mapping[str, Any]) -> dict[str, Values]:
    """The samples of each family in `COUNTED`, in its order."""

    def by_word(values: Mapping[str, Any]) -> Values:
        return [([word], value) for word, value in sorted(values.items())]

    tenants = sorted(counters.tenants.values(), key=lambda one: one.tenant)
    l2 = [(list(name), counted) for name, counted in sorted(counters.l2.items())]
    return {
        "kvstrata_instance": [([instance_id], 1.0)],
        "kvstrata_requests": by_word(counters.requests),
        "kvstrata_request_seconds": by_word(counters.request_times),
        "kvstrata_errors": by_word(counters.errors),
        "kvstrata_first_misses": by_word(counters.misses),
        "kvstrata_reserve_outcomes": by_word(counters.reserve_outcomes),
        "kvstrata_put_skipped": by_word(counters.put_skipped),
        "kvstrata_peeked_misses": [([], counters.peeked_misses)],
        "kvstrata_lookup_chunks": [([], counters.lookup_chunks)],
        "kvstrata_l1_hit_chunks": [([], counters.l1_hit_chunks)],
        "kvstrata_l2_hit_chunks": [([], counters.l2_hit_chunks)],
        "kvstrata_revoked_leases": [([], counters.revoked_leases)],
        "kvstrata_committed_chunks": [([], counters.committed_chunks)],
        "kvstrata_bad_records": [([], counters.bad_records)],
        "kvstrata_tenant_lookup_chunks": [([one.tenant], one.asked) for one in tenants],
        "kvstrata_tenant_hit_chunks": [
            sample
            for one in tenants
            for sample in (([one.tenant, "l1"], one.in_l1), ([one.tenant, "l2"], one.in_l2))
        ],
        "kvstrata_retrieved_bytes": [([], counters.retrieved_bytes)],
        "kvstrata_lookup_seconds": [([], counters.lookup)],
        "kvstrata_store_seconds": [([], counters.store)],
        "kvstrata_l2_prefetch_seconds": [([], counters.prefetch)],
        "kvstrata_l2_seconds": [(labels, counted.time) for labels, counted in l2],
        "kvstrata_l2_bytes": [(labels, counted.moved_bytes) for labels, counted in l2],
        "kvstrata_l2_items": [
            ([*labels, word], count)
            for labels, counted in l2
            for word, count in sorted(counted.outcomes.items())
        ],
        "kvstrata_l2_breaker_open": [
            ([adapter, operation], float(state != "closed"))
            for adapter, status in numbers.get("l2_adapters", {}).items()
            for operation, state in status.get("breakers", {}).items()
        ],
        "kvstrata_cluster_heartbeat_seconds": [([], counters.heartbeat)],
        "kvstrata_cluster_sync_seconds": [([], counters.sync)],
    }


def numbers_in(
    document: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, value) of every number in a nested document."""
    for key, value in document.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from numbers_in(value, path)
        elif isinstance(value, bool | int | float):
            yield path, float(value)
