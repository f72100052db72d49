"""Token hit ratios of the eviction policies of the real pool on a trace of requests.

`KVSTRATA_TRACE` names a file with one JSON object a line, as in the traces published with Mooncake (FAST 2025), with
`timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids` (one id per 512-token block of the prompt;
equal ids are equal prefixes).  Without it, a synthetic trace of similar statistics is made.
"""

from __future__ import annotations

import collections
import hashlib
import heapq
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from benchmarks.common import compared
from kvstrata.native.core import Pool

EXTENT_BYTES = 4096
BLOCK_TOKENS = 512
"""Tokens that one block id of a trace stands for."""
POLICIES = ("LRU", "ARC", "S3FIFO")
SHARES = (0.02, 0.05, 0.10, 0.20)
IDENTITY = bytes(32)


def key_of(block: int) -> bytes:
    """Return the storage key that stands for a block of the trace."""
    return hashlib.sha256(block.to_bytes(8, "little")).digest()


def empty_pool(capacity: int, policy: str) -> Pool:
    """Return a pool that has room for `capacity` extents of EXTENT_BYTES."""
    index_fd = os.memfd_create("policies-index", os.MFD_CLOEXEC)
    extents_fd = os.memfd_create("policies-extents", os.MFD_CLOEXEC)
    try:
        return Pool.create(
            index_fd,
            extents_fd,
            extents_bytes=capacity * EXTENT_BYTES,
            entry_capacity=capacity,
            policy=policy,
            max_session_share=1,
        )
    finally:
        os.close(index_fd)
        os.close(extents_fd)


def pool_hits(prompts: Sequence[TraceRequest], capacity: int, policy: str) -> float:
    """Return the share of the tokens that a pool of `capacity` blocks serves. The pool's extents are never written."""
    pool = empty_pool(capacity, policy)
    hit_tokens = 0
    for prompt in prompts:
        keys = b"".join(key_of(block) for block in prompt.blocks)
        ticket, hits, *_ = pool.lease(keys, 1, [0])
        if ticket:
            pool.release(ticket)
        hit_tokens += min(hits * BLOCK_TOKENS, prompt.tokens)
        parent = keys[(hits - 1) * 32 : hits * 32] if hits else b""
        ticket, outcomes, _ = pool.reserve(keys[hits * 32 :], parent, EXTENT_BYTES, 0, IDENTITY)
        if ticket:
            pool.commit(ticket, [i for i, outcome in enumerate(outcomes) if outcome == 0], check=False)
    pool.close()
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def plain_lru_hits(prompts: Sequence[TraceRequest], capacity: int) -> float:
    """Return the same share for a plain LRU list of blocks; a prompt uses its blocks from the last to the first."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hit_tokens = 0
    for prompt in prompts:
        hits = 0
        while hits < len(prompt.blocks) and prompt.blocks[hits] in cache:
            hits += 1
        hit_tokens += min(hits * BLOCK_TOKENS, prompt.tokens)
        for block in reversed(prompt.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def measure(prompts: Sequence[TraceRequest], shares: Sequence[float]) -> dict[str, dict[float, float]]:
    """Return hit ratios by policy, then by the share of the distinct blocks that the cache holds."""
    distinct = len({block for prompt in prompts for block in prompt.blocks})
    table: dict[str, dict[float, float]] = {}
    for share in shares:
        capacity = max(1, int(distinct * share))
        table.setdefault("plain LRU", {})[share] = plain_lru_hits(prompts, capacity)
        for policy in POLICIES:
            table.setdefault(policy, {})[share] = pool_hits(prompts, capacity, policy)
    return table


def run() -> list[dict[str, Any]]:
    """Measure the pool's policies against a plain LRU on `KVSTRATA_TRACE`, or on the synthetic trace."""
    trace = os.environ.get("KVSTRATA_TRACE", "")
    table = measure(read_trace(Path(trace)) if trace else synthetic_trace(), SHARES)
    plain = table.pop("plain LRU")
    return [
        compared(
            f"hit_ratio_{policy.lower()}",
            hits[0.10],
            "of the tokens, cache of 10 % of the blocks",
            "a plain LRU of blocks",
            plain[0.10],
            least=0.9,
            by_share=hits,
            plain_by_share=plain,
        )
        for policy, hits in table.items()
    ]


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
