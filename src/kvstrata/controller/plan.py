"""Predicts, from measurements, which configuration of a group of engines serves its requests best: pure functions.

A group consists of engines that can compute prompts for each other.  The service of its requests when k of its N
engines prefill is predicted as follows:

1. Requests come in *shapes*: a rate per second, a number of prompt tokens to compute, and a length of answer.  With k >
   0, k engines compute the prompts of the j longest shapes (the best j is used, since gateways split where that costs
   less), and the other engines answer all requests and compute the remaining prompts.  With k = 0 each engine does
   both; where gateways split, the engines divide the work among themselves as with the best k.
2. Prompts take a share p of an engine's time.  With q answer tokens per second and engine, R answers run at a time, by
   Little's law, and a token takes (alone + each · R) / (1 - p); so R = q · alone / (1 - p - q · each).
3. A first token is in time if prompt, queue and hand-over are within the limit.  The queue's tail is that of M/G/1,
   shared by the engines that compute: P(wait > x) = ρ^k · exp(-x · k · (1 - ρ) / h), with h = E[s²] / 2 E[s].
4. An answer is in time if the prompts that are computed beside it take no longer than its limit allows: a compound
   Poisson process whose jump is a prompt's mean size, weighted by size.  R has a Poisson distribution.

Requests of an overloaded fleet count by CAPACITY_SHARE, so the least overloaded of several overloaded fleets is best.

The result changes no routing: where gateways split, fixed roles and limits of requests in flight served fewer requests
in time than the gateways' own choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kvstrata.rpc.cluster_wire import Role

HANDOVER_S = 0.03
CAPACITY_SHARE = 0.01
MOST_SHARE = 0.5
"""Maximum p for the limit of requests in flight."""
LEAST_S = 1e-9
"""Prompts shorter than this count as taking no time."""
MAX_TERMS = 100
"""Maximum number of terms of a Poisson sum; beyond it the normal distribution is used."""
SIZES = ("2", "4")
"""Factors of larger L1s whose benefit is predicted."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and its measured rates."""

    name: str
    prefill_tokens_s: float
    alone_s: float
    each_s: float
    """Time per token of an answer: `alone_s` + `each_s` for each request in flight."""
    role: Role = "both"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A class of similar requests."""

    requests_s: float
    prompt_tokens: float
    """Mean number of prompt tokens to compute."""
    answer_tokens: float
    ttft_s: float = 0.0
    """Limit on the time to first token; 0: no limit."""
    tpot_s: float = 0.0
    """Limit on the time per further token; 0: no limit."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A group of engines and its load."""

    engines: list[Engine]
    """At least one."""
    shapes: list[Shape]
    met_share: float | None = None
    """Share of recent requests that were in time; None: unknown."""
    saved: dict[str, float] = {}
    """Share of all prompts' seconds that an L1 saves, by its size as a factor of the present one: "1" and SIZES."""
    splits: bool = True
    """Whether requests may be split."""

    @property
    def total_s(self) -> float:
        """Requests per second."""
        return sum(one.requests_s for one in self.shapes)


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted service of a fleet."""

    met_s: float
    """Requests in time, per second."""
    busy: float
    """Share of time that the busiest engines are busy; above 1: overloaded."""
    compute_s: float
    """Seconds of prefill per second, over all engines."""
    in_flight: int
    """Maximum number of requests at an answering engine without late answers; 0: no limit."""
    score: float


class Buy(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted benefit of a change of the fleet."""

    what: str
    met_s: float
    """Additional requests in time, per second."""
    compute_s: float
    """Saved seconds of prefill, per second."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for the present fleet, and the benefits of changes."""

    predicted: Predicted
    buys: list[Buy]


def predict(
    engines: Sequence[Engine],
    shapes: Sequence[Shape],
    prefilling: int,
    *,
    splits: bool = True,
) -> Predicted:
    """The service of `engines` if `prefilling` of them, fewer than all, prefill for the others."""
    longest = sorted(shapes, key=lambda one: (-one.prompt_tokens, one.answer_tokens, one.requests_s))
    ranked = _ranked(engines)
    firsts = _counts(ranked) if splits and not prefilling else (prefilling,)
    return max(
        (
            _predicted(ranked[:first], ranked[first:], longest[:j], longest[j:])
            for first in firsts
            for j in (range(len(longest) + 1) if first else (0,))
        ),
        key=lambda one: one.score,
    )


def _predicted(
    first: Sequence[Engine],
    rest: Sequence[Engine],
    apart: Sequence[Shape],
    alone: Sequence[Shape],
) -> Predicted:
    """`first` compute the prompts of `apart`; `rest` answer these, and both compute and answer `alone`."""
    every, total_s = [*apart, *alone], sum(one.requests_s for one in (*apart, *alone))
    rate = _mean([one.prefill_tokens_s for one in (*first, *rest)])
    alone_s, each_s = _mean([one.alone_s for one in rest]), _mean([one.each_s for one in rest])
    here, there = ([(one.requests_s, one.prompt_tokens / rate) for one in some] for some in (alone, apart))
    p, rho = _load(here) / len(rest), _load(there) / max(1, len(first))
    q = sum(one.requests_s * one.answer_tokens for one in every) / len(rest)
    left = 1.0 - p - q * each_s
    running = q * alone_s / left if left > 0 else math.inf
    limit_s = min((one.tpot_s for one in every if one.tpot_s), default=0.0)
    most = (limit_s * (1.0 - min(p, MOST_SHARE)) - alone_s) / each_s if limit_s and each_s > 0 else 0.0
    in_flight = int(min(max(most, 1.0), 1e6)) if limit_s and each_s > 0 else 0
    token_s, spread_s = alone_s + each_s * running, each_s * math.sqrt(running)
    met_s = 0.0
    for some, servers, load, rows, handover_s in (
        (apart, len(first), rho, there, HANDOVER_S),
        (alone, len(rest), p, here, 0.0),
    ):
        for one in some:
            share = 1.0
            if one.ttft_s:
                spare_s = one.ttft_s - one.prompt_tokens / rate - handover_s - token_s
                share = _waits_at_most(spare_s, servers, load, rows)
            if one.tpot_s:
                share *= _answers_in(one, token_s, spread_s, p, here)
            met_s += one.requests_s * share
    busy = max(1.0 - left, rho)
    return Predicted(
        met_s=met_s,
        busy=busy,
        compute_s=_load(here) + _load(there),
        in_flight=in_flight,
        score=met_s + CAPACITY_SHARE * total_s / max(1.0, busy),
    )


