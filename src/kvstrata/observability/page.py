"""The page /metrics: the numbers of a process as prometheus_client's families, and as text.

The page is made anew at most every FRESH_S, however many readers it has; under test for each reader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.failpoints import is_testing
from kvstrata.observability.numbers import Numbers, words_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FRESH_S = 0.25
"""Age up to which a page is given to further readers."""
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sections = Iterable[tuple[str, Numbers]]
"""Parts with numbers, each with its prefix."""


class Family(NamedTuple):
    """One metric family."""

    name: str
    """Without the `_total` of a counter's samples."""
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Pages:
    """Makes /metrics, of MEDIA_TYPE."""

    def __init__(self, sections: Callable[[], Sections], now_s: Callable[[], float] = time.monotonic) -> None:
        # Imported here, since the apps are made on a thread; a page is made on the event loop.
        from prometheus_client import CollectorRegistry, generate_latest

        self._generate = generate_latest
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._sections = sections
        self._now_s = now_s
        self._fresh_s = 0.0 if is_testing(os.environ) else FRESH_S
        self._made_s, self._page = float("-inf"), b""

    def collect(self) -> Iterable[Metric]:
        """All families now, for prometheus_client."""
        made: dict[str, Any] = {}
        for prefix, part in self._sections():
            for family in families(type(part), prefix):
                if family.name not in made:
                    made[family.name] = metric_of(family)
            _add(made, _start(prefix), part, [])
        return made.values()

    def page(self) -> bytes:
        """The page."""
        now_s = self._now_s()
        if now_s - self._made_s >= self._fresh_s:
            self._page, self._made_s = self._generate(self._registry), now_s
        return self._page


def families(of: type[Numbers], prefix: str, labels: tuple[str, ...] = ()) -> Iterator[Family]:
    """The families of parts of this type, which all have these labels."""
    for number in of.declared:
        whole = (*labels, *number.labels)
        if number.parts is not None:
            yield from families(number.parts, prefix, whole)
        else:
            yield Family(_start(prefix) + number.name, number.kind, whole, number.meaning)


def _start(prefix: str) -> str:
    return f"kvstrata_{prefix}_" if prefix else "kvstrata_"


def metric_of(family: Family) -> Metric:
    """A family without samples."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds: dict[str, Callable[..., Metric]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[family.kind](family.name, family.meaning, labels=family.labels)


def _add(made: dict[str, Any], start: str, part: Numbers, labels: list[str]) -> None:
    """Add a part's samples to their families."""
    for number, value in part.values():
        if value is None:
            continue
        for words, each in sorted(value.items()) if number.labels else [((), value)]:
            whole = [*labels, *words_of(words)]
            if number.parts is not None:
                _add(made, start, each, whole)
            elif number.kind == "histogram":
                made[start + number.name].add_metric(whole, buckets=each.buckets(), sum_value=each.sum_s)
            else:
                made[start + number.name].add_metric(whole, float(each))
