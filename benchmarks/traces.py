"""Traces of requests that several benchmarks replay: a published one, or a synthetic one."""

from __future__ import annotations

import heapq
import math
import random
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

BLOCK_TOKENS = 512
"""Tokens that one block id of a trace stands for."""


class TraceRequest(NamedTuple):
    """One line of a trace: time, tokens of prompt and answer, ids of the prompt's blocks (the last may be partial)."""

    tokens: int
    blocks: list[int]
    at_ms: float
    output_tokens: int


class _TraceLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int]


_trace_line = msgspec.json.Decoder(_TraceLine).decode


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace in the format that was published with Mooncake (FAST 2025).

    Its JSON lines have `timestamp`, `input_length`, `output_length` and `hash_ids`: one id per 512 tokens of the
    prompt, equal for equal prefixes. Raises ValueError.
    """
    lines = [_trace_line(line) for line in path.read_text().splitlines()]
    if not lines or any(line.input_length > len(line.hash_ids) * BLOCK_TOKENS for line in lines):
        raise ValueError(f"{path}: holds no request, or one with fewer hash_ids than its prompt has blocks")
    return [
        TraceRequest(line.input_length, line.hash_ids, line.timestamp, line.output_length) for line in lines
    ]


def synthetic_trace(requests: int = 6000, seed: int = 1) -> list[TraceRequest]:
    """A trace of conversations, in which the prompt of each turn is the previous prompt and some further blocks.

    The gap between turns is log-normal: its median is 3 % of the trace, and nine gaps in ten are below 14 %.  Most
    conversations have one turn, and one conversation in ten begins with a shared system prompt.  Requests come at three
    per second.
    """
    chance = random.Random(seed)
    outputs = random.Random(f"outputs {seed}")
    fresh = iter(range(1 << 60))
    shared = [[next(fresh) for _ in range(chance.randint(1, 4))] for _ in range(5)]
    turns: list[tuple[float, list[int]]] = []
    trace = []
    for now in range(requests):
        if turns and turns[0][0] <= now:
            blocks = heapq.heappop(turns)[1]
        else:
            blocks = list(chance.choice(shared)) if chance.random() < 0.1 else []
        blocks = blocks + [next(fresh) for _ in range(max(1, int(chance.lognormvariate(2.0, 1.0))))]
        output_tokens = max(1, int(outputs.lognormvariate(5.0, 1.0)))
        trace.append(TraceRequest(len(blocks) * BLOCK_TOKENS, blocks, now * 1000 / 3, output_tokens))
        if chance.random() < 0.45:
            gap = chance.lognormvariate(math.log(0.03 * requests), 1.2)
            heapq.heappush(turns, (now + gap, blocks))
    return trace
