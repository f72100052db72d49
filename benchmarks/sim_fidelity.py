"""`sim_*`: real vLLM and the simulated engine on the same load.

    python -m benchmarks.sim_fidelity [--seconds 600] [--fit-seconds 120] [--wall-clock] [--results FILE]

Real vLLM 0.32 on the CPU, 19 M parameters, runs in a process that hands it requests at their times and steps it,
without HTTP.  First it serves a load to which the costs of steps are fitted (benchmarks/sim_costs.py);
then another one: other lengths, prefixes, rate and seed.  The simulated engine serves the second load in virtual time
with the fitted costs.  Both begin with an empty cache that is smaller than the load's prompts.

Time is that of the processor which the process has had, and vLLM computes with one thread: so pauses between requests
take no time, and waiting for the processor does not count.  Run it alone all the same: work on the core's other thread
made steps a quarter slower, and so the two loads differ.  With --wall-clock, requests come by the wall's clock, and
vLLM computes with all threads.

The figures are differences: of the median and 99th percentile of the time to the first token and of the answers' tokens
per second, in percent of real vLLM's; of the share of prompt tokens that were cached, in points.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import figure, percentile, scratch, sized
from benchmarks.run import RESULTS, merge
from benchmarks.sim_costs import StepSample, fit_costs
from benchmarks.vllm_hit_ttft import ready
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.requests import SimRequest
from tests.harness import vllm_model
from tests.harness.vllm_run import VllmProcess

MODEL = "19m"
SECONDS = sized(600.0, 5.0)
FIT_SECONDS = sized(120.0, 8.0)
TOLERANCE, POINTS = 15.0, 2.0
VOCABULARY = 32_000
BLOCK_TOKENS, KV_BLOCKS = 32, 200
SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
MAX_TOKENS = 4096
GRACE_S, PATIENCE = 240.0, 10


class Shape(NamedTuple):
    """A load: requests a second, shared prefixes and their longest length, the mean of what follows, mean answer."""

    rate: float
    prefixes: int
    prefix_tokens: int
    own_tokens: int
    answer_tokens: int
    seed: int


FIT = Shape(rate=2.0, prefixes=6, prefix_tokens=400, own_tokens=60, answer_tokens=12, seed=1)
LOAD = Shape(rate=2.5, prefixes=25, prefix_tokens=500, own_tokens=90, answer_tokens=16, seed=2)

Arrival = tuple[float, list[int], int]
"""Seconds from the start, prompt, tokens of the answer."""


def arrivals(shape: Shape, seconds: float) -> list[Arrival]:
    """A Poisson process of requests that begin with one of some prefixes, the first ones more often."""
    draw = random.Random(shape.seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(10, VOCABULARY) for _ in range(count)]

    prefixes = [tokens(draw.randrange(64, shape.prefix_tokens)) for _ in range(shape.prefixes)]
    weights = [1 / (1 + number) for number in range(shape.prefixes)]
    made: list[Arrival] = []
    now = 0.0
    while (now := now + draw.expovariate(shape.rate)) < seconds:
        prefix = draw.choices(prefixes, weights)[0]
        own = min(1 + int(draw.expovariate(1 / shape.own_tokens)), MAX_TOKENS // 2)
        answer = min(2 + int(draw.expovariate(1 / shape.answer_tokens)), MAX_TOKENS // 4)
        made.append((now, prefix + tokens(own), answer))
    return made


class Seen(NamedTuple):
    """What a load's clients see."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float
    hit_percent: float


def seen(load: list[Arrival], first_s: list[float], last_s: list[float], cached: list[int]) -> Seen:
    """The numbers of a load whose requests got their first and last tokens at these times."""
    ttft = [first - at for first, (at, _, _) in zip(first_s, load, strict=True)]
    return Seen(
        percentile(ttft, 0.5) * 1000,
        percentile(ttft, 0.99) * 1000,
        sum(answer for _, _, answer in load) / max(last_s),
        100 * sum(cached) / sum(len(prompt) for _, prompt, _ in load),
    )


