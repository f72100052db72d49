"""What is measured of each request: times, tokens, outcomes, and whether its class of service was met.

Parts of an answer are counted, not parsed.  Tokens come from the `usage` that an answer ends with; where it tells none,
each event of a stream counts as a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

from kvstrata.config.gateway_model import SloSettings
from kvstrata.observability.numbers import LONG_BUCKETS, Histogram, Numbers, counter, histogram, parts_by

MAX_SERIES = 4_096
"""Most sets of labels; further ones count under OTHER."""
OTHER = "other"
OK, CLIENT_ERROR, CANCELLED, BROKE_OFF = "ok", "client_error", "cancelled", "broke_off"
_USAGE = {
    **dict.fromkeys((b"prompt", b"input"), "prompt"),
    **dict.fromkeys((b"cached", b"cache_read_input"), "cached"),
    **dict.fromkeys((b"completion", b"output"), "completion"),
}
"""Kinds of tokens by what stands before `_tokens` in the keys of an answer's `usage`."""
_BESIDE = frozenset((b"cache_read_input", b"cache_creation_input"))
"""What `/v1/messages` counts beside its `input_tokens`, and all others within them."""
_COUNT = re.compile(rb"\s*:\s*(\d{1,15})")
_KEY_END = b'_tokens"'
_LONGEST_KEY = 24
_USAGE_TAIL_BYTES = 4_096
_EVENT = b"data:"
_ERRORS = (b'data: {"error"', b"event: error", b'{"error"', b'{"object":"error"', b'{"type":"error"')


class Spliced(Protocol):
    """What a thread measures of the parts that it passes on, see native/core.pyi."""

    @property
    def events(self) -> int: ...

    @property
    def last_s(self) -> float: ...

    @property
    def gaps(self) -> list[int]: ...

    @property
    def gaps_s(self) -> float: ...

    @property
    def tail(self) -> bytes: ...


class Series(Numbers):
    """Counters and histograms of the requests with the same labels."""

    outcomes = counter(
        "Requests that have ended, by outcome: `ok`, `client_error` (an engine's 4xx), `engine_error` (an engine's "
        "5xx, or an error inside a 200), `broke_off`, `cancelled` by the client, or the code of the gateway's refusal.",
        "outcome",
        name="requests",
    )
    ttft = histogram(
        "Time from a request's arrival to the first byte of its answer's body.",
        name="ttft_seconds",
        bounds=LONG_BUCKETS,
    )
    itl = histogram("Time between two parts of a stream with events.", name="itl_seconds")
    tpot = histogram("Mean time per token after the first, of each request.", name="tpot_seconds")
    e2e = histogram(
        "Time from a request's arrival to the end of its answer.", name="e2e_seconds", bounds=LONG_BUCKETS
    )
    tokens = counter(
        "Tokens that answers tell in their `usage`: `prompt`, `cached` (of those), `completion`.", "kind"
    )


