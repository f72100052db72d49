"""Measures each request: times, tokens, outcomes, and whether its class of service was met.

The measurements come from Envoy's watcher (marks.py).  Token counts come from the `usage` of an answer; without it,
each stream event with content counts as a token.  Controllers get aggregates for their plan (`measured`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.config.gateway_model import Contract, SloSettings
from kvstrata.gateway.marks import OK
from kvstrata.observability.numbers import LONG_BUCKETS, Numbers, counter, histogram, parts_by
from kvstrata.rpc.cluster_wire import MAX_RATED, MAX_SHAPES, RatedEngine, ShapeCount

if TYPE_CHECKING:
    from kvstrata.gateway.fleet import Fleet, ServingEngine
    from kvstrata.gateway.request import Request

MAX_SERIES = 4_096
"""Maximum number of label sets; requests with further ones count under OTHER."""
MAX_MODELS = 256
"""Maximum number of models with histograms of their own; further ones count under OTHER."""
OTHER = "other"
MAX_GROUP_CHARS = 200
STEP = 32


class Shape(NamedTuple):
    """Key of a group of requests that are summed up."""

    engine: str
    slo: str
    size: int
    """Powers of four of the computed prompt's (upper four bits) and the answer's tokens (lower four bits)."""


class Series(Numbers):
    """Counters of the requests with the same labels."""

    outcomes = counter(
        "Ended requests by outcome: `ok`, `client_error` (an engine's 4xx), `engine_error` (an engine's 5xx, or an "
        "error inside a 200), `broke_off`, `cancelled` by the client, or the code of the gateway's refusal.",
        "outcome",
        name="requests",
    )
    tokens = counter(
        "Tokens in the `usage` of answers: `prompt`, `cached` (a part of `prompt`), `completion`.", "kind"
    )


class Times(Numbers):
    """Histograms of the answered requests of one model."""

    ttft = histogram(
        "Time from a request's arrival to the first token of its answer.",
        name="ttft_seconds",
        bounds=LONG_BUCKETS,
    )
    tpot = histogram("Mean time per token after the first, of each request.", name="tpot_seconds")
    e2e = histogram(
        "Time from a request's arrival to the end of its answer.", name="e2e_seconds", bounds=LONG_BUCKETS
    )


class Meters(Numbers):
    """All measurements of a gateway. Belongs to the event loop."""

    by_labels = parts_by("tenant model engine", Series, lambda self: self.series)
    by_model = parts_by("model", Times, lambda self: self.times)
    received = counter(
        "Requests received, including refused ones, by class of service.",
        "tenant",
        "slo",
        name="slo_requests",
    )
    met = counter(
        "Requests answered within the limits of their class of service.",
        "tenant",
        "slo",
        name="slo_met",
    )
    retries = counter("Retries of requests at another engine, by outcome.", "outcome")
    mistaken = counter(
        "Requests for which an engine reports less than half of the cached prompt that the gateway expected.",
        "engine",
        name="mistaken_prefixes",
    )

    def __init__(self, slo: Mapping[str, SloSettings]) -> None:
        self.slo = slo
        self.series: dict[tuple[str, str, str], Series] = {}
        """By tenant, model and engine; an empty name if a request had none."""
        self.times: dict[str, Times] = {}
        """By model."""
        self.shapes: dict[Shape, list[int]] = {}
        """Sums over answered requests: requests, those within limits, computed prompt tokens, answer tokens."""

    def of(self, request: Request) -> Series:
        """The series of a request."""
        labels = request.sender, request.model, request.engine
        series = self.series.get(labels)
        if series is None:
            if len(self.series) >= MAX_SERIES:
                labels = OTHER, OTHER, OTHER
            series = self.series.setdefault(labels, Series())
        return series

    def _times_of(self, model: str) -> Times:
        if model not in self.times:
            model = model if len(self.times) < MAX_MODELS else OTHER
            self.times.setdefault(model, Times())
        return self.times[model]

    def end(self, request: Request) -> None:
        """Count a request that has ended."""
        series = self.of(request)
        outcome = "engine_error" if request.failed_inside and request.outcome == OK else request.outcome
        series.outcomes[outcome] += 1
        name = (request.sender, request.slo)
        self.received[name] += 1
        if outcome != OK or not request.first_s:
            return
        ttft_s, e2e_s = request.first_s - request.arrived_s, request.last_s - request.arrived_s
        tokens = request.tokens
        for kind, count in tokens.items():
            series.tokens[kind] += count
        more = tokens.get("completion", request.events) - 1
        tpot_s = (request.last_s - request.first_s) / more if more > 0 else 0.0
        times = self._times_of(request.model)
        times.ttft.add(ttft_s)
        times.e2e.add(e2e_s)
        if more > 0:
            times.tpot.add(tpot_s)
        is_met = self._is_met(request.slo, ttft_s, tpot_s, e2e_s)
        self.met[name] += is_met
        self._shape(request, max(1, more + 1), is_met=is_met)

    def _shape(self, request: Request, answer_tokens: int, *, is_met: bool) -> None:
        """Add an answered request to the sums of its shape."""
        prompt = request.tokens.get("prompt", request.wanted.tokens if request.wanted is not None else 1)
        computed = max(1, prompt - request.tokens.get("cached", 0))
        if request.choice is not None and (prefill := request.choice.prefill) is not None:
            computed = max(1, prompt - prefill.cached_tokens)
        size = _power_of_four(computed) << 4 | _power_of_four(answer_tokens)
        shape = Shape(request.engine, request.slo, size)
        if shape not in self.shapes and len(self.shapes) >= MAX_SERIES:
            return
        row = self.shapes.setdefault(shape, [0, 0, 0, 0])
        for at, count in enumerate((1, is_met, computed, answer_tokens)):
            row[at] += count

    def _is_met(self, name: str, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        wanted = self.slo.get(name)
        if wanted is None:
            return True
        pairs = ((ttft_s, wanted.ttft_ms), (tpot_s, wanted.tpot_ms), (e2e_s, wanted.e2e_ms))
        return all(not limit_ms or 1000 * took_s <= limit_ms for took_s, limit_ms in pairs)


def _power_of_four(tokens: int) -> int:
    return min(15, tokens.bit_length() // 2)


class Measured(NamedTuple):
    """The measurements in a heartbeat to the controllers."""

    splits: bool
    rated: list[RatedEngine]
    shapes: list[ShapeCount]


async def measured(fleet: Fleet, meters: Meters, contract: Contract) -> Measured:
    """The measured rates of engines with one rank, and the sums of requests that these have answered.

    Yields to the event loop after each STEP of entries, since all together take milliseconds.
    """
    engines = [one for one in fleet.engines.values() if not one.ranks and one.models]
    apart = contract == "kvstrata" and not fleet.peers
    groups, rated = {}, []
    knows = any(map(fleet.measured, engines))
    for at, one in enumerate(engines):
        if not at % STEP:
            await asyncio.sleep(0)
        groups[one.name] = _group(one, apart=apart)
        if knows and at < MAX_RATED:
            line, rate = fleet.decode_rates.line(one.name), fleet.rates.rate(one.name, 0.0)
            if line is not None and line.alone_s + line.each_s > 0:
                role, url = one.place.role, one.place.url
                rated.append(RatedEngine(url, groups[one.name], role, rate, line.alone_s, line.each_s))
    sums: dict[tuple[str, int, float, float], list[int]] = {}
    for at, (shape, total) in enumerate(list(meters.shapes.items())):
        if not at % STEP:
            await asyncio.sleep(0)
        if (group := groups.get(shape.engine)) is not None:
            slo = meters.slo.get(shape.slo) or SloSettings(name="none")
            row = sums.setdefault((group, shape.size, slo.ttft_ms, slo.tpot_ms), [0, 0, 0, 0])
            for at, count in enumerate(total):
                row[at] += count
    counts = [ShapeCount(*key, *row) for key, row in itertools.islice(sums.items(), MAX_SHAPES)]
    return Measured(bool(contract), rated, counts)


def _group(engine: ServingEngine, *, apart: bool) -> str:
    """Name of the group of engines that serve the same model; `apart`: engines of one instance form a group."""
    name, entry = next(iter(engine.models.items()))
    model = str(entry.get("parent") or entry.get("root") or name)
    place = engine.load.instance if apart else ""
    return "".join(c if c.isprintable() else "?" for c in f"{model} {place}".strip())[:MAX_GROUP_CHARS]
