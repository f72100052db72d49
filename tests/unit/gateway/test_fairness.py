"""One tenant's load does not move another's times beyond its share: simulated engines in virtual time."""

from __future__ import annotations

import random

from benchmarks.route_loads import Asked, fresh
from benchmarks.route_queue import QueuedRun, Sender
from kvstrata.config.gateway_model import QueueSettings
from kvstrata.gateway.admission import Standing
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.requests import answer_to

MODEL = EngineModel()
LONGEST = 3_000
"""Tokens of the flood's longest prompts."""
AHEAD_S = 0.1
LONGEST_S = LONGEST * (MODEL.prefill_token_us + LONGEST / 2 * MODEL.prefill_pair_us) * 1e-6
STEPS_S = 6 * MODEL.step_us * 1e-6
"""Steps of which a prompt takes only a part, and the time in which the gateway hears of first tokens."""


def load(draw: random.Random, flood: bool) -> list[Asked]:
    """Requests of `light` once rates are measured, and of `flood` twice what the engines can compute."""
    asked = []
    for number in range(20):
        prompt = fresh(draw, 400)
        asked.append(Asked(3.0 + number / 3, prompt, answer_to(prompt, 5, 0), "light", 0))
    at_s = 0.0
    while flood and at_s < 8.0:
        prompt = fresh(draw, draw.randrange(1_000, LONGEST))
        asked.append(Asked(at_s, prompt, answer_to(prompt, 5, 0), "flood", 0))
        at_s += 0.5 * len(prompt) * MODEL.prefill_token_us * 1e-6 / 2
    return sorted(asked, key=lambda one: one.at)


def light_s(flood: bool, enabled: bool = True) -> list[float]:
    """The times to the first token of `light`, before two engines."""
    run = QueuedRun(
        {"a": MODEL, "b": MODEL},
        QueueSettings(max_requests=1_024 if enabled else 0, ahead_s=AHEAD_S),
        [],
        lambda one: Sender(standing=Standing(one.session)),
    )
    run.serve(load(random.Random(7), flood))
    assert len(run.admission) == 0 == len(run.fleet.queues)
    return [one.ttft_s for one in run.outcomes if one.sender.standing.tenant == "light"]


def test_a_light_tenants_times_grow_by_no_more_than_the_work_ahead_and_two_prompts() -> None:
    bound_s = max(light_s(flood=False)) + AHEAD_S + 2 * LONGEST_S + STEPS_S
    times = light_s(flood=True)
    assert len(times) == 20 and max(times) <= bound_s
    assert max(light_s(flood=True, enabled=False)) > 5 * bound_s, "without the queue the flood is before it"
