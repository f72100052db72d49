"""Rates of engines of known speed at which prompts share steps, always wait or not: right, with and without cuts."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place
from tests.harness.amount import amount

RATE = 10_000.0


class Engine:
    """Computes prompts in their order, a step at a time, each of which has at most `step_tokens` of several prompts."""

    def __init__(self, step_tokens: int, at_once: int) -> None:
        """`at_once`: prompts of which one step may have a part; 1: one after the other."""
        self.now_s = 0.0
        self.step_tokens = step_tokens
        self.at_once = at_once
        self.waiting: deque[list[int]] = deque()
        """Numbers, and tokens that are left."""

    def clock(self) -> float:
        return self.now_s

    def step(self) -> list[int]:
        """Returns the prompts whose first tokens come at its end."""
        room, share = self.step_tokens, -(-self.step_tokens // self.at_once)
        done = []
        for prompt in list(self.waiting):
            taken = min(prompt[1], room, share if self.at_once > 1 else room)
            prompt[1] -= taken
            room -= taken
            if not prompt[1]:
                done.append(prompt[0])
                self.waiting.remove(prompt)
            if not room:
                break
        self.now_s += (self.step_tokens - room) / RATE
        return done


def measured(
    draw: random.Random, sizes: tuple[int, int], step_tokens: int, at_once: int, waiting: int, rests: int
) -> tuple[float, int]:
    """Serve prompts of drawn sizes; returns the rate that was measured and the number of samples.

    `waiting`: prompts that wait all the time. `rests`: after so many all are computed before others come; 0: never.
    """
    engine = Engine(step_tokens, at_once)
    fleet = Fleet(engine.clock)
    [target] = fleet.set_places([Place("a", Address("127.0.0.1", 1, False))])
    fleet.up(target, {"m": {}})
    timed = {}
    sent = computed = 0
    while computed < 3_000:
        while len(engine.waiting) < waiting and not (rests and sent and not sent % rests and engine.waiting):
            tokens = draw.randrange(*sizes)
            timed[sent] = fleet.began(target, str(sent), tokens, tokens)
            engine.waiting.append([sent, tokens])
            sent += 1
        for number in engine.step():
            fleet.answers(target, str(number), timed[number])
            fleet.ended(target, str(number))
            computed += 1
    return fleet.rates.rate("a", 0.0), fleet.rates.samples("a")


SIZES = [((100, 1_000), 2_048), ((500, 1_500), 2_048), ((50, 20_000), 2_048), ((4_000, 30_000), 8_192)]
"""Tokens of a prompt, and of a step."""
CASES = list(itertools.product(SIZES, (2, 20, 100), (1, 4), (0, 12, 24, 70)))


@pytest.mark.parametrize(("prompts", "waiting", "at_once", "rests"), amount(CASES[::11], CASES))
def test_the_rate_is_right(
    prompts: tuple[tuple[int, int], int], waiting: int, at_once: int, rests: int
) -> None:
    sizes, step_tokens = prompts
    seed = amount(7, random.randrange(1 << 30))
    rate, samples = measured(random.Random(seed), sizes, step_tokens, at_once, waiting, rests)
    assert samples >= 8, seed
    assert rate == pytest.approx(RATE, rel=0.04), seed
