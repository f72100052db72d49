"""How fast the engine computes prompts, as the scheduler's side measures it over vLLM's steps."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.observability.load_line import LEAST_BATCHES, prompt_work
from tests.harness.scheduler_side import Clock, FakeClient, make_request, make_side, step

TOKENS_S, STEP_S = 10_000.0, 0.005


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rate_is_that_of_the_tokens_alone_however_vllm_plans_its_steps(ahead, world_size):
    """`ahead`: vLLM plans the next step before a step has ended."""
    clock, client = Clock(), FakeClient()
    side = make_side(client, clock, world_size=world_size)
    running: list[tuple[int, float]] = []

    def end_oldest() -> None:
        number, work = running.pop(0)
        clock.now_s += STEP_S + work / TOKENS_S
        side.heard([WorkerReport(number)] * world_size, (), ())

    for number in range(2 * LEAST_BATCHES):
        prompt, decodes = make_request(4_000), make_request(20)
        side.matched_tokens(prompt, 1_000)
        side.matched_tokens(decodes, 20)
        tokens = 300 if number % 2 else 2_000
        plan = step(side, [(prompt, 1_000, tokens), (decodes, 20, 1)])
        assert plan.timed
        running.append((plan.step, prompt_work(1_000, 1_000 + tokens)))
        if len(running) > ahead:
            end_oldest()
        if number == 5:  # vLLM has nothing to do for a while
            while running:
                end_oldest()
            clock.now_s += 60
        assert (client.prompt_tokens_s > 0) == (number - len(running) + 1 >= LEAST_BATCHES)
    whole_step_s = STEP_S + 8_192 / TOKENS_S
    assert client.prompt_tokens_s == pytest.approx(8_192 / whole_step_s, rel=0.001)


def test_steps_that_tell_nothing_of_computing_are_not_measured():
    side = make_side(client := FakeClient(hits=50), settings={"load_mode": "sync"})
    small, loads, generates = make_request(400), make_request(600), make_request(20)
    side.matched_tokens(small, 0)
    side.matched_tokens(generates, 20)
    assert not step(side, [(small, 0, 100)]).timed
    assert not step(side, [(generates, 20, 400)]).timed, "tokens of the answer"
    promised, _ = side.matched_tokens(loads, 0)
    side.allocated(loads, [list(range(1, 200))], promised)
    assert not step(side, [(loads, promised, 200)]).timed, "the step waits for a load"
    side.heard([WorkerReport(1)], (), ())
    assert not client.prompt_tokens_s
