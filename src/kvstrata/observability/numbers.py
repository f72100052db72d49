"""The numbers of a process: counters, gauges and histograms, each declared once, in the part that counts.

    class TailPuts(Numbers):
        stored = counter("Tails that engines have stored in L1.")
        ended = counter("Recuts that ended early, by cause.", "reason")
        took = histogram("Time of a put.", name="seconds")
        waiting = gauge("Tails that wait to be offered to L2.", lambda tails: len(tails._waiting))

A field of a part is the number itself: `self.stored += 1`, `self.ended[word] += 1`, `self.took.add(seconds)`.  The
declarations make the part's section of the status document (`document`), its families on /metrics (`Pages`) and its
rows of docs/metrics.md.

1. Counting changes an int, a dict or a list.  Names, meanings and labels are used only when numbers are shown.
2. A metric is named `kvstrata_`, the prefix of its section, and `name`, or the field's name where none is given.
3. Every label has a closed set of values: operations, error codes and reasons come from enums, names of adapters and
   tenants from the settings.  No label carries a request or a key.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast, overload

from kvstrata.failpoints import is_testing

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
RATIO_BUCKETS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
"""Upper bounds for the ratio of expected to measured values."""
MAX_WORDS = 32
"""Maximum number of a plugin's words that get a label of their own."""
WORD = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
"""Pattern of a plugin's words that can be a label; others count as `other`."""


class Words(dict[Any, int]):
    """A counter with labels: by the label's value, or by a tuple of the values of several labels."""

    def __missing__(self, word: object) -> int:
        return 0

    def add_foreign(self, word: str, count: int = 1) -> None:
        """Count a word that a plugin may have chosen; as `other` if it is not a valid label, or exceeds MAX_WORDS."""
        self[word if word in self or (len(self) < MAX_WORDS and WORD.fullmatch(word)) else "other"] += count


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

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count of each bucket, as Prometheus expects them."""
        bounds = (*map(str, self.bounds), "+Inf")
        return list(zip(bounds, map(float, itertools.accumulate(self.counts)), strict=True))


class Histograms(dict[Any, Histogram]):
    """A histogram with labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, word: object) -> Histogram:
        made = self[word] = Histogram(self._bounds)
        return made

    def add_each(self, seconds: Mapping[Any, float]) -> None:
        """Count one duration of each of these words."""
        for word, duration_s in seconds.items():
            self[word].counts[bisect_left(self._bounds, duration_s)] += 1
            self[word].sum_s += duration_s


class Number:
    """The declaration of one number, or (`parts`) of the numbers of several parts, each with its own label."""

    def __init__(
        self,
        kind: str,
        meaning: str,
        labels: tuple[str, ...] = (),
        *,
        name: str = "",
        key: str | None = None,
        fresh: Callable[[], object] | None = None,
        parts: type[Numbers] | None = None,
    ) -> None:
        """`kind`: counter, gauge or histogram. `key`: its place in the document, where it is not that of the field;
        "a.b" is `b` in the object `a`, and "" no place. `fresh` makes the value of a new part.
        """
        self.kind, self.meaning, self.labels = kind, meaning, labels
        self.name, self.key = name, key
        self.fresh, self.parts = fresh, parts
        self.field = ""

    def __set_name__(self, owner: type, field: str) -> None:
        self.field = field
        self.name = self.name or field
        self.key = field if self.key is None else self.key


class _Read(Number):
    """A number that is computed when it is shown."""

    def __init__(
        self, kind: str, meaning: str, labels: tuple[str, ...], read: Callable[[Any], object], **more: Any
    ) -> None:
        super().__init__(kind, meaning, labels, **more)
        self._read = read

    def __get__(self, part: object, owner: type) -> Any:
        return self if part is None else self._read(part)


