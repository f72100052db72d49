"""Costs of routing and what is chosen by them, in plain Python, from the words of policy/routing/ttft.py."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvstrata.policy.routing.model import Copy, EngineState, Knowledge


class Estimate(NamedTuple):
    """What a request costs at one engine by its best way, in seconds."""

    queue_s: float
    load_s: float
    compute_s: float
    preemption_s: float
    copy: Copy | None
    cached_tokens: int
    load_tokens: int


class Way(NamedTuple):
    """One way of having a prefix."""

    seconds: float
    """Until what is left is computed, without the queue."""
    load_s: float
    left: float
    copy: Copy | None
    cached_tokens: int
    load_tokens: int


def queue_s(engine: EngineState, now_s: float) -> float:
    """Seconds until an engine has computed what was sent to it before."""
    rate = engine.prefill_tokens_s
    drained_s = engine.backlog_tokens / rate - max(0.0, now_s - engine.at_s)
    late_s = 0.0
    if engine.waiting and engine.moved_s is not None:
        late_s = max(0.0, now_s - engine.moved_s - engine.prefill_tokens / rate)
    return max(drained_s, engine.behind_tokens / rate) + late_s


def probability(copy: Copy, knowledge: Knowledge) -> float:
    """How likely it is that a copy can be used."""
    if copy.certainty == "degraded":
        return math.exp(-copy.age_s / knowledge.block_life_s)
    if copy.certainty == "unconfirmed" and copy.age_s > 2 * knowledge.event_lag_s:
        return 0.0
    return 1.0


def estimate(
    engine: EngineState, tokens: int, knowledge: Knowledge, copies: list[Copy], now_s: float
) -> Estimate:
    """The cheapest way at one engine; of equally cheap ones the first. `copies`: its own, then those of anybody."""
    most, token_s = tokens - 1, 1.0 / engine.prefill_tokens_s
    waits_s = queue_s(engine, now_s)

    def ready_in_s(copy: Copy) -> float:
        return max(0.0, copy.ready_at_s - now_s - waits_s) if copy.certainty == "predicted" else 0.0

    sure = min(knowledge.cached.get(engine.name, 0), most)
    held, held_expected = sure, float(sure)
    ways = [Way(token_s * (tokens - held_expected), 0.0, tokens - held_expected, None, sure, 0)]
    for copy in copies:
        if copy.tier != "l0" or copy.engine != engine.name:
            continue
        cached = min(copy.tokens, most)
        expected = cached * probability(copy, knowledge)
        if copy.certainty != "predicted" and expected > held_expected:
            held, held_expected = cached, expected
        wait_s, left = ready_in_s(copy), tokens - expected
        ways.append(Way(wait_s + token_s * left, wait_s, left, copy, cached, 0))
    for copy in copies:
        path = engine.paths.get(copy.tier) if copy.tier != "l0" else None
        cached = min(copy.tokens, most)
        if path is None or cached <= held:
            continue
        chance = probability(copy, knowledge)
        load_s = chance * (path.latency_s + (path.queued_tokens + cached - held) / path.tokens_s)
        load_s += ready_in_s(copy)
        left = tokens - (chance * cached + (1.0 - chance) * held_expected)
        ways.append(Way(load_s + token_s * left, load_s, left, copy, cached, cached - held))
    best = min(ways, key=lambda way: way.seconds)
    excess = max(0, engine.context_tokens + tokens - engine.kv_tokens) if engine.kv_tokens else 0
    rate = engine.prefill_tokens_s
    return Estimate(
        waits_s,
        best.load_s,
        best.left / rate,
        excess / rate,
        best.copy,
        best.cached_tokens,
        best.load_tokens,
    )


def ranked_first(key: int, hashes: list[int]) -> int:
    """The place of the hash that a key ranks first."""
    weights = [(key ^ one) * 0x9E3779B97F4A7C15 % 2**64 for one in hashes]
    return weights.index(max(weights))


def lowest(costs: list[float], count: int, near_share: float) -> tuple[list[int], list[int], list[int]]:
    """Places of the costs of the near-tie, of those below the `count`-th lowest, and of those equal to it."""
    in_order = sorted(costs)
    limit = in_order[0] + abs(in_order[0]) * near_share
    last = in_order[:count][-1]
    places = range(len(costs))
    return (
        [place for place in places if costs[place] <= limit],
        [place for place in places if costs[place] < last],
        [place for place in places if costs[place] == last],
    )
