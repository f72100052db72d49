"""The simulated engine against vLLM's own scheduler and block pool: the same decisions in every step of a load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_US, EngineModel
from kvstrata.testing.engine_sim.requests import End, SimRequest
from tests.vllm.conftest import run_in_vllm

pytestmark = pytest.mark.vllm

SIZES = {
    "block_tokens": 4,
    "kv_blocks": 16,
    "max_model_tokens": 48,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 16,
}
SEED = 1
REQUESTS = 300


def make_load() -> list[dict[str, Any]]:
    """Requests of three families whose prompts and answers are parts of one sequence; some are aborted.

    Bursts of arrivals and few blocks let requests queue, be preempted, and share, lose and find prefixes.
    """
    source = random.Random(SEED)
    load, step = [], 0
    for number in range(REQUESTS):
        step += source.choice([0, 0, 1, 2, 5, 9])
        family = source.randrange(3)
        tokens = [(family + 1) * 100 + n % 7 for n in range(60)]
        cut = source.randrange(1, 31)
        load.append(
            {
                "name": str(number),
                "arrives": step,
                "leaves": step + source.randrange(40) if source.random() < 0.2 else None,
                "prompt": tokens[:cut],
                "answer": tokens[cut : cut + source.randrange(1, 18)],
            }
        )
    return load


def simulate(load: list[dict[str, Any]]) -> tuple[dict[str, Any], list[list[Any]], SimEngine]:
    """What the simulated engine does when each step takes 1 µs: step n is from n to n + 1 µs."""
    costs = {"step_us": 1, "prefill_token_us": 0, "prefill_pair_us": 0, "decode_sequence_us": 0}
    model = msgspec.convert({**SIZES, **costs, "decode_context_token_us": 0}, EngineModel)
    engine = SimEngine(model)
    calls: list[tuple[int, int, dict[str, Any]]] = []
    for number, each in enumerate(load):
        calls.append((each["arrives"], number, each))
        if each["leaves"] is not None:
            calls.append((each["leaves"], REQUESTS + number, each))
    requests = {}
    for step, number, each in sorted(calls, key=lambda call: call[:2]):
        if number < REQUESTS:
            requests[each["name"]] = SimRequest(each["name"], each["prompt"], answer=each["answer"])
            engine.submit(requests[each["name"]], step * PS_PER_US)
        else:
            engine.abort(each["name"], step * PS_PER_US)
        engine.validate()
    engine.advance(1 << 100)
    told = {
        name: {
            "steps": [at // PS_PER_US - 1 for at in request.token_times_ps],
            "preemptions": request.preemptions,
            "aborted": request.end is End.ABORT,
        }
        for name, request in requests.items()
    }
    batches = [msgspec.to_builtins(events) for _, events in engine.take_events()]
    return told, batches, engine


def renamed(batches: list[list[Any]]) -> list[list[Any]]:
    """Events with each hash replaced by its number in the order of appearance; both sides have hashes of their own."""
    numbers: dict[int, int] = {}

    def number(key: int | None) -> int | None:
        return None if key is None else numbers.setdefault(key, len(numbers))

    for batch in batches:
        for event in batch:
            event["block_hashes"] = [number(key) for key in event["block_hashes"]]
            if "parent_block_hash" in event:
                event["parent_block_hash"] = number(event["parent_block_hash"])
    return batches


def test_the_simulated_engine_schedules_what_vllm_schedules(tmp_path: Path, small_model: Path) -> None:
    load = make_load()
    text = json.dumps({"model": str(small_model), "requests": load, **SIZES})
    real = json.loads(run_in_vllm(tmp_path, "tests.vllm.sim_scheduler", text=text).splitlines()[-1])
    told, batches, engine = simulate(load)
    assert told == real["requests"]
    assert renamed(batches) == renamed([batch for batch in real["events"] if batch])
    # The load has everything that can go wrong in it.
    assert engine.totals.preemptions > 20
    assert engine.totals.cached_tokens > 500
    assert engine.totals.ended[End.ABORT] > 20