class Meter:
    """One request: from its arrival to its end. `Meters.end` counts it."""

    __slots__ = (
        *(
            "arrived_s",
            "body_bytes",
            "engine",
            "events",
            "failed_inside",
            "first_s",
            "last_s",
            "model",
            "outcome",
        ),
        *("_itl", "_last", "_stream", "slo", "tenant", "usage_tail"),
    )

    def __init__(self, arrived_s: float, tenant: str) -> None:
        self.arrived_s = arrived_s
        self.tenant = tenant
        self.body_bytes = 0
        self.model = ""
        self.engine = ""
        self.slo = ""
        self.outcome = ""
        """A word: `ok`, `client_error`, `cancelled`, or the code of a Failure."""
        self.first_s = 0.0
        self.last_s = 0.0
        self.events = 0
        self.failed_inside = False
        """Whether the answer began with an error although its status was 200."""
        self._stream = False
        self._itl: Histogram | None = None
        self._last = b""
        self.usage_tail = b""

    def begins(self, now_s: float, part: bytes, *, stream: bool, itl: Histogram) -> None:
        """The first part of the answer's body has come."""
        self.first_s = self.last_s = now_s
        self._stream, self._itl = stream, itl
        self.failed_inside = part[:64].lstrip().startswith(_ERRORS)
        self.events = part.count(_EVENT) if stream else 0
        self._last = part

    def part(self, now_s: float, part: bytes) -> None:
        """A further part has come."""
        if self._stream:
            count = part.count(_EVENT)
            self.events += count
            if count and self._itl is not None:
                self._itl.add(now_s - self.last_s)
        self.last_s = now_s
        self.usage_tail, self._last = self._last, part

    def spliced(self, splice: Spliced) -> None:
        """All further parts were passed on by a thread, which has measured them."""
        self.events += splice.events
        if self._itl is not None:
            self._itl.add_counts(splice.gaps, splice.gaps_s)
        self.last_s = splice.last_s
        self.usage_tail, self._last = b"", splice.tail

    def tokens(self) -> dict[str, int]:
        """Tokens by kind, as the answer's end tells them."""
        tail = self.usage_tail[-_USAGE_TAIL_BYTES:] + self._last[-_USAGE_TAIL_BYTES:]
        found: dict[str, int] = {}
        beside: dict[bytes, int] = {}
        end = tail.find(_KEY_END)
        while end >= 0:  # the last of each kind counts
            word = tail[tail.rfind(b'"', max(0, end - _LONGEST_KEY), end) + 1 : end]
            kind, count = _USAGE.get(word), _COUNT.match(tail, end + len(_KEY_END))
            if count is not None and kind is not None:
                found[kind] = int(count[1])
            if count is not None and word in _BESIDE:
                beside[word] = int(count[1])
            end = tail.find(_KEY_END, end + 1)
        if "prompt" in found:
            found["prompt"] += sum(beside.values())
        return found


class Meters(Numbers):
    """All measurements of a gateway. Belongs to the event loop."""

    by_labels = parts_by("tenant model engine", Series, lambda self: self.series)
    received = counter(
        "Requests received, by class of service; those that were refused included.",
        "tenant",
        "slo",
        name="slo_requests",
    )
    met = counter(
        "Requests that were answered within the times of their class of service.",
        "tenant",
        "slo",
        name="slo_met",
    )
    retries = counter("Requests sent to a further engine, by what the engine before had done.", "reason")
    mistaken = counter(
        "Requests of whose prompt an engine reports less than half as cached of what the gateway expected.",
        "engine",
        name="mistaken_prefixes",
    )

    def __init__(self, slo: Mapping[str, SloSettings], now_s: Callable[[], float]) -> None:
        self.slo = slo
        self._now_s = now_s
        self.series: dict[tuple[str, str, str], Series] = {}
        """By tenant, model and engine; empty words where a request had none."""

    def begin(self, tenant: str) -> Meter:
        """A request has arrived."""
        return Meter(self._now_s(), tenant)

    def of(self, meter: Meter) -> Series:
        """The series of a request."""
        labels = meter.tenant, meter.model, meter.engine
        series = self.series.get(labels)
        if series is None:
            if len(self.series) >= MAX_SERIES:
                labels = OTHER, OTHER, OTHER
            series = self.series.setdefault(labels, Series())
        return series

    def end(self, meter: Meter) -> None:
        """Count a request that has ended."""
        series = self.of(meter)
        outcome = "engine_error" if meter.failed_inside and meter.outcome == OK else meter.outcome
        series.outcomes[outcome] += 1
        name = (meter.tenant, meter.slo)
        self.received[name] += 1
        if outcome != OK or not meter.first_s:
            return
        ttft_s, e2e_s = meter.first_s - meter.arrived_s, meter.last_s - meter.arrived_s
        tokens = meter.tokens()
        for kind, count in tokens.items():
            series.tokens[kind] += count
        more = tokens.get("completion", meter.events) - 1
        tpot_s = (meter.last_s - meter.first_s) / more if more > 0 else 0.0
        series.ttft.add(ttft_s)
        series.e2e.add(e2e_s)
        if more > 0:
            series.tpot.add(tpot_s)
        if self._is_met(meter.slo, ttft_s, tpot_s, e2e_s):
            self.met[name] += 1

    def _is_met(self, name: str, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        wanted = self.slo.get(name)
        if wanted is None:
            return True
        pairs = ((ttft_s, wanted.ttft_ms), (tpot_s, wanted.tpot_ms), (e2e_s, wanted.e2e_ms))
        return all(not limit_ms or 1000 * took_s <= limit_ms for took_s, limit_ms in pairs)