def advise(measured: Measured) -> Advice:
    """Predict the present fleet and possible changes."""
    present = predict(*_fleet(measured), splits=measured.splits)
    return Advice(predicted=present, buys=_buys(measured, present))


def _fleet(measured: Measured) -> tuple[list[Engine], list[Shape], int]:
    first = sum(one.role == "prefill" for one in measured.engines)
    return measured.engines, measured.shapes, min(first, len(measured.engines) - 1)


def _buys(measured: Measured, present: Predicted) -> list[Buy]:
    """The benefits of a larger L1, another engine, and another number of prefilling engines."""
    (engines, shapes, now), splits = _fleet(measured), measured.splits
    found = {
        f"{size} × the L1": predict(engines, scaled(shapes, left), now, splits=splits)
        for size in SIZES
        if (left := still_computed(measured.saved, size)) is not None
    }
    like = msgspec.structs.replace(_ranked(engines)[-1], name="", role="both")
    found["another engine"] = predict([*engines, like], shapes, now, splits=splits)
    if not splits:
        found["`split` in the gateways"] = predict(engines, shapes, now)
    if others := [k for k in _counts(engines) if k != now]:
        by_k = {k: predict(engines, shapes, k, splits=splits) for k in others}
        k = max(by_k, key=lambda one: by_k[one].score)
        found[f"{k} of {len(engines)} engines prefilling"] = by_k[k]
    return [
        Buy(what=what, met_s=one.met_s - present.met_s, compute_s=present.compute_s - one.compute_s)
        for what, one in found.items()
    ]


def still_computed(saved: Mapping[str, float], size: str) -> float | None:
    """The share of the now computed tokens that would remain with an L1 of `size` times the size; None: unknown."""
    if not {"1", size} <= saved.keys():
        return None
    computed = 1.0 - saved["1"]
    return min(1.0, max(0.0, (1.0 - saved[size]) / computed)) if computed > 0 else 1.0


def scaled(shapes: Sequence[Shape], factor: float) -> list[Shape]:
    """The same requests with `factor` times the tokens to compute."""
    return [msgspec.structs.replace(one, prompt_tokens=one.prompt_tokens * factor) for one in shapes]


def _ranked(engines: Sequence[Engine]) -> list[Engine]:
    """The engines in the order in which they become prefilling ones: by role, then the fastest first."""
    order = {"prefill": 0, "both": 1, "decode": 2}
    return sorted(engines, key=lambda one: (order[one.role], -one.prefill_tokens_s, one.name))


def _counts(engines: Sequence[Engine]) -> range:
    """The numbers of prefilling engines to try: all for up to 16 engines, at most 16 for more."""
    return range(0, len(engines), 1 + (len(engines) - 1) // 16)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _load(rows: Sequence[tuple[float, float]]) -> float:
    """Seconds of prefill per second."""
    return sum(rate * size for rate, size in rows)


def _waits_at_most(spare_s: float, servers: int, load: float, rows: Sequence[tuple[float, float]]) -> float:
    """The share of requests whose prompt waits at most `spare_s` (step 3)."""
    if spare_s < 0 or load >= 1.0:
        return 0.0
    half_s = _jump_s(rows) / 2.0
    return (
        1.0 - load**servers * math.exp(-spare_s * servers * (1.0 - load) / half_s)
        if half_s > LEAST_S
        else 1.0
    )


def _jump_s(rows: Sequence[tuple[float, float]]) -> float:
    """The mean time of a prompt, weighted by time."""
    seconds = _load(rows)
    return sum(rate * size * size for rate, size in rows) / seconds if seconds > 0 else 0.0


def _answers_in(
    one: Shape, token_s: float, spread_s: float, p: float, rows: Sequence[tuple[float, float]]
) -> float:
    """The share of a shape's answers that are in time (step 4). `spread_s`: standard deviation of `token_s`."""
    if not math.isfinite(token_s):
        return 0.0
    spare_s, jump_s = one.tpot_s - token_s, _jump_s(rows)
    share = _normal(spare_s / spread_s) if spread_s > 0 else float(spare_s >= 0)
    if jump_s < LEAST_S:
        return share
    beside = one.answer_tokens / jump_s
    return share * _poisson(beside * max(0.0, spare_s), beside * p * one.tpot_s)


def _normal(deviations: float) -> float:
    return 0.5 * (1.0 + math.erf(deviations / math.sqrt(2.0)))


def _poisson(most: float, mean: float) -> float:
    """P(X ≤ most) for a Poisson X, interpolated linearly between whole numbers."""
    whole = int(min(most, 1e9))
    if mean > MAX_TERMS / 4 or (mean > 0 and whole > MAX_TERMS):
        return _normal((most - mean) / math.sqrt(mean))
    term = total = math.exp(-mean)
    for number in range(1, whole + 1):
        term *= mean / number
        total += term
    return min(1.0, total + (most - whole) * term * mean / (whole + 1))
