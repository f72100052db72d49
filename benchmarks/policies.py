"""Token hit ratios of the eviction policies, by the real pool, on a trace of requests.

    python -m benchmarks.policies [--trace FILE] [--shares 2,5,10,20]

FILE has one JSON object a line with `input_length` (tokens) and `hash_ids` (one id per 512-token block of the
prompt; equal ids are equal prefixes), as in the traces published with Mooncake (FAST 2025).  Without one, a
synthetic trace of similar statistics is made.  Beside the policies stands a plain LRU of blocks without any pool.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import heapq
import json
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import figure
from kvstrata.native.pool import Pool

BLOCK_TOKENS = 512
EXTENT_BYTES = 4096
POLICIES = ("LRU", "ARC", "S3FIFO")
SHARES = (0.02, 0.05, 0.10, 0.20)
IDENTITY = bytes(32)


class Prompt(NamedTuple):
    """One request: tokens of its prompt and the ids of its blocks, the last of which may be partly filled."""

    tokens: int
    blocks: list[int]


def read_trace(path: Path) -> list[Prompt]:
    """The prompts of a trace file, in order."""
    with path.open() as lines:
        requests = (json.loads(line) for line in lines)
        return [Prompt(request["input_length"], request["hash_ids"]) for request in requests]


def synthetic_trace(requests: int = 6000, seed: int = 1) -> list[Prompt]:
    """Conversations whose next turn comes after a while with all that was said before and some blocks more.

    The gap between turns is log-normal with its median at 3 % of the trace and nine in ten below 14 %; most
    conversations have one turn, and one prompt in ten begins with a shared system prompt.
    """
    chance = random.Random(seed)
    fresh = iter(range(1 << 60))
    shared = [[next(fresh) for _ in range(chance.randint(1, 4))] for _ in range(5)]
    turns: list[tuple[float, list[int]]] = []
    prompts = []
    for now in range(requests):
        if turns and turns[0][0] <= now:
            blocks = heapq.heappop(turns)[1]
        else:
            blocks = list(chance.choice(shared)) if chance.random() < 0.1 else []
        blocks = blocks + [next(fresh) for _ in range(max(1, int(chance.lognormvariate(2.0, 1.0))))]
        prompts.append(Prompt(len(blocks) * BLOCK_TOKENS, blocks))
        if chance.random() < 0.45:
            gap = chance.lognormvariate(math.log(0.03 * requests), 1.2)
            heapq.heappush(turns, (now + gap, blocks))
    return prompts


def key_of(block: int) -> bytes:
    return hashlib.sha256(block.to_bytes(8, "little")).digest()


def pool_hits(prompts: Sequence[Prompt], capacity: int, policy: str) -> float:
    """Share of the tokens that a pool of `capacity` blocks serves. The extents are never written to."""
    index_fd = os.memfd_create("policies-index", os.MFD_CLOEXEC)
    extents_fd = os.memfd_create("policies-extents", os.MFD_CLOEXEC)
    try:
        pool = Pool.create(
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


def plain_lru_hits(prompts: Sequence[Prompt], capacity: int) -> float:
    """The same by a list of blocks in order of use, each prompt used from its end to its start."""
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


def measure(prompts: Sequence[Prompt], shares: Sequence[float]) -> dict[str, dict[float, float]]:
    """Hit ratio by policy and by share of the distinct blocks that the cache holds."""
    distinct = len({block for prompt in prompts for block in prompt.blocks})
    table: dict[str, dict[float, float]] = {}
    for share in shares:
        capacity = max(1, int(distinct * share))
        table.setdefault("plain LRU", {})[share] = plain_lru_hits(prompts, capacity)
        for policy in POLICIES:
            table.setdefault(policy, {})[share] = pool_hits(prompts, capacity, policy)
    return table


def run() -> list[dict[str, Any]]:
    """Figures of `make bench`: the pool's policies against a plain LRU on the synthetic trace."""
    table = measure(synthetic_trace(), (0.05, 0.10))
    figures = []
    for policy in POLICIES:
        value = table[policy][0.10]
        ratio = value / table["plain LRU"][0.10]
        figures.append(
            figure(
                f"hit_ratio_{policy.lower()}",
                value=value,
                unit="token hit ratio, synthetic trace, cache of 10 % of the blocks",
                ratio=ratio,
                target="≥ 0.9 × a plain LRU",
                ok=ratio >= 0.9,
                ratio_to="a plain LRU of blocks",
                at_5_percent=table[policy][0.05],
            )
        )
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; a synthetic trace without it")
    parser.add_argument(
        "--shares",
        type=lambda text: [float(part) / 100 for part in text.split(",")],
        default=list(SHARES),
        help="cache sizes in percent of the distinct blocks (2,5,10,20)",
    )
    arguments = parser.parse_args()
    prompts = read_trace(arguments.trace) if arguments.trace else synthetic_trace()
    references = sum(len(prompt.blocks) for prompt in prompts)
    distinct = len({block for prompt in prompts for block in prompt.blocks})
    print(f"{len(prompts)} prompts, {references} references to {distinct} blocks")
    started = time.monotonic()
    table = measure(prompts, arguments.shares)
    print("cache".ljust(12), *(f"{share:7.0%}" for share in arguments.shares))
    for policy, row in table.items():
        print(policy.ljust(12), *(f"{row[share]:7.3f}" for share in arguments.shares))
    print(f"{time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