def simulated(load: list[Arrival], costs: dict[str, float]) -> Seen:
    """Serve a load in virtual time."""
    model = msgspec.convert(
        {
            **costs,
            **SIZES,
            "block_tokens": BLOCK_TOKENS,
            "kv_blocks": KV_BLOCKS - 1,  # vLLM keeps one
            "max_model_tokens": MAX_TOKENS,
            "kv_events": False,
        },
        EngineModel,
    )
    engine = SimEngine(model)
    requests = [
        SimRequest(str(number), prompt, answer=[VOCABULARY + number] * answer)
        for number, (_, prompt, answer) in enumerate(load)
    ]
    times = [int(at * PS_PER_S) for at, _, _ in load]
    for at_ps, request in zip(times, requests, strict=True):
        engine.submit(request, at_ps)
    engine.advance(1 << 100)
    return seen(
        load,
        [each.first_token_ps / PS_PER_S for each in requests],
        [each.ended_ps / PS_PER_S for each in requests],
        [each.cached_tokens or 0 for each in requests],
    )


def measure(seconds: float, fit_seconds: float, *, wall: bool = False) -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    fit_load, load = arrivals(FIT, fit_seconds), arrivals(LOAD, seconds)
    options = {
        **SIZES,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": KV_BLOCKS,
        "max_model_len": MAX_TOKENS,
        "enable_prefix_caching": True,
        "async_scheduling": False,
    }
    with (
        scratch("fidelity") as folder,
        VllmProcess(
            vllm_model.ensure_model(MODEL),
            folder,
            extra=None,
            options=options,
            environment={} if wall else {"OMP_NUM_THREADS": "1"},
        ) as vllm,
    ):
        told = []
        for each in (arrivals(FIT._replace(seed=3), min(fit_seconds, 2.0)), fit_load, load):
            vllm.send("serve", arrivals=each, own_time=not wall)
            told.append(vllm.result(GRACE_S + PATIENCE * each[-1][0]))
            vllm.ask("reset_prefix_cache")
        vllm.quit()
    _, fitting, real = told
    costs = fit_costs(StepSample(*step) for step in fitting["steps"])
    started = time.perf_counter()
    virtual = simulated(load, costs)
    took_s = time.perf_counter() - started
    served = real["requests"]
    actual = seen(
        load,
        [each["first_s"] for each in served],
        [each["last_s"] for each in served],
        [each["cached_tokens"] for each in served],
    )
    more = {
        "seconds": seconds,
        "clock": "wall" if wall else "processor",
        "requests": len(load),
        "costs": costs,
        "real": actual._asdict(),
        "simulated": virtual._asdict(),
        "busy_share": sum(step[0] for step in real["steps"]) / 1e6 / seconds,
        "simulated_in_s": took_s,
    }
    figures = []
    for field in ("ttft_p50_ms", "ttft_p99_ms", "tokens_per_s", "hit_percent"):
        of_vllm, of_sim = getattr(actual, field), getattr(virtual, field)
        points = field == "hit_percent"
        off = of_sim - of_vllm if points else 100 * (of_sim / of_vllm - 1)
        bound = POINTS if points else TOLERANCE
        figures.append(
            figure(
                f"sim_{field.removesuffix('_ms')}",
                value=off,
                unit="points" if points else "%",
                ratio=of_sim / of_vllm if of_vllm else 1.0,
                ratio_to=f"real vLLM's {of_vllm:.4g}",
                target=f"within {bound:g} {'points' if points else '%'}",
                ok=abs(off) <= bound,
                **more,
            )
        )
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    return measure(SECONDS, FIT_SECONDS)


def main() -> None:
    """Run the command line, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of the load (%(default)g)")
    parser.add_argument(
        "--fit-seconds", type=float, default=FIT_SECONDS, help="and of the other one (%(default)g)"
    )
    parser.add_argument("--wall-clock", action="store_true", help="let requests come by the wall's clock")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="where the figures go (build/bench.json)",
    )
    arguments = parser.parse_args()
    found = measure(arguments.seconds, arguments.fit_seconds, wall=arguments.wall_clock)
    merge(found, arguments.results)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