@overload
def counter(meaning: str, *, name: str = "", key: str | None = None) -> int: ...
@overload
def counter(meaning: str, *labels: str, name: str = "", key: str | None = None) -> Words: ...
@overload
def counter(
    meaning: str, *labels: str, read: Callable[[Any], object], name: str = "", key: str | None = None
) -> Any: ...
def counter(
    meaning: str,
    *labels: str,
    read: Callable[[Any], object] | None = None,
    name: str = "",
    key: str | None = None,
) -> Any:
    """A total that only grows. `read(part)` returns one that is counted elsewhere; with labels as a mapping."""
    if read is not None:
        return _Read("counter", meaning, labels, read, name=name, key=key)
    return Number("counter", meaning, labels, name=name, key=key, fresh=Words if labels else int)


@overload
def gauge(meaning: str, *, name: str = "", key: str | None = None) -> int: ...
@overload
def gauge(
    meaning: str, read: Callable[[Any], object], *labels: str, name: str = "", key: str | None = None
) -> Any: ...
def gauge(
    meaning: str,
    read: Callable[[Any], object] | None = None,
    *labels: str,
    name: str = "",
    key: str | None = None,
) -> Any:
    """A present value: that of the field, or what `read(part)` returns; with labels a mapping; None: no value now."""
    if read is None:
        return Number("gauge", meaning, labels, name=name, key=key, fresh=int)
    return _Read("gauge", meaning, labels, read, name=name, key=key)


@overload
def histogram(meaning: str, *, bounds: Sequence[float] = SECONDS_BUCKETS, name: str = "") -> Histogram: ...
@overload
def histogram(
    meaning: str, *labels: str, bounds: Sequence[float] = SECONDS_BUCKETS, name: str = ""
) -> Histograms: ...
def histogram(meaning: str, *labels: str, bounds: Sequence[float] = SECONDS_BUCKETS, name: str = "") -> Any:
    """Durations in seconds, which the document does not show."""
    fresh = functools.partial(Histograms if labels else Histogram, bounds)
    return Number("histogram", meaning, labels, name=name, key="", fresh=fresh)


def parts_by(
    labels: str,
    of: type[Numbers],
    read: Callable[[Any], Mapping[Any, Numbers]],
    *,
    key: str | None = None,
) -> Any:
    """The numbers of several parts of the same type, which `read(part)` returns by label (a tuple for several)."""
    return _Read("parts", "", tuple(labels.split()), read, parts=of, key=key)


class Numbers:
    """A part with numbers. A subclass declares them as fields; `prefix` stands in the names of its metrics."""

    declared: ClassVar[tuple[Number, ...]] = ()
    prefix: ClassVar[str | None] = None
    """None: the name of the part's section."""

    def __init_subclass__(cls, *, prefix: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [field for field in vars(cls).values() if isinstance(field, Number)]
        above = (base.declared for base in cls.__bases__ if issubclass(base, Numbers))
        cls.declared = (*itertools.chain.from_iterable(above), *own)
        for number in own:
            if number.fresh is not None:
                delattr(cls, number.field)  # where the class has no such attribute, counting is twice as fast
        cls.prefix = cls.prefix if prefix is None else prefix

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        part = super().__new__(cls)
        for number in cls.declared:
            if number.fresh is not None:
                setattr(part, number.field, number.fresh())
        return part

    def values(self) -> Iterator[tuple[Number, Any]]:
        """Each number with its current value."""
        for number in self.declared:
            yield number, getattr(self, number.field)

    def document(self) -> dict[str, Any]:
        """The section of the status document: the current values by key."""
        found: dict[str, Any] = {}
        for number, value in self.values():
            if number.key and value is not None:
                *above, last = number.key.split(".")
                place = found
                for key in above:
                    place = place.setdefault(key, {})
                place[last] = shown(value)
        return found


def shown(value: Any) -> Any:
    """A number as JSON: its parts' documents, or its values by label."""
    if isinstance(value, Numbers):
        return value.document()
    if isinstance(value, Mapping):
        return {"/".join(words_of(word)): shown(each) for word, each in value.items()}
    return value


def words_of(word: object) -> tuple[str, ...]:
    """The values of labels by which a sample is found."""
    return word if isinstance(word, tuple) else (cast(str, word),)


# --- the page /metrics -----------------------------------------------------------------------------------------------

FRESH_S = 0.25
"""Maximum age of a /metrics page that is served to further readers; under test the page is always new."""
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
