"""Loads for `route_fleet`: requests with their arrival times, all drawn from a seed.

Each load is a list of `Asked` in the order of arrival; `at_rate` sets its speed.  Conversations are drawn whole, so a
turn contains the answers before it, and arrive whether or not the turn before has ended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import sized
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.requests import answer_to

VOCABULARY = 100_000
MAX_TOKENS = 32_000
BURST_PREFIX, BURST_S = 6_000, 1.0
SIBLINGS = sized(1_000, 10)


class Asked(NamedTuple):
    """A request."""

    at: float
    """Time of arrival, in units that `at_rate` turns into seconds."""
    prompt: list[int]
    answer: bytes
    session: str
    shared: int
    """Tokens of the prompt that a request before it had too: what an unlimited cache of all engines would find."""
    hot: bool = False
    """Whether it is of the burst."""


def fresh(draw: random.Random, count: int) -> list[int]:
    """Tokens that no other prompt has there."""
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def length(draw: random.Random, median: float, spread: float, most: int) -> int:
    """A length from a lognormal distribution."""
    return max(16, min(most, int(median * draw.lognormvariate(0.0, spread))))


def none(draw: random.Random, count: int) -> list[Asked]:
    """Prompts without anything in common."""
    asked, now = [], 0.0
    for number in range(count):
        now += draw.expovariate(1.0)
        prompt = fresh(draw, length(draw, 2_500, 0.8, 16_000))
        asked.append(Asked(now, prompt, answered(draw, prompt), f"s{number}", 0))
    return asked


def answered(draw: random.Random, prompt: list[int], median: float = 120, most: int = 600) -> bytes:
    """An answer of a drawn length."""
    return answer_to(prompt, length(draw, median, 0.7, most), 0)


def shared(draw: random.Random, count: int) -> list[Asked]:
    """System prompts of a Zipf distribution, each with a short question."""
    prompts = [fresh(draw, length(draw, 4_000, 0.5, 12_000)) for _ in range(40)]
    weights = [1.0 / (rank + 1) for rank in range(len(prompts))]
    seen: set[int] = set()
    asked, now = [], 0.0
    for number in range(count):
        now += draw.expovariate(1.0)
        [which] = draw.choices(range(len(prompts)), weights)
        prompt = prompts[which] + fresh(draw, draw.randrange(50, 500))
        known = len(prompts[which]) if which in seen else 0
        seen.add(which)
        asked.append(Asked(now, prompt, answered(draw, prompt), f"s{number}", known))
    return asked


def documents(
    draw: random.Random, count: int, number: int, size: float, own: tuple[int, int], answer: float
) -> list[Asked]:
    """Questions about documents of a Zipf distribution, with answers of about so many tokens."""
    texts = [fresh(draw, length(draw, size, 0.3, 20_000)) for _ in range(number)]
    weights = [1.0 / (rank + 1) for rank in range(number)]
    seen: set[int] = set()
    asked, now = [], 0.0
    for at in range(count):
        now += draw.expovariate(1.0)
        [which] = draw.choices(range(number), weights)
        prompt = texts[which] + fresh(draw, draw.randrange(*own))
        known = len(texts[which]) if which in seen else 0
        seen.add(which)
        asked.append(Asked(now, prompt, answered(draw, prompt, answer, 4_000), f"s{at}", known))
    return asked


def hot(draw: random.Random, count: int) -> list[Asked]:
    """One prefix, as of an assistant with tools, and long answers."""
    return documents(draw, count, 1, 4_000, (30, 90), 500)


def retrieved(draw: random.Random, count: int) -> list[Asked]:
    """Long documents, some of them popular."""
    return documents(draw, count, 40, 12_000, (50, 300), 400)


def reasoning(draw: random.Random, count: int) -> list[Asked]:
    """Short questions without anything in common, and very long answers."""
    return documents(draw, count, count, 400, (50, 300), 2_000)


def chats(draw: random.Random, count: int) -> list[Asked]:
    """People who talk, and get long answers."""
    return talks(draw, count, said=200, pause=count / 12, first=1_000, turns=8, answer=500)


def long_agents(draw: random.Random, count: int) -> list[Asked]:
    """Agents that write."""
    return talks(draw, count, said=600, pause=count / 40, first=6_000, turns=12, answer=1_000)


def day(draw: random.Random, seconds: float) -> list[Asked]:
    """A day of so much work of one engine, that turns from readers, with long prompts and short answers, to writers.

    A long prompt is the work of computing it; an answer's token is a 130th of 15 ms, since so many answers run beside
    each other at that pace.  The readers' share of the work falls from all to nothing.
    """
    model, asked, now = EngineModel(), list[Asked](), 0.0
    long_s, short_s = 0.42, 0.31  # a reader's and a writer's work on average
    while now < seconds:
        share = 1.0 - now / seconds
        reads = draw.random() < share * short_s / (share * short_s + (1.0 - share) * long_s)
        prompt = fresh(draw, length(draw, 8_000 if reads else 400, 0.4, 24_000))
        words = answered(draw, prompt, 100 if reads else 2_000, 6_000)
        asked.append(Asked(now, prompt, words, f"s{len(asked)}", 0))
        n = len(prompt)
        work_s = n * model.prefill_token_us * 1e-6 + n * n / 2 * model.prefill_pair_us * 1e-6
        now += draw.expovariate(1.0) * (work_s + len(words) * 0.015 / 130)
    return asked


def mixed(draw: random.Random, count: int) -> list[Asked]:
    """Half of one hot prefix, the rest of all kinds."""
    kinds = [(hot, 2), (retrieved, 4), (reasoning, 8), (conversations, 8)]
    made = [one for kind, share in kinds for one in at_one(kind(draw, count // share), count)]
    return sorted(made, key=lambda one: one.at)


def at_one(asked: list[Asked], span: float) -> list[Asked]:
    """The same requests spread over a time."""
    first, last = asked[0].at, asked[-1].at
    scale = span / max(last - first, 1e-9)
    return [one._replace(at=(one.at - first) * scale) for one in asked]


def talks(
    draw: random.Random,
    count: int,
    said: float,
    pause: float,
    first: float,
    turns: int,
    answer: float = 120,
) -> list[Asked]:
    """Conversations: turns of about `said` tokens after `first`, with pauses (in mean times between requests)."""
    asked: list[Asked] = []
    begun = 0.0
    number = 0
    while len(asked) < 1.3 * count:
        begun += draw.expovariate(2.0 / turns)
        number += 1
        now, prompt, known = begun, fresh(draw, length(draw, first, 0.6, 12_000)), 0
        for _ in range(draw.randrange(1, turns + 1)):
            if len(prompt) > MAX_TOKENS - 2_000:
                break
            words = answered(draw, prompt, answer, int(5 * answer))
            asked.append(Asked(now, list(prompt), words, f"s{number}", known))
            known = len(prompt)
            prompt += list(words) + fresh(draw, length(draw, said, 0.8, 6_000))
            now += pause * (0.5 + draw.expovariate(1.0))
    return sorted(asked, key=lambda one: one.at)[:count]


def conversations(draw: random.Random, count: int) -> list[Asked]:
    """People who talk."""
    return talks(draw, count, said=300, pause=count / 12, first=1_500, turns=8)


def agents(draw: random.Random, count: int) -> list[Asked]:
    """Agents with long contexts, who come back soon."""
    return talks(draw, count, said=900, pause=count / 40, first=6_000, turns=12)


def burst(draw: random.Random, count: int) -> list[Asked]:
    """Prompts without anything in common, and in the middle many of one new prefix at once."""
    asked = none(draw, count)
    prefix, middle = fresh(draw, BURST_PREFIX), asked[len(asked) // 2].at
    for number in range(SIBLINGS):
        prompt = prefix + fresh(draw, draw.randrange(50, 300))
        # Times within the burst are scaled by `at_rate` too, so they are set there.
        asked.append(
            Asked(
                middle, prompt, answered(draw, prompt), f"b{number}", BURST_PREFIX if number else 0, hot=True
            )
        )
    return sorted(asked, key=lambda one: one.at)


def trace(path: Path, draw: random.Random, count: int) -> list[Asked]:
    """A part of a published trace: lines with `timestamp`, `output_length` and the `hash_ids` of 512-token blocks."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    begin = draw.randrange(max(1, len(rows) - 2 * count))
    seen: set[int] = set()
    asked = []
    for row in rows[begin:]:
        ids = row["hash_ids"][: MAX_TOKENS // 512]
        prompt = [token for one in ids for token in random.Random(one).choices(range(VOCABULARY), k=512)]
        known = 0
        for one in ids:
            if one not in seen:
                break
            known += 512
        seen.update(ids)
        answer = answer_to(prompt, max(1, min(600, row["output_length"])), 0)
        asked.append(
            Asked(row["timestamp"] / 1_000, prompt, answer, str(ids[0]), min(known, len(prompt) - 1))
        )
        if len(asked) == count:
            break
    return asked


LOADS: dict[str, Callable[[random.Random, int], list[Asked]]] = {
    "conversations": conversations,
    "shared": shared,
    "agents": agents,
    "hot": hot,
    "retrieved": retrieved,
    "reasoning": reasoning,
    "chats": chats,
    "long agents": long_agents,
    "mixed": mixed,
    "none": none,
    "burst": burst,
}


def at_rate(asked: list[Asked], model: EngineModel, engines: float, level: float) -> list[Asked]:
    """The same requests at a share of what the engines could serve if every prefix that was seen were cached."""
    per_batch_s = model.step_us * 1e-6 / 16
    seconds = 0.0
    for one in asked:
        size, new = len(one.prompt), len(one.prompt) - one.shared
        seconds += (
            new * model.prefill_token_us * 1e-6 + new * (size + one.shared) / 2 * model.prefill_pair_us * 1e-6
        )
        step_s = (model.decode_sequence_us + size * model.decode_context_token_us) * 1e-6
        seconds += len(one.answer) * (step_s + per_batch_s)
    span = asked[-1].at - asked[0].at
    scale = seconds / (engines * level) / span
    draw = random.Random(len(asked))
    first = asked[0].at
    timed = [
        one._replace(at=(one.at - first) * scale + (draw.uniform(0.0, BURST_S) if one.hot else 0.0))
        for one in asked
    ]
    return sorted(timed, key=lambda one: one.at)
